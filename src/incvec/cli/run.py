"""`incvec run`: train one configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from incvec.cli import tensorboard
from incvec.cli.common import DataRoot, PluginFiles, load_plugins, say
from incvec.cli.progress import follow
from incvec.config import RunConfig, assign
from incvec.data import load_dataset
from incvec.data.store.open import is_store
from incvec.engine.build import check_names, pick_device
from incvec.engine.checkpoint import check_finished
from incvec.engine.distributed import init_distributed, is_main_process
from incvec.engine.events import Event
from incvec.engine.run import Run
from incvec.engine.sweep import Loader
from incvec.engine.threads import single_thread_for_small_images
from incvec.errors import ConfigError, DataError, check_out
from incvec.presets import resolve, run_name
from incvec.records import read_record
from incvec.study.runs import run_rows, runs_table

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

EXPERIMENT, OUTPUT, EXECUTION = "Experiment", "Output", "Execution"


class Log(StrEnum):
    tensorboard = "tensorboard"


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(run)


def run(
    method: Annotated[
        str | None,
        typer.Option(help="Method; see `incvec list methods`.", show_default=False, rich_help_panel=EXPERIMENT),
    ] = None,
    addon: Annotated[
        list[str] | None,
        typer.Option(
            help="Add-on, such as ivt; see `incvec list addons`. Repeat for several, applied in this order.",
            show_default=False,
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle",
            help="Train the oracle: all images of the classes seen so far instead of the exemplar memory.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = False,
    tasks: Annotated[
        int | None,
        typer.Option(
            help="Number of incremental tasks after the base task; of all tasks if there is no base task.",
            show_default="from the preset",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Training seed.", show_default="0", rich_help_panel=EXPERIMENT)
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="Preset variant, such as authors; see `incvec list presets`.",
            show_default="paper",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with settings.", show_default=False, rich_help_panel=EXPERIMENT),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One setting, such as ivt.interval=5. Repeat for several.",
            show_default=False,
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    plugin: PluginFiles = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Data set; see `incvec list datasets`.", show_default="digits", rich_help_panel="Data"),
    ] = None,
    data_root: DataRoot = None,
    download: Annotated[
        bool,
        typer.Option("--download", help="Download the data set if it is missing.", rich_help_panel="Data"),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run: record, snapshots, checkpoint.",
            show_default="runs/NAME",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    bases: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which runs share their trained base task.",
            show_default="the folder `bases` next to --out",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    no_share: Annotated[
        bool,
        typer.Option("--no-share", help="Train the base task in this run, without sharing it.", rich_help_panel=OUTPUT),
    ] = False,
    log: Annotated[
        Log | None,
        typer.Option(
            help="Write event files to the run's folder while it trains.", show_default=False, rich_help_panel=OUTPUT
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="auto", rich_help_panel=EXECUTION)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="eager, or graph: each training step compiled and captured as a CUDA graph.",
            show_default="auto",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
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
    try:
        content = yaml.load(file.read_text(), Loader)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {file}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {error}") from None
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
    """Return the record of a finished run, or None if the run is not finished.

    The data set is not loaded for this, except a packed store, which opens at once: its images must be those of the
    run.
    """
    file = folder / "record.json"
    if not file.exists():
        return None
    record, data = read_record(file), None
    if data_root is not None and is_store(data_root):
        with contextlib.suppress(DataError):
            data = load_dataset(config.dataset, data_root, **config.data_options())
    check_finished(config, data, record, file)
    return record
