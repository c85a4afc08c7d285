"""Charts for print: the same data as the page shows, drawn by matplotlib as PNG and PDF."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from incvec.study import looks as style
from incvec.study.charts import Bar, Bars, Chart, Heat, Line, Lines

MAP = "cividis"  # made for readers of any color vision
GRID = "#E5E5E5"
# One date in every file, so that a report made twice from the same records is the same bytes.
FIXED = {"png": {"Software": None}, "pdf": {"CreationDate": None, "ModDate": None}}


def write(chart: Chart, folder: Path) -> list[Path]:
    """`SLUG.png` and `SLUG.pdf`."""
    figure = draw(chart)
    files = [folder / f"{chart.slug}.{kind}" for kind in FIXED]
    for file in files:
        figure.savefig(file, dpi=160, metadata=FIXED[file.suffix[1:]])
    return files


def draw(chart: Chart) -> Figure:
    height = {"lines": 4.2, "heat": 4.4}.get(chart.kind, 0.0)
    if isinstance(chart, Bars):
        height = 1.5 + sum(bar_heights(chart))
    width = 5.2 if isinstance(chart, Heat) else 6.6
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(chart.title, loc="left", fontsize=9.5 if isinstance(chart, Heat) else 10.5, wrap=True)
    if isinstance(chart, Lines):
        draw_lines(axes, chart)
    elif isinstance(chart, Bars):
        draw_bars(axes, chart)
    else:
        draw_heat(figure, axes, chart)
    if chart.note:
        figure.supxlabel(chart.note, fontsize=7.5, color="#555555")
    return figure


def draw_lines(axes: Any, chart: Lines) -> None:
    for line in chart.lines:
        look = style.look(line.name)
        axes.plot(
            line.x, line.y, label=line.label, color=look.color, dashes=look.dashes or (None, None), linewidth=1.8,
            marker=look.marker, markersize=look.size - 1, markevery=[-1] if chart.dense else None,
            markerfacecolor="white" if style.hollow(line.name) else look.color,
        )  # fmt: skip
        if line.errors:
            low, high = band(line)
            axes.fill_between(line.x, low, high, color=look.color, alpha=0.15, linewidth=0)
    for level in chart.levels:
        look = style.look(level.name)
        axes.axhline(level.y[-1], label=level.label, color=look.color, linewidth=1.2, dashes=(6, 2, 1, 2))
    plain(axes, "y")
    if chart.log:
        axes.set_xscale("log")
    values = sorted({x for line in chart.lines for x in line.x})
    if len(values) <= 12:
        axes.set_xticks(values, [f"{x:g}" for x in values])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.legend(frameon=False, fontsize=9)


def band(line: Line) -> tuple[list[float], list[float]]:
    pairs = list(zip(line.y, line.errors or (), strict=True))
    return [y - e for y, e in pairs], [y + e for y, e in pairs]


def bar_label(bar: Bar, chart: Bars) -> str:
    """Its name and its value; a long name, such as one with a path, in a few short lines, cut where even those end."""
    value = format(bar.value, "+.2f" if chart.signed else ".2f").replace("-", "−")
    return textwrap.fill(bar.label, 34, max_lines=3, placeholder=" …") + f"  {value}"


def bar_heights(chart: Bars) -> list[float]:
    """Inches for each bar, by the lines of its label."""
    return [0.16 + 0.18 * len(bar_label(bar, chart).splitlines()) for bar in chart.bars]


def draw_bars(axes: Any, chart: Bars) -> None:
    names = [bar_label(bar, chart) for bar in chart.bars]
    heights = bar_heights(chart)
    places = [sum(heights[:place]) + heights[place] / 2 for place in range(len(names))]
    for place, bar in zip(places, chart.bars, strict=True):
        color = style.look(bar.name).color
        axes.barh(place, bar.value, height=0.21, color=color, alpha=0.55 if style.hollow(bar.name) else 1.0)
        if bar.error is not None:
            axes.errorbar(bar.value, place, xerr=bar.error, color="#333333", capsize=3, linewidth=1.2)
        if bar.paper is not None:
            axes.plot(bar.paper, place, marker="D", color="white", markeredgecolor="black", markersize=5.5)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_xlabel(chart.x_label)
    plain(axes, "x")
    axes.tick_params(axis="y", length=0)


def draw_heat(figure: Figure, axes: Any, chart: Heat) -> None:
    size = len(chart.matrix)
    full = [[*row, *[float("nan")] * (size - len(row))] for row in chart.matrix]
    image = axes.imshow(full, cmap=MAP, vmin=chart.low, vmax=chart.high)
    if size <= 12:
        middle = (chart.low + chart.high) / 2
        for t, row in enumerate(chart.matrix):
            for i, value in enumerate(row):
                ink = "black" if value > middle else "white"
                axes.text(i, t, f"{value:.1f}", ha="center", va="center", color=ink, fontsize=8)
    marked = range(0, size, 1 if size <= 12 else 3)
    axes.set_xticks(marked, [t + 1 for t in marked], fontsize=8)
    axes.set_yticks(marked, [t + 1 for t in marked], fontsize=8)
    axes.set_xlabel("tested on task")
    axes.set_ylabel("after learning task")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="accuracy, %")


def plain(axes: Any, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def color_stops(count: int = 9) -> list[str]:
    """The color map as a few colors, for the page to blend."""
    chosen: Sequence[str] = [to_hex(colormaps[MAP](step / (count - 1))) for step in range(count)]
    return list(chosen)
