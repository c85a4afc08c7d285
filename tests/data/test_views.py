"""Views compared with plain per-sample operations and with torchvision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import functional as tv

from incvec.data import augment
from incvec.data.views import NAMES, Views
from incvec.errors import ConfigError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(b: int, c: int = 3, h: int = 6, w: int = 6) -> torch.Tensor:
    return torch.randint(1, 256, (b, c, h, w), generator=seeded(42), dtype=torch.uint8)


def crop(images: torch.Tensor, pad: int, generator: torch.Generator) -> torch.Tensor:
    """Zero padding on all sides, then a random crop."""
    top, left = augment.random_offsets(images, pad, generator)
    return augment.crop_and_flip(images, top, left, torch.zeros_like(top, dtype=torch.bool))


def test_crop_is_padding_and_slicing() -> None:
    images, pad = pictures(200, h=5, w=7), 2
    cropped = crop(images, pad, seeded())
    assert cropped.dtype == torch.uint8
    padded = F.pad(images, (pad, pad, pad, pad))
    found = []
    for image, result in zip(padded, cropped, strict=True):
        matches = [
            (i, j)
            for i in range(2 * pad + 1)
            for j in range(2 * pad + 1)
            if torch.equal(image[:, i : i + 5, j : j + 7], result)
        ]
        assert len(matches) == 1
        found += matches
    counts = torch.zeros(5, 5)
    for i, j in found:
        counts[i, j] += 1
    assert (counts > 0).all()  # every offset occurs: 200 draws of 25
    assert counts.sum(0).max() < 70  # and no row or column of them prevails: 40 expected
    assert counts.sum(1).max() < 70


def test_crop_without_padding_changes_nothing() -> None:
    images = pictures(3)
    assert torch.equal(crop(images, 0, seeded()), images)


def test_about_half_of_the_images_are_flipped() -> None:
    images = pictures(400)
    flipped = augment.random_flip(images, seeded())
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, images, strict=True)]
    unchanged = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(m != u for m, u in zip(mirrored, unchanged, strict=True))
    assert 160 < sum(mirrored) < 240


def test_crop_and_flip_in_one_gather_equals_one_after_the_other() -> None:
    images = pictures(64, h=5, w=8)
    generator = seeded(7)
    both = augment.crop_and_flip(
        images, *augment.random_offsets(images, 2, generator), augment.bernoulli(images, 0.5, generator)
    )
    generator = seeded(7)
    assert torch.equal(both, augment.random_flip(crop(images, 2, generator), generator))


def test_channels_last_images_are_cropped_the_same() -> None:
    images = pictures(8)
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(crop(last, 2, seeded()), crop(images, 2, seeded()))


def test_brightness_factors_are_uniform_and_per_sample() -> None:
    b = 63 / 255
    gray = torch.full((2000, 1, 2, 2), 0.5)
    factors = augment.jitter_factors(gray, b, seeded())
    assert factors.min() >= 1 - b - 1e-6
    assert factors.max() <= 1 + b + 1e-6
    assert len(factors.unique()) > 1900
    assert abs(factors.mean() - 1) < 4 * (b / math.sqrt(3)) / math.sqrt(2000)
    assert abs(factors.std() - b / math.sqrt(3)) < 0.01
    assert augment.adjust_brightness(torch.ones(50, 1, 1, 1), factors[:50]).max() == 1
    assert augment.jitter_factors(gray, 3.0, seeded()).min() >= 0


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue"])
def test_color_adjustments_agree_with_torchvision(name: str) -> None:
    images = torch.rand(40, 3, 5, 4, generator=seeded(1))
    images[0] = 0.3  # gray: no hue
    images[1, 0] = images[1, 1]  # ties of two channels
    images[2, 1] = images[2, 2]
    images[3, 0] = images[3, 2]
    images[4], images[5] = 0, 1
    factors = torch.linspace(-0.5, 0.5, 40) if name == "hue" else torch.linspace(0, 2, 40)
    ours = getattr(augment, f"adjust_{name}")(images, factors)
    theirs = torch.stack([getattr(tv, f"adjust_{name}")(x, f.item()) for x, f in zip(images, factors, strict=True)])
    assert torch.allclose(ours, theirs, atol=2e-5)


def test_random_gray_is_per_sample() -> None:
    images = torch.rand(1000, 3, 2, 2, generator=seeded(1))
    result = augment.random_gray(images, 0.2, seeded())
    gray = [torch.allclose(y, tv.rgb_to_grayscale(x, 3), atol=1e-6) for x, y in zip(images, result, strict=True)]
    unchanged = [torch.equal(y, x) for x, y in zip(images, result, strict=True)]
    assert all(g != u for g, u in zip(gray, unchanged, strict=True))
    assert 150 < sum(gray) < 250


def test_color_jitter_is_the_four_adjustments_in_the_stated_order() -> None:
    images = torch.rand(6, 3, 4, 4, generator=seeded(1))
    result = augment.color_jitter(images, 0.4, 0.3, 0.2, 0.1, seeded(9))
    generator = seeded(9)
    expected = images
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0.7, 1.3),
        ("saturation", 0.8, 1.2),
        ("hue", -0.1, 0.1),
    ):
        factors = low + (high - low) * torch.rand(6, generator=generator)
        expected = torch.stack(
            [getattr(tv, f"adjust_{name}")(x, f.item()) for x, f in zip(expected, factors, strict=True)]
        )
    assert torch.allclose(result, expected, atol=2e-5)
    one_channel = augment.color_jitter(images[:, :1], 0.4, 0.4, 0.4, 0.4, seeded())
    assert one_channel.shape == (6, 1, 4, 4)


def test_resize_box_is_a_slice_and_an_interpolation() -> None:
    images = torch.rand(5, 3, 9, 12, generator=seeded(1))
    boxes = [(0, 0, 9, 12), (2, 3, 4, 5), (8, 11, 1, 1), (0, 6, 3, 6), (4, 0, 5, 2)]
    top, left, height, width = (torch.tensor(x, dtype=torch.float32) for x in zip(*boxes, strict=True))
    ours = augment.resize_box(images, top, left, height, width)
    for image, result, (i, j, h, w) in zip(images, ours, boxes, strict=True):
        expected = F.interpolate(image[None, :, i : i + h, j : j + w], (9, 12), mode="bilinear", align_corners=False)
        assert torch.allclose(result, expected[0], atol=1e-5)


def test_random_resized_crop_draws_boxes_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(augment, "resize_box", lambda images, *box: drawn.append(torch.stack(box, 1)))
    augment.random_resized_crop(torch.zeros(4000, 3, 32, 32), seeded())
    top, left, height, width = drawn[0].unbind(1)
    assert torch.equal(drawn[0], drawn[0].round())
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 32).all()
    assert (left + width <= 32).all()
    share = height * width / 1024
    assert share.min() > 0.17
    assert share.max() <= 1
    assert 0.5 < share.mean() < 0.6  # U(0.2, 1), the largest boxes sometimes not fitting
    aspect = width / height
    assert aspect.min() > 0.75 * 0.9
    assert aspect.max() < 4 / 3 * 1.1
    assert abs(aspect.log().mean()) < 0.02
    assert abs((top / (32 - height)).nanmean() - 0.5) < 0.03
    assert len(drawn[0].unique(dim=0)) > 2000


def test_if_no_box_fits_the_largest_central_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drawn box has twice the area of the image."""
    boxes = []
    monkeypatch.setattr(augment, "resize_box", lambda images, *box: boxes.append([float(x[0]) for x in box]))
    for h, w in ((10, 10), (10, 40), (40, 10)):
        augment.random_resized_crop(torch.zeros(1, 3, h, w), seeded(), scale=(2, 2))
    # (top, left, height, width): the aspect stays within 3/4 and 4/3
    assert boxes == [[0, 0, 10, 10], [0, 14, 10, 13], [14, 0, 13, 10]]


