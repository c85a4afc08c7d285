"""The path figure (accuracy and loss along straight lines) and the trade-off figure (old against new classes)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from incvec.records import title
from incvec.study import style
from incvec.study.figures.canvas import (
    add_note,
    colored_words,
    describe_evaluation,
    label_band,
    legend_below,
    new_figure,
    plot_band,
    plot_marker,
    plot_run,
    style_axes,
)
from incvec.study.style import RunStyle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RED = "#CC0000"
DISTANCE, SHARE = "distance from the start (the paper's λ)", "share of the way (0: start, 1: end)"
MIN_R2 = 0.5  # a line that explains less than half of the variance is not a finding
MAX_BARRIERS_BESIDE_TITLE = 3  # more of them get a line of their own below the title
# Markers as characters, for the barriers beside a title.
GLYPHS = {
    "s": "■", "o": "●", "*": "★", "^": "▲", "v": "▼", "<": "◀", ">": "▶", "D": "◆", "d": "♦", "X": "✖", "P": "✚",
    "p": "⬟", "h": "⬢", "H": "⬣", "8": "⬤", "1": "Y",
}  # fmt: skip


def draw_path(data: Mapping[str, Any]) -> Figure:
    """Accuracy in the upper row, loss in the lower one; old tasks on the left, new tasks on the right."""
    first, last = data["task_from"], data["task_to"]
    by_distance = data.get("axis", "distance") == "distance"
    columns = {"old": task_range(range(first + 1)), "new": task_range(range(first + 1, last + 1))}
    figure = new_figure(9.6, 7.2)
    panels = figure.subplots(2, 2, squeeze=False)
    styles = curve_styles(data["curves"])
    for row, metric in enumerate(("accuracy", "loss")):
        for axes, (group, tasks) in zip(panels[row], columns.items(), strict=True):
            barriers = []
            for curve, run in zip(data["curves"], styles, strict=True):
                x, y = curve["distance" if by_distance else "x"], curve[metric][group]
                decimals = ".1f" if metric == "accuracy" else ".2f"
                height = f"{curve['barrier'][metric][group]:{decimals}}"
                if "std" in curve:
                    height += f" ± {curve['std']['barrier'][metric][group]:{decimals}}"
                    plot_band(axes, x, y, curve["std"][metric][group], run.color)
                barriers.append((f"{GLYPHS.get(run.marker, run.marker)} {height}", run.color))
                plot_run(
                    axes, x, y, run, markevery=[len(x) - 1], markersize=run.size + 2, markeredgecolor="white",
                    markeredgewidth=0.8, zorder=3,
                )  # fmt: skip
                start = f"model after task {first + 1}" if curve is data["curves"][-1] else ""
                axes.plot(x[0], y[0], color="black", marker="o", markersize=5.5, linestyle="", label=start, zorder=4)
            text = f"Accuracy on {tasks}, %" if metric == "accuracy" else f"Loss on {tasks}"
            text += "\n" if len(barriers) > MAX_BARRIERS_BESIDE_TITLE or "sources" in data else ""
            x_label = DISTANCE if by_distance else SHARE
            style_axes(axes, text, x_label if row == 1 else "")
            colored_words(axes, [("barrier", style.NOTE_COLOR), *barriers])
    label_band(panels[0][0], data)
    legend_below(figure, panels[0][0], columns=3 if "sources" in data else 4)
    add_note(figure, describe_path(data))
    return figure


def draw_tradeoff(data: Mapping[str, Any]) -> Figure:
    """One panel per end of a path: accuracy on old against new classes at every point, and the linear fit."""
    panels = data["panels"]
    figure = new_figure(max(5.6, 4.2 * len(panels)), 4.8)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        first, last = panel["task_from"], panel["task_to"]
        for curve, run in zip(panel["curves"], curve_styles(panel["curves"]), strict=True):
            x, y = curve["accuracy"]["old"], curve["accuracy"]["new"]
            axes.plot(x, y, color=run.color, linewidth=0.8, alpha=0.35)
            axes.scatter(x, y, color=run.color, s=16, alpha=0.8, linewidths=0)
            if "std" in curve:
                errors = curve["std"]["accuracy"]
                axes.errorbar(
                    x, y, errors["new"], errors["old"], fmt="none", ecolor=run.color, elinewidth=0.8, alpha=0.35
                )
            if has_linear_fit(curve):
                ends = [min(x), max(x)]
                fitted = [curve["fit"]["intercept"] + curve["fit"]["slope"] * value for value in ends]
                axes.plot(ends, fitted, color=run.color, dashes=(4, 1.5), linewidth=1.6)
            axes.plot(x[0], y[0], color="black", marker="o", markersize=6, zorder=3)
            plot_marker(
                axes, x[-1], y[-1], run, markersize=run.size + 3, markeredgecolor=RED, markeredgewidth=1.2, zorder=4,
                label=f"{run.label}: {describe_fit(curve)}",
            )  # fmt: skip
        old, new = task_range(range(first + 1)), task_range(range(first + 1, last + 1))
        style_axes(axes, f"From task {first + 1} to task {last + 1}", f"accuracy on {old}, %", f"accuracy on {new}, %")
        highest = max(max(curve["accuracy"]["new"]) for curve in panel["curves"])
        axes.set_ylim(-0.04 * highest - 0.5, 1.08 * highest + 0.5)
        axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    crosses = "; crosses: ± 1 std" if "sources" in panels[0] else ""
    add_note(figure, describe_path(panels[0]) + "; red edges: ends of the paths" + crosses)
    return figure


def has_linear_fit(curve: Mapping[str, Any]) -> bool:
    return curve["fit"]["slope"] is not None and (curve["fit"]["r2"] or 0) >= MIN_R2


def describe_fit(curve: Mapping[str, Any]) -> str:
    """`linear fit, slope −2.00, r² 0.95`; without the slope if the points are not on a line."""
    if not has_linear_fit(curve):
        return "no linear relation" + (f" (r² {r2:.2f})" if (r2 := curve["fit"]["r2"]) is not None else "")
    slope = f"{curve['fit']['slope']:.2f}".replace("-", "−")
    slope += f" ± {curve['std']['fit']['slope']:.2f}" if "std" in curve else ""
    return f"linear fit, slope {slope}, r² {curve['fit']['r2']:.2f}"


def curve_styles(curves: Sequence[dict[str, Any]]) -> list[RunStyle]:
    """The style of each curve, labeled with its name. A repeated color (another seed) is replaced by another one."""
    styles = style.distinct([title(curve) for curve in curves])
    return [run._replace(label=curve["name"]) for run, curve in zip(styles, curves, strict=True)]


def describe_path(data: Mapping[str, Any]) -> str:
    start = "the oracle's" if data["start"] == "oracle" else "each run's own"
    return f"{describe_evaluation(data)}; paths start at {start} model after task {data['task_from'] + 1}"


def task_range(tasks: Sequence[int]) -> str:
    """`task 1`, `tasks 2 to 6`: counted from 1 in figures, from 0 in the data."""
    return f"task {tasks[0] + 1}" if len(tasks) == 1 else f"tasks {tasks[0] + 1} to {tasks[-1] + 1}"
