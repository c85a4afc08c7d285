"""The README's results: the main table, one figure and the time it took, made from what lies under results/.

python -m incvec.study.catalog --readme README.md
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from incvec.records import find_records, read_record
from incvec.study import style
from incvec.study.compare import TASKS, Comparison, compare, paper
from incvec.study.figures import find_figures, read_figure
from incvec.study.labs import run_name
from incvec.study.tables import duration

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
DATASET = "cifar100"
ADDED = " + ivt"
NONE = "not run yet"


def results(folder: Path) -> str:
    """All that stands between the README's two markers; paths in it are seen from the folder's parent."""
    files = find_records([folder]) if folder.is_dir() else []
    every = [record for record in map(read_record, files) if record["dataset"] != "digits"]
    records = [record for record in every if record["dataset"] == DATASET]
    parts = ["\n".join(main_table(records)), spent(every), picture(folder)]
    return "\n\n".join(parts)


def main_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every host of IVT without and with it: ours above, the paper's below."""
    found = {tasks: compare(DATASET, tasks, records) for tasks in TASKS}
    rows = list(paper()[DATASET]["rows"])
    hosts = [name for name in rows if name + ADDED in rows]
    lines = ["| | " + " | ".join(f"{tasks} increments" for tasks in TASKS) + " |", "|---" * (1 + len(TASKS)) + "|"]
    for name in (each for host in hosts for each in (host, host + ADDED)):
        cells = [cell(found[tasks][name]) for tasks in TASKS]
        lines.append(f"| {style.label(name)} | " + " | ".join(cells) + " |")
    return lines


def cell(values: Sequence[Comparison]) -> str:
    """`64.86 · 55.10 · 17.20 (3 seeds)`, and the paper's in italics below."""
    seeds = len(values[0].ours)
    ours = " · ".join(f"{value.mean:.2f}" for value in values if value.mean is not None) or NONE
    ours += f" ({seeds} seeds)" if seeds > 1 else ""
    return f"{ours}<br>*{' · '.join(f'{value.paper:.2f}' for value in values)}*"


def spent(records: Sequence[Mapping[str, Any]]) -> str:
    """What the records cost."""
    if not records:
        return f"GPU time: {NONE}."
    devices = ", ".join(sorted({str(record["environment"]["device"]) for record in records}))
    own = sum(record["seconds"] for record in records)
    return (
        f"GPU time: the {len(records)} runs behind this and the other tables add up to {duration(own)} on "
        f"{devices}. Several shared the card, so it was busy for less."
    )


def picture(folder: Path) -> str:
    """The path where there is one, else the oracle gap, with its numbers in words."""
    there = {file: read_figure(file) or {} for file in (find_figures([folder]) if folder.is_dir() else [])}
    for kind in ("path", "gap"):
        for file, found in sorted(there.items(), key=lambda item: item[1].get("batchnorm") == "recalibrate"):
            drawn = file.with_suffix(".png")
            if (found.get("kind"), found.get("dataset")) == (kind, DATASET) and drawn.is_file():
                address = drawn.relative_to(folder.parent).as_posix()
                again = measured_anew(found, there.values()) if kind == "path" else ""
                return f"![{TITLES[kind]}]({address})\n\n{TELL[kind](found)}{again}"
    return "Figure: not made yet."


def measured_anew(path: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """What is left of a path's barriers on the same line with BatchNorm's statistics measured at every point."""
    same = ("kind", "dataset", "task_from", "task_to", "start")
    names = [run_name(curve) for curve in path["curves"]]
    for other in others:
        if other is path or other.get("batchnorm") != "recalibrate" or any(other.get(k) != path.get(k) for k in same):
            continue
        if [run_name(curve) for curve in other["curves"]] == names and path.get("batchnorm") == "interpolate":
            left = ", ".join(f"{curve['barrier']['accuracy']['old']:.1f}" for curve in other["curves"])
            return f" With BatchNorm's statistics measured anew at every point, the barriers are {left}."
    return ""


def tell_path(found: Mapping[str, Any]) -> str:
    until, last = found["task_from"] + 1, found["task_to"] + 1
    parts = [
        f"{style.label(run_name(curve))} {min(curve['accuracy']['old']):.1f} at its lowest and "
        f"{curve['accuracy']['old'][-1]:.1f} at the end (barrier {curve['barrier']['accuracy']['old']:.1f})"
        for curve in found["curves"]
    ]
    start = found["curves"][0]["accuracy"]["old"][0]
    return (
        f"On the straight line from the model after task {until} to that after task {last}, accuracy on the first "
        f"{'task' if until == 1 else 'tasks'} begins at {start:.1f} %: {'; '.join(parts)}."
    )


def tell_gap(found: Mapping[str, Any]) -> str:
    parts = [f"{run['name']} {run['LA']['mean']:.1f}" for run in found["runs"]]
    shares = [run["gap_closed"] for run in found["runs"] if run.get("gap_closed") is not None]
    closed = f" {100 * statistics.mean(shares):.0f} % of the gap to the oracle is closed." if len(shares) == 1 else ""
    return f"Accuracy after the last task, in percent: {', '.join(parts)}.{closed}"


TITLES = {"path": "Accuracy and loss along the lines between models", "gap": "The gap to the oracle"}
TELL = {"path": tell_path, "gap": tell_gap}
