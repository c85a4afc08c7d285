"""Writing so that what is said to be on the disk is there; whatever fails names the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from incvec.data.store.open import sealed
from incvec.errors import DataError


def unwritten(path: Path, error: OSError) -> str:
    return (
        f"could not write {path}: {error.strerror or error}. What was packed before is kept; see that the disk works "
        "and has space, then run the same command again."
    )


def write(path: Path, content: bytes | str | dict[str, Any]) -> None:
    text = sealed(content) if isinstance(content, dict) else content
    try:
        path.write_bytes(os.fsencode(text) if isinstance(text, str) else text)
    except OSError as error:
        raise DataError(unwritten(path, error)) from error
    sync(path)


def sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(unwritten(path, error)) from error


def kept(file: Path, synced: Callable[[], None]) -> None:
    """Have a file on the disk, or none at all.

    A disk tells of a failed write once, and what it has lost may still be read back from memory: whoever goes on later
    shall not take it for written.
    """
    try:
        synced()
    except DataError as error:
        with contextlib.suppress(OSError):
            file.unlink()
        raise DataError(f"{error} {file.name} was removed, to be made again.") from error
