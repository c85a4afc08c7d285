"""Photos in: class folders of files, single images in any form, and what is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incvec.data.image_files import EXTENSIONS, available_memory, crop_square, load_square, map_files
from incvec.data.listing import class_files, is_hidden
from incvec.errors import ConfigError, DataError

MIN_PHOTOS = 2  # of a class
SHOWN = 5  # names or files in one message
HEIF = frozenset({".heic", ".heif", ".avif"})
Progress = Callable[[str, int, int], None]  # what is being done, how much of it, and of how much
TYPES = (str, Path, Image.Image, np.ndarray, Tensor)  # of one image


@dataclass(frozen=True)
class ClassPhotos:
    """The files of class folders."""

    root: Path
    files: dict[str, list[Path]]  # by class name, sorted

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.files)

    def labelled(self, names: Sequence[str]) -> list[tuple[Path, int]]:
        """Files with the position of their class in `names`."""
        label = {name: index for index, name in enumerate(names)}
        return [(file, label[name]) for name, files in self.files.items() for file in files]


def list_photos(root: str | Path, at_least: int = 1) -> ClassPhotos:
    """The photos of every class folder in `root`; `at_least` that many classes."""
    path = Path(root).expanduser()
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}: expected a folder with one folder of photos per class.")
    refuse_heif(path.rglob("*"))
    if not any(entry.is_dir() and not is_hidden(entry.name) for entry in path.iterdir()):
        loose = sum(entry.suffix.lower() in EXTENSIONS for entry in path.iterdir())
        found = f"{loose} photo(s), but no folders" if loose else "nothing to learn from"
        raise DataError(
            f"{path} has {found}: expected one folder per class, named after it, such as {path / 'A380'}/1.jpg."
        )
    files, _ = class_files(path, at_least=at_least)
    check_case(files)
    check_level(path, files)
    return ClassPhotos(path, files)


def check_level(root: Path, files: Mapping[str, Sequence[Path]]) -> None:
    """Refuse a folder of folders of classes, whose folders would become the classes."""
    below = {name: {file.relative_to(root / name).parts[0] for file in found} for name, found in files.items()}
    loose = any(file.parent == root / name for name, found in files.items() for file in found)
    name, names = max(below.items(), key=lambda item: len(item[1]))
    if not loose and len(names) > 1:
        raise DataError(
            f"{root} has folders without photos of their own, such as {root / name} with {_names(sorted(names))}: "
            f"expected one folder per class with its photos. To learn the classes in {root / name}, give that folder."
        )


def refuse_heif(files: Iterable[Path]) -> None:
    """Photos of phones that Pillow cannot decode would be ignored silently."""
    found = sorted(file for file in files if file.suffix.lower() in HEIF)
    if found:
        raise DataError(
            f"{len(found)} file(s) are in a format that is not read, such as {found[0]}. Convert them to JPEG first: "
            "`pip install pillow-heif` reads them in Python, `magick mogrify -format jpg *.heic` converts a folder."
        )


def check_case(names: Iterable[str]) -> None:
    """Refuse class names that differ in upper and lower case only: on many file systems they are one folder."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(f"the classes {other!r} and {name!r} differ only in case. Rename or merge one of them.")


def check_new(photos: ClassPhotos, known: Sequence[str], more: bool) -> None:
    """Refuse known classes (unless `more`), names that differ in case from a known one, and too few photos."""
    again = [name for name in photos.classes if name in known]
    if again and not more:
        raise DataError(
            f"{_names(again)} {'is' if len(again) == 1 else 'are'} known already. For more photos of known classes "
            "give --more (more=True), else remove these folders."
        )
    check_case([*known, *(name for name in photos.classes if name not in known)])
    for name, files in photos.files.items():
        if len(files) < MIN_PHOTOS and name not in known:
            raise DataError(
                f"class {name!r} has {len(files)} photo in {photos.root / name}: expected {MIN_PHOTOS} or more, better "
                "20. Add photos or remove the folder."
            )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def load_squares(
    files: Sequence[tuple[Path, int]], size: int, progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """All files as squares, uint8 [N, 3, size, size]. Unreadable ones are named together in one error."""
    needed, free = len(files) * 3 * size**2, available_memory()
    if needed > free:
        raise DataError(
            f"{len(files)} photos of {size} x {size} pixels take {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB "
            "are free. Learn fewer at once, or make a classifier with a smaller side."
        )
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)

    def load(row: int, path: Path) -> str | None:
        try:
            images[row] = load_square(path, size)
        except DataError as error:
            return str(error)
        return None

    errors = [error for error in map_files(files, load, progress) if error is not None]
    if errors:
        more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise DataError(
            f"{len(errors)} of {len(files)} photos cannot be read:\n  " + "\n  ".join(errors[:SHOWN]) + more
        )
    return images


# Single images ----------------------------------------------------------------------------------------------


def is_single(images: Any) -> bool:
    """Whether it is one image rather than several: a file, a PIL image, or an array without a batch dimension."""
    if isinstance(images, str | Path):
        return not Path(images).is_dir()
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim < 4
    return isinstance(images, Image.Image)


def list_images(images: Any) -> list[Any]:
    """One image, a folder, or a sequence of either, as a list of single images; files of folders are sorted."""
    if isinstance(images, np.ndarray | Tensor) and images.ndim == 4:
        return list(images)
    if isinstance(images, str | Path) and Path(images).expanduser().is_dir():
        root = Path(images).expanduser()
        refuse_heif(root.rglob("*"))
        found = sorted(file for file in root.rglob("*") if file.suffix.lower() in EXTENSIONS)
        found = [file for file in found if not any(map(is_hidden, file.relative_to(root).parts))]
        if not found:
            raise DataError(f"{root} contains no photos: expected files ending in {', '.join(sorted(EXTENSIONS))}.")
        return list(found)
    if isinstance(images, TYPES):
        return [images]
    if isinstance(images, Sequence | Iterable):
        return [each for one in images for each in list_images(one)]
    raise ConfigError(f"{type(images).__name__} is not an image: expected a path, a PIL image, an array or a tensor.")


def to_square(image: Any, size: int) -> Tensor:
    """One image in any form as the square that is stored for it, uint8 [3, size, size]."""
    if isinstance(image, str | Path):
        path = Path(image).expanduser()
        if not path.is_file():
            raise DataError(f"there is no photo {path}.")
        refuse_heif([path])
        return load_square(path, size)
    if isinstance(image, Image.Image):
        return crop_square(image.convert("RGB"), size)
    return crop_square(Image.fromarray(to_array(image)), size)


def to_array(image: np.ndarray[Any, Any] | Tensor) -> np.ndarray[Any, Any]:
    """uint8 [H, W, 3] from [H, W], [H, W, 3], or, for tensors, [3, H, W]; floats are from 0 to 1."""
    is_tensor = isinstance(image, Tensor)
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if is_tensor and array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        expected = "[3, H, W]" if is_tensor else "[H, W, 3]"
        raise ConfigError(f"an image of shape {list(image.shape)}: expected {expected}, or [H, W] for gray.")
    if array.dtype.kind == "f":
        if array.size and not (array.min() >= 0 and array.max() <= 1):
            raise ConfigError(
                f"an image of floats from {array.min():.3g} to {array.max():.3g}: expected 0 to 1, not normalized."
            )
        array = (array * 255).round().astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ConfigError(f"an image of {array.dtype}: expected uint8 from 0 to 255, or floats from 0 to 1.")
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))
