"""Detects, on a CPU, operations that a CUDA graph cannot capture."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONIZING = (
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "masked_select", "bincount", "repeat_interleave",
)  # fmt: skip
READING = ("tolist", "cpu", "numpy")  # not dispatched as operations on a CPU


class NoSynchronization(TorchDispatchMode):
    """Refuses operations that read a value from the device or whose shapes depend on one."""

    paused = False

    def __enter__(self) -> Any:
        def refuse(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            raise AssertionError("the values of a tensor are read, which synchronizes with the device")

        self._methods = {name: getattr(torch.Tensor, name) for name in READING}
        for name, real in self._methods.items():
            setattr(torch.Tensor, name, lambda *a, real=real, **k: real(*a, **k) if self.paused else refuse(*a, **k))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, real in self._methods.items():
            setattr(torch.Tensor, name, real)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        synchronizes = name in SYNCHRONIZING or any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if synchronizes and not self.paused:
            raise AssertionError(f"{func} synchronizes with the device")
        return func(*args, **(kwargs or {}))
