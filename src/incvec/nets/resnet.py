"""The residual network every backbone is made of: a stem, stages that run one by one, and a pooling.

`forward` is exactly `stem`, then each of `stages`, then `pool`, and nothing else, so that a method may run
the parts itself and disturb what goes into a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.fused import fused
from incvec.nets import kernels

Entrance = Literal["3x3", "3x3+pool", "7x7+pool"]
Shortcut = Literal["pad", "conv"]
Activation = Literal["every", "but-last", "but-stage-ends", "none"]
STRIDES: Mapping[Entrance, int] = {"3x3": 1, "3x3+pool": 2, "7x7+pool": 4}


class Features(NamedTuple):
    """What a backbone returns: the output of every stage, and the pooled last one (float32 or wider)."""

    maps: tuple[Tensor, ...]
    features: Tensor


@dataclass(frozen=True)
class Level:
    """One stage: how many blocks, how wide, and the stride of its first block."""

    blocks: int
    channels: int
    stride: int


@dataclass(frozen=True)
class Plan:
    """A residual network as data.

    `activation` says after which additions a ReLU stands: every block's, every one but the network's last,
    every one but each stage's last, or none at all. (Inside a block, between its two convolutions, and in the
    stem there always is one.)
    """

    summary: str
    levels: tuple[Level, ...]
    entrance: Entrance = "3x3"
    shortcut: Shortcut = "pad"
    activation: Activation = "every"

    def last_side(self, side: int) -> int:
        """Of the last maps, for images of that side; every stride rounds up."""
        stride = STRIDES[self.entrance] * math.prod(level.stride for level in self.levels)
        return -(-side // stride)

    def activated(self, level: int, block: int) -> bool:
        """Whether a ReLU follows the addition of this block of this level."""
        ends_stage = block == self.levels[level].blocks - 1
        if self.activation == "but-last":
            return not (ends_stage and level == len(self.levels) - 1)
        if self.activation == "but-stage-ends":
            return not ends_stage
        return self.activation == "every"


class Norm(nn.BatchNorm2d):
    """Batch normalization without the batch counter.

    With a fixed momentum nothing reads the counter; keeping it costs one kernel a layer and step, and an
    integer among the buffers that merges and interpolations would have to step around. (torch's cumulative
    average, `momentum=None`, would need the counter; a recalibration adds up the batches instead.)
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_batches_tracked = None

    def reset_running_stats(self) -> None:
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        # Without version metadata (a plain dictionary of tensors) torch takes the state for one older than
        # the counter, adds a counter to it, and then rejects it as unexpected.
        super()._load_from_state_dict(state_dict, prefix, {**local_metadata, "version": 2}, *rest)


class PadShortcut(nn.Module):
    """Option A of the ResNet paper: every second pixel, and zeros for the channels that are new."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


class ConvShortcut(nn.Module):
    """Option B: a strided 1x1 convolution and its normalization."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.norm = Norm(out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class Residual(nn.Module):
    """The basic block: shortcut(x) + norm(conv(relu(norm(conv(x))))), with or without a ReLU at the end."""

    def __init__(self, channels: int, out: int, stride: int, shortcut: Shortcut, relu: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = Norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = Norm(out)
        self.shortcut: nn.Module
        if stride == 1 and channels == out:
            self.shortcut = nn.Identity()
        elif shortcut == "pad":
            self.shortcut = PadShortcut(out - channels, stride)
        else:
            self.shortcut = ConvShortcut(channels, out, stride)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.block(self, x)
        return self.plain(x) if y is None else y

    @fused(dynamic=False)
    def plain(self, x: Tensor) -> Tensor:
        """The block by torch's own operators."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y)) + self.shortcut(x)
        return F.relu(y, inplace=True) if self.relu else y


class Stem(nn.Module):
    """Convolution, normalization, ReLU and, for larger images, a max-pooling."""

    def __init__(self, channels: int, out: int, entrance: Entrance) -> None:
        super().__init__()
        if entrance == "7x7+pool":
            self.conv = nn.Conv2d(channels, out, 7, stride=2, padding=3, bias=False)
        else:
            self.conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm = Norm(out)
        self.pooled = entrance != "3x3"

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.stem(self, x)
        return self.plain(x) if y is None else y

    @fused(dynamic=False)
    def plain(self, x: Tensor) -> Tensor:
        """The stem by torch's own operators."""
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        return F.max_pool2d(y, 3, stride=2, padding=1) if self.pooled else y


class Backbone(nn.Module):
    """A stem and stages; `width` is the dimension of the pooled features."""

    stages: nn.ModuleList

    def __init__(self, plan: Plan, channels: int = 3) -> None:
        super().__init__()
        now = plan.levels[0].channels
        self.stem = Stem(channels, now, plan.entrance)
        self.stages = nn.ModuleList()
        for i, level in enumerate(plan.levels):
            stage = nn.Sequential()
            for j in range(level.blocks):
                stride = level.stride if j == 0 else 1
                stage.append(Residual(now, level.channels, stride, plan.shortcut, plan.activated(i, j)))
                now = level.channels
            self.stages.append(stage)
        self.width = now

    def pool(self, h: Tensor) -> Tensor:
        """Mean over the positions, kept in float32 (or wider) when the maps are in a shorter format."""
        return h.mean((2, 3), dtype=torch.promote_types(h.dtype, torch.float32))

    def forward(self, x: Tensor) -> Features:
        h = self.stem(x)
        maps = []
        for stage in self.stages:
            h = stage(h)
            maps.append(h)
        return Features(tuple(maps), self.pool(h))
