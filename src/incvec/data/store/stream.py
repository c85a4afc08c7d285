"""Images that do not fit on the device: read from memory-mapped files through pinned memory, ahead of the step.

A captured step cannot read host memory. It reads a buffer at a fixed address on the device (`staged`), which the loop
fills between two steps: `ahead` announces the rows of an epoch, `next` loads the next batch. A thread copies rows into
pinned buffers and sends them on a separate CUDA stream, a few batches ahead.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from incvec.contracts import Batch, Source
from incvec.data.dataset import Images
from incvec.data.source import ImageSource
from incvec.data.store.mapped import Bytes, PackedImages, Rows
from incvec.data.views import Views

DEPTH = 4  # batches in flight
READ_AHEAD = 8  # batches that the system is asked to read


@runtime_checkable
class Streamed(Source, Protocol):
    """A source whose rows are copied to the device before a captured step reads them."""

    def ahead(self, rows: Tensor, last: Tensor | None = None) -> None:
        """Announce the rows of the next steps, [steps, batch], and those of a smaller batch after them, if any.

        Batches still in flight are dropped.
        """
        ...

    def next(self) -> None:
        """Load the images of the next step into the buffer that `staged` reads; called before each step."""
        ...

    def staged(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]) -> Batch:
        """`fetch` inside a step, static tensor code: `indices` are the rows that `next` has loaded."""
        ...


class Slot:
    """One batch in flight: a pinned buffer, its copy on the device, and the events that order the two."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.count = 0  # rows in use
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=stream is not None)
        self.array = self.host.numpy()
        self.device = self.host
        self.arrived: torch.cuda.Event | None = None
        self.taken: torch.cuda.Event | None = None
        if stream is not None:
            self.device = torch.empty(shape, dtype=torch.uint8, device=device)
            # Two streams use this memory: it must not be reused before both are done, nor filled before work that is
            # queued on the current one has ended, which may still use it.
            self.device.record_stream(stream)
            self.arrived = torch.cuda.Event(blocking=True)  # waits without spinning: readers need the cores
            self.taken = torch.cuda.Event()
            self.taken.record(torch.cuda.current_stream(device))

    def send(self, stream: torch.cuda.Stream | None) -> None:
        """Queue the copy to the device, after the previous one was taken."""
        if stream is None or self.arrived is None or self.taken is None:
            return
        with torch.cuda.stream(stream):
            stream.wait_event(self.taken)
            self.device[: self.count].copy_(self.host[: self.count], non_blocking=True)
            self.arrived.record(stream)

    def take(self, into: Tensor) -> None:
        """Queue, on the current stream, the copy into the buffer that the step reads."""
        rows = self.device[: self.count]
        if self.arrived is None or self.taken is None:
            into.copy_(rows)
            return
        current = torch.cuda.current_stream(into.device)
        current.wait_event(self.arrived)
        into.copy_(rows, non_blocking=True)
        self.taken.record(current)

    def wait_sent(self) -> None:
        """Wait until the pinned buffer may be written again."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Reader:
    """Reads rows of packed images and of images appended to them."""

    def __init__(self, packed: PackedImages) -> None:
        self.packed = packed
        self.extra = torch.empty(0, *packed.row, dtype=torch.uint8)

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the rows into `out`."""
        stored = len(self.packed)
        inside = rows < stored
        if inside.all():
            self.packed.gather(rows, out)
            return
        buffer = np.empty((int(inside.sum()), *self.packed.row), np.uint8)
        self.packed.gather(rows[inside], buffer)
        out[inside] = buffer
        out[~inside] = self.extra.numpy()[rows[~inside] - stored]

    def will_need(self, rows: Rows) -> None:
        self.packed.will_need(rows[rows < len(self.packed)])


class Feed(threading.Thread):
    """Reads the batches of one epoch in order, each into the next free slot."""

    def __init__(
        self, reader: Reader, order: Sequence[Rows], slots: Sequence[Slot], stream: torch.cuda.Stream | None
    ) -> None:
        super().__init__(daemon=True, name="incvec-feed")
        self.reader, self.order, self.stream = reader, order, stream
        self.free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self.full: queue.SimpleQueue[Slot | BaseException] = queue.SimpleQueue()
        for slot in slots:
            self.free.put(slot)

    def run(self) -> None:
        try:
            for step, rows in enumerate(self.order):
                slot = self.free.get()
                if slot is None:
                    return
                first = step if step == 0 else step + READ_AHEAD - 1
                for later in self.order[first : step + READ_AHEAD]:
                    self.reader.will_need(later)
                slot.wait_sent()
                slot.count = len(rows)
                self.reader.read(rows, slot.array[: slot.count])
                slot.send(self.stream)
                self.full.put(slot)
            self.full.put(
                RuntimeError("all batches announced by `ahead` have been loaded: announce the next ones first")
            )
        except BaseException as error:
            self.full.put(error)

    def cancel(self) -> None:
        """Stop after the current batch."""
        while True:  # free slots would let it continue
            try:
                self.free.get_nowait()
            except queue.Empty:
                break
        self.free.put(None)


