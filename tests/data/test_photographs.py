"""Views of two real photographs, scikit-learn's china.jpg and flower.jpg, compared with torchvision.

Each sample has its own box, flip and colors; torchvision applies the same ones, image by image.
"""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from incvec.data.augment import draw_boxes
from incvec.data.image_files import crop_square
from incvec.data.resize import resize_boxes
from incvec.data.views import ResizedViews, Views

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NAMES = ("china.jpg", "flower.jpg")
COUNT, SIDE = 24, 224
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.fixture(scope="module")
def photographs() -> torch.Tensor:
    """[2, 3, 427, 640]."""
    return torch.stack([torch.tensor(load_sample_image(name)).permute(2, 0, 1) for name in NAMES])


@pytest.fixture(scope="module")
def stored(photographs: torch.Tensor) -> torch.Tensor:
    """The two as packing stores them, alternating: [24, 3, 256, 256]."""
    rows = [crop_square(Image.fromarray(image.permute(1, 2, 0).numpy()), 256) for image in photographs]
    return torch.stack(rows * (COUNT // 2))


def seeded(device: str, seed: int = 5) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def box_of(boxes: tuple[torch.Tensor, ...], i: int) -> list[int]:
    return [int(edge[i]) for edge in boxes]


def normalized(image: torch.Tensor) -> torch.Tensor:
    return tv.normalize(image, MEAN, STD)


@pytest.mark.parametrize("device", DEVICES)
def test_boxes_are_torchvisions_resized_crops(photographs: torch.Tensor, device: str) -> None:
    """Boxes larger and smaller than the output."""
    images = photographs.repeat(COUNT // 2, 1, 1, 1).to(device)
    boxes = draw_boxes(images, seeded(device), scale=(0.08, 1.0))
    mine = resize_boxes(images, boxes, SIDE).cpu()
    assert boxes[2].min() < SIDE < boxes[2].max()
    for i, seen in enumerate(mine):
        rounded = tv.resized_crop(images[i].cpu(), *box_of(boxes, i), [SIDE, SIDE], antialias=True)
        assert (seen - rounded).abs().max() <= 1.5  # of 255: torchvision rounds after each of two passes
        assert (seen - rounded).abs().mean() <= 0.5
        exact = tv.resized_crop(images[i].cpu().float(), *box_of(boxes, i), [SIDE, SIDE], antialias=True)
        assert torch.allclose(seen, exact, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_train_view(stored: torch.Tensor, device: str) -> None:
    seen = ResizedViews(256, SIDE, True, 0.3, MEAN, STD).to(device)("train", stored.to(device), seeded(device)).cpu()
    draws, images = seeded(device), stored.to(device)
    boxes = draw_boxes(images, draws, scale=(0.08, 1.0))
    mirrored = torch.rand(COUNT, generator=draws, device=device) < 0.5
    factors = 0.7 + 0.6 * torch.rand(COUNT, generator=draws, device=device)
    assert 0 < mirrored.sum() < COUNT
    for i in range(COUNT):
        theirs = tv.resized_crop(stored[i].float() / 255, *box_of(boxes, i), [SIDE, SIDE], antialias=True)
        theirs = tv.horizontal_flip(theirs) if mirrored[i] else theirs
        theirs = normalized(tv.adjust_brightness(theirs, float(factors[i])))
        assert torch.allclose(seen[i], theirs, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_strong_view(stored: torch.Tensor, device: str) -> None:
    seen = ResizedViews(256, SIDE, True, 0.0, MEAN, STD).to(device)("strong", stored.to(device), seeded(device)).cpu()
    draws, images = seeded(device), stored.to(device)

    def uniform(low: float, high: float) -> list[float]:
        return (low + (high - low) * torch.rand(COUNT, generator=draws, device=device)).tolist()

    boxes = draw_boxes(images, draws, scale=(0.2, 1.0))
    gray = [draw < 0.2 for draw in uniform(0, 1)]
    brightness, contrast, saturation = uniform(0.6, 1.4), uniform(0.6, 1.4), uniform(0.6, 1.4)
    hue = uniform(-0.4, 0.4)
    mirrored = [draw < 0.5 for draw in uniform(0, 1)]
    assert 0 < sum(gray) < COUNT
    assert 0 < sum(mirrored) < COUNT
    for i in range(COUNT):
        theirs = tv.resized_crop(stored[i].float() / 255, *box_of(boxes, i), [SIDE, SIDE], antialias=True)
        theirs = tv.rgb_to_grayscale(theirs, 3) if gray[i] else theirs
        theirs = tv.adjust_contrast(tv.adjust_brightness(theirs, brightness[i]), contrast[i])
        theirs = tv.adjust_hue(tv.adjust_saturation(theirs, saturation[i]), hue[i])
        theirs = normalized(tv.horizontal_flip(theirs) if mirrored[i] else theirs)
        assert torch.allclose(seen[i], theirs, atol=5e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_test_views(photographs: torch.Tensor, stored: torch.Tensor, device: str) -> None:
    resize = v2.Resize(256, v2.InterpolationMode.BICUBIC)
    usual = v2.Compose([resize, v2.CenterCrop(SIDE), v2.ToDtype(torch.float32, scale=True)])
    views = ResizedViews(256, SIDE, True, 0.3, MEAN, STD).to(device)
    for i, image in enumerate(photographs):
        theirs = normalized(usual(image))
        row = stored[i : i + 1].to(device)
        assert torch.allclose(views("test", row)[0].cpu(), theirs, atol=1e-5)
        assert torch.allclose(views("flipped", row)[0].cpu(), tv.horizontal_flip(theirs), atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_padded_crops(stored: torch.Tensor, device: str) -> None:
    """The train view of small images, RandomCrop with padding, flip, brightness."""
    small = tv.resize(stored, [64, 64], antialias=True)
    views = Views(8, True, 0.3, MEAN, STD).to(device)
    seen = views("train", small.to(device), seeded(device)).cpu()
    draws = seeded(device)
    top, left = (8 + torch.randint(-8, 9, (2, COUNT), generator=draws, device=device)).tolist()
    mirrored = torch.rand(COUNT, generator=draws, device=device) < 0.5
    factors = 0.7 + 0.6 * torch.rand(COUNT, generator=draws, device=device)
    for i in range(COUNT):
        theirs = tv.crop(tv.pad(small[i], [8]), top[i], left[i], 64, 64)
        theirs = tv.horizontal_flip(theirs) if mirrored[i] else theirs
        theirs = tv.adjust_brightness(theirs.float() / 255, float(factors[i]))
        assert torch.allclose(seen[i], normalized(theirs), atol=1e-5)
