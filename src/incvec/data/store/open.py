"""A packed store: the images of a data set decoded once, as uint8 files that are mapped, never read whole.

    STORE/store.json            what it is: classes, side, shards, a checksum of every chunk, a hash of this file itself
    STORE/train-00000.bin ...   rows of channels x side x side bytes, one after the other; likewise test-...
    STORE/train-labels.bin      int32 a row, -1 where an unreadable image was left out (its row is zeros)
    STORE/train-files.txt       the file each row was made from

`open_store` looks at sizes and reads labels; `check` reads and verifies everything.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from incvec.data.store.mapped import PackedImages, Placement, readers
from incvec.errors import DataError

FORMAT = 2
STORE = "store.json"
JOURNAL = "journal.jsonl"
UNREADABLE = "unreadable.txt"  # what a broken-off packing could not read
PARTS = ("train", "test")
LEFT_OUT = -1
LIST = "left-out.txt"  # of what was left out of a finished store
Progress = Callable[[int, int], None]  # images done, of how many


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def checksum(content: bytes | memoryview, before: str = "0") -> str:
    """CRC-32 of pixels, going on from that of what stands `before`: it guards against damage, at no cost to packing."""
    return f"{zlib.crc32(content, int(before, 16)):08x}"


def sealed(account: Mapping[str, Any]) -> str:
    """The account as JSON, with a hash of itself."""
    return json.dumps({**account, "hash": digest(json.dumps(account, sort_keys=True).encode())}, indent=1)


@dataclass(frozen=True)
class Part:
    """One half of a store, as its files say."""

    shards: tuple[tuple[str, int], ...]  # file name and rows
    chunk: int  # rows a checksum stands for; chunks do not cross shards
    sums: tuple[str, ...]
    labels_hash: str
    files_hash: str

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.shards)

    def chunks(self) -> list[tuple[str, int, int]]:
        """File, first row in it and number of rows of every chunk, in the order of the sums."""
        return [
            (name, first, min(self.chunk, rows - first))
            for name, rows in self.shards
            for first in range(0, rows, self.chunk)
        ]


@dataclass(frozen=True)
class Store:
    """An opened store; no image has been read."""

    root: Path
    side: int
    classes: tuple[str, ...]
    about: Mapping[str, Any]  # layout, rule, class list, how many were left out, with what it was made
    parts: Mapping[str, Part]
    fingerprint: str

    @property
    def row(self) -> tuple[int, int, int]:
        return 3, self.side, self.side

    def labels(self, part: str) -> NDArray[np.int32]:
        """The label of every row, `LEFT_OUT` included."""
        path = self.root / f"{part}-labels.bin"
        content = _read(path)
        if len(content) != 4 * self.parts[part].rows or digest(content) != self.parts[part].labels_hash:
            raise DataError(f"{path} is damaged: it does not match its hash in {STORE}. {REPAIR}")
        return np.frombuffer(content, dtype="<i4")

    def images(self, part: str, placement: Placement | None = None) -> tuple[PackedImages, Tensor]:
        """The images that were not left out, and their labels."""
        labels = self.labels(part)
        slots = np.flatnonzero(labels != LEFT_OUT).astype(np.int64)
        shards = [(self.root / name, rows) for name, rows in self.parts[part].shards]
        return PackedImages(shards, slots, self.row, placement), torch.from_numpy(labels[slots].astype(np.int64))


REMEDY = "Pack it again: remove the store and run `incvec data pack`."
REPAIR = (
    "To mend it, run the `incvec data pack` that made it again with --repair: what is damaged alone is packed anew."
)


def is_store(path: str | Path) -> bool:
    """Whether it is one, or was to be one, in whatever state."""
    return (Path(path) / STORE).is_file() or (Path(path) / JOURNAL).is_file() or _lost_account(Path(path))


def _lost_account(path: Path) -> bool:
    """By what else a finished store has; one shard may be anybody's."""
    return (path / "train-00000.bin").is_file() and (path / "train-files.txt").is_file()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing. {REPAIR}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def open_store(root: str | Path) -> Store:
    """Open a store: its account, the sizes of its files; the images stay where they are."""
    store = read_account(root)
    size = int(np.prod(store.row))
    for part in store.parts.values():
        for name, rows in part.shards:
            file = store.root / name
            have = file.stat().st_size if file.is_file() else None
            if have is None:
                raise DataError(f"{file} is missing. {REPAIR}")
            if have != rows * size:
                state = "cut short" if have < rows * size else "too long"
                raise DataError(f"{file} is {state}: {have} bytes, expected {rows * size}. {REPAIR}")
    return store


