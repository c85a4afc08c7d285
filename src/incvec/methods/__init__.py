"""The methods, by name."""

from __future__ import annotations

from importlib import import_module

from incvec.contracts import Method
from incvec.errors import ConfigError, nearest

METHODS = {
    "finetune": "incvec.methods.finetune:Finetune",
    "podnet": "incvec.methods.podnet:PODNet",
}


def find_method(name: str) -> type[Method]:
    """The method class of that name."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}.{nearest(name, METHODS)} Methods: {', '.join(METHODS)}.")
    module, _, attribute = METHODS[name].partition(":")
    found: type[Method] = getattr(import_module(module), attribute)
    return found
