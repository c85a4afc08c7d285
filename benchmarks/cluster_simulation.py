"""How long the paper's table takes on 1, 8 and 64 GPUs: a simulation with the queue that the coordinator uses.

    python benchmarks/cluster_simulation.py --json results/benchmarks/cluster-simulation.json \
        --figure results/benchmarks/cluster-simulation.png

The table is the paper's first, on CIFAR-100: 14 rows with 5, 10 and 25 increments and three seeds. The work of a run
are the seconds in our records (results/cifar100): of its base task, from a run that trained one, and of its
increments, the fewest of all records with the presets' settings of the method. They were measured on an H200 that other
runs shared, so that they are upper bounds, except that a task in which a run was resumed counts from then on. Runs on
one GPU share it: eight together have the throughput of results/benchmarks/throughput.json, and numbers between are
interpolated.

Nothing fails, no time passes between two runs, and no data is loaded. `waiting` is the share of the GPUs' time that is
lost because runs wait for base tasks, `nothing_left` the share in which only the last runs are trained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import Report

from incvec.cluster.queue import Queue
from incvec.config import RunConfig
from incvec.engine.sweep import base_group
from incvec.presets import changed_settings, resolve
from incvec.records import find_records, read_record, title
from incvec.study.figures.canvas import new_figure, style_axes
from incvec.study.paper import paper_tables, row_variant

ROOT = Path(__file__).parents[1]
INCREMENTS = (5, 10, 25)
SEEDS = (0, 1, 2)
GPUS = (1, 8, 64)
PER_GPU = (1, 8)


@dataclass(frozen=True)
class Work:
    """A run: seconds of its base task and of the rest, alone on a GPU."""

    config: RunConfig
    base: float
    rest: float


def table(records: Path) -> tuple[list[Work], list[str]]:
    """The runs of the paper's first table, and the rows whose seconds are those of the same row with 5 increments."""
    measured: dict[tuple[str, int], float] = {}
    bases: dict[str, float] = {}
    for path in find_records([records]):
        record = read_record(path)
        if record["dataset"] != "cifar100" or record["oracle"] or changed_host(record):
            continue
        key = (title(record), record["tasks"])
        base, *rest = record["task_seconds"]
        if len(rest) == record["tasks"]:
            measured[key] = min(measured.get(key, float("inf")), sum(rest))
        if not record["base"]:
            bases[record["method"]] = min(bases.get(record["method"], float("inf")), base)
    runs, substituted = [], []
    for row in paper_tables("scratch")["cifar100"]["rows"]:
        method, *addons = row.split(" + ")
        variant = row_variant("cifar100", row)
        for tasks in INCREMENTS:
            if (row, tasks) not in measured:
                substituted.append(f"{row}, {tasks} increments")
            rest = measured.get((row, tasks), measured[(row, INCREMENTS[0])])
            for seed in SEEDS:
                settings = {"method": method, "addons": addons, "dataset": "cifar100", "variant": variant}
                runs.append(Work(resolve({**settings, "tasks": tasks, "seed": seed}), bases[method], rest))
    return runs, substituted


def changed_host(record: dict[str, Any]) -> bool:
    """Whether a record has other settings than its preset. Those of add-ons hardly change its time."""
    changed = {key.partition(".")[0] for key in changed_settings(record["config"])}
    return not changed <= {*record["addons"], "variant", "seed"}


def speedup(runs: int, of_eight: float) -> float:
    """Throughput of several runs on one GPU, in those of one run alone."""
    return 1 + (of_eight - 1) * (min(runs, 8) - 1) / 7


