"""BatchNorm at a teleport: a convolution and its norm are folded into one map, teleported together and unfolded.

With given statistics, a BatchNorm layer is the map y = slope x + offset per channel, with
slope = weight / sqrt(var + eps) and offset = bias - slope mean. In training it normalizes with the statistics of each
batch instead. So if the images change (for example to new classes only), the same weight and bias are a different map,
and much of what the layer learns compensates for that. Therefore the map is moved towards the anchor's map, instead of
weight and bias. In training, the map is defined by the statistics of the batches (running statistics lag behind the
weights). For training to continue from the teleported map, weight and bias are recomputed for the statistics of the
layer's new inputs.

A slope alone is not meaningful: ten times longer filters before a norm with a tenth of the slope are the same function,
and norms of filters drift (weight decay shrinks unused filters to nearly zero, and their slopes grow to hundreds).
Moving filters and slope separately could give any function, so their product is moved: `fold` and `unfold`.

`probe` in this module is a function that runs the network on some images, the same ones at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm
STATISTICS = ("running_mean", "running_var")
T = TypeVar("T")
Probe = Callable[[], object]
Moments = tuple[Tensor, Tensor]  # mean and variance per channel


class NormMap(NamedTuple):
    """y = slope x + offset, per channel."""

    slope: Tensor
    offset: Tensor


class Observed(NamedTuple):
    """What a probe shows about norms: the moments of their inputs, and the layers that produce these inputs."""

    moments: dict[Any, Moments]
    layers: dict[Any, Any]


def batchnorm_layers(model: nn.Module) -> dict[str, Any]:
    """The BatchNorm layers by name. Typed Any because torch leaves open whether they have weights and statistics."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The live running means and variances, by buffer name; layers that track none are left out."""
    layers = batchnorm_layers(model)
    found = {f"{name}.{kind}": getattr(layer, kind) for name, layer in layers.items() for kind in STATISTICS}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


