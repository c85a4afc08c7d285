"""The command line: `incvec run`, `sweep`, `list`, `show`, `report`, `lab`, `data` and `demo`.

A command resolves its configuration, hands it to the engine and shows what comes back; it computes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import incvec
from incvec.cli import data as data_commands
from incvec.cli import report as report_commands
from incvec.cli import sweep as sweeping
from incvec.cli import tensorboard
from incvec.cli.demo import run_demo, steady_threads
from incvec.cli.progress import follow
from incvec.cli.study import app as lab_app
from incvec.config import RunConfig, assign
from incvec.data import load_dataset
from incvec.data.store.open import is_store
from incvec.engine.build import check_names, pick_device
from incvec.engine.checkpoint import check_finished
from incvec.engine.distributed import abort, is_distributed, is_main_process, is_peer_failure, start
from incvec.engine.events import Event
from incvec.engine.run import Run
from incvec.engine.sweep import Loader
from incvec.errors import ConfigError, DataError, IncvecError, check_out
from incvec.presets import resolve, run_name
from incvec.records import read_record, readable
from incvec.study import tables
from incvec.study.catalog import everything, line_below

EXIT_INTERRUPTED = 130  # what shells expect of a program ended by Ctrl-C


class Commands(TyperGroup):
    """Errors a user can put right become one message and an exit status; others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except IncvecError as error:
            complain(str(error))
        except OSError as error:
            if error.errno == errno.EPIPE or error.filename is None:
                raise
            complain(f"{error.filename}: {error.strerror}.")
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            if is_main_process():
                complain(
                    "another process of this run has ended, for the reason it gives (one that was killed gives none); "
                    "so this one ends too. Start the same command again to go on."
                )
            abort()
        except KeyboardInterrupt:
            Console(stderr=True).print("stopped; run the same command again to go on")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise typer.Exit(1)


def complain(text: str) -> None:
    Console(stderr=True).print(Text(f"error: {text}", style="red"), soft_wrap=True)


app = typer.Typer(
    name="incvec",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Class-incremental learning with increment vectors: every method with or without IVT, and its oracle.",
    epilog="Start with [bold]incvec demo[/bold]: four runs on embedded data, a table and a picture, in a minute.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look after data sets.")
app.add_typer(data_app, name="data")
data_commands.register(data_app)
app.add_typer(lab_app, name="lab")
report_commands.register(app)


def tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"incvec {incvec.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# run ------------------------------------------------------------------------------------------------------

RUN_EXAMPLES = """[bold]Examples[/bold]

incvec run --method podnet --addon ivt --dataset digits

incvec run --method podnet --dataset cifar100 --data-root ~/data --download --tasks 5 --oracle

incvec run --method podnet --addon ivt --set ivt.interval=5 --set podnet.epochs=40 --seed 1

incvec run --config mine.yaml --set seed=2

A configuration file holds the same names: [italic]method: podnet[/italic], [italic]addons: \\[ivt][/italic], \
[italic]tasks: 5[/italic], and a section for each method and add-on, such as [italic]ivt: {interval: 5}[/italic]. \
What is given on the command line goes before the file, the file before the paper's preset."""


class Log(StrEnum):
    tensorboard = "tensorboard"


@app.command(epilog=RUN_EXAMPLES)
def run(
    method: Annotated[
        str | None, typer.Option(help="The method; `incvec list methods` names them.", show_default=False)
    ] = None,
    addon: Annotated[
        list[str] | None, typer.Option(help="An add-on; repeat for several, in order.", show_default=False)
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="The data set.", show_default="digits")] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(help="Where its files lie (or shall lie).", envvar="INCVEC_DATA", show_default=False),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            help="Increments after the base classes; all tasks where there is no base.",
            show_default="the data set's",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Training seed.", show_default="0")] = None,
    oracle: Annotated[bool, typer.Option("--oracle", help="Train on the full past in place of the memory.")] = False,
    variant: Annotated[
        str | None,
        typer.Option(help="Which preset, such as authors; `incvec list presets` names them.", show_default="paper"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with any of the settings.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as ivt.interval=5; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder: record, snapshots, checkpoint.", show_default="named after the run"),
    ] = None,
    bases: Annotated[
        Path | None,
        typer.Option(help="Where runs share their trained base task.", show_default="the folder bases beside --out"),
    ] = None,
    no_share: Annotated[bool, typer.Option("--no-share", help="Train the base task here, share nothing.")] = False,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data set if it is missing.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="eager, or graph for a captured step.", show_default="auto")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="auto")] = None,
    log: Annotated[
        Log | None, typer.Option(help="Event files while it runs, in the run's folder.", show_default=False)
    ] = None,
) -> None:
    """Train one method on one data set, task after task, and write its record.

    The same command again goes on from its last checkpoint, or says that it is done.
    """
    if no_share and bases is not None:
        raise ConfigError("--bases and --no-share contradict each other; give one of them.")
    tree = read_config(config) if config is not None else {}
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
    tree |= {key: value for key, value in given.items() if value is not None}
    for setting in settings or ():
        assign(tree, setting)
    resolved = resolve_tree(tree)
    folder = out if out is not None else Path("runs") / run_name(resolved)
    check_out(folder, "a run")
    console = Console(quiet=not is_main_process())
    record = finished(resolved, folder, data_root)
    if record is not None:
        console.print(f"done already: {folder / 'record.json'}", soft_wrap=True, highlight=False, markup=False)
    else:
        ranks = start(resolved.device)
        pick_device(resolved.device, ranks.local)
        check_names(resolved)
        if log:
            tensorboard.writer_type()  # a missing package is told before data are read
        with ranks.first_goes_first():
            data = load_dataset(resolved.dataset, data_root, download, **resolved.data_options())
        shared = None if no_share else bases if bases is not None else folder.parent / "bases"
        with steady_threads(data):
            events: Iterator[Event] = Run(resolved, data, folder, shared, ranks).events()
            if log and is_main_process():
                events = tensorboard.logged(events, folder / "tensorboard")
            record = follow(events, console)
        ranks.close()
    console.print(tables.rich_table(tables.rows([record])))


