"""The tables of a report: ours beside the paper's, the oracle gap, all groups, how the runs were made, every record."""

from __future__ import annotations

from collections.abc import Sequence

from incvec.study import comparisons, style
from incvec.study.groups import Group
from incvec.study.paper import INCREMENTS, METRICS, ablation_names, is_pretrained, paper_tables, pretrained_tables
from incvec.study.run_table import run_rows
from incvec.study.runs import Record, RunRecord, pair_with_oracle, run_command, settings_text
from incvec.study.tables import Cell, Column, Table, code, make_row, mean, number

HEADINGS = {"AA": "AA ↑", "LA": "LA ↑", "FM": "FM ↓"}


def comparison_tables(dataset: str, runs: Sequence[RunRecord]) -> list[Table]:
    """The paper's tables of a data set: of networks trained from scratch, of single settings, of pre-trained models."""
    scratch = [run.record for run in runs if not is_pretrained(run.record)]
    pretrained = [run.record for run in runs if is_pretrained(run.record)]
    tables: list[Table | None] = []
    if dataset in paper_tables("scratch"):
        run = [tasks for tasks in INCREMENTS if any(record["tasks"] == tasks for record in scratch)]
        tables += [comparisons.main_table(dataset, scratch, [tasks]) for tasks in run]
    if scratch:
        tables += [comparisons.ablation_table(name, scratch) for name in ablation_names(dataset)]
    for table in pretrained_tables():
        if table.dataset == dataset and table.cells(pretrained):
            gains = None if table.clip else comparisons.pretrained_gain_table(table, pretrained)
            tables += [comparisons.pretrained_table(table, pretrained), gains]
    rates = comparisons.learning_rate_table(pretrained)
    return [with_labels(table) for table in tables if table and table.rows] + ([rates] if rates else [])


def gain_table(dataset: str, runs: Sequence[RunRecord]) -> Table | None:
    table = comparisons.gain_table(dataset, [run.record for run in runs])
    return table and with_labels(table)


def with_labels(table: Table) -> Table:
    """With labels in place of the runs' names, and without empty columns."""
    rows = [make_row(style.label(row.cells[0].text), *row.cells[1:], dim=row.dim) for row in table.rows]
    return Table(table.columns, rows, table.title, table.note, table.slug).without_empty_columns()


def gap_table(dataset: str, groups: Sequence[Group]) -> Table | None:
    """The share of the way from the plain method to its oracle."""
    every = [run for group in groups for run in group.runs]
    gaps = dict(zip((run.path for run in every), pair_with_oracle([run.record for run in every]), strict=True))
    rows = []
    for group in groups:
        own = [gap for run in group.runs if (gap := gaps[run.path]) is not None and gap.closed is not None]
        if own:
            accuracies = [mean(values) for values in zip(*own, strict=True)]
            closed = mean([100 * (gap.closed or 0) for gap in own], ".1f")
            rows.append(
                [Cell(group.label), number(group.stream.tasks, "d"), number(len(own), "d"), *accuracies, closed]
            )
    labels = ("increments", "seeds", "LA ↑ plain", "LA ↑ with add-on", "LA ↑ oracle", "gap closed, %")
    note = "Share of the way in LA from the plain method to its oracle, which keeps all images of the past."
    title = f"{style.dataset(dataset)}: the oracle gap"
    return Table(["run", *map(Column, labels)], rows, title, note, f"{dataset}-gap") if rows else None


def group_table(dataset: str, groups: Sequence[Group]) -> Table:
    """Every group of a data set, changed settings included."""
    rows = []
    for group in groups:
        cells = [Cell(style.label(group.title)), code(settings_text(group.first.changes))]
        cells += [number(group.stream.tasks, "d"), number(len(group.runs), "d")]
        rows.append([*cells, *(mean(group.metric(name)) for name in METRICS), mean(group.seconds, ".1f")])
    labels = ("increments", "seeds", *HEADINGS.values(), "time, s")
    note = (
        f"{comparisons.MEASURES} Mean ± standard deviation over seeds. Time: training of all tasks but the base, which "
        "runs share; runs that shared a device took longer, so only those below a folder training-time are drawn."
    )
    title = f"{style.dataset(dataset)}: all runs"
    return Table(["run", "changed", *map(Column, labels)], rows, title, note, f"{dataset}-all")


def how_table(groups: Sequence[Group]) -> Table:
    """Command, device, versions and commit of each group."""
    rows = []
    for group in groups:
        trained = ", ".join(map(str, sorted({run.record["seed"] for run in group.runs})))
        orders = ", ".join(sorted({str(run.record.get("order_seed")) for run in group.runs}))
        seeds = f"{trained} (class order {orders})"
        origins = zip(*(origin(run.record) for run in group.runs), strict=True)
        cells = [", ".join(sorted(set(texts))) for texts in origins]
        rows.append(make_row(group.label, code(run_command(group.record["config"])), seeds, *cells))
    columns = ("run", "command", "seeds", "device", "engine", "versions", "commit")
    note = "The command trains the first seed; for the others, change --seed. Runs may have shared a device."
    return Table(columns, rows, "How the runs were made", note, "how")


def record_table(runs: Sequence[RunRecord]) -> Table:
    """Every record, nothing averaged."""
    rows = []
    for run, row in zip(runs, run_rows([run.record for run in runs]), strict=True):
        cells = [Cell(style.label(run.title)), Cell(row.dataset), code(settings_text(run.changes))]
        cells += [number(row.tasks, "d"), number(row.seed, "d"), number(row.AA), number(row.LA), number(row.FM)]
        closed = None if row.gap_closed is None else 100 * row.gap_closed
        rows.append([*cells, number(closed, ".0f"), number(row.seconds, ".0f"), code(run.path)])
    labels = ("increments", "seed", *HEADINGS.values(), "gap closed, %", "seconds")
    return Table(["run", "data set", "changed", *map(Column, labels), "file"], rows, "Every record", slug="records")


def origin(record: Record) -> tuple[str, str, str, str]:
    """Device, engine, versions and commit of a run."""
    environment, engine = record["environment"], record.get("engine") or {}
    versions = environment.get("versions") or {}
    texts = (
        str(environment.get("device") or ""),
        " ".join(str(engine[key]) for key in ("kind", "precision") if engine.get(key)),
        " ".join(f"{name} {versions[name]}" for name in ("incvec", "torch", "python") if name in versions),
        str(environment.get("commit") or ""),
    )
    device, engine_text, version_text, commit = (text or "unknown" for text in texts)
    return device, engine_text, version_text, commit
