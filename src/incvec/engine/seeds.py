"""Each run owns its randomness: seeds are derived from what is being done, never from what was done before."""

from __future__ import annotations

import hashlib


def derive(seed: int, *parts: object) -> int:
    """A 63-bit seed from the run's seed and any description of the purpose."""
    text = "/".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
