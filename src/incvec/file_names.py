"""File names from names that other people chose: of data sets, classes, sweeps and runs in records."""

from __future__ import annotations

import hashlib
import re

MAX_LENGTH = 100  # characters, without an ending


def safe_name(text: str) -> str:
    """A single file name: letters, digits, '.', '_' and '-', at most `MAX_LENGTH` characters, never a separator.

    It does not begin with '.' or '-'. A name that has to be changed gets a digest of the original, so that two names
    never become one.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip(".-")[:MAX_LENGTH]
    if safe and safe == text:
        return safe
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return f"{safe[: MAX_LENGTH - 7]}-{digest}".lstrip(".-")
