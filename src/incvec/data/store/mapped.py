"""Images in mapped files: of a tensor's shape and type, copied row by row where they are needed, or once for good."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROOM = 0.6  # of the free memory: what resident images may take, the rest being the network's
Placement = Literal["resident", "streamed"]
Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]


@cache
def readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="incvec-read")


class PackedImages:
    """uint8 images [N, C, H, W] in mapped files: has a tensor's shape and type, and is read by `gather`."""

    dtype = torch.uint8

    def __init__(
        self, shards: Sequence[tuple[Path, int]], slots: Rows, row: tuple[int, int, int], placement: Placement | None
    ) -> None:
        self.shards, self.slots, self.row, self.placement = tuple(shards), slots, row, placement
        self._starts: Rows = np.cumsum([0, *(rows for _, rows in shards)], dtype=np.int64)
        self._maps: list[tuple[mmap.mmap, Bytes] | None] = [None] * len(self.shards)
        self._residents: weakref.WeakValueDictionary[torch.device, Tensor] = weakref.WeakValueDictionary()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.slots), *self.row))

    @property
    def nbytes(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return 4

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, row: int) -> Tensor:
        out = torch.empty(1, *self.row, dtype=torch.uint8)
        self.gather(np.asarray([row], dtype=np.int64), out.numpy())
        return out[0]

    def select(self, rows: Rows) -> PackedImages:
        """The given rows, as images of their own in the same files."""
        return PackedImages(self.shards, self.slots[rows], self.row, self.placement)

    def _map(self, shard: int) -> tuple[mmap.mmap, Bytes]:
        found = self._maps[shard]
        if found is None:
            path, rows = self.shards[shard]
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            array = np.frombuffer(mapped, dtype=np.uint8, count=rows * int(np.prod(self.row))).reshape(rows, *self.row)
            found = self._maps[shard] = mapped, array
        return found

    def _places(self, rows: Rows) -> tuple[list[int], list[int]]:
        """Shard and row in it, for every row."""
        slots = self.slots[rows]
        shards = np.searchsorted(self._starts, slots, side="right") - 1
        return shards.tolist(), (slots - self._starts[shards]).tolist()

    def will_need(self, rows: Rows) -> None:
        """Have the system begin to read these rows; waits for nothing."""
        advice = getattr(mmap, "MADV_WILLNEED", None)
        if advice is None:
            return
        size = int(np.prod(self.row))
        for shard, row in zip(*self._places(rows), strict=True):
            first = row * size // mmap.PAGESIZE * mmap.PAGESIZE
            self._map(shard)[0].madvise(advice, first, (row + 1) * size - first)

    def gather(self, rows: Rows, out: Bytes) -> None:
        """Copy the given rows into `out` [len(rows), C, H, W], in several threads."""
        shards, inner = self._places(rows)
        for shard in set(shards):
            self._map(shard)

        def copy(first: int, last: int) -> None:
            for i in range(first, last):
                out[i] = self._map(shards[i])[1][inner[i]]

        step = max(8, -(-len(rows) // readers()._max_workers))
        if len(rows) <= step:
            return copy(0, len(rows))
        jobs: list[Future[None]] = [
            readers().submit(copy, first, min(first + step, len(rows))) for first in range(0, len(rows), step)
        ]
        for job in jobs:
            job.result()

    def fits(self, device: torch.device) -> bool:
        """Whether all of it shall lie on the device, for good."""
        if self.placement is not None or device in self._residents:
            return self.placement != "streamed"
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:  # mapped pages are memory already; a copy is worth it for small stores alone
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
        return self.nbytes <= ROOM * free

    def to(self, device: torch.device | str) -> Tensor | PackedImages:
        """One tensor on the device where it fits, else itself, to be streamed."""
        where = torch.device(device)
        return self.resident(where) if self.fits(where) else self

    def resident(self, device: torch.device) -> Tensor:
        """All images as one tensor on the device, copied piece by piece; runs that share this object share it."""
        found = self._residents.get(device)
        if found is not None:
            return found
        images = torch.empty(self.shape, dtype=torch.uint8, device=device)
        step = max(1, (1 << 28) // max(1, int(np.prod(self.row))))
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
            torch.cuda.current_stream(device).synchronize()  # others read it on streams of their own
        self._residents[device] = images
        return images
