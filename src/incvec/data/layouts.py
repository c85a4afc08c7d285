"""Where the images of a data set lie: torchvision's ImageNet, Tiny-ImageNet's own layout, or any class folders.

`imagenet`: train/WNID/* and val/WNID/*, or a flat val/ whose classes stand in a ground-truth file. That file is one of
- lines of an image's name and its class (a WNID, or a number counting the sorted training folders from 0);
  Kaggle's LOC_val_solution.csv is of this kind;
- the development kit's ILSVRC2012_validation_ground_truth.txt, one number a line for the sorted images, which count
  the synsets of the meta.mat beside it.

`tiny-imagenet`: train/WNID/images/* and val/images/* with val/val_annotations.txt. `folder`: see folder.py.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from incvec.data.class_lists import WNID, ClassList
from incvec.data.folder import (
    TEST_EVERY,
    TEST_FOLDERS,
    Listing,
    class_files,
    folders_in,
    is_folder,
    is_hidden,
    is_image,
    list_files,
    no_folder,
)
from incvec.errors import ConfigError, DataError, nearest, no_root

LAYOUTS = ("imagenet", "tiny-imagenet", "folder")
DEVKIT = "ILSVRC2012_validation_ground_truth.txt"
GROUND_TRUTHS = ("LOC_val_solution.csv", "val.txt", "val_annotations.txt", DEVKIT)


@dataclass(frozen=True)
class Layout:
    """What is known of a data set's files before any image is opened."""

    name: str
    listing: Listing
    class_list: str | None  # the list that chose the classes, where one did


def find_layout(root: Path) -> str:
    """Which layout a folder has, by what lies in it."""
    train, val = root / "train", root / "val"
    if (val / "val_annotations.txt").is_file() and (val / "images").is_dir():
        return "tiny-imagenet"
    if train.is_dir() and val.is_dir():
        classes = folders_in(train)
        strays = [name for name in classes if not WNID.fullmatch(name)]
        if classes and not strays:
            return "imagenet"
        if 2 * len(strays) < len(classes) and _is_flat(root):
            more = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
            raise DataError(
                f"{root} looks like ImageNet with a flat val/, but beside {len(classes) - len(strays)} folders with "
                f"ImageNet's names {train} has {strays[0]!r}{more}: move it away"
            )
    return "folder"


def _is_flat(root: Path) -> bool:
    """Whether neither val/ nor test/ has class folders."""
    return not any(folders_in(root / name) for name in TEST_FOLDERS if (root / name).is_dir())


def list_class_folders(
    root: str | Path | None, test_every: int = TEST_EVERY, test_folder: str | None = None
) -> Listing:
    """`list_files`, which says what to do with layouts that are for packing alone."""
    try:
        return list_files(root, test_every, test_folder)
    except DataError:
        path = Path(root or "").expanduser()
        name = find_layout(path) if root is not None and path.is_dir() else "folder"
        if name == "folder" or (name == "imagenet" and folders_in(path / "val")):
            raise
    found = "Tiny-ImageNet's own layout" if name == "tiny-imagenet" else "ImageNet's layout with a flat val/"
    size = " --size 64" if name == "tiny-imagenet" else ""
    raise DataError(
        f"{path} has {found}, where {path / 'val'} has no class folders to be read as they are. Pack it, once: "
        f"incvec data pack {shlex.quote(str(path))} STORE{size}; then give --dataset packed --data-root STORE."
    )


def list_images(
    root: str | Path | None,
    layout: str | None = None,
    chosen: ClassList | None = None,
    ground_truth: Path | None = None,
) -> Layout:
    """The image files of a data set with their labels; of the `chosen` classes only, where a list is given."""
    if root is None:
        raise no_root("this data set", "the folder its images lie in")
    path = Path(root).expanduser()
    if not path.is_dir():
        raise DataError(f"{no_folder(path)}; expected train/ and val/, or one folder a class")
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"no layout is called {layout!r}.{nearest(layout, LAYOUTS)} Layouts: {', '.join(LAYOUTS)}.")
    name = layout or find_layout(path)
    if ground_truth is not None and name != "imagenet":
        raise ConfigError(f"a ground-truth file belongs to the layout 'imagenet'; {path} is read as {name!r}")
    if ground_truth is not None and not ground_truth.is_file():
        state = "is not a file" if ground_truth.exists() else "does not exist"
        raise DataError(f"{ground_truth} {state}: --ground-truth names the file with the classes of a flat val/")
    listing = list_files(path, chosen=chosen) if name == "folder" else _list_pair(path, name, chosen, ground_truth)
    return Layout(name, listing, None if chosen is None else chosen.name)


def _list_pair(root: Path, name: str, chosen: ClassList | None, ground_truth: Path | None) -> Listing:
    train_root, val_root = root / "train", root / "val"
    for folder in (train_root, val_root):
        if not folder.is_dir():
            raise DataError(f"{folder} is missing: the layout {name!r} has train/ and val/")
    train, ignored = class_files(train_root, chosen)
    val, more, rule = _list_val(root, name, chosen, ground_truth)
    for here, names, there, others in (("train", train, "val", val), ("val", val, "train", train)):
        for lacking in names:
            if lacking not in others:
                raise DataError(
                    f"class {lacking!r} is in {root / here} but has no image in {root / there}: expected some in both"
                )
    return Listing(
        root,
        tuple(train),
        tuple((file, label) for label, files in enumerate(train.values()) for file in files),
        tuple((file, label) for label, files in enumerate(val[name] for name in train) for file in files),
        ignored + more,
        rule,
    )


