"""States of a network (state dicts): interpolate them, add them up with weights, measure the distance between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]


def interpolate(a: Tensor, b: Tensor, x: float) -> Tensor:
    """(1 - x) a + x b, bit for bit a at 0 and b at 1; integers are those of the nearer end."""
    if a.is_floating_point() and 0 < x < 1:
        return torch.lerp(a, b, x)
    return a if x < 0.5 else b


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float] | Tensor, bounded: bool) -> Tensor:
    """sum_k w_k tensors[k]; integers are those with the largest weight.

    With `bounded`, the sum stays within the range of the tensors: a variance must not become negative. The host reads
    no weight, so a CUDA graph with the weights in a tensor can be captured.
    """
    first = tensors[0]
    floating = first.is_floating_point()
    w = torch.as_tensor(weights, dtype=first.dtype if floating else torch.float32, device=first.device)
    if not floating:
        return torch.stack(list(tensors)).index_select(0, w.argmax()[None])[0]
    total = w[0] * first
    for weight, tensor in zip(w[1:], tensors[1:], strict=True):
        total = total + weight * tensor
    if not bounded:
        return total
    stacked = torch.stack(list(tensors))
    return torch.where(w.min() < 0, total.clamp(stacked.amin(0), stacked.amax(0)), total)


def difference(a: State, b: State, names: Sequence[str]) -> Tensor:
    """b - a over the named tensors as one vector, in float64."""
    return torch.cat([(b[name].double() - a[name].double()).flatten() for name in names])


def distance(a: State, b: State, names: Sequence[str]) -> float:
    """Euclidean distance over the named tensors, in float64."""
    return float(difference(a, b, names).norm())


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, without the extra state of modules."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def matching_copy(state: State, live: State, title: str) -> dict[str, Tensor]:
    """A copy of `state` on the devices of `live`; ValueError unless names and shapes match."""
    given = tensors_of(state)
    missing, unexpected = [n for n in live if n not in given], [n for n in given if n not in live]
    if missing or unexpected:
        raise ValueError(
            f"{title} does not match the model: missing {shorten(missing)}; unexpected {shorten(unexpected)}. "
            "If the head has grown in between, grow the older model first, then take its state dict."
        )
    for name, tensor in live.items():
        if given[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)} in {title}, expected {tuple(tensor.shape)} as in the "
                "model"
            )
    return {name: given[name].detach().to(tensor, copy=True) for name, tensor in live.items()}


def shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


@contextmanager
def preserved(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The live tensors of the model; on exit they and the modes of all modules are restored."""
    live = tensors_of(model.state_dict())
    saved = {name: tensor.clone() for name, tensor in live.items()}
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield live
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(saved[name])
        for module, training in modes:
            module.training = training
