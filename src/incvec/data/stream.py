"""The task stream: the order in which classes arrive, and how they are cut into tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from incvec.contracts import Task
from incvec.errors import ConfigError


def class_order(n_classes: int, seed: int | None = None, order: Sequence[int] | None = None) -> list[int]:
    """The classes as they arrive: in `order` where it is given, else shuffled by `seed`, else 0, 1, 2, ...

    A seed draws numpy's legacy permutation, as LUCIR, PyCIL and their kin do: 1993 gives their list.
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
    faults = []
    if strangers := sorted({c for c in classes if not 0 <= c < n_classes}):
        faults.append(f"it has {_some(strangers)}, which do not exist")
    if repeated := sorted(c for c, times in Counter(classes).items() if times > 1):
        faults.append(f"it repeats {_some(repeated)}")
    if missing := sorted(set(range(n_classes)) - set(classes)):
        faults.append(f"it lacks {_some(missing)}")
    if faults:
        raise ConfigError(
            f"the class order is no permutation of the {n_classes} classes 0 to {n_classes - 1} "
            f"({len(classes)} given): {'; '.join(faults)}"
        )
    return classes


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def split(n_classes: int, base: int, increments: int) -> tuple[Task, ...]:
    """`base` classes first, then `increments` equal tasks of the rest; with base 0, equal tasks of them all.

    `split(n, n, 0)` is joint training, one task.
    """
    if n_classes < 1 or base < 0 or increments < 0:
        raise ConfigError(
            f"{n_classes} classes, {base} base classes, {increments} increments: expected at least one class "
            "and no negative number"
        )
    rest = n_classes - base
    if base > n_classes:
        raise ConfigError(
            f"{base} base classes are asked for, but there are only {n_classes} classes: ask for fewer with "
            f"--set base_classes=N, {n_classes // 2} for example"
        )
    if rest == 0 and increments > 0:
        raise ConfigError(
            f"all {n_classes} classes are base classes, so nothing is left for {increments} increment(s): "
            "ask for fewer with --set base_classes=N, or train on all at once with --method joint"
        )
    if rest > 0 and (increments == 0 or rest % increments):
        left = f"{rest} classes left after a base of {base}" if base else f"{rest} classes without a base"
        fitting = ", ".join(str(k) for k in range(1, rest + 1) if rest % k == 0)
        message = f"{left} cannot be cut into {increments} equal tasks; with this base, one of {fitting} would"
        bases = [b for b in range(1, n_classes) if increments and (n_classes - b) % increments == 0]
        if bases:
            close = min(bases, key=lambda b: (abs(b - base), b))
            message += f"; with {increments} increments, a base of {close} would"
        raise ConfigError(message)
    sizes = ([base] if base else []) + [rest // increments] * increments if increments else [base]
    lasts = np.cumsum(sizes).tolist()
    return tuple(
        Task(index=i, first=last - size, last=last, of=len(sizes))
        for i, (size, last) in enumerate(zip(sizes, lasts, strict=True))
    )


def relabel(labels: Tensor, order: Sequence[int]) -> Tensor:
    """Labels as positions in the class order, so that a task's classes are a range."""
    position = torch.empty(len(order), dtype=torch.int64, device=labels.device)
    position[torch.as_tensor(order, dtype=torch.int64, device=labels.device)] = torch.arange(
        len(order), device=labels.device
    )
    return position[labels]
