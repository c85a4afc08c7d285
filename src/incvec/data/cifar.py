"""CIFAR-100 from its official Python files, in torchvision's layout: ROOT/cifar-100-python/{train,test,meta}.

The files are pickles, and a pickle can run code. Each file is therefore read once, its bytes are compared with the
published md5, and exactly these bytes are unpickled, by an unpickler that only accepts numpy arrays.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from incvec.data.dataset import Dataset
from incvec.errors import DataError, no_root

FOLDER = "cifar-100-python"
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
ARCHIVE_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"


class Published(NamedTuple):
    size: int
    md5: str


FILES: Mapping[str, Published] = {
    "train": Published(155_249_918, "16019d7e3df5f24257cddd939b257f8d"),
    "test": Published(31_049_707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    "meta": Published(1_473, "7973b15100ade9c7d40fb424638fde48"),
}
NORMALIZATIONS = {
    "default": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    # The values in LUCIR's code, which its successors still use; the standard deviations are not those of the data.
    "lucir": ((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023)),
}


class _ArraysOnly(pickle.Unpickler):
    """Resolves the three names that a pickled numpy array needs, of old and new numpy versions, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _new_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"the file refers to {module}.{name}, which CIFAR files do not need")


def _new_array(kind: type[np.ndarray[Any, Any]], shape: tuple[int, ...], dtype: bytes | str) -> Any:
    return np.ndarray.__new__(kind, shape, dtype.decode() if isinstance(dtype, bytes) else dtype)


def locate(root: str | Path | None) -> Path:
    """The folder of the files: ROOT/cifar-100-python, or ROOT itself if it has that name."""
    if root is None:
        raise no_root("cifar100", f"the folder that contains, or will contain, {FOLDER}/")
    path = Path(root).expanduser()
    return path if path.name == FOLDER and not (path / FOLDER).is_dir() else path / FOLDER


def read_checked(folder: Path, name: str) -> bytes:
    """The bytes of a file, after comparing them with the published checksum."""
    path, published = folder / name, FILES[name]
    remedy = "Delete it and use --download, or copy the official file there."
    if not path.is_file():
        raise DataError(f"{path} is missing. Use --download, or unpack {URL} into the folder {folder.parent}")
    try:
        size = path.stat().st_size
        if size != published.size:
            state = "truncated" if size < published.size else "altered"
            raise DataError(f"{path} is {state}: {size} bytes, the official file has {published.size}. {remedy}")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != published.md5:
        raise DataError(f"{path} is altered: md5 {md5}, the official file has {published.md5}. {remedy}")
    return content


def _unpickle(content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    return entry


def download(root: str | Path | None) -> None:
    """Download and unpack the official archive, unless all files are already present and intact."""
    folder = locate(root)
    with suppress(DataError):
        for name in FILES:
            read_checked(folder, name)
        return
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        download_and_extract_archive(URL, str(folder.parent), filename=URL.rsplit("/", 1)[1], md5=ARCHIVE_MD5)
    except Exception as error:
        raise DataError(f"{URL} could not be downloaded into {folder.parent}: {error}") from error


def load(root: str | Path | None) -> Dataset:
    folder = locate(root)
    meta = _unpickle(read_checked(folder, "meta"))
    (train_images, train_labels), (test_images, test_labels) = (
        _images(_unpickle(read_checked(folder, name))) for name in ("train", "test")
    )
    return Dataset(
        name="cifar100",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        class_names=tuple(meta["fine_label_names"]),
        pad=4,
        flip=True,
        fingerprint=hashlib.sha256("".join(file.md5 for file in FILES.values()).encode()).hexdigest(),
        normalizations=NORMALIZATIONS,
    )


def _images(entry: dict[str, Any]) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(np.ascontiguousarray(entry["data"], dtype=np.uint8)).view(-1, 3, 32, 32)
    return images, torch.tensor(entry["fine_labels"], dtype=torch.int64)


def check(root: str | Path) -> list[str]:
    """Read and verify all files; returns the lines of a report."""
    dataset = load(root)
    lines = [f"CIFAR-100 in {locate(root)}"]
    lines += [f"{name}: {file.size} bytes, md5 {file.md5} as published" for name, file in FILES.items()]
    lines.append(
        f"{len(dataset.train_images)} training and {len(dataset.test_images)} test images, "
        f"{dataset.n_classes} classes, 32 x 32, RGB"
    )
    return lines
