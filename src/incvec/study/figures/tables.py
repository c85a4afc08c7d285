"""The main numbers of each figure as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from incvec.study.figures.canvas import number_of_seeds
from incvec.study.figures.path import MIN_R2, has_linear_fit
from incvec.study.figures.plane import describe_starts
from incvec.study.tables import Column, Table, make_row, number, percent

Data = Mapping[str, Any]


def path_table(data: Data) -> Table:
    """Length of every path, accuracy on the old tasks at its ends and lowest point, and barriers."""
    first, last = data["task_from"] + 1, data["task_to"] + 1
    rows = []
    for curve in data["curves"]:
        old, barrier = curve["accuracy"]["old"], curve["barrier"]
        values = [curve["length"], old[0], min(old), old[-1], barrier["accuracy"]["old"]]
        loss_barrier, new_end = number(barrier["loss"]["old"], ".3f"), number(curve["accuracy"]["new"][-1])
        rows.append([curve["name"], *map(number, values), loss_barrier, new_end])
    labels = ("length", "start", "lowest", "end", "barrier", "loss\nbarrier", "new tasks,\nend")
    note = (
        f"Straight lines from the model after task {first} to that after task {last}; accuracy on the tasks up to "
        f"{first} in percent. Barrier: the largest drop below the straight line between the ends. BatchNorm statistics "
        f"{data.get('batchnorm', 'interpolate')}d." + mean_note(data)
    )
    title = f"From task {first} to task {last}: accuracy on the old tasks"
    return Table(["run", *map(Column, labels)], rows, title, note)


def tradeoff_table(data: Data) -> Table:
    rows = []
    for panel in data["panels"]:
        for curve in panel["curves"]:
            tasks = f"{panel['task_from'] + 1} to {panel['task_to'] + 1}"
            values = [number(curve["accuracy"][group][-1]) for group in ("old", "new")]
            slope = curve["fit"]["slope"] if has_linear_fit(curve) else None
            rows.append([curve["name"], tasks, *values, number(slope, ".3f"), number(curve["fit"]["r2"], ".3f")])
    title = "Linear fit of the accuracy on new classes to that on old ones"
    note = f"Without a slope: r² is below {MIN_R2:g}, the points are not on a line." + mean_note(data["panels"][0])
    return Table(["run", "tasks", *map(Column, ("old, end", "new, end", "slope", "r²"))], rows, title, note)


def plane_table(data: Data) -> Table:
    rows = []
    for mark in data["marks"]:
        name = f"start, after task {data['task']}" if mark["role"] == "origin" else mark["name"]
        keys = ("loss", "accuracy", "to_origin", "to_oracle")
        rows.append([name, *(number(mark.get(key)) for key in keys)])
    labels = ("loss", "accuracy", "from the start", "from the oracle")
    return Table(["model", *map(Column, labels)], rows, note=describe_starts(data))


def gap_table(data: Data) -> Table:
    rows = []
    for run in data["runs"]:
        deviation = "" if run["LA"]["std"] is None else f" ± {run['LA']['std']:.2f}"
        rows.append(
            [run["name"], str(len(run["seeds"])), f"{run['LA']['mean']:.2f}{deviation}", percent(run["gap_closed"])]
        )
    return Table(["run", *map(Column, ("seeds", "LA", "gap closed"))], rows)


def curvature_table(data: Data) -> Table:
    rows = []
    for task in data["tasks"]:
        total, per_sample = task["parts"]["all"], task["predicted_per_sample"]
        values = [total["fisher_ratio"], task["predicted"][-1], per_sample and per_sample[-1], task["measured"][-1]]
        ratio, *losses = (number(value, ".3g") for value in values)
        cells = [ratio, number(total["scale"], ".3f"), number(task["length"]), *losses]
        rows.append(make_row(str(task["task"] + 1), *cells))
    labels = ("F / past", "mean S", "distance", "½ d'Fd", "½ d'(B F)d", "measured")
    return Table(["task", *map(Column, labels)], rows, note=mean_note(data).strip())


def mean_note(data: Data) -> str:
    seeds = number_of_seeds(data)
    return f" Means of {seeds} seeds; the JSON file has the standard deviations." if seeds > 1 else ""


TABLES = {
    "path": path_table,
    "tradeoff": tradeoff_table,
    "plane": plane_table,
    "gap": gap_table,
    "curvature": curvature_table,
}
