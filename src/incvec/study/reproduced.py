"""`results/REPRODUCED.md`: every cell of the paper's tables beside ours, made from records only.

python -m incvec.study.reproduced results
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from incvec.config import RunConfig
from incvec.presets import changed_settings, resolve
from incvec.records import find_records, read_record
from incvec.study import comparisons, paper
from incvec.study.comparisons import NOT_RUN
from incvec.study.oracle_gap import pair_with_oracle
from incvec.study.paper import METRICS, BySeed, Records
from incvec.study.run_times import INTERVAL_SWEEP, interval_table, time_table
from incvec.study.runs import Record, row_name, seed_of, settings_text
from incvec.study.tables import Cell, Table, make_row, mean, number

BOUNDS_SWEEP, OPEN_SWEEPS = "cifar100-podnet", ("cifar100-switches", "cifar100-readings")  # each has a section
CLIP_SECTION = """## Pre-trained: CLIP ViT-B/16 (the paper's table of pre-trained models)

Commands: `incvec sweep clip-cifar100`, `incvec sweep clip-aircraft`. FM follows the paper's formula; the
paper's own numbers agree with `fm_spu` instead, except RAPF's: several are below what the formula can give."""
LITE_SECTION = f"""## Pre-trained: {paper.LITE_MODEL}

These numbers are not CLIP's, and not comparable with the paper's. Commands:
`incvec sweep lite-cifar100`, `incvec sweep lite-aircraft`; the learning rate is chosen once, by
`incvec sweep lite-rate`: FLYP without IVT, on training images held out of CIFAR-100's first two tasks."""
TIMES = """### Time on the GPU, in minutes

Mean of the records, without waiting. The base task is trained once per method and seed. Runs shared the GPU with
others, so a run that has it to itself takes less. A task that was interrupted counts from its last resume."""
INTRODUCTION = """# Reproduced

Made from the records in this folder by `python -m incvec.study.reproduced results`; do not edit. Values in
percent; `diff` is ours minus the paper's; FM is better when lower. Several seeds: mean ± standard deviation
(number of seeds); gains are paired by seed, ± standard error. `clipped` (`fm_clipped`) is FM with the last
task in its maximum: of the definitions tried on our matrices, the closest to the paper's FM."""


def run_text(record: Mapping[str, Any]) -> str:
    return row_name(record) + (" (oracle)" if record["oracle"] else "")


def metric_cells(record: Record) -> list[Cell]:
    return [number(record["metrics"][metric], missing="") for metric in METRICS]


def open_settings_table(dataset: str, records: Records) -> Table | None:
    """Settings that the paper leaves open, one per line: the gain over the host, paired by seed, and the paper's.

    All lines are of the sweep's seeds; a dagger marks runs that started from another base task than their host.
    """
    hosts: dict[str, list[RunConfig]] = {}
    for config in (config for sweep in OPEN_SWEEPS for config in paper.sweep_configs(sweep)):
        if config.dataset == dataset:
            hosts.setdefault(config.method, []).append(config)
    rows: list[list[str | Cell]] = []
    other_base = False
    for configs in hosts.values():
        given = {key: getattr(configs[0], key) for key in ("method", "addons", "dataset", "tasks", "seed")}
        default, host = resolve(given), resolve({**given, "addons": []})
        name, seeds = row_name(default.resolved()), {config.seed for config in configs}
        rows_of_paper = paper.paper_tables("scratch")[dataset]["rows"]
        theirs, theirs_host = (rows_of_paper[row][default.tasks] for row in (name, host.method))
        rows.append([name, "the paper", "3"])
        for ours, plain in zip(theirs, theirs_host, strict=True):
            rows[-1] += [number(ours), number(ours - plain, "+.2f"), ""]
        host_records = paper.records_of(host, records)
        base = base_accuracies(host_records)
        for config in (default, *configs):
            own = [record for record in paper.records_of(config, records) if record["seed"] in seeds]
            other = [s for s, value in base_accuracies(own).items() if not paper.same_base(base.get(s, value), value)]
            other_base |= bool(other)
            setting = settings_text(changed_settings(config.resolved())) or "default"
            cells = setting_cells(paper.by_seed(own), paper.by_seed(host_records), theirs)
            rows.append([name, f"`{setting}`{' †' if other else ''}", str(len(own)), *cells])
    columns = ["run", "setting", "seeds", *(label for m in METRICS for label in (m, "gain", "vs paper"))]
    dagger = "† Started from another base task than its host, despite the same seed: the gain includes that difference."
    return Table(columns, rows, note=dagger if other_base else "") if rows else None


def base_accuracies(records: Records) -> dict[Any, float]:
    """Accuracy right after the base task, by seed; see `same_base`."""
    return {seed_of(record): record["accuracy"][0][0] for record in records}


