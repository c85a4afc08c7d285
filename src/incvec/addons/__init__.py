"""The add-ons by name. Other packages add theirs through `incvec.registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from incvec.declarations import declared_class
from incvec.registry import ADDONS, find_class

if TYPE_CHECKING:
    from incvec.contracts import AddOn

__all__ = ["ADDONS", "declared_addon", "find_addon"]

ADDONS.add_builtins(
    {
        "carry": "incvec.addons.carry:Carry",
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
    found: type[AddOn] = find_class(ADDONS, name)
    return found


def declared_addon(name: str) -> Any:
    """Name, summary, paper, flags and options of an add-on, as class attributes, without importing torch."""
    return declared_class(ADDONS, name)
