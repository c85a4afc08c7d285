"""Tables of our numbers beside the paper's, for the report and for REPRODUCED.md."""

from __future__ import annotations

from collections.abc import Sequence

from incvec.study import paper, style
from incvec.study.paper import (
    FM_SPU,
    INCREMENTS,
    LITE_MODEL,
    MEASURED,
    METRICS,
    BySeed,
    Comparison,
    PretrainedTable,
    Records,
)
from incvec.study.runs import settings_text
from incvec.study.tables import Cell, Column, Table, code, make_row, mean, number

NOT_RUN = "not run"
MEASURES = "AA: accuracy averaged over the tasks; LA: after the last one; FM: forgetting, less is better; in percent."
OURS = "Ours: mean ± standard deviation (number of seeds); diff: ours minus the paper's."
PAIRED = "With IVT minus without, paired by seed, in points; ± standard error of the mean if there are several seeds."
CLIPPED = "clipped: FM with the last task in its maximum (fm_clipped), which agrees better with the paper's FM."
COMPARED = ["tasks", *(label for metric in METRICS for label in (metric, "paper", "diff")), "clipped"]
FORMULA_FM = ("rapf",)  # rows whose FM in the paper's table of pre-trained models follows its formula


def compared(values: Sequence[Comparison]) -> list[Cell]:
    """Ours, the paper's and the difference, for each metric; then our `fm_clipped`."""
    cells = []
    *metrics, clipped = values
    for value in metrics:
        cells += [mean(value.ours, count=True, missing=NOT_RUN), number(value.paper, missing="")]
        cells.append(number(value.difference, "+.2f", missing=""))
    return [*cells, mean(clipped.ours, count=True, missing="")]


def metric_cells(cell: BySeed, missing: str = NOT_RUN) -> list[Cell]:
    """AA, LA, FM and `fm_clipped`, each with its spread over the seeds; FM is missing after a single task."""
    return [mean(paper.values_of(cell, name), count=True, missing="" if cell else missing) for name in MEASURED]


def gain_cells(values: Sequence[Comparison]) -> list[Cell]:
    """IVT's gain and the paper's, for each metric; then the gain in `fm_clipped`."""
    *metrics, clipped = values
    cells = []
    for value in metrics:
        cells += [mean(value.ours, "+.2f", error=True, missing=""), number(value.paper, "+.2f", missing="")]
    return [*cells, mean(clipped.ours, "+.2f", error=True, missing="")]


def main_table(dataset: str, records: Records, increments: Sequence[int] = INCREMENTS) -> Table:
    """The paper's table of networks trained from scratch: one line per row and number of increments."""
    rows = [
        make_row(row, number(tasks, "d"), *compared(values), dim=not values[0].ours)
        for tasks in increments
        for row, values in paper.compare(dataset, tasks, records).items()
    ]
    title = f"{style.dataset(dataset)}, {', '.join(map(str, increments))} increments: ours and the paper's"
    note = f"{MEASURES} {OURS} {CLIPPED}"
    return Table(["row", *map(Column, COMPARED)], rows, title, note, f"{dataset}-{increments[0]}-paper")


def gain_table(dataset: str, records: Records) -> Table | None:
    """IVT's gain for every host, beside the paper's."""
    gains = paper.compare_gains(dataset, records)
    rows = [
        make_row(host, number(tasks, "d"), number(len(values[0].ours), "d"), *gain_cells(values))
        for (host, tasks), values in gains.items()
    ]
    labels = ["tasks", "seeds", *(label for metric in METRICS for label in (metric, "paper")), "clipped"]
    hosts = {host for host, _ in gains}
    pretrained = any(paper.is_pretrained(record) and record["method"] in hosts for record in records)
    note = PAIRED
    note += " The paper's FM of pre-trained models is another measure, so it is left out." if pretrained else ""
    title = f"{style.dataset(dataset)}: what IVT adds"
    return Table(["host", *map(Column, labels)], rows, title, note, f"{dataset}-gains") if rows else None


