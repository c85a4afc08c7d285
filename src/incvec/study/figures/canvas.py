"""One way to make a figure: create it, style its axes, add a legend and a note, save it as PNG and PDF.

matplotlib is imported when the first figure is made, not with this module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from incvec.study import style
from incvec.study.style import RunStyle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without dates and versions, so that the same numbers give the same files.
SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    ".png": {"metadata": {"Software": None}, "pil_kwargs": {"optimize": True}},
    ".pdf": {"metadata": {"CreationDate": None}},
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style_axes(
    axes: Any, title: str, x: str = "", y: str = "", grid: Literal["both", "x", "y", "none"] = "both"
) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=style.TITLE_COLOR, wrap=True)
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if grid != "none":
        axes.grid(axis=grid, color=style.GRID, linewidth=0.8)
        axes.set_axisbelow(True)


def plot_run(axes: Any, x: Sequence[float], y: Sequence[float], run: RunStyle, **options: Any) -> None:
    """A line in the style of a run; `options` are those of `axes.plot` and take precedence."""
    line = {"color": run.color, "dashes": run.dashes, "marker": run.marker, "markersize": run.size, "linewidth": 2}
    axes.plot(x, y, **{**line, "label": run.label, **options})


def plot_marker(axes: Any, x: float, y: float, run: RunStyle, **options: Any) -> None:
    """One point with the marker of a run."""
    axes.plot([x], [y], **{"color": run.color, "marker": run.marker, "linestyle": "", "label": run.label, **options})


def plot_band(axes: Any, x: Sequence[float], y: Sequence[float], errors: Sequence[float], color: Any) -> None:
    """One error below and above a line, shaded."""
    low, high = ([value + sign * e for value, e in zip(y, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def label_band(axes: Any, data: Mapping[str, Any]) -> None:
    """The entry of the legend for the bands of a figure that is a mean over seeds."""
    if "sources" in data:
        label = f"± one standard deviation over {number_of_seeds(data)} seeds"
        axes.fill_between([], [], color=style.GRAY, alpha=0.3, linewidth=0, label=label)


def legend_below(figure: Any, axes: Any, columns: int = 4) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)


def add_note(figure: Figure, text: str) -> None:
    """Small text above the panels, wrapped to the width of the figure."""
    lines = textwrap.wrap(text, int(15 * figure.get_figwidth()))
    figure.suptitle("\n".join(lines), fontsize=8.5, color=style.NOTE_COLOR, x=0.01, ha="left")


def colored_words(axes: Any, words: Sequence[tuple[str, str]]) -> None:
    """(text, color) pairs in a row, right-aligned on the line of the title."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    parts: list[Any] = [TextArea(text, textprops={"color": color, "fontsize": 9}) for text, color in words]
    row = HPacker(children=parts, align="baseline", pad=0, sep=6)
    anchored = AnchoredOffsetbox(
        "lower right", child=row, frameon=False, pad=0, borderpad=0.35, bbox_to_anchor=(1, 1),
        bbox_transform=axes.transAxes,
    )  # fmt: skip
    axes.add_artist(anchored)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `STEM.png` and `STEM.pdf`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(stem.name + suffix) for suffix in SAVE_OPTIONS]
    print_dollars(figure)
    for file in files:
        figure.savefig(file, **SAVE_OPTIONS[file.suffix])
    return files


def print_dollars(figure: Figure) -> None:
    """Texts may contain names of others, so '$' is a dollar sign and not the beginning of a formula; the numbers of a
    logarithmic axis are formulas."""
    from matplotlib.text import Text

    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis) if axis.get_scale() == "log"]
    formulas = {id(text) for axis in axes for text in axis.get_ticklabels(which="both")}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and id(text) not in formulas:
            if text.get_wrap():  # the width of wrapped text is measured as that of a formula, whatever is set
                text.set_text(text.get_text().replace("$", r"\$"))
            else:
                text.set_parse_math(False)


def describe_evaluation(data: Mapping[str, Any]) -> str:
    """`CIFAR-100; all test images; BatchNorm statistics interpolated`: part of the note of every geometry figure.

    `; mean of 3 seeds` is added if it is one (`incvec.study.figures.mean`).
    """
    count = data["images_per_task"]
    images = "all test images" if count is None else f"at most {count} test images per task"
    mean = f"; mean of {number_of_seeds(data)} seeds" if "sources" in data else ""
    return f"{style.dataset(data['dataset'])}; {images}; BatchNorm statistics {data['batchnorm']}d{mean}"


def number_of_seeds(data: Mapping[str, Any]) -> int:
    """How many seeds a path or curvature figure is the mean of (`incvec.study.figures.mean`)."""
    return len(data.get("sources", [data]))
