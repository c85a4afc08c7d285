"""Parameters by name: which ones IVT knows, which it leaves alone, and what is stored for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

Predicate = Callable[[str, nn.Parameter], bool]
Excluded = Union[str, nn.Module, Predicate]  # noqa: UP007 (evaluated)
Past = Mapping[str, str | Sequence[str] | None]

_SHARDED = "sharded parameters (FSDP, DTensor)"


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside a compiled, DataParallel or DistributedDataParallel wrapper."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer that steps, inside the wrapper of accelerate, Lightning or another library."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the optimizer that steps"
        )
    return optimizer


def optimizers_of(given: Any) -> tuple[Optimizer, ...]:
    """What `begin_task` was given, one optimizer or several or none, as the optimizers that step."""
    if given is None:
        return ()
    several = isinstance(given, Iterable) and not isinstance(given, nn.Module)
    try:
        return tuple(map(unwrap_optimizer, given if several else [given]))
    except TypeError as error:
        raise TypeError(f"optimizer: {error}") from None


def trained(
    parameters: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer] | None = None
) -> dict[str, nn.Parameter]:
    """The parameters that require gradients; with optimizers, those in their groups."""
    known = {id(p) for optimizer in optimizers or () for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in parameters.items() if p.requires_grad and (optimizers is None or id(p) in known)}


def clean(name: str) -> str:
    """A parameter's name without the prefixes of wrappers inside the model."""
    return name.replace("_orig_mod.", "")


def float_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Floating-point parameters by name, without the prefixes of compile or DDP wrappers."""
    return {
        clean(name): parameter for name, parameter in unwrap(model).named_parameters() if parameter.is_floating_point()
    }


def check_supported(model: nn.Module, left_alone: Iterable[str]) -> None:
    """Raise TypeError for trained parameters that IVT has no Fisher for: complex, sharded and uninitialized ones."""
    left_alone = set(left_alone)
    for name, parameter in unwrap(model).named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise TypeError(
                f"{name!r} is of a lazy module and has no shape yet: call the model on a batch first, then make the "
                "optimizer and call begin_task()"
            )
        if not parameter.requires_grad or clean(name) in left_alone:
            continue
        if parameter.is_complex():
            raise TypeError(
                f"{name!r} is complex; IVT handles real parameters only. Leave it alone: exclude=[{name!r}]"
            )
        sharded = type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "FlatParameter"
        if sharded or "_fsdp_wrapped_module." in name:
            raise TypeError(
                f"{name!r} is one of the model's {_SHARDED}, which IVT does not support: its state is stored by whole "
                "tensor. Train with DistributedDataParallel, or on one device"
            )


def exclusions(given: Iterable[Excluded] | Excluded) -> tuple[Excluded, ...]:
    """One or several of them, as a tuple."""
    single = not isinstance(given, Iterable) or isinstance(given, (str, nn.Module))
    result: tuple[Any, ...] = (given,) if single else tuple(given)  # type: ignore[arg-type]
    for item in result:
        if not (isinstance(item, (str, nn.Module)) or callable(item)):
            raise TypeError(f"exclude: expected prefixes of names, modules or predicates, got {type(item).__name__}")
    return result


def excluded_names(model: nn.Module, excluded: Sequence[Excluded]) -> frozenset[str]:
    """Names of the parameters that the prefixes, modules and predicates select; each has to select some.

    A tied parameter has several names, any of which selects it.
    """
    model = unwrap(model)
    first = {id(parameter): clean(name) for name, parameter in model.named_parameters()}
    parameters = {clean(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    found: set[str] = set()
    for item in excluded:
        if isinstance(item, str):
            prefix = item.rstrip(".")
            chosen = [name for name in parameters if name == prefix or name.startswith(prefix + ".")]
        elif isinstance(item, nn.Module):
            own = {id(parameter) for parameter in item.parameters()}
            chosen = [name for name, parameter in parameters.items() if id(parameter) in own]
        else:
            chosen = [name for name, parameter in parameters.items() if item(name, parameter)]
            if not chosen:
                continue  # a predicate may have nothing to select yet
        if not chosen:
            what = repr(item) if isinstance(item, str) else f"the given {type(item).__name__}"
            raise ValueError(
                f"exclude: {what} matches no parameter of the model; its names are {list(parameters)[:5]}, ..."
            )
        found.update(first[id(parameters[name])] for name in chosen)
    return frozenset(found)


def kernel_names(model: nn.Module) -> frozenset[str]:
    """Names of the convolution weights that have one block per kernel slice in the `kernel` structure."""
    names: set[str] = set()
    for prefix, module in unwrap(model).named_modules():
        weight = module._parameters.get("weight")
        convolution = isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
        if convolution and weight is not None and weight.shape[2] * weight.shape[3] > 1:
            names.add(clean(f"{prefix}.weight".lstrip(".")))
    return frozenset(names)


def state_dtype(parameter: Tensor) -> torch.dtype:
    """float32, or the parameter's dtype if wider: squares of half-precision gradients underflow."""
    return torch.promote_types(parameter.dtype, torch.float32)


def fisher_shape(parameter: Tensor, kernel: bool) -> torch.Size:
    """The shape of F: the parameter's own, or (out, in, k*k, k*k)."""
    if not kernel:
        return parameter.shape
    side = parameter.shape[2] * parameter.shape[3]
    return torch.Size((*parameter.shape[:2], side, side))


def grown(name: str, old: Tensor, parameter: Tensor, kernel: bool) -> Tensor:
    """Fbar padded with zeros on dimension 0 to the parameter's present shape. New rows have Fbar = 0, hence S = 1."""
    shape = fisher_shape(parameter, kernel)
    if old.shape == shape:
        return old
    if not shape or old.dim() != len(shape) or old.shape[1:] != shape[1:] or old.shape[0] > shape[0]:
        raise ValueError(
            f"parameter {name!r} now needs a Fisher of shape {tuple(shape)}, but earlier tasks left one of shape "
            f"{tuple(old.shape)}; only rows appended to dimension 0 are supported. If it is another tensor, or "
            f"continues others, say so: begin_task(past={{{name!r}: None}}), or the names of those it continues"
        )
    padded = old.new_zeros(shape)
    padded[: len(old)] = old
    return padded


def continued(old: Mapping[str, Tensor], names: Iterable[str], past: Past) -> dict[str, Tensor]:
    """Fbar of earlier tasks under its present names: `past` names what a tensor continues, by default itself."""
    names = list(names)
    unknown = sorted(set(past) - set(names))
    if unknown:
        raise KeyError(f"past: the model has no parameters {unknown[:5]}; its names are {names[:5]}, ...")
    result: dict[str, Tensor] = {}
    for name in names:
        sources = past.get(name, name if name in old else None)
        parts = [sources] if isinstance(sources, str) else list(sources or ())
        missing = [part for part in parts if part not in old]
        if missing:
            raise KeyError(f"past: {name!r} cannot continue {missing}, of which no earlier task has a Fisher")
        if parts:
            rows = [old[part].to(old[parts[0]].device) for part in parts]
            result[name] = rows[0] if parts == [name] else torch.cat(rows)  # a copy, unless it continues itself
    return result
