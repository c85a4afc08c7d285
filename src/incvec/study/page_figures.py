"""Figures that `incvec study` wrote among the records, for the report: a table and charts of each for the page, and the
figure itself as files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from incvec.errors import DataError
from incvec.file_names import safe_name
from incvec.records import title
from incvec.study import style
from incvec.study.charts import Chart, Line, Lines, Mark, Plane
from incvec.study.figures import find_figures, read_figure, redraw
from incvec.study.figures.canvas import describe_evaluation, number_of_seeds
from incvec.study.figures.curvature import PREDICTIONS, layer_group_label, network_order
from incvec.study.figures.path import DISTANCE, SHARE, describe_fit, describe_path, task_range
from incvec.study.figures.plane import describe_starts
from incvec.study.figures.tables import TABLES
from incvec.study.tables import Table

Data = Mapping[str, Any]
Made = TypeVar("Made")

KINDS = {
    "path": "Linear path",
    "tradeoff": "Accuracy on old against new classes along the linear path",
    "plane": "Loss around the solutions",
    "gap": "The oracle gap",
    "curvature": "Curvature, and the forgetting that it predicts",
}


@dataclass(frozen=True)
class StudyFigure:
    """The JSON data of one figure."""

    file: Path
    data: Mapping[str, Any] = field(repr=False)
    number: int = 0  # set for all figures if some have the same names of folder and file

    @property
    def slug(self) -> str:
        return safe_name(f"study-{self.file.parent.name}-{self.file.stem}" + (f"-{self.number}" if self.number else ""))

    @property
    def title(self) -> str:
        return f"{KINDS[self.data['kind']]} ({self.file.with_suffix('') if self.number else self.file.stem})"

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The figure drawn from its data, by file ending."""
        with tempfile.TemporaryDirectory() as folder:
            return {file.suffix: file.read_bytes() for file in redraw(self.file, Path(folder) / "picture")}

    @cached_property
    def table(self) -> Table:
        """The main numbers."""
        table = self._from_data(TABLES[self.data["kind"]])
        return Table(table.columns, table.rows, self.title, table.note, f"{self.slug}-table")

    @cached_property
    def charts(self) -> tuple[Chart, ...]:
        """The figure for the page; that of a gap is in the charts of the records and in the table."""
        make = CHARTS.get(self.data["kind"])
        return () if make is None else self._from_data(lambda data: tuple(make(data, self)))

    def _from_data(self, make: Callable[[Data], Made]) -> Made:
        try:
            return make(self.data)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            kind = self.data["kind"]
            raise DataError(f"{self.file} is damaged ({error!r}): make it again with `incvec study {kind}`.") from None


def path_charts(data: Data, figure: StudyFigure) -> Iterator[Chart]:
    """Accuracy and loss on old and new tasks, against the distance and against the share of the way."""
    first, last = data["task_from"], data["task_to"]
    tasks = {"old": task_range(range(first + 1)), "new": task_range(range(first + 1, last + 1))}
    share_first = data.get("axis") == "share"
    seeds = number_of_seeds(data)
    for metric in ("accuracy", "loss"):
        for group, names in tasks.items():
            lines = []
            for curve in data["curves"]:
                axes = (floats(curve["distance"]), floats(curve["x"]))
                x, other = axes[::-1] if share_first else axes
                y = floats(curve[metric][group])
                errors = floats(curve["std"][metric][group]) if "std" in curve else None
                lines.append(Line(title(curve), style.shorten(curve["name"]), x, y, errors, seeds, other))
            labels = (SHARE, DISTANCE) if share_first else (DISTANCE, SHARE)
            unit, y_label = (" %", "accuracy, %") if metric == "accuracy" else ("", "loss")
            heading = f"{figure.title}: {metric} on {names}"
            yield Lines(
                f"{figure.slug}-{metric}-{group}", heading, labels[0], y_label, tuple(lines), dense=True,
                note=describe_path(data), unit=unit, other_x_label=labels[1],
            )  # fmt: skip


