"""Lines drawn: accuracy and loss along them, and old-class against new-class accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from incvec.study import style

RED = "#CC0000"
BESIDE = 3  # as many barriers stand beside a title; more have a line of their own under it
# Markers as letters, for numbers beside a title.
GLYPHS = {
    "s": "■", "o": "●", "*": "★", "^": "▲", "v": "▼", "<": "◀", ">": "▶", "D": "◆", "d": "♦", "X": "✖", "P": "✚",
    "p": "⬟", "h": "⬢", "H": "⬣", "8": "⬤", "1": "Y",
}  # fmt: skip


def named(tasks: Sequence[int]) -> str:
    """`task 1`, `tasks 2 to 6`; counted from 1, as for all readers."""
    return f"task {tasks[0] + 1}" if len(tasks) == 1 else f"tasks {tasks[0] + 1} to {tasks[-1] + 1}"


def told_how(found: Mapping[str, Any]) -> str:
    """`CIFAR-100; 400 test images a task at most; BatchNorm statistics interpolated; ...`."""
    start = "the oracle's" if found["start"] == "oracle" else "each run's own"
    return f"{told_setting(found)}; lines begin at {start} model after task {found['task_from'] + 1}"


def told_setting(found: Mapping[str, Any]) -> str:
    """Data set, test images and BatchNorm, which every figure of snapshots says."""
    count = found["images_per_task"]
    images = "all test images" if count is None else f"{count} test images a task at most"
    return f"{style.dataset(found['dataset'])}; {images}; BatchNorm statistics {found['batchnorm']}d"


def looks(curves: Sequence[Mapping[str, Any]]) -> list[style.Look]:
    """The look of each curve under its own name; a second one of the same look (another seed) has a spare one."""
    found: list[style.Look] = []
    spare = cycle(style.SPARE)
    for curve in curves:
        look = style.look(curve["method"], curve["addons"], curve["oracle"])._replace(label=curve["name"])
        if any((look.color, look.marker) == (known.color, known.marker) for known in found):
            color, marker = next(spare)
            look = look._replace(color=color, marker=marker)
        found.append(look)
    return found


def draw_path(found: Mapping[str, Any], stem: Path) -> list[Path]:
    """Above accuracy, below loss; left the tasks learned before the line begins, right those learned after."""
    i, t = found["task_from"], found["task_to"]
    along = found.get("axis", "distance")
    columns = {"old": named(range(i + 1)), "new": named(range(i + 1, t + 1))}
    figure, table = style.new_figure(2, 2, 9.6, 7.2)
    for row, what in enumerate(("accuracy", "loss")):
        for place, (key, tasks) in enumerate(columns.items()):
            axes = table[row][place]
            barriers = []
            for curve, look in zip(found["curves"], looks(found["curves"]), strict=True):
                x, y = curve["distance" if along == "distance" else "x"], curve[what][key]
                height = curve["barrier"][what][key]
                number = f"{height:.1f}" if what == "accuracy" else f"{height:.2f}"
                barriers.append((f"{GLYPHS.get(look.marker, look.marker)} {number}", look.color))
                axes.plot(
                    x, y, color=look.color, dashes=look.dashes or (None, None), linewidth=2, label=look.label,
                    marker=look.marker, markevery=[len(x) - 1], markersize=look.size + 2, markeredgecolor="white",
                    markeredgewidth=0.8, zorder=3,
                )  # fmt: skip
                start = f"model after task {i + 1}" if curve is found["curves"][-1] else ""
                axes.plot(x[0], y[0], color="black", marker="o", markersize=5.5, linestyle="", label=start, zorder=4)
            below = "distance from the start (λ)" if along == "distance" else "share of the way"
            title = f"Accuracy on {tasks}, %" if what == "accuracy" else f"Loss on {tasks}"
            title += "\n" if len(barriers) > BESIDE else ""
            style.tidy(axes, title, below if row == 1 else "")
            style.colored_words(axes, [("barrier", "#555555"), *barriers])
    style.legend_below(figure, table[0][0])
    style.note(figure, told_how(found))
    return style.save(figure, stem)


def draw_tradeoff(found: Mapping[str, Any], stem: Path) -> list[Path]:
    """A panel a line's end: every point's old-class accuracy against its new-class accuracy, and the linear fit."""
    panels = found["panels"]
    figure, table = style.new_figure(1, len(panels), max(5.6, 4.2 * len(panels)), 4.8)
    for panel, axes in zip(panels, table[0], strict=True):
        i, t = panel["task_from"], panel["task_to"]
        for curve, look in zip(panel["curves"], looks(panel["curves"]), strict=True):
            x, y = curve["accuracy"]["old"], curve["accuracy"]["new"]
            axes.plot(x, y, color=look.color, linewidth=0.8, alpha=0.35)
            axes.scatter(x, y, color=look.color, s=16, alpha=0.8, linewidths=0)
            slope, r2 = curve["fit"]["slope"], curve["fit"]["r2"]
            if slope is not None:
                ends = [min(x), max(x)]
                axes.plot(
                    ends, [curve["fit"]["intercept"] + slope * v for v in ends], color=look.color,
                    dashes=(4, 1.5), linewidth=1.6,
                )  # fmt: skip
            number = f"{slope or 0:.2f}".replace("-", "−")
            told = "no linear fit" if slope is None else f"linear fit, slope {number}, r² {r2 or 0:.2f}"
            axes.plot(x[0], y[0], color="black", marker="o", markersize=6, zorder=3)
            axes.plot(
                x[-1], y[-1], color=look.color, marker=look.marker, markersize=look.size + 3, linestyle="",
                markeredgecolor=RED, markeredgewidth=1.2, zorder=4, label=f"{look.label}: {told}",
            )  # fmt: skip
        style.tidy(
            axes, f"From task {i + 1} to task {t + 1}", f"accuracy on {named(range(i + 1))}, %",
            f"accuracy on {named(range(i + 1, t + 1))}, %",
        )  # fmt: skip
        highest = max(max(curve["accuracy"]["new"]) for curve in panel["curves"])
        axes.set_ylim(-0.04 * highest - 0.5, 1.08 * highest + 0.5)
        axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    style.note(figure, told_how(panels[0]) + "; red edges: where a line ends")
    return style.save(figure, stem)
