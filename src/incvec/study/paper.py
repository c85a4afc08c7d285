"""The paper's numbers (paper.yaml) and ours beside them: which records belong to which cell, and paired gains."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from incvec.config import RunConfig
from incvec.engine.sweep import read_runs
from incvec.methods import find_method
from incvec.metrics import clipped_forgetting
from incvec.presets import changed_settings, resolve, sweeps
from incvec.study.runs import Record, Seed, row_name, seed_of, settings_key

METRICS = ("AA", "LA", "FM")
FM_SPU = "fm_spu"  # the forgetting measure of the paper's table of pre-trained models
FM_CLIPPED = "fm_clipped"  # closer to the FM in the paper's table of networks trained from scratch than its formula
MEASURED = (*METRICS, FM_CLIPPED)  # FM_CLIPPED is shown beside FM, and compared with the paper's FM
INCREMENTS = (5, 10, 25)

Records = Sequence[Record]
BySeed = dict[Seed, dict[str, float | None]]  # the metrics of one cell
Cells = dict[tuple[str, int], BySeed]  # by row name and number of tasks


@dataclass(frozen=True)
class Comparison:
    """One number: our values, one per seed, and the paper's; either may be missing."""

    ours: tuple[float, ...]
    paper: float | None = None

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.ours) if self.ours else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        return statistics.stdev(self.ours) / len(self.ours) ** 0.5 if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return subtract(self.mean, self.paper)


@cache
def paper_tables(part: Literal["scratch", "ablations", "pretrained"]) -> dict[str, Any]:
    """The paper's values: of networks trained from scratch, of single settings, of pre-trained models."""
    content: dict[str, Any] = yaml.safe_load((resources.files(__package__) / "paper.yaml").read_text())[part]
    return content


def paper_rows(dataset: str, method: str) -> Mapping[str, Mapping[int, Sequence[float | None]]]:
    """The table that a method would be in, by row and number of tasks; without the FM of pre-trained models, which is
    another measure in the paper."""
    pretrained = find_method(method).pretrained
    rows = paper_tables("pretrained" if pretrained else "scratch").get(dataset, {}).get("rows", {})
    if not pretrained:
        return rows  # type: ignore[no-any-return]
    return {row: {tasks: [*values[:2], None] for tasks, values in own.items()} for row, own in rows.items()}


def not_run_notes(reasons: Mapping[str, str], cells: Mapping[tuple[str, int], Any]) -> list[str]:
    """Why cells without a value are not run: `Not run: pass + ivt (5, 10): trained before a bug fix only`.

    `reasons` is by row, "" for all rows; a cell without a reason has not been run for lack of GPU time.
    """
    missing: dict[str, dict[str, list[int]]] = {}
    for (row, tasks), values in cells.items():
        reason = reasons.get(row) or reasons.get("")
        if reason and not values:
            missing.setdefault(reason, {}).setdefault(row, []).append(tasks)
    notes = []
    for reason, rows in missing.items():
        everything = len(cells) == sum(map(len, rows.values()))
        names = (f"{row} ({', '.join(map(str, tasks))})" for row, tasks in rows.items())
        notes.append(f"Not run: {'all' if everything else ', '.join(names)}: {reason}.")
    return notes


def is_pretrained(record: Record) -> bool:
    return find_method(record["method"]).pretrained


def is_clip(record: Record) -> bool:
    return is_pretrained(record) and record["config"][record["method"]]["net"] == "clip"


def is_in_paper(record: Record) -> bool:
    """Whether the paper has a table with this data set and kind of model; it has no pre-trained model but CLIP."""
    if is_pretrained(record):
        return is_clip(record) and record["dataset"] in paper_tables("pretrained")
    return record["dataset"] in paper_tables("scratch")


def row_variant(dataset: str, row: str) -> str:
    """The preset that a row of the paper's table was run with."""
    return str(paper_tables("scratch").get(dataset, {}).get("row_variants", {}).get(row, "paper"))


