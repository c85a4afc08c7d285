"""IVT's Fisher of a run, and how well its quadratic model predicts forgetting.

By layer group and task: F_t relative to Fbar_{t-1}, and the mean of S. Along the line from theta_{t-1} to theta_t, the
predicted and the measured forgetting:

    predicted(x) = x^2 / 2 * d' H d,    d = theta_t - theta_{t-1},    H = Fbar_{t-1} = F_1 + ... + F_{t-1}
    measured(x)  = sum over the old tasks i of  L_i(theta_{t-1} + x d) - L_i(theta_{t-1})

F is the mean square of batch gradients, as in the paper. A batch gradient is a mean over B images. If the gradients of
single images scatter around zero, F is 1/B of the Fisher information: S does not depend on this factor, the prediction
does. So both are given, H = F and H = B F. L_i is the mean cross-entropy on the test images of task i among the classes
known at t - 1; d and H are over the parameters that existed at t - 1.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.data import Dataset
from incvec.errors import DataError
from incvec.ivt.transform import block_scale, scale
from incvec.study.geometry.evaluation import EvaluationOptions, Progress, StateEvaluator
from incvec.study.geometry.paths import positions
from incvec.study.geometry.snapshots import (
    Snapshot,
    describe_run,
    first_task,
    last_task,
    load_snapshot,
    require_ivt,
    run_config,
)
from incvec.study.geometry.states import State, distance
from incvec.study.runs import run_command

CUMULATIVE = "ivt/cumulative/"


def run_curvature(
    run: Path, dataset: Dataset, options: EvaluationOptions, progress: Progress | None = None
) -> dict[str, Any]:
    """The data of the curvature figure: all tasks of one run with IVT, counted from 0."""
    config = run_config(run)
    require_ivt(run, config)
    first, last = first_task(run), last_task(run)
    if last == first:
        command = run_command(config.resolved(), run)
        raise DataError(f"{run} has one snapshot only; two or more are needed. Finish it first:\n  {command}")
    started = time.monotonic()
    before = load_snapshot(run, first, dataset, device=options.device)
    tasks = []
    for task in range(first + 1, last + 1):
        after = load_snapshot(run, task, dataset, device=options.device)
        past = cumulative_fisher(before)
        start = load_snapshot(run, task - 1, dataset, grow_to=task, device=options.device).state()
        groups = by_layer_group(past, cumulative_fisher(after), start, after.state())
        tasks.append({"task": task, "parts": groups, **forgetting(after, start, past, task, options, progress)})
        before = after
    return {
        "kind": "curvature",
        "dataset": dataset.name,
        **describe_run(run),
        "structure": config.sections["ivt"]["structure"],
        "batch_size": config.sections[config.method].get("batch_size"),
        **options.metadata(),
        "seconds": round(time.monotonic() - started, 2),
        "tasks": tasks,
    }


def cumulative_fisher(snapshot: Snapshot) -> dict[str, Tensor]:
    """Fbar by parameter, as the add-on had it after the task."""
    saved, device = snapshot.saved.get("addon", {}), snapshot.parts.world.device
    factor = 2.0 ** -int(saved.get("ivt/exponent", 0))  # earlier versions stored F as it is
    fisher = {n.removeprefix(CUMULATIVE): t.to(device) * factor for n, t in saved.items() if n.startswith(CUMULATIVE)}
    if not fisher:
        raise DataError("the snapshots of the run have no Fisher; train it with --set ivt.snapshot_fisher=true.")
    return fisher


def is_block(fisher: Tensor, parameter: Tensor) -> bool:
    """Whether a Fisher has one matrix per kernel rather than one number per parameter."""
    return fisher.shape != parameter.shape


def quadratic_form(fisher: Tensor, d: Tensor) -> float:
    """d' F d for a diagonal F or for kernel blocks, in float64."""
    if not is_block(fisher, d):
        return float((fisher.double() * d.double().square()).sum())
    flat = d.double().reshape(*fisher.shape[:-2], fisher.shape[-1])
    return float(torch.einsum("...i,...ij,...j->", flat, fisher.double(), flat))


def by_layer_group(past: State, now: State, start: State, end: State) -> dict[str, dict[str, float | None]]:
    """F_t / Fbar_{t-1}, mean S and distance traveled, for each layer group and for all.

    Weights without F_t, because IVT did not see them trained in this task (PODNet's older proxies), are left out: S is
    not applied to them.
    """
    rows: dict[str, list[tuple[float, ...]]] = {}
    for name, old in past.items():
        new = now[name] - old
        if not new.any():
            continue
        d = end[name].double() - start[name].double()
        diagonals = [new, old, block_scale(old, new) if is_block(old, d) else scale(old, new)]
        if is_block(old, d):
            diagonals = [each.diagonal(dim1=-2, dim2=-1) for each in diagonals]
        sums = [float(each.double().sum()) for each in diagonals]
        for group in ("all", layer_group(name)):
            rows.setdefault(group, []).append((*sums, float(diagonals[2].numel()), float(d.square().sum())))
    groups: dict[str, dict[str, float | None]] = {}
    for group, members in rows.items():
        new_sum, old_sum, s_sum, count, squares = (sum(column) for column in zip(*members, strict=True))
        ratio = new_sum / old_sum if old_sum > 0 else None
        groups[group] = {"fisher_ratio": ratio, "scale": s_sum / count, "distance": squares**0.5}
    return groups


def layer_group(name: str) -> str:
    """`backbone.stages.1.blocks.0.conv1.weight` -> `stages.1`."""
    words = name.removeprefix("backbone.").split(".")
    return ".".join(words[:2]) if words[0] in ("stages", "blocks") else words[0]


def forgetting(
    after: Snapshot, start: State, past: State, task: int, options: EvaluationOptions, progress: Progress | None
) -> dict[str, Any]:
    """Predicted and measured change of the loss on the old tasks along the line to `task`."""
    end = after.state()
    names = [name for name in past if name in end]
    half = sum(quadratic_form(past[name], end[name] - start[name]) for name in names) / 2
    n_old = after.parts.tasks[task].n_old
    evaluator = StateEvaluator(after, options.images, range(task), n_old, options.backend, options.batchnorm)
    xs = positions(options.points)
    on_point = progress and partial(progress, f"task {task + 1}")
    scores = evaluator.evaluate([start, end], [(1 - x, x) for x in xs], on_point)
    losses = [sum(row) for row in scores.loss]
    batch_size = after.config.sections[after.config.method].get("batch_size")
    return {
        "x": xs,
        "length": distance(start, end, names),
        "measured": [loss - losses[0] for loss in losses],
        "predicted": [x * x * half for x in xs],
        "predicted_per_sample": None if batch_size is None else [x * x * half * batch_size for x in xs],
        **evaluator.metadata(),
    }
