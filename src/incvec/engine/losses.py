"""An epoch's loss terms: copied to the host without waiting, read once, refused where one is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from incvec.contracts import Stage, Task
from incvec.engine.distributed import Ranks
from incvec.engine.stage import StageLoop
from incvec.errors import TrainingError


@dataclass(frozen=True)
class History:
    """Loss terms by step, on their way to the host."""

    epoch: int
    values: Tensor
    done: Any  # the CUDA event of the copy; none where nothing had to be copied

    def arrived(self) -> bool:
        return self.done is None or bool(self.done.query())


def fetch_history(loop: StageLoop, ranks: Ranks, epoch: int) -> History:
    """Queue a copy of the epoch's loss terms, those of all ranks averaged; nothing waits here."""
    ranks.average_([loop.history])
    if loop.history.device.type != "cuda":
        return History(epoch, loop.history.clone(), None)
    host = torch.empty(loop.history.shape, pin_memory=True)
    host.copy_(loop.history, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return History(epoch, host, done)


def read_terms(history: History, names: Sequence[str], where: str, saved: Callable[[], str]) -> dict[str, float]:
    """The epoch's mean of each term; an error names the first value that is not finite, and what is left."""
    values = history.values
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        step, term = bad[0].tolist()
        raise TrainingError(
            f"loss term {names[term]!r} became {values[step, term].item()} in {where}, epoch {history.epoch + 1}, "
            f"step {step + 1}; {saved()}. A smaller learning rate or --set precision=fp32 may help."
        )
    return dict(zip(names, values.mean(0).tolist(), strict=True))


def check_weights(parameters: Mapping[str, nn.Parameter], task: Task, stage: Stage) -> None:
    """The last step's update has been seen by no loss: look at the weights themselves before they are saved."""
    if not parameters:
        return
    norms = torch.stack(torch._foreach_norm([p.detach() for p in parameters.values()]))
    if not bool(norms.isfinite().all()):
        names = [n for n, norm in zip(parameters, norms.tolist(), strict=True) if not math.isfinite(norm)]
        raise TrainingError(
            f"weights are no longer finite after task {task.index + 1}, stage {stage.name!r}: "
            f"{', '.join(names[:3])}; they were not saved. A smaller learning rate may help."
        )
