"""Images that do not fit on the device: read from mapped files through pinned memory, ahead of the step.

A captured step cannot read host memory. So the step reads a buffer at a fixed place on the device (`staged`), and the
loop fills it between two steps: `ahead` tells an epoch's rows, `next` brings the next batch. Behind them a thread
copies rows into pinned buffers and sends them on a stream of its own, a few batches ahead.
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
from incvec.data.dataset import Dataset, Images
from incvec.data.resize import ResizedViews
from incvec.data.source import ImageSource
from incvec.data.store.mapped import Bytes, PackedImages, Rows
from incvec.data.views import Views

DEPTH = 4  # batches on their way
LOOK = 8  # batches ahead that the system is told of


@runtime_checkable
class Streamed(Source, Protocol):
    """A source whose rows have to be brought to the device before a captured step can see them."""

    def ahead(self, rows: Tensor) -> None:
        """The rows of the coming steps, [steps, batch]; what was still on its way is dropped."""
        ...

    def next(self) -> None:
        """Bring the next step's images to where `staged` reads; called before each step."""
        ...

    def staged(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]) -> Batch:
        """`fetch` inside a step, static tensor code: `indices` are the rows that `next` has brought."""
        ...


class Slot:
    """One batch on its way: a pinned buffer, its copy on the device, and the events that order the two."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream | None) -> None:
        cuda = stream is not None
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=cuda)
        self.array = self.host.numpy()
        self.device = torch.empty(shape, dtype=torch.uint8, device=device) if cuda else self.host
        if stream is not None:
            # Two streams write to this memory; when it is dropped, nobody may have it before both are done.
            self.device.record_stream(stream)
        self.arrived = torch.cuda.Event(blocking=True) if cuda else None  # its waiter sleeps: readers need the cores
        self.taken = torch.cuda.Event() if cuda else None

    def send(self, stream: torch.cuda.Stream | None) -> None:
        """Queue the copy to the device, after the copy of before was taken."""
        if stream is None or self.arrived is None or self.taken is None:
            return
        with torch.cuda.stream(stream):
            stream.wait_event(self.taken)
            self.device.copy_(self.host, non_blocking=True)
            self.arrived.record(stream)

    def take(self, into: Tensor) -> None:
        """Queue, on the current stream, the copy into the place where the step reads."""
        if self.arrived is None or self.taken is None:
            into.copy_(self.device)
            return
        current = torch.cuda.current_stream(into.device)
        current.wait_event(self.arrived)
        into.copy_(self.device, non_blocking=True)
        self.taken.record(current)

    def wait_sent(self) -> None:
        """Until the pinned buffer may be written again."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Reader:
    """Rows of packed images, and of those that were appended to them."""

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

    def __init__(self, reader: Reader, order: Rows, slots: Sequence[Slot], stream: torch.cuda.Stream | None) -> None:
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
                first = step if step == 0 else step + LOOK - 1
                for later in self.order[first : step + LOOK]:
                    self.reader.will_need(later)
                slot.wait_sent()
                self.reader.read(rows, slot.array)
                slot.send(self.stream)
                self.full.put(slot)
            self.full.put(RuntimeError("every batch that `ahead` told has been brought: tell the next ones first"))
        except BaseException as error:
            self.full.put(error)

    def cancel(self) -> None:
        """Have it end after what it is doing."""
        while True:  # slots that are free are no signal to go on
            try:
                self.free.get_nowait()
            except queue.Empty:
                break
        self.free.put(None)


class StreamedSource(ImageSource):
    """A `Source` of packed images that stay in their files; see `Streamed` for how steps read it.

    `fetch` reads rows at once and waits for them: evaluation and herding do, between steps.
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
        self.where = torch.device("cpu" if device is None else device)
        self.reader = Reader(images)
        self.row = images.row
        self.labels = labels.to(self.where).contiguous()
        self.views = views.to(self.where)
        self.channels_last = self.views.channels_last = channels_last
        self.depth = depth
        self.stream = torch.cuda.Stream(self.where) if self.where.type == "cuda" else None
        self._slots: dict[int, list[Slot]] = {}
        self._places: dict[int, Tensor] = {}  # by batch size; a captured step keeps reading the same one
        self._batch = 0
        self._feed: Feed | None = None
        self._end: weakref.finalize[[], StreamedSource] | None = None

    def fetch(
        self, indices: Tensor, generator: torch.Generator | None = None, views: Sequence[str] = ("test",)
    ) -> Batch:
        host = torch.empty(len(indices), *self.row, dtype=torch.uint8, pin_memory=self.stream is not None)
        self.reader.read(indices.cpu().numpy(), host.numpy())
        return self.develop(host.to(self.where, non_blocking=True), indices, generator, views)

    def append(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add rows, kept in the host's memory, and return their indices."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.row:
            raise ValueError(f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, *{self.row}]")
        first = len(self)
        self.reader.extra = torch.cat([self.reader.extra, images.cpu()])
        self.labels = torch.cat([self.labels, labels.to(self.where)])
        return torch.arange(first, len(self), device=self.where)

    # Steps ----------------------------------------------------------------------------------------------

    def ahead(self, rows: Tensor) -> None:
        self.close()
        order = rows.cpu().numpy()
        self._batch = order.shape[1]
        shape = (self._batch, *self.row)
        if self._batch not in self._slots:
            self._slots[self._batch] = [Slot(shape, self.where, self.stream) for _ in range(self.depth)]
        self._place(self._batch)
        self._feed = Feed(self.reader, order, self._slots[self._batch], self.stream)
        self._end = weakref.finalize(self, self._feed.cancel)  # nobody is left to take what it reads
        self._feed.start()

    def next(self) -> None:
        if self._feed is None:
            raise RuntimeError("`ahead` has to tell the rows of the coming steps before `next` can bring them")
        slot = self._feed.full.get()
        if isinstance(slot, BaseException):
            self._feed = None
            raise slot
        slot.take(self._place(self._batch))
        self._feed.free.put(slot)

    def staged(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]) -> Batch:
        return self.develop(self._place(len(indices)), indices, generator, views)

    def _place(self, batch: int) -> Tensor:
        if batch not in self._places:
            self._places[batch] = torch.zeros(batch, *self.row, dtype=torch.uint8, device=self.where)
        return self._places[batch]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._end is not None:
            self._end.detach()
        if self._feed is not None:
            self._feed.cancel()
            self._feed.join()
            self._feed = None


def make_views(
    dataset: Dataset, brightness: float, mean: Sequence[float], std: Sequence[float], size: int | None = None
) -> Views:
    """What the network sees of a data set's images; `size` is the network's own wish, where it has one."""
    stored = dataset.train_images.shape[-1]
    if dataset.side is None or (size is not None and size > stored):
        return Views(dataset.pad, dataset.flip, brightness, mean, std, size)
    return ResizedViews(stored, size or dataset.side, dataset.flip, brightness, mean, std)


def make_source(
    images: Images, labels: Tensor, views: Views, device: torch.device, channels_last: bool = False
) -> ImageSource:
    """On the device where the images fit, streamed to it where they do not."""
    placed = images.to(device)
    if isinstance(placed, PackedImages):
        return StreamedSource(placed, labels, views, device, channels_last)
    return ImageSource(placed, labels, views, device, channels_last)
