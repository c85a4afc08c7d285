"""A packed store: the images of a data set, decoded once into uint8 files that are memory-mapped.

    STORE/store.json            classes, side, shards, a checksum per chunk of rows, and a hash of this file
    STORE/train-00000.bin ...   rows of 3 x side x side bytes; likewise test-...
    STORE/train-labels.bin      one int32 per row, -1 for an unreadable image that was left out (its row is zeros)
    STORE/train-files.txt       the file of each row

`open_store` checks sizes and reads labels; `verify_store` reads and verifies every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from incvec.config import first_problem
from incvec.data.image_files import Progress
from incvec.data.options import Placement
from incvec.data.store.mapped import PackedImages
from incvec.errors import DataError, shorten
from incvec.text_files import read_bytes

FORMAT = 3  # 2: resized by torchvision's bilinear filter
STORE = "store.json"
JOURNAL = "journal.jsonl"
UNREADABLE = "unreadable.txt"  # images that could not be read; a complete store was packed without them
PARTS = ("train", "test")
LEFT_OUT = -1
MAX_FILE = 1 << 32  # bytes of all files but the shards
Positive = Annotated[int, Field(ge=1, lt=1 << 40)]
FileName = Annotated[str, Field(pattern=r"^(train|test)-[0-9]{5}\.bin$")]
SHOWN = 10  # damaged places in one message
PACK_AGAIN = "Remove the store and pack the images again with `incvec data pack`."


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def checksum(content: bytes | memoryview, previous: str = "0") -> str:
    """CRC-32 of pixels, continued from the checksum of the bytes before them."""
    return f"{zlib.crc32(content, int(previous, 16)):08x}"


@dataclass(frozen=True)
class StorePart:
    """The training or the test images of a store."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # in store.json

    shards: Annotated[tuple[tuple[FileName, Positive], ...], Field(min_length=1)]  # file name and rows
    chunk_rows: Positive  # rows per checksum; chunks do not cross shards
    checksums: tuple[str, ...]
    labels_hash: str
    files_hash: str

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.shards)

    def chunks(self) -> list[tuple[str, int, int, int]]:
        """Shard, first row in it, first row in the part, and number of rows, in the order of the checksums."""
        chunks, start = [], 0
        for name, rows in self.shards:
            chunks += [
                (name, first, start + first, min(self.chunk_rows, rows - first))
                for first in range(0, rows, self.chunk_rows)
            ]
            start += rows
        return chunks


class About(BaseModel):
    """The origin of the packed images, in store.json."""

    model_config = ConfigDict(extra="allow", strict=True)

    layout: str
    split: str
    class_list: str | None
    left_out: Annotated[int, Field(ge=0)]
    left_out_by_class: dict[str, Positive]
    key: str


class Metadata(BaseModel):
    """The content of store.json."""

    model_config = ConfigDict(extra="allow", strict=True)

    side: Annotated[int, Field(ge=1, le=1 << 16)]
    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    about: About
    parts: dict[Literal["train", "test"], StorePart]
    fingerprint: str

    @model_validator(mode="after")
    def complete(self) -> Metadata:
        if len(self.parts) < len(PARTS) or len(set(self.classes)) < len(self.classes):
            raise ValueError(f"expected {' and '.join(PARTS)} images, and every class once")
        return self


class ByteRange(NamedTuple):
    """Rows of a shard that have one checksum."""

    file: Path
    offset: int
    size: int
    rows: int
    checksum: str

    def is_intact(self) -> bool:
        actual, size = checksum(b""), self.size
        try:
            with open(self.file, "rb") as file:
                file.seek(self.offset)
                while size and (piece := file.read(min(size, 1 << 22))):
                    actual = checksum(piece, actual)
                    size -= len(piece)
        except FileNotFoundError:
            return False
        return size == 0 and actual == self.checksum


def find_intact(ranges: Sequence[ByteRange], progress: Progress | None) -> list[bool]:
    """Whether each range has the bytes of its checksum; read in several threads."""
    total, done, intact = sum(each.rows for each in ranges), 0, []
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for each, result in zip(ranges, pool.map(ByteRange.is_intact, ranges), strict=True):
            intact.append(result)
            done += each.rows
            if progress is not None:
                progress(done, total)
    return intact


