"""Settings as part of a folder's name: `interval5` in `digits-podnet+ivt-3-s0-interval5`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from incvec.config import digest

MAX_LENGTH = 80  # characters; a digest stands for settings beyond it
ABSENT = "absent"


def changes_text(given: Mapping[str, Any], default: Mapping[str, Any]) -> list[str]:
    """One word for each setting in which two resolved configurations differ: `interval5`, `net-tiny`.

    Different settings give different words: a value that cannot be part of a file name, and settings for which there is
    no room, are replaced by a digest.
    """
    changes = changed_values(given, default)
    keys = [key.rpartition(".")[2] for key in flatten(given)]
    words, used = [], 0
    for key, value in changes.items():
        short = key.rpartition(".")[2]
        words.append(text_of(key if keys.count(short) > 1 else short, value))
        used += len(words[-1]) + 1
        if used > MAX_LENGTH:
            return [*words[:-1], digest(changes)[:8]]
    return words


def flatten(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """`section.key: value` for every setting."""
    flat: dict[str, Any] = {}
    for key, value in resolved.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


def changed_values(given: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which two resolved configurations differ, with the values of the first."""
    mine, other = flatten(given), flatten(default)
    return {
        key: mine.get(key, ABSENT)
        for key in dict.fromkeys([*mine, *other])
        if mine.get(key, ABSENT) != other.get(key, ABSENT)
    }


def text_of(key: str, value: Any) -> str:
    """`interval5`, `batchnorm-layer`, `no-snapshots`, `milestones-80-120`."""
    if isinstance(value, bool):
        return key if value else f"no-{key}"
    if isinstance(value, int | float):
        return f"{key}{value:g}" if float(f"{value:g}") == value else f"{key}{value!r}"
    text = "-".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:30].strip("-")
    return f"{key}-{safe}" if safe == text else f"{key}-{safe}-{digest(value)[:6]}".replace("--", "-")