class StreamedSource(ImageSource):
    """A `Source` of packed images that stay in their files; see `Streamed` for how steps read it.

    `fetch` reads rows immediately and waits for them: evaluation and herding use it between steps.
    """

    def __init__(
        self,
        images: PackedImages,
        labels: Tensor,
        views: Views,
        device: torch.device | str | None = None,
        channels_last: bool = False,
        depth: int = DEPTH,
    ) -> None:
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}, expected int64 [{len(images)}]")
        self.device = torch.device("cpu" if device is None else device)
        self.reader = Reader(images)
        self.row = images.row
        self.labels = labels.to(self.device).contiguous()
        self.views = views.to(self.device)
        self.channels_last = self.views.channels_last = channels_last
        self.depth = depth
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._slots: list[Slot] = []
        self._buffers: list[Tensor] = []  # each larger than those before it
        self._feed: Feed | None = None
        self._end: weakref.finalize[[], StreamedSource] | None = None

    def fetch(
        self, indices: Tensor, generator: torch.Generator | None = None, views: Sequence[str] = ("test",)
    ) -> Batch:
        host = torch.empty(len(indices), *self.row, dtype=torch.uint8, pin_memory=self.stream is not None)
        self.reader.read(indices.cpu().numpy(), host.numpy())
        return self.make_batch(host.to(self.device, non_blocking=True), indices, generator, views)

    def append(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add rows, which stay in host memory, and return their indices."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.row:
            raise ValueError(f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, *{self.row}]")
        first = len(self)
        self.reader.extra = torch.cat([self.reader.extra, images.cpu()])
        self.labels = torch.cat([self.labels, labels.to(self.device)])
        return torch.arange(first, len(self), device=self.device)

    def ahead(self, rows: Tensor, last: Tensor | None = None) -> None:
        self.close()
        order = list(rows.cpu().numpy())
        batch = rows.shape[1]
        if last is not None and len(last):
            order.append(last.cpu().numpy())
        if not self._slots or len(self._slots[0].host) < batch:
            self._slots = [Slot((batch, *self.row), self.device, self.stream) for _ in range(self.depth)]
        self._feed = Feed(self.reader, order, self._slots, self.stream)
        self._end = weakref.finalize(self, self._feed.cancel)  # when the source is dropped
        self._feed.start()

    def next(self) -> None:
        if self._feed is None:
            raise RuntimeError("`ahead` has to announce the rows of the next steps before `next` can load them")
        slot = self._feed.full.get()
        if isinstance(slot, BaseException):
            self._feed = None
            raise slot
        slot.take(self._buffer(slot.count))
        self._feed.free.put(slot)

    def staged(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]) -> Batch:
        return self.make_batch(self._buffer(len(indices)), indices, generator, views)

    def _buffer(self, batch: int) -> Tensor:
        """Where steps of this batch size read images: always the same memory, since a captured step keeps its address.

        Smaller batches use a part of a buffer that exists: the last batch has another size in every task.
        """
        if not self._buffers or len(self._buffers[-1]) < batch:
            self._buffers.append(torch.zeros(batch, *self.row, dtype=torch.uint8, device=self.device))
        return next(buffer for buffer in self._buffers if len(buffer) >= batch)[:batch]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._end is not None:
            self._end.detach()
        if self._feed is not None:
            self._feed.cancel()
            self._feed.join()
            self._feed = None


def make_source(
    images: Images, labels: Tensor, views: Views, device: torch.device, channels_last: bool = False
) -> ImageSource:
    """Resident on the device if the images fit, else streamed to it."""
    placed = images.to(device)
    if isinstance(placed, PackedImages):
        return StreamedSource(placed, labels, views, device, channels_last)
    return ImageSource(placed, labels, views, device, channels_last)