def is_standard(record: Record, variant: str | None = None) -> bool:
    """Whether a record is not an oracle's and has the settings of a preset: the row's own, or the given variant's."""
    variant = variant or row_variant(record["dataset"], row_name(record))
    expected = {} if variant == "paper" else {"variant": variant}
    changes = changed_settings(record["config"])
    changes = {key: value for key, value in changes.items() if not key.endswith(".weights")}  # a local copy
    return not record["oracle"] and changes == expected


def by_seed(records: Records) -> BySeed:
    """The metrics; `fm_clipped`, which earlier records lack, from the accuracy matrix."""
    return {
        seed_of(r): {name: r["metrics"].get(name) for name in (*METRICS, FM_SPU)}
        | {FM_CLIPPED: clipped_forgetting(r.get("accuracy", []))}
        for r in records
    }


def cells_of(records: Records) -> Cells:
    members: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        members.setdefault((row_name(record), record["tasks"]), []).append(record)
    return {key: by_seed(own) for key, own in members.items()}


def standard_cells(dataset: str, records: Records, variant: str | None = None) -> Cells:
    """The metrics of the runs with a preset's settings."""
    return cells_of([r for r in records if r["dataset"] == dataset and is_standard(r, variant)])


def values_of(cell: BySeed, metric: str) -> tuple[float, ...]:
    return without_none(metrics[metric] for metrics in cell.values())


def compare_cell(cell: BySeed, paper: Sequence[float | None]) -> list[Comparison]:
    """AA, LA, FM, and `fm_clipped` beside the paper's FM."""
    return [Comparison(values_of(cell, name), p) for name, p in zip(MEASURED, (*paper, paper[-1]), strict=True)]


def compare(dataset: str, tasks: int, records: Records) -> dict[str, list[Comparison]]:
    """The paper's rows for one number of tasks: AA, LA, FM and `fm_clipped`, ours beside the paper's."""
    ours = standard_cells(dataset, records)
    rows = paper_tables("scratch")[dataset]["rows"]
    return {row: compare_cell(ours.get((row, tasks), {}), own[tasks]) for row, own in rows.items() if tasks in own}


def paired_gains(with_addon: BySeed, without: BySeed, paper: Sequence[float | None] = (None,) * 3) -> list[Comparison]:
    """Differences of AA, LA, FM and `fm_clipped` between runs of the same seed."""
    seeds = sorted(set(with_addon) & set(without), key=str)
    return [
        Comparison(without_none(subtract(with_addon[seed][metric], without[seed][metric]) for seed in seeds), theirs)
        for metric, theirs in zip(MEASURED, (*paper, paper[-1]), strict=True)
    ]


def paper_gains(
    rows: Mapping[str, Mapping[int, Sequence[float | None]]], host: str, tasks: int, addon: str = "ivt"
) -> list[float | None]:
    """The gain of an add-on in AA, LA and FM in a table of the paper; None without both rows."""
    after, before = rows.get(f"{host} + {addon}", {}).get(tasks), rows.get(host, {}).get(tasks)
    if after is None or before is None:
        return [None] * len(METRICS)
    return [subtract(a, b) for a, b in zip(after, before, strict=True)]


def compare_gains(
    dataset: str, records: Records, addon: str = "ivt", cells: Cells | None = None
) -> dict[tuple[str, int], list[Comparison]]:
    """`paired_gains` by (host, tasks), beside the paper's."""
    ours = standard_cells(dataset, records) if cells is None else cells
    gains = {}
    for (row, tasks), with_addon in sorted(ours.items()):
        host = row.removesuffix(f" + {addon}")
        variant = row_variant(dataset, row)
        hosts = ours if variant == row_variant(dataset, host) else standard_cells(dataset, records, variant)
        plain = hosts.get((host, tasks), {})
        if host != row and set(plain) & set(with_addon):
            theirs = paper_gains(paper_rows(dataset, host.partition(" + ")[0]), host, tasks, addon)
            gains[host, tasks] = paired_gains(with_addon, plain, theirs)
    return gains