def simulate(runs: Sequence[Work], gpus: int, per_gpu: int, of_eight: float) -> dict[str, float]:
    """Makespan in seconds, and what the GPUs do meanwhile: train, wait for base tasks, or have nothing left to do."""
    groups = [base_group(run.config) for run in runs]
    queue = Queue(groups)
    for gpu in range(gpus):
        queue.join(str(gpu), str(gpu))
    left: dict[int, float] = {}
    base_left: dict[int, float] = {}
    now = busy = waiting = 0.0
    while not queue.done:
        for gpu in range(gpus):
            while len(queue.places[str(gpu)].jobs) < per_gpu and (run := queue.take(str(gpu), now)) is not None:
                base_left[run] = 0.0 if groups[run] in queue.ready else runs[run].base
                left[run] = base_left[run] + runs[run].rest
        places = [place for place in queue.places.values() if place.jobs]
        rates = {run: speedup(len(place.jobs), of_eight) / len(place.jobs) for place in places for run in place.jobs}
        step = min((base_left[run] or left[run]) / rate for run, rate in rates.items())  # to the next base or end
        now += step
        busy += step * len(places)
        waiting += step * min(gpus - len(places), sum(job.state == "waiting" for job in queue.jobs))
        for run, rate in rates.items():
            left[run] -= rate * step
            if base_left[run]:
                base_left[run] -= rate * step
                if base_left[run] < 1e-6:
                    base_left[run] = 0.0
                    queue.base_ready(run)
            if left[run] < 1e-6:
                queue.finished(run)
    return {"makespan": now, "busy": busy / (now * gpus), "waiting": waiting / (now * gpus)}


def measured_speedup(path: Path) -> float:
    """Images per second of eight runs on one GPU, in those of one run: increments, without add-ons."""
    rows = [row for row in json.loads(path.read_text())["rows"] if "part" not in row and row["engine"] == "graph"]
    rate = {row["runs"]: row["images_per_second"] for row in rows if row["stage"] == "increment" and not row["addons"]}
    return float(rate[8] / rate[1])


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure = new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    for per_gpu, color, marker in zip(PER_GPU, ("#D55E00", "#0072B2"), ("s", "o"), strict=True):
        own = [row for row in rows if row["per_gpu"] == per_gpu]
        gpus = [row["gpus"] for row in own]
        label = f"{per_gpu} run{'s' * (per_gpu > 1)} per GPU"
        left.plot(gpus, [row["hours"] for row in own], color=color, marker=marker, label=label)
        ideal = [own[0]["hours"] / count for count in gpus]
        left.plot(gpus, ideal, color=color, linestyle=":", linewidth=1)
        right.plot(gpus, [100 * row["waiting"] for row in own], color=color, marker=marker, label=label)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPUS, [str(count) for count in GPUS])
    left.set_yscale("log")
    style_axes(left, "Time for the table; dotted: ideal", "GPUs", "hours")
    style_axes(right, "Lost while runs wait for base tasks", "GPUs", "% of the GPUs' time")
    left.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=ROOT / "results/cifar100")
    parser.add_argument("--throughput", type=Path, default=ROOT / "results/benchmarks/throughput.json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    of_eight = measured_speedup(options.throughput)
    runs, substituted = table(options.records)
    groups = {base_group(run.config) for run in runs}
    report = Report(options.json, "cluster_simulation.py", arguments)
    report.put(runs=len(runs), bases=len(groups), speedup_of_eight=round(of_eight, 3), substituted=substituted)
    report.put(longest_run_hours=round(max(run.base + run.rest for run in runs) / 3600, 3))
    for per_gpu in PER_GPU:
        for gpus in GPUS:
            result = simulate(runs, gpus, per_gpu, of_eight)
            report.add(
                {
                    "gpus": gpus,
                    "per_gpu": per_gpu,
                    "hours": round(result["makespan"] / 3600, 3),
                    "busy": round(result["busy"], 4),
                    "waiting": round(result["waiting"], 4),
                    "nothing_left": round(1 - result["busy"] - result["waiting"], 4),
                }
            )
    if options.figure is not None:
        draw(report.rows, options.figure)


if __name__ == "__main__":
    main()
