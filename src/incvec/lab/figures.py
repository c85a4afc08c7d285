"""Lines drawn: accuracy and loss along them, and old-class against new-class accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from incvec.lab import style

Axis = Literal["distance", "share"]


def named(tasks: Sequence[int]) -> str:
    """`task 1`, `tasks 2 to 6`; counted from 1, as for all readers."""
    return f"task {tasks[0] + 1}" if len(tasks) == 1 else f"tasks {tasks[0] + 1} to {tasks[-1] + 1}"


def told_how(found: Mapping[str, Any]) -> str:
    """`cifar100; 400 test images a task at most; BatchNorm statistics interpolated; ...`."""
    start = "the oracle's" if found["start"] == "oracle" else "each run's own"
    return (
        f"{found['dataset']}; {told_images(found)}; BatchNorm statistics {found['batchnorm']}d; "
        f"lines begin at {start} model after task {found['task_from'] + 1}"
    )


def told_images(found: Mapping[str, Any]) -> str:
    count = found["images_per_task"]
    return "all test images" if count is None else f"{count} test images a task at most"


def draw_path(found: Mapping[str, Any], stem: Path, axis: Axis = "distance") -> list[Path]:
    """Above accuracy, below loss; left the tasks learned before the line begins, right those learned after."""
    i, t = found["task_from"], found["task_to"]
    columns = {"old": named(range(i + 1)), "new": named(range(i + 1, t + 1))}
    figure, table = style.new_figure(2, 2, 10, 7)
    for row, what in enumerate(("accuracy", "loss")):
        for place, (key, tasks) in enumerate(columns.items()):
            axes = table[row][place]
            for curve in found["curves"]:
                look = style.look(curve["method"], curve["addons"], curve["oracle"])
                x, y = curve["distance" if axis == "distance" else "x"], curve[what][key]
                height = curve["barrier"][what][key]
                unit = " points" if what == "accuracy" else ""
                axes.plot(
                    x, y, color=look.colour, dashes=look.dashes, linewidth=2,
                    label=f"{look.label}: barrier {height:.{1 if what == 'accuracy' else 2}f}{unit}",
                )  # fmt: skip
                axes.plot(x[0], y[0], color="black", marker="o", markersize=5)
                axes.plot(
                    x[-1], y[-1], color=look.colour, marker=look.marker, markersize=look.size + 2,
                    markeredgecolor="white", markeredgewidth=0.8, zorder=3,
                )  # fmt: skip
            below = "distance from the start (λ)" if axis == "distance" else "share of the way"
            title = f"Accuracy on {tasks}, %" if what == "accuracy" else f"Loss on {tasks}"
            style.tidy(axes, title, below if row == 1 else "")
            axes.legend(frameon=False, fontsize=8.5)
    style.note(figure, told_how(found))
    return style.save(figure, stem)


def draw_tradeoff(panels: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """A panel a line's end: every point's old-class accuracy against its new-class accuracy, and the linear fit."""
    figure, table = style.new_figure(1, len(panels), max(5.6, 4.2 * len(panels)), 4.8)
    for found, axes in zip(panels, table[0], strict=True):
        i, t = found["task_from"], found["task_to"]
        for curve in found["curves"]:
            look = style.look(curve["method"], curve["addons"], curve["oracle"])
            x, y = curve["accuracy"]["old"], curve["accuracy"]["new"]
            slope = curve["fit"]["slope"]
            told = "" if slope is None else f": linear fit, slope {slope:.2f}, r² {curve['fit']['r2'] or 0:.2f}"
            axes.plot(x, y, color=look.colour, linewidth=0.8, alpha=0.35, label="" if slope is not None else look.label)
            axes.scatter(x, y, color=look.colour, s=16, alpha=0.8, linewidths=0)
            ends = [min(x), max(x)]
            if slope is not None:
                axes.plot(
                    ends, [curve["fit"]["intercept"] + slope * v for v in ends], color=look.colour,
                    dashes=look.dashes or (4, 1.5), linewidth=1.6, label=f"{look.label}{told}",
                )  # fmt: skip
            axes.plot(x[0], y[0], color="black", marker="o", markersize=6, zorder=3)
            axes.plot(
                x[-1], y[-1], color=look.colour, marker=look.marker, markersize=look.size + 4,
                markeredgecolor="#CC0000", markeredgewidth=1.4, zorder=4,
            )  # fmt: skip
        style.tidy(
            axes, f"From task {i + 1} to task {t + 1}", f"accuracy on {named(range(i + 1))}, %",
            f"accuracy on {named(range(i + 1, t + 1))}, %",
        )  # fmt: skip
        highest = max(max(curve["accuracy"]["new"]) for curve in found["curves"])
        axes.set_ylim(-0.04 * highest - 0.5, 1.12 * highest + 0.5)
        axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    style.note(figure, told_how(panels[0]))
    return style.save(figure, stem)
