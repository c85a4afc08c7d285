"""The task stream: the order in which classes arrive, and how they are divided into tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from incvec.contracts import Task
from incvec.errors import ConfigError

if TYPE_CHECKING:
    from incvec.config import RunConfig


def class_order(n_classes: int, seed: int | None = None, order: Sequence[int] | None = None) -> list[int]:
    """The classes in order of arrival: `order` if given, else shuffled by `seed`, else 0, 1, 2, ...

    A seed draws numpy's legacy permutation, as in LUCIR and PyCIL; 1993 gives their order.
    """
    if order is not None:
        return _permutation(n_classes, order)
    if seed is None:
        return list(range(n_classes))
    if not 0 <= seed < 2**32:
        raise ConfigError(f"the order seed is {seed}: expected 0 to {2**32 - 1}")
    shuffled: list[int] = np.random.RandomState(seed).permutation(n_classes).tolist()
    return shuffled


def _permutation(n_classes: int, order: Sequence[int]) -> list[int]:
    classes = [int(c) for c in order]
    problems = []
    if unknown := sorted({c for c in classes if not 0 <= c < n_classes}):
        problems.append(f"it has {_shorten(unknown)}, which do not exist")
    if repeated := sorted(c for c, times in Counter(classes).items() if times > 1):
        problems.append(f"it repeats {_shorten(repeated)}")
    if missing := sorted(set(range(n_classes)) - set(classes)):
        problems.append(f"it lacks {_shorten(missing)}")
    if problems:
        raise ConfigError(
            f"the class order is not a permutation of the {n_classes} classes 0 to {n_classes - 1} "
            f"({len(classes)} given): {'; '.join(problems)}"
        )
    return classes


def _shorten(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def split(n_classes: int, base: int, increments: int) -> tuple[Task, ...]:
    """`base` classes first, then `increments` equal tasks of the rest; with base 0, equal tasks of all classes.

    `split(n, n, 0)` is joint training: one task.
    """
    if n_classes < 1 or base < 0 or increments < 0:
        raise ConfigError(
            f"{n_classes} classes, {base} base classes, {increments} increments: expected at least one class, and 0 or "
            "more of the others; negative numbers are not possible"
        )
    rest = n_classes - base
    if base > n_classes:
        raise ConfigError(
            f"{base} base classes were requested, but there are only {n_classes} classes: set fewer with "
            f"--set base_classes=N, for example {n_classes // 2}"
        )
    if rest == 0 and increments > 0:
        raise ConfigError(
            f"all {n_classes} classes are base classes, so none is left for {increments} increment(s): "
            "set fewer with --set base_classes=N, or train on all at once with --method joint"
        )
    if rest > 0 and (increments == 0 or rest % increments):
        classes = f"{rest} classes after a base of {base}" if base else f"{rest} classes without a base"
        divisors = ", ".join(str(k) for k in range(1, rest + 1) if rest % k == 0)
        message = f"{classes} cannot be cut into {increments} equal tasks; possible with this base: {divisors}"
        bases = [b for b in range(1, n_classes) if increments and (n_classes - b) % increments == 0]
        if bases:
            closest = min(bases, key=lambda b: (abs(b - base), b))
            message += f"; with {increments} increments, a base of {closest} is possible"
        raise ConfigError(message)
    sizes = ([base] if base else []) + [rest // increments] * increments if increments else [base]
    return make_tasks(n_classes, sizes)


def make_tasks(n_classes: int, sizes: Sequence[int]) -> tuple[Task, ...]:
    """Tasks of the given numbers of classes, which add up to `n_classes`."""
    if min(sizes, default=0) < 1 or sum(sizes) != n_classes:
        raise ConfigError(
            f"tasks of {list(sizes)} classes for {n_classes} classes: expected numbers of 1 or more that add up to "
            f"{n_classes}"
        )
    return tuple(
        Task(index=i, first=last - size, last=last)
        for i, (size, last) in enumerate(zip(sizes, accumulate(sizes), strict=True))
    )


def make_stream(n_classes: int, config: RunConfig, joint: bool = False) -> tuple[Task, ...]:
    """The tasks that a run's settings define; a single one for a method that is `joint`.

    `stop_after` is checked only: methods know the whole stream, and a shorter run is the start of the whole one.
    """
    if joint:
        tasks = split(n_classes, n_classes, 0)
    elif config.task_sizes is not None:
        tasks = make_tasks(n_classes, config.task_sizes)
    else:
        tasks = split(n_classes, config.base_classes, config.tasks)
    if config.stop_after is not None and config.stop_after > len(tasks):
        raise ConfigError(
            f"stop_after={config.stop_after}: the stream has {len(tasks)} tasks. Give 1 to {len(tasks)}, or leave it "
            "out."
        )
    return tasks


def relabel(labels: Tensor, order: Sequence[int]) -> Tensor:
    """Labels as positions in the class order, so that the classes of a task are a range."""
    position = torch.empty(len(order), dtype=torch.int64, device=labels.device)
    position[torch.as_tensor(order, dtype=torch.int64, device=labels.device)] = torch.arange(
        len(order), device=labels.device
    )
    return position[labels]
