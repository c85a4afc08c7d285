"""Images and folders for the tests of packed stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from incvec.data.class_lists import ClassList
from incvec.data.layouts import list_images
from incvec.data.store.open import Store
from incvec.data.store.write import pack


def photo(seed: int, width: int, height: int) -> Image.Image:
    """Like a photograph: low and high frequencies, and an edge."""
    draw = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for cells in (3, 9, 27):
        coarse = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), np.uint8))
        total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), float) / 3
    total[height // 3 : height // 2, width // 4 :] *= 0.3
    return Image.fromarray((total + draw.normal(0, 12, total.shape)).clip(0, 255).astype(np.uint8))


def save(image: Image.Image, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def make_root(root: Path, classes: int = 3, train: int = 5, test: int = 2, side: int = 20) -> Path:
    """train/ and val/ with the classes n00000000, n00000001, ...; all images differ."""
    for part, count in (("train", train), ("val", test)):
        for label in range(classes):
            for i in range(count):
                seed = 1000 * label + 10 * i + (part == "val")
                name = f"n{label:08d}"
                save(photo(seed, side + 2 * i, side + label), root / part / name / f"{i:03d}.png")
    return root


def make_store(source: Path, store: Path, side: int = 16, class_list: ClassList | None = None, **options: Any) -> Store:
    options = {"workers": 1, "chunk_rows": 4} | options
    return pack(list_images(source, class_list=class_list), store, side, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"}
