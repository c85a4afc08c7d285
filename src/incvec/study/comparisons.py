"""Tables of our numbers beside the paper's, for the report and for REPRODUCED.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from incvec.study import style
from incvec.study.paper import (
    FM_SPU,
    INCREMENTS,
    LITE_MODEL,
    METRICS,
    BySeed,
    Comparison,
    PretrainedTable,
    Records,
    ablation_configs,
    by_seed,
    compare,
    compare_cell,
    compare_gains,
    is_pretrained,
    learning_rate_records,
    paper_tables,
    records_of,
    values_of,
)
from incvec.study.runs import settings_text
from incvec.study.tables import Cell, Column, Row, Table, code, make_row, mean, number

NOT_RUN = "not run"
MEASURES = "AA: accuracy averaged over the tasks; LA: after the last one; FM: forgetting, less is better; in percent."
OURS = "Ours: mean ± standard deviation (number of seeds); diff: ours minus the paper's."
PAIRED = "With IVT minus without, paired by seed, in points; ± standard error of the mean if there are several seeds."
FORMULA_FM = ("rapf",)  # rows whose FM in the paper's table of pre-trained models follows its formula


def compared(values: Sequence[Comparison]) -> list[Cell]:
    """Ours, the paper's and the difference, for each metric."""
    cells = []
    for value in values:
        cells += [mean(value.ours, count=True, missing=NOT_RUN), number(value.paper, missing="")]
        cells.append(number(value.difference, "+.2f", missing=""))
    return cells


def gain_cells(values: Sequence[Comparison]) -> list[Cell]:
    """IVT's gain and the paper's, for each metric."""
    return [
        cell
        for value in values
        for cell in (mean(value.ours, "+.2f", error=True, missing=""), number(value.paper, "+.2f", missing=""))
    ]


def columns_of(first: Sequence[str | Column], labels: Iterable[str]) -> list[str | Column]:
    return [*first, *map(Column, labels)]


def main_table(dataset: str, records: Records, increments: Sequence[int] = INCREMENTS) -> Table:
    """The paper's table of networks trained from scratch: one line per row and number of increments."""
    rows = [
        make_row(row, number(tasks, "d"), *compared(values), dim=not values[0].ours)
        for tasks in increments
        for row, values in compare(dataset, tasks, records).items()
    ]
    columns = columns_of(["row", Column("tasks")], (label for m in METRICS for label in (m, "paper", "diff")))
    title = f"{style.dataset(dataset)}, {', '.join(map(str, increments))} increments: ours and the paper's"
    return Table(columns, rows, title, f"{MEASURES} {OURS}", f"{dataset}-{increments[0]}-paper")


def gain_table(dataset: str, records: Records) -> Table | None:
    """IVT's gain for every host, beside the paper's."""
    gains = compare_gains(dataset, records)
    rows = [
        make_row(host, number(tasks, "d"), number(len(values[0].ours), "d"), *gain_cells(values))
        for (host, tasks), values in gains.items()
    ]
    columns = columns_of(["host"], ("tasks", "seeds", *(label for m in METRICS for label in (m, "paper"))))
    hosts = {host for host, _ in gains}
    pretrained = any(is_pretrained(record) and record["method"] in hosts for record in records)
    note = PAIRED + (
        " The paper's FM of pre-trained models is another measure, so it is left out." if pretrained else ""
    )
    title = f"{style.dataset(dataset)}: what IVT adds"
    return Table(columns, rows, title, note, f"{dataset}-gains") if rows else None


def ablation_table(name: str, records: Records) -> Table:
    """A table of the paper about a single setting."""
    content = paper_tables("ablations")[name]
    rows = []
    for row, config in zip(content["rows"], ablation_configs(name), strict=True):
        cell = by_seed(records_of(config, records))
        settings = {f"{part}.{key}": value for part, own in row.get("set", {}).items() for key, value in own.items()}
        setting = code(row.get("label") or settings_text(settings), missing="")
        numbers = compared(compare_cell(cell, row["paper"]))
        rows.append(make_row(row["run"], setting, number(row["tasks"], "d"), *numbers, dim=not cell))
    labels = [label for m in METRICS for label in (m, "paper", "diff")]
    columns = columns_of(["run", "setting", Column("tasks")], labels)
    title = f"{style.dataset(content['dataset'])}: {content['title']}"
    note = f"Command: incvec sweep {content['sweep']}. {OURS}"
    return Table(columns, rows, title, note, f"{content['dataset']}-{name}")


