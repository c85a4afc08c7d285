"""IVT as a callback for the Hugging Face Trainer: one `trainer.train()` is one task.

    callback = IVTCallback(model, interval=10)
    for task in tasks:
        ...                                            # grow the model
        Trainer(model, ..., callbacks=[callback]).train()

The Trainer's checkpoints do not store tensors of callbacks. To resume in the middle of a training, save and load
`callback.ivt.state_dict()` beside them and pass it to `resume`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..plugin import IVT


def _host() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "this adapter needs Hugging Face transformers: pip install transformers accelerate"
        ) from error


_transformers = _host()


class IVTCallback(_transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """Takes IVT's arguments, except for the optimizer, which the trainer creates for each training."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.ivt = IVT(model, **options)
        self._saved: Mapping[str, Tensor] | None = None

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Load IVT's saved state when the next training starts, instead of beginning a task."""
        self._saved = state

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Accelerate wraps the optimizer in one without hooks; the inner optimizer is the one that steps.
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        if self._saved is not None:
            self.ivt.attach(optimizer)
            self.ivt.load_state_dict(self._saved)
            self._saved = None
        else:
            self.ivt.begin_task(optimizer=optimizer)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ivt.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ivt.end_task()
