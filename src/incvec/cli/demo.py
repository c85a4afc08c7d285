"""`incvec demo`: PODNet without and with IVT on the embedded digits, with a few seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from incvec.cli.common import say
from incvec.cli.progress import follow
from incvec.data import Dataset, load_dataset
from incvec.engine.run import Run
from incvec.engine.threads import single_thread_for_small_images
from incvec.errors import check_out
from incvec.presets import resolve
from incvec.presets.given import parse_seeds
from incvec.study import style
from incvec.study.figures.canvas import legend_below, new_figure, plot_band, plot_run, style_axes
from incvec.study.gains import gain_sentence
from incvec.study.geometry import load_snapshot, path, positions, task_accuracy
from incvec.study.paper import METRICS, by_seed, paired_gains
from incvec.study.tables import Cell, Column, Table, mean

POINTS = 51
HOST, WITH_IVT, ORACLE = "podnet", "podnet + ivt", "podnet oracle"
RUNS: dict[str, dict[str, Any]] = {
    HOST: {"method": "podnet"},
    WITH_IVT: {"method": "podnet", "addons": ["ivt"]},
    ORACLE: {"method": "podnet", "oracle": True},  # the first seed only: it takes four times as long
}
NOTE = (
    "AA: accuracy averaged over the tasks. LA: accuracy after the last task. FM: forgetting (lower is better). All in "
    "percent, mean ± standard deviation over seeds. The oracle keeps all images. The demo shows the mechanism; it is "
    "not evidence for any method."
)

Records = dict[str, list[dict[str, Any]]]  # by name, in the order of the seeds


def register(app: typer.Typer) -> None:
    app.command(epilog="[bold]Examples[/bold]\n\nincvec demo\n\nincvec demo --seeds 3,4,5,6 --out runs/demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and demo.png.")] = Path("runs/demo"),
    seeds: Annotated[str, typer.Option(help="Training seeds, such as 0,1,2 or 0-4.")] = "0,1,2",
) -> None:
    """Train PODNet without and with IVT on embedded digits with three seeds each, and PODNet's oracle once.

    Needs no download and no GPU; takes about a minute on two idle cores, several on a busy machine. Prints a table,
    draws one figure (accuracy after each task, and accuracy on the first task's classes along the straight line from
    the first model to the last) and ends with what IVT adds.
    """
    check_out(out, "the demo")
    run_demo(out, parse_seeds(seeds), Console())


def run_demo(out: Path, seeds: Sequence[int], console: Console, changes: Mapping[str, Any] | None = None) -> Records:
    """Train the runs, or resume them, print their table, draw `demo.png` and return their records.

    `changes` has settings by method and add-on that replace those of the presets.
    """
    data = load_dataset("digits")
    records: Records = {name: [] for name in RUNS}
    paths: dict[str, list[list[float]]] = {name: [] for name in RUNS}
    with single_thread_for_small_images(data):
        for seed in seeds:
            for name, given in RUNS.items():
                if name == ORACLE and seed != seeds[0]:
                    continue
                sections = {key: value for key, value in (changes or {}).items() if key in name.split()}
                config = resolve({**given, **sections, "dataset": "digits", "seed": seed, "device": "cpu"})
                folder = out / f"seed-{seed}" / name.replace(" + ", "+").replace(" ", "-")
                records[name].append(follow(Run(config, data, folder, out / "bases").events(), console))
                paths[name].append(first_task_path(folder, data))
    file = out / "demo.png"
    draw(records, paths, file)
    console.print(demo_table(records).rich())
    console.print(NOTE, style="dim", highlight=False)
    say(f"figure: {file}", console=console)
    _, last, forgetting, _ = paired_gains(by_seed(records[WITH_IVT]), by_seed(records[HOST]))
    say(gain_sentence("IVT", last, forgetting), console=console)
    return records


def demo_table(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    rows: list[list[str | Cell]] = []
    for name, own in records.items():
        metrics = [mean([record["metrics"][metric] for record in own]) for metric in METRICS]
        seconds = mean([statistics.mean(record["seconds"] for record in own)], ".1f")
        rows.append([name, str(len(own)), *metrics, seconds])
    columns = map(Column, ("seeds", *METRICS, "seconds"))
    return Table(["run", *columns], rows, "Digits: 4 classes, then 3 tasks of 2 classes")


def first_task_path(run: Path, data: Dataset) -> list[float]:
    """Accuracy on the first task's test images, from the model after that task to the run's last model."""
    last = len(list((run / "snapshots").glob("task-*.safetensors"))) - 1
    start = load_snapshot(run, 0, data, grow_to=last)
    end = load_snapshot(run, last, data)
    return path(end.model, start.state(), end.state(), task_accuracy(end), POINTS)


def draw(records: Records, paths: Mapping[str, Sequence[Sequence[float]]], file: Path) -> None:
    """Left: accuracy after each task. Right: accuracy along the paths. Bands: one standard deviation over seeds."""
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    lowest = 100.0
    for name, own in records.items():
        plot_seeds(left, range(1, len(own[0]["metrics"]["a"]) + 1), [r["metrics"]["a"] for r in own], name)
    left.set_xticks(range(1, len(records[HOST][0]["metrics"]["a"]) + 1))
    style_axes(left, "Accuracy on all classes seen so far, %", "tasks learned")
    for name, curves in paths.items():
        plot_seeds(right, positions(POINTS), curves, name, markevery=[POINTS - 1])
        lowest = min(lowest, *(min(curve) for curve in curves))
    right.set_ylim(min(80, lowest - 2), 101.5)
    right.locator_params(axis="y", integer=True)
    right.set_xticks([0, 0.25, 0.5, 0.75, 1], ["first\nmodel", "¼", "½", "¾", "last\nmodel"])
    style_axes(right, "Accuracy on the first task's classes, %", "position on the straight line between the models")
    legend_below(figure, left)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def plot_seeds(axes: Any, x: Sequence[float], curves: Sequence[Sequence[float]], name: str, **options: Any) -> None:
    """The mean of the curves, with a band if there are several."""
    samples = list(zip(*curves, strict=True))
    run, means = style.run_style(name), [statistics.mean(values) for values in samples]
    plot_run(axes, x, means, run, **options)
    if len(curves) > 1:
        plot_band(axes, x, means, [statistics.stdev(values) for values in samples], run.color)
