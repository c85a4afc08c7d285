"""The layouts in which image files are published: torchvision's ImageNet, Tiny-ImageNet's, or any class folders.

`imagenet`: train/WNID/* and val/WNID/*, or a flat val/ with a ground-truth file, which is one of
- lines of an image's name and its class (a WNID, or an index into the sorted training folders, from 0), such as
  Kaggle's LOC_val_solution.csv;
- the development kit's ILSVRC2012_validation_ground_truth.txt: one number per line for the sorted images, an index into
  the synsets of the meta.mat beside it.

`tiny-imagenet`: train/WNID/images/* and val/images/* with val/val_annotations.txt. `folder`: see listing.py.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from incvec.data.class_lists import WNID, ClassList
from incvec.data.listing import (
    TEST_FOLDERS,
    Listing,
    check_folder,
    class_files,
    is_folder,
    is_hidden,
    is_image,
    list_class_folders,
    make_listing,
    subfolders,
)
from incvec.data.options import TEST_EVERY
from incvec.errors import ConfigError, DataError, nearest
from incvec.text_files import read_text

LAYOUTS = ("imagenet", "tiny-imagenet", "folder")
DEVKIT = "ILSVRC2012_validation_ground_truth.txt"
GROUND_TRUTHS = ("LOC_val_solution.csv", "val.txt", "val_annotations.txt", DEVKIT)


def list_images(
    root: str | Path | None,
    layout: str | None = None,
    class_list: ClassList | None = None,
    ground_truth: Path | None = None,
) -> Listing:
    """The image files of a data set with their labels, restricted to the classes of `class_list` if given."""
    path = check_folder(root, "this data set", "train/ and val/, or one folder per class")
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}.{nearest(layout, LAYOUTS)} Known layouts: {', '.join(LAYOUTS)}.")
    layout = layout or find_layout(path)
    if ground_truth is not None and layout != "imagenet":
        raise ConfigError(f"a ground-truth file belongs to the layout 'imagenet'; {path} is read as {layout!r}")
    if ground_truth is not None and not ground_truth.is_file():
        state = "is not a file" if ground_truth.exists() else "does not exist"
        raise DataError(f"{ground_truth} {state}: --ground-truth names the file with the classes of a flat val/")
    if layout == "folder":
        listing = list_class_folders(path, class_list=class_list)
    else:
        listing = _list_train_and_val(path, layout, class_list, ground_truth)
    return replace(listing, class_list=None if class_list is None else class_list.name)


def list_folder_dataset(
    root: str | Path | None, test_every: int = TEST_EVERY, test_folder: str | None = None
) -> Listing:
    """`list_class_folders`; if ROOT has another layout, the error explains how to pack it."""
    try:
        return list_class_folders(root, test_every, test_folder)
    except DataError:
        path = Path(root or "").expanduser()
        layout = find_layout(path) if root is not None and path.is_dir() else "folder"
        if layout == "folder" or (layout == "imagenet" and subfolders(path / "val")):
            raise
    name = "Tiny-ImageNet's layout" if layout == "tiny-imagenet" else "ImageNet's layout with a flat val/"
    size = " --size 64" if layout == "tiny-imagenet" else ""
    raise DataError(
        f"{path} has {name}: {path / 'val'} has no class folders. Pack it, once: "
        f"incvec data pack {shlex.quote(str(path))} STORE{size}; then give --dataset packed --data-root STORE."
    )


def find_layout(root: Path) -> str:
    """The layout of a folder, by its contents."""
    train, val = root / "train", root / "val"
    if (val / "val_annotations.txt").is_file() and (val / "images").is_dir():
        return "tiny-imagenet"
    if train.is_dir() and val.is_dir():
        classes = subfolders(train)
        others = [name for name in classes if not WNID.fullmatch(name)]
        if classes and not others:
            return "imagenet"
        flat = not any(subfolders(root / name) for name in TEST_FOLDERS if (root / name).is_dir())
        if 2 * len(others) < len(classes) and flat:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise DataError(
                f"{root} looks like ImageNet with a flat val/, but besides {len(classes) - len(others)} WNID folders "
                f"{train} has {others[0]!r}{more}: move it away"
            )
    return "folder"


def _list_train_and_val(root: Path, layout: str, class_list: ClassList | None, ground_truth: Path | None) -> Listing:
    for folder in (root / "train", root / "val"):
        if not folder.is_dir():
            raise DataError(f"{folder} is missing: the layout {layout!r} has train/ and val/")
    train, ignored = class_files(root / "train", class_list)
    val, ignored_val, split = _list_val(root, layout, class_list, ground_truth)
    return make_listing(root, ("train", train), ("val", val), ignored + ignored_val, split, layout)


def _list_val(
    root: Path, layout: str, class_list: ClassList | None, ground_truth: Path | None
) -> tuple[dict[str, list[Path]], int, str]:
    """The validation images by class, the number of other files, and the description of the split."""
    folder = root / "val"
    truth: Path | None
    if layout == "tiny-imagenet":
        folder, truth = folder / "images", folder / "val_annotations.txt"
        for needed in (folder, truth):
            if not needed.exists():
                raise DataError(
                    f"{needed} is missing: the layout {layout!r} has val/images/ and val/val_annotations.txt. Omit "
                    "--layout to detect the layout."
                )
    else:
        truth = ground_truth or _find_ground_truth(root)
        if subfolders(folder) and not (truth and _flat_images(folder)[0]):
            if ground_truth is not None:
                raise ConfigError(
                    f"{ground_truth} was given as the ground truth of a flat val/, but {folder} has class folders: "
                    "omit --ground-truth"
                )
            return *class_files(folder, class_list), "train/ and val/"
        if truth is None:
            raise DataError(
                f"{folder} has images but no class folders, and no ground-truth file was found "
                f"({', '.join(GROUND_TRUTHS)}). Name the file with --ground-truth when packing, or sort the images "
                "into one folder per class."
            )
    classes = None if class_list is None else class_list.classes
    return *_classify_flat(folder, truth, subfolders(root / "train"), classes), f"train/ and val/ by {truth.name}"


def _find_ground_truth(root: Path) -> Path | None:
    folders = [root, root / "val", *sorted(root.glob("*devkit*")), *sorted(root.glob("*devkit*/data"))]
    return next((place / name for place in folders for name in GROUND_TRUTHS if (place / name).is_file()), None)


def _flat_images(folder: Path) -> tuple[list[Path], int]:
    """The sorted images of a flat folder, and the number of other files."""
    with os.scandir(folder) as scanned:
        entries = [entry for entry in scanned if not is_hidden(entry.name) and not is_folder(entry)]
    images = sorted(entry.path for entry in entries if is_image(entry))
    return [Path(image) for image in images], len(entries) - len(images)


def _classify_flat(
    folder: Path, truth: Path, train_classes: Sequence[str], selected: Collection[str] | None
) -> tuple[dict[str, list[Path]], int]:
    """The images of a flat folder by class (only the selected ones), and the number of other files."""
    images, ignored = _flat_images(folder)
    stems = [file.stem for file in images]
    repeated = next((stem for stem, count in Counter(stems).items() if count > 1), None)
    if repeated is not None:  # ground truths may omit extensions, so either file could be meant
        files = " and ".join(file.name for file in images if file.stem == repeated)
        raise DataError(f"{folder} has {files}, which {truth} cannot distinguish: keep one of them")
    classes = _read_ground_truth(truth, stems, train_classes)
    by_class: dict[str, list[Path]] = {}
    for file in images:
        name = classes.pop(file.stem, None)
        if name is None:
            raise DataError(f"{truth} has no class for {file}: add a line for it, or move the image away")
        if selected is None and name not in train_classes:
            raise DataError(
                f"{truth} gives {file.name} the class {name!r}, which has no training folder. Correct it or add the "
                "folder; to use only some of the classes, name them with --classes."
            )
        if selected is None or name in selected:
            by_class.setdefault(name, []).append(file)
    missing = [stem for stem, name in classes.items() if selected is None or name in selected]
    if missing:
        raise DataError(
            f"{len(missing)} of the images listed in {truth} are not in {folder}, such as {missing[0]}: copy them "
            "there, or remove them from the list"
        )
    return by_class, ignored - (truth.parent == folder and not is_hidden(truth.name))


def _read_ground_truth(file: Path, stems: Sequence[str], train_classes: Sequence[str]) -> dict[str, str]:
    """Class by image name without extension."""
    lines = [line for line in read_text(file).splitlines() if line.strip()]
    rows = [re.split(r"[\s,]+", line.strip()) for line in lines]
    if rows and rows[0][0].lower() == "imageid":
        rows = rows[1:]
    if not rows:
        raise DataError(f"{file} is empty; expected a line for each of {len(stems)} images")
    if all(len(row) == 1 and row[0].isdecimal() for row in rows):
        return _read_devkit(file, [int(row[0]) for row in rows], stems)
    incomplete = next((row for row in rows if len(row) < 2), None)
    if incomplete is not None:
        raise DataError(
            f"{file}: the line {' '.join(incomplete)!r} has no class; expected an image's name and its class"
        )
    names, classes = [Path(row[0]).stem for row in rows], [row[1] for row in rows]
    if all(text.isdecimal() for text in classes):
        # Indices count all classes: with a part of the training folders they would name the wrong ones.
        highest = max(map(int, classes))
        if highest != len(train_classes) - 1:
            raise DataError(
                f"{file} numbers its classes from 0 to {highest}, but there are {len(train_classes)} training folders: "
                "give a file that names the classes"
            )
        classes = [train_classes[int(text)] for text in classes]
    class_of: dict[str, str] = {}
    for name, given in zip(names, classes, strict=True):
        if class_of.setdefault(name, given) != given:
            raise DataError(f"{file} gives {name} two classes, {class_of[name]} and {given}: expected one")
    return class_of


def _read_devkit(file: Path, numbers: Sequence[int], stems: Sequence[str]) -> dict[str, str]:
    meta = file.parent / "meta.mat"
    if not meta.is_file():
        raise DataError(f"{file} refers to the synsets of the development kit; meta.mat is missing in {file.parent}")
    if len(numbers) != len(stems):
        raise DataError(f"{file} has {len(numbers)} lines for {len(stems)} images: expected the same number")
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
        return {stem: wnids[number] for stem, number in zip(stems, numbers, strict=True)}
    except Exception as error:
        raise DataError(f"{meta} cannot be read as the synsets of the development kit: {error!r}") from error
