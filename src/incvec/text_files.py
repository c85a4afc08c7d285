"""Reading text that somebody else wrote: regular files of a bounded size, in UTF-8.

A pipe would wait for a writer, and a device has no end. Both are refused, as is a file that is far larger than what it
is read as.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from incvec.errors import DataError, IncvecError

MAX_BYTES = 64 << 20
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_bytes(path: Path, error: type[IncvecError] = DataError, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes, or `error`. A missing file is a `FileNotFoundError`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
        try:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                kind = next((name for test, name in KINDS if test(mode)), "not a regular file")
                raise error(f"{path} cannot be read: it is {kind}, expected a file.")
            with open(handle, "rb", closefd=False) as file:
                content = file.read(limit + 1)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}.") from cause
    except ValueError as cause:  # a path with a NUL character
        raise error(f"{str(path)!r} is not the name of a file: {cause}.") from None
    if len(content) > limit:
        raise error(f"{path} cannot be read: it has more than {limit} bytes, far more than expected of such a file.")
    return content


def read_text(path: Path, error: type[IncvecError] = DataError, limit: int = MAX_BYTES) -> str:
    """As `read_bytes`, decoded; a byte order mark is ignored."""
    try:
        return read_bytes(path, error, limit).decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"{path} cannot be read as text: {cause}.") from None
