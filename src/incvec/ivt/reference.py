"""Algorithm 1 of the paper, verbatim, in float64. Slow and plain: the tests compare `IVT` with it.

Parameters are a dict of tensors by name. A head grows by rows appended to dimension 0, or by new names. The cumulative
Fisher of new parameters and rows is 0. What the paper leaves open can be chosen: whose rows a tensor continues, what is
left alone, the teleport after the last epoch, and the loss that F comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Theta = dict[str, Tensor]


@dataclass(frozen=True)
class ReferenceTask:
    """The input of Algorithm 1 for one task."""

    initialize: Callable[[Theta], Theta]  # theta_t^(1) from theta_{t-1}: grown, new rows initialized
    epochs: Sequence[Sequence[Any]]  # the mini-batches of each epoch
    gradient: Callable[[Theta, Any], Theta]  # g_i, the mini-batch's mean gradient
    update: Callable[[Theta, Theta], Theta]  # CILMethod(theta, g_i)
    own: Callable[[Theta, Any], Theta] | None = None  # the gradient of the loss that F comes from, if not g_i
    past: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the tensors whose rows one continues


def _double(theta: Mapping[str, Tensor]) -> Theta:
    return {name: value.detach().double().clone() for name, value in theta.items()}


def _padded(old: Tensor | None, like: Tensor) -> Tensor:
    result = torch.zeros_like(like)
    if old is not None:
        result[tuple(slice(0, size) for size in old.shape)] = old
    return result


def increment_vector_transformation(
    theta: Mapping[str, Tensor],
    tasks: Sequence[ReferenceTask],
    interval: int | None,
    exclude: Sequence[str] = (),
    skip_last: bool = False,
) -> tuple[Theta, Theta]:
    """Train all tasks; returns the last task's parameters and Fbar."""
    current = _double(theta)
    cumulative: Theta = {}
    for t, task in enumerate(tasks, start=1):
        current = _double(task.initialize(current))
        anchor = _double(current)
        before = {}
        for name, value in current.items():
            sources = [cumulative[source] for source in task.past.get(name, [name]) if source in cumulative]
            before[name] = _padded(torch.cat(sources) if sources else None, value)
        fisher = {name: torch.zeros_like(value) for name, value in current.items()}
        for m, batches in enumerate(task.epochs, start=1):
            fisher = {name: torch.zeros_like(value) for name, value in current.items()}
            for batch in batches:
                g = _double(task.gradient(current, batch))
                own = g if task.own is None else _double(task.own(current, batch))
                for name in fisher:
                    fisher[name] = fisher[name] + own[name] ** 2
                current = _double(task.update(current, g))
            for name in fisher:
                fisher[name] = fisher[name] / len(batches)
            due = t >= 2 and interval is not None and m % interval == 0
            if due and not (skip_last and m == len(task.epochs)):
                for name in [name for name in current if name not in exclude]:
                    after = before[name] + fisher[name]
                    s = after / (before[name] + after)
                    s[before[name] + after == 0] = 1.0
                    current[name] = anchor[name] + s * (current[name] - anchor[name])
        cumulative = {name: before[name] + fisher[name] for name in current}
    return current, cumulative
