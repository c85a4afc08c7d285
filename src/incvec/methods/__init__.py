"""The methods, by name."""

from __future__ import annotations

from importlib import import_module

from incvec.contracts import Method
from incvec.errors import ConfigError, nearest

METHODS = {
    "bic": "incvec.methods.bic:BiC",
    "ewc": "incvec.methods.ewc:EWC",
    "fcs": "incvec.methods.fcs:FCS",
    "finetune": "incvec.methods.finetune:Finetune",
    "flyp": "incvec.methods.flyp:FLYP",
    "geodl": "incvec.methods.geodl:GeoDL",
    "icarl": "incvec.methods.icarl:ICaRL",
    "joint": "incvec.methods.joint:Joint",
    "lucir": "incvec.methods.lucir:LUCIR",
    "lwf": "incvec.methods.lwf:LwF",
    "mnemonics": "incvec.methods.mnemonics:Mnemonics",
    "mrfa": "incvec.methods.mrfa:MRFA",
    "pass": "incvec.methods.prototype_aug:PASS",
    "podnet": "incvec.methods.podnet:PODNet",
    "rapf": "incvec.methods.rapf:RAPF",
    "replay": "incvec.methods.replay:Replay",
    "slca": "incvec.methods.slca:SLCA",
    "spu": "incvec.methods.spu:SPU",
    "ssre": "incvec.methods.ssre:SSRE",
    "zeroshot": "incvec.methods.zeroshot:ZeroShot",
}


def find_method(name: str) -> type[Method]:
    """The method class of that name."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}.{nearest(name, METHODS)} Methods: {', '.join(METHODS)}.")
    module, _, attribute = METHODS[name].partition(":")
    found: type[Method] = getattr(import_module(module), attribute)
    return found
