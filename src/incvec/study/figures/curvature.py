"""The curvature figure: IVT's Fisher by layer group and task, and predicted against measured forgetting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from incvec.study import style
from incvec.study.figures.canvas import (
    add_note,
    describe_evaluation,
    label_band,
    legend_below,
    new_figure,
    plot_band,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 5
LEGEND_ROWS = 12
PREDICTIONS = (("predicted", "predicted, ½ d'Fd", style.DOTTED), ("predicted_per_sample", "½ d'(B·F)d", style.DASHED))


def draw_curvature(data: Mapping[str, Any]) -> Figure:
    """Fisher ratio and S by layer group in the upper row; below, one panel per task with the change in loss."""
    tasks = data["tasks"]
    columns = min(len(tasks), MAX_COLUMNS)
    rows = -(-len(tasks) // columns)
    heights = [3.4, 2.6 * rows + 0.8]
    figure = new_figure(max(9.0, 2.6 * columns), sum(heights))
    rows_of_panels: Any = figure.subfigures(2, 1, height_ratios=heights)
    above, below = rows_of_panels
    draw_layer_groups(above, tasks)
    panels = below.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    run = style.run_style(" + ".join([data["method"], *data["addons"]]))
    for task, axes in zip(tasks, panels, strict=False):
        for key, name, dashes in PREDICTIONS:
            if task[key] is not None:
                axes.plot(task["x"], task[key], color=style.GRAY, dashes=dashes, linewidth=1.8, label=name)
                plot_spread(axes, task, key, style.GRAY)
        axes.plot(task["x"], task["measured"], color=run.color, marker=run.marker, markersize=4, label="measured")
        plot_spread(axes, task, "measured", run.color)
        style_axes(axes, f"On the path to task {task['task'] + 1}", "fraction of the path")
        axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    for axes in panels[::columns]:
        axes.set_ylabel("change of the old\ntasks' test loss", fontsize=9.5)
    label_band(panels[0], data)
    legend_below(below, panels[0])
    add_note(figure, f"{data['name']}, {describe_evaluation(data)}")
    return figure


def draw_layer_groups(figure: Any, tasks: list[Mapping[str, Any]]) -> None:
    """One line per task over stem, stages and head."""
    from matplotlib import colormaps

    left, right = figure.subplots(1, 2)
    groups = sorted({name for task in tasks for name in task["parts"] if name != "all"}, key=network_order)
    labels = [layer_group_label(name) for name in groups]
    for axes, key in ((left, "fisher_ratio"), (right, "scale")):
        for number, task in enumerate(tasks):
            color = colormaps[style.COLORMAP](0.9 * number / max(1, len(tasks) - 1))
            values = [task["parts"].get(name, {}).get(key) for name in groups]
            axes.plot(range(len(groups)), values, color=color, marker="o", label=f"task {task['task'] + 1}")
            if "std" in task:
                places = [place for place, value in enumerate(values) if value is not None]
                errors = [task["std"]["parts"][groups[place]][key] for place in places]
                plot_band(axes, places, [values[place] for place in places], errors, color)
    left.set_yscale("log")
    right.set_ylim(0.48, 1.02)
    style_axes(left, "Fisher of the new task relative to the past")
    style_axes(right, "Mean S: 1 keeps the increment, ½ halves it")
    for axes in (left, right):
        axes.set_xticks(range(len(groups)), labels, fontsize=9)
    columns = -(-len(tasks) // LEGEND_ROWS)
    right.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns)


def plot_spread(axes: Any, task: Mapping[str, Any], key: str, color: str) -> None:
    """The band of a line, if the figure is a mean over seeds."""
    if "std" in task:
        plot_band(axes, task["x"], task[key], task["std"][key], color)


def layer_group_label(name: str) -> str:
    """`stages.0` -> `stage 1`."""
    number = name.removeprefix("stages.")
    return f"stage {int(number) + 1}" if number != name and number.isdigit() else name


def network_order(group: str) -> tuple[int, int, str]:
    """Sort key: stem, stages or blocks by number, head."""
    order = ("stem", "stages", "blocks", "head")
    kind, _, number = group.partition(".")
    return (order.index(kind) if kind in order else len(order), int(number) if number.isdigit() else 0, group)
