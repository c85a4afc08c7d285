"""The data sets by name: loading one, and checking a folder before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from incvec.data import cifar, digits, folder
from incvec.data.dataset import Dataset
from incvec.errors import ConfigError, DataError, nearest

__all__ = ["DATASETS", "Dataset", "Entry", "check", "load_dataset"]


class Entry(NamedTuple):
    summary: str
    source: str  # the paper, or where the data come from


DATASETS: Mapping[str, Entry] = {
    "cifar100": Entry(
        "CIFAR-100: 50,000 training and 10,000 test images, 32 x 32, 100 classes",
        "Krizhevsky, Learning multiple layers of features from tiny images, 2009, "
        "https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "digits": Entry(
        "scikit-learn's 1,797 handwritten digits, 8 x 8, 10 classes; embedded, no download",
        "Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository, 1998, "
        "https://doi.org/10.24432/C50P49",
    ),
    "folder": Entry(
        "your own images: train/ and test/ (or val/) with one folder a class, or one folder split by a rule",
        "the layout of torchvision's ImageFolder, "
        "https://docs.pytorch.org/vision/stable/generated/torchvision.datasets.ImageFolder.html",
    ),
}


def load_dataset(
    name: str,
    root: str | Path | None = None,
    download: bool = False,
    *,
    size: int | None = None,
    test_every: int | None = None,
    test_folder: str | None = None,
) -> Dataset:
    """The data set of that name. `size`, `test_every` and `test_folder` belong to "folder" alone.

    `size` is the side of the square images (64 where none is given); without train/, every `test_every`-th
    file (the fifth) is a test image; `test_folder` names the one to use where both test/ and val/ are there, or
    where it has another name.
    """
    if name not in DATASETS:
        known = ", ".join(DATASETS)
        raise ConfigError(f"no data set is called {name!r}, only {known}." + nearest(name, DATASETS))
    options = {"size": size, "test_every": test_every, "test_folder": test_folder}
    given = [option for option, value in options.items() if value is not None]
    if given and name != "folder":
        raise ConfigError(f"{', '.join(given)} is for the data set 'folder'; {name!r} has no such option")
    if download and name != "cifar100":
        raise ConfigError(f"{name!r} is never downloaded; only 'cifar100' can be")
    if name == "cifar100":
        return cifar.load(root, fetch=download)
    if name == "digits":
        return digits.load()
    return folder.load(
        root,
        size=folder.SIZE if size is None else size,
        test_every=folder.TEST_EVERY if test_every is None else test_every,
        test_folder=test_folder,
    )


def check(root: str | Path) -> list[str]:
    """Verify what lies in `root`, CIFAR-100 or a folder of class folders: a report in lines or a `DataError`."""
    path = Path(root).expanduser()
    if not path.is_dir():
        raise DataError(f"{path} is not a folder. Give one that holds {cifar.FOLDER}/ or one folder a class.")
    if path.name == cifar.FOLDER or (path / cifar.FOLDER).is_dir():
        return cifar.check(path)
    if not any(entry.is_dir() for entry in path.iterdir()):
        raise DataError(
            f"{path} holds no data set: expected {cifar.FOLDER}/, or train/ and test/ (or val/), or one folder a class"
        )
    return folder.check(path)
