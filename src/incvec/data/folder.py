"""A folder of class folders: ROOT/train/CLASS/*.jpg and ROOT/test/ (or val/), or ROOT/CLASS/*.jpg split by rule.

Classes are numbered in the sorted order of their folders' names, as torchvision's ImageFolder does. Where there
is no train/, every fifth file of a class (`test_every`), in sorted order, is a test image. Images are turned as
their EXIF says, made RGB, resized so that the short side is `size` (bicubic, antialiased) and cropped to the
center square.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from incvec.data.class_lists import ClassList
from incvec.data.dataset import Dataset
from incvec.data.store.open import Progress, is_store
from incvec.errors import ConfigError, DataError, no_root

T = TypeVar("T")
EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
SIZE = 64
TEST_EVERY = 5
LONGEST = 16  # of an image's short side: what its long one may have before the ends are cut off, unseen in any case
TEST_FOLDERS = ("test", "val")
ORIENTATION = 0x0112  # EXIF's tag; 1 is upright
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # what makes an image of that orientation upright
NAMED_AT_MOST = 50  # unreadable images in one message
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Listing:
    """Which files there are, before any is opened."""

    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]
    test: tuple[tuple[Path, int], ...]
    ignored: int  # files that do not look like images
    rule: str  # how training and test images were told apart


def list_files(
    root: str | Path | None,
    test_every: int = TEST_EVERY,
    test_folder: str | None = None,
    chosen: ClassList | None = None,
) -> Listing:
    """The image files of class folders; of the `chosen` classes only, where a list is given."""
    if root is None:
        raise no_root("a folder data set", "a folder of class folders")
    path = Path(root).expanduser()
    if not path.is_dir():
        raise DataError(f"{no_folder(path)}; expected train/ and test/ (or val/), or one folder a class")
    if test_every < 2:
        raise ConfigError(f"test_every is {test_every}: expected 2 or more, so that training images are left")
    if _is_split(path):
        return _list_split(path, test_folder, chosen)
    if test_folder is not None:
        raise DataError(f"{path} has no train/ for {test_folder}/ to go with: expected class folders in both")
    files, ignored = class_files(path, chosen)
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, (name, members) in enumerate(files.items()):
        if len(members) < test_every:
            raise DataError(
                f"{path / name} has {len(members)} image(s), expected at least {test_every}: "
                f"every {test_every}th is a test image. Add images, or make train/ and test/ yourself."
            )
        for position, file in enumerate(members, start=1):
            (test if position % test_every == 0 else train).append((file, label))
    rule = f"every {test_every}th file of a class, in sorted order, is a test image"
    return Listing(path, tuple(files), tuple(train), tuple(test), ignored, rule)


def no_folder(path: Path) -> str:
    """What is wrong with a path where a folder was expected."""
    return f"{path} is not a folder" if path.exists() else f"{path} does not exist"


def folders_in(root: Path) -> tuple[str, ...]:
    """The names of the folders there, sorted, without those that file managers, notebooks and disks leave."""
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if is_folder(entry) and not is_hidden(entry.name)))


def is_hidden(name: str) -> bool:
    """Whether a folder's entry is nobody's data; a disk has a lost+found at its top."""
    return name[0] == "." or name == "lost+found"


def is_image(entry: os.DirEntry[str]) -> bool:
    """By its name. Not a pipe or a device, which may never end; a link to nothing is one that cannot be read."""
    named = os.path.splitext(entry.name)[1].lower() in EXTENSIONS
    return named and (_is_file(entry) or not os.path.exists(entry.path))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Or a link to one; a link to itself, which the system calls an error, is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _is_split(root: Path) -> bool:
    """Whether train/ is one half of the data rather than a class of that name."""
    train = root / "train"
    beside = any((root / name).is_dir() for name in TEST_FOLDERS)
    return train.is_dir() and (beside or bool(folders_in(train)))


def _list_split(root: Path, test_folder: str | None, chosen: ClassList | None) -> Listing:
    candidates = TEST_FOLDERS if test_folder is None else (test_folder,)
    present = [name for name in candidates if (root / name).is_dir()]
    if not present:
        raise DataError(f"{root} has train/ but no {' or '.join(n + '/' for n in candidates)}: expected both")
    # Contests give a flat test/ without classes; then val/ has them.
    found = next((name for name in present if folders_in(root / name)), present[0])
    passed = "".join(f"; {name}/ has no class folders" for name in present[: present.index(found)])
    train, ignored_train = class_files(root / "train", chosen)
    test, ignored_test = class_files(root / found, chosen)
    for here, names, there, others in (("train", train, found, test), (found, test, "train", train)):
        for name in names:
            if name not in others:
                raise DataError(f"class {name!r} is in {root / here} but not in {root / there}: expected it in both")
    return Listing(
        root,
        tuple(train),
        tuple((file, label) for label, files in enumerate(train.values()) for file in files),
        tuple((file, label) for label, files in enumerate(test.values()) for file in files),
        ignored_train + ignored_test,
        f"train/ and {found}/{passed}",
    )


def class_files(folder: Path, chosen: ClassList | None = None) -> tuple[dict[str, list[Path]], int]:
    """The image files of every class folder (of the chosen ones), sorted, and how many other files lie there."""
    names = folders_in(folder)
    if chosen is not None:
        missing = sorted(set(chosen.classes) - set(names))
        if missing:
            asked = chosen.name.partition("@")[0]  # without the digest
            there = f"{len(names)} folder(s), such as {names[0]!r}" if names else "no folders"
            raise DataError(
                f"{len(missing)} of the {len(chosen.classes)} classes of {asked} are not in {folder} "
                f"({', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}), which has {there}: choose "
                "other images, or another list of classes"
            )
        names = chosen.classes
    if len(names) < 2:
        hint = ". It is a packed store: open it with --dataset packed" if is_store(folder) else ""
        raise DataError(
            f"{folder} holds {len(names)} class folder(s), expected one for each of 2 classes or more{hint}"
        )
    files: dict[str, list[Path]] = {}
    ignored = 0
    for name in names:
        images = []
        for entry in _walk(os.path.join(folder, name)):
            if is_image(entry):
                images.append(entry.path)
            else:
                ignored += 1
        # Folder by folder, as paths are sorted; strings take a third of the time and of the memory.
        images.sort(key=lambda path: path.replace(os.sep, "\0"))
        files[name] = [Path(image) for image in images]
        if not images:
            raise DataError(
                f"class folder {folder / name} is empty: expected images ({', '.join(sorted(EXTENSIONS))}). "
                "Add some or remove the folder."
            )
    return files, ignored


def _walk(top: str) -> Iterator[os.DirEntry[str]]:
    """The files in a folder and in those below it, linked ones included, hidden ones not: notebooks leave copies.

    Each folder once, by its own place where it has one here, and none that the whole lies in.
    """
    inside = os.path.realpath(top) + os.sep
    seen: set[str] = set()
    folders, links = [top], list[str]()
    while folders or links:
        links.sort(reverse=True)  # which of two names a linked folder goes by shall not hang on the disk's order
        folder = folders.pop() if folders else links.pop()
        real = os.path.realpath(folder)
        if real in seen or (folder != top and inside.startswith(real.rstrip(os.sep) + os.sep)):
            continue
        seen.add(real)
        try:
            with os.scandir(folder) as found:
                entries = [entry for entry in found if not is_hidden(entry.name)]
        except OSError as error:
            raise DataError(
                f"{folder} cannot be listed: {error.strerror}. Make it readable, or move it away."
            ) from error
        for entry in entries:
            if not is_folder(entry):
                yield entry
            elif entry.is_symlink():
                links.append(entry.path)
            else:
                folders.append(entry.path)


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Without Pillow's warnings, for all threads: they name no file, and are about odd tags, not about pixels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def open_image(path: Path) -> Image.Image:
    """The image, upright and RGB. Whatever a decoder makes of a bad file, the error names the file."""
    try:
        with Image.open(path) as image:
            if image.mode == "F" or image.mode.startswith("I"):
                # Pillow would cut such pixels off at 255 without a word.
                raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}); convert it to 8 bits")
            image.load()  # of some formats, the orientation comes last
            turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
            # Not Pillow's exif_transpose: it writes all other tags anew, and fails where one is out of bounds.
            return (image if turn is None else image.transpose(turn)).convert("RGB")
    except Exception as error:
        raise DataError(f"{path} cannot be read as an image: {error}. Replace it or remove it.") from error


def square(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """Short side to `size`, then the center square, as [size, size, 3]."""
    width, height = image.size
    short = min(width, height)
    if max(width, height) > LONGEST * short:
        left, top = ((max(0, side - LONGEST * short) // 2) for side in (width, height))
        image = image.crop((left, top, width - left, height - top))
        width, height = image.size
    if short != size:
        width, height = (max(size, round(side * size / short)) for side in (width, height))
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8)


def _each(
    files: tuple[tuple[Path, int], ...], work: Callable[[int, Path], T], progress: Progress | None = None
) -> list[T]:
    """`work` on every file, in threads, since decoders release the interpreter's lock; raises the first error."""
    with quiet_pillow(), ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(work, i, path) for i, (path, _) in enumerate(files)]
        results = []
        try:
            for job in jobs:
                results.append(job.result())
                if progress is not None:
                    progress(len(results), len(jobs))
            return results
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _decode(files: tuple[tuple[Path, int], ...], size: int) -> tuple[Tensor, Tensor]:
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    into = images.numpy()

    def put(row: int, path: Path) -> None:
        into[row] = square(open_image(path), size).transpose(2, 0, 1)

    _each(files, put)
    return images, torch.tensor([label for _, label in files], dtype=torch.int64)


