"""The loss terms of an epoch: copied to the host without waiting, read once, refused if one is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from incvec.contracts import Stage, Task
from incvec.engine.loop import StageLoop
from incvec.errors import TrainingError


@dataclass(frozen=True)
class LossHistory:
    """Loss terms by step, on their way to the host."""

    epoch: int
    values: Tensor  # [steps, terms]
    last_weight: float  # of the last step, which may have a smaller batch than the others
    copied: Any  # the CUDA event of the copy; None if nothing had to be copied

    def arrived(self) -> bool:
        return self.copied is None or bool(self.copied.query())


def fetch_history(loop: StageLoop, epoch: int) -> LossHistory:
    """Queue a copy of the epoch's loss terms, averaged over all processes. Does not wait for it."""
    loop.distributed.mean_([loop.history])
    last_weight = loop.last_batch / loop.batch if loop.last_batch else 1.0
    if loop.history.device.type != "cuda":
        return LossHistory(epoch, loop.history.clone(), last_weight, None)
    host = torch.empty(loop.history.shape, pin_memory=True)
    host.copy_(loop.history, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return LossHistory(epoch, host, last_weight, copied)


def mean_terms(
    history: LossHistory, names: Sequence[str], where: str, last_checkpoint: Callable[[], str]
) -> dict[str, float]:
    """The epoch's mean of each term over its images.

    Raises if a value is not finite, naming the first one and the last checkpoint.
    """
    values = history.values
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        step, term = bad[0].tolist()
        raise TrainingError(
            f"loss term {names[term]!r} became {values[step, term].item()} in {where}, epoch {history.epoch + 1}, "
            f"step {step + 1}; {last_checkpoint()}. A smaller learning rate or --set precision=fp32 may help."
        )
    if history.last_weight == 1.0:
        means = values.mean(0)
    else:
        weights = torch.ones(len(values), 1)
        weights[-1] = history.last_weight
        means = (weights * values).sum(0) / weights.sum()
    return dict(zip(names, means.tolist(), strict=True))


def check_weights(parameters: Mapping[str, nn.Parameter], task: Task, stage: Stage) -> None:
    """Refuse weights that are not finite. No loss has seen the last step's update, so they are checked themselves."""
    if not parameters:
        return
    norms = torch.stack(torch._foreach_norm([p.detach() for p in parameters.values()]))
    if not bool(norms.isfinite().all()):
        names = [n for n, norm in zip(parameters, norms.tolist(), strict=True) if not math.isfinite(norm)]
        raise TrainingError(
            f"weights are no longer finite after task {task.index + 1}, stage {stage.name!r}: "
            f"{', '.join(names[:3])}; they were not saved. A smaller learning rate may help."
        )
