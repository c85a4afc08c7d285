"""BatchNorm layers: those of the plug-in's functions that networks, engine and study use, and one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from incvec.ivt.batchnorm import (
    STATISTICS,
    BatchNorm,
    Recalibration,
    batchnorm_layers,
    batchnorm_mode,
    recalibrate,
    running_statistics,
)

__all__ = [
    "STATISTICS",
    "BatchNorm",
    "Recalibration",
    "batchnorm_layers",
    "batchnorm_mode",
    "preserved_buffers",
    "recalibrate",
    "running_statistics",
]


@contextmanager
def preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Restores the module's buffers on exit, so that forward passes within leave the running statistics unchanged."""
    buffers = list(module.buffers())
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        torch._foreach_copy_(buffers, saved)
