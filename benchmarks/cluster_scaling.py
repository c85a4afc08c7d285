"""Sweeps on Ray with one and several workers, and with several runs per worker, beside the same sweep without Ray.

    python benchmarks/cluster_scaling.py --workers 1 2 --json results/benchmarks/cluster-scaling.json
    python benchmarks/cluster_scaling.py --sweep cifar100-podnet --data-root ~/data --workers 1 --per-gpu 1 4 8

Each row is one sweep, from the command to its end, in a folder of its own: wall time, and the seconds until the first
run began and from there to the last record. With --repeats the kinds of sweeps take turns. `summary` has the medians of
each kind; its efficiency is the speed of training relative to the first number of workers, per worker. Without GPUs
each worker has one core. `load` is the load average when the row began: other programs change the figures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Report

SMALL = ["digits", "--seeds", "0-3"]


def train(sweep: Sequence[str], more: Sequence[str]) -> dict[str, Any]:
    """Run `incvec sweep` in a fresh folder; returns its times."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs"
        command = [sys.executable, "-m", "incvec", "sweep", *sweep, "--out", str(out), *more]
        began, first = time.time(), None
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        )
        while process.poll() is None:
            if first is None and next(out.glob("*/.lock"), None) is not None:
                first = time.time()
            time.sleep(0.05)
        wall = time.time() - began
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
        ends = [path.stat().st_mtime for path in out.glob("*/record.json")]
        training = max(ends) - (first or began)
        return {
            "runs": len(ends),
            "wall_seconds": round(wall, 2),
            "start_seconds": round((first or began) - began, 2),
            "training_seconds": round(training, 2),
            "load": round(load, 2),
        }


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians of each kind of sweep, and the efficiency of those on Ray."""
    kinds: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = (row["on"], row.get("per_gpu"), row.get("workers"))
        kinds.setdefault(key, []).append(row["training_seconds"])
    result: list[dict[str, Any]] = []
    reference: dict[int, float] = {}
    for (on, per_gpu, workers), seconds in kinds.items():
        kind = {"on": on, "per_gpu": per_gpu, "workers": workers, "training_seconds": round(median(seconds), 2)}
        if on == "ray":
            per_worker = median(seconds) * workers
            kind["efficiency"] = round(reference.setdefault(per_gpu, per_worker) / per_worker, 3)
        result.append(kind)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", help="by default `digits` with four seeds: twelve runs")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--per-gpu", type=int, nargs="+", default=[1])
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="very short runs, to try the program")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sweep = list(SMALL) if options.sweep is None else [options.sweep]
    settings = ["podnet.net=tiny", "podnet.epochs=2", "podnet.balance_epochs=1"] if options.small else []
    sweep += [word for setting in (*settings, *options.set) for word in ("--set", setting)]
    if options.data_root is not None:
        sweep += ["--data-root", str(options.data_root)]
    report = Report(options.json, "cluster_scaling.py", arguments, sweep=" ".join(sweep), cores=os.cpu_count())
    for _ in range(options.repeats):
        report.add({"on": "local", **train(sweep, [])})
        for per_gpu in options.per_gpu:
            for workers in options.workers:
                given = ["--on", "ray", "--workers", str(workers), "--per-gpu", str(per_gpu)]
                report.add({"on": "ray", "workers": workers, "per_gpu": per_gpu, **train(sweep, given)})
    report.put(summary=summarize(report.rows))


if __name__ == "__main__":
    main()
