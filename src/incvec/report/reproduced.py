"""`results/REPRODUCED.md`: every cell of the paper's tables beside ours, made from records and nothing else.

python -m incvec.report.reproduced results
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from incvec.records import find_records, read_record

METRICS = ("AA", "LA", "FM")
TASKS = (5, 10, 25)
Seed = tuple[int, int | None]  # of the training and of the class order
Cell = dict[Seed, dict[str, float | None]]

# Settings outside the sections that make a run another experiment; seeds, device and engine do not.
SETTINGS = (
    "base_classes",
    "class_order",
    "class_list",
    "variant",
    "precision",
    "start",
    "image_size",
    "sync_batchnorm",
)


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
def paper() -> dict[str, Any]:
    """The paper's values, by data set, row and number of tasks."""
    content: dict[str, Any] = yaml.safe_load((resources.files(__package__) / "paper.yaml").read_text())
    return content


def row_name(record: Mapping[str, Any]) -> str:
    return " + ".join([record["method"], *record["addons"]])


def is_standard(record: Mapping[str, Any], variant: str = "paper") -> bool:
    """Whether a record belongs in the main table: the preset's settings, not an oracle, not begun elsewhere."""
    return not (record["oracle"] or record.get("label") or changed_settings(record, variant))


def changed_settings(record: Mapping[str, Any], variant: str = "paper") -> dict[str, Any]:
    """Options that differ from the presets of today, `section.key: value`."""
    from incvec.presets import resolve

    if variant not in ("paper", record["config"].get("variant")):
        return {"variant": record["config"].get("variant")}
    given = {key: record["config"][key] for key in ("method", "dataset")} | {"addons": record["addons"]}
    preset = resolve(given | {"variant": variant})
    usual = preset.resolved()
    own = record["config"]
    changed = {key: own[key] for key in SETTINGS if key in own and own[key] != usual.get(key)}
    return changed | {
        f"{section}.{key}": value
        for section, values in preset.sections.items()
        for key, value in own.get(section, {}).items()
        if values.get(key) != value
    }


def cells(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Cell]:
    """Metrics by (row, tasks) and seed."""
    found: dict[tuple[str, int], Cell] = {}
    for record in records:
        metrics = {name: record["metrics"][name] for name in METRICS}
        seed = (record["seed"], record.get("order_seed"))
        found.setdefault((row_name(record), record["tasks"]), {})[seed] = metrics
    return found


