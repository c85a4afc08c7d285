"""Which tables a report has, each made from records: the paper's beside ours, what IVT adds, the oracle gap,
all groups, how they were run, every record."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from incvec.presets import changed_settings
from incvec.study import style
from incvec.study.compare import METRICS, TASKS, Comparison, compare, compare_gains, paper, settings_text, yaml_value
from incvec.study.groups import Entry, Group
from incvec.study.pretrained import starts_pretrained
from incvec.study.runs import oracle_gaps, run_rows
from incvec.study.sheet import Cell, Column, Row, Sheet, number, spread, word

ARROWS = {"AA": "AA ↑", "LA": "LA ↑", "FM": "FM ↓"}
MEASURES = "AA: accuracy averaged over the tasks; LA: after the last one; FM: forgetting, less is better; in percent."


def paper_sheets(entries: Sequence[Entry]) -> list[Sheet]:
    """The paper's table of each data set with networks trained from scratch, one sheet a number of increments."""
    records = [entry.record for entry in entries if not starts_pretrained(entry.record)]
    run = {(r["dataset"], r["tasks"]) for r in records}
    sheets = []
    for dataset in paper():
        for tasks in TASKS:
            if (dataset, tasks) not in run:
                continue
            rows = []
            for name, values in compare(dataset, tasks, records).items():
                cells = [word(style.label(name)), number(len(values[0].ours), "d", "0")]
                for value in values:
                    cells += [spread(value, missing="not run"), number(value.paper), number(value.difference, "+.2f")]
                rows.append(Row(tuple(cells), quiet=not values[0].ours))
            if not rows:
                continue
            columns = [Column("method", number=False), Column("seeds")]
            columns += [Column(label, ARROWS[m]) for m in METRICS for label in ("ours", "paper", "diff")]
            sheets.append(
                Sheet(
                    f"{dataset}-{tasks}-paper",
                    f"{style.dataset(dataset)}, {tasks} increments: ours and the paper's", tuple(columns),
                    tuple(rows), f"{MEASURES} Ours: mean ± standard deviation over seeds; diff: ours minus paper's.",
                )
            )  # fmt: skip
    return sheets


def gain_sheet(dataset: str, entries: Sequence[Entry]) -> Sheet | None:
    """Paired differences with and without IVT."""
    rows, hosts = [], set()
    for (host, tasks), values in compare_gains(dataset, [entry.record for entry in entries]).items():
        hosts.add(host)
        cells = [word(style.label(host)), number(tasks, "d"), number(len(values[0].ours), "d")]
        for value in values:
            cells += [spread(value, "+.2f", error=True), number(value.paper, "+.2f")]
        rows.append(Row(tuple(cells)))
    if not rows:
        return None
    columns = [Column("host", number=False), Column("increments"), Column("seeds")]
    columns += [Column(label, ARROWS[m]) for m in METRICS for label in ("ours", "paper")]
    note = "With IVT minus without, paired by seed, in points; ± standard error of the mean where there are more seeds."
    if any(starts_pretrained(entry.record) and entry.record["method"] in hosts for entry in entries):
        note += " The paper's FM of pre-trained models is another measure, so what IVT adds to it is left out."
    return Sheet(f"{dataset}-gains", f"{style.dataset(dataset)}: what IVT adds", tuple(columns), tuple(rows), note)


def gap_sheet(dataset: str, groups: Sequence[Group]) -> Sheet | None:
    """The share of the way from the plain method to its oracle, for groups whose plain runs and oracles are here."""
    every = [entry for each in groups for entry in each.entries]
    gaps = dict(zip((entry.path for entry in every), oracle_gaps([entry.record for entry in every]), strict=True))
    rows = []
    for each in groups:
        found = [gap for entry in each.entries if (gap := gaps[entry.path]) is not None and gap.closed is not None]
        if each.dataset != dataset or not found:
            continue
        cells = [word(each.label), number(each.tasks, "d"), number(len(found), "d")]
        for values in ([g.plain for g in found], [g.with_addons for g in found], [g.oracle for g in found]):
            cells.append(spread(Comparison(tuple(values), None)))
        cells.append(spread(Comparison(tuple(100 * (gap.closed or 0.0) for gap in found), None), ".1f"))
        rows.append(Row(tuple(cells)))
    if not rows:
        return None
    columns = [Column("run", number=False), Column("increments"), Column("seeds")]
    columns += [Column(label, "LA ↑") for label in ("plain", "with it", "oracle")] + [Column("gap closed, %")]
    note = "Share of the way in LA from the plain method to its oracle, which keeps all images of the past."
    return Sheet(f"{dataset}-gap", f"{style.dataset(dataset)}: the oracle gap", tuple(columns), tuple(rows), note)


