"""FGVC-Aircraft in torchvision's layout: ROOT/fgvc-aircraft-2013b/data/{images/, variants.txt, images_variant_*.txt}.

Classes are the variants, in the order of variants.txt. Training images are those of `trainval` (6,667), test images
those of `test` (3,333). They are stored as squares of 224 pixels, which is CLIP's preprocessing. As in torchvision, the
strip with the copyright notice stays.

A copy with fewer variants lists only those in variants.txt; `copy` makes one, from a complete copy or from encoded
images in one .npz file. Its images may have another format than JPEG, given by the file extension.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from incvec.atomic_files import write_bytes
from incvec.data.dataset import IMAGENET_NORMALIZATION, Dataset
from incvec.data.image_files import EXTENSIONS, load_files, map_files, open_image
from incvec.data.listing import Files
from incvec.errors import DataError, no_root, shorten
from incvec.text_files import read_bytes, read_text

FOLDER = "fgvc-aircraft-2013b"
URL = "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz"
SIZE = 224
MAX_NPZ = 16 << 30  # bytes
PARTS = {"train": "trainval", "test": "test"}


def locate(root: str | Path | None) -> Path:
    """The folder data/; ROOT may contain fgvc-aircraft-2013b/, be it, or be data/ itself."""
    if root is None:
        raise no_root("aircraft", f"the folder that contains {FOLDER}/")
    path = Path(root).expanduser()
    for candidate in (path / FOLDER / "data", path / "data", path):
        if (candidate / "variants.txt").is_file():
            return candidate
    raise DataError(
        f"{path} has no {FOLDER}/data/variants.txt. Unpack {URL} there, or let torchvision do so: "
        f"torchvision.datasets.FGVCAircraft({str(path)!r}, download=True)"
    )


def list_files(root: str | Path | None) -> tuple[Path, tuple[str, ...], dict[str, Files]]:
    """The folder, the variants, and the files of both parts with their labels; opens no image."""
    folder = locate(root)
    variants = tuple(read_lines(folder / "variants.txt"))
    labels = {variant: label for label, variant in enumerate(variants)}
    if len(labels) < len(variants):
        raise DataError(f"{folder / 'variants.txt'} names a variant twice; expected every variant once")
    files = {}
    for part, split in PARTS.items():
        table = folder / f"images_variant_{split}.txt"
        if not table.is_file():
            raise DataError(f"{table} is missing: it lists the {split} images, in lines such as `1234567 707-320`")
        rows = []
        for line in read_lines(table):
            name, _, variant = line.partition(" ")
            if variant not in labels:
                raise DataError(f"{table} has an image of {shorten(variant)}, which is not in variants.txt")
            if "/" in name or not name.isprintable() or len(name) > 200:
                raise DataError(f"{table} has an image {shorten(name)}, which is not the name of a file")
            rows.append((_find_image(folder / "images", name), labels[variant]))
        missing = [variant for variant, label in labels.items() if label not in {label for _, label in rows}]
        if missing or not rows:
            raise DataError(f"{table} has no image of {shorten(missing[0]) if missing else 'any variant'}")
        files[part] = tuple(rows)
    return folder, variants, files


def read_lines(path: Path) -> list[str]:
    """The lines of a small text file, without blank ones."""
    try:
        return [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None


def _find_image(folder: Path, name: str) -> Path:
    """The file of an image: a JPEG, as published, or of another format in a copy."""
    jpeg = folder / f"{name}.jpg"
    candidates = (jpeg, *(folder / f"{name}{extension}" for extension in sorted(EXTENSIONS)))
    return next((path for path in candidates if path.exists()), jpeg)


def load(root: str | Path | None) -> Dataset:
    """Both parts decoded; 1.5 GB for all hundred variants."""
    _, variants, files = list_files(root)
    parts = {part: load_files(rows, SIZE) for part, rows in files.items()}
    names = [[path.name, label] for rows in files.values() for path, label in rows]
    digest = hashlib.sha256(json.dumps([variants, SIZE, names]).encode())
    for images, _ in parts.values():
        digest.update(images.contiguous().numpy().data.cast("B"))
    return Dataset(
        name="aircraft",
        train_images=parts["train"][0],
        train_labels=parts["train"][1],
        test_images=parts["test"][0],
        test_labels=parts["test"][1],
        class_names=variants,
        pad=SIZE // 8,
        flip=True,
        fingerprint=digest.hexdigest(),
        normalizations={"default": IMAGENET_NORMALIZATION},
        about={"variants": len(variants)},
    )


def check(root: str | Path) -> list[str]:
    """Open every image; returns the lines of a report."""
    folder, variants, files = list_files(root)
    sizes = map_files(files["train"] + files["test"], lambda _, path: open_image(path).size)
    return [
        f"FGVC-Aircraft in {folder}",
        f"{len(files['train'])} training and {len(files['test'])} test images, {len(variants)} variants",
        f"{min(width for width, _ in sizes)} pixels wide or more, all readable",
    ]


# Copies ----------------------------------------------------------------------------------------------------

# For each part: an image's name, its extension, its variant, and a function that writes its file.
ImageWriters = dict[str, list[tuple[str, str, str, Callable[[Path], object]]]]


def copy(source: Path, root: Path, variants: Sequence[str] | None = None) -> list[str]:
    """Write some variants (by default all) into ROOT, keeping their split; returns the lines of a report.

    The source is a complete copy, or an .npz file with the arrays `label` and `is_test` (one per image), `class_names`,
    and concatenated encoded images: their bytes in an array named after the format (`webp`, `jpg`, `png`), and the
    start of each and the end of the last in `offsets`. Bytes are copied, never encoded again.
    """
    known, parts = _read_npz(source) if source.suffix == ".npz" else _read_copy(source)
    unknown = [name for name in variants or () if name not in known]
    if unknown:
        raise DataError(f"{source} has no variant {unknown[0]!r}; it has {', '.join(known[:5])}, ... ({len(known)})")
    selected = [name for name in known if variants is None or name in variants]
    folder = root / FOLDER / "data"
    rows = {split: [row for row in parts[part] if row[2] in selected] for part, split in PARTS.items()}
    lists = {
        f"images_variant_{split}.txt": "".join(f"{name} {variant}\n" for name, _, variant, _ in rows[split])
        for split in rows
    }
    lists["variants.txt"] = "".join(f"{name}\n" for name in selected)  # last: marks a complete copy
    counts = " and ".join(f"{len(rows[split])} {split}" for split in rows)
    report = f"{len(selected)} variants, {counts} images in {folder}"
    if (folder / "variants.txt").exists():
        files = {name: folder / name for name in lists}
        if all(file.is_file() and read_bytes(file) == lists[name].encode() for name, file in files.items()):
            return [f"{report}, which were there already"]
        raise DataError(f"{folder} already has other images; move it away or choose another folder")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, extension, _, write in (row for split in rows.values() for row in split):
        write(folder / "images" / f"{name}{extension}")
    for name, text in lists.items():
        write_bytes(folder / name, text.encode(), DataError)
    return [report]


def _read_copy(source: Path) -> tuple[tuple[str, ...], ImageWriters]:
    _, known, files = list_files(source)

    def row(path: Path, label: int) -> tuple[str, str, str, Callable[[Path], object]]:
        return path.stem, path.suffix, known[label], lambda target: target.write_bytes(read_bytes(path))

    missing = next((path for rows in files.values() for path, _ in rows if not path.is_file()), None)
    if missing is not None:
        raise DataError(f"{missing} is missing, or is not a file")
    return known, {part: [row(path, label) for path, label in rows] for part, rows in files.items()}


def _read_npz(source: Path) -> tuple[tuple[str, ...], ImageWriters]:
    try:
        with np.load(io.BytesIO(read_bytes(source, limit=MAX_NPZ))) as file:  # refuses pickled arrays
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise DataError(f"{source} does not exist") from None
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{source} cannot be read as arrays: {error}") from error
    format_ = next((name for name in ("webp", "jpg", "png") if name in arrays), None)
    missing = [name for name in ("label", "is_test", "class_names", "offsets") if name not in arrays]
    if missing or format_ is None:
        missing = missing or ["the images (webp, jpg or png)"]
        raise DataError(f"{source} lacks {', '.join(missing)}; it has {list(arrays)}")
    known = tuple(str(name) for name in arrays["class_names"].reshape(-1))
    label, is_test, offsets = (np.atleast_1d(arrays[name]) for name in ("label", "is_test", "offsets"))
    encoded = arrays[format_].tobytes()
    fits = label.shape == is_test.shape == (len(label),) and offsets.shape == (len(label) + 1,) and len(label) > 0
    integers = all(array.dtype.kind in "iub" for array in (label, is_test, offsets))
    if not (fits and integers and 0 <= label.min() <= label.max() < len(known)):
        raise DataError(
            f"{source}: `label`, `is_test` and `offsets` are not one number per image (and one more offset)"
        )
    if (np.diff(offsets.astype(np.int64)) < 0).any() or offsets[0] < 0 or offsets[-1] > len(encoded):
        raise DataError(f"{source}: `offsets` are not places in the {len(encoded)} bytes of `{format_}`")

    def row(i: int) -> tuple[str, str, str, Callable[[Path], object]]:
        content = encoded[int(offsets[i]) : int(offsets[i + 1])]
        return f"{i:07d}", f".{format_}", known[int(label[i])], lambda target: target.write_bytes(content)

    parts: ImageWriters = {part: [] for part in PARTS}
    for i, test in enumerate(is_test.tolist()):
        parts["test" if test else "train"].append(row(i))
    return known, parts
