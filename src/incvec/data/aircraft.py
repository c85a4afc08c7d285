"""FGVC-Aircraft in torchvision's layout: ROOT/fgvc-aircraft-2013b/data/{images/, variants.txt, images_variant_*.txt}.

Classes are the variants, numbered in the order of variants.txt; training images are those of `trainval` (6,667), test
images those of `test` (3,333). They are kept as squares of 224 pixels, the short side resized (bicubic, antialiased)
and the center cut out, which is CLIP's preparation. As torchvision leaves it, the strip with the copyright stays.

A copy with fewer variants is one whose variants.txt names only those; `copy` makes one, from a whole copy or from
encoded images in one .npz file. There an image may have another format than JPEG, told by its file's suffix.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from incvec.data.dataset import Dataset
from incvec.data.folder import EXTENSIONS, IMAGENET, _decode, _each, open_image
from incvec.errors import DataError, no_root

FOLDER = "fgvc-aircraft-2013b"
URL = "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz"
SIZE = 224
PARTS = {"train": "trainval", "test": "test"}
Files = tuple[tuple[Path, int], ...]


def locate(root: str | Path | None) -> Path:
    """The folder data/, whether ROOT holds fgvc-aircraft-2013b/, is it, or is data/ itself."""
    if root is None:
        raise no_root("aircraft", f"the folder that holds {FOLDER}/")
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
            rows.append((_image(folder / "images", name), number[variant]))
        found[part] = tuple(rows)
    return folder, variants, found


def _image(folder: Path, name: str) -> Path:
    """The image's file: a JPEG, as published, or one of another format in a copy."""
    usual = folder / f"{name}.jpg"
    if usual.exists():
        return usual
    others = (folder / f"{name}{suffix}" for suffix in sorted(EXTENSIONS))
    return next((path for path in others if path.exists()), usual)


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
        normalizations={"default": IMAGENET},
        about={"variants": len(variants)},
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


# Copies ----------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str, Callable[[Path], object]]]  # an image's name, its variant, and what writes its file


def copy(source: Path, root: Path, variants: Sequence[str] | None = None) -> list[str]:
    """Write some variants (all where none are named) into ROOT, with the split they have; a report in lines.

    The source is a whole copy, or an .npz file with the arrays `label` and `is_test` (one for each image),
    `class_names`, and encoded images one behind the other: their bytes in an array named after the format (`webp`,
    `jpg`, `png`), the place where each begins and the last one ends in `offsets`. Bytes are copied, never encoded anew.
    """
    known, suffix, parts = _shard(source) if source.suffix == ".npz" else _whole(source)
    strange = [name for name in variants or () if name not in known]
    if strange:
        raise DataError(f"{source} has no variant {strange[0]!r}; it has {', '.join(known[:5])}, ... ({len(known)})")
    kept = [name for name in known if variants is None or name in variants]
    folder = root / FOLDER / "data"
    if (folder / "variants.txt").exists():
        raise DataError(f"{folder} is there already; move it away or choose another folder")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    counts = []
    for part, split in PARTS.items():
        rows = [row for row in parts[part] if row[1] in kept]
        for name, _, write in rows:
            write(folder / "images" / f"{name}{suffix}")
        lines = "".join(f"{name} {variant}\n" for name, variant, _ in rows)
        (folder / f"images_variant_{split}.txt").write_text(lines)
        counts.append(f"{len(rows)} {split}")
    (folder / "variants.txt").write_text("".join(f"{name}\n" for name in kept))  # last: now it is complete
    return [f"{len(kept)} variants, {' and '.join(counts)} images in {folder}"]


def _whole(source: Path) -> tuple[tuple[str, ...], str, dict[str, Rows]]:
    _, known, files = list_files(source)
    suffix = files["train"][0][0].suffix

    def row(path: Path, label: int) -> tuple[str, str, Callable[[Path], object]]:
        return path.stem, known[label], lambda target: shutil.copyfile(path, target)

    return known, suffix, {part: [row(path, label) for path, label in rows] for part, rows in files.items()}


def _shard(source: Path) -> tuple[tuple[str, ...], str, dict[str, Rows]]:
    try:
        with np.load(source) as arrays:  # pickled arrays are refused
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise DataError(f"{source} cannot be read as arrays: {error}") from error
    format_ = next((name for name in ("webp", "jpg", "png") if name in found), None)
    missing = [name for name in ("label", "is_test", "class_names", "offsets") if name not in found]
    if missing or format_ is None:
        raise DataError(f"{source} lacks {', '.join(missing) or 'the images (webp, jpg or png)'}; it has {list(found)}")
    known = tuple(str(name) for name in found["class_names"])
    encoded, ends = found[format_].tobytes(), found["offsets"].tolist()
    parts: dict[str, Rows] = {part: [] for part in PARTS}
    for i, (label, test) in enumerate(zip(found["label"].tolist(), found["is_test"].tolist(), strict=True)):

        def write(target: Path, content: bytes = encoded[ends[i] : ends[i + 1]]) -> int:
            return target.write_bytes(content)

        parts["test" if test else "train"].append((f"{i:07d}", known[label], write))
    return known, f".{format_}", parts
