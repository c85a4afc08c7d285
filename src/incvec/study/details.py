"""What happened inside the runs of a panel: losses, S and distance of the teleports, accuracy by class."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

from incvec.errors import DataError
from incvec.study import style
from incvec.study.charts import Heat, Line, Lines, commands_of, make_line
from incvec.study.groups import Group, Panel
from incvec.study.tables import Cell, Column, Table, mean, number

MAX_POINTS = 240  # of a loss curve
MAX_CLASSES = 200  # of a table
STATISTICS = {  # of an add-on, by task: label, meaning
    "scale": ("mean S", "S = 1 keeps the increment, ½ halves it."),
    "distance": ("distance from the anchor", "How far the task has moved the weights."),
}


@dataclass(frozen=True)
class Details:
    training: tuple[Lines, ...]  # losses, and the statistics of the teleports
    classes: Table | None
    confusion: tuple[Heat, ...]


def panel_details(panel: Panel) -> Details:
    """All of them; DataError if a record has something else in their place."""
    try:
        loss = loss_chart(panel)
        training = [*([loss] if loss else []), *(chart for name in STATISTICS for chart in addon_charts(panel, name))]
        return Details(tuple(training), class_table(panel), tuple(confusion_charts(panel)))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        files = ", ".join(run.path for group in panel.groups for run in group.runs)
        raise DataError(
            f"losses, statistics or counts by class are damaged ({error!r}) in one of these records: {files}. Run it "
            "again, or remove it."
        ) from error


def loss_chart(panel: Panel) -> Lines | None:
    """The training loss of the main stages, summed over its terms."""
    drawn = [(group, line) for group in panel.groups if (line := loss_line(group))]
    if not drawn:
        return None
    return Lines(
        f"{panel.name}-loss", f"{panel.title}: training loss", "task, and share of its epochs", "training loss",
        tuple(line for _, line in drawn), dense=True, unit="", commands=commands_of(group for group, _ in drawn),
        note="All terms of the main stage, mean over the steps of an epoch and over the seeds. Terms differ by method.",
    )  # fmt: skip


def loss_line(group: Group) -> Line | None:
    curves = [curve for run in group.runs if (curve := loss_curve(run.record))]
    if not curves:
        return None
    x = [place for place, _ in curves[0]]
    samples = list(zip(*([value for _, value in curve] for curve in curves), strict=False))
    means = tuple(round(statistics.mean(values), 4) for values in samples)
    return Line(group.title, group.label, tuple(x[: len(means)]), means, None, len(curves))


def loss_curve(record: Any) -> list[tuple[float, float]]:
    """(task and share of its epochs, loss): 2.5 is in the middle of task 2. At most about `MAX_POINTS`."""
    stages = [row for row in record.get("losses") or [] if row["stage"] == "main" and row["terms"]]
    curve = []
    for row in stages:
        totals = [math.fsum(values) for values in zip(*row["terms"].values(), strict=False)]
        every = math.ceil(len(totals) * len(stages) / MAX_POINTS)
        kept = [epoch for epoch in range(1, len(totals) + 1) if epoch % every == 0 or epoch in (1, len(totals))]
        curve += [(round(row["task"] + 1 + (epoch - 1) / len(totals), 4), totals[epoch - 1]) for epoch in kept]
    return curve


def addon_charts(panel: Panel, name: str) -> list[Lines]:
    """One statistic of the add-ons over the whole network: at every teleport, and at the end of each task for records
    without their teleports."""
    at_teleports: list[tuple[Group, Line]] = []
    by_task: list[tuple[Group, Line]] = []
    for group in panel.groups:
        for addon in group.record["addons"]:
            teleports = any(teleports_of(run.record, addon) for run in group.runs)
            curve_of = teleport_curve if teleports else statistic_by_task
            curves = [curve for run in group.runs if (curve := curve_of(run.record, addon, name))]
            if len({tuple(curve) for curve in curves}) == 1:  # at the same places for all seeds
                samples = list(zip(*(curve.values() for curve in curves), strict=True))
                line = make_line(group.title, group.label, tuple(curves[0]), samples)
                if teleports:
                    at_teleports.append((group, replace(line, errors=None)))
                else:
                    by_task.append((group, line))
    label, meaning = STATISTICS[name]
    charts = []
    if at_teleports:
        after = " A task begins at 0; each teleport is a step down." if name == "distance" else ""
        charts.append(
            Lines(
                f"{panel.name}-teleports-{name}", f"{panel.title}: {label} at the teleports",
                "task, and share of its epochs", label, tuple(line for _, line in at_teleports), dense=True, unit="",
                commands=commands_of(group for group, _ in at_teleports),
                note=f"{meaning}{after} Over all teleported parameters, mean over the seeds.",
            )
        )  # fmt: skip
    if by_task:
        charts.append(
            Lines(
                f"{panel.name}-{name}", f"{panel.title}: {label} at the end of each task", "task", label,
                tuple(line for _, line in by_task), unit="", commands=commands_of(group for group, _ in by_task),
                note=f"{meaning} Over all parameters, at the end of each task, with the F of its last epoch.",
            )
        )  # fmt: skip
    return charts


def statistic_by_task(record: Any, addon: str, name: str) -> dict[float, float]:
    """The value by task (from 1) for the tasks that have it: never the first."""
    rows = [(row.get(addon) or {}).get("all") or {} for row in record.get("statistics") or []]
    return {task: float(row[name]) for task, row in enumerate(rows, start=1) if row.get(name) is not None}


def teleport_curve(record: Any, addon: str, name: str) -> dict[float, float]:
    """The value by task and share of its epochs: 2.5 is in the middle of task 2."""
    curve: dict[float, float] = {}
    for task, rows in teleports_of(record, addon):
        if name == "distance":
            curve[round(task + 1 + 2e-4, 4)] = 0.0  # a task begins at its anchor
        for k, epoch in enumerate(rows["epoch"]):
            place = round(task + 1 + epoch / rows["of"], 4)
            if name == "distance":
                curve[place] = float(rows["distance_before"][k])
                curve[round(place + 1e-4, 4)] = float(rows["distance_after"][k])
            else:
                curve[place] = float(rows[name][k])
    return curve


def teleports_of(record: Any, addon: str) -> list[tuple[int, Any]]:
    """(task, statistics of its teleports); empty for records of earlier versions."""
    rows = [(row.get(addon) or {}).get("teleports") for row in record.get("statistics") or []]
    return [(task, row) for task, row in enumerate(rows) if row and row.get("of")]


# Classes ----------------------------------------------------------------------------------------------------


def class_names(record: Any) -> list[str]:
    """In the order in which they are learned; `class 17` in records without names."""
    names = record.get("class_names") or [f"class {label}" for label in record.get("class_order") or []]
    return [style.shorten(str(name)) for name in names]


def accuracy_by_class(group: Group) -> list[list[float]]:
    """After the last task, in percent: for each class one value per seed; empty without counts."""
    by_run = []
    for run in group.runs:
        correct, counts = run.record.get("correct") or {}, run.record.get("class_counts") or []
        rows = correct.get(run.record.get("classifier")) or [[]]
        by_run.append([100 * right / count for right, count in zip(rows[-1], counts, strict=False)])
    return [list(values) for values in zip(*by_run, strict=False)]


def class_table(panel: Panel) -> Table | None:
    """Accuracy on each class after the last task."""
    columns = [(group.label, values) for group in panel.groups if (values := accuracy_by_class(group))]
    names = class_names(panel.first.record)
    count = min([len(names), *(len(values) for _, values in columns)])
    if not columns or not 0 < count <= MAX_CLASSES:
        return None
    task_of = learned_in(panel.first)
    rows = [
        [Cell(names[k]), number(task_of[k], "d", ""), *(mean(values[k]) for _, values in columns)] for k in range(count)
    ]
    labels = [Column("learned in task"), *(Column(label) for label, _ in columns)]
    note = "Accuracy after the last task in percent, mean ± standard deviation over seeds."
    return Table(["class", *labels], rows, f"{panel.title}: accuracy by class", note, f"{panel.name}-classes")


def learned_in(group: Group) -> list[int | None]:
    """The task (from 1) in which each class is learned, from the number of classes seen after each task."""
    rows = (group.record.get("correct") or {}).get(group.record.get("classifier")) or []
    seen, tasks = 0, []
    for task, row in enumerate(rows, start=1):
        tasks += [task] * (len(row) - seen)
        seen = len(row)
    return [*tasks, *[None] * len(class_names(group.record))]


def confusion_charts(panel: Panel) -> list[Heat]:
    """One matrix per group whose records have one; rows add up to 100 percent."""
    charts = []
    for place, group in enumerate(panel.groups, start=1):
        matrices: list[list[list[int]]] = [run.record.get("confusion") or [] for run in group.runs]
        if not all(matrices) or len({len(matrix) for matrix in matrices}) > 1:
            continue
        shares = [[[100 * count / (sum(row) or 1) for count in row] for row in matrix] for matrix in matrices]
        averaged = tuple(tuple(map(statistics.mean, zip(*rows, strict=True))) for rows in zip(*shares, strict=True))
        seeds = f"mean of {len(matrices)} seeds" if len(matrices) > 1 else "one seed"
        charts.append(
            Heat(
                f"{panel.name}-confusion-{place}", f"{group.label}: confusion, {panel.stream}", group.label, averaged,
                0, 100, f"After the last task, in percent of the images of a class; {seeds}.", "predicted",
                "true class", "{row} classified as {column}", tuple(class_names(group.record)[: len(averaged)]),
                commands=group.commands,
            )
        )  # fmt: skip
    return charts
