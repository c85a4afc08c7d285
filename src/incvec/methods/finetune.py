"""Fine-tuning: cross-entropy on the task's images, without any measure against forgetting. The lower bound.

With `oracle` it trains on all classes seen, starting from the previous weights.

`loss_over="new"` restricts the softmax to the task's own classes, as if every task had its own classifier. CoFiMA and
MagMax merge models that are trained like this. Rows of old classes then receive no gradient, so they are frozen:
weight decay alone would shrink them to 0. (The oracle's old samples use the softmax over the old classes, so it trains
all rows.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import Normalization, TrainOptions
from incvec.contracts import Batch, Stage, Task, Terms
from incvec.methods.common import ImageMethod


class FinetuneOptions(TrainOptions):
    """ResNet-32 with a linear head, SGD with steps."""

    loss_over: Literal["seen", "new"] = Field("seen", description="classes in the softmax: all seen, or the task's own")
    backbone_rate: float = Field(1.0, gt=0, description="the backbone's learning rate in increments, as a factor of lr")


class ICaRLTrainingOptions(FinetuneOptions):
    """Network and preprocessing as for iCaRL, for baselines that are compared with it."""

    net: str = "resnet32-icarl"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"


def local_cross_entropy(logits: Tensor, labels: Tensor, n_old: int) -> Tensor:
    """Cross-entropy of new samples over the new classes and of old samples over the old classes."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    excluded = (columns < n_old)[None, :] != (labels < n_old)[:, None]
    return F.cross_entropy(logits.masked_fill(excluded, -torch.inf), labels)


class Finetune(ImageMethod):
    name = "finetune"
    summary = "sequential training without any measure against forgetting: the lower bound"
    paper = "(a baseline without a paper)"
    Options: ClassVar[type] = FinetuneOptions
    options: FinetuneOptions
    uses_teacher = False
    trains_old_rows: ClassVar[bool] = False  # whether a loss term besides the cross-entropy acts on them

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        old_samples = self.exemplars or self.world.oracle
        if task.index == 0 or self.options.loss_over == "seen" or old_samples or self.trains_old_rows:
            return super().trained_parameters(task)
        return ("model.backbone", f"model.head.blocks.{task.index}", "auxiliary")

    def main_stage(self, task: Task, **changes: Any) -> Stage:
        stage, rate = super().main_stage(task, **changes), self.options.backbone_rate
        if task.index == 0 or rate == 1:
            return stage
        (group,) = stage.groups
        others = ("model.head" if name == "model" else name for name in group.prefixes if name != "model.backbone")
        backbone = replace(group, prefixes=("model.backbone",), lr=rate * group.lr)
        return stage.replace(groups=(backbone, replace(group, prefixes=tuple(others))))

    def loss(self, batch: Batch) -> Terms:
        return {"ce": self.cross_entropy(self.model(batch.images).logits, batch.labels)}

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Over the classes that `loss_over` selects."""
        if self.options.loss_over == "new":
            return local_cross_entropy(logits, labels, self.task.n_old)
        return F.cross_entropy(logits, labels)