def group_sheet(dataset: str, groups: Sequence[Group]) -> Sheet:
    """All that was run on a data set, changed settings included."""
    rows = []
    for each in groups:
        if each.dataset != dataset:
            continue
        changes = settings_text(each.first.changes)
        cells = [word(style.label(each.name)), Cell(changes or "–", code=bool(changes)), number(each.tasks, "d")]
        cells += [number(len(each.entries), "d")]
        cells += [spread(Comparison(tuple(each.metric(name)), None)) for name in METRICS]
        rows.append(Row((*cells, spread(Comparison(tuple(each.seconds), None), ".1f"))))
    columns = [Column("run", number=False), Column("changed", number=False), Column("increments"), Column("seeds")]
    columns += [Column(ARROWS[name]) for name in METRICS] + [Column("time, s")]
    note = (
        f"{MEASURES} Mean ± standard deviation over seeds. Time: training of all tasks but the base, which runs share; "
        "runs that shared a device took longer, so only those below a folder training-time are drawn."
    )
    return Sheet(f"{dataset}-all", f"{style.dataset(dataset)}: all that was run", tuple(columns), tuple(rows), note)


def how_sheet(groups: Sequence[Group]) -> Sheet:
    """Command, device, versions and commit of each group."""
    rows = []
    for each in groups:
        cells = [word(each.label), Cell(command(each.first.record), code=True), word(seeds(each))]
        for told in (device, engine, versions, commit):
            cells.append(word(", ".join(sorted({told(entry.record) for entry in each.entries}))))
        rows.append(Row(tuple(cells)))
    labels = ("run", "command", "seeds", "device", "engine", "versions", "commit")
    note = "Each line's command trains its first seed; the others have --seed changed. Runs may have shared a device."
    return Sheet("how", "How it was run", tuple(Column(label, number=False) for label in labels), tuple(rows), note)


def record_sheet(entries: Sequence[Entry]) -> Sheet:
    """Every record, nothing averaged."""
    rows = []
    for entry, row in zip(entries, run_rows([entry.record for entry in entries]), strict=True):
        changes = settings_text(entry.changes)
        cells = [word(style.label(entry.name)), word(row.dataset), Cell(changes or "–", code=bool(changes))]
        cells += [number(row.tasks, "d"), number(row.seed, "d"), number(row.AA), number(row.LA), number(row.FM)]
        share = None if row.gap_closed is None else 100 * row.gap_closed
        cells += [number(share, ".0f"), number(row.seconds, ".0f"), Cell(entry.path, code=True)]
        rows.append(Row(tuple(cells)))
    columns = [Column(label, number=False) for label in ("run", "data set", "changed")]
    columns += [Column(label) for label in ("increments", "seed", *ARROWS.values(), "gap closed, %", "seconds")]
    return Sheet("records", "Every record", (*columns, Column("file", number=False)), tuple(rows))


def command(record: Mapping[str, Any]) -> str:
    """What one types to train it again."""
    words = ["incvec", "run", "--method", record["method"]]
    for name in record["addons"]:
        words += ["--addon", name]
    words += ["--dataset", record["dataset"], "--tasks", str(record["tasks"]), "--seed", str(record["seed"])]
    words += ["--oracle"] if record["oracle"] else []
    changes = changed_settings(record["config"])
    for key, value in changes.items():
        words += ["--set", f"{key}={yaml_value(value)}"]
    return shlex.join(words)


def seeds(each: Group) -> str:
    trained = sorted({entry.record["seed"] for entry in each.entries})
    orders = sorted({str(entry.record.get("order_seed")) for entry in each.entries})
    return f"{', '.join(map(str, trained))} (class order {', '.join(orders)})"


def device(record: Mapping[str, Any]) -> str:
    return str(record["environment"].get("device") or "unknown")


def engine(record: Mapping[str, Any]) -> str:
    told = record.get("engine") or {}
    return " ".join(str(told[key]) for key in ("kind", "precision") if told.get(key)) or "unknown"


def versions(record: Mapping[str, Any]) -> str:
    told = record["environment"].get("versions") or {}
    return " ".join(f"{name} {told[name]}" for name in ("incvec", "torch", "python") if name in told) or "unknown"


def commit(record: Mapping[str, Any]) -> str:
    return str(record["environment"].get("commit") or "unknown")
