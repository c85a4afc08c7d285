"""`incvec lab`: the figures of the study, from finished runs and their records.

Every command writes a PNG, a PDF and a JSON with all the numbers behind them, from which `draw` makes the pictures
again, and prints the few that matter.
Tasks are counted from 1 here, as in the paper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from incvec.config import digest
from incvec.data import Dataset, load_dataset
from incvec.errors import DataError, check_out
from incvec.records import read_record, readable
from incvec.study.geometry import curvature as curvatures
from incvec.study.geometry import gap as gaps
from incvec.study.geometry import landscape as landscapes
from incvec.study.geometry.drawing import findings, leave, redraw
from incvec.study.geometry.lines import FORMAT, Setting, walk
from incvec.study.geometry.snapshots import check_made, command, first_account, first_task, last_task, run_config
from incvec.study.geometry.tables import TABLES

app = typer.Typer(no_args_is_help=True, help="Look into finished runs: paths, trade-off, landscape, gap, curvature.")


class AxisChoice(StrEnum):
    distance = "distance"
    share = "share"


class NormChoice(StrEnum):
    interpolate = "interpolate"
    recalibrate = "recalibrate"


class StartChoice(StrEnum):
    oracle = "oracle"
    own = "own"


class WayChoice(StrEnum):
    auto = "auto"
    graph = "graph"
    vmap = "vmap"
    loop = "loop"


Runs = Annotated[list[Path], typer.Argument(help="Folders of runs: the plain method first.", show_default=False)]
OneRun = Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)]
Records = Annotated[list[Path], typer.Argument(help="Records, or folders that hold some.", show_default=False)]
Oracle = Annotated[Path | None, typer.Option(help="The folder of the oracle's run.", show_default=False)]
Ivt = Annotated[Path | None, typer.Option(help="The folder of the run with IVT.", show_default=False)]
WithAddOn = Annotated[Path, typer.Option("--ivt", help="The run with IVT, or any add-on.", show_default=False)]
Start = Annotated[
    StartChoice, typer.Option(help="Begin at the oracle's model, where one is given, or at each run's own.")
]
TaskFrom = Annotated[int, typer.Option(min=1, help="The line begins after this task.")]
Count = Annotated[int, typer.Option(min=2, help="Points of a line, its ends included.")]
Size = Annotated[int, typer.Option(min=2, help="Points of the grid on each side.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the figure and its numbers go.")]
Name = Annotated[str | None, typer.Option(help="Name of the files, without ending.", show_default="by the command")]
FIGURES = Path("figures")


@dataclass(frozen=True)
class How:
    """Options of every command that evaluates snapshots."""

    images: Annotated[
        int | None,
        typer.Option(min=1, help="Test images of each task, evenly over its classes.", show_default="all"),
    ] = None
    batchnorm: Annotated[NormChoice, typer.Option(help="BatchNorm's statistics between the ends.")] = (
        NormChoice.interpolate
    )
    data_root: Annotated[
        Path | None, typer.Option(help="Where the data set's files lie.", envvar="INCVEC_DATA", show_default=False)
    ] = None
    out: Out = FIGURES
    name: Name = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="the run's")] = None
    way: Annotated[
        WayChoice, typer.Option(help="A point a launch (graph), many a launch (vmap), or a piece a launch (loop).")
    ] = WayChoice.auto

    def setting(self, points: int, start: StartChoice = StartChoice.own) -> Setting:
        return Setting(points, self.images, self.batchnorm.value, start.value, self.way.value, self.device)

    def stem(self, kind: str) -> Path:
        return self.out / (self.name or kind)


def with_how(command_: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of `How` in place of its parameter `how`."""
    own = [each for each in inspect.signature(command_, eval_str=True).parameters.values() if each.name != "how"]
    fields = list(inspect.signature(How, eval_str=True).parameters.values())
    shared = {each.name for each in fields}
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *fields)]

    @wraps(command_)
    def called(**given: Any) -> None:
        how = How(**{name: value for name, value in given.items() if name in shared})
        check_out(how.out, "a figure", "-o")
        command_(**{name: value for name, value in given.items() if name not in shared}, how=how)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


