"""The data sets by name: their options, loading one, and checking a folder before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from incvec.config import validate
from incvec.data.options import DatasetOptions, FolderOptions, StoreOptions, SubsetOptions
from incvec.errors import ConfigError, DataError, nearest, shorten
from incvec.registry import DATASETS as REGISTERED
from incvec.registry import Registry

if TYPE_CHECKING:
    from incvec.data.dataset import Dataset
    from incvec.data.image_files import Progress

Root = str | Path | None


@dataclass(frozen=True)
class DatasetEntry:
    """A data set that can be loaded by name. Those of this package import the module that loads them when they are."""

    summary: str
    source: str  # the paper, or where the data come from
    load: Callable[[Root, Any], Dataset]  # from the data root and the validated options
    Options: type[DatasetOptions] = DatasetOptions
    download: Callable[[Root], None] | None = None
    classes: int | None = None  # their number, if it is the same for every data root without a `class_list`
    # The number of classes, without reading images, if it depends on the data root: a stream is then cut to fit.
    count_classes: Callable[[Root, Any], int] | None = None


def _module(name: str) -> Any:
    return import_module(f"incvec.data.{name}")


def _load_packed(name: str) -> Callable[[Root, Any], Dataset]:
    return lambda root, options: _module("packed").load(name, root, options)


BUILTINS = {
    "aircraft": DatasetEntry(
        "FGVC-Aircraft by variant: 6,667 training (trainval) and 3,333 test images, 100 classes; torchvision's layout",
        "Maji et al., Fine-grained visual classification of aircraft, 2013, https://arxiv.org/abs/1306.5151",
        lambda root, _: _module("aircraft").load(root),
    ),
    "cifar100": DatasetEntry(
        "CIFAR-100: 50,000 training and 10,000 test images, 32 x 32, 100 classes",
        "Krizhevsky, Learning multiple layers of features from tiny images, 2009, "
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        lambda root, _: _module("cifar").load(root),
        download=lambda root: _module("cifar").download(root),
        classes=100,
    ),
    "digits": DatasetEntry(
        "scikit-learn's 1,797 handwritten digits, 8 x 8, 10 classes; embedded, no download",
        "Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository, 1998, "
        "https://doi.org/10.24432/C50P49",
        lambda root, _: _module("digits").load(),
        classes=10,
    ),
    "folder": DatasetEntry(
        "your own images: train/ and test/ (or val/) with one folder per class, or one folder split by a rule",
        "the layout of torchvision's ImageFolder, "
        "https://docs.pytorch.org/vision/stable/generated/torchvision.datasets.ImageFolder.html",
        lambda root, options: _module("folder").load(root, options),
        FolderOptions,
        count_classes=lambda root, options: _module("folder").count_classes(root, options),
    ),
    "imagenet-subset": DatasetEntry(
        "ImageNet-Subset: 100 classes of ImageNet, from a packed store of them or of all; other lists by class_list",
        "Deng et al., ImageNet: a large-scale hierarchical image database, 2009, https://www.image-net.org",
        _load_packed("imagenet-subset"),
        SubsetOptions,
        classes=100,
    ),
    "imagenet": DatasetEntry(
        "ImageNet (ILSVRC 2012): 1.28 million training and 50,000 validation images, 1,000 classes; a packed store",
        "Russakovsky et al., ImageNet large scale visual recognition challenge, 2015, https://arxiv.org/abs/1409.0575",
        _load_packed("imagenet"),
        StoreOptions,
        classes=1000,
    ),
    "tiny-imagenet-100": DatasetEntry(
        "100 of Tiny-ImageNet's 200 classes: 50,000 training and 5,000 validation images, 64 x 64, packed or as files",
        "Le and Yang, Tiny ImageNet visual recognition challenge, 2015, https://cs231n.stanford.edu/tiny-imagenet-200.zip",
        _load_packed("tiny-imagenet-100"),
        SubsetOptions,
        classes=100,
    ),
    "packed": DatasetEntry(
        "any packed store of your own images, made by the command data pack",
        "this package's format, read as torchvision's ImageFolder is, "
        "https://docs.pytorch.org/vision/stable/generated/torchvision.datasets.ImageFolder.html",
        _load_packed("packed"),
        SubsetOptions,
        count_classes=lambda root, options: _module("packed").count_classes(root, options),
    ),
}

DATASETS: Registry[DatasetEntry] = REGISTERED
DATASETS.add_builtins(BUILTINS)


def find_dataset(name: str) -> DatasetEntry:
    if name not in DATASETS:
        raise ConfigError(f"unknown data set {shorten(name)}.{nearest(name, DATASETS)} Known: {', '.join(DATASETS)}.")
    return DATASETS[name]


def dataset_options(name: str, given: Mapping[str, Any]) -> DatasetOptions:
    """The validated options of a data set; those that are None count as not given."""
    kind = find_dataset(name).Options
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in kind.model_fields:
            owners = [other for other, entry in DATASETS.items() if key in entry.Options.model_fields]
            hint = f" It is an option of {', '.join(owners)}." if owners else nearest(key, kind.model_fields)
            known = f" Its options: {', '.join(kind.model_fields) or 'none'}."
            raise ConfigError(f"the data set {name!r} has no option {key!r}.{hint}{known}")
    options: DatasetOptions = validate(kind, given, where=name)
    return options


def load_dataset(name: str, root: Root = None, download: bool = False, **options: Any) -> Dataset:
    """The data set `name`, with its options (`image_size`, `held_out`, ...: see the `Options` of its entry)."""
    entry, validated = find_dataset(name), dataset_options(name, options)
    if root is not None and Path(root).expanduser().is_file():
        raise DataError(f"the data root {root} is a file: expected the folder with the files of {name!r}.")
    if download:
        if entry.download is None:
            able = ", ".join(repr(other) for other, each in DATASETS.items() if each.download is not None)
            raise ConfigError(f"{name!r} is never downloaded; only {able} can be.")
        entry.download(root)
    dataset = entry.load(root, validated)
    from incvec.data.dataset import hold_out

    return dataset if validated.held_out is None else hold_out(dataset, validated.held_out)


def check(root: str | Path, progress: Progress | None = None) -> list[str]:
    """Verify the data in `root`: CIFAR-100, FGVC-Aircraft, a packed store or class folders.

    Returns the lines of a report, or raises a `DataError`.
    """
    from incvec.data import aircraft, cifar, folder
    from incvec.data.layouts import list_images
    from incvec.data.listing import check_folder
    from incvec.data.store.open import is_store, verify_store

    expected = (
        f"{cifar.FOLDER}/, {aircraft.FOLDER}/, a packed store, train/ and test/ (or val/), or one folder per class"
    )
    path = check_folder(root, "this check", f"a folder with {expected}")
    if is_store(path):
        return verify_store(path, progress)
    if path.name == aircraft.FOLDER or (path / aircraft.FOLDER).is_dir():
        return aircraft.check(path)
    if path.name == cifar.FOLDER or (path / cifar.FOLDER).is_dir():
        return cifar.check(path)
    if not any(entry.is_dir() for entry in path.iterdir()):
        raise DataError(f"{path} contains no data set: expected {expected}")
    return folder.check(list_images(path), progress)
