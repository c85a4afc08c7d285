"""Gradients of losses, averaged over the processes that train a model together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .fisher import BatchFisher


def process_group(model: nn.Module) -> Any:
    """The processes that train the model together: those of DDP, otherwise all; None if there is only one process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    group: Any = model.process_group if ddp else distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


def gradients_of(
    model: nn.Module, loss: Tensor, parameters: Sequence[nn.Parameter], keep_graph: bool = True
) -> list[Tensor | None]:
    """Gradients of a scalar, averaged over the processes; `.grad` stays as it is."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"expected the loss as a tensor, got {type(loss).__name__}")
    if loss.dim() > 0:
        raise ValueError(f"expected a scalar loss, got shape {tuple(loss.shape)}: take its mean")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: it was detached, or computed without gradients")
    gradients: list[Tensor | None] = []
    gradients += torch.autograd.grad(loss, parameters, retain_graph=keep_graph, allow_unused=True)
    group = process_group(model)
    if group is not None:
        count = torch.distributed.get_world_size(group)
        for index, parameter in enumerate(parameters):
            gradient = gradients[index]
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=group)
            gradients[index] = gradient / count
    return gradients


def measured_fisher(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], kernels: frozenset[str], losses: Iterable[Tensor]
) -> BatchFisher:
    """The squared gradients of these losses, one per batch, summed."""
    fisher = BatchFisher(parameters, kernels)
    for loss in losses:
        gradients = gradients_of(model, loss, list(parameters.values()), keep_graph=False)
        fisher.accumulate(zip(parameters, gradients, strict=True))
    if not fisher.seen:
        raise ValueError("begin_with(): no batch gave a gradient")
    return fisher
