"""Accuracy and loss along the line from a run's model after task i to its model after task t, for several runs.

    theta(x) = theta_i + x (theta_t - theta_i),    lambda = x |theta_t - theta_i|

Tasks are counted from 0 here. The line begins at the oracle's theta_i where an oracle is given, as the paper has it,
or at each run's own. The rows of classes that theta_i does not know yet have the values they start with in the run
(drawn from its seed, before any imprinting). A line's barrier is that of `incvec.study.geometry.barrier`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from incvec.data import Dataset
from incvec.errors import ConfigError, DataError
from incvec.records import commit
from incvec.study.geometry.paths import barrier, positions
from incvec.study.geometry.points import Points, Scores, Statistics, Way
from incvec.study.geometry.snapshots import (
    check_same,
    check_seeds,
    command,
    distance,
    kept,
    last_task,
    run_config,
    snapshot_model,
)
from incvec.study.style import label

FORMAT = 1
Start = Literal["oracle", "own"]
LOSS = "mean cross-entropy of the logits over all classes of the end's task (PODNet's and MRFA's with their scale)"
BARRIER = (
    "max over the points x of (1-x) y(0) + x y(1) - y(x) for an accuracy, of y(x) - (1-x) y(0) - x y(1) for a loss; "
    "0 where the curve stays on the better side"
)
Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Setting:
    """How lines are walked and points evaluated."""

    points: int = 51
    images: int | None = None  # test images of each task; all unless given
    batchnorm: Statistics = "interpolate"
    start: Start = "oracle"
    way: Way = "auto"
    device: str | None = None

    def account(self) -> dict[str, Any]:
        """For the JSON beside a figure."""
        return {
            "points": self.points,
            "images_per_task": self.images,
            "batchnorm": self.batchnorm,
            "loss_is": LOSS,
            "barrier_is": BARRIER,
            "commit": commit(),
            "torch": torch.__version__,
        }


def walk(
    runs: Sequence[Path],
    oracle: Path | None,
    dataset: Dataset,
    task_from: int,
    task_to: int | None,
    setting: Setting,
    told: Told | None = None,
) -> dict[str, Any]:
    """The lines of all runs and of the oracle as plain data: see `line` for a curve's entries."""
    everyone = checked(runs, oracle)
    end = last_task(everyone[0]) if task_to is None else task_to
    if not 0 <= task_from < end:
        raise ConfigError(f"there is no line from task {task_from + 1} to task {end + 1}: the first must be earlier.")
    began = time.monotonic()
    shared = oracle if setting.start == "oracle" else None
    if shared is not None:
        check_seeds(everyone, "Choose --start own, or runs of one seed. ")
    curves = [
        line(run, shared or run, dataset, task_from, end, setting, told, name)
        for run, name in zip(everyone, names_of(everyone), strict=True)
    ]
    return {
        "format": FORMAT,
        "kind": "path",
        "dataset": dataset.name,
        "task_from": task_from,
        "task_to": end,
        "start": "oracle" if shared is not None else "own",
        **setting.account(),
        "seconds": round(time.monotonic() - began, 2),
        "curves": curves,
    }


def checked(runs: Sequence[Path], oracle: Path | None) -> list[Path]:
    """All runs, the oracle last, once they are known to share network, stream and data."""
    if not runs:
        raise ConfigError("no run was given: name the folder of one, such as runs/digits-podnet-3-s0.")
    first = run_config(runs[0])
    if oracle is not None:
        if not kept(oracle):
            raise DataError(
                f"there are no snapshots of an oracle in {oracle}: it was never trained. Run first:\n  "
                + command(first, oracle, oracle=True, addons=())
            )
        if not run_config(oracle).oracle:
            raise DataError(
                f"{oracle} is not an oracle: it was trained without the full past. Run first:\n  "
                + command(first, None, oracle=True, addons=())
            )
    everyone = [*runs, *([oracle] if oracle is not None and oracle not in runs else [])]
    for other in everyone[1:]:
        check_same(everyone[0], other)
    return everyone


def names_of(runs: Sequence[Path]) -> list[str]:
    """`PODNet + IVT`; with the seed where runs have several, with the folder where that does not tell them apart."""
    configs = [run_config(run) for run in runs]
    names = [label(config.method, config.addons, config.oracle) for config in configs]
    if len({config.seed for config in configs}) > 1:
        names = [f"{name}, seed {config.seed}" for name, config in zip(names, configs, strict=True)]
    return [f"{name} ({run.name})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]


def line(
    run: Path,
    start: Path,
    dataset: Dataset,
    task_from: int,
    task_to: int,
    setting: Setting,
    told: Told | None,
    name: str,
) -> dict[str, Any]:
    """One run's line: x, lambda, accuracy and loss by task and over old (up to i) and new tasks, barriers."""
    end = snapshot_model(run, task_to, dataset, device=setting.device)
    first = snapshot_model(start, task_from, dataset, grow_to=task_to, device=setting.device)
    a, b = first.state(), end.state()
    names = [name for name, _ in end.model.named_parameters()]
    points = Points(end, setting.images, way=setting.way, batchnorm=setting.batchnorm)
    xs = positions(setting.points)
    config = end.config
    hear = None if told is None else (lambda done: told(name, done, len(xs)))
    scores = points.evaluate([a, b], [(1 - x, x) for x in xs], hear)
    length = distance(a, b, names)
    shared = [n for n in names if f"model.{n}" in first.rooms["method"]]  # the older model's own
    return {
        "name": name,
        "method": config.method,
        "addons": list(config.addons),
        "oracle": config.oracle,
        "seed": config.seed,
        "run": run.name,
        "start_run": start.name,
        "device": str(end.parts.world.device),
        "precision": end.parts.precision,
        "evaluated": points.used,
        "x": xs,
        "length": length,
        "length_of_shared": distance(a, b, shared),
        "distance": [x * length for x in xs],
        "counts": points.counts,
        **groups(scores, points.sizes, task_from),
    }


def groups(scores: Scores, sizes: Sequence[int], task_from: int) -> dict[str, Any]:
    """Accuracy, loss and barriers: by task, over the tasks up to i (`old`) and over those after it (`new`)."""
    tasks = range(len(sizes))
    old = scores.pooled(sizes, [t for t in tasks if t <= task_from])
    new = scores.pooled(sizes, [t for t in tasks if t > task_from])
    found: dict[str, Any] = {}
    barriers: dict[str, Any] = {}
    for number, what in enumerate(("accuracy", "loss")):
        rows = scores[number]
        by_task = [[row[t] for row in rows] for t in tasks]
        found[what] = {"tasks": by_task, "old": old[number], "new": new[number]}
        falls = what == "accuracy"
        barriers[what] = {
            "tasks": [barrier(curve, falls) for curve in by_task],
            "old": barrier(old[number], falls),
            "new": barrier(new[number], falls),
        }
    return {**found, "barrier": barriers, "fit": fit(found["accuracy"]["old"], found["accuracy"]["new"])}


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float | None]:
    """Least squares of new-class accuracy y on old-class accuracy x: slope, intercept, and r squared."""
    n = len(x)
    mean_x, mean_y = sum(x) / n, sum(y) / n
    xx = sum((v - mean_x) ** 2 for v in x)
    yy = sum((v - mean_y) ** 2 for v in y)
    xy = sum((v - mean_x) * (w - mean_y) for v, w in zip(x, y, strict=True))
    if xx == 0:
        return {"slope": None, "intercept": None, "r2": None}
    slope = xy / xx
    return {"slope": slope, "intercept": mean_y - slope * mean_x, "r2": xy * xy / (xx * yy) if yy > 0 else None}