def setting_cells(cell: BySeed, host: BySeed, theirs: Sequence[float]) -> list[Cell]:
    """For each metric ours, the gain over the host, and the difference to the paper's."""
    cells = []
    for ours, gain in zip(paper.compare_cell(cell, theirs)[:3], paper.paired_gains(cell, host), strict=True):
        paired = f" ({len(gain.ours)})" if 0 < len(gain.ours) < len(cell) else ""  # seeds that have their host
        cells += [mean(ours.ours, count=True, missing=NOT_RUN), Cell(number(gain.mean, "+.2f", "").text + paired)]
        cells.append(number(ours.difference, "+.2f", ""))
    return cells


def bounds_table(dataset: str, records: Records) -> Table | None:
    """The oracle and joint training beside the method without and with IVT; the paper has no numbers for them."""
    configs = paper.sweep_configs(BOUNDS_SWEEP)
    if configs[0].dataset != dataset:
        return None
    tasks = next(config.tasks for config in configs if config.oracle)
    shown = {paper.settings_key(config.resolved()): config for config in configs if config.tasks == tasks}
    members = [paper.records_of(config, records) for config in shown.values()]
    every = [record for own in members for record in own]
    closed = {id(record): gap.closed for record, gap in zip(every, pair_with_oracle(every), strict=True) if gap}
    rows = []
    for config, own in zip(shown.values(), members, strict=True):
        shares = [share for record in own if (share := closed.get(id(record))) is not None]
        gap = f"{100 * statistics.mean(shares):.0f} %" if shares else ""
        gap += f" ({len(shares)} of {len(own)} seeds)" if 0 < len(shares) < len(own) else ""
        missing = "" if own else NOT_RUN
        metrics = [mean(paper.values_of(paper.by_seed(own), m), count=True, missing=missing) for m in METRICS]
        length = 1 if config.method == "joint" else config.tasks
        rows.append(make_row(run_text(config.resolved()), str(length), str(len(own)), *metrics, gap))
    return Table(["run", "tasks", "seeds", *METRICS, "gap closed"], rows)


def other_data_table(dataset: str, content: Mapping[str, Any], records: Records) -> Table:
    """A data set that the paper does not have: the hosts without and with IVT, and the gain beside those elsewhere."""
    first, *more = content["compare_with"]
    theirs = {name: paper.paper_tables("scratch")[name]["rows"] for name in (first, *more)}
    hosts = [row for row in theirs[first] if f"{row} + ivt" in theirs[first]]
    elsewhere = {name: paper.compare_gains(name, records) for name in more}
    rows = []
    for variant in content["variants"]:
        ours = paper.standard_cells(dataset, records, variant)
        for tasks, host in ((tasks, host) for tasks in content["tasks"] for host in hosts):
            plain, with_ivt = ours.get((host, tasks), {}), ours.get((f"{host} + ivt", tasks), {})
            if variant != content["variants"][0] and not (plain or with_ivt):
                continue
            reached = [mean(paper.values_of(cell, "AA"), count=True, missing=NOT_RUN) for cell in (plain, with_ivt)]
            cells = [Cell(host), Cell(variant), number(tasks, "d"), *reached]
            for place, gain in enumerate(paper.paired_gains(with_ivt, plain)):
                cells.append(number(gain.mean, "+.2f", NOT_RUN))
                values = [paper.paper_gains(theirs[first], host, tasks)[place]]
                for name, gains in elsewhere.items():
                    own = gains[host, tasks][place].mean if (host, tasks) in gains else None
                    values += [paper.paper_gains(theirs[name], host, tasks)[place], own]
                cells += [number(value, "+.2f", "") for value in values]
            rows.append(cells)
    compared = ("gain", f"paper, {first}", *(f"{whose}, {name}" for name in more for whose in ("paper", "ours")))
    columns = ["host", "settings", "tasks", "AA", "AA with IVT"]
    columns += [f"{metric} {label}" for metric in METRICS for label in compared]
    return Table(columns, rows)


def other_runs_table(dataset: str, records: Records) -> Table | None:
    """Records of networks trained from scratch that no other table shows."""
    configs = [config for sweep in (BOUNDS_SWEEP, *OPEN_SWEEPS) for config in paper.sweep_configs(sweep)]
    configs += paper.sweep_configs(INTERVAL_SWEEP)
    configs += [config for name in paper.ablation_names(dataset) for config in paper.ablation_configs(name)]
    keys = {paper.settings_key(config.resolved()) for config in configs}
    content = paper.paper_tables("scratch")[dataset]

    def is_shown(r: Record) -> bool:
        if paper.is_standard(r) and r["tasks"] in content["rows"].get(row_name(r), ()):
            return True
        variants = content.get("variants", ()) if r["tasks"] in content.get("tasks", ()) else ()
        return paper.settings_key(r["config"]) in keys or any(paper.is_standard(r, variant) for variant in variants)

    rest = [r for r in records if r["dataset"] == dataset and not is_shown(r)]
    rows = []
    for r in sorted(rest, key=lambda r: (row_name(r), r["tasks"], r["seed"])):
        changes = settings_text(changed_settings(r["config"])) or "-"
        rows.append(make_row(run_text(r), str(r["tasks"]), str(r["seed"]), changes, *metric_cells(r)))
    return Table(["run", "tasks", "seed", "changed", *METRICS], rows) if rows else None


