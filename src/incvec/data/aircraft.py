"""FGVC-Aircraft in torchvision's layout: ROOT/fgvc-aircraft-2013b/data/{images/, variants.txt, images_variant_*.txt}.

Classes are the variants, numbered in the order of variants.txt; training images are those of `trainval` (6,667), test
images those of `test` (3,333). They are kept as squares of 224 pixels, the short side resized (bicubic, antialiased)
and the centre cut out, which is CLIP's preparation. As torchvision leaves it, the strip with the copyright stays.

A copy with fewer variants is one whose variants.txt names only those.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from incvec.data.dataset import Dataset
from incvec.data.folder import IMAGENET, _decode, _each, open_image
from incvec.errors import DataError

FOLDER = "fgvc-aircraft-2013b"
URL = "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz"
SIZE = 224
PARTS = {"train": "trainval", "test": "test"}
Files = tuple[tuple[Path, int], ...]


def locate(root: str | Path | None) -> Path:
    """The folder data/, whether ROOT holds fgvc-aircraft-2013b/, is it, or is data/ itself."""
    if root is None:
        raise DataError(f"aircraft needs a data root: the folder that holds {FOLDER}/")
    path = Path(root).expanduser()
    for candidate in (path / FOLDER / "data", path / "data", path):
        if (candidate / "variants.txt").is_file():
            return candidate
    raise DataError(
        f"{path} holds no {FOLDER}/data/variants.txt. Unpack {URL} there, or let torchvision do so: "
        f"torchvision.datasets.FGVCAircraft({str(path)!r}, download=True)"
    )


def list_files(root: str | Path | None) -> tuple[Path, tuple[str, ...], dict[str, Files]]:
    """The folder, the variants, and the files of both parts with their labels; no image is opened."""
    folder = locate(root)
    variants = tuple(line.strip() for line in (folder / "variants.txt").read_text().splitlines() if line.strip())
    number = {variant: label for label, variant in enumerate(variants)}
    found = {}
    for part, split in PARTS.items():
        table = folder / f"images_variant_{split}.txt"
        if not table.is_file():
            raise DataError(f"{table} is missing: it lists the {split} images, as `1234567 Boeing 707-320` a line")
        rows = []
        for line in filter(None, map(str.strip, table.read_text().splitlines())):
            name, _, variant = line.partition(" ")
            if variant not in number:
                raise DataError(f"{table} has an image of {variant!r}, which variants.txt does not name")
            rows.append((folder / "images" / f"{name}.jpg", number[variant]))
        found[part] = tuple(rows)
    return folder, variants, found


def load(root: str | Path | None, size: int = SIZE) -> Dataset:
    """Both parts decoded; a gigabyte and a half for all hundred variants at 224 pixels."""
    _, variants, files = list_files(root)
    decoded = {part: _decode(rows, size) for part, rows in files.items()}
    names = [[path.name, label] for rows in files.values() for path, label in rows]
    digest = hashlib.sha256(json.dumps([variants, size, names]).encode())
    for images, _ in decoded.values():
        digest.update(images.contiguous().numpy().data.cast("B"))
    return Dataset(
        name="aircraft",
        train_images=decoded["train"][0],
        train_labels=decoded["train"][1],
        test_images=decoded["test"][0],
        test_labels=decoded["test"][1],
        class_names=variants,
        pad=max(1, size // 8),
        flip=True,
        fingerprint=digest.hexdigest(),
        normalisations={"default": IMAGENET},
    )


def check(root: str | Path) -> list[str]:
    """Open every image; a report in lines."""
    folder, variants, files = list_files(root)
    sizes = _each(files["train"] + files["test"], lambda _, path: open_image(path).size)
    counts = {part: len(rows) for part, rows in files.items()}
    return [
        f"FGVC-Aircraft in {folder}",
        f"{counts['train']} training and {counts['test']} test images, {len(variants)} variants",
        f"{min(w for w, _ in sizes)} pixels wide or more, all readable",
    ]
