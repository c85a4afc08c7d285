"""`incvec run`: train one configuration, with one or several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from incvec.cli.common import (
    DataRoot,
    PluginFiles,
    SeedList,
    complete_addons,
    complete_datasets,
    complete_methods,
    is_torchrun,
    load_plugins,
    option,
    say,
)
from incvec.cli.logs import Log, logged
from incvec.config import RunConfig
from incvec.errors import ConfigError, check_out
from incvec.presets import run_name
from incvec.presets.given import Given
from incvec.presets.origins import render
from incvec.presets.streams import resolve_seeds

EXAMPLES = """[bold]Examples[/bold]

incvec run --method podnet --addon ivt --dataset digits

incvec run --method podnet --addon ivt --epochs 40 --seeds 0,1,2

incvec run --method podnet --addon ivt --set ivt.interval=5 --dry-run

incvec run --method podnet --dataset cifar100 --data-root ~/data --download --tasks 5 --oracle

incvec run --method podnet --dataset folder --data-root ~/pictures

incvec run --config my_run.yaml --set seed=2

incvec run --plugin my_method.py --method mine --addon ivt

torchrun --nproc-per-node 2 -m incvec run --method podnet --dataset cifar100

[bold]Configuration files[/bold]

A file given with --config contains the same settings as YAML: [italic]method: podnet[/italic], \
[italic]addons: \\[ivt][/italic], [italic]tasks: 5[/italic], and one section per method and add-on, such as \
[italic]ivt: {interval: 5}[/italic]. Precedence, highest first: --set, the other options, the file, the preset. \
--dry-run prints such a file, with the origin of every value."""

METHOD_HELP = "Method, such as podnet; see `incvec list methods`. Required, here or in the file of --config."
DATASET_HELP = "Data set; see `incvec list datasets`."
ADDON_HELP = "Add-on, such as ivt; see `incvec list addons`. Repeat for several, applied in this order."
ORACLE_HELP = "Train the oracle: all images of the classes seen so far instead of the exemplar memory."
TASKS_HELP = "Number of incremental tasks after the base task; of all tasks if there is no base task."
BASE_HELP = "Number of classes of the base task; 0: none, all tasks have the same size."
VARIANT_HELP = "Preset variant, such as authors; see `incvec list presets`."
SET_HELP = "One setting, such as ivt.interval=5 or method.momentum=0. Repeat for several."
EPOCHS_HELP = "Epochs of an incremental task, and of the base task unless its own are set."
BASES_HELP = "Folder in which runs share their trained base task."
OUT_HELP = "Folder of the run: record, snapshots, checkpoint. With --seeds: the folder that contains one for each."
LOG_HELP = "csv, tensorboard or wandb: log losses and accuracies while the run trains. Repeat for several."
ENGINE_HELP = "eager, or graph: each training step compiled and captured as a CUDA graph."
DRY_HELP = "Print all settings and where each comes from, without training."


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(run)


def run(
    method: Annotated[
        str | None, option("Experiment", METHOD_HELP, metavar="NAME", autocompletion=complete_methods)
    ] = None,
    addon: Annotated[
        list[str] | None, option("Experiment", ADDON_HELP, metavar="NAME", autocompletion=complete_addons)
    ] = None,
    oracle: Annotated[bool, option("Experiment", ORACLE_HELP, "--oracle")] = False,
    base_classes: Annotated[int | None, option("Experiment", BASE_HELP, default="from the preset")] = None,
    tasks: Annotated[int | None, option("Experiment", TASKS_HELP, default="from the preset")] = None,
    seed: Annotated[int | None, option("Experiment", "Training seed.", default="0")] = None,
    seeds: SeedList = None,
    variant: Annotated[str | None, option("Experiment", VARIANT_HELP, metavar="NAME", default="paper")] = None,
    config: Annotated[Path | None, option("Experiment", "YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, option("Experiment", SET_HELP, "--set", metavar="KEY=VALUE")] = None,
    plugin: PluginFiles = None,
    epochs: Annotated[int | None, option("Training", EPOCHS_HELP, default="from the preset")] = None,
    lr: Annotated[float | None, option("Training", "Learning rate.", default="from the preset")] = None,
    batch_size: Annotated[int | None, option("Training", "Images per step.", default="from the preset")] = None,
    memory: Annotated[int | None, option("Training", "Exemplars per class.", default="from the preset")] = None,
    dataset: Annotated[
        str | None,
        option("Data", DATASET_HELP, metavar="NAME", default="digits", autocompletion=complete_datasets),
    ] = None,
    data_root: DataRoot = None,
    download: Annotated[bool, option("Data", "Download the data set if it is missing.", "--download")] = False,
    out: Annotated[Path | None, option("Output", OUT_HELP, default="runs/NAME")] = None,
    bases: Annotated[Path | None, option("Output", BASES_HELP, default="the folder `bases` next to --out")] = None,
    no_share: Annotated[
        bool, option("Output", "Train the base task in this run, without sharing it.", "--no-share")
    ] = False,
    log: Annotated[list[Log] | None, option("Output", LOG_HELP, metavar="FORMAT")] = None,
    dry_run: Annotated[bool, option("Output", DRY_HELP, "--dry-run")] = False,
    device: Annotated[str | None, option("Execution", "cpu, cuda or cuda:N.", default="auto")] = None,
    engine: Annotated[str | None, option("Execution", ENGINE_HELP, default="auto")] = None,
) -> None:
    """Train one method on one data set, task by task, and write a record of the results.

    Settings that are not given come from a preset: for cifar100 those of the paper. A run that was interrupted resumes
    from its last checkpoint when the same command is given again. A finished run is not trained a second time.
    """
    if no_share and bases is not None:
        raise ConfigError("--bases and --no-share exclude each other; give one of them.")
    if seeds is not None and seed is not None:
        raise ConfigError("--seed and --seeds exclude each other; give one of them.")
    if bases is not None:
        check_out(bases, "a shared base task", "--bases")
    load_plugins(plugin)
    given = Given()
    if config is not None:
        given.read(config)
    flags = {
        "method": method,
        "addons": addon or None,
        "dataset": dataset,
        "base_classes": base_classes,
        "tasks": tasks,
        "seed": seed,
        "oracle": oracle or None,
        "variant": variant,
        "engine": engine,
        "device": device,
        "method.epochs": epochs,
        "method.lr": lr,
        "method.batch_size": batch_size,
        "method.memory": memory,
    }
    for key, value in flags.items():
        if value is not None:
            name = "--addon" if key == "addons" else f"--{key.removeprefix('method.').replace('_', '-')}"
            given.set(key, value, name)
    for setting in settings or ():
        given.set_text(setting)
    configs, stream = resolve_seeds(given.tree(), seeds, data_root)
    several = len(configs) > 1
    if several and is_torchrun():
        raise ConfigError("--seeds trains one run after another; with torchrun, give a single --seed.")
    folders = [
        (out / run_name(each) if several else out) if out is not None else Path("runs") / run_name(each)
        for each in configs
    ]
    for folder in folders:
        check_out(folder, "a run")
    if dry_run:
        print_settings(configs, folders, given.origins() | ({} if seeds is None else {"seed": "--seeds"}), stream)
        return

    from incvec.cli.progress import follow
    from incvec.engine.distributed import is_main_process
    from incvec.engine.launch import launch, read_finished
    from incvec.study.run_table import run_rows, show_tables

    console = Console(quiet=not is_main_process())
    if stream:
        say(stream, console=console)
    records, data = [], None
    for each, folder in zip(configs, folders, strict=True):
        record = read_finished(each, folder, data_root)
        if record is not None:
            say(f"already finished: {folder / 'record.json'}", console=console)
        else:
            shared = None if no_share else bases if bases is not None else folder.parent / "bases"
            consume = logged(lambda events: follow(events, console), log if is_main_process() else (), folder, each)
            record, data = launch(each, folder, shared, data_root, download, consume, data)
        records.append(record)
    for table in show_tables(run_rows(records)):
        console.print(table.rich())


def print_settings(configs: list[RunConfig], folders: list[Path], origins: dict[str, str], stream: str) -> None:
    """Print the configuration as YAML, each value with its origin; folders and stream are comments."""
    for folder in folders:
        typer.echo(f"# {folder} ({'finished' if (folder / 'record.json').exists() else 'to do'})")
    if stream:
        typer.echo(f"# {stream}")
        origins = dict.fromkeys(("base_classes", "tasks"), "the classes of the data root") | origins
    typer.echo(render(configs[0], origins))
