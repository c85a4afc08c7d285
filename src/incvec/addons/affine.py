"""BatchNorm as the affine map it is, for add-ons that move weights.

On its running statistics a layer does y = slope x + offset to each channel, slope = weight / sqrt(var + eps) and
offset = bias - slope mean. In training it normalises by each batch instead, so a network that now sees other images
(new classes alone, say) does something else with the same weights, and much of what it learns makes up for that. To
take a layer back towards an old one is to take the map back, not the weight and the bias. The map of a network in
training is that by the batches' statistics (running ones lag behind the weights), and for it to train on from where it
was taken, the new map has to be told by the statistics of what the layer then sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


Moments = tuple[Tensor, Tensor]  # mean and variance, by channel


@torch.no_grad()
def moments(norms: Iterable[Any], looks: Iterable[None]) -> dict[Any, Moments]:
    """Of what the layers see, by layer: means over the looks, as running statistics are means over steps.

    `looks` runs the network on a batch at a time. Where it calls a layer more than once, the last input counts; a layer
    that it never calls is not among them.
    """
    seen: dict[Any, Moments] = {}
    sums: dict[Any, list[Tensor]] = {}
    count = 0

    def note(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].float()
        axes = [axis for axis in range(values.dim()) if axis != 1]
        var, mean = torch.var_mean(values, axes, correction=0)  # as a batch is normalised
        seen[norm] = mean, var

    handles = [norm.register_forward_pre_hook(note) for norm in norms]  # which also keeps our own kernels away
    try:
        for _ in looks:
            for norm, found in seen.items():
                torch._foreach_add_(sums.setdefault(norm, [torch.zeros_like(value) for value in found]), list(found))
            count += 1
    finally:
        for handle in handles:
            handle.remove()
    return {norm: (mean / count, var / count) for norm, (mean, var) in sums.items()}


@torch.no_grad()
def renormalise(maps: Mapping[Any, Affine], looks: Iterable[None]) -> None:
    """Make layers these maps, told by the statistics of what they then see; without a look the statistics stay."""
    modes = {norm: norm.training for norm in maps}
    for norm, affine in maps.items():
        affine.tell(norm)
        norm.eval()  # so that it is the map, whatever the batch
    try:
        for norm, (mean, var) in moments(maps, looks).items():
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            maps[norm].tell(norm)
    finally:
        for norm, mode in modes.items():
            norm.train(mode)
