"""The tables of runs that `incvec show`, `run` and `demo` print.

They have one row per run, or one per configuration, with mean and standard deviation over its seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from incvec.errors import ConfigError
from incvec.presets import changed_settings
from incvec.records import title
from incvec.study.runs import Record, comparison_key, pair_with_oracle, settings_text
from incvec.study.tables import Column, Table, make_row, mean, number, percent


@dataclass(frozen=True)
class RunRow:
    """One run in a table; accuracies in percent, `gap_closed` a fraction."""

    run: str
    dataset: str
    tasks: int
    seed: int
    AA: float
    LA: float
    FM: float | None  # None if there was a single task
    gap_closed: float | None
    seconds: float | None
    path: str | None = None
    changed: str | None = None  # settings, or the folder if rows would read the same otherwise
    # Of a run with add-ons: its metric minus that of the same method without them, with the same seed and settings.
    gain_AA: float | None = None
    gain_LA: float | None = None
    gain_FM: float | None = None


def run_rows(records: Sequence[Record], paths: Sequence[str] | None = None) -> list[RunRow]:
    """One row per record, in the given order."""
    names = [(title(record), record["dataset"], record["tasks"], record["seed"]) for record in records]
    plain = {
        comparison_key(record): record["metrics"] for record in records if not record["addons"] and not record["oracle"]
    }
    rows = []
    for index, (record, name, gap) in enumerate(zip(records, names, pair_with_oracle(records), strict=True)):
        average, last, forgetting = (record["metrics"].get(metric) for metric in ("AA", "LA", "FM"))
        path = None if paths is None else paths[index]
        changed = _changed(record, path if names.count(name) > 1 else None)
        closed = None if gap is None else gap.closed
        host = plain.get(comparison_key(record)) if record["addons"] and not record["oracle"] else None
        gains = [_gain(record["metrics"], host, metric) for metric in ("AA", "LA", "FM")]
        rows.append(RunRow(*name, average, last, forgetting, closed, record.get("seconds"), path, changed, *gains))
    return rows


def _gain(own: Record, plain: Record | None, metric: str) -> float | None:
    if plain is None or own.get(metric) is None or plain.get(metric) is None:
        return None
    return float(own[metric]) - float(plain[metric])


def sort_rows(rows: Iterable[RunRow], by: str = "name") -> list[RunRow]:
    """By name: methods together, plain first, then add-ons, the oracle last. By a metric: the best first."""

    def name(row: RunRow) -> tuple[Any, ...]:
        oracle = row.run.endswith(" oracle")
        return (
            row.dataset, row.tasks, row.run.split()[0], oracle, row.run.count("+"), row.run, row.changed or "", row.seed
        )  # fmt: skip

    rows = sorted(rows, key=name)
    if by == "name":
        return rows
    lowest_first = by in ("FM", "seconds")
    known = [row for row in rows if getattr(row, by) is not None]
    known.sort(key=lambda row: getattr(row, by) * (1 if lowest_first else -1))
    return known + [row for row in rows if getattr(row, by) is None]


def show_tables(rows: Sequence[RunRow], each: bool = False, footnotes: bool = True) -> list[Table]:
    """One row per run; if any configuration was run with several seeds, one per configuration, a table per stream.

    `each` asks for one row per run in any case.
    """
    if each or not has_several_seeds(rows):
        return [runs_table(rows, footnotes=footnotes)]
    streams: dict[tuple[str, int], list[RunRow]] = {}
    for row in rows:
        streams.setdefault((row.dataset, row.tasks), []).append(row)
    return [
        seeds_table(members, f"{dataset}, {tasks} tasks", footnotes) for (dataset, tasks), members in streams.items()
    ]


def has_several_seeds(rows: Sequence[RunRow]) -> bool:
    return any(len(group) > 1 for group in by_configuration(rows))


def by_configuration(rows: Sequence[RunRow]) -> list[list[RunRow]]:
    """Rows that differ only in their seed, in the order of the first of them."""
    groups: dict[tuple[Any, ...], list[RunRow]] = {}
    for row in rows:
        key: tuple[Any, ...] = (row.run, row.dataset, row.tasks, row.changed)
        if any(row.seed == other.seed for other in groups.get(key, ())):  # two results: not one configuration
            key = (*key, row.path)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def seeds_table(rows: Sequence[RunRow], title: str = "", footnotes: bool = True) -> Table:
    """Runs of one stream, one row per configuration: mean and standard deviation over its seeds, the paired gain of
    add-ons in LA, and the mean share of the gap closed.
    """
    notes: dict[str, int] = {}
    table_rows = []
    for group in by_configuration(rows):
        first = group[0]
        gaps = _known(group, "gap_closed")
        cells = [mean(_known(group, metric), ".1f") for metric in ("AA", "LA", "FM")]
        cells += [mean(_known(group, "gain_LA"), "+.1f"), percent(statistics.mean(gaps) if gaps else None)]
        name = _noted(first, notes, footnotes)
        table_rows.append(make_row(name, str(len(group)), *cells, dim=first.run.endswith(" oracle")))
    labels = ("seeds", "AA", "LA", "FM", "gain\nin LA", "gap\nclosed")
    note = "\n".join(f"[{index}] {text}" for text, index in notes.items())
    return Table(["run", *map(Column, labels)], table_rows, title, note)


def _known(rows: Sequence[RunRow], field: str) -> list[float]:
    """The values of the seeds that have one."""
    return [value for row in rows if (value := getattr(row, field)) is not None]


def _noted(row: RunRow, notes: dict[str, int], footnotes: bool) -> str:
    """The name of a run with its changed settings, or with the number of a note that lists them."""
    if not row.changed:
        return row.run
    return f"{row.run} [{notes.setdefault(row.changed, len(notes) + 1)}]" if footnotes else f"{row.run} ({row.changed})"


def _changed(record: Record, path: str | None) -> str | None:
    """The settings a run changed; the folder of a run with its presets' settings, if `path` is given."""
    folder = Path(path).parent.name if path else None
    try:
        changes = changed_settings(record["config"])
    except (ConfigError, KeyError):  # of a method that is not installed, or of an incomplete record
        return folder
    return settings_text(changes) or (f"as preset, in {folder}" if folder else None)


def runs_table(rows: Sequence[RunRow], footnotes: bool = True) -> Table:
    """Changed settings are listed in numbered notes below the table, or after the runs' names."""
    notes: dict[str, int] = {}
    table_rows = []
    for row in rows:
        name = _noted(row, notes, footnotes)
        numbers = [*map(number, (row.AA, row.LA, row.FM)), percent(row.gap_closed), number(row.seconds, ".1f")]
        dim = row.run.endswith(" oracle")
        table_rows.append(make_row(name, row.dataset, str(row.tasks), str(row.seed), *numbers, dim=dim))
    labels = ("tasks", "seed", "AA", "LA", "FM", "gap\nclosed", "seconds")  # 80 columns are enough
    note = "\n".join(f"[{index}] {text}" for text, index in notes.items())
    return Table(["run", "data set", *map(Column, labels)], table_rows, note=note)