def test_rotations_and_their_labels() -> None:
    images = torch.arange(2 * 1 * 2 * 2).view(2, 1, 2, 2).float()
    turned = augment.rotate90(images)
    assert turned.shape == (8, 1, 2, 2)
    assert turned[:4, 0].tolist() == [[[0, 1], [2, 3]], [[1, 3], [0, 2]], [[3, 2], [1, 0]], [[2, 0], [3, 1]]]
    for i in range(2):
        for k in range(4):
            assert torch.equal(turned[4 * i + k], torch.rot90(images[i], k, (1, 2)))
    assert augment.rotation_labels(torch.tensor([3, 1])).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


def test_rotations_preserve_channels_last() -> None:
    images = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    turned = augment.rotate90(images)
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(turned, augment.rotate90(images.contiguous()))


def test_deterministic_views() -> None:
    views, images = Views(2, True, 0.2, MEAN, STD), pictures(4)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    plain = (images.float() / 255 - mean) / std
    assert torch.allclose(views("test", images), plain, atol=1e-6)
    assert torch.allclose(views("flipped", images), plain.flip(-1), atol=1e-6)
    assert torch.equal(views("raw", images), images.float() / 255)
    assert torch.equal(Views(2, False, 0.2, MEAN, STD)("flipped", images), views("test", images))


