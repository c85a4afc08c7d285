"""Data sets of ImageNet's kind: packed stores by name, and a subset of one by a list of its classes."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from incvec.data.class_lists import WNID, ClassList, find_class_list
from incvec.data.dataset import Dataset
from incvec.data.folder import IMAGENET, decode_listing
from incvec.data.layouts import list_images
from incvec.data.resize import CENTER
from incvec.data.store.mapped import Placement
from incvec.data.store.open import Store, is_store, open_store
from incvec.errors import ConfigError, DataError, no_root

LARGE = 128  # sides from here on are cut out and resized, smaller ones padded and cropped


class Named(NamedTuple):
    """A data set that a store has to match."""

    classes: int
    size: int  # the side to pack it with
    class_list: str | None = None


NAMED: Mapping[str, Named] = {
    "imagenet-subset": Named(100, 256, "imagenet-subset"),
    "imagenet": Named(1000, 256),
    "tiny-imagenet-100": Named(100, 64, "tiny-imagenet-100"),
}


def load(
    name: str,
    root: str | Path | None,
    class_list: str | None = None,
    image_size: int | None = None,
    placement: Placement | None = None,
) -> Dataset:
    """The data set `name` ("packed": whatever the store holds) from a store that holds its classes and perhaps more.

    Tiny-ImageNet may lie there as files too: they are small enough to be decoded every time.
    """
    if root is None:
        raise no_root(repr(name), "the packed store, made by `incvec data pack SRC DST`")
    path = Path(root).expanduser()
    if class_list is not None and name in NAMED and NAMED[name].class_list is None:
        raise ConfigError(f"{name!r} has all its classes; a class list is for 'imagenet-subset' or 'packed'")
    wanted = class_list or (NAMED[name].class_list if name in NAMED else None)
    chosen = find_class_list(wanted) if wanted is not None else None
    held = name if name in NAMED else "these classes"
    remedy = f"Give a data root that holds {held}, or make its store, once: {_command(name, wanted, 'IMAGES')}"
    inner = path / name
    path = inner if is_store(inner) and not is_store(path) else path
    if not is_store(path):
        if name == "tiny-imagenet-100" and path.is_dir():
            if image_size not in (None, NAMED[name].size):
                raise ConfigError(f"image_size is {image_size}: Tiny-ImageNet's images are 64 x 64")
            return _decoded(name, path, chosen, remedy)
        if not path.exists():
            raise DataError(
                f"{path} does not exist. Expected a packed store as the data root; make one of the images, once: "
                f"{_command(name, wanted, 'IMAGES')}"
            )
        command = _command(name, wanted, str(path))
        raise DataError(
            f"{path} is not a packed store. Make one of the images, once: {command}; then give STORE as the data root."
        )
    store = open_store(path)
    if amiss := _amiss(name, store.classes, chosen):
        raise DataError(f"{path} {amiss}. {remedy}")
    dataset = _from_store(name, store, chosen, image_size, placement)
    stored = dataset.about["side"]
    if name in NAMED and image_size is None and stored != NAMED[name].size:
        raise DataError(
            f"{path} holds images with a side of {stored}; {name!r} is packed with {NAMED[name].size}: "
            f"{_command(name, wanted, 'IMAGES')}. To train on this store, say which side the network shall see: "
            f"--set image_size={dataset.about['seen']}."
        )
    return dataset


def _command(name: str, class_list: str | None, source: str) -> str:
    """What packs the images of that data set."""
    size = NAMED[name].size if name in NAMED else 256
    classes = f" --classes {shlex.quote(class_list)}" if class_list else ""
    return f"incvec data pack {shlex.quote(source)} STORE --size {size}{classes}"


def _amiss(name: str, have: tuple[str, ...], chosen: ClassList | None) -> str:
    """What is wrong with a store's classes, if anything."""
    if chosen is None and name in NAMED:
        if len(have) != NAMED[name].classes:
            return f"holds {len(have)} classes, {name!r} has {NAMED[name].classes}"
        other = next((found for found in have if not WNID.fullmatch(found)), None)
        told = f"holds a class {other!r}; those of {name!r} have WordNet's numbers for names, such as n01440764"
        return "" if other is None else f"{told}. To train on these images, say --dataset packed"
    if chosen is None:
        return ""
    missing = sorted(set(chosen.classes) - set(have))
    some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return f"lacks {len(missing)} of the {len(chosen.classes)} classes of {chosen.name!r} ({some})" if missing else ""


def _from_store(
    name: str, store: Store, chosen: ClassList | None, image_size: int | None, placement: Placement | None
) -> Dataset:
    parts: dict[str, Any] = {}
    for part in ("train", "test"):
        images, labels = store.images(part, placement)
        if chosen is not None and chosen.classes != store.classes:
            images, labels = _chosen(images, labels, store.classes, chosen)
        parts[f"{part}_images"], parts[f"{part}_labels"] = images, labels
    classes = store.classes if chosen is None else chosen.classes
    side = _side(store.side, image_size)
    fingerprint = store.fingerprint
    if classes != store.classes:
        fingerprint = hashlib.blake2b(f"{fingerprint} {' '.join(classes)}".encode(), digest_size=16).hexdigest()
    return Dataset(
        name=name,
        **parts,
        class_names=classes,
        pad=max(1, store.side // 8),
        flip=True,
        fingerprint=fingerprint,
        normalizations={"default": IMAGENET},
        side=side,
        about={
            "layout": store.about["layout"],
            "split": store.about["rule"],
            "class_list": chosen.name if chosen is not None else store.about["class_list"],
            "left_out": _left_out(store, classes),
            "side": store.side,
            "seen": store.side if side is None else side,
        },
    )


def _left_out(store: Store, classes: tuple[str, ...]) -> int:
    """How many images of these classes could not be read; stores made before tell of all classes together."""
    by_class: Mapping[str, int] | None = store.about.get("left_out_by_class")
    if by_class is None:
        return int(store.about["left_out"])
    return sum(by_class.get(name, 0) for name in classes)


def _chosen(images: Any, labels: torch.Tensor, have: tuple[str, ...], chosen: ClassList) -> Any:
    number = {name: label for label, name in enumerate(chosen.classes)}
    table = torch.tensor([number.get(name, -1) for name in have])
    new = table[labels]
    rows = torch.nonzero(new >= 0).flatten()
    return images.select(rows.numpy().astype(np.int64)), new[rows]


def _side(stored: int, image_size: int | None) -> int | None:
    """What the network sees of images stored with that side; none: as they are, in padded crops."""
    if stored < LARGE:
        if image_size not in (None, stored):
            raise ConfigError(f"image_size is {image_size}, but the store's images have a side of {stored}: pack anew")
        return None
    side = round(CENTER * stored) if image_size is None else image_size
    if side > stored:
        raise ConfigError(f"image_size is {side}, but the store's images have a side of {stored}: pack them larger")
    return side


def _decoded(name: str, path: Path, chosen: ClassList | None, remedy: str) -> Dataset:
    try:
        layout = list_images(path, chosen=chosen)
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}. {remedy}") from None
    dataset = decode_listing(layout.listing, NAMED[name].size)
    about = {**dataset.about, "layout": layout.name, "class_list": layout.class_list}
    return replace(dataset, name=name, about=about)