def same_base(first: float, second: float) -> bool:
    """Whether two runs with the same seed shared one trained base task, by their accuracy right after it."""
    return abs(first - second) <= 1e-6


def pairs_with_different_bases(dataset: str, records: Records) -> list[str]:
    """Runs without and with IVT of one seed that do not share a trained base task: `podnet, 5 tasks, seed 1`."""
    first = {
        (row_name(record), record["tasks"], record["seed"]): record["accuracy"][0][0]
        for record in records
        if record["dataset"] == dataset and is_standard(record)
    }
    return [
        f"{row}, {tasks} tasks, seed {seed}"
        for (row, tasks, seed), value in sorted(first.items())
        if not same_base(first.get((f"{row} + ivt", tasks, seed), value), value)
    ]


def records_of(config: Mapping[str, Any], records: Records) -> list[Record]:
    """The records of one resolved configuration, with any seed."""
    key = settings_key(config)
    return [record for record in records if settings_key(record["config"]) == key]


def sweep_configs(sweep: str) -> list[RunConfig]:
    """The runs of a packaged sweep."""
    return [resolve(given) for _, given in read_runs(sweeps()[sweep])]


@cache
def ablation_configs(name: str) -> tuple[RunConfig, ...]:
    """The runs of a table of the paper about a single setting, row by row."""
    content = paper_tables("ablations")[name]
    configs = []
    for row in content["rows"]:
        method, *addons = row["run"].split(" + ")
        given = {"method": method, "addons": addons, "dataset": content["dataset"], "tasks": row["tasks"]}
        configs.append(resolve(given | row.get("set", {})))
    return tuple(configs)


def ablation_names(dataset: str) -> list[str]:
    return [name for name, content in paper_tables("ablations").items() if content["dataset"] == dataset]


@dataclass(frozen=True)
class PretrainedTable:
    """A table of pre-trained models: a data set with so many classes, and one model (CLIP, or not)."""

    dataset: str
    title: str
    classes: int
    tasks: tuple[int, ...]
    rows: tuple[str, ...]
    clip: bool

    @property
    def kind(self) -> str:
        return "clip" if self.clip else "lite"

    def contains(self, record: Record) -> bool:
        same_data = record["dataset"] == self.dataset and len(record["class_order"]) == self.classes
        return same_data and is_standard(record, "paper" if self.clip else "lite")

    def cells(self, records: Records) -> Cells:
        return cells_of([record for record in records if self.contains(record)])

    def gains(self, records: Records) -> dict[tuple[str, int], list[Comparison]]:
        """IVT's gain by (host, tasks), beside that of CLIP in the paper (whose FM is another measure)."""
        gains = compare_gains(self.dataset, records, cells=self.cells(records))
        keys = [(row, tasks) for tasks in self.tasks for row in self.rows]
        return {key: gains[key] for key in keys if key in gains}


LITE_MODEL = "EfficientNet-Lite0 and MiniLM joined in closed form: a small dual encoder that is not CLIP"
LITE_AIRCRAFT = ("zeroshot", "flyp", "flyp + ivt", "slca", "slca + ivt")


def pretrained_tables() -> list[PretrainedTable]:
    """The paper's tables of CLIP, then those of the small model used in its place."""
    paper = paper_tables("pretrained")
    clip = [
        PretrainedTable(name, table["title"], 100, (5, 10), tuple(table["rows"]), True) for name, table in paper.items()
    ]
    variants = "FGVC-Aircraft, 20 of its 100 variants"
    return [
        *clip,
        PretrainedTable("cifar100", "CIFAR-100", 100, (10,), tuple(paper["cifar100"]["rows"]), False),
        PretrainedTable("aircraft", variants, 20, (5,), LITE_AIRCRAFT, False),
    ]


def learning_rate_records(records: Records) -> list[Record]:
    """The runs on held-out images that chose the small model's learning rate, by rate."""
    own = [r for r in records if r["config"].get("held_out") and r["config"]["variant"] == "lite"]
    return sorted(own, key=lambda r: float(r["config"][r["method"]]["lr"]))


def without_none(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def subtract(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
