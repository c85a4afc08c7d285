"""BatchNorm as the affine map it is, for add-ons that move weights.

On its running statistics a layer does y = slope x + offset to each channel, slope = weight / sqrt(var + eps) and
offset = bias - slope mean. In training it normalizes by each batch instead, so a network that now sees other images
(new classes alone, say) does something else with the same weights, and much of what it learns makes up for that. To
take a layer back towards an old one is to take the map back, not the weight and the bias. The map of a network in
training is that by the batches' statistics (running ones lag behind the weights), and for it to train on from where it
was taken, the new map has to be told by the statistics of what the layer then sees.

Nor does a slope mean anything by itself: a convolution's filters ten times as long before a norm with a tenth of the
slope do the same, and lengths drift (weight decay shortens filters that little depends on to nearly nothing, and their
slopes grow to hundreds). Half of one pair's filters with half of another's slope may do anything, so `Folded` takes
back the product of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


def _filters(slope: Tensor, weight: Tensor) -> Tensor:
    """A number for each filter, in a shape that multiplies the weight."""
    return slope.view(-1, *[1] * (weight.dim() - 1))


class Folded:
    """A layer's weight times the slope of the norm it feeds: what the two do together, however long the filters are.

    Made, it has put the product in the weight's place, and has the anchor's product. `part` puts filters in its place
    again, as long as S of the slope says, but no shorter than keeps the slope that goes with them (which it returns)
    within those it lies between: shorter ones would be right, and gone with the optimizer's next steps.
    """

    @torch.no_grad()
    def __init__(self, weight: Tensor, anchor: Tensor, new: Affine, old: Affine, scale: Tensor) -> None:
        self.weight, self.before = weight, weight.clone()
        self.sign = torch.where(new.slope < 0, -1.0, 1.0)  # filters point as they did, which the optimizer remembers
        now, then = (tensor.flatten(1).norm(dim=1) for tensor in (weight, anchor))
        self.length = then + scale * (now - then)
        self.steepest = torch.maximum(new.slope.abs(), old.slope.abs())
        self.anchor = anchor * _filters(old.slope, anchor)
        weight.mul_(_filters(new.slope, weight))

    @torch.no_grad()
    def part(self) -> Tensor:
        product = self.weight.flatten(1).norm(dim=1)
        length = torch.maximum(self.length, product / self.steepest)
        some = (product > 0) & (length > 0)  # a filter that is nothing stays as it was, with a slope of nothing
        slope = torch.where(some, self.sign * product / length, 0.0)
        back = self.weight / _filters(torch.where(some, slope, 1.0), self.weight)
        self.weight.copy_(torch.where(_filters(some, back), back, self.before))
        return slope


Look = Callable[[], None]  # runs the network on some images, the same each time


@torch.no_grad()
def feeding(model: nn.Module, look: Look) -> dict[Any, Any]:
    """By norm, the layer without a bias whose output it takes as it is, and no other norm does, where there is one."""
    found: dict[Any, Any] = {}
    last: list[Any] = [None, None]

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        last[:] = layer, output

    def before(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0] is last[1]:
            found[norm] = last[0]

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m.bias is None]
    handles = [layer.register_forward_hook(after) for layer in layers]
    handles += [norm.register_forward_pre_hook(before) for norm in norms_of(model).values()]
    try:
        look()
    finally:
        for handle in handles:
            handle.remove()
    taken = list(found.values())
    return {norm: layer for norm, layer in found.items() if taken.count(layer) == 1}


Moments = tuple[Tensor, Tensor]  # mean and variance, by channel


@torch.no_grad()
def moments(norms: Iterable[Any], look: Look) -> dict[Any, Moments]:
    """Of what the layers see, by layer.

    Where the network calls a layer more than once, the last input counts; one that it never calls is not among them.
    """
    seen: dict[Any, Moments] = {}

    def note(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].float()
        axes = [axis for axis in range(values.dim()) if axis != 1]
        var, mean = torch.var_mean(values, axes, correction=0)  # as a batch is normalized
        seen[norm] = mean, var

    handles = [norm.register_forward_pre_hook(note) for norm in norms]  # which also keeps our own kernels away
    try:
        look()
    finally:
        for handle in handles:
            handle.remove()
    return seen


@torch.no_grad()
def renormalize(maps: Mapping[Any, Affine], look: Look) -> None:
    """Make layers these maps, told by the statistics of what they then see; where nothing is seen the statistics stay.

    The maps have to be by the statistics of the very images that are looked at here, all of them at once. Then maps
    that did not change are told as they were. By means over several batches they would not be: nothing normalizes on
    the way through maps, so what a batch differs from the mean by grows from layer to layer, and ends in the weights.
    """
    modes = {norm: norm.training for norm in maps}
    for norm, affine in maps.items():
        affine.tell(norm)
        norm.eval()  # so that it is the map, whatever the batch
    try:
        for norm, (mean, var) in moments(maps, look).items():
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            maps[norm].tell(norm)
    finally:
        for norm, mode in modes.items():
            norm.train(mode)
