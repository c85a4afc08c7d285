"""The methods by name. Other packages add theirs through `incvec.registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from incvec.declarations import declared_class
from incvec.registry import METHODS, find_class

if TYPE_CHECKING:
    from incvec.config import RunConfig
    from incvec.contracts import Method

__all__ = ["METHODS", "base_settings", "declared_method", "find_method"]

METHODS.add_builtins(
    {
        "bic": "incvec.methods.bic:BiC",
        "ewc": "incvec.methods.ewc:EWC",
        "fcs": "incvec.methods.fcs:FCS",
        "finetune": "incvec.methods.finetune:Finetune",
        "flyp": "incvec.methods.flyp:FLYP",
        "geodl": "incvec.methods.geodl:GeoDL",
        "icarl": "incvec.methods.icarl:ICaRL",
        "joint": "incvec.methods.joint:Joint",
        "lda": "incvec.methods.lda:LDA",
        "lucir": "incvec.methods.lucir:LUCIR",
        "lwf": "incvec.methods.lwf:LwF",
        "mnemonics": "incvec.methods.mnemonics:Mnemonics",
        "mrfa": "incvec.methods.mrfa:MRFA",
        "pass": "incvec.methods.pass_:PASS",
        "podnet": "incvec.methods.podnet:PODNet",
        "rapf": "incvec.methods.rapf:RAPF",
        "replay": "incvec.methods.replay:Replay",
        "slca": "incvec.methods.slca:SLCA",
        "spu": "incvec.methods.spu:SPU",
        "ssre": "incvec.methods.ssre:SSRE",
        "zeroshot": "incvec.methods.zeroshot:ZeroShot",
    }
)


def find_method(name: str) -> type[Method]:
    """The method class of that name."""
    found: type[Method] = find_class(METHODS, name)
    return found


def declared_method(name: str) -> Any:
    """Name, summary, paper, flags and options of a method, as class attributes, without importing torch."""
    return declared_class(METHODS, name)


def base_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of the run's method on which its base task depends."""
    later = declared_method(config.method).later_settings
    return {name: value for name, value in config.sections.get(config.method, {}).items() if name not in later}
