"""Preparation for pre-trained networks, sentences, and FGVC-Aircraft in torchvision's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import FGVCAircraft
from torchvision.transforms.v2 import functional as tv

from incvec.data import Views, load_dataset
from incvec.data.datasets import check
from incvec.data.prepare import fitted
from incvec.data.prompts import TEMPLATES, sentences, spoken, templates
from incvec.errors import ConfigError, DataError


def pictures(height: int, width: int, channels: int = 3) -> torch.Tensor:
    smooth = torch.rand(2, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    large = torch.nn.functional.interpolate(smooth, size=(height, width), mode="bicubic").clamp(0, 1)
    return (255 * large).to(torch.uint8)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 61), (75, 48), (30, 24), (24, 24)])
def test_fitted_is_what_torchvision_does(height: int, width: int) -> None:
    images = pictures(height, width)
    wanted = tv.center_crop(
        tv.resize(images, [24], interpolation=tv.InterpolationMode.BICUBIC, antialias=True), [24, 24]
    )
    found = fitted(images, 24)
    assert found.dtype == torch.uint8
    assert found.shape == (2, 3, 24, 24)
    assert (found.int() - wanted.int()).abs().max() <= 1  # torchvision resizes bytes in integers on a CPU
    image = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    by_pillow = tv.center_crop(tv.resize(image, [24], interpolation=tv.InterpolationMode.BICUBIC), [24, 24])
    assert np.abs(found[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(by_pillow).astype(int)).max() <= 1


def test_gray_images_get_three_channels() -> None:
    found = fitted(pictures(8, 8, 1), 16)
    assert found.shape == (2, 3, 16, 16)
    assert torch.equal(found[:, 0], found[:, 2])


def test_views_of_a_size() -> None:
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    views = Views(4, True, 0.0, mean, std, size=24).to("cpu")
    images = pictures(40, 61)
    seen = views("test", images)
    assert seen.shape == (2, 3, 24, 24)
    wanted = (fitted(images, 24)[1, 2].float() / 255 - 0.41) / 0.28
    torch.testing.assert_close(seen[1, 2], wanted)
    assert views("train", images, torch.Generator().manual_seed(0)).shape == (2, 3, 24, 24)


def test_sentences() -> None:
    assert len(TEMPLATES["cifar100"]) == len(set(TEMPLATES["cifar100"])) == 18
    assert TEMPLATES["cifar100"][0] == "a photo of a {}."
    assert TEMPLATES["cifar100"][-1] == "a photo of the big {}."
    assert sentences(TEMPLATES["aircraft"][1], ["707-320"]) == ["a photo of the 707-320, a type of aircraft."]
    assert [spoken(name) for name in ("aquarium_fish", "7", "747-400", "Yak-42", "12")] == [
        "aquarium fish", "seven", "747-400", "Yak-42", "12",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"'cifar10'.*cifar100"):
        templates("cifar10")


# FGVC-Aircraft -----------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three variants in torchvision's layout: four trainval images and two test images each."""
    data = tmp_path / "fgvc-aircraft-2013b" / "data"
    (data / "images").mkdir(parents=True)
    variants = ["737-200", "A330 200", "Yak-42"]
    (data / "variants.txt").write_text("".join(f"{name}\n" for name in variants))
    number = 1000000
    for split, each in (("trainval", 4), ("test", 2)):
        lines = []
        for label, variant in enumerate(variants):
            for shade in range(each):
                number += 1
                lines.append(f"{number} {variant}\n")
                color = (80 * label, 20 * shade, 100)
                Image.new("RGB", (30 + shade, 20), color).save(data / "images" / f"{number}.jpg")
        (data / f"images_variant_{split}.txt").write_text("".join(lines))
    return tmp_path


def test_aircraft_is_what_torchvision_reads(root: Path) -> None:
    found = load_dataset("aircraft", root)
    assert found.class_names == ("737-200", "A330 200", "Yak-42")
    for split, images, labels in (
        ("trainval", found.train_images, found.train_labels),
        ("test", found.test_images, found.test_labels),
    ):
        theirs = FGVCAircraft(str(root), split=split, annotation_level="variant")
        assert [theirs[i][1] for i in range(len(theirs))] == labels.tolist()
        assert images.shape == (len(theirs), 3, 224, 224)
        middle = torch.tensor([theirs[i][0].getpixel((15, 10)) for i in range(len(theirs))])
        assert (images[:, :, 112, 112].int() - middle).abs().max() <= 3
    assert found.fingerprint == load_dataset("aircraft", root / "fgvc-aircraft-2013b").fingerprint
    assert check(root)[1] == "12 training and 6 test images, 3 variants"


def test_aircraft_that_is_not_whole(root: Path, tmp_path: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    with pytest.raises(DataError, match=r"holds no fgvc-aircraft-2013b/data/variants.txt. Unpack https"):
        load_dataset("aircraft", tmp_path / "nowhere")
    (data / "variants.txt").write_text("737-200\nYak-42\n")
    with pytest.raises(DataError, match=r"'A330 200', which variants.txt does not name"):
        load_dataset("aircraft", root)
    (data / "images_variant_test.txt").unlink()
    (data / "variants.txt").write_text("737-200\nA330 200\nYak-42\n")
    with pytest.raises(DataError, match=r"images_variant_test.txt is missing"):
        load_dataset("aircraft", root)
