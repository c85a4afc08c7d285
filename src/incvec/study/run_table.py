"""The table of runs that `incvec show`, `run` and `demo` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from incvec.errors import ConfigError
from incvec.presets import changed_settings
from incvec.records import title
from incvec.study.oracle_gap import pair_with_oracle
from incvec.study.runs import Record, settings_text
from incvec.study.tables import MISSING, Cell, Column, Table, make_row, number


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


def run_rows(records: Sequence[Record], paths: Sequence[str] | None = None) -> list[RunRow]:
    """One row per record, in the given order."""
    names = [(title(record), record["dataset"], record["tasks"], record["seed"]) for record in records]
    rows = []
    for index, (record, name, gap) in enumerate(zip(records, names, pair_with_oracle(records), strict=True)):
        average, last, forgetting = (record["metrics"].get(metric) for metric in ("AA", "LA", "FM"))
        path = None if paths is None else paths[index]
        changed = _changed(record, path if names.count(name) > 1 else None)
        closed = None if gap is None else gap.closed
        rows.append(RunRow(*name, average, last, forgetting, closed, record.get("seconds"), path, changed))
    return rows


def _changed(record: Record, path: str | None) -> str | None:
    """The settings a run changed; the folder of a run with its presets' settings, if `path` is given."""
    folder = Path(path).parent.name if path else None
    try:
        changes = changed_settings(record["config"])
    except (ConfigError, KeyError):  # of a method that is not installed, or of an incomplete record
        return folder
    return settings_text(changes) or (f"as preset, in {folder}" if folder else None)


def runs_table(rows: Sequence[RunRow], title: str = "", footnotes: bool = True) -> Table:
    """Changed settings are listed in numbered notes below the table, or after the runs' names."""
    notes: dict[str, int] = {}
    table_rows = []
    for row in rows:
        name = row.run
        if row.changed:
            name += f" [{notes.setdefault(row.changed, len(notes) + 1)}]" if footnotes else f" ({row.changed})"
        closed = Cell(MISSING) if row.gap_closed is None else Cell(f"{100 * row.gap_closed:.0f} %", row.gap_closed)
        numbers = [*map(number, (row.AA, row.LA, row.FM)), closed, number(row.seconds, ".1f")]
        dim = row.run.endswith(" oracle")
        table_rows.append(make_row(name, row.dataset, str(row.tasks), str(row.seed), *numbers, dim=dim))
    labels = ("tasks", "seed", "AA", "LA", "FM", "gap\nclosed", "seconds")  # 80 columns are enough
    note = "\n".join(f"[{index}] {text}" for text, index in notes.items())
    return Table(["run", "data set", *map(Column, labels)], table_rows, title, note)
