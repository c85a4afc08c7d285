"""The gap figure: accuracy after each task and after the last one, between the plain method and its oracle."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from incvec.study import style
from incvec.study.figures.canvas import add_note, legend_below, new_figure, plot_band, plot_marker, plot_run, style_axes
from incvec.study.figures.path import curve_styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_WIDE_BARS = 4  # more bars need a wider panel and narrower labels


def draw_gap(data: Mapping[str, Any]) -> Figure:
    """Accuracy over the tasks on the left, bars of the last accuracy on the right."""
    runs = data["runs"]
    crowded = len(runs) > MAX_WIDE_BARS
    extra = 0.8 * max(0, len(runs) - MAX_WIDE_BARS)
    figure = new_figure(10.5 + extra, 4.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [5.25, 5.25 + extra]})
    styles = curve_styles(runs)
    for place, (entry, run) in enumerate(zip(runs, styles, strict=True)):
        last = entry["LA"]["mean"]
        if means := [value["mean"] for value in entry["accuracy"]]:
            tasks = range(1, len(means) + 1)
            plot_run(left, tasks, means, run)
            plot_band(left, tasks, means, [value["std"] or 0.0 for value in entry["accuracy"]], run.color)
        else:
            tasks_learned = max(len(other["accuracy"]) for other in runs)
            plot_marker(left, tasks_learned, last, run, markersize=run.size + 4, label="joint (multi-task optimum)")
        bar = right.bar(place, last, yerr=entry["LA"]["std"], color=run.color, width=0.65, capsize=4)
        closed = entry["gap_closed"]
        text = "" if closed is None else f"\n{100 * closed:.0f} %{chr(10) if crowded else ' '}of the gap"
        right.bar_label(bar, [f"{last:.1f}{text.replace('-', '−')}"], fontsize=9, padding=2)
    lasts = [run["LA"]["mean"] for run in runs]
    lowest = max(0, 10 * math.floor((min(lasts) - 10) / 10))
    right.set_ylim(lowest, max(lasts) + (0.2 if crowded else 0.14) * (max(lasts) - lowest))
    style_axes(left, "Accuracy on all classes seen so far, %", "tasks learned")
    style_axes(right, "Last accuracy, %" + (" (the axis does not start at 0)" if lowest else ""), grid="y")
    right.set_xticks(range(len(runs)), [textwrap.fill(run.label, 10) for run in styles], fontsize=9)
    right.set_yticks([tick for tick in right.get_yticks() if lowest <= tick <= 100])
    left.locator_params(axis="x", integer=True)
    legend_below(figure, left)
    changes = [f"{key} {value}" for key, value in data.get("changed", {}).items()]
    parts = [style.dataset(data["dataset"]), f"{data['tasks']} increments", describe_seeds(runs), *changes]
    add_note(figure, "; ".join(parts))
    return figure


def describe_seeds(runs: Sequence[dict[str, Any]]) -> str:
    """`seeds 0, 1`; by run if they differ, with the seeds that the gap closed is averaged over."""
    if all(run["seeds"] == runs[0]["seeds"] for run in runs):
        return seeds_text(runs[0]["seeds"])
    references = [set(run["seeds"]) for run in runs if not run["addons"] and run["method"] != "joint"]  # plain, oracle
    names: dict[str, list[str]] = {}
    for run in runs:
        paired = sorted(set(run["seeds"]).intersection(*references))
        averaged = run["gap_closed"] is not None and paired != run["seeds"]
        text = seeds_text(run["seeds"]) + (f" (gap closed: {seeds_text(paired)})" if averaged else "")
        names.setdefault(text, []).append(run["name"])
    return "; ".join(f"{', '.join(labels)}: {text}" for text, labels in names.items())


def seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
