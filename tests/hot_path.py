"""Whether a step could be captured, told on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = (
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "masked_select", "bincount", "repeat_interleave",
)  # fmt: skip
READING = ("tolist", "cpu", "numpy")  # on a CPU they leave no trace among the operations


class NoReading(TorchDispatchMode):
    """Refuses what would read a value from the device or make a shape hang on one: a captured step cannot do that."""

    resting = False

    def __enter__(self) -> Any:
        def refuse(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            raise AssertionError("a tensor's values are asked for: that waits for the device")

        self._methods = {name: getattr(torch.Tensor, name) for name in READING}
        for name, real in self._methods.items():
            setattr(torch.Tensor, name, lambda *a, real=real, **k: real(*a, **k) if self.resting else refuse(*a, **k))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, real in self._methods.items():
            setattr(torch.Tensor, name, real)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        waits = name in REFUSED or any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if waits and not self.resting:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
