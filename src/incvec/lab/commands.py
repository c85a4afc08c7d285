"""`incvec lab`: the figures of the study, from finished runs and their records.

Every command writes a PNG, a PDF and a JSON with all the numbers behind them, and prints the few that matter.
Tasks are counted from 1 here, as in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from incvec.data import Dataset, load_dataset
from incvec.errors import DataError
from incvec.lab import curvature as curvatures
from incvec.lab import gap as gaps
from incvec.lab import landscape as landscapes
from incvec.lab.figures import draw_path, draw_tradeoff
from incvec.lab.lines import Setting, walk
from incvec.lab.snapshots import command, read_snapshot, run_config
from incvec.records import find_records, read_record

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
    vmap = "vmap"
    loop = "loop"


Runs = Annotated[list[Path], typer.Argument(help="Folders of runs: the plain method first.", show_default=False)]
OneRun = Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)]
Oracle = Annotated[Path | None, typer.Option(help="The folder of the oracle's run.", show_default=False)]
Ivt = Annotated[Path | None, typer.Option(help="The folder of the run with IVT.", show_default=False)]
Start = Annotated[
    StartChoice, typer.Option(help="Begin at the oracle's model, where one is given, or at each run's own.")
]
TaskFrom = Annotated[int, typer.Option(min=1, help="The line begins after this task.")]
Root = Annotated[
    Path | None, typer.Option(help="Where the data set's files lie.", envvar="INCVEC_DATA", show_default=False)
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the figure and its numbers go.")]
Name = Annotated[str | None, typer.Option(help="Name of the files, without ending.", show_default="by the command")]
Images = Annotated[
    int | None,
    typer.Option(min=1, help="Test images of each task, evenly over its classes.", show_default="all"),
]
Norm = Annotated[NormChoice, typer.Option(help="BatchNorm's statistics between the ends.")]
Count = Annotated[int, typer.Option(min=2, help="Points of a line, its ends included.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="the run's")]
Way = Annotated[WayChoice, typer.Option(help="Many points a launch (vmap), or one after the other.")]


@app.command(
    epilog="[bold]Examples[/bold]\n\nincvec lab path runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0 "
    "--oracle runs/digits-podnet-oracle-3-s0\n\nincvec lab path RUN --task-from 2 --task-to 4 --axis share --images 500"
)
def path(
    runs: Runs,
    oracle: Oracle = None,
    ivt: Ivt = None,
    start: Start = StartChoice.oracle,
    axis: Annotated[AxisChoice, typer.Option(help="The paper's λ, or 0 to 1.")] = AxisChoice.distance,
    task_from: TaskFrom = 1,
    task_to: Annotated[int | None, typer.Option(min=2, help="It ends after this.", show_default="last")] = None,
    points: Count = 51,
    images: Images = None,
    batchnorm: Norm = NormChoice.interpolate,
    data_root: Root = None,
    out: Out = Path("figures"),
    name: Name = None,
    device: Device = None,
    way: Way = WayChoice.auto,
) -> None:
    """Accuracy and loss along the straight line from an earlier model to a later one, and the barrier on it.

    The barrier is the most by which the curve falls short of the straight line between its own ends.
    """
    everyone = with_ivt(runs, ivt)
    setting = Setting(points, images, batchnorm.value, start.value, way.value, device)
    console = Console()
    with console.status("") as status:
        found = walk(
            everyone, oracle, data_of(everyone[0], data_root), task_from - 1, less_one(task_to), setting,
            lambda who, done, of: status.update(f"{who}: {done} of {of} points"),
        )  # fmt: skip
    found["axis"] = axis.value
    stem = out / (name or "path")
    files = [*draw_path(found, stem, axis.value), write_json(found, stem)]
    console.print(path_table(found))
    tell(console, files)


@app.command(
    epilog="[bold]Example[/bold]\n\nincvec lab tradeoff runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0 "
    "--task-to 2 --task-to 4"
)
def tradeoff(
    runs: Runs,
    oracle: Oracle = None,
    ivt: Ivt = None,
    start: Start = StartChoice.oracle,
    task_from: TaskFrom = 1,
    task_to: Annotated[
        list[int] | None, typer.Option(min=2, help="It ends after this; repeat for more panels.", show_default="last")
    ] = None,
    points: Count = 51,
    images: Images = None,
    batchnorm: Norm = NormChoice.interpolate,
    data_root: Root = None,
    out: Out = Path("figures"),
    name: Name = None,
    device: Device = None,
    way: Way = WayChoice.auto,
) -> None:
    """Accuracy on the old classes against that on the new ones along the line, with a linear fit."""
    everyone = with_ivt(runs, ivt)
    setting = Setting(points, images, batchnorm.value, start.value, way.value, device)
    console = Console()
    data = data_of(everyone[0], data_root)
    panels = []
    with console.status("") as status:
        for end in [None] if task_to is None else task_to:
            panels.append(
                walk(
                    everyone, oracle, data, task_from - 1, less_one(end), setting,
                    lambda who, done, of: status.update(f"{who}: {done} of {of} points"),
                )
            )  # fmt: skip
    stem = out / (name or "tradeoff")
    files = [*draw_tradeoff(panels, stem), write_json({"format": 1, "kind": "tradeoff", "panels": panels}, stem)]
    for found in panels:
        console.print(tradeoff_table(found))
    tell(console, files)


@app.command(
    epilog="[bold]Example[/bold]\n\nincvec lab plane runs/digits-podnet-3-s0 --ivt runs/digits-podnet+ivt-3-s0 "
    "--oracle runs/digits-podnet-oracle-3-s0 --task 2 --size 21"
)
def plane(
    run: OneRun,
    ivt: Annotated[Path, typer.Option(help="The folder of the run with IVT, or any add-on.", show_default=False)],
    oracle: Oracle = None,
    start: Start = StartChoice.oracle,
    task: Annotated[int, typer.Option(min=2, help="The task whose models are shown.")] = 2,
    size: Annotated[int, typer.Option(min=2, help="Points of the grid on each side.")] = 41,
    margin: Annotated[float, typer.Option(min=0, help="Room around the points, as a share of their extent.")] = 0.25,
    images: Images = None,
    batchnorm: Norm = NormChoice.interpolate,
    data_root: Root = None,
    out: Out = Path("figures"),
    name: Name = None,
    device: Device = None,
    way: Way = WayChoice.auto,
) -> None:
    """Test loss on the plane through the model before a task, the one after it, and that with IVT.

    The oracle is projected onto the plane. From the third task on, the runs have begun it at models of their own;
    runs with --set start=SNAPSHOT share one.
    """
    setting = Setting(2, images, batchnorm.value, start.value, way.value, device)
    console = Console()
    with console.status("") as status:
        found = landscapes.landscape(
            run, ivt, oracle, data_of(run, data_root), task - 1, size, setting, margin,
            lambda who, done, of: status.update(f"{who}: {done} of {of} points"),
        )  # fmt: skip
    stem = out / (name or "plane")
    files = [*landscapes.draw(found, stem), write_json(found, stem)]
    rows = []
    for mark in found["marks"]:
        far = f"{mark['to_oracle']:.2f}" if "to_oracle" in mark else "–"
        who = f"start, after task {task - 1}" if mark["role"] == "origin" else mark["name"]
        numbers = (mark["loss"], mark["accuracy"], mark["to_origin"])
        rows.append([who, *(f"{value:.2f}" for value in numbers), far])
    console.print(table(["model", "loss", "accuracy", "from the start", "from the oracle"], rows))
    if found["starts_apart"] > 0:
        console.print(
            f"the two runs began task {task} at models {found['starts_apart']:.2f} apart; the plane begins at "
            f"that of {found['start_run']}",
            style="dim",
        )
    tell(console, files)


@app.command(epilog="[bold]Example[/bold]\n\nincvec lab gap runs -o figures")
def gap(
    records: Annotated[list[Path], typer.Argument(help="Records, or folders that hold some.", show_default=False)],
    out: Out = Path("figures"),
    name: Name = None,
) -> None:
    """Accuracy after each task for methods, with add-ons, their oracles and joint training; the gap closed."""
    files = find_records(records)
    if not files:
        raise DataError(f"no record lies in {', '.join(map(str, records))}; `incvec run` writes one.")
    console = Console()
    studies = gaps.gap([read_record(file) for file in files])
    for found in studies:
        end = "" if len(studies) == 1 else f"-{found['dataset']}-{found['method']}-{found['tasks']}"
        stem = out / ((name or "gap") + end)
        written = [*gaps.draw(found, stem), write_json(found, stem)]
        rows = []
        for run in found["runs"]:
            share = "–" if run["gap_closed"] is None else f"{100 * run['gap_closed']:.0f} %"
            std = "" if run["LA"]["std"] is None else f" ± {run['LA']['std']:.2f}"
            rows.append([run["name"], str(len(run["seeds"])), f"{run['LA']['mean']:.2f}{std}", share])
        console.print(table(["run", "seeds", "LA", "gap closed"], rows))
        tell(console, written)


@app.command(epilog="[bold]Example[/bold]\n\nincvec lab curvature runs/digits-podnet+ivt-3-s0 --points 11")
def curvature(
    run: OneRun,
    points: Count = 11,
    images: Images = None,
    batchnorm: Norm = NormChoice.interpolate,
    data_root: Root = None,
    out: Out = Path("figures"),
    name: Name = None,
    device: Device = None,
    way: Way = WayChoice.auto,
) -> None:
    """IVT's Fisher by task and part of the network, and forgetting as it predicts it against the measured."""
    setting = Setting(points, images, batchnorm.value, "own", way.value, device)
    console = Console()
    with console.status("") as status:
        found = curvatures.curvature(
            run, data_of(run, data_root), setting,
            lambda who, done, of: status.update(f"{who}: {done} of {of} points"),
        )  # fmt: skip
    stem = out / (name or "curvature")
    files = [*curvatures.draw(found, stem), write_json(found, stem)]
    rows = []
    for row in found["tasks"]:
        whole, sample = row["parts"]["all"], row["predicted_per_sample"]
        ratio = "–" if whole["fisher_ratio"] is None else f"{whole['fisher_ratio']:.3g}"
        rows.append(
            [str(row["task"] + 1), ratio, f"{whole['scale']:.3f}", f"{row['length']:.2f}",
             f"{row['predicted'][-1]:.3g}", "–" if sample is None else f"{sample[-1]:.3g}",
             f"{row['measured'][-1]:.3g}"]
        )  # fmt: skip
    console.print(table(["task", "F / past", "mean S", "moved", "½ d'Fd", "½ d'(B F)d", "measured"], rows))
    tell(console, files)


