"""Records as a table: on a terminal, in Markdown, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from incvec.config import digest
from incvec.errors import ConfigError
from incvec.metrics import gap_closed
from incvec.presets import changed_settings
from incvec.records import title
from incvec.study.compare import settings_text

# What two runs may differ in and still be the plain method and the oracle of one another.
APART = ("addons", "oracle", "device", "engine")

HEADINGS = ("run", "data set", "tasks", "seed", "AA", "LA", "FM", "gap closed", "seconds")
NUMBERS = HEADINGS[2:]


@dataclass(frozen=True)
class Row:
    """One run's line; accuracies in percent, `gap_closed` a share of 1."""

    run: str
    dataset: str
    tasks: int
    seed: int
    AA: float
    LA: float
    FM: float | None
    gap_closed: float | None
    seconds: float | None
    path: str | None = None
    apart: str | None = None  # what tells it from rows that would read alike

    def cells(self) -> list[str]:
        """What is shown, heading by heading."""
        return [
            self.run + (f" ({self.apart})" if self.apart else ""),
            self.dataset,
            str(self.tasks),
            str(self.seed),
            f"{self.AA:.2f}",
            f"{self.LA:.2f}",
            "–" if self.FM is None else f"{self.FM:.2f}",
            "–" if self.gap_closed is None else f"{100 * self.gap_closed:.0f} %",
            "–" if self.seconds is None else f"{self.seconds:.1f}",
        ]


def duration(seconds: float) -> str:
    """`8 s`, `3 min 05 s`, `2 h 04 min`, rounded to what is shown."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def family(record: Mapping[str, Any]) -> str:
    """The same for a method, its oracle and the method with any add-on, all else being equal."""
    shared = dict(record.get("config") or {})
    for name in (*APART, *record["addons"]):
        shared.pop(name, None)
    named = [record[key] for key in ("method", "dataset", "tasks", "seed")]
    return digest([named, record.get("order_seed"), record["test_counts"], shared])


def rows(records: Sequence[Mapping[str, Any]], paths: Sequence[str] | None = None) -> list[Row]:
    """A row a record, in the order given. The share of the oracle gap closed is told for runs with add-ons
    whose plain run and oracle are among the records."""
    plain: dict[str, float] = {}
    oracle: dict[str, float] = {}
    for record in records:
        if not record["addons"]:
            (oracle if record["oracle"] else plain).setdefault(family(record), record["metrics"]["LA"])
    found = []
    for number, record in enumerate(records):
        key = family(record)
        share = None
        if record["addons"] and not record["oracle"] and key in plain and key in oracle:
            share = gap_closed(record["metrics"]["LA"], plain[key], oracle[key])
        found.append(
            Row(
                run=title(dict(record)),
                dataset=record["dataset"],
                tasks=record["tasks"],
                seed=record["seed"],
                AA=record["metrics"]["AA"],
                LA=record["metrics"]["LA"],
                FM=record["metrics"].get("FM"),  # none where there was a single task
                gap_closed=share,
                seconds=record.get("seconds"),
                path=None if paths is None else paths[number],
            )
        )
    alike = Counter(map(named, found))
    return [
        replace(row, apart=apart(record, row.path if alike[named(row)] > 1 else None))
        for row, record in zip(found, records, strict=True)
    ]


def named(row: Row) -> tuple[str, str, int, int]:
    return row.run, row.dataset, row.tasks, row.seed


def apart(record: Mapping[str, Any], path: str | None) -> str | None:
    """The settings a run changed; the folder, where that is given, of one that has its presets'."""
    folder = Path(path).parent.name if path else None
    try:
        changes = changed_settings(record["config"])
    except (ConfigError, KeyError):  # of a method or add-on that is not here, or of a record that lost a part
        return folder
    return settings_text(changes) or (f"as preset, in {folder}" if folder else None)


def rich_table(found: Sequence[Row], title: str | None = None) -> Table:
    """For a terminal. Oracles are dimmed: they are what one measures against. What tells runs apart stands below."""
    notes: dict[str, int] = {}
    for row in found:
        if row.apart:
            notes.setdefault(row.apart, len(notes) + 1)
    table = Table(
        caption=Text("\n".join(f"[{number}] {note}" for note, number in notes.items())) if notes else None,
        caption_justify="left",
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in HEADINGS:
        # The longest heading is broken, and a name may be, a number never: all fits into 80 columns then.
        heading = name.replace("gap closed", "gap\nclosed")
        side: Literal["left", "right"] = "right" if name in NUMBERS else "left"
        table.add_column(heading, justify=side, no_wrap=name != "run", overflow="fold")
    for row in found:
        first, *rest = row.cells()
        run = f"{row.run} {escape(f'[{notes[row.apart]}]')}" if row.apart else first
        table.add_row(run, *rest, style="dim" if row.run.endswith(" oracle") else None)
    return table


def markdown(found: Sequence[Row]) -> str:
    """The same for a document."""
    lines = ["| " + " | ".join(HEADINGS) + " |"]
    lines.append("|" + "|".join("---:" if name in NUMBERS else "---" for name in HEADINGS) + "|")
    lines += ["| " + " | ".join(row.cells()) + " |" for row in found]
    return "\n".join(lines)


def plain_data(found: Sequence[Row]) -> list[dict[str, Any]]:
    """The same for a program: numbers as they are, nothing rounded."""
    return [asdict(row) for row in found]
