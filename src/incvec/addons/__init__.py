"""The add-ons, by name."""

from __future__ import annotations

from importlib import import_module

from incvec.contracts import AddOn
from incvec.errors import ConfigError, nearest

ADDONS = {
    "cofima": "incvec.addons.cofima:CoFiMA",
    "eopc": "incvec.addons.eopc:EOPC",
    "fisher-merge": "incvec.addons.fisher_merge:FisherMerge",
    "imm": "incvec.addons.imm:IMM",
    "ivt": "incvec.addons.ivt:IVTAddOn",
    "magmax": "incvec.addons.magmax:MagMax",
}


def find_addon(name: str) -> type[AddOn]:
    """The add-on class of that name."""
    if name not in ADDONS:
        raise ConfigError(f"unknown add-on {name!r}.{nearest(name, ADDONS)} Add-ons: {', '.join(ADDONS)}.")
    module, _, attribute = ADDONS[name].partition(":")
    found: type[AddOn] = getattr(import_module(module), attribute)
    return found