# Shared -------------------------------------------------------------------------------------------------------


def with_ivt(runs: Sequence[Path], ivt: Path | None) -> list[Path]:
    """The runs, and that with IVT after them, once it is known to be one."""
    if ivt is None:
        return list(runs)
    first = run_config(runs[0])
    wanted = command(first, None, addons=(*(name for name in first.addons if name != "ivt"), "ivt"))
    if not (ivt / "snapshots").is_dir():
        raise DataError(f"there are no snapshots in {ivt}: that run was never made. Run first:\n  {wanted}")
    if "ivt" not in run_config(ivt).addons:
        raise DataError(f"{ivt} was trained without the add-on ivt. Run first:\n  {wanted}")
    return [*runs, ivt]


def data_of(run: Path, root: Path | None) -> Dataset:
    """The data set a run was trained on, the same images."""
    meta = read_snapshot(run, 0)[1]
    config = run_config(run)
    data = load_dataset(config.dataset, root, **config.data_options())
    if data.fingerprint != meta["fingerprint"]:
        raise DataError(f"{run} was trained on other images than those of {config.dataset} in {root}.")
    return data


def less_one(task: int | None) -> int | None:
    return None if task is None else task - 1


def write_json(found: dict[str, Any], stem: Path) -> Path:
    file = stem.with_name(stem.name + ".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return file


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        shown.add_row(*row)
    return shown


def path_table(found: dict[str, Any]) -> Table:
    rows = []
    for curve in found["curves"]:
        accuracy, barrier = curve["accuracy"], curve["barrier"]
        rows.append(
            [curve["name"], f"{curve['length']:.2f}", f"{accuracy['old'][0]:.2f}", f"{min(accuracy['old']):.2f}",
             f"{accuracy['old'][-1]:.2f}", f"{barrier['accuracy']['old']:.2f}", f"{barrier['loss']['old']:.3f}",
             f"{accuracy['new'][-1]:.2f}"]
        )  # fmt: skip
    until = found["task_from"] + 1
    title = f"From task {until} to task {found['task_to'] + 1}; old: the classes up to task {until}"
    headings = ["run", "length", "old: start", "lowest", "end", "barrier", "loss barrier", "new: end"]
    return table(headings, rows, title)


def tradeoff_table(found: dict[str, Any]) -> Table:
    rows = []
    for curve in found["curves"]:
        accuracy, fit = curve["accuracy"], curve["fit"]
        fitted = ["–" if fit[key] is None else f"{fit[key]:.3f}" for key in ("slope", "r2")]
        rows.append([curve["name"], f"{accuracy['old'][-1]:.2f}", f"{accuracy['new'][-1]:.2f}", *fitted])
    title = f"From task {found['task_from'] + 1} to task {found['task_to'] + 1}: new on old accuracy, least squares"
    return table(["run", "old: end", "new: end", "slope", "r²"], rows, title)


def tell(console: Console, files: Sequence[Path]) -> None:
    console.print(f"written: {', '.join(map(str, files))}", soft_wrap=True, highlight=False)