def as_map(weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> NormMap:
    """The map of a BatchNorm layer with these statistics."""
    slope = weight / (var + eps).sqrt()
    return NormMap(slope, bias - slope * mean)


def as_parameters(norm_map: NormMap, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The weight and bias with which a BatchNorm layer with these statistics is the map."""
    return norm_map.slope * (var + eps).sqrt(), norm_map.offset + norm_map.slope * mean


def teleported(new: NormMap, old: NormMap, scales: tuple[Tensor, Tensor]) -> NormMap:
    """old + S (new - old), with S of the weight for the slope and S of the bias for the offset."""
    return NormMap(old.slope + scales[0] * (new.slope - old.slope), old.offset + scales[1] * (new.offset - old.offset))


def _per_filter(values: Tensor, weight: Tensor) -> Tensor:
    """One value per filter, in a shape that broadcasts with the weight."""
    return values.view(-1, *[1] * (weight.dim() - 1))


def fold(filters: Tensor, slope: Tensor) -> Tensor:
    """A layer's weight multiplied by the slope of the norm that follows it: the function of the two together."""
    return filters * _per_filter(slope, filters)


def unfold(
    product: Tensor, filters: Tensor, anchor: Tensor, new_slope: Tensor, old_slope: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Filters and a slope whose product is `product`, the teleported one of (filters, new_slope).

    The norms of the filters are interpolated towards the anchor's with S of the slope, but they are at least so large
    that the slope does not exceed those of the two maps: smaller filters would be the same function, but the next
    optimizer steps would destroy them. Filters keep their direction, as in the optimizer's state. A product of zeros
    leaves its filter unchanged, with a slope of zero.
    """
    sign = torch.where(new_slope < 0, -1.0, 1.0)
    new_norm, old_norm, product_norm = (tensor.flatten(1).norm(dim=1) for tensor in (filters, anchor, product))
    norm = old_norm + scale * (new_norm - old_norm)
    norm = torch.maximum(norm, product_norm / torch.maximum(new_slope.abs(), old_slope.abs()))
    nonzero = (product_norm > 0) & (norm > 0)
    slope = torch.where(nonzero, sign * product_norm / norm, 0.0)
    divided = product / _per_filter(torch.where(nonzero, slope, 1.0), product)
    return torch.where(_per_filter(nonzero, product), divided, filters), slope


@torch.no_grad()
def observe(model: nn.Module, norms: Sequence[Any], probe: Probe) -> Observed:
    """Run the probe. Moments are those by which a norm in train mode normalizes; one in eval mode has none here.

    If the network calls a norm several times, its last input counts. The layer of a norm is the one without bias whose
    output is directly the norm's input, and no other norm's.
    """
    moments: dict[Any, Moments] = {}
    layer_of: dict[Any, Any] = {}
    last: list[Any] = [None, None]

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        last[:] = layer, output

    def before(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0]
        if values is last[1]:
            layer_of[norm] = last[0]
        if norm.training:
            moments[norm] = input_moments(values)

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m.bias is None]
    handles = [layer.register_forward_hook(after) for layer in layers]
    with hooks([*handles, *(norm.register_forward_pre_hook(before) for norm in norms)]):
        probe()
    used = list(layer_of.values())
    return Observed(moments, {norm: layer for norm, layer in layer_of.items() if used.count(layer) == 1})


def input_moments(values: Tensor) -> Moments:
    """Mean and variance per channel, as BatchNorm normalizes a batch."""
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    axes = [axis for axis in range(values.dim()) if axis != 1]
    var, mean = torch.var_mean(values, axes, correction=0)
    return mean, var


@contextmanager
def hooks(handles: Sequence[Any]) -> Iterator[None]:
    """Removes the hooks on exit. (Layers with hooks do not use fused kernels.)"""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def write_maps(maps: Mapping[Any, NormMap], trained: Mapping[Any, Moments], probe: Probe) -> None:
    """Make the layers these maps, with the statistics of their new inputs. Layers that `trained` lacks keep theirs.

    The maps have to be defined by the statistics of the very images of the probe, all in one batch: then unchanged maps
    give unchanged weights. With means over several batches they would not. The maps do not normalize, so the difference
    of a batch from the mean would grow from layer to layer and end up in the weights.
    """

    def write(norm: Any) -> None:
        weight, bias = as_parameters(maps[norm], norm.running_mean, norm.running_var, norm.eps)
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)

    def record(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        moments[norm] = input_moments(inputs[0])

    moments: dict[Any, Moments] = {}
    modes = {norm: norm.training for norm in maps}
    for norm in maps:
        write(norm)
        norm.eval()  # so that it is the map, independent of the batch
    try:
        if trained:
            with hooks([norm.register_forward_pre_hook(record) for norm in maps if norm in trained]):
                probe()
        for norm, (mean, var) in moments.items():
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            write(norm)
    finally:
        for norm, mode in modes.items():
            norm.train(mode)


class Recalibration:
    """Replaces running statistics by the average of batch statistics, for loops that run the forward passes themselves.

    Create it before the first batch, call `update()` after each forward pass in train mode, and `finish()` at the end.
    In between, the running statistics are those of the last batch. `recalibrate` does all of this in one call.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, norms: Collection[nn.Module] | None = None) -> None:
        layers = {name: norm for name, norm in batchnorm_layers(model).items() if norms is None or norm in norms}
        self.layers = list(layers.values())
        self.momenta = [layer.momentum for layer in self.layers]
        live = running_statistics(model)
        self.live = {name: buffer for name, buffer in live.items() if name.rpartition(".")[0] in layers}
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


@contextmanager
def batchnorm_mode(model: nn.Module, training: bool, norms: Collection[nn.Module] | None = None) -> Iterator[None]:
    """Within it BatchNorm layers, all or some, are in train or eval mode, and then in their previous mode again."""
    layers = [norm for norm in batchnorm_layers(model).values() if norms is None or norm in norms]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.train(training)
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.train(mode)


def recalibrate(
    model: nn.Module,
    batches: Iterable[T],
    forward: Callable[[T], object] | None = None,
    norms: Collection[nn.Module] | None = None,
) -> None:
    """Re-estimate the running statistics of the BatchNorm layers of `model`, in place.

    Each running mean and variance becomes the average of the batch means and (unbiased) batch variances over
    `batches`, at the weights the model has now. Only BatchNorm layers are put in train mode, for this time.

    Args:
        model: the network; its weights, modes and momenta are unchanged afterwards.
        batches: what `forward` takes, one after the other; at least one.
        forward: runs the model on one batch; by default `model(batch)`. Use it for autocast or for a wrapper.
        norms: some of its BatchNorm layers; the others keep their statistics and modes.
    """
    with batchnorm_mode(model, True, norms), torch.no_grad():
        recalibration = Recalibration(model, norms)
        try:
            for batch in batches:
                (forward or model)(batch)
                recalibration.update()
        except BaseException:
            recalibration.restore_momenta()
            raise
        recalibration.finish()
