"""`incvec study`: the figures of the paper, from finished runs and their records.

Every command writes a PNG, a PDF and a JSON file with all numbers of the figure, and prints the main ones. `draw` makes
the figures again from the JSON files, `mean` the mean of a figure over seeds. Tasks are counted from 1 here, as in the
paper, and from 0 in the JSON files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from incvec.cli.common import DataRoot, say
from incvec.config import digest
from incvec.errors import DataError, check_out
from incvec.study.figures import find_figures, mean_figure, redraw, write_figure
from incvec.study.figures.tables import TABLES
from incvec.study.oracle_gap import oracle_gap
from incvec.study.runs import load_runs

if TYPE_CHECKING:  # importing torch takes seconds
    from incvec.data import Dataset
    from incvec.study.geometry.evaluation import EvaluationOptions, Progress

app = typer.Typer(no_args_is_help=True, help="Figures of finished runs: paths, trade-off, plane, gap, curvature.")
Start = Literal["oracle", "own"]
Backend = Literal["auto", "graph", "loop"]
BatchNormMode = Literal["interpolate", "recalibrate"]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, the plain method first.", show_default=False)]
OneRun = Annotated[Path, typer.Argument(help="The folder of the run.", show_default=False)]
Oracle = Annotated[Path | None, typer.Option(help="The folder of the oracle's run.", show_default=False)]
Ivt = Annotated[Path | None, typer.Option(help="The folder of the run with IVT.", show_default=False)]
AddOnRun = Annotated[Path, typer.Option("--ivt", help="The run with IVT, or with any add-on.", show_default=False)]
StartOption = Annotated[Start, typer.Option(help="Start at the oracle's model, if one is given, or at each run's own.")]
TaskFrom = Annotated[int, typer.Option(min=1, help="The path starts after this task.")]
PointCount = Annotated[int, typer.Option("--points", min=2, help="Points of a path, both ends included.")]
GridSize = Annotated[int, typer.Option(min=2, help="Points of the grid on each side.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the figure and its numbers.")]
Name = Annotated[str | None, typer.Option(help="Name of the files, without suffix.", show_default="by the command")]
FIGURES = Path("figures")
DIGITS = "runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0"
DIGITS_ORACLE = f"{DIGITS} --oracle runs/digits-podnet-oracle-3-s0"


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="study")


@dataclass(frozen=True)
class CommonOptions:
    """Options of every command that evaluates snapshots."""

    images: Annotated[
        int | None, typer.Option(min=1, help="Test images per task, evenly over its classes.", show_default="all")
    ] = None
    batchnorm: Annotated[BatchNormMode, typer.Option(help="BatchNorm statistics between the ends.")] = "interpolate"
    data_root: DataRoot = None
    out: Out = FIGURES
    name: Name = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="the run's")] = None
    backend: Annotated[Backend, typer.Option(help="One CUDA graph per point, or an eager loop.")] = "auto"

    def evaluation(self, points: int, start: Start = "own") -> EvaluationOptions:
        from incvec.study.geometry.evaluation import EvaluationOptions

        return EvaluationOptions(points, self.images, self.batchnorm, start, self.backend, self.device)

    @contextmanager
    def evaluating(self, run: Path) -> Iterator[tuple[Dataset, Progress]]:
        """The data set that a run was trained on, and a function that shows the number of points done."""
        from incvec.data import load_dataset
        from incvec.engine.threads import single_thread_for_small_images
        from incvec.study.geometry.snapshots import run_config, run_metadata

        config = run_config(run)
        data = load_dataset(config.dataset, self.data_root, **config.data_options())
        if data.fingerprint != run_metadata(run)["fingerprint"]:
            raise DataError(f"{run} was trained on other images than those of {config.dataset} in {self.data_root}.")
        with single_thread_for_small_images(data), Console().status("") as status:
            yield data, lambda name, done, total: status.update(f"{name}: {done} of {total} points")

    def write(self, data: dict[str, Any]) -> None:
        write_and_print(data, self.out / (self.name or data["kind"]))


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of `CommonOptions` in place of its parameter `common`."""
    others = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "common"]
    fields = list(inspect.signature(CommonOptions, eval_str=True).parameters.values())
    names = {field.name for field in fields}
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*others, *fields)]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        common = CommonOptions(**{name: value for name, value in given.items() if name in names})
        check_out(common.out, "a figure", "-o")
        command(**{name: value for name, value in given.items() if name not in names}, common=common)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


