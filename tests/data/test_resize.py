"""Resizing of tensors and the views of large images agree with torch, torchvision and Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from incvec.data.augment import draw_boxes
from incvec.data.resize import resize_boxes, resize_matrix, resize_on_device
from incvec.data.views import NAMES, RANDOM, ResizedViews, Views
from incvec.errors import ConfigError
from tests.data.pictures import photo

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BOXES = [(0, 0, 96, 96), (3, 11, 70, 40), (20, 5, 9, 85), (60, 60, 12, 12), (0, 95, 96, 1), (1, 2, 33, 47)]


def photos(count: int, side: int = 96) -> torch.Tensor:
    return torch.stack([v2.functional.pil_to_tensor(photo(seed, side, side)) for seed in range(count)])


def columns(boxes: list[tuple[int, int, int, int]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(boxes, dtype=torch.float32).unbind(1))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 61), (75, 48), (30, 24), (24, 24)])
def test_images_are_resized_on_the_device_as_in_torchvision(height: int, width: int) -> None:
    images = torch.stack([v2.functional.pil_to_tensor(photo(seed, width, height)) for seed in range(2)])
    resized = resize_on_device(images, 24, 3)
    assert resized.dtype == torch.uint8
    assert resized.shape == (2, 3, 24, 24)
    bicubic = {"interpolation": v2.InterpolationMode.BICUBIC, "antialias": True}
    theirs = tv.center_crop(tv.resize(images, [24], **bicubic), [24, 24])
    assert (resized.int() - theirs.int()).abs().max() <= 1  # torchvision resizes bytes in integers on a CPU
    image = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    by_pillow = np.asarray(tv.center_crop(tv.resize(image, [24], **bicubic), [24, 24])).astype(int)
    assert np.abs(resized[0].permute(1, 2, 0).numpy().astype(int) - by_pillow).max() <= 1


def test_gray_images_get_the_channels_of_the_network() -> None:
    resized = resize_on_device(photos(2, 8)[:, :1], 16, 3)
    assert resized.shape == (2, 3, 16, 16)
    assert torch.equal(resized[:, 0], resized[:, 2])


def test_views_of_another_size_resize_first() -> None:
    views = Views(4, True, 0.0, MEAN, STD, size=24).to("cpu")
    images = photos(2, 40)[:, :, :, :37]
    seen = views("test", images)
    expected = (resize_on_device(images, 24, 3)[1, 2].float() / 255 - MEAN[2]) / STD[2]
    torch.testing.assert_close(seen[1, 2], expected)
    assert views("train", images, seeded()).shape == seen.shape == (2, 3, 24, 24)


@pytest.mark.parametrize("out", [16, 32, 80])
def test_boxes_are_resized_as_in_torch_with_antialiasing(out: int) -> None:
    images = photos(len(BOXES))
    mine = resize_boxes(images, columns(BOXES), out)
    for image, seen, (top, left, height, width) in zip(images, mine, BOXES, strict=True):
        box = image[None, :, top : top + height, left : left + width].float()
        theirs = F.interpolate(box, (out, out), mode="bilinear", antialias=True, align_corners=False)
        assert torch.allclose(seen, theirs[0], atol=2e-2)  # of 255


def test_boxes_are_antialiased() -> None:
    image = photos(1)
    mine = resize_boxes(image, columns([(0, 0, 96, 96)]), 16)
    plain = F.interpolate(image.float(), (16, 16), mode="bilinear", align_corners=False)
    assert (mine - plain).abs().max() > 10


def test_weights_sum_to_one_and_stay_in_the_box() -> None:
    weights = resize_matrix(torch.tensor([5.0, 0.0]), torch.tensor([9.0, 20.0]), 20, 6)
    assert weights.shape == (2, 6, 20)
    assert torch.allclose(weights.sum(2), torch.ones(2, 6))
    assert weights[0, :, :5].abs().max() == weights[0, :, 14:].abs().max() == 0
    whole = resize_matrix(torch.tensor([0.0]), torch.tensor([7.0]), 7, 7)
    assert torch.allclose(whole[0], torch.eye(7), atol=1e-6)


def test_flips_are_part_of_the_weights() -> None:
    images = photos(2)
    boxes = columns(BOXES[:2])
    flipped = resize_boxes(images, boxes, 24, torch.tensor([True, False]))
    plain = resize_boxes(images, boxes, 24)
    assert torch.allclose(flipped[0], plain[0].flip(-1), atol=1e-3)
    assert torch.allclose(flipped[1], plain[1], atol=1e-3)


def test_boxes_have_torchvisions_distribution() -> None:
    """Area fractions and aspect ratios of many draws."""
    count = 4000
    image = torch.zeros(1, 3, 256, 256, dtype=torch.uint8)
    _, _, height, width = draw_boxes(image.expand(count, 3, 256, 256), seeded(1), scale=(0.08, 1.0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = [v2.RandomResizedCrop(224).make_params([image]) for _ in range(count)]
        theirs = torch.tensor([(drawn["height"], drawn["width"]) for drawn in draws]).float()
    mine = torch.stack([height, width], 1)
    for measure in (lambda b: b.prod(1) / 256**2, lambda b: (b[:, 0] / b[:, 1]).log()):
        a, b = measure(mine), measure(theirs)
        assert abs(a.mean() - b.mean()) < 0.02
        assert abs(a.std() - b.std()) < 0.02


def test_crop_area_bounds_what_training_crops_show() -> None:
    corner = torch.zeros(200, 3, 64, 64, dtype=torch.uint8)
    corner[:, :, :8, :8] = 255
    shown = {}
    for area in (0.08, 0.9):
        seen = ResizedViews(64, 32, True, 0.0, MEAN, STD, crop_area=area)("train", corner, seeded())
        shown[area] = int((seen.flatten(1).amax(1) > seen.flatten(1).amin(1) + 1).sum())
    assert shown[0.9] > 1.5 * shown[0.08]


def test_smaller_test_views_show_as_much_of_the_image() -> None:
    images = photos(2, 64)
    views = ResizedViews(64, 28, True, 0.0, MEAN, STD)
    expected = F.interpolate(images[:, :, 4:60, 4:60].float() / 255, (28, 28), mode="bilinear", antialias=True)
    assert torch.allclose(views("raw", images), expected, atol=1e-4)
    assert torch.allclose(views("flipped", images), views("test", images).flip(-1))
    upright = ResizedViews(64, 28, False, 0.0, MEAN, STD)
    assert torch.equal(upright("flipped", images), upright("test", images))
    assert ResizedViews(64, 64, True, 0.0, MEAN, STD)("raw", images).equal(images.float() / 255)


@pytest.mark.parametrize("name", NAMES)
def test_every_view_has_the_input_size_and_does_not_modify_images(name: str) -> None:
    images = photos(3, 48)
    before = images.clone()
    views = ResizedViews(48, 32, True, 0.2, MEAN, STD).to("cpu")
    seen = views(name, images, seeded())
    assert seen.shape == (3, 3, 32, 32)
    assert seen.dtype == torch.float32
    assert torch.equal(images, before)
    assert torch.equal(seen, views(name, images, seeded()))
    assert torch.equal(seen, views(name, images, seeded(1))) == (name not in RANDOM)


def test_views_stay_exact_under_mixed_precision() -> None:
    images = photos(2, 48)
    views = ResizedViews(48, 32, True, 0.2, MEAN, STD)
    plain = views("train", images, seeded())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(views("train", images, seeded()), plain)


def test_channels_last_and_errors() -> None:
    views = ResizedViews(48, 32, True, 0.2, MEAN, STD)
    views.channels_last = True
    assert views("train", photos(2, 48), seeded()).is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match="stored with 48"):
        ResizedViews(48, 64, True, 0.0, MEAN, STD)
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        views("trian", photos(1, 48), seeded())
    with pytest.raises(ValueError, match="needs a generator"):
        views("strong", photos(1, 48))
