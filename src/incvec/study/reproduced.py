"""`results/REPRODUCED.md`: every cell of the paper's tables beside ours, made from records only.

python -m incvec.study.reproduced results
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from incvec.presets import changed_settings
from incvec.records import title
from incvec.study import comparisons, paper
from incvec.study.comparisons import NOT_RUN, metric_cells
from incvec.study.paper import METRICS, Records
from incvec.study.runs import Record, load_runs, row_name, settings_key, settings_text
from incvec.study.settings_tables import bounds_table, configs_of, settings_table
from incvec.study.tables import Cell, Table, make_row, mean, number

BOUNDS_SWEEPS = ("cifar100-podnet", "cifar100-oracles")
SETTINGS_SWEEPS = {  # headings and sweeps of tables of settings
    "Epochs between teleports (`null`: one, at the end of the stage)": ("ivt-interval",),
    "What the paper leaves open": ("cifar100-switches", "cifar100-readings", "cifar100-own-loss"),
    "Where published code differs from ours": ("audit", "last-batch"),
}
GAINS = "Gains are over the same run without IVT, and over the default for runs without add-ons."
SEEDS = 3  # of every cell of the paper's table
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
task in its maximum: of the definitions tried on our matrices, the closest to the paper's FM. Cells that are
`not run` lack GPU time, unless another reason is given below their table."""


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
            *gains_here, clipped = paper.paired_gains(with_ivt, plain)
            for place, gain in enumerate(gains_here):
                cells.append(mean(gain.ours, "+.2f", error=True, missing=NOT_RUN))
                values = [paper.paper_gains(theirs[first], host, tasks)[place]]
                for name, gains in elsewhere.items():
                    own = gains[host, tasks][place].mean if (host, tasks) in gains else None
                    values += [paper.paper_gains(theirs[name], host, tasks)[place], own]
                cells += [number(value, "+.2f", "") for value in values]
            rows.append([*cells, mean(clipped.ours, "+.2f", error=True, missing="")])
    compared = ("gain", f"paper, {first}", *(f"{whose}, {name}" for name in more for whose in ("paper", "ours")))
    columns = ["host", "settings", "tasks", "AA", "AA with IVT"]
    columns += [*(f"{metric} {label}" for metric in METRICS for label in compared), "clipped gain"]
    return Table(columns, rows)


def other_runs_table(dataset: str, records: Records) -> Table | None:
    """Runs of networks trained from scratch that no other table shows."""
    configs = configs_of((*BOUNDS_SWEEPS, *(sweep for own in SETTINGS_SWEEPS.values() for sweep in own)), dataset)
    configs += [config.resolved() for name in paper.ablation_names(dataset) for config in paper.ablation_configs(name)]
    keys = {settings_key(config) for config in configs}
    content = paper.paper_tables("scratch")[dataset]

    def is_shown(r: Record) -> bool:
        if paper.is_standard(r) and r["tasks"] in content["rows"].get(row_name(r), ()):
            return True
        variants = content.get("variants", ()) if r["tasks"] in content.get("tasks", ()) else ()
        return settings_key(r["config"]) in keys or any(paper.is_standard(r, variant) for variant in variants)

    members: dict[tuple[str, int, str], list[Record]] = {}
    for r in records:
        if r["dataset"] == dataset and not is_shown(r):
            changes = settings_text(changed_settings(r["config"])) or "-"
            members.setdefault((title(r), r["tasks"], changes), []).append(r)
    rows = [
        make_row(run, str(tasks), changes, *metric_cells(paper.by_seed(own)))
        for (run, tasks, changes), own in sorted(members.items())
    ]
    return Table(["run", "tasks", "changed", *METRICS, "clipped"], rows) if rows else None


def other_pretrained_table(records: Records) -> Table | None:
    """Pre-trained models with other settings, each with its model's name."""
    members: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        own = r["config"][r["method"]]
        pixels = f"{own['pixels']} px" if own.get("pixels") else None
        model = ", ".join(filter(None, (own["net"], own.get("tag"), pixels)))
        data = f"{r['dataset']} ({len(r['class_order'])} classes)"
        changes = settings_text(changed_settings(r["config"])) or "-"
        members.setdefault((data, title(r), str(r["tasks"]), model, changes), []).append(r)
    rows = [
        make_row(run, model, data, tasks, changes, *metric_cells(paper.by_seed(own)))
        for (data, run, tasks, model, changes), own in sorted(members.items())
    ]
    return Table(["run", "model", "data", "tasks", "changed", *METRICS, "clipped"], rows) if rows else None


