"""Seeds are derived from what they are used for, never from earlier draws. So no generator state has to be saved."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed from the run's seed and a description of the purpose."""
    text = "/".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
