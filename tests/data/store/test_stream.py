"""A streamed source returns what a resident one returns, and reads ahead of the steps."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from incvec.contracts import Batch, Source
from incvec.data import Streamed, StreamedSource, load_dataset, make_source, make_views
from incvec.data.source import ImageSource
from incvec.data.store.mapped import Bytes, Rows
from incvec.data.views import ResizedViews
from tests.data.pictures import make_root, make_store

CPU = torch.device("cpu")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make_root(tmp_path_factory.mktemp("images"), train=8)
    return make_store(source, tmp_path_factory.mktemp("store") / "s", 16, shard_bytes=7 * 3 * 16 * 16).root


def sources(root: Path, device: str = "cpu") -> list[ImageSource]:
    """Resident and streamed."""
    both = []
    for placement in ("resident", "streamed"):
        data = load_dataset("packed", root, placement=placement)
        views = make_views(data, 0.2, *data.normalizations["default"])
        both.append(make_source(data.train_images, data.train_labels, views, torch.device(device)))
    return both


def assert_same(a: Batch, b: Batch) -> None:
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.indices, b.indices)
    assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))


def test_which_source_is_made(root: Path) -> None:
    resident, streamed = sources(root)
    assert type(resident) is ImageSource
    assert not isinstance(resident, Streamed)
    assert isinstance(streamed, Streamed)
    assert isinstance(streamed, Source)
    assert len(streamed) == len(resident) == 24
    assert torch.equal(streamed.counts(), resident.counts())
    assert torch.equal(streamed.rows_of(1, 3), resident.rows_of(1, 3))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_fetch_returns_the_same(root: Path, device: str) -> None:
    resident, streamed = sources(root, device)
    rows = torch.tensor([23, 0, 7, 7, 14, 1], device=device)
    for views in (("test",), ("train", "strong", "raw")):
        one, other = (torch.Generator(device).manual_seed(5) for _ in range(2))
        assert_same(resident.fetch(rows, one, views), streamed.fetch(rows, other, views))


def epoch(streamed: StreamedSource, order: torch.Tensor, generator: torch.Generator) -> Iterator[Batch]:
    """As in the engine: `ahead` with all rows, then `next` before each step."""
    streamed.ahead(order)
    for rows in order:
        streamed.next()
        yield streamed.staged(rows, generator, ("train", "test"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("batch", [1, 4, 6])
def test_steps_see_the_announced_rows(root: Path, device: str, batch: int) -> None:
    resident, streamed = sources(root, device)
    one, other = (torch.Generator(device).manual_seed(5) for _ in range(2))
    for seed in range(3):
        shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(seed)).view(-1, batch).to(device)
        for rows, seen in zip(shuffled, epoch(streamed, shuffled, other), strict=True):
            assert_same(resident.fetch(rows, one, ("train", "test")), seen)


def test_staged_reads_one_address(root: Path) -> None:
    """A captured step keeps the address, so it must not change between epochs or stages of other batch sizes."""
    _, streamed = sources(root)
    order = torch.arange(24).view(-1, 4)
    streamed.ahead(order)
    streamed.next()
    address = streamed._buffer(4).data_ptr()
    streamed.ahead(torch.arange(24).view(-1, 6))
    streamed.next()
    streamed.ahead(order.flip(0))
    streamed.next()
    assert streamed._buffer(4).data_ptr() == address


def test_smaller_batches_take_no_further_memory(root: Path) -> None:
    """The last batch of an epoch has another size in every task."""
    resident, streamed = sources(root)
    for size in (6, 5, 3, 1):
        streamed.ahead(torch.arange(18).view(-1, 6), torch.arange(18, 18 + size))
        for _ in range(4):
            streamed.next()
        rows = torch.arange(18, 18 + size)
        assert_same(resident.fetch(rows, None, ("test",)), streamed.staged(rows, None, ("test",)))
        assert streamed._buffer(size).data_ptr() == streamed._buffer(6).data_ptr()
    assert len(streamed._buffers) == 1


def feed_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "incvec-feed"}


def test_the_thread_of_a_dropped_source_ends(root: Path) -> None:
    before = feed_threads()
    _, streamed = sources(root)
    streamed.ahead(torch.arange(24).view(-1, 1))
    streamed.next()
    (feed,) = feed_threads() - before
    del streamed
    gc.collect()
    feed.join(5)
    assert not feed.is_alive()


def test_an_epoch_can_be_interrupted(root: Path) -> None:
    resident, streamed = sources(root)
    before = feed_threads()
    order = torch.arange(24).view(-1, 2)
    for _ in range(5):
        streamed.ahead(order)
        streamed.next()
        streamed.next()
    streamed.close()
    assert not feed_threads() - before
    last = list(epoch(streamed, order, torch.Generator()))[-1]
    assert torch.equal(last.views[1], resident.fetch(order[-1], None, ("test",)).images)


def test_reading_ahead_is_limited(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_dataset("packed", root, placement="streamed")
    streamed = StreamedSource(
        data.train_images, data.train_labels, make_views(data, 0.0, *data.normalizations["default"]), depth=3
    )
    reads, enough = [], threading.Event()
    plain = streamed.reader.read

    def read(rows: Rows, out: Bytes) -> None:
        plain(rows, out)
        reads.append(rows.tolist())
        if len(reads) == 3:
            enough.set()

    monkeypatch.setattr(streamed.reader, "read", read)
    streamed.ahead(torch.arange(24).view(-1, 2))
    assert enough.wait(5)
    streamed._feed.join(0.1)
    assert reads == [[0, 1], [2, 3], [4, 5]]
    streamed.next()
    streamed.close()


def test_reader_errors_are_raised_in_the_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, streamed = sources(root)

    def fail(rows: Rows, out: Bytes) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(streamed.reader, "read", fail)
    streamed.ahead(torch.arange(4).view(2, 2))
    with pytest.raises(OSError, match="the disk is gone"):
        streamed.next()
    with pytest.raises(RuntimeError, match="`ahead`"):
        streamed.next()


def test_rows_can_be_appended(root: Path) -> None:
    resident, streamed = sources(root)
    new = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for source in (resident, streamed):
        assert source.append(new, torch.tensor([1, 2])).tolist() == [24, 25]
    order = torch.tensor([[25, 0], [3, 24]])
    for rows, seen in zip(order, epoch(streamed, order, torch.Generator()), strict=True):
        assert torch.equal(seen.views[1], resident.fetch(rows, None, ("test",)).images)
    assert_same(
        resident.fetch(torch.tensor([24, 5]), None, ("raw",)), streamed.fetch(torch.tensor([24, 5]), None, ("raw",))
    )
    with pytest.raises(ValueError, match="expected uint8"):
        streamed.append(new.float(), torch.tensor([1, 2]))


def test_padded_and_resized_views_by_the_stored_side(root: Path, tmp_path: Path) -> None:
    mean, std = (0.5,) * 3, (0.2,) * 3
    assert not isinstance(make_views(load_dataset("packed", root), 0.0, mean, std), ResizedViews)
    large = make_store(make_root(tmp_path / "images"), tmp_path / "large", 128).root
    data = load_dataset("packed", large, image_size=96)
    for size, side in ((None, 96), (64, 64)):  # the size of the network overrides that of the data set
        views = make_views(data, 0.0, mean, std, size)
        assert isinstance(views, ResizedViews)
        assert (views.stored, views.side) == (128, side)
    upscaled = make_views(data, 0.0, mean, std, 160)
    assert upscaled("test", data.train_images.resident(CPU)[:1]).shape == (1, 3, 160, 160)


def captured(step: Callable[[], None], device: str) -> Callable[[], None]:
    """The step as a CUDA graph; on a CPU, the step itself."""
    if device == "cpu":
        return step
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("slow", ["none", "steps", "reader"])
def test_captured_steps_see_whole_epochs(root: Path, device: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the device between the steps, so reader and steps may overtake each other."""
    resident, streamed = sources(root, device)
    read = streamed.reader.read
    if slow == "reader":
        monkeypatch.setattr(streamed.reader, "read", lambda rows, out: (time.sleep(0.003), read(rows, out)))
    order = torch.arange(24, device=device).view(12, 2)
    cursor = torch.zeros(1, dtype=torch.int64, device=device)
    seen = torch.zeros(12, 2, 3, 16, 16, device=device)
    labels = torch.zeros(12, 2, dtype=torch.int64, device=device)

    def step() -> None:
        batch = streamed.staged(order.index_select(0, cursor)[0], None, ("raw",))
        if slow == "steps" and device == "cuda":
            torch.cuda._sleep(2_000_000)  # a millisecond, with the batch read before and after
        seen.index_copy_(0, cursor, batch.images[None])
        labels.index_copy_(0, cursor, batch.labels[None])
        cursor.add_(1)

    run = captured(step, device)
    for seed in range(4):
        order.copy_(torch.randperm(24, generator=torch.Generator().manual_seed(seed)).view(12, 2))
        cursor.zero_()
        seen.zero_()
        streamed.ahead(order)
        for _ in order:
            streamed.next()
            run()
        for number, rows in enumerate(order):
            expected = resident.fetch(rows, None, ("raw",))
            assert torch.equal(seen[number], expected.images)
            assert torch.equal(labels[number], expected.labels)


def test_more_steps_than_announced_are_an_error(root: Path) -> None:
    _, streamed = sources(root)
    streamed.ahead(torch.arange(4).view(2, 2))
    streamed.next()
    streamed.next()
    with pytest.raises(RuntimeError, match="announce the next ones first"):
        streamed.next()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_resident_images_are_shared_while_in_use(root: Path, device: str) -> None:
    data = load_dataset("packed", root, placement="resident")
    views = make_views(data, 0.0, *data.normalizations["default"])

    def make() -> ImageSource:
        return make_source(data.train_images, data.train_labels, views, torch.device(device))

    one, other = make(), make()
    assert one.images.data_ptr() == other.images.data_ptr()
    one.append(one.images[:1], torch.tensor([0]))
    assert (len(one.images), len(other.images)) == (25, 24)
    assert torch.equal(one.images[:24], other.images)
    del one, other
    gc.collect()
    assert not data.train_images._residents