@app.command(
    epilog="[bold]Examples[/bold]\n\nincvec lab path runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0 "
    "--oracle runs/digits-podnet-oracle-3-s0\n\nincvec lab path RUN --task-from 2 --task-to 4 --axis share --images 500"
)
@with_how
def path(
    runs: Runs,
    how: How,
    oracle: Oracle = None,
    ivt: Ivt = None,
    start: Start = StartChoice.oracle,
    axis: Annotated[AxisChoice, typer.Option(help="The paper's λ, or 0 to 1.")] = AxisChoice.distance,
    task_from: TaskFrom = 1,
    task_to: Annotated[int | None, typer.Option(min=2, help="It ends after this.", show_default="last")] = None,
    points: Count = 51,
) -> None:
    """Accuracy and loss along the straight line from an earlier model to a later one, and the barrier on it.

    The barrier is the most by which the curve falls short of the straight line between its own ends.
    """
    everyone = with_ivt(runs, ivt)
    data = data_of(everyone[0], how.data_root)
    with Telling() as told:
        found = walk(everyone, oracle, data, task_from - 1, less_one(task_to), how.setting(points, start), told.hear)
    show({**found, "axis": axis.value}, how.stem("path"))


@app.command(
    epilog="[bold]Example[/bold]\n\nincvec lab tradeoff runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0 "
    "--task-to 2 --task-to 4"
)
@with_how
def tradeoff(
    runs: Runs,
    how: How,
    oracle: Oracle = None,
    ivt: Ivt = None,
    start: Start = StartChoice.oracle,
    task_from: TaskFrom = 1,
    task_to: Annotated[
        list[int] | None, typer.Option(min=2, help="It ends after this; repeat for more panels.", show_default="last")
    ] = None,
    points: Count = 51,
) -> None:
    """Accuracy on the old classes against that on the new ones along the line, with a linear fit."""
    everyone = with_ivt(runs, ivt)
    data = data_of(everyone[0], how.data_root)
    setting = how.setting(points, start)
    with Telling() as told:
        panels = [
            walk(everyone, oracle, data, task_from - 1, less_one(end), setting, told.hear)
            for end in (task_to or (None,))
        ]
    show({"format": FORMAT, "kind": "tradeoff", "panels": panels}, how.stem("tradeoff"))


@app.command(
    epilog="[bold]Example[/bold]\n\nincvec lab plane runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0 "
    "--oracle runs/digits-podnet-oracle-3-s0 --task 2 --size 21"
)
@with_how
def plane(
    run: OneRun,
    how: How,
    ivt: WithAddOn,
    oracle: Oracle = None,
    start: Start = StartChoice.oracle,
    task: Annotated[int, typer.Option(min=2, help="The task whose models are shown.")] = 2,
    size: Size = 41,
    margin: Annotated[float, typer.Option(min=0, help="Room around the points, as a share of their extent.")] = 0.25,
) -> None:
    """Test loss on the plane through the model before a task, the one after it, and that with IVT.

    The oracle is projected onto the plane. From the third task on, the runs have begun it at models of their own;
    runs with --set start=SNAPSHOT share one.
    """
    data = data_of(run, how.data_root)
    with Telling() as told:
        found = landscapes.landscape(run, ivt, oracle, data, task - 1, size, how.setting(2, start), margin, told.hear)
    show(found, how.stem("plane"))


@app.command(epilog="[bold]Example[/bold]\n\nincvec lab gap runs -o figures")
def gap(records: Records, out: Out = FIGURES, name: Name = None) -> None:
    """Accuracy after each task for methods, with add-ons, their oracles and joint training; the gap closed."""
    check_out(out, "a figure", "-o")
    files = readable(records, note)
    studies = gaps.gap([read_record(file) for file in files], lambda text: note(f"left out: {text}"))
    for found in studies:
        end = "" if len(studies) == 1 else "-" + "-".join(str(found[key]) for key in ("dataset", "method", "tasks"))
        end += "-" + digest(found["changed"])[:6] if found["changed"] and end else ""
        show(found, out / ((name or "gap") + end))


@app.command(epilog="[bold]Example[/bold]\n\nincvec lab curvature runs/digits-podnet+ivt-3-s0 --points 11")
@with_how
def curvature(run: OneRun, how: How, points: Count = 11) -> None:
    """IVT's Fisher by task and part of the network, and forgetting as it predicts it against the measured."""
    data = data_of(run, how.data_root)
    with Telling() as told:
        found = curvatures.curvature(run, data, how.setting(points), told.hear)
    show(found, how.stem("curvature"))