@dataclass(frozen=True)
class Store:
    """An open store; no image has been read."""

    root: Path
    side: int
    classes: tuple[str, ...]
    about: Mapping[str, Any]  # layout, split, class list, images left out, versions
    parts: Mapping[str, StorePart]
    fingerprint: str

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.side, self.side

    @property
    def row_bytes(self) -> int:
        return 3 * self.side**2

    def labels(self, part: str) -> NDArray[np.int32]:
        """The label of every row, `LEFT_OUT` included."""
        path = self.root / f"{part}-labels.bin"
        content = _read(path)
        if len(content) != 4 * self.parts[part].rows or sha256(content) != self.parts[part].labels_hash:
            raise DataError(f"{path} is damaged: it has the labels of all {part} images. {PACK_AGAIN}")
        labels = np.frombuffer(content, dtype="<i4")
        if labels.min() < LEFT_OUT or labels.max() >= len(self.classes):
            raise DataError(f"{path} has labels beyond the {len(self.classes)} classes of the store. {PACK_AGAIN}")
        return labels

    def images(self, part: str, placement: Placement | None = None) -> tuple[PackedImages, Tensor]:
        """The images that were not left out, and their labels."""
        labels = self.labels(part)
        rows = np.flatnonzero(labels != LEFT_OUT).astype(np.int64)
        shards = [(self.root / name, rows) for name, rows in self.parts[part].shards]
        return PackedImages(shards, rows, self.shape, placement), torch.from_numpy(labels[rows].astype(np.int64))

    def describe_rows(self, part: str, labels: NDArray[np.int32], first: int, rows: int) -> str:
        """The images in a range of rows, for error messages."""
        names = [self.classes[label] for label in np.unique(labels[first : first + rows]) if label != LEFT_OUT]
        classes = (
            f" (classes {names[0]!r} to {names[-1]!r})" if len(names) > 1 else "".join(f" (class {n!r})" for n in names)
        )
        return f"{part} images {first} to {first + rows - 1}{classes}"


def is_store(path: str | Path) -> bool:
    """Whether the folder is a store: complete, interrupted or damaged."""
    return (Path(path) / STORE).is_file() or (Path(path) / JOURNAL).is_file() or _lacks_metadata(Path(path))


def _lacks_metadata(path: Path) -> bool:
    """Whether the folder has the other files of a complete store."""
    return (path / "train-00000.bin").is_file() and (path / "train-files.txt").is_file()


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, limit=MAX_FILE)
    except FileNotFoundError:
        raise DataError(f"{path} is missing. {PACK_AGAIN}") from None


def open_store(root: str | Path) -> Store:
    """Open a store: reads its metadata and checks the sizes of its files."""
    store = _read_metadata(Path(root).expanduser())
    for name, part in store.parts.items():
        first = 0
        for shard, rows in part.shards:
            file, expected = store.root / shard, rows * store.row_bytes
            size = file.stat().st_size if file.is_file() else None
            if size != expected:
                intact = 0 if size is None or size > expected else size // store.row_bytes
                state = "missing" if size is None else f"{size} bytes long, expected {expected}"
                lost = store.describe_rows(name, store.labels(name), first + intact, rows - intact)
                raise DataError(f"{file} is {state}. Damaged: {lost}. {PACK_AGAIN}")
            first += rows
    return store


