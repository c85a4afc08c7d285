"""The source of images that are resident on the device, fetched by index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from incvec.contracts import Batch, Source
from incvec.data.views import Views

MAX_ROWS = 500  # per forward pass without training
MAX_BYTES = 1 << 26  # of these rows, as float32 at the stored size: 500 rows of 64 x 64, 85 of 256 x 256


def inference_batch_size(source: Source) -> int:
    """Rows to fetch at a time for evaluation and features; constant, so that a network is compiled once."""
    return max(1, min(MAX_ROWS, MAX_BYTES // (4 * math.prod(source.row))))


class ImageSource:
    """A `Source` of uint8 images; the current task, the memory and the oracle's past are indices into it.

    Labels are positions in the class order. With `channels_last`, views have that memory format.
    """

    labels: Tensor
    row: tuple[int, ...]

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        views: Views,
        device: torch.device | str | None = None,
        channels_last: bool = False,
    ) -> None:
        _check_rows(images, labels)
        device = images.device if device is None else torch.device(device)
        self.images = images.to(device).contiguous()
        self.row = tuple(images.shape[1:])
        self.labels = labels.to(device).contiguous()
        self.views = views.to(device)
        self.channels_last = self.views.channels_last = channels_last

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(
        self, indices: Tensor, generator: torch.Generator | None = None, views: Sequence[str] = ("test",)
    ) -> Batch:
        """The named views of the given rows, drawn in the order named."""
        return self.make_batch(self.images.index_select(0, indices), indices, generator, views)

    def make_batch(
        self, images: Tensor, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]
    ) -> Batch:
        """The named views of `images`, which are the rows `indices`."""
        tensors = tuple(self.views(name, images, generator) for name in views)
        if self.channels_last:
            tensors = tuple(view.contiguous(memory_format=torch.channels_last) for view in tensors)
        return Batch(tensors, self.labels.index_select(0, indices), indices)

    def append(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add rows and return their indices. Moves the storage, so a captured step must not be in use."""
        _check_rows(images, labels)
        if images.shape[1:] != self.images.shape[1:]:
            raise ValueError(f"images have shape {list(images.shape[1:])}, expected {list(self.images.shape[1:])}")
        first = len(self)
        self.images = torch.cat([self.images, images.to(self.images.device)])
        self.labels = torch.cat([self.labels, labels.to(self.labels.device)])
        return torch.arange(first, len(self), device=self.labels.device)

    def rows_of(self, lo: int, hi: int) -> Tensor:
        """Indices of the rows with a label in [lo, hi), sorted by label and index. Synchronizes with the device."""
        rows = torch.nonzero((self.labels >= lo) & (self.labels < hi)).flatten()
        return rows[torch.argsort(self.labels[rows], stable=True)]

    def counts(self) -> Tensor:
        """Number of rows per label, from 0 to the largest label; int64 on the CPU."""
        return torch.bincount(self.labels).cpu()


def _check_rows(images: Tensor, labels: Tensor) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise ValueError(f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, C, H, W]")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}, expected int64 [{len(images)}]")
