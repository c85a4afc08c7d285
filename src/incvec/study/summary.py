"""The README's results: the main table, one figure and the time, made from the records and figures under results/.

python -m incvec.study.catalog --readme README.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from incvec.records import find_records, read_record, title
from incvec.study import style
from incvec.study.figures import find_figures, read_figure
from incvec.study.figures.canvas import number_of_seeds
from incvec.study.paper import INCREMENTS, Comparison, Records, compare, not_run_notes, paper_tables
from incvec.study.tables import Table, duration

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
DATASET = "cifar100"
NOT_RUN = "not run"
CAPTION = "Accuracy and loss along the lines between models"


def render(folder: Path) -> str:
    """Everything between the README's markers; paths are relative to the parent of `folder`."""
    files = find_records([folder]) if folder.is_dir() else []
    records = [record for record in map(read_record, files) if record["dataset"] != "digits"]
    table, notes = main_table([record for record in records if record["dataset"] == DATASET])
    return "\n\n".join([table.markdown(), *notes, time_text(records), figure_text(folder)])


def main_table(records: Records) -> tuple[Table, list[str]]:
    """Every host of IVT without and with it, and why cells are not run."""
    content = paper_tables("scratch")[DATASET]
    values = {tasks: compare(DATASET, tasks, records) for tasks in INCREMENTS}
    names = [name for host in content["rows"] if f"{host} + ivt" in content["rows"] for name in (host, f"{host} + ivt")]
    rows = [[style.label(name), *(cell_text(values[tasks][name][:3]) for tasks in INCREMENTS)] for name in names]
    run = {(style.label(name), tasks): values[tasks][name][0].ours for name in names for tasks in INCREMENTS}
    reasons = {style.label(name): reason for name, reason in content["not_run"].items()}
    table = Table(["method", *(f"{tasks} increments" for tasks in INCREMENTS)], rows)
    return table, not_run_notes(reasons, run)


def cell_text(values: Sequence[Comparison]) -> str:
    """`64.86 · 55.10 · 17.20 (3 seeds)`, and the paper's in italics below."""
    seeds = len(values[0].ours)
    ours = " · ".join(f"{value.mean:.2f}" for value in values if value.mean is not None) or NOT_RUN
    ours += f" ({seeds} seeds)" if seeds > 1 else ""
    return f"{ours}<br>*{' · '.join(f'{value.paper:.2f}' for value in values)}*"


def time_text(records: Records) -> str:
    if not records:
        return f"GPU time: {NOT_RUN}."
    devices = ", ".join(sorted({str(record["environment"]["device"]) for record in records}))
    seconds = sum(record["seconds"] for record in records)
    return (
        f"GPU time: the {len(records)} runs behind this and the other tables add up to {duration(seconds)} on "
        f"{devices}. Several shared the card, so it was busy for less."
    )


def figure_text(folder: Path) -> str:
    """The path figure with its numbers in words: first one with interpolated BatchNorm statistics, a mean over seeds
    before one of a single seed."""
    figures = {file: read_figure(file) or {} for file in (find_figures([folder]) if folder.is_dir() else [])}

    def order(item: tuple[Path, Mapping[str, Any]]) -> tuple[bool, int]:
        return item[1].get("batchnorm") == "recalibrate", -number_of_seeds(item[1])

    for file, data in sorted(figures.items(), key=order):
        picture = file.with_suffix(".png")
        if (data.get("kind"), data.get("dataset")) == ("path", DATASET) and picture.is_file():
            text = path_text(data) + recalibrated_text(data, figures.values())
            return f"![{CAPTION}]({picture.relative_to(folder.parent).as_posix()})\n\n{text}"
    return "Figure: not made yet."


def path_text(data: Mapping[str, Any]) -> str:
    first, last = data["task_from"] + 1, data["task_to"] + 1
    parts = []
    for curve in data["curves"]:
        old, barrier = curve["accuracy"]["old"], curve["barrier"]["accuracy"]["old"]
        name = style.label(title(curve))
        parts.append(f"{name} {min(old):.1f} at its lowest and {old[-1]:.1f} at the end (barrier {barrier:.1f})")
    mean = f" (mean of {number_of_seeds(data)} seeds)" if number_of_seeds(data) > 1 else ""
    return (
        f"On the straight line from the model after task {first} to that after task {last}, accuracy on the first "
        f"{'task' if first == 1 else 'tasks'} begins at {data['curves'][0]['accuracy']['old'][0]:.1f} %{mean}: "
        f"{'; '.join(parts)}."
    )


def recalibrated_text(data: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """The barriers on the same path with BatchNorm statistics re-estimated at every point, if that was measured."""
    same = ("kind", "dataset", "task_from", "task_to", "start")
    for other in others:
        if other.get("batchnorm") != "recalibrate" or any(other.get(key) != data.get(key) for key in same):
            continue
        if data.get("batchnorm") != "interpolate" or number_of_seeds(other) != number_of_seeds(data):
            continue
        if [*map(title, other["curves"])] == [*map(title, data["curves"])]:
            barriers = ", ".join(f"{curve['barrier']['accuracy']['old']:.1f}" for curve in other["curves"])
            return f" With BatchNorm statistics re-estimated at every point, the barriers are {barriers}."
    return ""