def read_config(file: Path) -> dict[str, Any]:
    """The settings of a YAML file."""
    try:
        content = yaml.load(file.read_text(), Loader)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {file}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file} holds no settings: expected lines such as `method: podnet`.")
    return content


def resolve_tree(tree: dict[str, Any]) -> RunConfig:
    """A complete configuration; names that are no names are refused before they are looked up."""
    addons = tree.get("addons", [])
    if isinstance(addons, str):
        addons = [part.strip() for part in addons.split(",") if part.strip()]
        tree = {**tree, "addons": addons}
    if not isinstance(addons, list) or not all(isinstance(name, str) for name in addons):
        raise ConfigError(f"addons = {addons!r} is not possible: expected a list of names, such as [ivt].")
    return resolve(tree)


def finished(config: RunConfig, folder: Path, data_root: Path | None) -> dict[str, Any] | None:
    """The record of a run that is done; None where it is not.

    Saying so needs no data. A store tells at once which images it holds, and these have to be the run's.
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


# sweep ----------------------------------------------------------------------------------------------------


@app.command(
    epilog="[bold]Examples[/bold]\n\nincvec sweep digits\n\nincvec sweep cifar100-podnet --data-root ~/data --at-once 4"
    "\n\nincvec sweep mine.yaml --set podnet.epochs=20 --dry-run"
)
def sweep(
    name: Annotated[str, typer.Argument(help="A sweep of the package, or a YAML file of your own.")],
    out: Annotated[Path, typer.Option(help="Where the runs' folders go.")] = Path("runs"),
    data_root: Annotated[
        Path | None, typer.Option(help="Where the data set's files lie.", envvar="INCVEC_DATA", show_default=False)
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="by the device's memory")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only runs with this in their name.", show_default=False)] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting for all runs; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and run nothing.")] = False,
) -> None:
    """Train many runs, several at once on a GPU; what they share is trained once.

    Started again, it does what is left. A run that fails is reported, and the others go on.
    """
    if is_distributed():
        raise ConfigError("a sweep turns its runs in one process; give torchrun a single `incvec run`.")
    check_out(out, "a sweep")
    failed = sweeping.sweep(name, out, data_root, settings or [], at_once, only, Console(), dry_run)
    if failed:
        raise typer.Exit(1)


# list -----------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    methods = "methods"
    addons = "addons"
    datasets = "datasets"
    presets = "presets"
    nets = "nets"
    sweeps = "sweeps"


@app.command("list", epilog="[bold]Examples[/bold]\n\nincvec list\n\nincvec list methods --json")
def list_(
    kind: Annotated[
        Kind | None, typer.Argument(help="Which of them; all where none is named.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Say which methods, add-ons, data sets, presets, networks and sweeps there are."""
    catalog = {name: entries for name, entries in everything().items() if kind is None or name == kind}
    if as_json:
        typer.echo(json.dumps(catalog, indent=1, ensure_ascii=False))
        return
    console = Console()
    for heading, entries in catalog.items():
        console.print(heading, style="bold")
        width = max(len(entry["name"]) for entry in entries)
        for entry in entries:
            line = Text("  ").append(entry["name"].ljust(width), "cyan").append(f"  {entry['summary']}")
            if below := line_below(entry):
                line.append(f"\n{' ' * (width + 4)}{below}", "dim")
            console.print(line, soft_wrap=True)
        console.print()


# show -----------------------------------------------------------------------------------------------------


@app.command(epilog="[bold]Examples[/bold]\n\nincvec show runs\n\nincvec show a/record.json b --markdown")
def show(
    record: Annotated[list[Path], typer.Argument(help="Records, or folders that hold some.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list, nothing rounded.")] = False,
) -> None:
    """Put records side by side: AA, LA and FM in percent, and the share of the oracle gap that is closed.

    The share needs the plain method and its oracle, of the same settings and seed, among the records.
    """
    if markdown and as_json:
        raise ConfigError("--markdown and --json contradict each other; give one of them.")
    files = readable(record, complain)
    rows = tables.rows([read_record(file) for file in files], [str(file) for file in files])
    if as_json:
        typer.echo(json.dumps(tables.plain_data(rows), indent=1, ensure_ascii=False))
    elif markdown:
        typer.echo(tables.markdown(rows))
    else:
        Console().print(tables.rich_table(rows))


# demo -----------------------------------------------------------------------------------------------------


@app.command(epilog="[bold]Example[/bold]\n\nincvec demo --out runs/demo")
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and demo.png go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Training seed.")] = 0,
) -> None:
    """Four runs on embedded digits, no download: finetune, PODNet, PODNet + IVT and PODNet's oracle.

    Prints their table and draws one picture: accuracy over the tasks, and accuracy on the first task along
    the straight line from its model to the last one.
    """
    check_out(out, "the demo")
    run_demo(out, seed, Console())
