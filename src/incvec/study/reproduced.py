"""`results/REPRODUCED.md`: every cell of the paper's tables beside ours, made from records and nothing else.

python -m incvec.study.reproduced results
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from incvec.config import RunConfig
from incvec.metrics import gap_closed
from incvec.presets import changed_settings, resolve
from incvec.records import find_records, read_record
from incvec.study import ablations, pretrained
from incvec.study.compare import (
    METRICS,
    TASKS,
    Cell,
    Comparison,
    alike,
    based_apart,
    cell_text,
    compare,
    compare_gains,
    difference_text,
    first_accuracies,
    is_standard,
    kind,
    known,
    made_from,
    minus,
    paper,
    paper_gains,
    row_name,
    runs_of,
    same_base,
    settings_text,
    spread,
    standard_cells,
)

BOUNDS, SWITCHES = "cifar100-podnet", ("cifar100-switches", "cifar100-readings")  # sweeps that have their own section


def table(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a row and number of tasks: ours, the paper's, the difference."""
    lines = ["| row | tasks | AA | paper | diff | LA | paper | diff | FM | paper | diff |", "|---" * 11 + "|"]
    for tasks in TASKS:
        for row, values in compare(dataset, tasks, records).items():
            texts = []
            for value in values:
                theirs = "" if value.paper is None else f"{value.paper:.2f}"
                texts += [cell_text(value), theirs, difference_text(value)]
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
    if apart := based_apart(dataset, records):
        lines += ["", f"Not from one trained base task, though of one seed: {'; '.join(apart)}."]
    return lines if len(lines) > 2 else []


