"""Backbones by name.

Published methods use different variants of ResNet-32: they differ in the ReLUs after residual additions and in the
shortcuts that halve the map. The names say whose variant it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from incvec.errors import ConfigError, nearest
from incvec.nets.pretrained import build_external, check_external, is_external
from incvec.nets.resnet import Backbone, Level, Norm, Plan

_RESNET32 = (Level(5, 16, 1), Level(5, 32, 2), Level(5, 64, 2))
_RESNET18 = (Level(2, 64, 1), Level(2, 128, 2), Level(2, 256, 2), Level(2, 512, 2))
MIN_LAST_SIDE = 4  # smaller last maps lose most spatial information

BACKBONES: Mapping[str, Plan] = {
    "resnet32-rebuffi": Plan(
        "ResNet-32 of PODNet: padded shortcuts, no ReLU after any addition, the last block a fourth stage",
        (Level(5, 16, 1), Level(5, 32, 2), Level(4, 64, 2), Level(1, 64, 1)),
        activation="none",
    ),
    "resnet32-lucir": Plan(
        "ResNet-32 of LUCIR: convolved shortcuts, no ReLU after the last block",
        _RESNET32,
        shortcut="conv",
        activation="but-last",
    ),
    "resnet32-icarl": Plan(
        "ResNet-32 of LUCIR with its last ReLU kept, for iCaRL and plain fine-tuning",
        _RESNET32,
        shortcut="conv",
    ),
    "resnet32-pycil": Plan(
        "ResNet-32 of PyCIL: padded shortcuts, a ReLU after every block",
        _RESNET32,
    ),
    "resnet18-cifar": Plan(
        "ResNet-18 for 32x32 images: 3x3 stem, no max-pooling, total stride 8",
        _RESNET18,
        shortcut="conv",
    ),
    "resnet18-64": Plan(
        "ResNet-18 for 64x64 images: 3x3 stem and max-pooling, total stride 16 (a 4x4 map at the end)",
        _RESNET18,
        stem="3x3+pool",
        shortcut="conv",
    ),
    "resnet18-64-podnet": Plan(
        "ResNet-18 for 64x64 images without a ReLU after the last block of each stage",
        _RESNET18,
        stem="3x3+pool",
        shortcut="conv",
        activation="but-stage-ends",
    ),
    "resnet18-64-lucir": Plan(
        "ResNet-18 for 64x64 images without a ReLU after the last block",
        _RESNET18,
        stem="3x3+pool",
        shortcut="conv",
        activation="but-last",
    ),
    "resnet18": Plan(
        "ResNet-18 for 224x224 images: 7x7 stem of stride 2 and max-pooling, total stride 32",
        _RESNET18,
        stem="7x7+pool",
        shortcut="conv",
    ),
    "resnet18-podnet": Plan(
        "ResNet-18 (stride 32) without a ReLU after the last block of each stage",
        _RESNET18,
        stem="7x7+pool",
        shortcut="conv",
        activation="but-stage-ends",
    ),
    "resnet18-lucir": Plan(
        "ResNet-18 (stride 32) without a ReLU after the last block",
        _RESNET18,
        stem="7x7+pool",
        shortcut="conv",
        activation="but-last",
    ),
    "small": Plan(
        "three blocks of 8, 16 and 32 channels for 8x8 images, in the manner of resnet32-rebuffi",
        (Level(1, 8, 1), Level(1, 16, 2), Level(1, 32, 2)),
        activation="none",
    ),
    "tiny": Plan(
        "two blocks of 4 and 8 channels, for tests",
        (Level(1, 4, 1), Level(1, 8, 2)),
        activation="none",
    ),
}


def check_backbone(name: str) -> None:
    """Raise ConfigError for an unknown name."""
    if is_external(name):
        check_external(name)
    elif name not in BACKBONES:
        known = ", ".join(BACKBONES)
        raise ConfigError(
            f"unknown backbone {name!r}.{nearest(name, BACKBONES)} Available: {known}, lite0, timm/NAME and "
            "torchvision/NAME."
        )


def finer_backbone(name: str, side: int) -> str | None:
    """The same backbone with a stem of smaller stride, if the last maps of the named one are smaller than 4 x 4.

    Among several, the coarsest whose last maps are at least 4 x 4.
    """
    if name not in BACKBONES:
        return None
    plan = BACKBONES[name]
    own = plan.last_side(side)
    larger = {
        other: found.last_side(side)
        for other, found in BACKBONES.items()
        if replace(found, summary=plan.summary, stem=plan.stem) == plan and found.last_side(side) > own
    }
    if own >= MIN_LAST_SIDE or not larger:
        return None
    return min(larger, key=lambda other: (larger[other] < MIN_LAST_SIDE, abs(larger[other] - MIN_LAST_SIDE)))


def build_backbone(name: str, channels: int = 3, generator: torch.Generator | None = None) -> Backbone:
    """The named backbone for images of `channels` channels, on the CPU, its weights drawn from `generator`.

    Without a generator the draws come from a fresh one with seed 0. The global generator is not used.
    """
    check_backbone(name)
    if channels < 1:
        raise ValueError(f"a backbone needs images of at least 1 channel, not {channels}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    if is_external(name):
        return build_external(name, channels, generator)
    # torch's layers draw initial values from the global generator; all of them are replaced below.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        backbone = Backbone(BACKBONES[name], channels)
    initialize(backbone, generator)
    return backbone


@torch.no_grad()
def initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Convolutions from N(0, 2 / (k * k * channels out)), i.e. Kaiming-normal over fan-out; norms 1 and 0.

    PODNet's authors initialize the second norm of each block to 0. PyCIL, the likely code base of the IVT paper's
    numbers, initializes it to 1, and so do we.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            height, width = part.kernel_size
            deviation = math.sqrt(2 / (height * width * part.out_channels))
            drawn = torch.randn(part.weight.shape, generator=generator, device=generator.device)
            part.weight.copy_(drawn * deviation)
        elif isinstance(part, Norm):
            part.reset_running_stats()
            part.weight.fill_(1)
            part.bias.zero_()
