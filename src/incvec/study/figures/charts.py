"""The charts of the report (`incvec.study.charts`) drawn for print: lines, bars and accuracy matrices."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from incvec.study import style
from incvec.study.charts import Bar, Bars, Heat, Lines
from incvec.study.figures.canvas import new_figure, plot_band, plot_run, save, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LABELED = 12  # more ticks or cells than this are not labeled one by one
Printed = Lines | Bars | Heat  # a plane has a figure of its own


def write_chart(chart: Printed, folder: Path) -> list[Path]:
    """`SLUG.png` and `SLUG.pdf`."""
    return save(draw_chart(chart), folder / chart.slug)


def draw_chart(chart: Printed) -> Figure:
    if isinstance(chart, Lines):
        figure = new_figure(6.6, 4.2)
        draw_lines(figure.subplots(), chart)
    elif isinstance(chart, Bars):
        figure = new_figure(6.6, 1.5 + sum(bar_heights(chart)))
        draw_bars(figure.subplots(), chart)
    else:
        figure = new_figure(5.2, 4.4)
        draw_heat(figure, chart)
    if chart.note:
        figure.supxlabel(chart.note, fontsize=7.5, color=style.NOTE_COLOR)
    return figure


def draw_lines(axes: Any, chart: Lines) -> None:
    styles = style.distinct([each.name for each in (*chart.lines, *chart.levels)])
    for line, run in zip(chart.lines, styles, strict=False):
        plot_run(
            axes, line.x, line.y, run, label=line.label, linewidth=1.8, markersize=run.size - 1,
            markevery=[-1] if chart.dense else None, markerfacecolor="white" if run.hollow else run.color,
        )  # fmt: skip
        if line.errors:
            plot_band(axes, line.x, line.y, line.errors, run.color)
    for level, run in zip(chart.levels, styles[len(chart.lines) :], strict=True):
        axes.axhline(level.y[-1], label=level.label, color=run.color, linewidth=1.2, dashes=(6, 2, 1, 2))
    style_axes(axes, chart.title, chart.x_label, chart.y_label, grid="y")
    if chart.log:
        axes.set_xscale("log")
    values = sorted({x for line in chart.lines for x in line.x})
    if len(values) <= MAX_LABELED:
        axes.set_xticks(values, [f"{x:g}" for x in values])
        axes.minorticks_off()
    else:
        axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=9)


def bar_label(bar: Bar, chart: Bars) -> str:
    """Name and value; a long name, such as one with a path, is wrapped and cut after three lines."""
    value = format(bar.value, "+.2f" if chart.signed else ".2f").replace("-", "−")
    return textwrap.fill(bar.label, 34, max_lines=3, placeholder=" …") + f"  {value}"


def bar_heights(chart: Bars) -> list[float]:
    """Inches for each bar, by the number of lines in its label."""
    return [0.16 + 0.18 * len(bar_label(bar, chart).splitlines()) for bar in chart.bars]


def draw_bars(axes: Any, chart: Bars) -> None:
    heights = bar_heights(chart)
    places = [sum(heights[:number]) + height / 2 for number, height in enumerate(heights)]
    style_axes(axes, chart.title, chart.x_label, grid="x")
    for place, bar in zip(places, chart.bars, strict=True):
        run = style.run_style(bar.name)
        axes.barh(place, bar.value, height=0.21, color=run.color, alpha=0.55 if run.hollow else 1.0)
        if bar.error is not None:
            axes.errorbar(bar.value, place, xerr=bar.error, color="#333333", capsize=3, linewidth=1.2)
        if bar.paper is not None:
            axes.plot(bar.paper, place, marker="D", color="white", markeredgecolor="black", markersize=5.5)
    axes.set_yticks(places, [bar_label(bar, chart) for bar in chart.bars])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.axvline(0, color="#333333", linewidth=0.8)


def draw_heat(figure: Figure, chart: Heat) -> None:
    axes: Any = figure.subplots()
    size = len(chart.matrix)
    padded = [[*row, *[float("nan")] * (size - len(row))] for row in chart.matrix]
    image = axes.imshow(padded, cmap=style.HEATMAP, vmin=chart.low, vmax=chart.high)
    if size <= MAX_LABELED:
        middle = (chart.low + chart.high) / 2
        for t, row in enumerate(chart.matrix):
            for i, value in enumerate(row):
                color = "black" if value > middle else "white"
                axes.text(i, t, f"{value:.1f}", ha="center", va="center", color=color, fontsize=8)
    style_axes(axes, chart.title, chart.x_label, chart.y_label, grid="none")
    ticks = range(0, size, 1 if size <= MAX_LABELED else 3)
    names = [textwrap.shorten(chart.names[t], 16, placeholder="…") if chart.names else str(t + 1) for t in ticks]
    axes.set_xticks(ticks, names, fontsize=8, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_yticks(ticks, names, fontsize=8)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="percent" if chart.names else "accuracy, %")


def color_stops(count: int = 9) -> list[str]:
    """The color map of the accuracy matrices as a few colors, for the page to blend."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps[style.HEATMAP](step / (count - 1))) for step in range(count)]