def switch_table(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the paper leaves open, a setting a line: what IVT then adds to its host, paired by seed, and the paper's.

    The default is told for the sweep's seeds alone; a dagger says where a run began at another base than its host.
    """
    hosts: dict[str, list[RunConfig]] = {}
    for sweep in SWITCHES:
        for config in runs_of(sweep):
            if config.dataset == dataset:
                hosts.setdefault(config.method, []).append(config)
    if not hosts:
        return []
    lines = [
        "| run | setting | seeds | " + " | ".join(f"{m} | gain | vs paper" for m in METRICS) + " |",
        "|---" * (3 + 3 * len(METRICS)) + "|",
    ]
    apart = False
    for configs in hosts.values():
        first = configs[0]
        given = {key: getattr(first, key) for key in ("method", "addons", "dataset", "tasks", "seed")}
        default, host = resolve(given), resolve({**given, "addons": []})
        theirs, bare = (
            paper()[dataset]["rows"][row_name(config.resolved())][default.tasks] for config in (default, host)
        )
        texts = [f"{ours:.2f} | {ours - without:+.2f} | " for ours, without in zip(theirs, bare, strict=True)]
        name = row_name(default.resolved())
        lines.append(f"| {name} | the paper | 3 | " + " | ".join(texts) + " |")
        usual, began = alike(host, records), first_accuracies(host, records)
        seeds = {config.seed for config in configs}
        for config in (default, *configs):
            cell = {seed: values for seed, values in alike(config, records).items() if seed[0] in seeds}
            other = [
                seed for seed, value in first_accuracies(config, records).items()
                if seed in cell and not same_base(began.get(seed, value), value)
            ]  # fmt: skip
            apart |= bool(other)
            setting = settings_text(changed_settings(config.resolved())) or "default"
            lines.append(f"| {name} | `{setting}`{' †' * bool(other)} | {switch_row(cell, usual, theirs)}")
    if apart:
        lines += [
            "",
            "† Begun at another trained base task than the host, though of one seed: the gain holds that too.",
        ]
    return lines


def switch_row(cell: Cell, host: Cell, theirs: Sequence[float]) -> str:
    """The cells of one setting: how many seeds, and for each measure ours, the gain over the host, and the paper's."""
    texts = [str(len(cell))]
    for metric, value in zip(METRICS, theirs, strict=True):
        ours = Comparison(known(seed[metric] for seed in cell.values()), value)
        pairs = known(minus(cell[seed][metric], host[seed][metric]) for seed in cell if seed in host)
        gain = f"{statistics.mean(pairs):+.2f}" if pairs else ""
        if 0 < len(pairs) < len(cell):
            gain += f" ({len(pairs)})"  # so many of the seeds have their host
        texts += [cell_text(ours), gain, difference_text(ours)]
    return " | ".join(texts) + " |"


def bound_table(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The oracle and joint training beside the method without and with IVT; the paper gives no numbers for them."""
    configs = runs_of(BOUNDS)
    if configs[0].dataset != dataset:
        return []
    tasks = next(config.tasks for config in configs if config.oracle)
    rows = {kind(config.resolved()): config for config in configs if config.tasks == tasks}
    found = [alike(config, records) for config in rows.values()]
    plain = next(cell for cell, c in zip(found, rows.values(), strict=True) if not c.addons and not c.oracle)
    oracle = next(cell for cell, c in zip(found, rows.values(), strict=True) if c.oracle)
    lines = ["| run | tasks | seeds | AA | LA | FM | gap closed |", "|---" * 7 + "|"]
    for config, cell in zip(rows.values(), found, strict=True):
        values = [Comparison(known(seed[metric] for seed in cell.values()), None) for metric in METRICS]
        texts = [cell_text(value) if value.ours or not cell else "" for value in values]
        shares = [
            share for seed in cell if config.addons and seed in plain and seed in oracle
            if (share := gap_closed(*(each[seed]["LA"] or 0.0 for each in (cell, plain, oracle)))) is not None
        ]  # fmt: skip
        name = row_name(config.resolved()) + (" (oracle)" if config.oracle else "")
        length = 1 if config.method == "joint" else config.tasks
        closed = f"{100 * statistics.mean(shares):.0f} %" if shares else ""
        closed += f" ({len(shares)} of {len(cell)} seeds)" if 0 < len(shares) < len(cell) else ""
        lines.append(f"| {name} | {length} | {len(cell)} | " + " | ".join([*texts, closed]) + " |")
    return lines


def stand_in(dataset: str, content: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A data set that the paper lacks: our hosts without and with IVT, and the gain beside those elsewhere."""
    first, *more = content["beside"]
    hosts = [row for row in paper()[first]["rows"] if f"{row} + ivt" in paper()[first]["rows"]]
    heads = ["host", "settings", "tasks", "AA", "AA with IVT"]
    compared = ("gain", f"paper, {first}", *(f"{whose}, {name}" for name in more for whose in ("paper", "ours")))
    heads += [f"{metric} {of}" for metric in METRICS for of in compared]
    elsewhere = {name: compare_gains(name, records) for name in more}
    lines = [content["about"], "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for variant in content["settings"]:
        ours = standard_cells(dataset, records, variant)
        for tasks in content["tasks"]:
            for host in hosts:
                plain, with_ivt = ours.get((host, tasks), {}), ours.get((f"{host} + ivt", tasks), {})
                if variant != content["settings"][0] and not (plain or with_ivt):
                    continue  # nobody misses it
                texts = [host, variant, str(tasks)]
                for cell in (plain, with_ivt):
                    reached = known(seed["AA"] for seed in cell.values())
                    texts.append(spread(reached) if reached else "not run")
                seeds = sorted(set(plain) & set(with_ivt), key=str)
                for place, metric in enumerate(METRICS):
                    gain = known(minus(with_ivt[seed][metric], plain[seed][metric]) for seed in seeds)
                    texts.append(f"{statistics.mean(gain):+.2f}" if gain else "not run")
                    values = [paper_gains(paper()[first]["rows"], host, tasks)[place]]
                    for name, found in elsewhere.items():
                        own = found[host, tasks][place].mean if (host, tasks) in found else None
                        values += [paper_gains(paper()[name]["rows"], host, tasks)[place], own]
                    texts += ["" if value is None else f"{value:+.2f}" for value in values]
                lines.append("| " + " | ".join(texts) + " |")
    return lines


def others(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Records that no other section has."""
    shown = {kind(config.resolved()) for sweep in (BOUNDS, *SWITCHES) for config in runs_of(sweep)}
    shown |= ablations.kinds(dataset)
    content = paper()[dataset]
    stands_in = [variant for variant in content.get("settings", ()) if "beside" in content]
    rows = [
        r for r in records
        if r["dataset"] == dataset and (r.get("label") or kind(r["config"]) not in shown)
        and not (is_standard(r) and r["tasks"] in content["rows"].get(row_name(r), ()))
        and not (r["tasks"] in content.get("tasks", ()) and any(is_standard(r, variant) for variant in stands_in))
    ]  # fmt: skip
    if not rows:
        return []
    lines = ["| run | tasks | seed | changed | AA | LA | FM |", "|---" * 7 + "|"]
    for r in sorted(rows, key=lambda r: (row_name(r), r["tasks"], r["seed"])):
        changed = settings_text(changed_settings(r["config"])) or "-"
        m = r["metrics"]
        forgetting = "" if m["FM"] is None else f"{m['FM']:.2f}"
        name = row_name(r) + (" (oracle)" if r["oracle"] else "")
        lines.append(
            f"| {name} | {r['tasks']} | {r['seed']} | {changed} | {m['AA']:.2f} | {m['LA']:.2f} | {forgetting} |"
        )
    return lines


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    every, records = records, [r for r in records if not pretrained.starts_pretrained(r)]
    lines = [
        "# Reproduced",
        "",
        "Made from the records in this folder by `python -m incvec.study.reproduced results`; do not edit. Values in",
        "percent; `diff` is ours minus the paper's; FM is better when lower. Several seeds: mean ± standard deviation",
        "(number of seeds); gains are paired by seed, ± standard error.",
    ]
    for dataset, content in paper().items():
        body = stand_in(dataset, content, records) if "beside" in content else table(dataset, records)
        lines += ["", f"## {content['title']}", "", *body]
        if "beside" not in content and (paired := gains(dataset, records)):
            lines += ["", "### What IVT adds", "", *paired]
        lines += ablations.section(dataset, records)
        if bounds := bound_table(dataset, records):
            lines += ["", "### The oracle and joint training", "", *bounds]
        if switches := switch_table(dataset, records):
            lines += ["", "### What the paper leaves open", "", *switches]
        if rest := others(dataset, records):
            lines += ["", "### Other runs", "", *rest]
        lines += made_from([r for r in records if r["dataset"] == dataset])
    lines += pretrained.section(every)
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    records = [read_record(path) for path in find_records([folder])]
    (folder / "REPRODUCED.md").write_text(page(records))


if __name__ == "__main__":
    main()