def _read_metadata(path: Path) -> Store:
    if not (path / STORE).is_file():
        raise DataError(_missing_metadata(path))
    try:
        metadata = json.loads(_read(path / STORE))
        if not isinstance(metadata, dict):
            raise ValueError(f"it contains a {type(metadata).__name__}, expected a mapping")
        if metadata.pop("hash", None) != sha256(json.dumps(metadata, sort_keys=True).encode()):
            raise ValueError("it does not match its hash")
        if not isinstance(metadata.get("format"), int):
            raise ValueError("it does not have the number of a format")
        if metadata["format"] != FORMAT:
            age = "an earlier" if metadata["format"] < FORMAT else "a later"
            raise DataError(
                f"{path} was packed by {age} version of incvec (format {metadata['format']}, this version reads "
                f"{FORMAT}). {PACK_AGAIN}"
            )
        valid = Metadata.model_validate_json(json.dumps(metadata))
        parts: dict[str, StorePart] = dict(valid.parts.items())
        if any(len(part.checksums) != len(part.chunks()) for part in parts.values()):
            raise ValueError("it does not have one checksum per chunk")
        return Store(path, valid.side, valid.classes, metadata["about"], parts, valid.fingerprint)
    except ValidationError as error:
        key, given, problem = first_problem(error)
        raise DataError(f"{path / STORE} is damaged: {key} is {shorten(given)}: {problem}. {PACK_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path / STORE} is damaged: {error}. {PACK_AGAIN}") from None


def _missing_metadata(path: Path) -> str:
    if (path / JOURNAL).is_file() and (path / UNREADABLE).is_file():
        return (
            f"{path} is an incomplete store: packing stopped at images that cannot be read, which are listed in "
            f"{path / UNREADABLE}. Replace or remove them and run the same `incvec data pack` again, or leave them out "
            "with --unreadable leave-out."
        )
    if (path / JOURNAL).is_file():
        return f"{path} is an incomplete store: packing was interrupted. Run the same `incvec data pack` to resume."
    if _lacks_metadata(path):
        return f"{path} is a packed store without {STORE}, so it cannot be verified. {PACK_AGAIN}"
    if not path.exists():
        return f"{path} does not exist: expected a packed store, made by `incvec data pack SRC DST`"
    return f"{path} is not a packed store: it has no {STORE}. `incvec data pack` makes one."


def metadata_file(store: Store) -> bytes:
    """The content of store.json."""
    metadata = {"format": FORMAT, **asdict(store)}
    del metadata["root"]
    metadata = json.loads(json.dumps(metadata))
    return json.dumps({**metadata, "hash": sha256(json.dumps(metadata, sort_keys=True).encode())}, indent=1).encode()


def format_bytes(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def verify_store(root: str | Path, progress: Progress | None = None) -> list[str]:
    """Read and verify every byte of a store. Returns the lines of a report, or raises an error that names the damaged
    images."""
    store = open_store(root)
    lines = [
        f"a packed store of {len(store.classes)} classes in {store.root}, {store.side} x {store.side}, RGB",
        f"split: {store.about['split']}",
    ]
    if store.about["class_list"]:
        lines.append(f"classes: the list {store.about['class_list']!r}")
    ranges, images = list[ByteRange](), list[str]()
    for name, part in store.parts.items():
        labels = store.labels(name)
        files = store.root / f"{name}-files.txt"
        if sha256(_read(files)) != part.files_hash:
            raise DataError(f"{files} is damaged: it lists the files of all {name} images. {PACK_AGAIN}")
        for (shard, first, first_row, rows), expected in zip(part.chunks(), part.checksums, strict=True):
            offset, size = first * store.row_bytes, rows * store.row_bytes
            ranges.append(ByteRange(store.root / shard, offset, size, rows, expected))
            images.append(store.describe_rows(name, labels, first_row, rows))
        counts: list[int] = np.bincount(labels[labels != LEFT_OUT], minlength=len(store.classes)).tolist()
        lines.append(
            f"{sum(counts)} {'training' if name == 'train' else 'test'} images, {min(counts)} to {max(counts)} per "
            f"class, {format_bytes(part.rows * store.row_bytes)} in {len(part.shards)} file(s)"
        )
    intact = find_intact(ranges, progress)
    damaged = [f"{each.file}: {text}" for each, text, right in zip(ranges, images, intact, strict=True) if not right]
    if damaged:
        more = f"\n  and {len(damaged) - SHOWN} more places" if len(damaged) > SHOWN else ""
        raise DataError(f"{store.root} is damaged:\n  " + "\n  ".join(damaged[:SHOWN]) + f"{more}\n{PACK_AGAIN}")
    lines.append(f"all {len(ranges)} checksums are correct")
    if store.about["left_out"]:
        lines.append(f"{store.about['left_out']} unreadable image(s) were left out: {store.root / UNREADABLE}")
    return lines
