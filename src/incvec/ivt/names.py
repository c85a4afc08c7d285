"""Parameters by name, and the shape and dtype of the state stored for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside a compiled, DataParallel or DistributedDataParallel wrapper."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def float_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Floating-point parameters by name, without the prefixes of compile or DDP wrappers."""
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in unwrap(model).named_parameters()
        if parameter.is_floating_point()
    }


def kernel_names(model: nn.Module) -> frozenset[str]:
    """Names of the convolution weights that have one block per kernel slice in the `kernel` structure."""
    names: set[str] = set()
    for prefix, module in unwrap(model).named_modules():
        weight = module._parameters.get("weight")
        convolution = isinstance(module, nn.Conv2d | nn.ConvTranspose2d)
        if convolution and weight is not None and weight.shape[2] * weight.shape[3] > 1:
            names.add(f"{prefix}.weight".removeprefix(".").replace("_orig_mod.", ""))
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
            f"{tuple(old.shape)}; only rows appended to dimension 0 are supported: "
            "give a parameter of another shape a new name"
        )
    padded = old.new_zeros(shape)
    padded[: len(old)] = old
    return padded
