"""The mean of a figure over seeds, from the JSON files of single seeds; needs neither runs nor data sets.

The result has the layout of a figure of one seed, so the same code draws and tabulates it. Its numbers are means. `std`
beside them has the sample standard deviations in the same structure, and `sources` the seed and runs of each file.

The curves of a path are averaged at equal shares x of the way, whose grid is the same for all seeds, and drawn against
the mean distance at x. The lengths of the paths differ by a few percent from seed to seed, so at equal distances the
ends would not coincide. Barriers and linear fits are those of the single seeds, averaged.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from incvec.errors import DataError
from incvec.study.figures.files import load_figure

Data = Mapping[str, Any]

SETTINGS = (
    "kind", "dataset", "name", "method", "addons", "start", "axis", "points", "images_per_task", "batchnorm",
    "structure", "batch_size",
)  # fmt: skip
COPIED = (*SETTINGS, "oracle", "task_from", "task_to", "loss_is", "barrier_is", "task", "x", "counts")
AVERAGED = (
    "distance", "length", "length_of_shared", "accuracy", "loss", "barrier", "fit", "parts", "measured", "predicted",
    "predicted_per_sample",
)  # fmt: skip
NO_MEAN = {
    "plane": "the axes of a plane depend on its runs",
    "gap": "`incvec study gap` averages all seeds among the records",
}


def mean_figure(files: Sequence[Path]) -> dict[str, Any]:
    """The data of the mean of two or more figures that differ only in their seed."""
    figures = [load_figure(file) for file in files]
    names = ", ".join(map(str, files))
    if len(figures) < 2:
        raise DataError(f"a mean needs the JSON files of two or more seeds; given: {names}.")
    for file, data in zip(files, figures, strict=True):
        if (kind := data["kind"]) in NO_MEAN:
            raise DataError(f"{file} is a figure of kind {kind}, which cannot be averaged: {NO_MEAN[kind]}.")
        if "sources" in data.get("panels", [data])[0]:
            raise DataError(f"{file} is a mean already; give the figures of its seeds.")
    try:
        return average(files, figures)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{names} cannot be averaged ({error!r}): make all of them again with `incvec study {figures[0]['kind']}`."
        ) from None


def average(files: Sequence[Path], figures: Sequence[Data]) -> dict[str, Any]:
    """The mean of the figures' data, or of one panel of each."""
    check_settings(files, figures)
    first = figures[0]
    if first["kind"] == "tradeoff":
        panels = zip(*(data["panels"] for data in figures), strict=True)
        return {"kind": "tradeoff", "panels": [average(files, same) for same in panels]}
    check_seeds(files, figures)
    key = "curves" if first["kind"] == "path" else "tasks"
    entries = zip(*(data[key] for data in figures), strict=True)
    sources = [
        {"seed": runs_of(data)[0].get("seed"), "runs": [run["run"] for run in runs_of(data)], "commit": data["commit"]}
        for data in figures
    ]
    return {**copied(first), "sources": sources, key: [average_entry(same) for same in entries]}


def average_entry(entries: Sequence[Data]) -> dict[str, Any]:
    """One curve of a path, or one task of a curvature figure."""
    numbers = [{key: entry[key] for key in AVERAGED if key in entries[0]} for entry in entries]
    return {**copied(entries[0]), **combine(statistics.fmean, numbers), "std": combine(statistics.stdev, numbers)}


def combine(function: Callable[[Sequence[float]], float], values: Sequence[Any]) -> Any:
    """`function` of the numbers in the same place of all values, which have one structure; None if one of them is."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], Mapping):
        return {key: combine(function, [value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [combine(function, same) for same in zip(*values, strict=True)]
    return function(values)


def copied(data: Data) -> dict[str, Any]:
    return {key: data[key] for key in COPIED if key in data}


def runs_of(data: Data) -> Sequence[Data]:
    """The descriptions of the runs behind a path or a curvature figure."""
    return data["curves"] if data["kind"] == "path" else [data]


def check_settings(files: Sequence[Path], figures: Sequence[Data]) -> None:
    first, *others = map(settings, figures)
    for file, other in zip(files[1:], others, strict=True):
        for name, value in first.items():
            if other.get(name) != value:
                raise DataError(
                    f"{files[0]} and {file} differ in {name}: {value} and {other.get(name)}. A mean is over figures "
                    "that differ only in their seed."
                )


def settings(data: Data) -> dict[str, Any]:
    """What must be the same in all figures of a mean, by its name in messages; the kind is the first."""
    same = {key: data.get(key) for key in SETTINGS}
    paths = {"path": [data], "tradeoff": data.get("panels", [])}.get(data["kind"], [])
    return {
        **same,
        "tasks": [f"{path['task_from'] + 1} to {path['task_to'] + 1}" for path in paths],
        "runs": [curve["name"] for path in paths for curve in path["curves"]],
        "layer groups": {task["task"] + 1: sorted(task["parts"]) for task in data.get("tasks", [])},
    }


def check_seeds(files: Sequence[Path], figures: Sequence[Data]) -> None:
    """No seed may count twice. Files of earlier versions name a run without its seed."""
    seeds = [{run.get("seed", run["run"]) for run in runs_of(data)} for data in figures]
    for (one, first), (other, second) in itertools.combinations(zip(files, seeds, strict=True), 2):
        if first & second:
            raise DataError(
                f"{one} and {other} are both of seed or run {sorted(first & second)[0]}; give each seed once."
            )