def other_pretrained_table(records: Records) -> Table | None:
    """Pre-trained models with other settings, each with its model's name."""
    rows = []
    for r in sorted(records, key=lambda r: (r["dataset"], row_name(r), r["tasks"], r["seed"])):
        own = r["config"][r["method"]]
        pixels = f"{own['pixels']} px" if own.get("pixels") else None
        model = ", ".join(filter(None, (own["net"], own.get("tag"), pixels)))
        data = f"{r['dataset']} ({len(r['class_order'])} classes)"
        rows.append(make_row(run_text(r), model, data, str(r["tasks"]), str(r["seed"]), *metric_cells(r)))
    return Table(["run", "model", "data", "tasks", "seed", *METRICS], rows) if rows else None


def provenance(records: Records) -> list[str]:
    """The origin of the numbers, in one line."""
    if not records:
        return []
    devices = ", ".join(sorted({r["environment"]["device"] for r in records}))
    commits = ", ".join(sorted({str(r["environment"]["commit"]) for r in records}))
    hours = sum(r["seconds"] for r in records) / 3600
    time = f"{hours:.1f} h of run time in total (several runs shared the device)"
    return ["", f"{len(records)} records; {devices}; commits {commits}; {time}."]


def titled(heading: str, table: Table | None) -> list[str]:
    """A heading and a table; nothing without a table."""
    return [] if table is None else ["", heading, "", table.markdown(align=False)]


def pretrained_sections(records: Records) -> list[str]:
    lines, rest = [], [r for r in records if not r["config"].get("held_out")]
    for clip, name, introduction in ((True, "CLIP ViT-B/16", CLIP_SECTION), (False, "Not CLIP", LITE_SECTION)):
        tables = [table for table in paper.pretrained_tables() if table.clip is clip]
        shown = [r for r in records if any(table.contains(r) for table in tables)]
        rest = [r for r in rest if r not in shown]
        lines += ["", introduction]
        for table in tables:
            lines += titled(f"### {name}: {table.title}", comparisons.pretrained_table(table, records))
            lines += titled("IVT adds, in points:", comparisons.pretrained_gain_table(table, records))
        if not clip:
            heading = "### The learning rate, on held-out training images"
            lines += titled(heading, comparisons.learning_rate_table(records))
            shown += paper.learning_rate_records(records)
        lines += provenance(shown)
    return lines + titled("### Other runs of pre-trained models", other_pretrained_table(rest))


def render(records: Records) -> str:
    """The whole page."""
    pretrained = [record for record in records if paper.is_pretrained(record)]
    scratch = [record for record in records if not paper.is_pretrained(record)]
    lines = [INTRODUCTION]
    for dataset, content in paper.paper_tables("scratch").items():
        lines += ["", f"## {content['title']}"]
        if "compare_with" in content:
            lines += titled(content["description"], other_data_table(dataset, content, scratch))
        else:
            lines += ["", comparisons.main_table(dataset, scratch).markdown(align=False)]
            lines += titled("### What IVT adds", comparisons.gain_table(dataset, scratch))
            if pairs := paper.pairs_with_different_bases(dataset, scratch):
                lines += ["", f"Pairs with the same seed but different base tasks: {'; '.join(pairs)}."]
        for name in paper.ablation_names(dataset):
            ablation = paper.paper_tables("ablations")[name]
            heading = f"### {ablation['title']}\n\nCommand: `incvec sweep {ablation['sweep']}`."
            lines += titled(heading, comparisons.ablation_table(name, scratch))
        interval = f"### Epochs between teleports\n\nCommand: `incvec sweep {INTERVAL_SWEEP}`. "
        interval += "Runs marked † below started from another base task than their host."
        lines += titled(interval, interval_table(dataset, scratch))
        lines += titled("### The oracle and joint training", bounds_table(dataset, scratch))
        if open_settings := open_settings_table(dataset, scratch):
            lines += titled("### What the paper leaves open", open_settings)
            lines += ["", open_settings.note] if open_settings.note else []
        lines += titled(TIMES, time_table(dataset, scratch))
        lines += titled("### Other runs", other_runs_table(dataset, scratch))
        lines += provenance([r for r in scratch if r["dataset"] == dataset])
    return "\n".join([*lines, *pretrained_sections(pretrained)]) + "\n"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    records = [read_record(path) for path in find_records([folder])]
    (folder / "REPRODUCED.md").write_text(render(records))


if __name__ == "__main__":
    main()
