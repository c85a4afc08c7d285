"""Tables of REPRODUCED.md that the paper does not have: the interval between teleports, and the time of a row."""

from __future__ import annotations

import statistics
from typing import Any

from incvec.study import paper
from incvec.study.comparisons import NOT_RUN
from incvec.study.paper import METRICS, Records
from incvec.study.runs import Record, row_name
from incvec.study.tables import Table, make_row, mean, number

INTERVAL_SWEEP = "ivt-interval"
SEEDS = 3  # of every cell of the paper's table


def interval_table(dataset: str, records: Records) -> Table | None:
    """Epochs between teleports: ours, and the gain over the host, paired by seed, ± standard error."""
    host, *others = paper.sweep_configs(INTERVAL_SWEEP)
    if host.dataset != dataset:
        return None
    plain = paper.by_seed(paper.records_of(host, records))
    rows = []
    for config in others:
        cell = paper.by_seed(paper.records_of(config, records))
        interval: Any = config.sections["ivt"]["interval"]
        cells = []
        for metric, gain in zip(METRICS, paper.paired_gains(cell, plain), strict=True):
            cells.append(mean(paper.values_of(cell, metric), count=True, missing=NOT_RUN))
            cells.append(mean(gain.ours, "+.2f", error=True, missing=""))
        rows.append(make_row("only at the end" if interval is None else str(interval), *cells))
    return Table(["interval", *(label for metric in METRICS for label in (metric, "gain"))], rows)


def time_table(dataset: str, records: Records) -> Table | None:
    """Time of the rows of the paper's table on a GPU, from records; the last line adds them up."""
    own = [r for r in records if r["dataset"] == dataset and paper.is_standard(r) and is_timed(r)]
    cells: dict[tuple[str, int], list[float]] = {}
    bases: dict[str, list[float]] = {}
    for record in own:
        seconds = record["task_seconds"]
        cells.setdefault((row_name(record), record["tasks"]), []).append(sum(seconds[1:]) / 60)
        if not record["base"].get("shared"):
            bases.setdefault(record["method"], []).append(seconds[0] / 60)
    published = paper.paper_tables("scratch")[dataset]["rows"]
    expected = [(row, tasks) for row, by_tasks in published.items() for tasks in by_tasks]
    if not any(cell in cells for cell in expected):
        return None
    rows = []
    for row in published:
        times = [mean(cells.get((row, tasks), []), ".1f", missing=NOT_RUN) for tasks in paper.INCREMENTS]
        base = bases.get(row.split(" + ")[0], [])
        rows.append(make_row(row, number(statistics.mean(base) if base else None, ".1f", ""), *times))
    known = [statistics.mean(cells[cell]) for cell in expected if cell in cells]
    total = sum(known) + sum(map(statistics.mean, bases.values()))
    hours = total / 60
    text = f"{len(known)} of {len(expected)} cells: {hours:.1f} h for one seed, {SEEDS * hours:.1f} h for {SEEDS}"
    rows.append(make_row("all", text, *[""] * len(paper.INCREMENTS)))
    return Table(["row", "base task", *(f"{tasks} increments" for tasks in paper.INCREMENTS)], rows)


def is_timed(record: Record) -> bool:
    """On a GPU, and with the time of every task: a run that started from another's snapshot lacks some."""
    complete = len(record.get("task_seconds") or []) == len(record["accuracy"])
    return complete and str(record["environment"].get("device")).startswith("NVIDIA")