def ablation_table(name: str, records: Records) -> Table:
    """A table of the paper about a single setting."""
    content = paper.paper_tables("ablations")[name]
    rows = []
    for row, config in zip(content["rows"], paper.ablation_configs(name), strict=True):
        cell = paper.by_seed(paper.records_of(config.resolved(), records))
        settings = {f"{part}.{key}": value for part, own in row.get("set", {}).items() for key, value in own.items()}
        setting = code(row.get("label") or settings_text(settings), missing="")
        numbers = compared(paper.compare_cell(cell, row["paper"]))
        rows.append(make_row(row["run"], setting, number(row["tasks"], "d"), *numbers, dim=not cell))
    title = f"{style.dataset(content['dataset'])}: {content['title']}"
    note = f"Command: incvec sweep {content['sweep']}. {OURS} {CLIPPED}"
    return Table(["run", "setting", *map(Column, COMPARED)], rows, title, note, f"{content['dataset']}-{name}")


def pretrained_table(table: PretrainedTable, records: Records) -> Table:
    """A table of pre-trained models, with FM by the formula and `fm_spu`; CLIP's has the paper's values too, whose FM
    is `fm_spu` except in RAPF's row."""
    published, cells = paper.paper_tables("pretrained")[table.dataset]["rows"], table.cells(records)
    rows = []
    for tasks, row in ((tasks, row) for tasks in table.tasks for row in table.rows):
        cell = cells.get((row, tasks), {})
        missing = "" if cell else NOT_RUN
        numbers = [mean(paper.values_of(cell, metric), count=True, missing=missing) for metric in (*METRICS, FM_SPU)]
        if table.clip:
            average, last, forgetting = (number(value, missing="") for value in published[row][tasks])
            if row in FORMULA_FM:
                forgetting = Cell(f"{forgetting.text} (FM)", forgetting.value)
            numbers = [numbers[0], average, numbers[1], last, *numbers[2:], forgetting]
        rows.append(make_row(row, number(tasks, "d"), *numbers, dim=not cell))
    if table.clip:
        labels = ["tasks", "AA", "paper", "LA", "paper", "FM", FM_SPU, "paper"]
        title = f"CLIP ViT-B/16: {table.title} (the paper's table of pre-trained models)"
        note = "FM follows the paper's formula; the paper's own numbers agree with fm_spu instead, except RAPF's."
    else:
        labels = ["tasks", *METRICS, FM_SPU]
        title = f"Not CLIP: {table.title}"
        note = f"{LITE_MODEL}. These numbers are not CLIP's, and not comparable with the paper's."
    return Table(["row", *map(Column, labels)], rows, title, note, f"{table.dataset}-{table.kind}")


def pretrained_gain_table(table: PretrainedTable, records: Records) -> Table | None:
    """IVT's gain with a pre-trained model, beside CLIP's in the paper (whose FM is another measure)."""
    rows = [make_row(row, number(tasks, "d"), *gain_cells(v)[:5]) for (row, tasks), v in table.gains(records).items()]
    theirs = "paper" if table.clip else "paper, with CLIP"
    labels = ["tasks", "AA", theirs, "LA", theirs, "FM"]
    kind = "CLIP ViT-B/16" if table.clip else "Not CLIP"
    note = PAIRED if table.clip else f"{LITE_MODEL}. {PAIRED}"
    slug = f"{table.dataset}-{table.kind}-gains"
    return (
        Table(["host", *map(Column, labels)], rows, f"{kind}: {table.title}: what IVT adds", note, slug)
        if rows
        else None
    )


def learning_rate_table(records: Records) -> Table | None:
    """The choice of the small model's learning rate."""
    rows = []
    for record in paper.learning_rate_records(records):
        rate, metrics = record["config"][record["method"]]["lr"], record["metrics"]
        rows.append([Cell(f"{rate:g}", rate), number(metrics["AA"]), number(metrics["LA"])])
    note = "FLYP without IVT, on training images held out of the first tasks; test images were not used."
    if not rows:
        return None
    columns, title = [*map(Column, ("rate", "AA", "LA"))], "Not CLIP: the choice of the learning rate"
    return Table(columns, rows, title, note, f"{records[0]['dataset']}-rate")
