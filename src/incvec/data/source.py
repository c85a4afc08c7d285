"""Images on the device, fetched by index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from incvec.contracts import Batch, Source
from incvec.data.views import Views

CHUNK = 500  # rows a launch where nothing is trained
CHUNK_BYTES = 1 << 26  # of them at most, as float32 at the stored size: 500 rows of 64 x 64, 85 of 256 x 256


def chunk(source: Source) -> int:
    """Rows to fetch at a time for evaluation and features: one number, so that a compiled network is compiled once."""
    return max(1, min(CHUNK, CHUNK_BYTES // (4 * math.prod(source.row))))


class ImageSource:
    """A `Source` of uint8 images: the current task, the memory and the oracle's past are indices into it.

    Labels are positions in the class order. With `channels_last`, views come in that memory format.
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
        where = images.device if device is None else torch.device(device)
        self.images = images.to(where).contiguous()
        self.row = tuple(images.shape[1:])
        self.labels = labels.to(where).contiguous()
        self.views = views.to(where)
        self.channels_last = self.views.channels_last = channels_last

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(
        self, indices: Tensor, generator: torch.Generator | None = None, views: Sequence[str] = ("test",)
    ) -> Batch:
        """The named views of the given rows. Views are drawn one after the other, in the order named."""
        return self.develop(self.images.index_select(0, indices), indices, generator, views)

    def develop(self, rows: Tensor, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]) -> Batch:
        """The named views of these images, which are those of the given rows."""
        seen = tuple(self.views(name, rows, generator) for name in views)
        if self.channels_last:
            seen = tuple(view.contiguous(memory_format=torch.channels_last) for view in seen)
        return Batch(seen, self.labels.index_select(0, indices), indices)

    def append(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add rows and return their indices. Moves the storage, so never while a captured step is in use."""
        _check_rows(images, labels)
        if images.shape[1:] != self.images.shape[1:]:
            given, own = list(images.shape[1:]), list(self.images.shape[1:])
            raise ValueError(f"images of shape {given}, expected {own} as in the source")
        first = len(self)
        self.images = torch.cat([self.images, images.to(self.images.device)])
        self.labels = torch.cat([self.labels, labels.to(self.labels.device)])
        return torch.arange(first, len(self), device=self.labels.device)

    def rows_of(self, lo: int, hi: int) -> Tensor:
        """Indices of the rows with a label in [lo, hi), by label and then by index. Waits for the device."""
        rows = torch.nonzero((self.labels >= lo) & (self.labels < hi)).flatten()
        return rows[torch.argsort(self.labels[rows], stable=True)]

    def counts(self) -> Tensor:
        """Rows of each label, from 0 to the largest there is; int64 on the CPU."""
        return torch.bincount(self.labels).cpu()


def _check_rows(images: Tensor, labels: Tensor) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise ValueError(f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, C, H, W]")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}, expected int64 [{len(images)}]")
