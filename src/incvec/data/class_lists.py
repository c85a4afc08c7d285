"""Lists of classes that define subsets: public ones by name (class_lists.yaml), or a file with one class name per line.

The classes of a subset are numbered in the sorted order of their names, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import yaml

from incvec.errors import ConfigError, DataError, nearest
from incvec.text_files import read_text

WNID = re.compile(r"n\d{8}")  # ImageNet's identifier of a class


class ClassList(NamedTuple):
    name: str  # as recorded; a file's name has a digest of its classes, such as mine.txt@1b2f90aa
    classes: tuple[str, ...]  # sorted


def _public_lists() -> dict[str, ClassList]:
    lists = yaml.safe_load(resources.files(__package__).joinpath("class_lists.yaml").read_text("utf-8"))
    return {name: ClassList(name, tuple(text.split())) for name, text in lists.items()}


CLASS_LISTS: Mapping[str, ClassList] = _public_lists()


def find_class_list(name: str | Path) -> ClassList:
    """A public list by its name, or the lines of a file, without blank lines and # comments.

    If a line begins with a WNID, the rest of the line is ignored: such files often add the class in words.
    """
    if str(name) in CLASS_LISTS:
        return CLASS_LISTS[str(name)]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{str(name)!r} is neither a class list nor a file.{nearest(str(name), CLASS_LISTS)} Lists: "
            f"{', '.join(CLASS_LISTS)}; a file has one class name per line."
        )
    lines = read_text(path).splitlines()
    entries = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    first_words = [re.split(r"[\s,]", entry)[0] for entry in entries]
    names = [word if WNID.fullmatch(word) else entry for word, entry in zip(first_words, entries, strict=True)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{path} names {', '.join(repeated[:5])} more than once; expected every class once")
    if len(names) < 2:
        raise DataError(f"{path} names {len(names)} class(es); expected two or more, one per line")
    classes = tuple(sorted(names))
    digest = hashlib.sha256("\n".join(classes).encode()).hexdigest()[:8]  # two files may have the same name
    return ClassList(f"{path.name}@{digest}", classes)