@app.command(
    epilog=f"[bold]Examples[/bold]\n\nincvec study path {DIGITS_ORACLE}\n\n"
    "incvec study path RUN --task-from 2 --task-to 4 --axis share --images 500"
)
@with_common_options
def path(
    runs: Runs,
    common: CommonOptions,
    oracle: Oracle = None,
    ivt: Ivt = None,
    start: StartOption = "oracle",
    axis: Annotated[Literal["distance", "share"], typer.Option(help="The paper's λ, or 0 to 1.")] = "distance",
    task_from: TaskFrom = 1,
    task_to: Annotated[int | None, typer.Option(min=2, help="It ends after this one.", show_default="last")] = None,
    points: PointCount = 51,
) -> None:
    """Accuracy and loss along the straight line from an earlier model to a later one, and the barrier on it.

    The barrier is the largest deviation of the curve, for the worse, from the straight line between its ends.
    """
    last = None if task_to is None else task_to - 1
    common.write({**paths(runs, ivt, oracle, common, [last], task_from - 1, points, start)[0], "axis": axis})


@app.command(epilog=f"[bold]Example[/bold]\n\nincvec study tradeoff {DIGITS} --task-to 2 --task-to 4")
@with_common_options
def tradeoff(
    runs: Runs,
    common: CommonOptions,
    oracle: Oracle = None,
    ivt: Ivt = None,
    start: StartOption = "oracle",
    task_from: TaskFrom = 1,
    task_to: Annotated[
        list[int] | None, typer.Option(min=2, help="It ends after this one; one panel for each.", show_default="last")
    ] = None,
    points: PointCount = 51,
) -> None:
    """Accuracy on the old classes against that on the new ones along the path, with a linear fit."""
    ends = [last - 1 for last in task_to] if task_to else [None]
    panels = paths(runs, ivt, oracle, common, ends, task_from - 1, points, start)
    common.write({"kind": "tradeoff", "panels": panels})


@app.command(epilog=f"[bold]Example[/bold]\n\nincvec study plane {DIGITS_ORACLE} --task 2 --size 21")
@with_common_options
def plane(
    run: OneRun,
    common: CommonOptions,
    ivt: AddOnRun,
    oracle: Oracle = None,
    start: StartOption = "oracle",
    task: Annotated[int, typer.Option(min=2, help="The task whose models are shown.")] = 2,
    size: GridSize = 41,
    margin: Annotated[float, typer.Option(min=0, help="Space around the models, relative to their extent.")] = 0.25,
) -> None:
    """Test loss on the plane through the model before a task, the one after it, and the one with IVT.

    The oracle is projected onto the plane. From the third task on, each run has started the task at its own model;
    runs with --set start=SNAPSHOT share one.
    """
    from incvec.study.geometry.planes import run_plane

    with common.evaluating(run) as (data, progress):
        figure = run_plane(run, ivt, oracle, data, task - 1, size, common.evaluation(2, start), margin, progress)
    common.write(figure)


@app.command(epilog="[bold]Example[/bold]\n\nincvec study gap runs -o figures")
def gap(
    records: Annotated[list[Path], typer.Argument(help="Records, or folders with records.", show_default=False)],
    out: Out = FIGURES,
    name: Name = None,
) -> None:
    """Accuracy after each task for methods, with add-ons, their oracles and joint training; the gap closed.

    One figure per method, METHOD-TASKS-gap; a name given for a single figure replaces this one.
    """
    check_out(out, "a figure", "-o")
    figures = oracle_gap(load_runs(records, print_note), lambda text: print_note(f"left out: {text}"))
    several = len({data["dataset"] for data in figures}) > 1
    for data in figures:
        parts = [str(data[key]) for key in ("dataset", "method", "tasks") if key != "dataset" or several]
        parts += [digest(data["changed"])[:6]] if data["changed"] else []
        alone = name is not None and len(figures) == 1
        write_and_print(data, out / "-".join([*([] if alone else parts), name or "gap"]))


@app.command(epilog="[bold]Example[/bold]\n\nincvec study curvature runs/digits-podnet+ivt-3-s0 --points 11")
@with_common_options
def curvature(run: OneRun, common: CommonOptions, points: PointCount = 11) -> None:
    """IVT's Fisher by task and layer group, and the forgetting it predicts against the measured one."""
    from incvec.study.geometry.curvature import run_curvature

    with common.evaluating(run) as (data, progress):
        figure = run_curvature(run, data, common.evaluation(points), progress)
    common.write(figure)


