"""The packages that all nodes must have in the same version: their results would differ otherwise."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

import incvec

PACKAGES = ("torch", "numpy")


def own_versions() -> tuple[tuple[str, str], ...]:
    packages = [("incvec", incvec.__version__), ("Python", platform.python_version())]
    return (*packages, *((name, metadata.version(name)) for name in PACKAGES))


def different_versions(expected: Iterable[tuple[str, str]]) -> str:
    """What differs on this machine from the one that started the sweep; empty if nothing does."""
    own = dict(own_versions())
    rows = [f"{name} {own.get(name)} instead of {version}" for name, version in expected if own.get(name) != version]
    if not rows:
        return ""
    return f"this node has {', '.join(rows)}: install the same versions on all nodes."
