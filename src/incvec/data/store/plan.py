"""How a data set is divided for packing: shards, and chunks of rows that are decoded and written as one unit."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import PIL
import torch

from incvec.data.listing import Files, Listing
from incvec.data.store.open import FORMAT, PARTS, sha256

VERSIONS = {"pillow": PIL.__version__, "torch": torch.__version__}  # of the libraries that decode and resize


class Chunk(NamedTuple):
    """Consecutive rows of one shard, and the image files they are made from."""

    number: int
    part: str
    shard: str
    offset: int  # bytes into the shard
    side: int
    root: str  # folder of the image files
    names: tuple[str, ...]  # paths below it

    def files(self) -> list[Path]:
        return [Path(self.root, name) for name in self.names]

    def key(self) -> str:
        """Identifies the chunk's content: its place, and the names, sizes and times of its files."""
        content = json.dumps([self.shard, self.offset, self.names, [_size_and_time(file) for file in self.files()]])
        return sha256(content.encode())[:32]


def _size_and_time(file: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:  # reported when it is decoded
        return None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Plan:
    """Everything that determines the bytes of a store."""

    root: Path
    listing: Listing
    side: int
    shard_rows: int
    chunk_rows: int

    @property
    def row_bytes(self) -> int:
        return 3 * self.side**2

    def files(self, part: str) -> Files:
        return self.listing.train if part == "train" else self.listing.test

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """By part, the path of every file below the root of the images."""
        prefix = str(self.listing.root).rstrip(os.sep) + os.sep  # strings: there may be millions of files
        return {part: [str(file).removeprefix(prefix) for file, _ in self.files(part)] for part in PARTS}

    def shards(self, part: str) -> tuple[tuple[str, int], ...]:
        """File name and rows of every shard."""
        total = len(self.files(part))
        return tuple(
            (f"{part}-{number:05d}.bin", min(self.shard_rows, total - first))
            for number, first in enumerate(range(0, total, self.shard_rows))
        )

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, training images first."""
        chunks: list[Chunk] = []
        for part in PARTS:
            row = 0
            for shard, rows in self.shards(part):
                for first in range(0, rows, self.chunk_rows):
                    names = tuple(self.names[part][row : row + min(self.chunk_rows, rows - first)])
                    offset, root = first * self.row_bytes, str(self.listing.root)
                    chunks.append(Chunk(len(chunks), part, shard, offset, self.side, root, names))
                    row += len(names)
        return tuple(chunks)

    @property
    def settings(self) -> dict[str, int | str]:
        """What must be the same to resume packing."""
        sizes = {"side": self.side, "rows per shard": self.shard_rows, "rows per chunk": self.chunk_rows}
        return {"format": FORMAT, **sizes, **VERSIONS}

    @property
    def classes_hash(self) -> str:
        return sha256(json.dumps(self.listing.classes).encode())

    def key(self, chunk_keys: list[str]) -> str:
        """Identifies the content of the whole store: settings, classes, labels and image files."""
        labels = [[label for _, label in self.files(part)] for part in PARTS]
        content = [self.side, self.shard_rows, self.chunk_rows, self.listing.classes, labels, chunk_keys]
        return sha256(json.dumps(content).encode())
