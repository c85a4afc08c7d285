"""CIFAR-100 from its official Python files, in torchvision's layout: ROOT/cifar-100-python/{train,test,meta}.

The files are pickles, and a pickle can run code. So each file is read once, its bytes are compared with the
published md5, and only those very bytes are unpickled, by an unpickler that knows nothing but numpy arrays.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
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
    # LUCIR's historic deviations, which are not the data's own; its descendants still use them.
    "lucir": ((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023)),
}


class _ArraysOnly(pickle.Unpickler):
    """Finds the three names a pickled numpy array needs, wherever that numpy kept them, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _new_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which no CIFAR file needs")


def _new_array(kind: type[np.ndarray[Any, Any]], shape: tuple[int, ...], dtype: bytes | str) -> Any:
    return np.ndarray.__new__(kind, shape, dtype.decode() if isinstance(dtype, bytes) else dtype)


def locate(root: str | Path | None) -> Path:
    """The folder with the files, whether ROOT holds it or is it."""
    if root is None:
        raise no_root("cifar100", f"the folder that holds, or shall hold, {FOLDER}/")
    path = Path(root).expanduser()
    return path if path.name == FOLDER and not (path / FOLDER).is_dir() else path / FOLDER


def read_checked(folder: Path, name: str) -> bytes:
    """The bytes of a file, once they are known to be the published ones."""
    path, published = folder / name, FILES[name]
    remedy = "Delete it and ask for the download (--download), or copy the official file there."
    if not path.is_file():
        raise DataError(
            f"{path} is missing. Ask for the download (--download), or unpack {URL} into the folder {folder.parent}"
        )
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
    """Fetch and unpack the official archive, unless the files are there and whole."""
    folder = locate(root)
    if _whole(folder):
        return
    from torchvision.datasets.utils import download_and_extract_archive

    archive = URL.rsplit("/", 1)[1]
    try:
        download_and_extract_archive(URL, str(folder.parent), filename=archive, md5=ARCHIVE_MD5)
    except Exception as error:
        raise DataError(f"{URL} could not be fetched into {folder.parent}: {error}") from error


def _whole(folder: Path) -> bool:
    try:
        for name in FILES:
            read_checked(folder, name)
    except DataError:
        return False
    return True


def load(root: str | Path | None, fetch: bool = False) -> Dataset:
    """CIFAR-100 under `root`; downloaded first only where `fetch` asks for it."""
    if fetch:
        download(root)
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
    """Read and verify everything; a report in lines."""
    dataset = load(root)
    lines = [f"CIFAR-100 in {locate(root)}"]
    lines += [f"{name}: {file.size} bytes, md5 {file.md5} as published" for name, file in FILES.items()]
    lines.append(
        f"{len(dataset.train_images)} training and {len(dataset.test_images)} test images, "
        f"{dataset.n_classes} classes, 32 x 32, RGB"
    )
    return lines
