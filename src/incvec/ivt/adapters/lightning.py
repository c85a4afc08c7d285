"""IVT as a Lightning callback: one `trainer.fit` is one task.

callback = IVTCallback(module.network, interval=10)
for task in tasks:
    ...                                            # grow the network
    Trainer(callbacks=[callback], ...).fit(module, loader)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..plugin import IVT


def _host() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise ModuleNotFoundError("this adapter needs Lightning: pip install lightning")


_lightning = _host()


class IVTCallback(_lightning.Callback):  # type: ignore[name-defined,misc]
    """Takes IVT's arguments, except for the optimizers, which the trainer creates for each fit."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        # Lightning steps with a closure, which IVT's own hook rejects; see _before_step.
        self.ivt = IVT(model, **options, listen=False)
        self._saved: Mapping[str, Tensor] | None = None
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning loads a checkpoint before the model is on its device, so the state is applied here.
        if self._saved is not None:
            self.ivt.attach(*trainer.optimizers)
            self.ivt.load_state_dict(self._saved)
            self._saved = None
        else:
            self.ivt.begin_task(optimizer=trainer.optimizers)
        self._handles = [o.register_step_pre_hook(self._before_step) for o in trainer.optimizers]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Accumulate the gradients that the optimizer sees: after the closure, which runs backward and clips."""
        if isinstance(optimizer, LBFGS):
            raise RuntimeError("LBFGS evaluates its closure several times per step; IVT needs one gradient per step")
        closure: Callable[[], Any] | None = kwargs.get("closure")

        def accumulate() -> None:
            self.ivt.accumulate(
                (p for group in optimizer.param_groups for p in group["params"]),
                grad_scale=getattr(optimizer, "grad_scale", None),
                found_inf=getattr(optimizer, "found_inf", None),
            )

        if closure is None:
            accumulate()
            return args, kwargs

        def closure_then_accumulate() -> Any:
            result = closure()
            accumulate()
            return result

        return args, {**kwargs, "closure": closure_then_accumulate}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ivt.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.ivt.end_task()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.ivt.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
