"""The demo: four runs on embedded digits, their table, and one picture of what the paper is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from incvec.cli.progress import follow
from incvec.data import Dataset, load_dataset
from incvec.engine.run import Run
from incvec.metrics import weighted_mean
from incvec.presets import resolve
from incvec.records import title
from incvec.study.geometry import path, positions, snapshot_model, task_accuracy
from incvec.study.runs import run_rows, runs_table
from incvec.study.style import Look, look

POINTS = 51
TINY = 256  # pixels


RUNS: dict[str, dict[str, Any]] = {
    "finetune": {"method": "finetune"},
    "podnet": {"method": "podnet"},
    "podnet + ivt": {"method": "podnet", "addons": ["ivt"]},
    "podnet oracle": {"method": "podnet", "oracle": True},
}
LOOKS = {name: look(given["method"], given.get("addons", ()), "oracle" in given) for name, given in RUNS.items()}
ON_PATHS = ("podnet", "podnet + ivt", "podnet oracle")


def run_demo(out: Path, seed: int, console: Console, changes: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Train (or go on with, or just read) the four runs, print the table, draw `demo.png`; returns the records.

    `changes` are settings for all runs that have such a section, in place of the presets'.
    """
    data = load_dataset("digits")
    folders, records = {}, []
    with steady_threads(data):
        for name, given in RUNS.items():
            sections = {key: value for key, value in (changes or {}).items() if key in name.split()}
            config = resolve({**given, **sections, "dataset": "digits", "seed": seed, "device": "cpu"})
            folders[name] = out / f"seed-{seed}" / name.replace(" + ", "+").replace(" ", "-")
            events = Run(config, data, folders[name], out / "bases").events()
            records.append(follow(events, console))
        curves = {name: first_task_path(folders[name], data) for name in ON_PATHS}
    file = out / "demo.png"
    draw(records, curves, file)
    console.print(runs_table(run_rows(records), "Digits: 4 classes, then 3 times 2 more").rich())
    console.print(
        "AA: accuracy averaged over the tasks; LA: after the last one; FM: forgetting (less is better); all in "
        "percent. Gap closed: how far IVT comes from PODNet's LA to that of its oracle, which keeps all images.",
        style="dim",
        highlight=False,
    )
    console.print(f"picture: {file}", soft_wrap=True, highlight=False, markup=False)
    return records


@contextmanager
def steady_threads(data: Dataset) -> Iterator[None]:
    """One CPU thread where the images are tiny: several would mostly wait for one another (ten times slower on a
    busy machine), and the last digits of the numbers would depend on the number of cores."""
    threads = torch.get_num_threads()
    if data.train_images[0].numel() <= TINY:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def first_task_path(run: Path, data: Dataset) -> list[float]:
    """Accuracy on the first task's test images, from the model after that task to the run's last model."""
    last = len(list((run / "snapshots").glob("task-*.safetensors"))) - 1
    start = snapshot_model(run, 0, data, grow_to=last)
    end = snapshot_model(run, last, data)
    return path(end.model, start.state(), end.state(), task_accuracy(end), POINTS)


def draw(records: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]], file: Path) -> None:
    """The picture: left, accuracy over the tasks; right, along the lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    ends = []
    for record in records:
        name = title(dict(record))
        values = [weighted_mean(row, record["test_counts"]) for row in record["accuracy"]]
        own = LOOKS[name]
        left.plot(
            range(1, len(values) + 1), values, color=own.color, marker=own.marker,
            dashes=own.dashes, markersize=own.size, linewidth=2,
        )  # fmt: skip
        ends.append((own, values[-1]))
    steps = len(records[0]["accuracy"])
    label_ends(left, steps, ends, steps - 1)
    left.set_xticks(range(1, steps + 1))
    left.set_xlabel("tasks learned")
    left.set_title("Accuracy on all classes seen so far, %", loc="left", fontsize=11)

    ends = []
    for name, curve in curves.items():
        own = LOOKS[name]
        right.plot(positions(len(curve)), curve, color=own.color, dashes=own.dashes, linewidth=2)
        right.plot(1, curve[-1], color=own.color, marker=own.marker, markersize=own.size)
        ends.append((own, curve[-1]))
    right.plot(0, next(iter(curves.values()))[0], color="black", marker="o", markersize=6)
    right.set_ylim(min(80, *(min(curve) - 2 for curve in curves.values())), 101.5)
    label_ends(right, 1, ends, 1)
    right.set_xticks([0, 0.25, 0.5, 0.75, 1], ["first\nmodel", "¼", "½", "¾", "last\nmodel"])
    right.set_xlabel("position on the straight line between them")
    right.set_title("Accuracy on the first task's classes along the way, %", loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def label_ends(axes: Any, x: float, ends: Sequence[tuple[Look, float]], width: float) -> None:
    """The lines' names and last values beside the axes, moved apart where they would overlap."""
    bottom, top = axes.get_ylim()
    heights = spread([value for _, value in ends], 0.055 * (top - bottom))
    for (own, value), height in zip(ends, heights, strict=True):
        axes.annotate(
            f"{own.label} {value:.1f}", (x, height), (x + 0.06 * width, height), color=own.color,
            fontsize=10, fontweight="bold", va="center", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(right=x + 0.03 * width)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The values, moved as little as need be so that neighbors are `gap` apart; their order is kept."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    clusters: list[tuple[float, list[int]]] = []  # mean position, members from the lowest to the highest
    for i in order:
        center, members = values[i], [i]
        while clusters and center - clusters[-1][0] < gap * (len(members) + len(clusters[-1][1])) / 2:
            members = clusters.pop()[1] + members
            center = sum(values[m] for m in members) / len(members)
        clusters.append((center, members))
    placed = list(values)
    for center, members in clusters:
        for rank, i in enumerate(members):
            placed[i] = center + gap * (rank - (len(members) - 1) / 2)
    return placed
