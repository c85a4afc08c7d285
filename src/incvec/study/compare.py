"""Ours beside the paper's: which records make a cell, and how a cell is written."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from incvec.config import RunConfig, digest
from incvec.engine.sweep import read_sweep
from incvec.methods import find_method
from incvec.presets import changed_settings, resolve, sweeps

METRICS = ("AA", "LA", "FM")
TASKS = (5, 10, 25)
Seed = tuple[int, int | None]  # of the training and of the class order
Cell = dict[Seed, dict[str, float | None]]


@dataclass(frozen=True)
class Comparison:
    """One cell: our values, one a seed, and the paper's; either may be missing."""

    ours: tuple[float, ...]
    paper: float | None

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.ours) if self.ours else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; none for a single one."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / len(self.ours) ** 0.5

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@cache
def paper_file() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((resources.files(__package__) / "paper.yaml").read_text())
    return content


def paper() -> dict[str, Any]:
    """The paper's values of networks trained from scratch, by data set, row and number of tasks."""
    return {name: content for name, content in paper_file().items() if name not in ("ablations", "pretrained")}


def paper_rows(dataset: str, method: str) -> Mapping[str, Mapping[int, Sequence[float | None]]]:
    """The rows that a method's would be among, without the FM of pre-trained models: it is another measure there."""
    if not find_method(method).pretrained:
        return paper().get(dataset, {}).get("rows", {})  # type: ignore[no-any-return]
    rows = paper_file()["pretrained"].get(dataset, {}).get("rows", {})
    return {row: {tasks: [*values[:2], None] for tasks, values in own.items()} for row, own in rows.items()}


def row_name(record: Mapping[str, Any]) -> str:
    return " + ".join([record["method"], *record["addons"]])


def is_standard(record: Mapping[str, Any], variant: str | None = None) -> bool:
    """Whether a record has a preset's settings (the row's own, or that variant's), no oracle, not begun elsewhere."""
    usual = paper().get(record["dataset"], {}).get("variants", {}).get(row_name(record), "paper")
    wanted = usual if variant is None else variant
    expected = {} if wanted == "paper" else {"variant": wanted}
    changed = changed_settings(record["config"])
    changed = {key: value for key, value in changed.items() if not key.endswith(".weights")}  # a local copy
    return not (record["oracle"] or record.get("label")) and changed == expected


def cells(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Cell]:
    """Metrics by (row, tasks) and seed."""
    found: dict[tuple[str, int], Cell] = {}
    for record in records:
        metrics = {name: record["metrics"][name] for name in METRICS}
        seed = (record["seed"], record.get("order_seed"))
        found.setdefault((row_name(record), record["tasks"]), {})[seed] = metrics
    return found


def standard_cells(
    dataset: str, records: Sequence[Mapping[str, Any]], variant: str | None = None
) -> dict[tuple[str, int], Cell]:
    return cells([r for r in records if r["dataset"] == dataset and is_standard(r, variant)])


def compare(dataset: str, tasks: int, records: Sequence[Mapping[str, Any]]) -> dict[str, list[Comparison]]:
    """The paper's rows for one number of tasks: AA, LA and FM, ours beside theirs."""
    ours = standard_cells(dataset, records)
    found = {}
    for row, values in paper()[dataset]["rows"].items():
        if tasks in values:
            cell = ours.get((row, tasks), {})
            found[row] = [
                Comparison(known(seed[metric] for seed in cell.values()), theirs)
                for metric, theirs in zip(METRICS, values[tasks], strict=True)
            ]
    return found


def compare_gains(dataset: str, records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[Comparison]]:
    """What IVT adds to AA, LA and FM by (host, tasks): differences of runs that share their seeds."""
    ours = standard_cells(dataset, records)
    found = {}
    for (row, tasks), cell in sorted(ours.items()):
        with_ivt = ours.get((f"{row} + ivt", tasks), {})
        seeds = sorted(set(cell) & set(with_ivt), key=str)
        if not seeds:
            continue
        theirs = paper_gains(paper_rows(dataset, row.partition(" + ")[0]), row, tasks)
        found[row, tasks] = [
            Comparison(known(minus(with_ivt[seed][metric], cell[seed][metric]) for seed in seeds), theirs[place])
            for place, metric in enumerate(METRICS)
        ]
    return found


