"""Folders of small pictures, one per class, in files of several formats: scikit-learn's digits and photographs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

from incvec import Classifier

FORMATS = ("png", "jpg", "webp", "bmp", "gif", "tif")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TINY: dict[str, Any] = {"backbone": "tiny", "side": 16, "memory": 3, "check": 2, "device": "cpu"}
FROZEN: dict[str, Any] = {
    **TINY,
    "method": "lda",
    "settings": {"lda": {"adapt_epochs": 0, "features": "stages"}},
}
REPLAY: dict[str, Any] = {
    **TINY,
    "method": "replay",
    "addons": ["ivt"],
    "settings": {"replay": {"epochs": 3, "batch_size": 16, "milestones": []}, "ivt": {"interval": 1}},
}


@cache
def all_digits() -> Any:
    return load_digits()


def digit(label: int, index: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    digits = all_digits()
    pixels = digits.images[digits.target == label][index]
    return Image.fromarray((pixels * 15).astype(np.uint8)).convert("RGB").resize(size)


def write_classes(root: Path, labels: range | list[int], count: int = 22, first: int = 0) -> Path:
    for label in labels:
        (root / NAMES[label]).mkdir(parents=True, exist_ok=True)
        for index in range(first, first + count):
            digit(label, index).save(root / NAMES[label] / f"{index:03d}.{FORMATS[index % len(FORMATS)]}")
    return root


@cache
def real_photo(name: str) -> Image.Image:
    """One of scikit-learn's two photographs, 640 x 427."""
    return Image.fromarray(load_sample_image(name))


def write_photos(root: Path, labels: range | list[int], count: int, first: int = 0) -> Path:
    """Crops of two real photographs as photos of up to 6 classes, the left, middle and right part of each one, in nine
    formats: also CMYK, animated, and rotated with a note in EXIF."""
    for label in labels:
        (root / NAMES[label]).mkdir(parents=True, exist_ok=True)
        photo, left = real_photo(("china.jpg", "flower.jpg")[label // 3]), 213 * (label % 3)
        for index in range(first, first + count):
            x, y = np.random.default_rng((label, index)).integers(0, (213 - 128, 427 - 160))
            crop = photo.crop((left + x, y, left + x + 128, y + 160))
            name = root / NAMES[label] / f"{index:03d}"
            kind = index % (len(FORMATS) + 3)
            if kind < len(FORMATS):
                crop.save(f"{name}.{FORMATS[kind]}")
            elif kind == len(FORMATS):
                crop.convert("CMYK").save(f"{name}.jpeg")
            elif kind == len(FORMATS) + 1:
                crop.save(f"{name}.gif", save_all=True, append_images=[crop.rotate(180)])
            else:
                turned = Image.Exif()
                turned[0x0112] = 6
                crop.transpose(Image.Transpose.ROTATE_90).save(f"{name}.JPG", "JPEG", exif=turned)
    return root


def state(classifier: Classifier) -> dict[str, Any]:
    """Everything that a classifier predicts from, to compare two of them."""
    tensors, _ = classifier.folder.read_weights(classifier.description)
    return {name: tensor.tolist() for name, tensor in tensors.items()}