def read_account(root: str | Path) -> Store:
    """What a store says of itself, whatever state its other files are in."""
    path = Path(root).expanduser()
    if not (path / STORE).is_file():
        if (path / JOURNAL).is_file() and (path / UNREADABLE).is_file():
            raise DataError(
                f"{path} is a store whose packing was broken off, for images that cannot be read: they are listed in "
                f"{path / UNREADABLE}. Replace or remove them and run the same `incvec data pack` again, or leave them "
                "out with --unreadable leave-out."
            )
        if (path / JOURNAL).is_file():
            raise DataError(f"{path} is a store whose packing was broken off: run the same `incvec data pack` to go on")
        if _lost_account(path):
            raise DataError(
                f"{path} is a packed store that has lost its {STORE}, without which it cannot be verified. {REMEDY}"
            )
        if not path.exists():
            raise DataError(f"{path} does not exist: expected a packed store, made by `incvec data pack SRC DST`")
        raise DataError(f"{path} is not a packed store: it has no {STORE}. `incvec data pack` makes one.")
    try:
        account = json.loads(_read(path / STORE))
        if not isinstance(account, dict):
            raise ValueError(f"it holds a {type(account).__name__}, expected a mapping")
        given = account.pop("hash", None)
        if given != digest(json.dumps(account, sort_keys=True).encode()):
            raise ValueError("it does not match its own hash")
        if account["format"] != FORMAT:
            raise DataError(f"{path / STORE} has format {account['format']!r}; this version reads {FORMAT}")
        parts = {
            name: Part(
                tuple((str(file), int(rows)) for file, rows in part["shards"]),
                int(part["chunk"]),
                tuple(part["sums"]),
                part["labels_hash"],
                part["files_hash"],
            )
            for name, part in account["parts"].items()
        }
        return Store(
            path, int(account["side"]), tuple(account["classes"]), account["about"], parts, account["fingerprint"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / STORE} is damaged: {error}. {REMEDY}") from None


def verify_chunks(
    root: Path, part: Part, row_bytes: int, looked_at: Callable[[int], None] = lambda rows: None
) -> list[str]:
    """A line for each chunk whose bytes are not those that were written."""

    def bad(chunk: tuple[tuple[str, int, int], str]) -> str | None:
        (name, first, rows), expected = chunk
        if chunk_sum(root / name, first * row_bytes, rows * row_bytes) == expected:
            return None
        return f"{root / name}, rows {first} to {first + rows - 1}"

    lines = []
    found = readers().map(bad, zip(part.chunks(), part.sums, strict=True))
    for (_, _, rows), line in zip(part.chunks(), found, strict=True):
        looked_at(rows)
        if line is not None:
            lines.append(line)
    return lines


def chunk_sum(file: Path, offset: int, size: int) -> str | None:
    """Checksum of a stretch of a file; None where the file is shorter."""
    total = checksum(b"")
    try:
        with open(file, "rb") as handle:
            handle.seek(offset)
            while size:
                piece = handle.read(min(size, 1 << 22))
                if not piece:
                    return None
                total = checksum(piece, total)
                size -= len(piece)
    except FileNotFoundError:
        return None
    return total


def amount(size: float) -> str:
    """Bytes as people tell them."""
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if size >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def check(root: str | Path, progress: Progress | None = None) -> list[str]:
    """Read and verify every byte of a store; a report in lines."""
    store = open_store(root)
    row = int(np.prod(store.row))
    done, total = 0, sum(part.rows for part in store.parts.values())

    def looked_at(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    lines = [
        f"a packed store of {len(store.classes)} classes in {store.root}, {store.side} x {store.side}, RGB",
        f"split: {store.about['rule']}",
    ]
    if store.about.get("class_list"):
        lines.append(f"classes: the list {store.about['class_list']!r}")
    for name, part in store.parts.items():
        labels = store.labels(name)
        if digest(_read(store.root / f"{name}-files.txt")) != part.files_hash:
            raise DataError(f"{store.root / f'{name}-files.txt'} does not match its hash in {STORE}. {REPAIR}")
        if len(part.sums) != len(part.chunks()):
            raise DataError(f"{store.root / STORE} has {len(part.sums)} checksums for {len(part.chunks())} chunks")
        broken = verify_chunks(store.root, part, row, looked_at)
        if broken:
            more = f" and {len(broken) - 3} more places" if len(broken) > 3 else ""
            raise DataError(f"bytes were altered in {'; '.join(broken[:3])}{more}. {REPAIR}")
        counts: list[int] = np.bincount(labels[labels != LEFT_OUT], minlength=len(store.classes)).tolist()
        words = "training" if name == "train" else "test"
        lines.append(
            f"{sum(counts)} {words} images, {min(counts)} to {max(counts)} a class, "
            f"{amount(part.rows * row)} in {len(part.shards)} file(s)"
        )
    lines.append(f"all {sum(len(part.sums) for part in store.parts.values())} checksums right")
    if store.about.get("left_out"):
        lines.append(f"{store.about['left_out']} unreadable image(s) were left out: {store.root / LIST}")
    return lines