@app.command(
    "all",
    epilog="[bold]Example[/bold]\n\nincvec lab all runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0 "
    "--oracle runs/digits-podnet-oracle-3-s0 --size 21",
)
@with_how
def everything(
    run: OneRun,
    how: How,
    ivt: WithAddOn,
    oracle: Annotated[Path, typer.Option(help="The folder of the oracle's run.", show_default=False)],
    joint: Annotated[Path | None, typer.Option(help="The folder of joint training.", show_default=False)] = None,
    points: Count = 51,
    size: Size = 41,
) -> None:
    """All the figures of one method, with their usual settings: NAME-path, -tradeoff, -plane, -gap, -curvature.

    The path goes from the first task to the last one, and once more with BatchNorm's statistics measured at every
    point (NAME-recalibrated-path), since a barrier may be one of statistics alone, unless --batchnorm asks for that
    anyway; the trade-off goes to the second, the middle and the last one; the plane is that of the second task. Where a
    run began at another's snapshot, that one's task is the first.
    """
    landscapes.check_addon(run, ivt)
    first = 1 + max(first_task(each) for each in (run, ivt, oracle))
    final = 1 + last_task(run)
    ends = sorted({first + 1, (first + final + 1) // 2, final})
    given: dict[str, Any] = {"oracle": oracle, "start": StartChoice.oracle}
    prefix = f"{how.name}-" if how.name else ""
    of = {kind: {**vars(how), "name": prefix + kind} for kind in ("path", "tradeoff", "plane", "curvature")}
    line: dict[str, Any] = {"axis": AxisChoice.distance, "task_from": first, "task_to": None, "points": points}
    path(runs=[run, ivt], ivt=None, **given, **line, **of["path"])
    if how.batchnorm != NormChoice.recalibrate:
        again = {**of["path"], "name": f"{prefix}recalibrated-path", "batchnorm": NormChoice.recalibrate}
        path(runs=[run, ivt], ivt=None, **given, **line, **again)
    tradeoff(runs=[run, ivt], ivt=None, **given, task_from=first, task_to=ends, points=points, **of["tradeoff"])
    plane(run=run, ivt=ivt, **given, task=first + 1, size=size, margin=0.25, **of["plane"])
    gap([each / "record.json" for each in (run, ivt, oracle, joint) if each is not None], how.out, f"{prefix}gap")
    if "ivt" in run_config(ivt).addons:  # last: it alone asks for more than weights
        curvature(run=ivt, points=11, **of["curvature"])


@app.command(epilog="[bold]Example[/bold]\n\nincvec lab draw results/figures")
def draw(
    files: Annotated[list[Path], typer.Argument(help="JSON files of the other commands, or folders that hold some.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the pictures go.", show_default="beside the numbers")
    ] = None,
) -> None:
    """Draw figures again from their numbers: no snapshots and no data set are needed."""
    if out is not None:
        check_out(out, "a figure", "-o")
    chosen = findings(files)
    if not chosen:
        raise DataError(f"no numbers of `incvec lab` lie in {', '.join(map(str, files))}.")
    for file in chosen:
        tell(redraw(file, (out or file.parent) / file.stem))


# Shared -------------------------------------------------------------------------------------------------------


class Telling:
    """How far it is, on the terminal."""

    def __enter__(self) -> Telling:
        self.status = Console().status("")
        self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def hear(self, who: str, done: int, of: int) -> None:
        self.status.update(f"{who}: {done} of {of} points")


def show(found: dict[str, Any], stem: Path) -> None:
    """Leave the figure and its numbers, and print the few that matter."""
    files = leave(found, stem)
    console = Console()
    for each in TABLES[found["kind"]](found):
        console.print(each)
    tell(files)


def with_ivt(runs: Sequence[Path], ivt: Path | None) -> list[Path]:
    """The runs, and that with IVT after them, once it is known to be one."""
    if ivt is None:
        return list(runs)
    first = run_config(runs[0])
    wanted = command(first, None, addons=(*(name for name in first.addons if name != "ivt"), "ivt"))
    check_made(ivt, wanted)
    if "ivt" not in run_config(ivt).addons:
        raise DataError(f"{ivt} was trained without the add-on ivt. Run first:\n  {wanted}")
    return [*runs, ivt]


def data_of(run: Path, root: Path | None) -> Dataset:
    """The data set a run was trained on, the same images."""
    meta, config = first_account(run), run_config(run)
    data = load_dataset(config.dataset, root, **config.data_options())
    if data.fingerprint != meta["fingerprint"]:
        raise DataError(f"{run} was trained on other images than those of {config.dataset} in {root}.")
    return data


def less_one(task: int | None) -> int | None:
    return None if task is None else task - 1


def tell(files: Sequence[Path]) -> None:
    Console().print(f"written: {', '.join(map(str, files))}", soft_wrap=True, highlight=False, markup=False)


def note(text: str) -> None:
    Console().print(text, style="dim", soft_wrap=True, highlight=False, markup=False)
