"""The plane figure: the loss landscape around the models of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from incvec.records import title
from incvec.study import style
from incvec.study.figures.canvas import add_note, describe_evaluation, legend_below, new_figure, plot_marker, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_plane(data: Mapping[str, Any]) -> Figure:
    """Filled contours of the loss with labeled lines, the models, and the lines to them from the origin."""
    import numpy as np

    width, height = (max(data[key]) - min(data[key]) for key in ("a", "b"))
    text_height = 1.3 + 0.22 * len(data["marks"])
    figure = new_figure(6.8, text_height + min(max(5.2 * height / width, 2.4), 8.0))
    axes = figure.subplots()
    values = np.log10(np.clip(np.array(data["loss"]), 1e-6, None))
    low = float(values.min())
    high = max(float(np.quantile(values, 0.97)), low + 1e-3)
    grid = data["a"], data["b"], values
    filled = axes.contourf(*grid, levels=np.linspace(low, high, 33), cmap=style.COLORMAP, extend="max")
    losses = round_values(10**low, 10**high)
    levels = [math.log10(value) for value in losses]
    texts = [f"{value:g}" for value in losses]
    lines = axes.contour(*grid, levels=levels, colors="white", linestyles="solid", linewidths=0.6, alpha=0.8)
    axes.clabel(lines, fmt=dict(zip(lines.levels, texts, strict=True)), fontsize=7.5)
    bar = figure.colorbar(filled, cax=axes.inset_axes((1.02, 0, 0.04, 1)))  # always as high as the plane
    bar.set_label("test loss (logarithmic colors)", fontsize=9.5)
    bar.set_ticks(levels, labels=texts)
    bar.ax.tick_params(labelsize=9)
    origin = data["marks"][0]
    for mark in data["marks"]:
        run = style.run_style(title(mark))
        name = run.label
        if mark["role"] == "origin":
            run, name = run._replace(color="black", marker="o"), f"start, after task {data['task']}"
        else:
            ends = [origin["a"], mark["a"]], [origin["b"], mark["b"]]
            axes.plot(*ends, color="white", dashes=(3, 2), linewidth=1, alpha=0.75)
        if mark["role"] == "oracle":
            name += f", projected ({mark['off_plane']:.1f} off the plane)"
        plot_marker(
            axes, mark["a"], mark["b"], run, label=f"{name}: loss {mark['loss']:.2f}, {mark['accuracy']:.1f} %",
            markersize=run.size + (2 if mark is origin else 4), markeredgecolor="white", markeredgewidth=1.3, zorder=3,
        )  # fmt: skip
    heading = f"Test loss on all classes seen, after task {data['task'] + 1}"
    style_axes(axes, heading, "distance along u", "distance along v", grid="none")
    axes.set_aspect("equal")
    legend_below(figure, axes, 1)
    add_note(figure, "; ".join(filter(None, (describe_evaluation(data), describe_starts(data)))))
    return figure


def describe_starts(data: Mapping[str, Any]) -> str:
    """The runs that started the task at another model than the plane's origin, and how far from it."""
    others = [start for start in data.get("starts", []) if start["to_origin"] > 0]
    if not others:
        return ""
    distances = ", ".join(f"{start['name']} {start['to_origin']:.2f}" for start in others)
    origin = f"the origin is the model of {data['marks'][0]['name']} after task {data['task']}"
    return f"{origin}; runs that started at another model, and its distance: {distances}"


def round_values(low: float, high: float) -> list[float]:
    """About six round values (1, 2, 5, ...) between two losses; steps get finer until there are at least five."""
    inside: list[float] = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(k / 10 for k in range(10, 100))):
        candidates = [step * 10.0**power for power in range(-7, 7) for step in steps]
        inside = sorted({round(value, 9) for value in candidates if low <= value <= high})
        if len(inside) >= 5:
            break
    return inside[:: max(1, len(inside) // 6)] or [low]
