"""The source of resident images."""

from __future__ import annotations

import pytest
import torch

from incvec.contracts import Batch, Source
from incvec.data.source import ImageSource, inference_batch_size
from incvec.data.views import Views


@pytest.fixture
def source() -> ImageSource:
    images = torch.arange(6 * 3 * 4 * 4).view(6, 3, 4, 4).remainder(256).to(torch.uint8)
    labels = torch.tensor([2, 0, 1, 0, 2, 0])
    return ImageSource(images, labels, Views(1, True, 0.2, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)))


def test_an_image_source_is_a_source(source: ImageSource) -> None:
    assert isinstance(source, Source)
    assert len(source) == 6


def test_fetch_returns_views_labels_and_indices(source: ImageSource) -> None:
    indices = torch.tensor([4, 1, 1])
    generator = torch.Generator().manual_seed(3)
    batch = source.fetch(indices, generator, ("train", "test", "raw"))
    assert len(batch.views) == 3
    assert batch.images is batch.views[0]
    assert batch.labels.tolist() == [2, 0, 0]
    assert torch.equal(batch.indices, indices)
    assert torch.equal(batch.views[2], source.images[indices].float() / 255)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.5])
    expected = (source.images[indices].float() / 255 - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    assert torch.allclose(batch.views[1], expected, atol=1e-6)


def test_fetch_depends_on_its_generator_alone(source: ImageSource) -> None:
    indices = torch.arange(6)

    def images(seed: int) -> Batch:
        return source.fetch(indices, torch.Generator().manual_seed(seed), ("train", "train"))

    torch.manual_seed(0)
    once = images(1)
    torch.manual_seed(99)
    again = images(1)
    assert all(torch.equal(a, b) for a, b in zip(once.views, again.views, strict=True))
    assert not torch.equal(once.views[0], once.views[1])
    assert not torch.equal(once.images, images(2).images)
    before = torch.get_rng_state()
    source.fetch(indices, torch.Generator().manual_seed(0), ("train", "strong"))
    assert torch.equal(before, torch.get_rng_state())


def test_random_views_need_a_generator(source: ImageSource) -> None:
    source.fetch(torch.arange(2), None, ("test", "flipped", "raw"))
    for name in ("train", "strong"):
        with pytest.raises(ValueError, match=name):
            source.fetch(torch.arange(2), None, (name,))


def test_append_adds_rows(source: ImageSource) -> None:
    new = torch.full((2, 3, 4, 4), 7, dtype=torch.uint8)
    indices = source.append(new, torch.tensor([1, 3]))
    assert indices.tolist() == [6, 7]
    batch = source.fetch(indices, None, ("raw",))
    assert batch.labels.tolist() == [1, 3]
    assert torch.equal(batch.images, new.float() / 255)
    assert source.counts().tolist() == [3, 2, 2, 1]


def test_rows_of_sorts_by_label_then_index(source: ImageSource) -> None:
    assert source.rows_of(0, 3).tolist() == [1, 3, 5, 2, 0, 4]
    assert source.rows_of(1, 3).tolist() == [2, 0, 4]
    assert source.rows_of(3, 9).tolist() == []
    assert source.counts().tolist() == [3, 1, 2]


def test_channels_last_changes_only_the_memory_format(source: ImageSource) -> None:
    last = ImageSource(source.images, source.labels, source.views, channels_last=True)
    a, b = (s.fetch(torch.arange(4), torch.Generator().manual_seed(5), ("train",)).images for s in (source, last))
    assert torch.equal(a, b)
    assert b.is_contiguous(memory_format=torch.channels_last)
    assert not b.is_contiguous()


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2)),
    ],
)
def test_wrong_rows_are_refused(source: ImageSource, images: torch.Tensor, labels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        ImageSource(images, labels, source.views)
    with pytest.raises(ValueError, match="expected"):
        source.append(images, labels)


def test_appended_images_must_have_the_same_shape(source: ImageSource) -> None:
    with pytest.raises(ValueError, match=r"\[3, 5, 5\]"):
        source.append(torch.zeros(1, 3, 5, 5, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))


def test_large_images_are_fetched_in_smaller_chunks() -> None:
    """500 rows at a time, or 64 MiB of float32 if that is less."""

    def of(side: int) -> int:
        images, views = torch.zeros(1, 3, side, side, dtype=torch.uint8), Views(0, False, 0.0, (0.5,) * 3, (1,) * 3)
        return inference_batch_size(ImageSource(images, torch.zeros(1, dtype=torch.int64), views))

    assert [of(side) for side in (8, 32, 64, 256, 3000)] == [500, 500, 500, 85, 1]
