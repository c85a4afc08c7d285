"""BatchNorm layers as affine maps, for add-ons that teleport weights.

With its running statistics, a BatchNorm layer is the map y = slope x + offset per channel, with
slope = weight / sqrt(var + eps) and offset = bias - slope mean. In training it normalizes with the statistics of each
batch instead. So if the images change (for example to new classes only), the same weight and bias are a different map,
and much of what the layer learns compensates for that. Therefore the map is interpolated towards the anchor's map,
instead of weight and bias. In training, the map is defined by the statistics of the batches (running statistics lag
behind the weights). For training to continue from the interpolated map, weight and bias are recomputed for the
statistics of the layer's new inputs.

A slope alone is not meaningful: ten times longer filters before a norm with a tenth of the slope are the same function,
and norms of filters drift (weight decay shrinks unused filters to nearly zero, and their slopes grow to hundreds).
Interpolating filters and slope separately could give any function, so `Folded` interpolates their product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from incvec.nets.batchnorm import batchnorm_layers

Probe = Callable[[], None]  # runs the network on some images, the same ones at each call
Moments = tuple[Tensor, Tensor]  # mean and variance per channel


class Affine(NamedTuple):
    """y = slope x + offset, per channel."""

    slope: Tensor
    offset: Tensor

    @classmethod
    def from_batchnorm(cls, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Affine:
        slope = weight / (var + eps).sqrt()
        return cls(slope, bias - slope * mean)

    def teleported(self, anchor: Affine, scales: tuple[Tensor, Tensor]) -> Affine:
        """anchor + S (self - anchor), with S of the weight for the slope and S of the bias for the offset."""
        slope, offset = (old + s * (new - old) for new, old, s in zip(self, anchor, scales, strict=True))
        return Affine(slope, offset)

    @torch.no_grad()
    def write_to(self, norm: Any) -> None:
        """Set the layer's weight and bias such that it is this map with its running statistics."""
        norm.weight.copy_(self.slope * (norm.running_var + norm.eps).sqrt())
        norm.bias.copy_(self.offset + self.slope * norm.running_mean)


def _per_filter(values: Tensor, weight: Tensor) -> Tensor:
    """One value per filter, in a shape that broadcasts with the weight."""
    return values.view(-1, *[1] * (weight.dim() - 1))


class Folded:
    """A layer's weight multiplied by the slope of the norm that follows it: the function of the two together.

    The constructor replaces the weight by the product, and computes the anchor's product. `unfold` splits the product
    into filters and a slope again. The norms of the filters are interpolated with S of the slope, but they are at least
    so large that the slope does not exceed those of the two maps: smaller filters would be the same function, but the
    next optimizer steps would destroy them.
    """

    @torch.no_grad()
    def __init__(self, weight: Tensor, anchor: Tensor, new: Affine, old: Affine, scale: Tensor) -> None:
        self.weight, self.original = weight, weight.clone()
        self.sign = torch.where(new.slope < 0, -1.0, 1.0)  # filters keep their direction, as in the optimizer's state
        new_norm, old_norm = (tensor.flatten(1).norm(dim=1) for tensor in (weight, anchor))
        self.norm = old_norm + scale * (new_norm - old_norm)
        self.max_slope = torch.maximum(new.slope.abs(), old.slope.abs())
        self.anchor = anchor * _per_filter(old.slope, anchor)
        weight.mul_(_per_filter(new.slope, weight))

    @torch.no_grad()
    def unfold(self) -> Tensor:
        """Replace the product by filters; returns the slope. A filter of zeros keeps its original value."""
        product_norm = self.weight.flatten(1).norm(dim=1)
        norm = torch.maximum(self.norm, product_norm / self.max_slope)
        nonzero = (product_norm > 0) & (norm > 0)
        slope = torch.where(nonzero, self.sign * product_norm / norm, 0.0)
        filters = self.weight / _per_filter(torch.where(nonzero, slope, 1.0), self.weight)
        self.weight.copy_(torch.where(_per_filter(nonzero, filters), filters, self.original))
        return slope


@torch.no_grad()
def preceding_layers(model: nn.Module, probe: Probe) -> dict[Any, Any]:
    """The layer without bias whose output is the direct input of a norm, and of no other norm; by norm."""
    layer_of: dict[Any, Any] = {}
    last: list[Any] = [None, None]

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        last[:] = layer, output

    def before(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0] is last[1]:
            layer_of[norm] = last[0]

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m.bias is None]
    handles = [layer.register_forward_hook(after) for layer in layers]
    handles += [norm.register_forward_pre_hook(before) for norm in batchnorm_layers(model).values()]
    try:
        probe()
    finally:
        for handle in handles:
            handle.remove()
    used = list(layer_of.values())
    return {norm: layer for norm, layer in layer_of.items() if used.count(layer) == 1}


@torch.no_grad()
def input_moments(norms: Iterable[Any], probe: Probe) -> dict[Any, Moments]:
    """Mean and variance of the layers' inputs, by layer.

    If the network calls a layer several times, its last input counts. A layer that is not called is not included.
    """
    moments: dict[Any, Moments] = {}

    def record(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].float()
        axes = [axis for axis in range(values.dim()) if axis != 1]
        var, mean = torch.var_mean(values, axes, correction=0)  # as BatchNorm normalizes a batch
        moments[norm] = mean, var

    handles = [norm.register_forward_pre_hook(record) for norm in norms]  # layers with hooks do not use fused kernels
    try:
        probe()
    finally:
        for handle in handles:
            handle.remove()
    return moments


@torch.no_grad()
def write_maps(maps: Mapping[Any, Affine], probe: Probe) -> None:
    """Make the layers these maps, with the statistics of their new inputs; without inputs the statistics stay.

    The maps have to be defined by the statistics of the very images of the probe, all in one batch: then unchanged maps
    give unchanged weights. With means over several batches they would not. The maps do not normalize, so the difference
    of a batch from the mean would grow from layer to layer and end up in the weights.
    """
    modes = {norm: norm.training for norm in maps}
    for norm, affine in maps.items():
        affine.write_to(norm)
        norm.eval()  # so that it is the map, independent of the batch
    try:
        for norm, (mean, var) in input_moments(maps, probe).items():
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            maps[norm].write_to(norm)
    finally:
        for norm, mode in modes.items():
            norm.train(mode)
