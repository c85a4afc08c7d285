"""The data sets by name: loading one, and checking a folder before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from incvec.data import aircraft, cifar, digits, folder
from incvec.data import imagenet as stores
from incvec.data.dataset import Dataset, hold_out
from incvec.data.layouts import list_class_folders, list_images
from incvec.data.store import open as packed
from incvec.data.store.mapped import Placement
from incvec.errors import ConfigError, DataError, nearest

__all__ = ["DATASETS", "Dataset", "Entry", "check", "load_dataset"]


class Entry(NamedTuple):
    summary: str
    source: str  # the paper, or where the data come from


DATASETS: Mapping[str, Entry] = {
    "aircraft": Entry(
        "FGVC-Aircraft by variant: 6,667 training (trainval) and 3,333 test images, 100 classes; torchvision's layout",
        "Maji et al., Fine-grained visual classification of aircraft, 2013, https://arxiv.org/abs/1306.5151",
    ),
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
    "imagenet-subset": Entry(
        "ImageNet-Subset: 100 classes of ImageNet, from a packed store of them or of all; other lists by class_list",
        "Deng et al., ImageNet: a large-scale hierarchical image database, 2009, https://www.image-net.org",
    ),
    "imagenet": Entry(
        "ImageNet (ILSVRC 2012): 1.28 million training and 50,000 validation images, 1,000 classes; a packed store",
        "Russakovsky et al., ImageNet large scale visual recognition challenge, 2015, https://arxiv.org/abs/1409.0575",
    ),
    "tiny-imagenet-100": Entry(
        "100 of Tiny-ImageNet's 200 classes: 50,000 training and 5,000 validation images, 64 x 64, packed or as files",
        "Le and Yang, Tiny ImageNet visual recognition challenge, 2015, https://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
    "packed": Entry(
        "any packed store of your own images, made by the command data pack",
        "this package's format, read as torchvision's ImageFolder is, "
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
    class_list: str | None = None,
    placement: Placement | None = None,
    held_out: int | None = None,
) -> Dataset:
    """The data set of that name. `test_every` and `test_folder` belong to "folder" alone; `class_list` (a list's
    name or a file) and `placement` (on the device or streamed to it; none: by its memory) to packed stores. With
    `held_out`, every n-th training image of a class stands in the place of the test images.

    `size` is the side of the square images (64 where none is given); without train/, every `test_every`-th
    file (the fifth) is a test image; `test_folder` names the one to use where both test/ and val/ are there, or
    where it has another name.
    """
    if name not in DATASETS:
        known = ", ".join(DATASETS)
        raise ConfigError(f"no data set is called {name!r}, only {known}." + nearest(name, DATASETS))
    if held_out is not None:
        whole = load_dataset(
            name, root, download, size=size, test_every=test_every, test_folder=test_folder, class_list=class_list,
            placement=placement,
        )  # fmt: skip
        return hold_out(whole, held_out)
    if name in stores.NAMED or name == "packed":
        if download or test_every is not None or test_folder is not None:
            raise ConfigError(f"{name!r} is read as it was packed: it takes no download, test_every or test_folder")
        return stores.load(name, root, class_list, size, placement)
    if class_list is not None or placement is not None:
        raise ConfigError(f"class_list and placement are for packed stores; {name!r} has no such option")
    if size is not None and name != "folder":
        able = ", ".join(["folder", "packed", *stores.NAMED])
        raise ConfigError(f"image_size is for the data sets {able}; the images of {name!r} stay as they are")
    options = {"test_every": test_every, "test_folder": test_folder}
    given = [option for option, value in options.items() if value is not None]
    if given and name != "folder":
        raise ConfigError(f"{', '.join(given)} is for the data set 'folder'; {name!r} has no such option")
    if download and name != "cifar100":
        raise ConfigError(f"{name!r} is never downloaded; only 'cifar100' can be")
    if name == "aircraft":
        return aircraft.load(root)
    if name == "cifar100":
        return cifar.load(root, fetch=download)
    if name == "digits":
        return digits.load()
    side = folder.SIZE if size is None else size
    if side < 1:
        raise ConfigError(f"size is {side}: expected the side of the images in pixels, 1 or more")
    listing = list_class_folders(root, folder.TEST_EVERY if test_every is None else test_every, test_folder)
    return folder.decode_listing(listing, side)


def check(root: str | Path, progress: packed.Progress | None = None) -> list[str]:
    """Verify what lies in `root`, CIFAR-100, FGVC-Aircraft, a packed store or class folders.

    Returns a report in lines or raises a `DataError`.
    """
    path = Path(root).expanduser()
    holds = f"{cifar.FOLDER}/, {aircraft.FOLDER}/, a packed store, train/ and test/ (or val/), or one folder a class"
    if not path.is_dir():
        raise DataError(f"{folder.no_folder(path)}. Give a folder that holds {holds}.")
    if packed.is_store(path):
        return packed.check(path, progress)
    if path.name == aircraft.FOLDER or (path / aircraft.FOLDER).is_dir():
        return aircraft.check(path)
    if path.name == cifar.FOLDER or (path / cifar.FOLDER).is_dir():
        return cifar.check(path)
    if not any(entry.is_dir() for entry in path.iterdir()):
        raise DataError(f"{path} holds no data set: expected {holds}")
    found = list_images(path)
    return folder.check(found.listing, progress, found.name)
