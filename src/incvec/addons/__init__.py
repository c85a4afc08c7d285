"""The add-ons by name. Other packages add theirs through `incvec.registry`."""

from __future__ import annotations

from incvec.contracts import AddOn
from incvec.registry import ADDONS, find_class

__all__ = ["ADDONS", "find_addon"]

ADDONS.add_builtins(
    {
        "cofima": "incvec.addons.cofima:CoFiMA",
        "eopc": "incvec.addons.eopc:EOPC",
        "fisher-merge": "incvec.addons.fisher_merge:FisherMerge",
        "imm": "incvec.addons.imm:IMM",
        "ivt": "incvec.addons.ivt:IVTAddOn",
        "magmax": "incvec.addons.magmax:MagMax",
    }
)


def find_addon(name: str) -> type[AddOn]:
    """The add-on class of that name."""
    return find_class(ADDONS, name, AddOn)
