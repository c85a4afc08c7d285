"""When IVT does what: the schedule of teleports, the position in a task, and warnings about a loop that does not fit.

`IVT` in plugin.py adds what is done.
"""

from __future__ import annotations

from operator import index
from typing import Literal

from .checks import Warner
from .core import Core
from .fisher import check_choice

Last = Literal["skip", "teleport"]
FisherLoss = Literal["whole", "own"]


def check_epochs(name: str, value: int | None, otherwise: str) -> int | None:
    """A number of epochs as an int; NumPy's are accepted."""
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or index(value) < 1:
        raise ValueError(f"{name}={value!r}: give a number of epochs from 1 up, or None {otherwise}")
    return index(value)


class Schedule:
    """The options that decide when, and the counters of tasks and epochs."""

    core: Core

    def __init__(self, interval: int | None, last: Last, fisher_loss: FisherLoss) -> None:
        check_choice("last", last, Last)
        check_choice("fisher_loss", fisher_loss, FisherLoss)
        self.interval = check_epochs("interval", interval, "for no schedule")
        self.last = last
        self.fisher_loss = fisher_loss
        self._task = self._epoch = 0
        self.epochs: int | None = None  # of the current task, if known
        self._in_task = False
        self._seen = False  # a step since the last end_epoch(), or begin_epoch()
        self._copied = False  # a copy made within a task, which listens to nothing yet
        self._warn = Warner()

    @property
    def task(self) -> int:
        """Number of the current task, or of the last one; the first is 1."""
        return self._task

    @property
    def epoch(self) -> int:
        """Epochs ended in this task."""
        return self._epoch

    @property
    def in_task(self) -> bool:
        """Whether a task has begun and not ended."""
        return self._in_task

    def _place(self) -> str:
        if not self._in_task:
            return f"task {self._task}" if self._task else "no task yet"
        return f"task {self._task}, epoch {self._epoch}" + (f" of {self.epochs}" if self.epochs else "")

    @property
    def collecting(self) -> bool:
        """Whether F of the current epoch may be used: with fisher_loss="own", whether to call `collect`.

        True in every epoch if the plug-in does not know which ones: without the number of epochs or an interval.
        """
        if not self._in_task:
            return False
        if self.fisher_loss == "whole" or self.epochs is None or self.interval is None:
            return True
        return self._epoch + 1 >= self.epochs or self.teleports_after(self._epoch + 1)

    def teleports_after(self, epoch: int) -> bool:
        """Whether the schedule teleports after this epoch (from 1) of the current task."""
        if self._task < 2 or self.interval is None or epoch % self.interval:
            return False
        return not (self.last == "skip" and epoch == self.epochs)

    def silence(self, *matters: str) -> None:
        """Do not warn about these matters, for a host that says them itself."""
        self._warn.known.update(matters)

    def _count_step(self) -> bool:
        """Called before each step of an optimizer; returns whether F takes its gradients."""
        if not self._in_task:
            return False
        whole = self.fisher_loss == "whole"
        self._seen = self._seen or whole or not self.collecting
        return whole

    # Checks

    def _require_task(self, call: str) -> None:
        if not self._in_task:
            raise RuntimeError(f"{call} outside a task: call begin_task() first")
        if self._copied:
            raise RuntimeError(
                f"{call}: this IVT was copied or unpickled within a task, and listens to no optimizer; "
                "call attach(optimizer), or abandon_task()"
            )

    def _require_no_task(self) -> None:
        if self._in_task:
            raise RuntimeError(
                f"begin_task() inside task {self._task}: call end_task() first, or abandon_task() to forget the task "
                "(to go on with a loaded state, only attach() the optimizer)"
            )

    def _warn_about_schedule(self) -> None:
        if self._task < 2 or self.interval is None:
            return
        if self.epochs is None:
            if self.last == "skip":
                self._warn(
                    "epochs",
                    "begin_task() was not told the number of epochs, so the teleport after the last one cannot be "
                    'skipped: give begin_task(optimizer, epochs=...), or IVT(last="teleport")',
                )
        elif not any(self.teleports_after(epoch) for epoch in range(1, self.epochs + 1)):
            self._warn(
                "idle",
                f"IVT changes nothing in a task of {self.epochs} epoch(s) with a teleport every {self.interval}"
                + (" and none after the last: " if self.last == "skip" else ": ")
                + ("use a smaller interval" if self.epochs > 1 else 'use interval=1 and last="teleport"'),
            )

    def _check_epoch(self) -> None:
        """Warn about an epoch that ends without a step, or after the task's last one."""
        if not self._seen:
            self._warn(
                f"unseen {self._task}",
                f"end_epoch() without a step since the last one: F_t stays that of the earlier epoch. {self._remedy()}",
            )
        if self.epochs is not None and self._epoch >= self.epochs:
            text = f"epoch {self._epoch + 1} of a task that was to have {self.epochs} epochs"
            self._warn(f"longer {self._task}", text)

    def _check_fisher(self) -> None:
        """Warn about a teleport that has no F_t."""
        if self.fisher_loss == "own" and not self.core.fisher.seen and self._task > 1:
            self._warn("no F", "teleport() without an F_t in this task: call collect(loss) in the epochs before it")

    def _warn_about_unknown(self, weights: int) -> None:
        if weights:
            self._warn(
                f"unknown {self._task}",
                f"{weights} weights had gradients in task {self._task}'s last epoch whose squares are not finite: the "
                "task adds nothing to their Fisher",
            )

    def _remedy(self) -> str:
        if self.fisher_loss == "own":
            return "Call collect(loss) before backward() while `collecting` is True"
        return (
            "If the model was trained, IVT is not listening to the optimizer that steps (a deep copy of one loses its "
            "hooks): give it to begin_task(), attach() it, or use `for batch in ivt.watch(loader)`"
        )

    def _check_steps(self) -> None:
        """Refuse a task that ends without a step, and warn about one whose F_t is not that of its last epoch."""
        if not any(self.core.fisher.counts().values()):
            raise RuntimeError(
                f"task {self._task} ends without a step seen by IVT. {self._remedy()}; abandon_task() forgets the task"
            )
        if not self._epoch and self._seen:
            self._warn("no epoch", "end_task() without end_epoch(): F_t is taken over all steps of the task")
        elif self._seen and not self.core.finalized:
            self._warn(
                "steps after",
                f"steps after the last end_epoch() of task {self._task}: F_t is taken over those alone. Call it "
                "after every epoch, and train nothing between it and end_task()",
            )
