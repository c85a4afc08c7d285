"""IVT with accelerate: a loop of one's own, whose checkpoints are the Accelerator's.

    ivt = prepare(accelerator, IVT(network, interval=10))
    for task in tasks:
        ...                                            # grow the network, make this task's optimizer
        accelerator.free_memory()                      # forget the last task's
        model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        ivt.begin_task(optimizer, epochs=160)
        ...

`accelerator.save_state(folder)` then saves IVT's state too. `accelerator.load_state(folder)` restores it, and within a
task (`ivt.in_task`) IVT listens to the prepared optimizers again, so that begin_task() is not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..plugin import IVT


class Registered:
    """What the Accelerator saves and loads."""

    def __init__(self, accelerator: Any, ivt: IVT) -> None:
        self._accelerator, self._ivt = accelerator, ivt

    def state_dict(self) -> dict[str, Tensor]:
        return self._ivt.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._ivt.in_task:
            self._ivt.abandon_task()
        self._ivt.load_state_dict(state)
        if self._ivt.in_task:
            self._ivt.attach(*self._accelerator._optimizers)


def prepare(accelerator: Any, ivt: IVT) -> IVT:
    """Make IVT's state a part of the Accelerator's checkpoints. Call it once, and return the same IVT."""
    accelerator.register_for_checkpointing(Registered(accelerator, ivt))
    return ivt