def clip_table(table: PretrainedTable, records: Records) -> Table:
    """CLIP beside the paper: FM by the formula, and `fm_spu`, which the paper's column is except in RAPF's row."""
    paper, cells = paper_tables("pretrained")[table.dataset]["rows"], table.cells(records)
    rows = []
    for tasks, row in ((tasks, row) for tasks in table.tasks for row in table.rows):
        cell = cells.get((row, tasks), {})
        average, last, *forgetting = pretrained_metrics(cell)
        theirs = [number(value, missing="") for value in paper[row][tasks]]
        if row in FORMULA_FM:
            theirs[2] = Cell(f"{theirs[2].text} (FM)", theirs[2].value)
        numbers = [average, theirs[0], last, theirs[1], *forgetting, theirs[2]]
        rows.append(make_row(row, number(tasks, "d"), *numbers, dim=not cell))
    columns = columns_of(["row"], ("tasks", "AA", "paper", "LA", "paper", "FM", FM_SPU, "paper"))
    title = f"CLIP ViT-B/16: {table.title} (the paper's table of pre-trained models)"
    note = "FM follows the paper's formula; the paper's own numbers agree with fm_spu instead, except RAPF's."
    return Table(columns, rows, title, note, f"{table.dataset}-clip")


def lite_table(table: PretrainedTable, records: Records) -> Table:
    """A model that is not CLIP, without the paper's numbers."""
    cells = table.cells(records)
    rows: list[Row] = []
    for tasks, row in ((tasks, row) for tasks in table.tasks for row in table.rows):
        cell = cells.get((row, tasks), {})
        rows.append(make_row(row, number(tasks, "d"), *pretrained_metrics(cell), dim=not cell))
    note = f"{LITE_MODEL}. These numbers are not CLIP's, and not comparable with the paper's."
    columns = columns_of(["row"], ("tasks", *METRICS, FM_SPU))
    return Table(columns, rows, f"Not CLIP: {table.title}", note, f"{table.dataset}-lite")


def pretrained_metrics(cell: BySeed) -> list[Cell]:
    missing = "" if cell else NOT_RUN
    return [mean(values_of(cell, metric), count=True, missing=missing) for metric in (*METRICS, FM_SPU)]


def pretrained_gain_table(table: PretrainedTable, records: Records) -> Table | None:
    """IVT's gain with a pre-trained model, beside CLIP's in the paper (whose FM is another measure)."""
    rows = [make_row(row, number(tasks, "d"), *gain_cells(v)[:-1]) for (row, tasks), v in table.gains(records).items()]
    paper = "paper" if table.clip else "paper, with CLIP"
    columns = columns_of(["host"], ("tasks", "AA", paper, "LA", paper, "FM"))
    kind = "CLIP ViT-B/16" if table.clip else "Not CLIP"
    note = PAIRED if table.clip else f"{LITE_MODEL}. {PAIRED}"
    slug = f"{table.dataset}-{'clip' if table.clip else 'lite'}-gains"
    return Table(columns, rows, f"{kind}: {table.title}: what IVT adds", note, slug) if rows else None


def learning_rate_table(records: Records) -> Table | None:
    """The choice of the small model's learning rate."""
    rows = []
    for record in learning_rate_records(records):
        rate, metrics = record["config"][record["method"]]["lr"], record["metrics"]
        rows.append([Cell(f"{rate:g}", rate), number(metrics["AA"]), number(metrics["LA"])])
    note = "FLYP without IVT, on training images held out of the first tasks; test images were not used."
    title = "Not CLIP: the choice of the learning rate"
    return (
        Table(columns_of((), ("rate", "AA", "LA")), rows, title, note, f"{records[0]['dataset']}-rate")
        if rows
        else None
    )
