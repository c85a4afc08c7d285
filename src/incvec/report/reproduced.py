"""`results/REPRODUCED.md`: every cell of the paper's tables beside ours, made from records and nothing else.

python -m incvec.report.reproduced results
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from incvec.records import find_records, read_record

METRICS = ("AA", "LA", "FM")
Cell = dict[int, dict[str, float]]  # by seed


@cache
def paper() -> dict[str, Any]:
    """The paper's values, by data set, row and number of tasks."""
    content: dict[str, Any] = yaml.safe_load((resources.files(__package__) / "paper.yaml").read_text())
    return content


def row_name(record: Mapping[str, Any]) -> str:
    return " + ".join([record["method"], *record["addons"]])


def is_standard(record: Mapping[str, Any]) -> bool:
    """Whether a record belongs in the main table: the preset's settings, not an oracle, not begun elsewhere."""
    config = record["config"]
    return not (record["oracle"] or config.get("start") or config.get("variant", "paper") != "paper") and not (
        record.get("label") or changed_settings(record)
    )


def changed_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Options that differ from the presets of today, `section.key: value`."""
    from incvec.presets import resolve

    given = {key: record["config"][key] for key in ("method", "dataset")} | {"addons": record["addons"]}
    preset = resolve(given).sections
    return {
        f"{section}.{key}": value
        for section, values in preset.items()
        for key, value in record["config"].get(section, {}).items()
        if values.get(key) != value
    }


def cells(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Cell]:
    """Metrics by (row, tasks) and seed."""
    found: dict[tuple[str, int], Cell] = {}
    for record in records:
        metrics = {name: record["metrics"][name] for name in METRICS}
        found.setdefault((row_name(record), record["tasks"]), {})[record["seed"]] = metrics
    return found


def spread(values: Sequence[float]) -> str:
    """`64.86` for one seed, `64.86 ± 0.31 (3)` for several."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def table(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a row and number of tasks: ours, the paper's, the difference."""
    ours = cells([r for r in records if r["dataset"] == dataset and is_standard(r)])
    lines = ["| row | tasks | AA | paper | diff | LA | paper | diff | FM | paper | diff |", "|---" * 11 + "|"]
    for tasks in (5, 10, 25):
        for row, values in paper()[dataset]["rows"].items():
            if tasks not in values:
                continue
            cell = ours.get((row, tasks))
            texts = []
            for metric, theirs in zip(METRICS, values[tasks], strict=True):
                if cell is None:
                    texts += ["not run", f"{theirs:.2f}", ""]
                    continue
                mine = [seed[metric] for seed in cell.values()]
                texts += [spread(mine), f"{theirs:.2f}", f"{statistics.mean(mine) - theirs:+.2f}"]
            lines.append(f"| {row} | {tasks} | " + " | ".join(texts) + " |")
    return lines


def gains(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """IVT's gain, paired by seed, beside the paper's."""
    ours = cells([r for r in records if r["dataset"] == dataset and is_standard(r)])
    values = paper()[dataset]["rows"]
    lines = ["| host | tasks | seeds | AA | paper | LA | paper | FM | paper |", "|---" * 9 + "|"]
    for (row, tasks), cell in sorted(ours.items()):
        with_ivt = ours.get((f"{row} + ivt", tasks))
        if with_ivt is None:
            continue
        seeds = sorted(set(cell) & set(with_ivt))
        texts = []
        for place, metric in enumerate(METRICS):
            pairs = [with_ivt[seed][metric] - cell[seed][metric] for seed in seeds]
            theirs = ""
            if tasks in values.get(row, {}) and tasks in values.get(f"{row} + ivt", {}):
                theirs = f"{values[f'{row} + ivt'][tasks][place] - values[row][tasks][place]:+.2f}"
            error = f" ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.2f}" if len(pairs) > 1 else ""
            texts += [f"{statistics.mean(pairs):+.2f}{error}", theirs]
        lines.append(f"| {row} | {tasks} | {len(seeds)} | " + " | ".join(texts) + " |")
    return lines if len(lines) > 2 else []


def others(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Oracles and runs with other settings than the preset's."""
    rows = [r for r in records if r["dataset"] == dataset and not is_standard(r)]
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
        lines += ["", f"## {content['title']}", "", *table(dataset, records)]
        if paired := gains(dataset, records):
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
