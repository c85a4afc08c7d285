"""Folders of small pictures: scikit-learn's digits as files of several formats, one folder per class."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from incvec import Classifier

FORMATS = ("png", "jpg", "webp", "bmp", "gif", "tif")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TINY: dict[str, Any] = {"backbone": "tiny", "side": 16, "memory": 3, "check": 2, "device": "cpu"}
FROZEN: dict[str, Any] = {
    **TINY,
    "method": "lda",
    "settings": {"lda": {"adapt_epochs": 0}},
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


def state(classifier: Classifier) -> dict[str, Any]:
    """Everything that a classifier predicts from, to compare two of them."""
    tensors, _ = classifier.folder.read_weights(classifier.description)
    return {name: tensor.tolist() for name, tensor in tensors.items()}