def time_table(dataset: str, records: Records) -> Table | None:
    """Time of the rows of the paper's table on a GPU, from records; the note adds them up."""
    own = [r for r in records if r["dataset"] == dataset and paper.is_standard(r) and is_timed(r)]
    cells: dict[tuple[str, int], list[float]] = {}
    bases: dict[str, list[float]] = {}
    for record in own:
        seconds = record["task_seconds"]
        cells.setdefault((row_name(record), record["tasks"]), []).append(sum(seconds[1:]) / 60)
        if not record["base"].get("shared"):
            bases.setdefault(record["method"], []).append(seconds[0] / 60)
    published = paper.paper_tables("scratch")[dataset]["rows"]
    expected = [(row, tasks) for row, by_tasks in published.items() for tasks in by_tasks]
    if not any(cell in cells for cell in expected):
        return None
    rows = []
    for row in published:
        times = [mean(cells.get((row, tasks), []), ".1f", missing=NOT_RUN) for tasks in paper.INCREMENTS]
        rows.append(make_row(row, mean(bases.get(row.split(" + ")[0], []), ".1f", missing=""), *times))
    known = [statistics.mean(cells[cell]) for cell in expected if cell in cells]
    hours = (sum(known) + sum(map(statistics.mean, bases.values()))) / 60
    total = f"{hours:.1f} h for one seed, {SEEDS * hours:.1f} h for {SEEDS}"
    note = f"{len(known)} of {len(expected)} cells, base tasks included: {total}."
    return Table(["row", "base task", *(f"{tasks} increments" for tasks in paper.INCREMENTS)], rows, note=note)


def is_timed(record: Record) -> bool:
    """On a GPU, and with the time of every task: a run that started from another's snapshot lacks some."""
    complete = len(record.get("task_seconds") or []) == len(record["accuracy"])
    return complete and str(record["environment"].get("device")).startswith("NVIDIA")


def provenance(records: Records) -> list[str]:
    """The origin of the numbers, in one line."""
    if not records:
        return []
    devices = ", ".join(sorted({r["environment"]["device"] for r in records}))
    commits = ", ".join(sorted({str(r["environment"]["commit"])[:12] for r in records}))
    hours = sum(r["seconds"] for r in records) / 3600
    time = f"{hours:.1f} h of run time in total (several runs shared the device)"
    return ["", f"{len(records)} records; {devices}; commits {commits}; {time}."]


def titled(heading: str, table: Table | None, note: bool = False) -> list[str]:
    """A heading, a table, and its note if asked for; nothing without a table."""
    if table is None:
        return []
    rows = [table.markdown(align=False)] if table.rows else []
    return blocks([heading, *rows, *([table.note] if note and table.note else [])])


def blocks(texts: Iterable[str]) -> list[str]:
    """Each text after an empty line."""
    return [line for text in texts for line in ("", text)]


def section(heading: str, sweeps: Sequence[str]) -> str:
    """A heading, and the commands of its runs."""
    commands = ", ".join(f"`incvec sweep {sweep}`" for sweep in sweeps)
    return f"### {heading}\n\n{'Commands' if len(sweeps) > 1 else 'Command'}: {commands}."


def pretrained_sections(records: Records) -> list[str]:
    lines, rest = [], [r for r in records if not r["config"].get("held_out")]
    for clip, name, introduction in ((True, "CLIP ViT-B/16", CLIP_SECTION), (False, "Not CLIP", LITE_SECTION)):
        tables = [table for table in paper.pretrained_tables() if table.clip is clip]
        shown = [r for r in records if any(table.contains(r) for table in tables)]
        rest = [r for r in rest if r not in shown]
        lines += ["", introduction]
        for table in tables:
            lines += titled(f"### {name}: {table.title}", comparisons.pretrained_table(table, records))
            if table.clip:
                reasons = paper.paper_tables("pretrained")[table.dataset]["not_run"]
                cells = table.cells(records)
                expected = {(row, tasks): cells.get((row, tasks)) for row in table.rows for tasks in table.tasks}
                lines += blocks(paper.not_run_notes(reasons, expected))
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
            cells = paper.standard_cells(dataset, scratch)
            expected = {(row, tasks): cells.get((row, tasks)) for row, own in content["rows"].items() for tasks in own}
            lines += blocks(paper.not_run_notes(content.get("not_run", {}), expected))
            lines += titled("### What IVT adds", comparisons.gain_table(dataset, scratch))
            if pairs := paper.pairs_with_different_bases(dataset, scratch):
                lines += ["", f"Pairs with the same seed but different base tasks: {'; '.join(pairs)}."]
        for name in paper.ablation_names(dataset):
            ablation = paper.paper_tables("ablations")[name]
            lines += titled(section(ablation["title"], [ablation["sweep"]]), comparisons.ablation_table(name, scratch))
        lines += titled(
            section("Oracles and joint training", BOUNDS_SWEEPS),
            bounds_table(BOUNDS_SWEEPS, dataset, scratch),
            note=True,
        )
        for heading, sweeps in SETTINGS_SWEEPS.items():
            lines += titled(f"{section(heading, sweeps)} {GAINS}", settings_table(sweeps, dataset, scratch), note=True)
        lines += titled(TIMES, time_table(dataset, scratch), note=True)
        lines += titled("### Other runs", other_runs_table(dataset, scratch))
        lines += provenance([r for r in scratch if r["dataset"] == dataset])
    return "\n".join([*lines, *pretrained_sections(pretrained)]) + "\n"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    (folder / "REPRODUCED.md").write_text(render([run.record for run in load_runs([folder])]))


if __name__ == "__main__":
    main()
