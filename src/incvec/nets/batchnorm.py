"""BatchNorm layers: find them, freeze their statistics for a while, and re-estimate these statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm
STATISTICS = ("running_mean", "running_var")
T = TypeVar("T")


def batchnorm_layers(model: nn.Module) -> dict[str, Any]:
    """The BatchNorm layers by name. Typed Any because torch leaves open whether they have weights and statistics."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The live running means and variances, by buffer name."""
    layers = batchnorm_layers(model)
    return {f"{name}.{kind}": getattr(layer, kind) for name, layer in layers.items() for kind in STATISTICS}


@contextmanager
def batchnorm_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Within it all BatchNorm layers are in train or eval mode; afterwards each one is in its previous mode."""
    layers = list(batchnorm_layers(model).values())
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.train(training)
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.train(mode)


@contextmanager
def preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Restores the module's buffers on exit, so that forward passes within leave the running statistics unchanged."""
    buffers = list(module.buffers())
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        torch._foreach_copy_(buffers, saved)


class Recalibration:
    """Replaces running statistics by the average of batch statistics, for loops that run the forward passes themselves.

    Create it before the first batch, call `update()` after each forward pass in train mode, and `finish()` at the end.
    In between, the running statistics are those of the last batch. `recalibrate` does all of this in one call.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self.layers = list(batchnorm_layers(model).values())
        self.momenta = [layer.momentum for layer in self.layers]
        self.live = running_statistics(model)
        self.sums = {name: torch.zeros_like(buffer) for name, buffer in self.live.items()}
        # A tensor: CUDA divides by a Python number through its reciprocal, which rounds differently.
        self.count = torch.zeros((), device=next(iter(self.sums.values())).device if self.sums else None)
        for layer in self.layers:
            layer.momentum = 1.0  # the running statistics become those of the last batch

    @torch.no_grad()
    def update(self) -> None:
        """Add the statistics of the batch just seen."""
        for name, buffer in self.live.items():
            self.sums[name] += buffer
        self.count += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Write the averages and restore the momenta."""
        self.restore_momenta()
        for name, buffer in self.live.items():
            buffer.copy_(self.sums[name] / self.count)

    def restore_momenta(self) -> None:
        for layer, momentum in zip(self.layers, self.momenta, strict=True):
            layer.momentum = momentum


def recalibrate(model: nn.Module, batches: Iterable[T], forward: Callable[[T], object] | None = None) -> None:
    """Re-estimate the running statistics of every BatchNorm layer of `model`, in place.

    Each running mean and variance becomes the average of the batch means and (unbiased) batch variances over
    `batches`, at the weights the model has now. Only BatchNorm layers are put in train mode, for this time.

    Args:
        model: the network; its weights, modes and momenta are unchanged afterwards.
        batches: what `forward` takes, one after the other; at least one.
        forward: runs the model on one batch; by default `model(batch)`. Use it for autocast or for a wrapper.
    """
    with batchnorm_mode(model, training=True), torch.no_grad():
        recalibration = Recalibration(model)
        try:
            for batch in batches:
                (forward or model)(batch)
                recalibration.update()
        except BaseException:
            recalibration.restore_momenta()
            raise
        recalibration.finish()
