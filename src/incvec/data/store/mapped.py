"""Images in memory-mapped files, read row by row on demand, or copied to the device once."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from incvec.data.options import Placement

MEMORY_FRACTION = 0.6  # of the free memory, for resident images; the rest is for the network
Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]


@cache
def reader_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="incvec-read")


class PackedImages:
    """uint8 images [N, C, H, W] in memory-mapped files: shape and dtype of a tensor, read by `gather`."""

    dtype = torch.uint8

    def __init__(
        self, shards: Sequence[tuple[Path, int]], rows: Rows, shape: tuple[int, int, int], placement: Placement | None
    ) -> None:
        self.shards, self.rows, self.row, self.placement = tuple(shards), rows, shape, placement
        self.row_bytes = math.prod(shape)
        self._starts: Rows = np.cumsum([0, *(rows for _, rows in shards)], dtype=np.int64)
        self._maps: list[tuple[mmap.mmap, Bytes] | None] = [None] * len(self.shards)
        self._residents: weakref.WeakValueDictionary[torch.device, Tensor] = weakref.WeakValueDictionary()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.row))

    @property
    def nbytes(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return 4

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Tensor:
        out = torch.empty(1, *self.row, dtype=torch.uint8)
        self.gather(np.asarray([row], dtype=np.int64), out.numpy())
        return out[0]

    def select(self, rows: Rows) -> PackedImages:
        """The given rows of the same files."""
        return PackedImages(self.shards, self.rows[rows], self.row, self.placement)

    def _map(self, shard: int) -> tuple[mmap.mmap, Bytes]:
        mapping = self._maps[shard]
        if mapping is None:
            path, rows = self.shards[shard]
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            array = np.frombuffer(mapped, dtype=np.uint8, count=rows * self.row_bytes).reshape(rows, *self.row)
            mapping = self._maps[shard] = mapped, array
        return mapping

    def _locate(self, rows: Rows) -> tuple[list[int], list[int]]:
        """The shard of every row, and the row in it."""
        stored = self.rows[rows]
        shards = np.searchsorted(self._starts, stored, side="right") - 1
        return shards.tolist(), (stored - self._starts[shards]).tolist()

    def will_need(self, rows: Rows) -> None:
        """Ask the system to start reading these rows, without waiting."""
        advice = getattr(mmap, "MADV_WILLNEED", None)
        if advice is None:
            return
        for shard, row in zip(*self._locate(rows), strict=True):
            first = row * self.row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            self._map(shard)[0].madvise(advice, first, (row + 1) * self.row_bytes - first)

    def gather(self, rows: Rows, out: Bytes) -> None:
        """Copy the given rows into `out` [len(rows), C, H, W], in several threads."""
        shards, inner = self._locate(rows)
        for shard in set(shards):
            self._map(shard)

        def copy(first: int, last: int) -> None:
            for i in range(first, last):
                out[i] = self._map(shards[i])[1][inner[i]]

        step = max(8, -(-len(rows) // reader_threads()._max_workers))
        if len(rows) <= step:
            return copy(0, len(rows))
        jobs: list[Future[None]] = [
            reader_threads().submit(copy, first, min(first + step, len(rows))) for first in range(0, len(rows), step)
        ]
        for job in jobs:
            job.result()

    def fits(self, device: torch.device) -> bool:
        """Whether all images should be copied to the device."""
        if self.placement is not None or device in self._residents:
            return self.placement != "streamed"
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:  # mapped pages are cached in memory anyway; a copy only helps small stores
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
        return self.nbytes <= MEMORY_FRACTION * free

    def to(self, device: torch.device | str) -> Tensor | PackedImages:
        """One tensor on the device if it fits, else `self`, to be streamed."""
        device = torch.device(device)
        return self.resident(device) if self.fits(device) else self

    def resident(self, device: torch.device) -> Tensor:
        """All images as one tensor on the device, copied in pieces; runs that share this object share the tensor."""
        shared = self._residents.get(device)
        if shared is not None:
            return shared
        images = torch.empty(self.shape, dtype=torch.uint8, device=device)
        step = max(1, (1 << 28) // max(1, self.row_bytes))
        pinned = device.type == "cuda"
        for first in range(0, len(self), step):
            rows = np.arange(first, min(first + step, len(self)), dtype=np.int64)
            if pinned:
                piece = torch.empty(len(rows), *self.row, dtype=torch.uint8, pin_memory=True)
                self.gather(rows, piece.numpy())
                images[first : first + len(rows)].copy_(piece, non_blocking=True)
            else:
                self.gather(rows, images[first : first + len(rows)].numpy())
        if pinned:
            torch.cuda.current_stream(device).synchronize()  # other streams read it
        self._residents[device] = images
        return images