def decode_listing(listing: Listing, size: int) -> Dataset:
    """The listed images as a data set in memory."""
    train_images, train_labels = _decode(listing.train, size)
    test_images, test_labels = _decode(listing.test, size)
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
        normalizations={"default": IMAGENET},
        about={
            "layout": "folder", "split": listing.rule, "class_list": None, "left_out": 0, "side": size, "seen": size,
        },
    )  # fmt: skip


def _fingerprint(listing: Listing, train: Tensor, test: Tensor) -> str:
    """Over names, file sizes and split, and over the pixels as decoded here: what training really sees."""
    names = [
        [(file.relative_to(listing.root).as_posix(), label, file.stat().st_size) for file, label in part]
        for part in (listing.train, listing.test)
    ]
    digest = hashlib.sha256(json.dumps([listing.classes, names, list(train.shape)]).encode())
    for images in (train, test):
        digest.update(images.contiguous().numpy().data.cast("B"))
    return digest.hexdigest()


def check(listing: Listing, progress: Progress | None = None, layout: str = "folder") -> list[str]:
    """Open every image; a report in lines, or an error that names those that cannot be read."""

    def look(_: int, path: Path) -> tuple[int, int] | str:
        try:
            return open_image(path).size
        except DataError as error:
            return str(error)

    found = _each(listing.train + listing.test, look, progress)
    bad = [text for text in found if isinstance(text, str)]
    if bad:
        more = f"\n  and {len(bad) - NAMED_AT_MOST} more" if len(bad) > NAMED_AT_MOST else ""
        raise DataError(
            f"{len(bad)} of {len(found)} images cannot be read:\n  " + "\n  ".join(bad[:NAMED_AT_MOST]) + more
        )
    sizes = [size for size in found if not isinstance(size, str)]
    lines = [f"{len(listing.classes)} classes in {listing.root}, layout {layout}", f"split: {listing.rule}"]
    for part, files in (("training", listing.train), ("test", listing.test)):
        counts = Counter(label for _, label in files).values()
        lines.append(f"{len(files)} {part} images, {min(counts)} to {max(counts)} a class")
    widths, heights = zip(*sizes, strict=True)
    lines.append(f"{min(widths)} to {max(widths)} pixels wide, {min(heights)} to {max(heights)} high, all readable")
    if listing.ignored:
        lines.append(f"{listing.ignored} other file(s) ignored: not images by their names")
    return lines
