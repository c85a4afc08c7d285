"""Residual networks: a stem, stages that can be run one by one, and pooling.

`forward` is exactly `stem`, then each of `stages`, then `pool`, so that a method can run the parts itself and perturb
the input of a stage (MRFA).
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

StemKind = Literal["3x3", "3x3+pool", "7x7+pool"]
Shortcut = Literal["pad", "conv"]
Activation = Literal["every", "but-last", "but-stage-ends", "none"]
STRIDES: Mapping[StemKind, int] = {"3x3": 1, "3x3+pool": 2, "7x7+pool": 4}


class Features(NamedTuple):
    """Output of a backbone: the maps of every stage, and the pooled last one (float32 or wider)."""

    maps: tuple[Tensor, ...]
    features: Tensor


@dataclass(frozen=True)
class Level:
    """One stage: number of blocks, channels, and stride of the first block."""

    blocks: int
    channels: int
    stride: int


@dataclass(frozen=True)
class Plan:
    """A residual network as data.

    `activation` selects the residual additions that are followed by a ReLU: all, all but the network's last, all but
    the last of each stage, or none. (Between the two convolutions of a block and in the stem there always is one.)
    """

    summary: str
    levels: tuple[Level, ...]
    stem: StemKind = "3x3"
    shortcut: Shortcut = "pad"
    activation: Activation = "every"

    def last_side(self, side: int) -> int:
        """The side of the last maps for images of `side` pixels; every stride rounds up."""
        stride = STRIDES[self.stem] * math.prod(level.stride for level in self.levels)
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

    With a fixed momentum the counter is never read. It would cost one kernel per layer and step, and add an integer
    to the buffers, which merging and interpolation would have to skip. (torch's cumulative average, `momentum=None`,
    needs the counter; recalibration sums over batches instead.)
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
        # Without version metadata (a plain dict of tensors) torch assumes a state older than the counter, adds a
        # counter to it, and then rejects it as unexpected.
        super()._load_from_state_dict(state_dict, prefix, {**local_metadata, "version": 2}, *rest)


class PadShortcut(nn.Module):
    """Option A of the ResNet paper: strided pixels, and zeros for the new channels."""

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
        """The block by torch's operators."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y)) + self.shortcut(x)
        return F.relu(y, inplace=True) if self.relu else y


class Stem(nn.Module):
    """Convolution, normalization, ReLU and, for larger images, a max-pooling."""

    def __init__(self, channels: int, out: int, kind: StemKind) -> None:
        super().__init__()
        if kind == "7x7+pool":
            self.conv = nn.Conv2d(channels, out, 7, stride=2, padding=3, bias=False)
        else:
            self.conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm = Norm(out)
        self.pooled = kind != "3x3"

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.stem(self, x)
        return self.plain(x) if y is None else y

    @fused(dynamic=False)
    def plain(self, x: Tensor) -> Tensor:
        """The stem by torch's operators."""
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        return F.max_pool2d(y, 3, stride=2, padding=1) if self.pooled else y


class Backbone(nn.Module):
    """A stem and stages; `width` is the dimension of the pooled features."""

    stages: nn.ModuleList

    def __init__(self, plan: Plan, channels: int = 3) -> None:
        super().__init__()
        width = plan.levels[0].channels
        self.stem = Stem(channels, width, plan.stem)
        self.stages = nn.ModuleList()
        for i, level in enumerate(plan.levels):
            stage = nn.Sequential()
            for j in range(level.blocks):
                stride = level.stride if j == 0 else 1
                stage.append(Residual(width, level.channels, stride, plan.shortcut, plan.activated(i, j)))
                width = level.channels
            self.stages.append(stage)
        self.width = width

    def pool(self, h: Tensor) -> Tensor:
        """Mean over the positions, in float32 or wider."""
        return h.mean((2, 3), dtype=torch.promote_types(h.dtype, torch.float32))

    def forward(self, x: Tensor) -> Features:
        h = self.stem(x)
        maps = []
        for stage in self.stages:
            h = stage(h)
            maps.append(h)
        return Features(tuple(maps), self.pool(h))
