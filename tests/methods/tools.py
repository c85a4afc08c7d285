"""Helpers of the methods' tests: short runs, batches for a loss, and losses restated as plain loops."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from incvec.contracts import Batch, Method
from incvec.data import Dataset, load_dataset
from incvec.engine import events as ev
from incvec.engine.run import Run, finish
from incvec.presets import resolve
from tests.addons.tools import run_on
from tests.conftest import make_run, quick

Kind = TypeVar("Kind", bound=Method)
Rows = list[list[float]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal draws in float64."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def finished(data: Dataset, out: Path, method: str, *addons: str, **options: Any) -> Run:
    """A very short run of three tasks, finished; options are those of the method."""
    return run_on(data, out, method, *addons, **{method: options})


def method_of(run: Run, kind: type[Kind]) -> Kind:
    method = run.parts.method
    assert isinstance(method, kind)
    return method


def trained(kind: type[Kind], data: Dataset, out: Path, *addons: str, **options: Any) -> Kind:
    """A method after a very short run of three tasks."""
    return method_of(finished(data, out, kind.name, *addons, **options), kind)


def run_until(run: Run, kind: type[Kind], done: Callable[[ev.Event], bool]) -> Kind:
    """The method of a run that is stopped at an event."""
    for event in run.events():
        if done(event):
            break
    return method_of(run, kind)


def in_task(kind: type[Kind], data: Dataset, out: Path, task: int = 1, **given: Any) -> Kind:
    """A method after the first epoch of a task (by default the second task)."""
    run = make_run(data, out, quick(kind.name, **given))
    return run_until(run, kind, lambda event: isinstance(event, ev.EpochEnded) and event.task == task)


def after_task(kind: type[Kind], data: Dataset, out: Path, task: int, **given: Any) -> Kind:
    """A method after the end of a task; called again with the same folder, the run is resumed."""
    run = make_run(data, out, quick(kind.name, **given))
    return run_until(run, kind, lambda event: run.position[0] == task + 1)


@cache
def final_record(method: str, *addons: str, oracle: bool = False) -> dict[str, Any]:
    """Record of a short run on all digits, in tasks of 4, 3 and 3; training continues after the last teleport."""
    given: dict[str, Any] = {"method": method, "addons": list(addons), "base_classes": 4, "tasks": 2, "oracle": oracle}
    given[method] = {"epochs": 10, "milestones": [7]}
    if "ivt" in addons:
        given["ivt"] = {"interval": 4}
    with tempfile.TemporaryDirectory() as folder:
        return finish(Run(resolve(given), load_dataset("digits"), Path(folder)))


def old_accuracy(record: dict[str, Any]) -> float:
    """Final accuracy in percent on the classes of all tasks but the last."""
    counts = record["test_counts"][:-1]
    last = record["accuracy"][-1]
    return sum(a * n for a, n in zip(last, counts, strict=False)) / sum(counts)


def some_batch(method: Method, count: int = 24) -> Batch:
    """Images of all classes."""
    rows = torch.arange(0, len(method.world.train.labels), len(method.world.train.labels) // count)
    return method.world.train.fetch(rows, None, ("test",))


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def cross_entropy(rows: Rows, labels: list[int]) -> float:
    """Mean of -log softmax(z)_y."""
    return -sum(math.log(softmax(row)[y]) for row, y in zip(rows, labels, strict=True)) / len(rows)


def kl_divergence(new: Rows, old: Rows, temperature: float) -> float:
    """Mean over the samples of sum_c q_c (log q_c - log p_c), with q from the old and p from the new logits."""
    total = 0.0
    for new_row, old_row in zip(new, old, strict=True):
        p, q = softmax(new_row[: len(old_row)], temperature), softmax(old_row, temperature)
        total += sum(b * (math.log(b) - math.log(a)) for a, b in zip(p, q, strict=True))
    return total / len(new)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
