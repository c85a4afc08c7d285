"""Straight lines between two states of a network, theta(x) = (1 - x) theta_a + x theta_b.

`path` evaluates any model along the line, and `barrier` measures what is lost on the way. `run_paths` does it for
snapshots of runs, from the model after task i to that after task t:

    theta(x) = theta_i + x (theta_t - theta_i),    lambda = x |theta_t - theta_i|

The path starts at the oracle's theta_i if an oracle is given, as in the paper, otherwise at the run's own. The rows of
classes that theta_i does not know have their initial values in the run (drawn from its seed, before imprinting).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from incvec.data import Dataset
from incvec.errors import ConfigError
from incvec.study.geometry.evaluation import EvaluationOptions, Progress, Scores, StateEvaluator
from incvec.study.geometry.snapshots import check_runs, describe_run, last_task, load_snapshot
from incvec.study.geometry.states import State, distance, interpolate, matching_copy, preserved

Value = TypeVar("Value")


def positions(points: int = 51) -> list[float]:
    """x at each point of a path: evenly spaced from 0 to 1."""
    if points < 2:
        raise ValueError(f"a path needs at least 2 points, its two ends; given {points}")
    return [step / (points - 1) for step in range(points)]


def path(
    model: nn.Module, state_a: State, state_b: State, evaluate: Callable[[nn.Module], Value], points: int = 51
) -> list[Value]:
    """Evaluate a model at `points` states on the straight line from `state_a` to `state_b`.

    Every floating-point tensor is interpolated, BatchNorm statistics included; integer buffers are those of the nearer
    end. The ends are the given states bit for bit. Weights, buffers and modes of the model are restored afterwards.

    Args:
        model: the network to evaluate.
        state_a: a state dict of the model, also its current one: it is copied first.
        state_b: the state dict at the other end.
        evaluate: returns a number, a mapping, anything; it may call `model.eval()`.
        points: evenly spaced, both ends included.

    Example:
        before = copy.deepcopy(model.state_dict())
        train(model)
        curve = path(model, before, model.state_dict(), test_accuracy)
        height = barrier(curve)
    """
    values = []
    with preserved(model) as live, torch.no_grad():
        a, b = matching_copy(state_a, live, "state_a"), matching_copy(state_b, live, "state_b")
        for x in positions(points):
            for name, tensor in live.items():
                tensor.copy_(interpolate(a[name], b[name], x))
            values.append(evaluate(model))
    return values


def barrier(curve: Sequence[float], falls: bool = True) -> float:
    """The largest deviation of a curve from the straight line between its ends, in the bad direction; at least 0.

        max over x of  (1 - x) y(0) + x y(1) - y(x)       for an accuracy (`falls`)
        max over x of  y(x) - (1 - x) y(0) - x y(1)       for a loss

    The points of `curve` are evenly spaced, as those of `path`.
    """
    sign = 1 if falls else -1
    rows = zip(positions(len(curve)), curve, strict=True)
    return max([0.0, *(sign * ((1 - x) * curve[0] + x * curve[-1] - y) for x, y in rows)])


def linear_fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float | None]:
    """Least squares of y on x: slope, intercept and r squared."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    xx = sum((v - mean_x) ** 2 for v in x)
    yy = sum((v - mean_y) ** 2 for v in y)
    xy = sum((v - mean_x) * (w - mean_y) for v, w in zip(x, y, strict=True))
    if xx == 0:
        return {"slope": None, "intercept": None, "r2": None}
    slope = xy / xx
    return {"slope": slope, "intercept": mean_y - slope * mean_x, "r2": xy * xy / (xx * yy) if yy > 0 else None}


def run_paths(
    runs: Sequence[Path],
    oracle: Path | None,
    dataset: Dataset,
    task_from: int,
    task_to: int | None,
    options: EvaluationOptions,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The data of the path figure: one curve per run, that of the oracle last. Tasks are counted from 0."""
    start = oracle if options.start == "oracle" else None
    everyone = check_runs(runs, oracle, one_seed=start is not None)
    last = last_task(everyone[0]) if task_to is None else task_to
    if not 0 <= task_from < last:
        raise ConfigError(f"there is no path from task {task_from + 1} to task {last + 1}: use a later end.")
    started = time.monotonic()
    xs = positions(options.points)

    def curve(run: Path, description: dict[str, Any]) -> dict[str, Any]:
        """x, lambda, and accuracy and loss by task and over old (up to i) and new tasks."""
        end = load_snapshot(run, last, dataset, device=options.device)
        first = load_snapshot(start or run, task_from, dataset, grow_to=last, device=options.device)
        a, b = first.state(), end.state()
        names = [name for name, _ in end.model.named_parameters()]
        shared = [name for name in names if f"model.{name}" in first.saved["method"]]
        evaluator = StateEvaluator(end, options.images, backend=options.backend, batchnorm=options.batchnorm)
        on_point = progress and partial(progress, description["name"])
        scores = evaluator.evaluate([a, b], [(1 - x, x) for x in xs], on_point)
        length = distance(a, b, names)
        return {
            **description,
            "start_run": (start or run).name,
            **evaluator.metadata(),
            "x": xs,
            "length": length,
            "length_of_shared": distance(a, b, shared),
            "distance": [x * length for x in xs],
            **curves_by_group(scores, evaluator.sizes, task_from),
        }

    curves = [curve(*pair) for pair in zip(everyone, distinct_names(everyone), strict=True)]
    return {
        "kind": "path",
        "dataset": dataset.name,
        "task_from": task_from,
        "task_to": last,
        "start": "own" if start is None else "oracle",
        **options.metadata(),
        "seconds": round(time.monotonic() - started, 2),
        "curves": curves,
    }


def distinct_names(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Descriptions of the runs, named with their seeds if these differ, with their folders if names repeat."""
    described = [describe_run(run) for run in runs]
    if len({each["seed"] for each in described}) > 1:
        described = [{**each, "name": f"{each['name']}, seed {each['seed']}"} for each in described]
    names = [each["name"] for each in described]
    repeated = {name for name in names if names.count(name) > 1}
    return [{**e, "name": f"{e['name']} ({e['run']})"} if e["name"] in repeated else e for e in described]


def curves_by_group(scores: Scores, sizes: Sequence[int], task_from: int) -> dict[str, Any]:
    """Accuracy, loss and barriers by task, over the tasks up to `task_from` (`old`) and over later ones (`new`)."""
    groups = {"old": range(task_from + 1), "new": range(task_from + 1, len(sizes))}
    pooled = {group: scores.pooled(sizes, tasks) for group, tasks in groups.items()}
    found: dict[str, Any] = {"barrier": {}}
    for place, metric in enumerate(("accuracy", "loss")):
        by_task = [list(column) for column in zip(*scores[place], strict=True)]
        curves = {group: values[place] for group, values in pooled.items()}
        heights = {group: barrier(values, metric == "accuracy") for group, values in curves.items()}
        found[metric] = {"tasks": by_task, **curves}
        found["barrier"][metric] = {"tasks": [barrier(curve, metric == "accuracy") for curve in by_task], **heights}
    return {**found, "fit": linear_fit(found["accuracy"]["old"], found["accuracy"]["new"])}