@app.command("all", epilog=f"[bold]Example[/bold]\n\nincvec study all {DIGITS_ORACLE} --size 21")
@with_common_options
def all_figures(
    run: OneRun,
    common: CommonOptions,
    ivt: AddOnRun,
    oracle: Annotated[Path, typer.Option(help="The folder of the oracle's run.", show_default=False)],
    joint: Annotated[Path | None, typer.Option(help="The folder of joint training.", show_default=False)] = None,
    points: PointCount = 51,
    size: GridSize = 41,
) -> None:
    """All figures of one method with their default settings: NAME-path, -tradeoff, -plane, -gap, -curvature.

    The path runs from the first task to the last one. Unless --batchnorm recalibrate is given, it is drawn a second
    time with BatchNorm statistics measured at every point (NAME-recalibrated-path): a barrier may be due to the
    statistics alone. The trade-off ends at the second, the middle and the last task; the plane is that of the second
    task. If a run started at the snapshot of another run, the task of that snapshot is the first one.
    """
    from incvec.study.geometry.planes import check_addon
    from incvec.study.geometry.snapshots import first_task, last_task, run_config

    check_addon(run, ivt)
    first = 1 + max(first_task(each) for each in (run, ivt, oracle))
    last = 1 + last_task(run)
    prefix = f"{common.name}-" if common.name else ""

    def options(name: str) -> dict[str, Any]:
        return {**vars(common), "name": prefix + name}

    line: dict[str, Any] = {"runs": [run, ivt], "oracle": oracle, "task_from": first, "points": points}
    path(**line, **options("path"))
    if common.batchnorm != "recalibrate":
        path(**line, **{**options("recalibrated-path"), "batchnorm": "recalibrate"})
    tradeoff(**line, task_to=sorted({first + 1, (first + last + 1) // 2, last}), **options("tradeoff"))
    plane(run=run, ivt=ivt, oracle=oracle, task=first + 1, size=size, **options("plane"))
    gap([each / "record.json" for each in (run, ivt, oracle, joint) if each is not None], common.out, f"{prefix}gap")
    if "ivt" in run_config(ivt).addons:  # last: only this one needs more than weights
        curvature(run=ivt, **options("curvature"))


@app.command(epilog="[bold]Example[/bold]\n\nincvec study draw results/figures")
def draw(
    files: Annotated[list[Path], typer.Argument(help="JSON files of the other commands, or folders with such files.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the figures.", show_default="that of the JSON file")
    ] = None,
) -> None:
    """Draw figures again from their numbers; needs neither snapshots nor data sets."""
    if out is not None:
        check_out(out, "a figure", "-o")
    figures = find_figures(files)
    if not figures:
        raise DataError(f"no JSON file in {', '.join(map(str, files))} is from `incvec study`.")
    for file in figures:
        print_files(redraw(file, (out or file.parent) / file.stem))


@app.command(epilog="[bold]Example[/bold]\n\nincvec study mean seed-0/path.json seed-1/path.json seed-2/path.json")
def mean(
    files: Annotated[
        list[Path],
        typer.Argument(help="JSON files of one path, trade-off or curvature figure, one per seed.", show_default=False),
    ],
    out: Out = FIGURES,
    name: Annotated[
        str | None, typer.Option(help="Name of the files, without suffix.", show_default="KIND-N-seeds")
    ] = None,
) -> None:
    """The mean of a figure over seeds, with bands of one standard deviation, from the numbers of single seeds.

    Curves are averaged at equal shares of the way. Needs neither snapshots nor data sets.
    """
    check_out(out, "a figure", "-o")
    data = mean_figure(files)
    write_and_print(data, out / (name or f"{data['kind']}-{len(files)}-seeds"))


def paths(
    runs: Sequence[Path],
    ivt: Path | None,
    oracle: Path | None,
    common: CommonOptions,
    ends: Sequence[int | None],
    task_from: int,
    points: int,
    start: Start,
) -> list[dict[str, Any]]:
    """The data of the paths to each end, once the run given with --ivt is known to be one with IVT."""
    from incvec.study.geometry.paths import run_paths
    from incvec.study.geometry.snapshots import require_ivt, run_config

    everyone = list(runs)
    if ivt is not None:
        require_ivt(ivt, run_config(runs[0]))
        everyone.append(ivt)
    options = common.evaluation(points, start)
    with common.evaluating(everyone[0]) as (data, progress):
        return [run_paths(everyone, oracle, data, task_from, end, options, progress) for end in ends]


def write_and_print(data: dict[str, Any], stem: Path) -> None:
    files = write_figure(data, stem)
    Console().print(TABLES[data["kind"]](data).rich())
    print_files(files)


def print_files(files: Sequence[Path]) -> None:
    say(f"written: {', '.join(map(str, files))}")


def print_note(text: str) -> None:
    say(text, style="dim")