def tradeoff_charts(data: Data, figure: StudyFigure) -> Iterator[Chart]:
    """Accuracy on old against new classes along the paths, one chart per end of a path."""
    for panel in data["panels"]:
        first, last = panel["task_from"], panel["task_to"]
        old, new = task_range(range(first + 1)), task_range(range(first + 1, last + 1))
        lines = []
        for curve in panel["curves"]:
            x, y = (floats(curve["accuracy"][key]) for key in ("old", "new"))
            label = f"{style.shorten(curve['name'])}: {describe_fit(curve)}"
            lines.append(Line(title(curve), label, x, y, None, number_of_seeds(panel)))
        yield Lines(
            f"{figure.slug}-{last}", f"{figure.title}: from task {first + 1} to task {last + 1}",
            f"accuracy on {old}, %", f"accuracy on {new}, %", tuple(lines), dense=True, note=describe_path(panel),
        )  # fmt: skip


def plane_charts(data: Data, figure: StudyFigure) -> Iterator[Chart]:
    """The loss around the models."""
    marks = []
    for mark in data["marks"]:
        start = mark["role"] == "origin"
        label = f"start, after task {data['task']}" if start else style.label(title(mark))
        label += f", projected ({mark['off_plane']:.1f} off the plane)" if mark["role"] == "oracle" else ""
        text = f"loss {mark['loss']:.2f}, {mark['accuracy']:.1f} %"
        marks.append(Mark("start" if start else title(mark), label, float(mark["a"]), float(mark["b"]), text))
    values = tuple(tuple(round(value, 4) for value in floats(row)) for row in data["loss"])
    colors = f"dark blue is a loss of {min(map(min, values)):.2g}, yellow a high one (logarithmic)"
    note = "; ".join(filter(None, (describe_evaluation(data), describe_starts(data), colors)))
    heading = f"{figure.title}: test loss on all classes seen, after task {data['task'] + 1}"
    yield Plane(figure.slug, heading, floats(data["a"]), floats(data["b"]), values, tuple(marks), note=note)


def curvature_charts(data: Data, figure: StudyFigure) -> Iterator[Chart]:
    """Mean S by layer group, and the predicted and the measured change of the loss at the end of each task."""
    tasks, seeds = data["tasks"], number_of_seeds(data)
    groups = sorted({name for task in tasks for name in task["parts"] if name != "all"}, key=network_order)
    lines = []
    for task in tasks:
        shown = [(k, task["parts"][name]["scale"]) for k, name in enumerate(groups) if name in task["parts"]]
        x, y = (floats(values) for values in zip(*shown, strict=True))
        spread = task["std"]["parts"] if "std" in task else None
        errors = floats(spread[name]["scale"] for name in groups if name in spread) if spread else None
        lines.append(Line(f"task {task['task'] + 1}", f"task {task['task'] + 1}", x, y, errors, seeds))
    names = tuple(map(layer_group_label, groups))
    note = f"{data['name']}, {describe_evaluation(data)}"
    yield Lines(
        f"{figure.slug}-scale", f"{figure.title}: mean S by layer group", "layer group", "mean S", tuple(lines),
        note=note, unit="", x_names=names,
    )  # fmt: skip
    run = " + ".join([data["method"], *data["addons"]])
    ends = []
    for key, label in (("measured", "measured"), *((key, label) for key, label, _ in PREDICTIONS)):
        points = [(task["task"] + 1, task[key][-1]) for task in tasks if task[key] is not None]
        if points:
            x, y = (floats(values) for values in zip(*points, strict=True))
            spreads = [task["std"][key][-1] for task in tasks if "std" in task and task[key] is not None]
            errors = floats(spreads) if spreads else None
            ends.append(Line(run if key == "measured" else key, label, x, y, errors, seeds))
    yield Lines(
        f"{figure.slug}-forgetting", f"{figure.title}: change of the old tasks' test loss", "task learned",
        "change of the loss", tuple(ends), note=note, unit="",
    )  # fmt: skip


def floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


CHARTS: dict[str, Callable[[Data, StudyFigure], Iterator[Chart]]] = {
    "path": path_charts,
    "tradeoff": tradeoff_charts,
    "plane": plane_charts,
    "curvature": curvature_charts,
}


def find_study_figures(paths: Sequence[Path]) -> list[StudyFigure]:
    """Every figure at or below the folders, each with a slug of its own."""
    files = find_figures([path for path in paths if path.is_dir()])
    figures = [StudyFigure(file, data) for file in files if (data := read_figure(file))]
    figures.sort(key=lambda figure: (figure.file.parent, list(KINDS).index(figure.data["kind"])))
    if len({figure.slug for figure in figures}) < len(figures):
        return [replace(figure, number=number) for number, figure in enumerate(figures, start=1)]
    return figures
