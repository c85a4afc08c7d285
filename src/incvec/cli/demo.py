"""`incvec demo`: four runs on the embedded digits, their table, and one figure of what the paper is about."""

from __future__ import annotations

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
from incvec.metrics import weighted_mean
from incvec.presets import resolve
from incvec.study import style
from incvec.study.figures.canvas import legend_below, new_figure, plot_run, style_axes
from incvec.study.geometry import load_snapshot, path, positions, task_accuracy
from incvec.study.run_table import run_rows, runs_table

POINTS = 51
RUNS: dict[str, dict[str, Any]] = {
    "finetune": {"method": "finetune"},
    "podnet": {"method": "podnet"},
    "podnet + ivt": {"method": "podnet", "addons": ["ivt"]},
    "podnet oracle": {"method": "podnet", "oracle": True},
}
ON_PATHS = ("podnet", "podnet + ivt", "podnet oracle")


def register(app: typer.Typer) -> None:
    app.command(epilog="[bold]Example[/bold]\n\nincvec demo --out runs/demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and demo.png.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Training seed.")] = 0,
) -> None:
    """Train four runs on embedded digits: finetune, PODNet, PODNet + IVT and PODNet's oracle.

    Needs no download and no GPU. Prints a table of the results and draws one figure: accuracy after each task, and
    accuracy on the first task's classes along the straight line from the first model to the last.
    """
    check_out(out, "the demo")
    run_demo(out, seed, Console())


def run_demo(out: Path, seed: int, console: Console, changes: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Train the four runs, or resume them, print their table, draw `demo.png` and return their records.

    `changes` has settings by method and add-on that replace those of the presets.
    """
    data = load_dataset("digits")
    folders, records = {}, []
    with single_thread_for_small_images(data):
        for name, given in RUNS.items():
            sections = {key: value for key, value in (changes or {}).items() if key in name.split()}
            config = resolve({**given, **sections, "dataset": "digits", "seed": seed, "device": "cpu"})
            folders[name] = out / f"seed-{seed}" / name.replace(" + ", "+").replace(" ", "-")
            records.append(follow(Run(config, data, folders[name], out / "bases").events(), console))
        paths = {name: first_task_path(folders[name], data) for name in ON_PATHS}
    file = out / "demo.png"
    draw(records, paths, file)
    console.print(runs_table(run_rows(records), "Digits: 4 classes, then 3 tasks of 2 classes").rich())
    console.print(
        "AA: accuracy averaged over the tasks. LA: accuracy after the last task. FM: forgetting (lower is better). All "
        "in percent. Gap closed: how much of the way from PODNet's LA to that of its oracle, which keeps all images, "
        "IVT covers.",
        style="dim",
        highlight=False,
    )
    say(f"figure: {file}", console=console)
    return records


def first_task_path(run: Path, data: Dataset) -> list[float]:
    """Accuracy on the first task's test images, from the model after that task to the run's last model."""
    last = len(list((run / "snapshots").glob("task-*.safetensors"))) - 1
    start = load_snapshot(run, 0, data, grow_to=last)
    end = load_snapshot(run, last, data)
    return path(end.model, start.state(), end.state(), task_accuracy(end), POINTS)


def draw(records: Sequence[Mapping[str, Any]], paths: Mapping[str, Sequence[float]], file: Path) -> None:
    """Left: accuracy after each task. Right: accuracy along the paths."""
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    for record, name in zip(records, RUNS, strict=True):
        values = [weighted_mean(row, record["test_counts"]) for row in record["accuracy"]]
        plot_run(left, range(1, len(values) + 1), values, style.run_style(name))
    left.set_xticks(range(1, len(records[0]["accuracy"]) + 1))
    style_axes(left, "Accuracy on all classes seen so far, %", "tasks learned")
    for name, curve in paths.items():
        plot_run(right, positions(len(curve)), curve, style.run_style(name), markevery=[len(curve) - 1])
    right.plot(0, next(iter(paths.values()))[0], color="black", marker="o", markersize=6)
    right.set_ylim(min(80, *(min(curve) - 2 for curve in paths.values())), 101.5)
    right.locator_params(axis="y", integer=True)
    right.set_xticks([0, 0.25, 0.5, 0.75, 1], ["first\nmodel", "¼", "½", "¾", "last\nmodel"])
    style_axes(right, "Accuracy on the first task's classes, %", "position on the straight line between the models")
    legend_below(figure, left)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