def standard_cells(
    dataset: str, records: Sequence[Mapping[str, Any]], variant: str = "paper"
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
    values = paper().get(dataset, {"rows": {}})["rows"]
    found = {}
    for (row, tasks), cell in sorted(ours.items()):
        with_ivt = ours.get((f"{row} + ivt", tasks), {})
        seeds = sorted(set(cell) & set(with_ivt), key=str)
        if not seeds:
            continue
        theirs = paper_gains(values, row, tasks)
        found[row, tasks] = [
            Comparison(known(minus(with_ivt[seed][metric], cell[seed][metric]) for seed in seeds), theirs[place])
            for place, metric in enumerate(METRICS)
        ]
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


def table(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a row and number of tasks: ours, the paper's, the difference."""
    lines = ["| row | tasks | AA | paper | diff | LA | paper | diff | FM | paper | diff |", "|---" * 11 + "|"]
    for tasks in TASKS:
        for row, values in compare(dataset, tasks, records).items():
            texts = []
            for value in values:
                difference = "" if value.difference is None else f"{value.difference:+.2f}"
                theirs = "" if value.paper is None else f"{value.paper:.2f}"
                texts += [spread(value.ours) if value.ours else "not run", theirs, difference]
            lines.append(f"| {row} | {tasks} | " + " | ".join(texts) + " |")
    return lines


def gains(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """IVT's gain, paired by seed, beside the paper's."""
    lines = ["| host | tasks | seeds | AA | paper | LA | paper | FM | paper |", "|---" * 9 + "|"]
    for (row, tasks), values in compare_gains(dataset, records).items():
        texts = []
        for value in values:
            error = "" if value.error is None else f" ± {value.error:.2f}"
            texts.append("" if value.mean is None else f"{value.mean:+.2f}{error}")
            texts.append("" if value.paper is None else f"{value.paper:+.2f}")
        lines.append(f"| {row} | {tasks} | {len(values[0].ours)} | " + " | ".join(texts) + " |")
    return lines if len(lines) > 2 else []


def stand_in(dataset: str, content: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A data set that the paper lacks: our hosts without and with IVT, and the gain beside the paper's elsewhere."""
    first, *more = content["beside"]
    hosts = [row for row in paper()[first]["rows"] if f"{row} + ivt" in paper()[first]["rows"]]
    heads = ["host", "settings", "tasks", "AA", "AA with IVT"]
    heads += [
        f"{metric} {of}" for metric in METRICS for of in ("gain", f"paper, {first}", *(f"paper, {d}" for d in more))
    ]
    lines = [content["about"], "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for variant in content["variants"]:
        ours = standard_cells(dataset, records, variant)
        for tasks in content["tasks"]:
            for host in hosts:
                plain, with_ivt = ours.get((host, tasks), {}), ours.get((f"{host} + ivt", tasks), {})
                texts = [host, variant, str(tasks)]
                for cell in (plain, with_ivt):
                    values = known(seed["AA"] for seed in cell.values())
                    texts.append(spread(values) if values else "not run")
                seeds = sorted(set(plain) & set(with_ivt), key=str)
                for place, metric in enumerate(METRICS):
                    gain = known(minus(with_ivt[seed][metric], plain[seed][metric]) for seed in seeds)
                    texts.append(f"{statistics.mean(gain):+.2f}" if gain else "not run")
                    for other in (first, *more):
                        theirs = paper_gains(paper()[other]["rows"], host, tasks)[place]
                        texts.append("" if theirs is None else f"{theirs:+.2f}")
                lines.append("| " + " | ".join(texts) + " |")
    return lines


def others(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Oracles and runs with other settings than the presets that have a table."""
    variants = paper().get(dataset, {}).get("variants", ["paper"])
    rows = [r for r in records if r["dataset"] == dataset and not any(is_standard(r, v) for v in variants)]
    if not rows:
        return []
    lines = ["| run | tasks | seed | changed | AA | LA | FM |", "|---" * 7 + "|"]
    for r in sorted(rows, key=lambda r: (row_name(r), r["tasks"], r["seed"])):
        changed = ", ".join(f"{k}={v}" for k, v in changed_settings(r).items()) or "-"
        m = r["metrics"]
        forgetting = "" if m["FM"] is None else f"{m['FM']:.2f}"
        name = row_name(r) + (" (oracle)" if r["oracle"] else "")
        lines.append(
            f"| {name} | {r['tasks']} | {r['seed']} | {changed} | {m['AA']:.2f} | {m['LA']:.2f} | {forgetting} |"
        )
    return lines


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    lines = [
        "# Reproduced",
        "",
        "Made from the records in this folder by `python -m incvec.report.reproduced results`; do not edit. Values in",
        "percent; `diff` is ours minus the paper's; FM is better when lower. Several seeds: mean ± standard deviation",
        "(number of seeds); gains are paired by seed, ± standard error.",
    ]
    for dataset, content in paper().items():
        body = stand_in(dataset, content, records) if "beside" in content else table(dataset, records)
        lines += ["", f"## {content['title']}", "", *body]
        if "beside" not in content and (paired := gains(dataset, records)):
            lines += ["", "### What IVT adds", "", *paired]
        if rest := others(dataset, records):
            lines += ["", "### Other runs", "", *rest]
        used = [r for r in records if r["dataset"] == dataset]
        if used:
            devices = sorted({r["environment"]["device"] for r in used})
            commits = sorted({str(r["environment"]["commit"]) for r in used})
            hours = sum(r["seconds"] for r in used) / 3600
            lines += [
                "",
                f"{len(used)} records; {', '.join(devices)}; commits {', '.join(commits)}; the runs' own time "
                f"adds up to {hours:.1f} h (several shared the device).",
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    records = [read_record(path) for path in find_records([folder])]
    (folder / "REPRODUCED.md").write_text(page(records))


if __name__ == "__main__":
    main()
