"""What the tests of the plain methods share: finished runs, and batches to put into a loss."""

from __future__ import annotations

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from incvec.contracts import Batch, Method
from incvec.data import Dataset, load_dataset
from incvec.engine import events as ev
from incvec.engine.run import Run, finish
from incvec.presets import resolve
from tests.conftest import make_run, quick

Kind = TypeVar("Kind", bound=Method)
Rows = list[list[float]]


def finished(data: Dataset, out: Path, method: str, *addons: str, **options: Any) -> Run:
    """A very short run of three tasks, turned to its end; its method stands after the last task."""
    run = make_run(data, out, quick(method, *addons, **{method: options}))
    finish(run)
    return run


@cache
def ending(method: str, *addons: str, oracle: bool = False) -> dict[str, Any]:
    """The record of a short run on all ten digits, in tasks of 4, 3 and 3. IVT's last teleport is not the last word."""
    given: dict[str, Any] = {"method": method, "addons": list(addons), "base_classes": 4, "tasks": 2, "oracle": oracle}
    given[method] = {"epochs": 10, "milestones": [7]}
    if "ivt" in addons:
        given["ivt"] = {"interval": 4}
    with tempfile.TemporaryDirectory() as folder:
        return finish(Run(resolve(given), load_dataset("digits"), Path(folder)))


def in_task(kind: type[Kind], data: Dataset, out: Path, task: int = 1, **given: Any) -> Kind:
    """A method after the first epoch of a task (of the second one unless given)."""
    run = make_run(data, out, quick(kind.name, **given))
    for event in run.events():
        if isinstance(event, ev.EpochEnded) and event.task == task:
            break
    method = run.parts.method
    assert isinstance(method, kind)
    return method


def old_accuracy(record: dict[str, Any]) -> float:
    """Percent right on the classes of all tasks but the last, at the end."""
    counts = record["test_counts"][:-1]
    last = record["accuracy"][-1]
    return sum(a * n for a, n in zip(last, counts, strict=False)) / sum(counts)


def some_batch(method: Method, count: int = 24) -> Batch:
    """Images of all classes, those of every task mixed."""
    rows = torch.arange(0, len(method.world.train.labels), len(method.world.train.labels) // count)
    return method.world.train.fetch(rows, None, ("test",))


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def cross_entropy(rows: Rows, labels: list[int]) -> float:
    """Mean of -log softmax(z)_y, by plain loops."""
    return -sum(math.log(softmax(row)[y]) for row, y in zip(rows, labels, strict=True)) / len(rows)


def soft_divergence(new: Rows, old: Rows, temperature: float) -> float:
    """Mean over the samples of sum_c q_c (log q_c - log p_c), q from the old logits, p from as many of the new."""
    total = 0.0
    for fresh, past in zip(new, old, strict=True):
        p, q = softmax(fresh[: len(past)], temperature), softmax(past, temperature)
        total += sum(b * (math.log(b) - math.log(a)) for a, b in zip(p, q, strict=True))
    return total / len(new)
