"""IVT as a Lightning callback: one `trainer.fit` is one task.

    callback = IVTCallback(interval=10)
    for task in tasks:
        ...                                            # grow the module
        Trainer(max_epochs=160, callbacks=[callback]).fit(module, loader)

A task begins with its first batch and ends with its last epoch; teleports come before that epoch's validation. IVT's
state is in Lightning's checkpoints: `fit(module, loader, ckpt_path=...)` resumes within a task. In a new process the
next task starts with `callback.load_state_dict(checkpoint["callbacks"][callback.state_key])`.

A fit that ends in an exception leaves its task open, so that a checkpoint written then can be resumed. A fit that
starts anew abandons it.
"""

from __future__ import annotations

import math
from typing import Any

from .hosted import Hosted, Target, import_host

_lightning = import_host("lightning.pytorch", "pytorch_lightning", install="lightning")


class IVTCallback(Hosted, _lightning.Callback):  # type: ignore[name-defined,misc]
    """Takes the model to teleport (by default the LightningModule) and the options of `IVT`."""

    def __init__(self, model: Target = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._first_epoch = 0  # the trainer's number of the task's first epoch
        self._batches = False  # since the last end of an epoch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and type(trainer.strategy.launcher).__name__ == "_MultiProcessingLauncher":
            raise RuntimeError(
                "this strategy (ddp_spawn, ddp_fork or ddp_notebook) trains in processes that end with the fit, and "
                'IVT\'s state with them: use strategy="ddp"'
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning loads a checkpoint before the model is on its device, so the state is applied here.
        ivt = self.start(pl_module, trainer.optimizers, resumed=trainer.ckpt_path is not None)
        self._batches = False
        if ivt.in_task and self._first_epoch + ivt.epoch < trainer.current_epoch:
            ivt.end_epoch()  # the checkpoint was written by a callback before this one

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.ivt.in_task:
            self._first_epoch = trainer.current_epoch
            self.ivt.begin_task(trainer.optimizers, epochs=_epochs(trainer))
        self._batches = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches or _steps_are_done(trainer):
            self._end_epoch(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._batches:  # the epoch ended before its last batch
            self._end_epoch(trainer)

    def _end_epoch(self, trainer: Any) -> None:
        self.ivt.end_epoch()
        self._batches = False
        if 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1 or _steps_are_done(trainer):
            self.ivt.end_task()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.ivt.in_task:
            self.ivt.end_task()

    def state_dict(self) -> dict[str, Any]:
        state = self.present_state()
        return {"ivt": state, "first_epoch": self._first_epoch} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes effect when the next fit starts."""
        self._saved, self._first_epoch = state_dict["ivt"], state_dict["first_epoch"]


def _steps_are_done(trainer: Any) -> bool:
    return bool(0 < trainer.max_steps <= trainer.global_step)


def _epochs(trainer: Any) -> int | None:
    """How many epochs the fit has from now on; None if unknown."""
    limits = []
    if (trainer.max_epochs or 0) > 0:
        limits.append(trainer.max_epochs - trainer.current_epoch)
    if trainer.max_steps > 0 and math.isfinite(trainer.num_training_batches):
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        limits.append(math.ceil((trainer.max_steps - trainer.global_step) / steps))
    return min(limits) if limits else None
