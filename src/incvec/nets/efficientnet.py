"""EfficientNet-Lite0, the default backbone of the classifier: its ImageNet weights are installed by pip, without a hub.

The stages of EfficientNet-B0 (Tan and Le, 2019, https://arxiv.org/abs/1905.11946) without squeeze-and-excitation, with
ReLU6 and TensorFlow's "same" padding, which for a stride of 2 adds one row more at the bottom and right than at the top
and left. Each block is: 1x1 expansion, depthwise convolution, 1x1 projection, and the input added if shapes agree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.errors import DataError
from incvec.nets.packages import IMAGE_FILE, IMAGE_SHA256, verified_file
from incvec.nets.resnet import Backbone, Norm

EPS = 1e-3  # of BatchNorm
WIDTH = 1280  # of the features


class Blocks(NamedTuple):
    """One stage: number of blocks, channels, kernel, stride of the first block, expansion."""

    blocks: int
    channels: int
    kernel: int
    stride: int
    expansion: int


LITE0 = (
    Blocks(1, 16, 3, 1, 1),
    Blocks(2, 24, 3, 2, 6),
    Blocks(2, 40, 5, 2, 6),
    Blocks(3, 80, 3, 2, 6),
    Blocks(3, 112, 5, 1, 6),
    Blocks(4, 192, 5, 2, 6),
    Blocks(1, 320, 3, 1, 6),
)


class ConvNorm(nn.Module):
    """Convolution with "same" padding, BatchNorm and, unless `linear`, ReLU6."""

    def __init__(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, linear: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, groups=groups, bias=False)
        self.norm = Norm(out)
        self.norm.eps = EPS
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
        if kernel > 1:
            vertical, horizontal = (max(kernel - (side % stride or stride), 0) for side in x.shape[2:])
            x = F.pad(x, (horizontal // 2, horizontal - horizontal // 2, vertical // 2, vertical - vertical // 2))
        y: Tensor = self.norm(self.conv(x))
        return y if self.linear else F.relu6(y)


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.expand = ConvNorm(channels, inner) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(inner, inner, kernel, stride, groups=inner)
        self.project = ConvNorm(inner, out, linear=True)
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class EfficientNetLite0(Backbone):
    """Seven stages of inverted residuals; the last also has the 1x1 convolution to the 1,280 features."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        width = 32
        self.stem = ConvNorm(3, width, 3, 2)  # type: ignore[assignment]
        self.stages = nn.ModuleList()
        for plan in LITE0:
            stage = nn.Sequential()
            for index in range(plan.blocks):
                stride = plan.stride if index == 0 else 1
                stage.append(InvertedResidual(width, plan.channels, plan.kernel, stride, plan.expansion))
                width = plan.channels
            self.stages.append(stage)
        self.stages[-1].append(ConvNorm(width, WIDTH))  # type: ignore[operator]
        self.width = WIDTH


def lite0_weights() -> dict[str, Tensor]:
    """The packaged weights, under the names of `EfficientNetLite0`.

    The file lists its tensors in the order of the layers under other names, its classifier last.
    """
    path = verified_file(*IMAGE_FILE, IMAGE_SHA256)
    saved = torch.load(path, map_location="cpu", weights_only=True)
    values = [tensor for name, tensor in saved.items() if not name.endswith("num_batches_tracked")][:-2]
    with torch.device("meta"):
        own = EfficientNetLite0().state_dict()
    if [tensor.shape for tensor in own.values()] != [value.shape for value in values]:
        raise DataError(f"{path} does not have the tensors of EfficientNet-Lite0. Reinstall {IMAGE_FILE[0]}.")
    return dict(zip(own, values, strict=True))