def test_train_view_is_crop_flip_jitter_normalize() -> None:
    images = pictures(32)
    generator = seeded(3)
    expected = augment.random_flip(crop(images, 2, generator), generator).float() / 255
    factors = 0.8 + 0.4 * torch.rand(32, generator=generator)
    expected = torch.stack([tv.adjust_brightness(x, f.item()) for x, f in zip(expected, factors, strict=True)])
    expected = tv.normalize(expected, MEAN, STD)
    assert torch.allclose(Views(2, True, 0.2, MEAN, STD)("train", images, seeded(3)), expected, atol=1e-5)
    # without jitter and flip only the crop is left
    bare = Views(2, False, 0.0, (0.0,) * 3, (1.0,) * 3)("train", images, seeded(3))
    assert torch.equal(bare, crop(images, 2, seeded(3)).float() / 255)


def test_jitters_are_applied_one_after_the_other() -> None:
    """Each clamps to [0, 1], so two are not one with the product of the factors."""
    views, images = Views(0, False, 0.9, MEAN, STD), pictures(50)
    seen = views("train*3", images, seeded())
    generator = seeded()
    augment.random_offsets(images, 0, generator)
    expected = images.float() / 255
    for _ in range(3):
        factor = augment.jitter_factors(images, 0.9, generator)
        expected = (expected * factor[:, None, None, None]).clamp(0, 1)
    torch.testing.assert_close(seen, (expected - views.mean) / views.std)
    assert torch.equal(views("train*1", images, seeded()), views("train", images, seeded()))


def test_strong_view_is_its_steps_in_order() -> None:
    images = pictures(16, h=8, w=8)
    generator = seeded(4)
    expected = augment.random_resized_crop(images.float() / 255, generator)
    expected = augment.random_gray(expected, 0.2, generator)
    expected = augment.color_jitter(expected, 0.4, 0.4, 0.4, 0.4, generator)
    unflipped = expected
    expected = tv.normalize(augment.random_flip(expected, generator), MEAN, STD)
    assert torch.allclose(Views(2, True, 0.2, MEAN, STD)("strong", images, seeded(4)), expected, atol=1e-5)
    upright = Views(2, False, 0.2, MEAN, STD)("strong", images, seeded(4))
    assert torch.allclose(upright, tv.normalize(unflipped, MEAN, STD), atol=1e-5)


@pytest.mark.parametrize("name", ["train", "strong"])
@pytest.mark.parametrize("channels", [1, 3])
def test_random_views_differ_by_sample_and_repeat_by_seed(name: str, channels: int) -> None:
    views = Views(2, True, 0.25, (0.5,) * channels, (0.25,) * channels)
    images = pictures(1, channels, 8, 8).expand(64, -1, -1, -1)
    once, again, other = (views(name, images, seeded(s)) for s in (1, 1, 2))
    assert once.shape == images.shape
    assert once.dtype == torch.float32
    assert torch.isfinite(once).all()
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert len(once.flatten(1).unique(dim=0)) == 64  # one picture, 64 different views


def test_views_do_not_modify_their_images() -> None:
    images = pictures(4)
    before = images.clone()
    for name in NAMES:
        Views(2, True, 0.2, MEAN, STD)(name, images, seeded())
    assert torch.equal(images, before)


def test_wrong_names_and_values_are_refused() -> None:
    views, images = Views(2, True, 0.2, MEAN, STD), pictures(1)
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        views("trian", images, seeded())
    with pytest.raises(ValueError, match="needs a generator"):
        views("train", images)
    with pytest.raises(ConfigError, match="the same length"):
        Views(2, True, 0.2, MEAN, (0.5,))
    with pytest.raises(ConfigError, match="std > 0"):
        Views(2, True, 0.2, MEAN, (0.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="0 or more"):
        Views(-1, True, 0.2, MEAN, STD)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_fetch_can_be_captured(name: str) -> None:
    """A replayed fetch draws what an eager one draws, and continues to draw."""
    from incvec.data.source import ImageSource

    images = pictures(64, h=32, w=32)
    views = Views(4, True, 0.25, MEAN, STD)
    source = ImageSource(images, torch.zeros(64, dtype=torch.int64), views, "cuda", channels_last=True)
    indices = torch.arange(32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    eager = [source.fetch(indices, generator, (name,)).images.clone() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source.fetch(indices, generator, (name,))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = source.fetch(indices, generator, (name,)).images
    generator.manual_seed(0)
    for expected in eager:
        graph.replay()
        assert torch.allclose(captured, expected, atol=1e-5)
