"""BatchNorm as the affine map it is, for add-ons that move weights.

On its running statistics a layer does y = slope x + offset to each channel, slope = weight / sqrt(var + eps) and
offset = bias - slope mean. In training it normalises by each batch instead, so a network that now sees other images
(new classes alone, say) does something else with the same weights, and much of what it learns makes up for that. To
take a layer back towards an old one is to take the map back, not the weight and the bias; and for the network to train
on from the same function, the map has to be told by the statistics of what the layer now sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm


def norms_of(model: nn.Module) -> dict[str, Any]:
    """The layers by name; Any, since torch's types leave open whether they have weights and statistics."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}


class Affine(NamedTuple):
    """y = slope x + offset, by channel."""

    slope: Tensor
    offset: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Affine:
        slope = weight / (var + eps).sqrt()
        return cls(slope, bias - slope * mean)

    def teleported(self, old: Affine, scales: tuple[Tensor, Tensor]) -> Affine:
        """old + S (self - old), S of the slope that of the weight, S of the offset that of the bias."""
        slope, offset = (before + s * (now - before) for now, before, s in zip(self, old, scales, strict=True))
        return Affine(slope, offset)

    @torch.no_grad()
    def tell(self, norm: Any) -> None:
        """Set the layer's weight and bias so that on its running statistics it is this map."""
        norm.weight.copy_(self.slope * (norm.running_var + norm.eps).sqrt())
        norm.bias.copy_(self.offset + self.slope * norm.running_mean)


@torch.no_grad()
def renormalise(maps: Mapping[Any, Affine], looks: Iterable[None]) -> None:
    """Make layers these maps, told by the statistics of what they see.

    `looks` runs the network on a batch at a time, and the layers are their maps meanwhile. Where a look calls a layer
    more than once, its last input counts. Means over the looks, as running statistics are; without a look the
    statistics stay.
    """
    for norm, affine in maps.items():
        affine.tell(norm)
    seen: dict[Any, tuple[Tensor, Tensor]] = {}
    sums: dict[Any, list[Tensor]] = {}
    count = 0
    with _watched(maps, seen):
        for _ in looks:
            for norm, found in seen.items():
                total = sums.setdefault(norm, [torch.zeros_like(value) for value in found])
                torch._foreach_add_(total, list(found))
            count += 1
    for norm, (mean, var) in sums.items():
        norm.running_mean.copy_(mean / count)
        norm.running_var.copy_(var / count)
        maps[norm].tell(norm)


@contextmanager
def _watched(norms: Iterable[Any], seen: dict[Any, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The layers on their running statistics, with mean and variance of their inputs going to `seen`."""

    def note(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].float()
        var, mean = torch.var_mean(values, [axis for axis in range(values.dim()) if axis != 1])
        seen[norm] = mean, var

    modes = {norm: norm.training for norm in norms}
    handles = [norm.register_forward_pre_hook(note) for norm in norms]  # also keeps our own kernels away
    try:
        for norm in norms:
            norm.eval()
        yield
    finally:
        for handle in handles:
            handle.remove()
        for norm, mode in modes.items():
            norm.train(mode)
