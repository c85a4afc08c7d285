"""Sweeps on Ray with one and several workers, and with several runs per worker, beside the same sweep without Ray.

    python benchmarks/cluster_scaling.py --workers 1 2 --json results/benchmarks/cluster-scaling.json
    python benchmarks/cluster_scaling.py --sweep cifar100-podnet --only podnet-5- --seeds 0-7 --set stop_after=1 \\
        --data-root ~/data --workers 1 --per-gpu 1 4 8 --at-once 1 8 --seconds 15 --json cluster-h200.json

Each row is one sweep, in a process and a folder of its own. With --repeats the kinds of sweeps take turns. `load` is
the load average when the row began: other programs change the figures. Without GPUs each worker has one core. Ray's
workers have the same priority as the sweep without Ray here; Ray's default is a lower one.

Without --seconds a row is the whole sweep: wall time, the seconds until the first run began, and from there to the end
of the last run. `summary` has the medians of each kind; its efficiency is the speed of training relative to the first
number of workers, per worker.

With --seconds a row ends when as many runs as have room have trained together for that time. It measures their images
per second in the meantime, in the first stage of their base task. So compiling, captures and the start of processes do
not count; they are in `start_seconds`. Every run needs a base task of its own (several seeds), long enough for that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from measuring import Report, Row, pick_device
from throughput import Mark, rate

from incvec.cli import cluster
from incvec.cli.sweep import Plan, load_data, select_runs
from incvec.engine import events as ev
from incvec.engine.run import Run
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.engine.sweep import data_key
from incvec.engine.threads import single_thread_for_small_images

Events = Iterator[tuple[int, ev.Event]]
KIND = ("on", "at_once", "workers", "per_gpu")  # what distinguishes the rows
POLL_INTERVAL = 0.1  # seconds; workers report every half second


def local_events(planned: Plan, out: Path, data_root: Path | None, at_once: int) -> Events:
    device = pick_device()
    data = load_data(planned, data_root, device)
    with ExitStack() as threads:
        for dataset in data.values():
            threads.enter_context(single_thread_for_small_images(dataset))
        yield from run_concurrently(
            (partial(Run, config, data[data_key(config)], out / name, out / "bases") for name, config in planned),
            at_once,
        )


def ray_events(planned: Plan, out: Path, data_root: Path | None, workers: int, per_gpu: int) -> Events:
    options = cluster.Options(out, str(out), per_gpu=per_gpu, workers=workers, data_root=data_root)
    sweep, _ = cluster.start("benchmark", planned, None, options)
    import ray  # it reads its settings when it is imported

    from incvec.cluster import client

    client.POLL_INTERVAL = POLL_INTERVAL
    try:
        if torch.cuda.is_available() and not ray.cluster_resources().get("GPU"):
            raise SystemExit("Ray does not find the GPU of this machine")
        yield from sweep.events()
    finally:
        ray.shutdown()


def measure(events: Events, together: int, seconds: float | None, began: float) -> Row:
    """A row's figures: of the whole sweep, or until `together` runs have trained for some seconds."""
    first, last, finished = None, 0.0, 0
    stages: dict[int, ev.StageStarted] = {}  # the first one of each run
    marks: dict[int, list[Mark]] = {}
    epochs: dict[int, int] = {}
    for run, event in events:
        now = time.time()
        match event:
            case Failed():
                raise event.error
            case ev.Started():
                first = first or now
            case ev.StageStarted() if run not in stages and len(stages) < together:
                stages[run], epochs[run] = event, event.epoch
            case ev.EpochEnded() if run in stages and (event.task, event.stage) == (0, stages[run].stage):
                images = (event.epoch - epochs[run]) * stages[run].rows
                marks.setdefault(run, []).append((now, images))
                epochs[run] = event.epoch
            case ev.Finished():
                finished, last = finished + 1, now
        if seconds is not None and len(marks) == together:
            start, end = max(own[0][0] for own in marks.values()), min(own[-1][0] for own in marks.values())
            if end - start >= seconds:
                return {
                    "start_seconds": round(start - began, 2),
                    "together_seconds": round(end - start, 2),
                    "images_per_second": round(rate(list(marks.values())) or 0.0),
                }
    if seconds is not None:
        raise SystemExit(f"the runs did not train together for {seconds} seconds: give them more epochs")
    first = first or began
    return {"runs": finished, "start_seconds": round(first - began, 2), "training_seconds": round(last - first, 2)}


def train(planned: Plan, data_root: Path | None, kind: Row, seconds: float | None, began: float) -> Row:
    """One row, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if kind["on"] == "local":
            events, together = local_events(planned, out, data_root, kind["at_once"]), kind["at_once"]
        else:
            together = kind["workers"] * kind["per_gpu"]
            events = ray_events(planned, out, data_root, kind["workers"], kind["per_gpu"])
        with closing(cast(Any, events)):
            return measure(events, together, seconds, began)


def run_row(planned: Plan, data_root: Path | None, kind: Row, seconds: float | None) -> Row:
    load, began = os.getloadavg()[0], time.time()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        row = pool.submit(train, planned, data_root, kind, seconds, began).result()
    return {**row, "wall_seconds": round(time.time() - began, 2), "load": round(load, 2)}


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The medians of each kind of sweep, and the efficiency of several workers."""
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row.get(key) for key in KIND), []).append(row)
    result: list[Row] = []
    reference: dict[int, float] = {}
    for values, own in kinds.items():
        kind = {key: value for key, value in zip(KIND, values, strict=True) if value is not None}
        for name in ("images_per_second", "training_seconds"):
            if name in own[0]:
                kind[name] = round(median(row[name] for row in own), 2)
        if "workers" in kind and "training_seconds" in kind:
            per_worker = kind["training_seconds"] * kind["workers"]
            kind["efficiency"] = round(reference.setdefault(kind["per_gpu"], per_worker) / per_worker, 3)
        result.append(kind)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", default="digits", help="a packaged sweep or a file")
    parser.add_argument("--only", help="only runs whose name contains this text")
    parser.add_argument("--seeds", default="0-3", help="the default is twelve runs of `digits`")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1], help="concurrent runs without Ray")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--per-gpu", type=int, nargs="+", default=[1], help="concurrent runs of each worker")
    parser.add_argument("--seconds", type=float, help="measure images per second for this time")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    planned, _ = select_runs(options.sweep, options.set, options.only, options.seeds, options.data_root)
    report = Report(options.json, "cluster_scaling.py", arguments, runs=len(planned), cores=os.cpu_count())
    kinds: list[Row] = [{"on": "ray", "workers": w, "per_gpu": p} for p in options.per_gpu for w in options.workers]
    kinds += [{"on": "local", "at_once": count} for count in options.at_once]
    for _ in range(options.repeats):
        for kind in kinds:
            report.add(kind | run_row(planned, options.data_root, kind, options.seconds))
    report.put(summary=summarize(report.rows))


if __name__ == "__main__":
    main()
