"""What the adapters share: the model to teleport, and a saved state that waits until training starts."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..names import unwrap
from ..plugin import IVT

Target = nn.Module | IVT | str | None


def import_host(*names: str, install: str) -> Any:
    """The first of these modules that is installed; `install` is what to install otherwise."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise ModuleNotFoundError(f"this adapter needs {names[0].partition('.')[0]}: pip install {install}")


class Hosted:
    """An `IVT` in the training loop of another library.

    Args:
        model: what to teleport: a module, the name of a submodule of the model that the host trains, or an `IVT` such
            as `IVT.verbatim(network)`. None: the model that the host trains.
        options: those of `IVT`.
    """

    def __init__(self, model: Target = None, **options: Any) -> None:
        super().__init__()
        if isinstance(model, IVT) and options:
            raise TypeError(f"options {sorted(options)} were given beside an IVT, which has its own")
        self._target, self._options = model, options
        self._ivt: IVT | None = None
        self._saved: Mapping[str, Tensor] | None = None  # a state that the next training starts with
        if isinstance(model, IVT):
            self._ivt = model
        elif isinstance(model, nn.Module):
            self._ivt = IVT(model, **options)
        elif model is None or isinstance(model, str):
            IVT(nn.Identity(), **options)  # wrong options are an error now, not when training starts
        else:
            raise TypeError(f"model: expected a module, an IVT or the name of a submodule, got {type(model).__name__}")

    @property
    def ivt(self) -> IVT:
        """The plug-in: `report()`, `collect(loss)`, `task` and so on."""
        if self._ivt is None:
            raise RuntimeError("there is no IVT yet: it is made for the host's model when training starts")
        return self._ivt

    def start(self, host_model: nn.Module, optimizers: Any, resumed: bool) -> IVT:
        """At the start of a training: find the model, and go on from a saved state if there is one.

        resumed: whether the host goes on in the middle of a training.
        """
        ivt = self._bind(host_model)
        saved, self._saved = self._saved, None
        if ivt.in_task:
            if saved is None:
                warnings.warn(
                    f"the training of task {ivt.task} did not end: it is abandoned, and this training is the task",
                    stacklevel=3,
                )
            ivt.abandon_task()
        if saved is None:
            if resumed:
                raise RuntimeError(
                    "training is resumed from a checkpoint that has no state of IVT. Resume from one that has, or load "
                    "only the weights and start a training"
                )
            return ivt
        if saved["in_task"] and not resumed:
            self._saved = saved
            raise RuntimeError(
                f"the loaded state is from the middle of task {int(saved['task'])}, but this training starts from its "
                "beginning. Resume that training from the same checkpoint, or load a state saved after its end"
            )
        ivt.load_state_dict(saved)
        if ivt.in_task:
            ivt.attach(*optimizers)
        return ivt

    def _bind(self, host_model: nn.Module) -> IVT:
        target: Any = self._target
        if target is None:
            target = unwrap(host_model)
        elif isinstance(target, str):
            target = unwrap(host_model).get_submodule(target)
        known = self._ivt
        if known is None or (target is not known and target is not known.model):
            self._ivt = IVT(target, **self._options)
            if known is not None:  # the host has another model now, with parameters of the same names
                if known.in_task:
                    known.abandon_task()
                self._ivt.load_state_dict(known.state_dict())
        return self.ivt

    def present_state(self) -> dict[str, Tensor]:
        """IVT's state, for the host's checkpoint."""
        if self._saved is not None:
            return dict(self._saved)
        return {} if self._ivt is None else self._ivt.state_dict()
