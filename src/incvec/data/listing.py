"""The image files of a data set and their labels, before any image is opened.

`list_class_folders` reads ROOT/train/CLASS/*.jpg with ROOT/test/ (or val/), or ROOT/CLASS/*.jpg split by a rule.
Classes are numbered in the sorted order of their folder names, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from incvec.data.class_lists import ClassList
from incvec.data.image_files import EXTENSIONS
from incvec.data.options import TEST_EVERY
from incvec.data.store.open import is_store
from incvec.errors import DataError, no_root

TEST_FOLDERS = ("test", "val")
Files = tuple[tuple[Path, int], ...]  # path and label


@dataclass(frozen=True)
class Listing:
    """All files of a data set."""

    root: Path
    classes: tuple[str, ...]
    train: Files
    test: Files
    ignored: int  # files without an image extension
    split: str  # how training and test images were separated
    layout: str = "folder"
    class_list: str | None = None  # the list that selected the classes, if any


def make_listing(
    root: Path,
    train: tuple[str, Mapping[str, Sequence[Path]]],
    test: tuple[str, Mapping[str, Sequence[Path]]],
    ignored: int,
    split: str,
    layout: str = "folder",
) -> Listing:
    """A listing of two folders, given by name and files per class; both must contain the same classes."""
    for (here, files), (there, others) in ((train, test), (test, train)):
        for name in files:
            if name not in others:
                raise DataError(
                    f"class {name!r} is in {root / here} but has no image in {root / there}: expected it in both"
                )
    classes = tuple(train[1])
    train_files, test_files = (
        tuple((file, label) for label, name in enumerate(classes) for file in files[name]) for _, files in (train, test)
    )
    return Listing(root, classes, train_files, test_files, ignored, split, layout)


def check_folder(root: str | Path | None, name: str, expected: str) -> Path:
    """`root` as a path, or an error if it is missing or not a folder."""
    if root is None:
        raise no_root(name, expected)
    path = Path(root).expanduser()
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise DataError(f"{path} {state}. Expected {expected}.")
    return path


def list_class_folders(
    root: str | Path | None,
    test_every: int = TEST_EVERY,
    test_folder: str | None = None,
    class_list: ClassList | None = None,
) -> Listing:
    """The files of class folders, restricted to the classes of `class_list` if given.

    Without train/, every `test_every`-th file of a class, in sorted order, is a test image. `test_folder` names the
    folder of the test images if it is neither test/ nor val/.
    """
    path = check_folder(root, "a folder data set", "train/ and test/ (or val/), or one folder per class")
    if _is_split(path):
        return _list_split(path, test_folder, class_list)
    if test_folder is not None:
        raise DataError(f"{path} has a {test_folder}/ but no train/: expected class folders in both")
    files, ignored = class_files(path, class_list)
    train: dict[str, list[Path]] = {}
    test: dict[str, list[Path]] = {}
    for name, members in files.items():
        if len(members) < test_every:
            raise DataError(
                f"{path / name} has {len(members)} image(s), expected at least {test_every}: "
                f"every {test_every}th is a test image. Add images, or create train/ and test/ yourself."
            )
        test[name] = members[test_every - 1 :: test_every]
        train[name] = [file for position, file in enumerate(members, start=1) if position % test_every]
    split = f"every {test_every}th file of a class, in sorted order, is a test image"
    return make_listing(path, ("", train), ("", test), ignored, split)


def _is_split(root: Path) -> bool:
    """Whether train/ is one half of the data rather than a class of that name."""
    train = root / "train"
    has_test = any((root / name).is_dir() for name in TEST_FOLDERS)
    return train.is_dir() and (has_test or bool(subfolders(train)))


def _list_split(root: Path, test_folder: str | None, class_list: ClassList | None) -> Listing:
    candidates = TEST_FOLDERS if test_folder is None else (test_folder,)
    present = [name for name in candidates if (root / name).is_dir()]
    if not present:
        raise DataError(f"{root} has train/ but no {' or '.join(n + '/' for n in candidates)}: expected both")
    # Contests publish a flat test/ without classes; then val/ has them.
    chosen = next((name for name in present if subfolders(root / name)), present[0])
    skipped = "".join(f"; {name}/ has no class folders" for name in present[: present.index(chosen)])
    train, ignored_train = class_files(root / "train", class_list)
    test, ignored_test = class_files(root / chosen, class_list)
    split = f"train/ and {chosen}/{skipped}"
    return make_listing(root, ("train", train), (chosen, test), ignored_train + ignored_test, split)


def class_files(
    folder: Path, class_list: ClassList | None = None, at_least: int = 2
) -> tuple[dict[str, list[Path]], int]:
    """The sorted image files of every class folder (of the listed ones), and the number of other files.

    `at_least` is the number of class folders expected.
    """
    names = subfolders(folder)
    if class_list is not None:
        missing = sorted(set(class_list.classes) - set(names))
        if missing:
            present = f"{len(names)} folder(s), such as {names[0]!r}" if names else "no folders"
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise DataError(
                f"{len(missing)} of the {len(class_list.classes)} classes of {class_list.name.partition('@')[0]} are "
                f"not in {folder} ({shown}), which has {present}: "
                "choose other images, or another list of classes"
            )
        names = class_list.classes
    if len(names) < at_least:
        hint = ". It is a packed store: open it with --dataset packed" if is_store(folder) else ""
        raise DataError(
            f"{folder} has {len(names)} class folder(s), expected one per class for {at_least} classes or more{hint}"
        )
    files: dict[str, list[Path]] = {}
    ignored = 0
    for name in names:
        entries = list(_walk(os.path.join(folder, name)))
        images = [entry.path for entry in entries if is_image(entry)]
        if not images:
            raise DataError(
                f"class folder {folder / name} is empty: expected images ({', '.join(sorted(EXTENSIONS))}). "
                "Add some or remove the folder."
            )
        # The order of sorted Path objects; sorting strings takes a third of the time and of the memory.
        files[name] = [Path(image) for image in sorted(images, key=lambda path: path.replace(os.sep, "\0"))]
        ignored += len(entries) - len(images)
    return files, ignored


def subfolders(root: Path) -> tuple[str, ...]:
    """The sorted names of the folders in `root`, without hidden ones."""
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if is_folder(entry) and not is_hidden(entry.name)))


def is_hidden(name: str) -> bool:
    """Whether a file manager, a notebook or the file system (lost+found) created this entry."""
    return name[0] == "." or name == "lost+found"


def is_image(entry: os.DirEntry[str]) -> bool:
    """By its extension. Pipes and devices are excluded; a dangling link is an image that cannot be read."""
    if os.path.splitext(entry.name)[1].lower() not in EXTENSIONS:
        return False
    try:
        return entry.is_file() or not os.path.exists(entry.path)
    except OSError:  # a link to itself
        return True


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk(top: str) -> Iterator[os.DirEntry[str]]:
    """The files in a folder and below it, without hidden ones; linked folders are followed.

    Each folder is visited once, by its real place if that is below `top`; folders that contain `top` are not visited.
    """
    inside = os.path.realpath(top) + os.sep
    seen: set[str] = set()
    folders, links = [top], list[str]()
    while folders or links:
        links.sort(reverse=True)  # which of two links is followed must not depend on the order of the directory
        folder = folders.pop() if folders else links.pop()
        real = os.path.realpath(folder)
        if real in seen or (folder != top and inside.startswith(real.rstrip(os.sep) + os.sep)):
            continue
        seen.add(real)
        try:
            with os.scandir(folder) as scanned:
                entries = [entry for entry in scanned if not is_hidden(entry.name)]
        except OSError as error:
            raise DataError(
                f"{folder} cannot be listed: {error.strerror}. Make it readable, or move it away."
            ) from error
        for entry in entries:
            if not is_folder(entry):
                yield entry
            elif entry.is_symlink():
                links.append(entry.path)
            else:
                folders.append(entry.path)
