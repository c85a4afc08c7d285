"""Your own images in class folders, decoded into memory (layout: listing.py, pixels: image_files.py)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

from torch import Tensor

from incvec.data.dataset import IMAGENET_NORMALIZATION, Dataset
from incvec.data.image_files import Progress, load_files, map_files, open_image
from incvec.data.layouts import list_folder_dataset
from incvec.data.listing import Listing
from incvec.data.options import FolderOptions
from incvec.errors import DataError

SHOWN = 50  # unreadable images in one message


def load(root: str | Path | None, options: FolderOptions) -> Dataset:
    return load_listing(list_folder_dataset(root, options.test_every, options.test_folder), options.image_size)


def count_classes(root: str | Path | None, options: FolderOptions) -> int:
    return len(list_folder_dataset(root, options.test_every, options.test_folder).classes)


def load_listing(listing: Listing, size: int) -> Dataset:
    """The listed images as a data set in memory."""
    train_images, train_labels = load_files(listing.train, size)
    test_images, test_labels = load_files(listing.test, size)
    return Dataset(
        name="folder",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        class_names=listing.classes,
        pad=max(1, size // 8),
        flip=True,
        fingerprint=_fingerprint(listing, train_images, test_images),
        normalizations={"default": IMAGENET_NORMALIZATION},
        about={
            "layout": listing.layout, "split": listing.split, "class_list": listing.class_list, "left_out": 0,
            "side": size, "seen": size,
        },
    )  # fmt: skip


def _fingerprint(listing: Listing, train: Tensor, test: Tensor) -> str:
    """A hash of names, file sizes, split and decoded pixels."""
    names = [
        [(file.relative_to(listing.root).as_posix(), label, file.stat().st_size) for file, label in part]
        for part in (listing.train, listing.test)
    ]
    digest = hashlib.sha256(json.dumps([listing.classes, names, list(train.shape)]).encode())
    for images in (train, test):
        digest.update(images.contiguous().numpy().data.cast("B"))
    return digest.hexdigest()


def check(listing: Listing, progress: Progress | None = None) -> list[str]:
    """Open every image. Returns the lines of a report, or raises an error that names the unreadable images."""

    def open_one(_: int, path: Path) -> tuple[int, int] | str:
        try:
            return open_image(path).size
        except DataError as error:
            return str(error)

    results = map_files(listing.train + listing.test, open_one, progress)
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise DataError(
            f"{len(errors)} of {len(results)} images cannot be read:\n  " + "\n  ".join(errors[:SHOWN]) + more
        )
    lines = [f"{len(listing.classes)} classes in {listing.root}, layout {listing.layout}", f"split: {listing.split}"]
    for part, files in (("training", listing.train), ("test", listing.test)):
        counts = Counter(label for _, label in files).values()
        lines.append(f"{len(files)} {part} images, {min(counts)} to {max(counts)} per class")
    widths, heights = zip(*(size for size in results if not isinstance(size, str)), strict=True)
    lines.append(f"{min(widths)} to {max(widths)} pixels wide, {min(heights)} to {max(heights)} high, all readable")
    if listing.ignored:
        lines.append(f"{listing.ignored} other file(s) ignored: no image extension")
    return lines
