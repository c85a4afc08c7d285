"""Resized crops on the device are those of torchvision; each sample has its own draws."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from incvec.data.resize import ResizedViews, resized_boxes, resizing
from incvec.data.views import DRAWING, NAMES, draw_boxes
from incvec.errors import ConfigError
from tests.data.pictures import photo

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BOXES = [(0, 0, 96, 96), (3, 11, 70, 40), (20, 5, 9, 85), (60, 60, 12, 12), (0, 95, 96, 1), (1, 2, 33, 47)]


def pictures(count, side=96):
    return torch.stack([v2.functional.pil_to_tensor(photo(seed, side, side)) for seed in range(count)])


def columns(boxes):
    return tuple(torch.tensor(boxes, dtype=torch.float32).unbind(1))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("out", [16, 32, 80])
def test_boxes_are_resized_as_torch_does_with_antialiasing(out):
    images = pictures(len(BOXES))
    mine = resized_boxes(images, columns(BOXES), out)
    for image, seen, (top, left, height, width) in zip(images, mine, BOXES, strict=True):
        box = image[None, :, top : top + height, left : left + width].float()
        theirs = F.interpolate(box, (out, out), mode="bilinear", antialias=True, align_corners=False)
        assert torch.allclose(seen, theirs[0], atol=2e-2)  # of 255


def test_boxes_are_resized_as_torchvision_does_with_pillow():
    """Pillow rounds to 8 bits after each of its two passes: a level at most, half of one on average at most."""
    images = pictures(len(BOXES))
    mine = resized_boxes(images, columns(BOXES), 32)
    for seed, (seen, (top, left, height, width)) in enumerate(zip(mine, BOXES, strict=True)):
        theirs = tv.pil_to_tensor(tv.resized_crop(photo(seed, 96, 96), top, left, height, width, [32, 32]))
        assert (seen - theirs).abs().max() <= 1.5
        assert (seen - theirs).abs().mean() <= 0.5


def test_without_antialiasing_the_test_above_would_fail():
    image = pictures(1)
    mine = resized_boxes(image, columns([(0, 0, 96, 96)]), 16)
    plain = F.interpolate(image.float(), (16, 16), mode="bilinear", align_corners=False)
    assert (mine - plain).abs().max() > 10


def test_weights_sum_to_one_and_stay_in_the_box():
    weights = resizing(torch.tensor([5.0, 0.0]), torch.tensor([9.0, 20.0]), 20, 6)
    assert weights.shape == (2, 6, 20)
    assert torch.allclose(weights.sum(2), torch.ones(2, 6))
    assert weights[0, :, :5].abs().max() == weights[0, :, 14:].abs().max() == 0
    whole = resizing(torch.tensor([0.0]), torch.tensor([7.0]), 7, 7)
    assert torch.allclose(whole[0], torch.eye(7), atol=1e-6)


def test_mirroring_is_part_of_the_weights():
    images = pictures(2)
    boxes = columns(BOXES[:2])
    mirrored = resized_boxes(images, boxes, 24, torch.tensor([True, False]))
    plain = resized_boxes(images, boxes, 24)
    assert torch.allclose(mirrored[0], plain[0].flip(-1), atol=1e-3)
    assert torch.allclose(mirrored[1], plain[1], atol=1e-3)


def test_the_train_view_is_its_draws_applied():
    images = pictures(6)
    views = ResizedViews(96, 40, True, 0.3, MEAN, STD)
    seen = views("train", images, seeded(3))
    draws = seeded(3)
    boxes = draw_boxes(images, draws, scale=(0.08, 1.0))
    mirrored = torch.rand(6, generator=draws) < 0.5
    factor = 0.7 + 0.6 * torch.rand(6, generator=draws)
    assert 0 < mirrored.sum() < 6
    for i in range(6):
        top, left, height, width = (int(edge[i]) for edge in boxes)
        box = images[i : i + 1, :, top : top + height, left : left + width].float()
        expected = F.interpolate(box, (40, 40), mode="bilinear", antialias=True)[0] / 255
        expected = expected.flip(-1) if mirrored[i] else expected
        expected = (expected * factor[i]).clamp(0, 1)
        assert torch.allclose(seen[i], tv.normalize(expected, MEAN, STD), atol=2e-3)


def test_boxes_have_torchvisions_law():
    """Shares of the area and aspects of many draws, beside torchvision's own."""
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


def test_the_test_view_is_torchvisions_resize_and_centre_crop():
    """Stored at 256, seen at 224: the very pixels."""
    from incvec.data.decode import fitted

    picture = photo(4, 400, 300)
    stored = torch.from_numpy(fitted(torch.from_numpy(np.array(picture)), 256).copy())[None]
    seen = ResizedViews(256, 224, True, 0.0, MEAN, STD)("test", stored)
    pixels = v2.Compose([v2.ToImage(), v2.Resize(256), v2.CenterCrop(224), v2.ToDtype(torch.float32, scale=True)])
    assert torch.allclose(seen[0], tv.normalize(pixels(picture), MEAN, STD), atol=1e-5)


def test_smaller_test_views_show_as_much_of_the_image():
    images = pictures(2, 64)
    views = ResizedViews(64, 28, True, 0.0, MEAN, STD)
    expected = F.interpolate(images[:, :, 4:60, 4:60].float() / 255, (28, 28), mode="bilinear", antialias=True)
    assert torch.allclose(views("raw", images), expected, atol=1e-4)
    assert torch.allclose(views("flipped", images), views("test", images).flip(-1))
    upright = ResizedViews(64, 28, False, 0.0, MEAN, STD)
    assert torch.equal(upright("flipped", images), upright("test", images))
    assert ResizedViews(64, 64, True, 0.0, MEAN, STD)("raw", images).equal(images.float() / 255)


@pytest.mark.parametrize("name", NAMES)
def test_every_view_has_the_networks_size_and_leaves_images_alone(name):
    images = pictures(3, 48)
    before = images.clone()
    views = ResizedViews(48, 32, True, 0.2, MEAN, STD).to("cpu")
    seen = views(name, images, seeded())
    assert seen.shape == (3, 3, 32, 32)
    assert seen.dtype == torch.float32
    assert torch.equal(images, before)
    assert torch.equal(seen, views(name, images, seeded()))
    assert torch.equal(seen, views(name, images, seeded(1))) == (name not in DRAWING)


def test_views_stay_exact_under_mixed_precision():
    images = pictures(2, 48)
    views = ResizedViews(48, 32, True, 0.2, MEAN, STD)
    plain = views("train", images, seeded())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(views("train", images, seeded()), plain)


def test_channels_last_and_refusals():
    views = ResizedViews(48, 32, True, 0.2, MEAN, STD)
    views.channels_last = True
    assert views("train", pictures(2, 48), seeded()).is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match="stored with 48"):
        ResizedViews(48, 64, True, 0.0, MEAN, STD)
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        views("trian", pictures(1, 48), seeded())
    with pytest.raises(ValueError, match="needs a generator"):
        views("strong", pictures(1, 48))