def _list_val(
    root: Path, name: str, chosen: ClassList | None, ground_truth: Path | None
) -> tuple[dict[str, list[Path]], int, str]:
    """The validation images by class, how many other files lie there, and what the split is called."""
    folder = root / "val"
    truth: Path | None
    if name == "tiny-imagenet":
        folder, truth = folder / "images", folder / "val_annotations.txt"
        for needed in (folder, truth):
            if not needed.exists():
                raise DataError(
                    f"{needed} is missing: the layout {name!r} has val/images/ and val/val_annotations.txt. Leave "
                    "--layout out to have the layout found."
                )
    elif folders_in(folder) and not (_files(folder)[0] and (ground_truth or _truth_beside(root))):
        if ground_truth is not None:
            raise ConfigError(
                f"{ground_truth} was given as the ground truth of a flat val/, but {folder} has class folders: leave "
                "--ground-truth out"
            )
        return *class_files(folder, chosen), "train/ and val/"
    else:
        truth = ground_truth or _truth_beside(root)
        if truth is None:
            raise DataError(
                f"{root / 'val'} holds images but no class folders, and no ground truth lies beside it "
                f"({', '.join(GROUND_TRUTHS)}). Name the file with --ground-truth where it is packed, or sort "
                "the images into one folder a class."
            )
    found = _flat(folder, truth, folders_in(root / "train"), None if chosen is None else chosen.classes)
    return *found, f"train/ and val/ by {truth.name}"


def _truth_beside(root: Path) -> Path | None:
    places = [root, root / "val", *sorted(root.glob("*devkit*")), *sorted(root.glob("*devkit*/data"))]
    for place in places:
        for name in GROUND_TRUTHS:
            if (place / name).is_file():
                return place / name
    return None


def _files(folder: Path) -> tuple[list[Path], int]:
    """The images of a flat folder, sorted, and how many other files lie there."""
    with os.scandir(folder) as found:
        entries = [entry for entry in found if not is_hidden(entry.name) and not is_folder(entry)]
    images = sorted(entry.path for entry in entries if is_image(entry))
    return [Path(image) for image in images], len(entries) - len(images)


def _flat(
    folder: Path, truth: Path, everything: Sequence[str], wanted: Collection[str] | None
) -> tuple[dict[str, list[Path]], int]:
    """The images of a flat folder by class, of the wanted classes where some were chosen; how many other files."""
    images, ignored = _files(folder)
    stems = [file.stem for file in images]
    twice = next((stem for stem, count in Counter(stems).items() if count > 1), None)
    if twice is not None:  # a truth names images with or without their ending, so either might be meant
        files = " and ".join(file.name for file in images if file.stem == twice)
        raise DataError(f"{folder} has {files}, which {truth} cannot tell apart: keep one of them")
    classes = _read_truth(truth, stems, everything)
    found: dict[str, list[Path]] = {}
    for file in images:
        name = classes.pop(file.stem, None)
        if name is None:
            raise DataError(f"{truth} does not say which class {file} has: add a line for it, or move the image away")
        if wanted is None and name not in everything:
            raise DataError(
                f"{truth} gives {file.name} the class {name!r}, which has no training folder. Correct it or add the "
                "folder; to take some of the classes only, name them with --classes."
            )
        if wanted is None or name in wanted:
            found.setdefault(name, []).append(file)
    gone = [stem for stem, name in classes.items() if wanted is None or name in wanted]
    if gone:
        raise DataError(
            f"{len(gone)} of the images that {truth} lists are not in {folder}, such as {gone[0]}: copy them there, or "
            "take them off the list"
        )
    return found, ignored - (truth.parent == folder and not is_hidden(truth.name))


def _read_truth(file: Path, stems: Sequence[str], everything: Sequence[str]) -> dict[str, str]:
    """Class by image name without its ending."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as a ground truth: {error}") from error
    rows = [re.split(r"[\s,]+", line.strip()) for line in lines]
    if rows and rows[0][0].lower() == "imageid":
        rows = rows[1:]
    if not rows:
        raise DataError(f"{file} is empty; expected a line for each of {len(stems)} images")
    if all(len(row) == 1 and row[0].isdigit() for row in rows):
        return _read_devkit(file, [int(row[0]) for row in rows], stems)
    bad = next((row for row in rows if len(row) < 2), None)
    if bad is not None:
        raise DataError(f"{file}: the line {' '.join(bad)!r} has no class; expected an image's name and its class")
    names, classes = [Path(row[0]).stem for row in rows], [row[1] for row in rows]
    if all(text.isdigit() for text in classes):
        # Numbers mean nothing beside a part of the classes, where they would count other folders.
        highest = max(map(int, classes))
        if highest != len(everything) - 1:
            raise DataError(
                f"{file} numbers its classes from 0 to {highest}, but there are {len(everything)} training folders to "
                "count: give a file that names the classes"
            )
        classes = [everything[int(text)] for text in classes]
    told: dict[str, str] = {}
    for name, given in zip(names, classes, strict=True):
        if told.setdefault(name, given) != given:
            raise DataError(f"{file} gives {name} two classes, {told[name]} and {given}: expected one")
    return told


def _read_devkit(file: Path, numbers: Sequence[int], stems: Sequence[str]) -> dict[str, str]:
    meta = file.parent / "meta.mat"
    if not meta.is_file():
        raise DataError(f"{file} counts the synsets of the development kit; its meta.mat is missing in {file.parent}")
    if len(numbers) != len(stems):
        raise DataError(f"{file} has {len(numbers)} lines for {len(stems)} images: expected as many of both")
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
        return {stem: wnids[number] for stem, number in zip(stems, numbers, strict=True)}
    except Exception as error:
        raise DataError(f"{meta} cannot be read as the development kit's synsets: {error!r}") from error
