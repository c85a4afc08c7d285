"""Whether the fast engine is as accurate: captured bf16 against eager float32, same seeds, a shortened schedule.

    python benchmarks/engine_accuracy.py --data-root ~/data --json results/benchmarks/engine-accuracy.json
    python benchmarks/engine_accuracy.py --small              # digits on a CPU: bf16 against float32, both eager

PODNet on CIFAR-100, 50 base classes, 2 increments of 25; cosine schedules of 16 and 10 epochs. The mean AA should
differ by at most half a point. An eager run keeps one CPU core busy, so each gets its own process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Report, Row, one_thread

from incvec.config import RunConfig
from incvec.data import load_dataset
from incvec.engine import events as ev
from incvec.engine.run import Run, finish
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.presets import resolve

BAR = 0.5  # points of AA
LARGE: dict[str, Any] = {
    "dataset": "cifar100", "base_classes": 50, "tasks": 2,
    "podnet": {"base_epochs": 16, "epochs": 10, "balance_epochs": 3},
}  # fmt: skip
SMALL: dict[str, Any] = {
    "dataset": "digits", "base_classes": 5, "tasks": 1, "device": "cpu", "podnet": {"epochs": 2, "balance_epochs": 1}
}  # fmt: skip


def row_of(record: dict[str, Any]) -> Row:
    return {
        "engine": record["engine"]["kind"],
        "precision": record["engine"]["precision"],
        "seed": record["seed"],
        "metrics": {name: record["metrics"][name] for name in ("AA", "LA", "FM")},
        "seconds": round(record["seconds"], 1),
        "notices": record["engine"]["notices"],
    }


def in_one_process(configs: Sequence[RunConfig], data_root: Path | None) -> Iterator[Row]:
    """All runs at once in this process, as in a sweep."""
    data = load_dataset(configs[0].dataset, data_root)
    with tempfile.TemporaryDirectory() as folder:
        runs = [partial(Run, config, data, Path(folder) / str(number)) for number, config in enumerate(configs)]
        for _, event in run_concurrently(runs, len(runs)):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, ev.Finished):
                yield row_of(event.record)


def run_one(config: RunConfig, data_root: Path | None) -> Row:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return row_of(finish(Run(config, load_dataset(config.dataset, data_root), Path(folder))))


def in_separate_processes(configs: Sequence[RunConfig], data_root: Path | None) -> Iterator[Row]:
    """Each run in its own process."""
    with ProcessPoolExecutor(len(configs), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(run_one, data_root=data_root), configs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="digits, on a CPU")
    parser.add_argument("--data-root", type=Path, default=os.environ.get("INCVEC_DATA"), help="folder of CIFAR-100")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not options.small and options.data_root is None:
        parser.error("--data-root is needed: the folder with CIFAR-100's files")
    fast = "graph" if torch.cuda.is_available() and not options.small else "eager"
    given = SMALL if options.small else LARGE
    report = Report(
        options.json, "engine_accuracy.py", arguments, settings=given, bar=BAR, tf32=torch.backends.cudnn.allow_tf32
    )
    means: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for name, engine, precision in (("fast", fast, "bf16"), ("exact", "eager", "fp32")):
        began = time.perf_counter()
        kind = {"method": "podnet", "engine": engine, "precision": precision}
        configs = [resolve({**kind, **given, "seed": seed}) for seed in range(options.seeds)]
        execute = in_separate_processes if name == "exact" and not options.small else in_one_process
        by_seed: dict[int, float] = {}
        with one_thread(options.small):
            for row in execute(configs, options.data_root):
                report.add(row)
                by_seed[row["seed"]] = row["metrics"]["AA"]
        means[name] = [by_seed[seed] for seed in sorted(by_seed)]
        seconds[name] = round(time.perf_counter() - began, 1)
    differences = [a - b for a, b in zip(means["fast"], means["exact"], strict=True)]
    difference = statistics.mean(differences)
    report.put(
        mean_AA={name: round(statistics.mean(values), 3) for name, values in means.items()},
        difference=round(difference, 3),
        deviation_of_pairs=round(statistics.stdev(differences), 3) if len(differences) > 1 else None,
        within_bar=abs(difference) <= BAR,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
