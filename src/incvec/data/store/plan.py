"""What packing has to do, and the journal of what is done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import PIL
import torch

from incvec.data.layouts import Layout
from incvec.data.store.disk import unwritten
from incvec.data.store.open import FORMAT, PARTS, digest
from incvec.errors import DataError

VERSIONS = {
    "pillow": PIL.__version__,
    "torch": torch.__version__,
    "torchvision": version("torchvision"),
}  # of what makes the pixels; fmt: skip


class Chunk(NamedTuple):
    """A piece of work: rows of one shard, from these files."""

    number: int
    shard: str
    offset: int  # bytes into the shard
    side: int
    files: tuple[str, ...]
    wanted: str | None = None  # the checksum without which it is not written


class Done(NamedTuple):
    number: int
    sum: str
    bad: list[tuple[int, str]]  # row in the chunk and what is wrong with its file


@dataclass(frozen=True)
class Plan:
    """Everything that decides a store's bytes."""

    root: Path
    side: int
    layout: Layout
    shard_rows: int
    chunk_rows: int

    @property
    def row_bytes(self) -> int:
        return 3 * self.side * self.side

    @cached_property
    def work(self) -> tuple[Chunk, ...]:
        """All chunks, training images first."""
        chunks = [chunk for part in PARTS for chunk in self.chunks(part)]
        return tuple(Chunk(n, shard, offset, self.side, files) for n, (shard, offset, files) in enumerate(chunks))

    def files(self, part: str) -> tuple[tuple[Path, int], ...]:
        listing = self.layout.listing
        return listing.train if part == "train" else listing.test

    def shards(self, part: str) -> list[tuple[str, int]]:
        total = len(self.files(part))
        return [
            (f"{part}-{number:05d}.bin", min(self.shard_rows, total - first))
            for number, first in enumerate(range(0, total, self.shard_rows))
        ]

    def chunks(self, part: str) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Shard, byte offset in it and files of every chunk."""
        files, row = self.files(part), 0
        for shard, rows in self.shards(part):
            for first in range(0, rows, self.chunk_rows):
                count = min(self.chunk_rows, rows - first)
                yield shard, first * self.row_bytes, tuple(str(file) for file, _ in files[row : row + count])
                row += count

    @cached_property
    def names(self) -> dict[str, str]:
        """By part, a line with the file of every row."""
        return {part: "".join(f"{self._name(str(file))}\n" for file, _ in self.files(part)) for part in PARTS}

    @cached_property
    def _top(self) -> str:
        return str(self.layout.listing.root).rstrip(os.sep) + os.sep

    def _name(self, file: str) -> str:
        """Below the data set's root where it lies there; strings, not paths: there may be millions."""
        return file.removeprefix(self._top).replace("\n", "\\n").replace(os.sep, "/")

    @property
    def settings(self) -> dict[str, int | str]:
        """What has to be the same for packings that may go on with one another's work."""
        sizes = {"side": self.side, "rows a shard": self.shard_rows, "rows a chunk": self.chunk_rows}
        return {"format": FORMAT, **sizes, **VERSIONS}

    @property
    def classes(self) -> str:
        """The same for the same classes: what tells another data set from this one with some images changed."""
        return digest(json.dumps(self.layout.listing.classes).encode())

    @cached_property
    def _keys(self) -> dict[int, str]:
        return {}

    def chunk_key(self, chunk: Chunk) -> str:
        """What its bytes hang on beside that: its place, and its files' names, sizes and times when first asked for."""
        if chunk.number not in self._keys:
            names, stamps = [self._name(file) for file in chunk.files], [_stamp(file) for file in chunk.files]
            content = json.dumps([chunk.shard, chunk.offset, names, stamps])
            self._keys[chunk.number] = digest(content.encode())[:32]
        return self._keys[chunk.number]

    @property
    def sources(self) -> str:
        """The same as long as no image is replaced."""
        return digest("".join(self.chunk_key(chunk) for chunk in self.work).encode())

    @cached_property
    def key(self) -> str:
        return self.key_with(VERSIONS)

    def key_with(self, versions: Mapping[str, str]) -> str:
        """The same for packings of files of the same names, with the same labels, settings and versions."""
        settings = [
            FORMAT,
            self.side,
            self.shard_rows,
            self.chunk_rows,
            self.layout.listing.classes,
            *versions.values(),
        ]
        listed = [(self.names[part], [label for _, label in self.files(part)]) for part in PARTS]
        return digest(json.dumps([settings, listed]).encode())


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:  # decoding tells
        return None
    return found.st_size, found.st_mtime_ns


class Journal:
    """Lines of JSON: the plan's settings and classes, then a line a chunk. A line that a kill tore is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[dict[str, Any] | None, str, dict[str, tuple[str, list[tuple[int, str]]]]]:
        """Settings (none: nothing was begun) and classes; by chunk key, the checksum and what could not be read."""
        settings: dict[str, Any] | None = None
        classes, done = "", dict[str, tuple[str, list[tuple[int, str]]]]()
        if not self.path.exists():
            return settings, classes, done
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
                if "settings" in row:
                    settings, classes = dict(row["settings"]), str(row["classes"])
                else:
                    done[str(row["chunk"])] = str(row["sum"]), [(int(i), str(m)) for i, m in row["bad"]]
            except (ValueError, KeyError, TypeError):
                continue
        return settings, classes, done

    def write(self, row: dict[str, Any]) -> None:
        # The line before may have been torn, so this one begins a line of its own.
        try:
            with open(self.path, "ab") as file:
                file.write(b"\n" + json.dumps(row).encode())
        except OSError as error:
            raise DataError(unwritten(self.path, error)) from error
