"""The plane through three states: theta(a, b) = origin + a u + b v, with u and v orthonormal by Gram-Schmidt.

    u = (first - origin) / |first - origin|
    v = w / |w|,    w = (second - origin) - <second - origin, u> u

The origin is at (0, 0) and the first state at (|first - origin|, 0). Any other state can be projected. Coordinates are
over parameters only; buffers (BatchNorm statistics) are weighted sums like the parameters.

`plane` evaluates any model on such a grid. `run_plane` does it for runs, as in the paper: the origin is theta_{t-1}, u
points to the model with the add-on, v is the component of theta_t orthogonal to it, and the oracle is projected. At the
second task all runs of one seed start at the same theta_1. For a later task, runs with `--set start=FILE` do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from incvec.data import Dataset
from incvec.errors import ConfigError, DataError
from incvec.study.geometry.evaluation import EvaluationOptions, Progress, StateEvaluator
from incvec.study.geometry.paths import Value
from incvec.study.geometry.snapshots import check_runs, describe_run, load_snapshot, require_run, run_config
from incvec.study.geometry.states import State, difference, distance, matching_copy, preserved, weighted_sum


@dataclass(frozen=True)
class Plane:
    """Coordinates (a, b) in units of distance, and the weights of (origin, first, second) there."""

    origin: State
    first: State
    second: State
    names: tuple[str, ...]  # of the parameters
    length: float  # |first - origin|
    along: float  # <second - origin, u>
    height: float  # |w|

    @classmethod
    def through(cls, origin: State, first: State, second: State, names: Iterable[str]) -> Plane:
        """The plane through three states that are not on one line."""
        parameters = tuple(names)
        one, two = (difference(origin, state, parameters) for state in (first, second))
        length = float(one.norm())
        if length == 0:
            raise ValueError("a plane needs three different states: the first is equal to the origin")
        along = float(one @ two) / length
        height = float((two - (along / length) * one).norm())
        if height <= 1e-7 * max(length, float(two.norm())):
            raise ValueError("a plane needs three states that are not on one line")
        return cls(origin, first, second, parameters, length, along, height)

    def weights(self, a: float, b: float) -> tuple[float, float, float]:
        """Weights of origin, first and second at (a, b); their sum is 1."""
        q = b / self.height
        p = (a - q * self.along) / self.length
        return 1 - p - q, p, q

    def project(self, state: State) -> tuple[float, float, float]:
        """Coordinates of any state, and its distance from the plane."""
        one, two, other = (difference(self.origin, s, self.names) for s in (self.first, self.second, state))
        u = one / self.length
        v = (two - self.along * u) / self.height
        a, b = float(other @ u), float(other @ v)
        return a, b, float((other - a * u - b * v).norm())

    @property
    def corners(self) -> tuple[tuple[float, float], ...]:
        """Coordinates of origin, first and second."""
        return (0.0, 0.0), (self.length, 0.0), (self.along, self.height)


def grid_around(points: Sequence[tuple[float, float]], size: int, margin: float) -> tuple[list[float], list[float]]:
    """`size` values of a and of b around all points, with a margin as a fraction of the larger extent."""
    extents = [(min(axis), max(axis)) for axis in zip(*points, strict=True)]
    room = margin * max(high - low for low, high in extents)
    ranges = [(low - room, high + room) for low, high in extents]
    columns, rows = ([low + (high - low) * k / (size - 1) for k in range(size)] for low, high in ranges)
    return columns, rows


def plane(
    model: nn.Module,
    origin: State,
    first: State,
    second: State,
    evaluate: Callable[[nn.Module], Value],
    size: int = 41,
    margin: float = 0.25,
) -> tuple[list[float], list[float], list[list[Value]]]:
    """Evaluate a model on a grid around three states: returns the a's, the b's, and one row of values per b.

    As in `path`, states are copied first and the model is restored afterwards.
    """
    values: list[list[Value]] = []
    with preserved(model) as live, torch.no_grad():
        given = {"origin": origin, "first": first, "second": second}
        states = [matching_copy(state, live, title) for title, state in given.items()]
        parameters = [name for name, _ in model.named_parameters()]
        through = Plane.through(states[0], states[1], states[2], parameters)
        columns, rows = grid_around(through.corners, size, margin)
        for b in rows:
            values.append([])
            for a in columns:
                for name, tensor in live.items():
                    tensors = [state[name] for state in states]
                    tensor.copy_(weighted_sum(tensors, through.weights(a, b), name not in parameters))
                values[-1].append(evaluate(model))
    return columns, rows, values


def run_plane(
    run: Path,
    addon_run: Path,
    oracle: Path | None,
    dataset: Dataset,
    task: int,
    size: int,
    options: EvaluationOptions,
    margin: float = 0.25,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The data of the plane figure: the grid and the models on it. `task` is counted from 0."""
    if task < 1:
        raise ConfigError(f"a plane of task {task + 1} is not possible: it starts at the task before; use 2 or more.")
    if size < 2:
        raise ConfigError(f"a grid of {size} by {size} points is not possible: use 2 or more.")
    check_addon(run, addon_run)
    everyone = check_runs([run, addon_run], oracle, one_seed=True)
    started = time.monotonic()

    def state_before(each: Path) -> State:
        return load_snapshot(each, task - 1, dataset, grow_to=task, device=options.device).state()

    origin_run = oracle if oracle is not None and options.start == "oracle" else run
    snapshot = load_snapshot(run, task, dataset, device=options.device)
    others = [load_snapshot(each, task, dataset, device=options.device).state() for each in everyone[1:]]
    states = [state_before(origin_run), others[0], snapshot.state(), *others[1:]]
    names = [name for name, _ in snapshot.model.named_parameters()]
    starts = [{**describe_run(r), "to_origin": distance(states[0], state_before(r), names)} for r in everyone]
    try:
        through = Plane.through(states[0], states[1], states[2], names)
    except ValueError as error:
        raise DataError(f"{run} and {addon_run} do not span a plane after task {task + 1}: {error}.") from None
    roles = {"origin": origin_run, "first": addon_run, "second": run} | ({"oracle": oracle} if oracle else {})
    places = [(*corner, 0.0) for corner in through.corners] + [through.project(state) for state in states[3:]]
    columns, rows = grid_around([(a, b) for a, b, _ in places], size, margin)
    weights = [(*through.weights(a, b), *[0.0] * (len(states) - 3)) for b in rows for a in columns]
    ends = [tuple(float(k == i) for k in range(len(states))) for i in range(len(states))]
    evaluator = StateEvaluator(snapshot, options.images, backend=options.backend, batchnorm=options.batchnorm)
    scores = evaluator.evaluate(states, [*ends, *weights], progress and partial(progress, "plane"))
    accuracy, loss = scores.pooled(evaluator.sizes, range(len(evaluator.sizes)))
    marks = []
    for k, ((role, each), (a, b, off_plane)) in enumerate(zip(roles.items(), places, strict=True)):
        mark = {"role": role, **describe_run(each), "a": a, "b": b, "off_plane": off_plane}
        mark |= {"accuracy": accuracy[k], "loss": loss[k], "to_origin": distance(states[0], states[k], names)}
        marks.append(mark | ({"to_oracle": distance(states[3], states[k], names)} if oracle else {}))

    def grid(values: list[float]) -> list[list[float]]:
        return [values[k : k + size] for k in range(len(ends), len(values), size)]

    return {
        "kind": "plane",
        "dataset": dataset.name,
        "task": task,
        "start_run": origin_run.name,
        "starts": starts,  # distance 0: the run started the task at the origin
        **options.metadata(),
        **evaluator.metadata(),
        "seconds": round(time.monotonic() - started, 2),
        "a": columns,
        "b": rows,
        "loss": grid(loss),
        "accuracy": grid(accuracy),
        "marks": marks,
    }


def check_addon(run: Path, addon_run: Path) -> None:
    """Refuse a second run that does not exist, or that has the add-ons of the first."""
    config = run_config(run)
    problem = f"has the same add-ons as {run}: give the plain run, and one with an add-on"
    addons = (*(name for name in config.addons if name != "ivt"), "ivt")
    require_run(addon_run, config, lambda c: c.addons != config.addons, problem, addons=addons)
