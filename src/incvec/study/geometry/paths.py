"""Straight lines between two states of a network, theta(x) = (1 - x) theta_a + x theta_b.

Two solutions are linearly connected where nothing is lost between them. `path` walks the line for any model
of yours, and `barrier` says how much is lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")
State = Mapping[str, Tensor]


def positions(points: int = 51) -> list[float]:
    """x at each point of a path: evenly spaced, 0 and 1 included."""
    if points < 2:
        raise ValueError(f"a path has its two ends at least; {points} point(s) were asked for")
    return [step / (points - 1) for step in range(points)]


def path(
    model: nn.Module, state_a: State, state_b: State, evaluate: Callable[[nn.Module], Value], points: int = 51
) -> list[Value]:
    """What `evaluate(model)` says at `points` states on the straight line from `state_a` to `state_b`.

    The states are state dicts of `model` (its own live one will do: they are copied first). Every floating
    tensor is interpolated, BatchNorm's running statistics included; integer buffers are those of the nearer
    end. The ends are the given states bit for bit. `evaluate` may return a number, a mapping, anything, and
    may put the model into `eval()`: weights, buffers and modes are afterwards as they were before.

        before = copy.deepcopy(model.state_dict())
        train(model)
        curve = path(model, before, model.state_dict(), test_accuracy)
        lost = barrier(curve)
    """
    live = tensors_of(model.state_dict())
    a, b = fitted(state_a, live, "state_a"), fitted(state_b, live, "state_b")
    found = []
    with kept(model, live), torch.no_grad():
        for x in positions(points):
            for name, tensor in live.items():
                tensor.copy_(between(a[name], b[name], x))
            found.append(evaluate(model))
    return found


def barrier(curve: Sequence[float], falls: bool = True) -> float:
    """How far a path bends away from the straight line between its ends, at its worst; never below 0.

        max over x of  (1 - x) y(0) + x y(1) - y(x)       for an accuracy, where `falls` is bad
        max over x of  y(x) - (1 - x) y(0) - x y(1)       for a loss

    The points of `curve` are evenly spaced, as those of `path` are.
    """
    sign = 1 if falls else -1
    rows = zip(positions(len(curve)), curve, strict=True)
    return max([0.0, *(sign * ((1 - x) * curve[0] + x * curve[-1] - y) for x, y in rows)])


def between(a: Tensor, b: Tensor, x: float) -> Tensor:
    """(1 - x) a + x b, exactly a at 0 and b at 1; of integers the nearer one."""
    if a.is_floating_point() and 0 < x < 1:
        return torch.lerp(a, b, x)
    return a if x < 0.5 else b


def blend(corners: Sequence[Tensor], weights: Sequence[float] | Tensor, bounded: bool) -> Tensor:
    """sum_k w_k corner_k; where `bounded`, never outside of the corners' range (a variance must not become
    negative); of integers those of the corner that weighs most.

    No weight is read by the host, so that a step with weights in a tensor can be captured.
    """
    first = corners[0]
    floating = first.is_floating_point()
    w = torch.as_tensor(weights, dtype=first.dtype if floating else torch.float32, device=first.device)
    if not floating:
        return torch.stack(list(corners)).index_select(0, w.argmax()[None])[0]
    total = w[0] * first
    for weight, corner in zip(w[1:], corners[1:], strict=True):
        total = total + weight * corner
    if not bounded:
        return total
    given = torch.stack(list(corners))
    return torch.where(w.min() < 0, total.clamp(given.amin(0), given.amax(0)), total)


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict without whatever else modules put there (`get_extra_state`)."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def fitted(state: State, live: State, title: str) -> dict[str, Tensor]:
    """A copy of the state on the model's devices, once its names and shapes are known to fit."""
    given = tensors_of(state)
    missing, strange = [n for n in live if n not in given], [n for n in given if n not in live]
    if missing or strange:
        raise ValueError(
            f"{title} does not belong to this model: it lacks {some(missing)} and has {some(strange)} besides. "
            "Where a head has grown in between, grow the older model first, then take its state."
        )
    for name, tensor in live.items():
        if given[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)} in {title}, {tuple(tensor.shape)} in the model: "
                "both ends need the model's own shapes"
            )
    return {name: given[name].detach().to(tensor, copy=True) for name, tensor in live.items()}


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"


@contextmanager
def kept(model: nn.Module, live: State) -> Iterator[None]:
    """Put every tensor and every module's mode back at the end, whatever happens in between."""
    saved = {name: tensor.detach().clone() for name, tensor in live.items()}
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(saved[name])
        for module, training in modes:
            module.training = training