def same_base(first: float, second: float) -> bool:
    """Whether runs of one seed began at one trained base task, by their accuracy right after it."""
    return abs(first - second) <= 1e-6


def based_apart(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Pairs of one seed, but not from one trained base task, by their first accuracy: `podnet, 5 tasks, seed 1`."""
    first: dict[tuple[str, int, Seed], float] = {}
    for record in records:
        if record["dataset"] == dataset and is_standard(record):
            key = (row_name(record), record["tasks"], (record["seed"], record.get("order_seed")))
            first[key] = record["accuracy"][0][0]
    found = []
    for (row, tasks, seed), value in sorted(first.items(), key=str):
        if not same_base(first.get((f"{row} + ivt", tasks, seed), value), value):
            found.append(f"{row}, {tasks} tasks, seed {seed[0]}")
    return found


def paper_gains(rows: Mapping[str, Mapping[int, Sequence[float | None]]], host: str, tasks: int) -> list[float | None]:
    """What IVT adds to AA, LA and FM of a host in a table of the paper; nothing where it has no such pair."""
    after, before = rows.get(f"{host} + ivt", {}).get(tasks), rows.get(host, {}).get(tasks)
    if after is None or before is None:
        return [None] * len(METRICS)
    return [minus(a, b) for a, b in zip(after, before, strict=True)]


def known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def minus(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def spread(values: Sequence[float]) -> str:
    """`64.86` for one seed, `64.86 ± 0.31 (3)` for several."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def runs_of(sweep: str) -> list[RunConfig]:
    """The runs of a packaged sweep."""
    return [resolve(given) for given in read_sweep(sweeps()[sweep])]


def kind(own: Mapping[str, Any]) -> str:
    """The same for resolved configurations that differ in their seed, device and engine alone."""
    changed = changed_settings(own)
    return digest([own["method"], own["addons"], own["dataset"], own["tasks"], own["oracle"], changed])


def of_kind(config: RunConfig, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of one configuration, whatever their seed."""
    wanted = kind(config.resolved())
    return [r for r in records if not r.get("label") and kind(r["config"]) == wanted]


def alike(config: RunConfig, records: Sequence[Mapping[str, Any]]) -> Cell:
    """The measures of one configuration, by seed."""
    return next(iter(cells(of_kind(config, records)).values()), {})


def first_accuracies(config: RunConfig, records: Sequence[Mapping[str, Any]]) -> dict[Seed, float]:
    """What one configuration had right after the base task, by seed; see `same_base`."""
    return {(r["seed"], r.get("order_seed")): r["accuracy"][0][0] for r in of_kind(config, records)}


def settings_text(changes: Mapping[str, Any]) -> str:
    """`podnet.memory=5, ivt.stages=[main, balance]`."""
    return ", ".join(f"{key}={yaml_value(value)}" for key, value in changes.items())


def yaml_value(value: Any) -> str:
    """A value as `--set` reads it."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def cell_text(value: Comparison) -> str:
    return spread(value.ours) if value.ours else "not run"


def difference_text(value: Comparison) -> str:
    return "" if value.difference is None else f"{value.difference:+.2f}"


def made_from(used: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the numbers come from, in a line."""
    if not used:
        return []
    devices = sorted({r["environment"]["device"] for r in used})
    commits = sorted({str(r["environment"]["commit"]) for r in used})
    hours = sum(r["seconds"] for r in used) / 3600
    return [
        "",
        f"{len(used)} records; {', '.join(devices)}; commits {', '.join(commits)}; the runs' own time "
        f"adds up to {hours:.1f} h (several shared the device).",
    ]
