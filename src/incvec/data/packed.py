"""Data sets in packed stores: `packed`, whatever a store contains, and those of ImageNet's kind by name."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.data.class_lists import WNID, ClassList, find_class_list
from incvec.data.dataset import IMAGENET_NORMALIZATION, Dataset
from incvec.data.folder import load_listing
from incvec.data.layouts import list_images
from incvec.data.options import StoreOptions, SubsetOptions
from incvec.data.store.mapped import PackedImages
from incvec.data.store.open import Store, is_store, open_store
from incvec.data.views import CENTER_FRACTION
from incvec.errors import ConfigError, DataError, no_root

LARGE = 128  # stored sides from here on get resized crops, smaller ones padded crops


@dataclass(frozen=True)
class Expected:
    """What a store has to contain to be a named data set."""

    classes: int
    size: int  # the side to pack it with
    class_list: str | None = None


EXPECTED: Mapping[str, Expected] = {
    "imagenet-subset": Expected(100, 256, "imagenet-subset"),
    "imagenet": Expected(1000, 256),
    "tiny-imagenet-100": Expected(100, 64, "tiny-imagenet-100"),
}


def load(name: str, root: str | Path | None, options: StoreOptions) -> Dataset:
    """The data set `name` from a store of its classes, and possibly of others.

    ROOT is the store or the folder above it. Tiny-ImageNet may also be given as files: they are small enough to be
    decoded for every run.
    """
    if root is None:
        raise no_root(repr(name), "the packed store, made by `incvec data pack SRC DST`")
    expected = EXPECTED.get(name)
    wanted = getattr(options, "class_list", None) or (expected.class_list if expected else None)
    class_list = find_class_list(wanted) if wanted is not None else None
    path = Path(root).expanduser()
    path = path / name if is_store(path / name) and not is_store(path) else path
    contents = name if expected else "these classes"
    remedy = f"Give a data root with {contents}, or pack it, once: {_pack_command(name, wanted, 'IMAGES')}"
    if not is_store(path):
        if name == "tiny-imagenet-100" and path.is_dir():
            return _load_files(name, path, class_list, options.image_size, remedy)
        if not path.exists():
            raise DataError(f"{path} does not exist. Expected a packed store as the data root. {remedy}")
        raise DataError(
            f"{path} is not a packed store. Pack the images, once: {_pack_command(name, wanted, str(path))}; then give "
            "STORE as the data root."
        )
    store = open_store(path)
    if problem := _class_problem(name, store.classes, class_list):
        raise DataError(f"{path} {problem}. {remedy}")
    dataset = _from_store(name, store, class_list, options)
    if expected and options.image_size is None and store.side != expected.size:
        raise DataError(
            f"{path} has images with a side of {store.side}; {name!r} is packed with {expected.size}: "
            f"{_pack_command(name, wanted, 'IMAGES')}. To train on this store, give the input side of the network: "
            f"--set image_size={dataset.about['seen']}."
        )
    return dataset


def count_classes(root: str | Path | None, options: SubsetOptions) -> int:
    """The number of classes of the data set `packed`."""
    if options.class_list is not None:
        return len(find_class_list(options.class_list).classes)
    if root is None:
        raise no_root("'packed'", "the packed store, made by `incvec data pack SRC DST`")
    path = Path(root).expanduser()
    return len(open_store(path / "packed" if is_store(path / "packed") and not is_store(path) else path).classes)


def _pack_command(name: str, class_list: str | None, source: str) -> str:
    size = EXPECTED[name].size if name in EXPECTED else 256
    classes = f" --classes {shlex.quote(class_list)}" if class_list else ""
    return f"incvec data pack {shlex.quote(source)} STORE --size {size}{classes}"


def _class_problem(name: str, present: tuple[str, ...], class_list: ClassList | None) -> str:
    """Why a store's classes are not those of the data set; empty if they are."""
    if class_list is not None:
        missing = sorted(set(class_list.classes) - set(present))
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        total = len(class_list.classes)
        return f"lacks {len(missing)} of the {total} classes of {class_list.name!r} ({shown})" if missing else ""
    if name not in EXPECTED:
        return ""
    if len(present) != EXPECTED[name].classes:
        return f"has {len(present)} classes, {name!r} has {EXPECTED[name].classes}"
    other = next((each for each in present if not WNID.fullmatch(each)), None)
    if other is None:
        return ""
    return (
        f"has a class {other!r}; the classes of {name!r} are WNIDs, such as n01440764. To train on these images, give "
        "--dataset packed"
    )


def _from_store(name: str, store: Store, class_list: ClassList | None, options: StoreOptions) -> Dataset:
    classes = store.classes if class_list is None else class_list.classes
    parts: dict[str, Any] = {}
    for part in ("train", "test"):
        images, labels = store.images(part, options.placement)
        if classes != store.classes:
            images, labels = _select_classes(images, labels, store.classes, classes)
        parts |= {f"{part}_images": images, f"{part}_labels": labels}
    fingerprint = store.fingerprint
    if classes != store.classes:
        fingerprint = hashlib.blake2b(f"{fingerprint} {' '.join(classes)}".encode(), digest_size=16).hexdigest()
    side = _input_side(store.side, options.image_size)
    return Dataset(
        name=name,
        **parts,
        class_names=classes,
        pad=max(1, store.side // 8),
        flip=True,
        fingerprint=fingerprint,
        normalizations={"default": IMAGENET_NORMALIZATION},
        side=side,
        about={
            "layout": store.about["layout"],
            "split": store.about["split"],
            "class_list": class_list.name if class_list is not None else store.about["class_list"],
            "left_out": sum(store.about["left_out_by_class"].get(each, 0) for each in classes),
            "side": store.side,
            "seen": store.side if side is None else side,
        },
    )


def _select_classes(
    images: PackedImages, labels: Tensor, present: tuple[str, ...], classes: tuple[str, ...]
) -> tuple[PackedImages, Tensor]:
    new_label = {name: label for label, name in enumerate(classes)}
    labels = torch.tensor([new_label.get(name, -1) for name in present])[labels]
    rows = torch.nonzero(labels >= 0).flatten()
    return images.select(rows.numpy()), labels[rows]


def _input_side(stored: int, image_size: int | None) -> int | None:
    """The network's input side for images stored with that side; None: as stored, in padded crops."""
    if stored < LARGE:
        if image_size not in (None, stored):
            raise ConfigError(
                f"image_size is {image_size}, but the images of the store have a side of {stored}: pack them again "
                f"with --size {image_size}"
            )
        return None
    side = round(CENTER_FRACTION * stored) if image_size is None else image_size
    if side > stored:
        raise ConfigError(
            f"image_size is {side}, but the images of the store have a side of {stored}: pack them again with a larger "
            "--size"
        )
    return side


def _load_files(name: str, path: Path, class_list: ClassList | None, image_size: int | None, remedy: str) -> Dataset:
    size = EXPECTED[name].size
    if image_size not in (None, size):
        raise ConfigError(f"image_size is {image_size}: the images of Tiny-ImageNet are {size} x {size}")
    try:
        listing = list_images(path, class_list=class_list)
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}. {remedy}") from None
    return replace(load_listing(listing, size), name=name)
