"""`incvec run`: train one configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from incvec.cli import tensorboard
from incvec.cli.common import DataRoot, PluginFiles, load_plugins, say
from incvec.cli.progress import follow
from incvec.config import RunConfig, assign, read_yaml
from incvec.data import load_dataset
from incvec.data.store.open import is_store
from incvec.engine.build import check_names, pick_device
from incvec.engine.checkpoint import check_finished
from incvec.engine.distributed import init_distributed, is_main_process
from incvec.engine.events import Event
from incvec.engine.run import Run
from incvec.engine.threads import single_thread_for_small_images
from incvec.errors import ConfigError, DataError, check_out
from incvec.presets import resolve, run_name
from incvec.records import read_record
from incvec.study.run_table import run_rows, runs_table

EXAMPLES = """[bold]Examples[/bold]

incvec run --method podnet --addon ivt --dataset digits

incvec run --method podnet --dataset cifar100 --data-root ~/data --download --tasks 5 --oracle

incvec run --method podnet --addon ivt --set ivt.interval=5 --set podnet.epochs=40 --seed 1

incvec run --config my_run.yaml --set seed=2

incvec run --plugin my_method.py --method mine --addon ivt

torchrun --nproc-per-node 2 -m incvec run --method podnet --dataset cifar100

[bold]Configuration files[/bold]

A file given with --config contains the same settings as YAML: [italic]method: podnet[/italic], \
[italic]addons: \\[ivt][/italic], [italic]tasks: 5[/italic], and one section per method and add-on, such as \
[italic]ivt: {interval: 5}[/italic]. Precedence, highest first: --set, the other options, the file, the preset."""

ADDON_HELP = "Add-on, such as ivt; see `incvec list addons`. Repeat for several, applied in this order."
ORACLE_HELP = "Train the oracle: all images of the classes seen so far instead of the exemplar memory."
TASKS_HELP = "Number of incremental tasks after the base task; of all tasks if there is no base task."
VARIANT_HELP = "Preset variant, such as authors; see `incvec list presets`."
SET_HELP = "One setting, such as ivt.interval=5. Repeat for several."
BASES_HELP = "Folder in which runs share their trained base task."
ENGINE_HELP = "eager, or graph: each training step compiled and captured as a CUDA graph."


class Log(StrEnum):
    tensorboard = "tensorboard"


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(run)


def option(panel: str, text: str, *names: str, default: str | bool = False, metavar: str | None = None) -> Any:
    """An option in one panel of the help; `default` is the text shown as its default."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default, metavar=metavar)


def run(
    method: Annotated[str | None, option("Experiment", "Method; see `incvec list methods`.")] = None,
    addon: Annotated[list[str] | None, option("Experiment", ADDON_HELP)] = None,
    oracle: Annotated[bool, option("Experiment", ORACLE_HELP, "--oracle")] = False,
    tasks: Annotated[int | None, option("Experiment", TASKS_HELP, default="from the preset")] = None,
    seed: Annotated[int | None, option("Experiment", "Training seed.", default="0")] = None,
    variant: Annotated[str | None, option("Experiment", VARIANT_HELP, default="paper")] = None,
    config: Annotated[Path | None, option("Experiment", "YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, option("Experiment", SET_HELP, "--set", metavar="KEY=VALUE")] = None,
    plugin: PluginFiles = None,
    dataset: Annotated[str | None, option("Data", "Data set; see `incvec list datasets`.", default="digits")] = None,
    data_root: DataRoot = None,
    download: Annotated[bool, option("Data", "Download the data set if it is missing.", "--download")] = False,
    out: Annotated[
        Path | None, option("Output", "Folder of the run: record, snapshots, checkpoint.", default="runs/NAME")
    ] = None,
    bases: Annotated[Path | None, option("Output", BASES_HELP, default="the folder `bases` next to --out")] = None,
    no_share: Annotated[
        bool, option("Output", "Train the base task in this run, without sharing it.", "--no-share")
    ] = False,
    log: Annotated[Log | None, option("Output", "Write event files to the run's folder while it trains.")] = None,
    device: Annotated[str | None, option("Execution", "cpu, cuda or cuda:N.", default="auto")] = None,
    engine: Annotated[str | None, option("Execution", ENGINE_HELP, default="auto")] = None,
) -> None:
    """Train one method on one data set, task by task, and write a record of the results.

    Settings that are not given come from a preset: for cifar100 those of the paper. A run that was interrupted resumes
    from its last checkpoint when the same command is given again. A finished run is not trained a second time.
    """
    if no_share and bases is not None:
        raise ConfigError("--bases and --no-share exclude each other; give one of them.")
    load_plugins(plugin)
    given = {
        "method": method,
        "addons": addon or None,
        "dataset": dataset,
        "tasks": tasks,
        "seed": seed,
        "oracle": oracle or None,
        "variant": variant,
        "engine": engine,
        "device": device,
    }
    tree = read_config(config) if config is not None else {}
    tree |= {key: value for key, value in given.items() if value is not None}
    for setting in settings or ():
        assign(tree, setting)
    resolved = resolve_tree(tree)
    folder = out if out is not None else Path("runs") / run_name(resolved)
    check_out(folder, "a run")
    console = Console(quiet=not is_main_process())
    record = read_finished(resolved, folder, data_root)
    if record is not None:
        say(f"already finished: {folder / 'record.json'}", console=console)
    else:
        shared = None if no_share else bases if bases is not None else folder.parent / "bases"
        record = train(resolved, folder, shared, data_root, download, log, console)
    console.print(runs_table(run_rows([record])).rich())


def train(
    config: RunConfig,
    folder: Path,
    bases: Path | None,
    data_root: Path | None,
    download: bool,
    log: Log | None,
    console: Console,
) -> dict[str, Any]:
    """Train or resume a run, with its progress on the console; returns its record."""
    distributed = init_distributed(config.device)
    pick_device(config.device, distributed.local_rank)
    check_names(config)
    if log:
        tensorboard.summary_writer()  # a missing package is reported before data is read
    with distributed.main_process_first():
        data = load_dataset(config.dataset, data_root, download, **config.data_options())
    with single_thread_for_small_images(data):
        events: Iterator[Event] = Run(config, data, folder, bases, distributed).events()
        if log and is_main_process():
            events = tensorboard.log_events(events, folder / "tensorboard")
        record = follow(events, console)
    distributed.close()
    return record


def read_config(file: Path) -> dict[str, Any]:
    """Read the settings of a YAML file."""
    content = read_yaml(file)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file} contains no settings: expected lines such as `method: podnet`.")
    return content


def resolve_tree(tree: dict[str, Any]) -> RunConfig:
    """Return the complete configuration. Add-ons may be given as one string, as in `--set addons=ivt,eopc`."""
    addons = tree.get("addons", [])
    if isinstance(addons, str):
        addons = [name.strip() for name in addons.split(",") if name.strip()]
        tree = {**tree, "addons": addons}
    if not isinstance(addons, list) or not all(isinstance(name, str) for name in addons):
        raise ConfigError(f"addons = {addons!r} is not possible: expected a list of names, such as [ivt].")
    return resolve(tree)


def read_finished(config: RunConfig, folder: Path, data_root: Path | None) -> dict[str, Any] | None:
    """The record of a finished run, or None. Of the data sets, only a packed store is opened and checked."""
    file = folder / "record.json"
    if not file.exists():
        return None
    record, data = read_record(file), None
    if data_root is not None and is_store(data_root):
        with contextlib.suppress(DataError):
            data = load_dataset(config.dataset, data_root, **config.data_options())
    check_finished(config, data, record, file)
    return record
