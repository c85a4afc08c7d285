"""Plain sequential training: cross-entropy on the task's own images, nothing against forgetting.

The lower bound every method is measured against. With `oracle` it becomes training on all classes seen,
started from the weights before.

`loss_over="new"` restricts the softmax to the task's own classes, as if every task had a classifier of its own: the
training that CoFiMA and MagMax merge. Old rows then have no gradient, and rest: weight decay would take them to 0.
(The oracle's old samples have theirs over the old classes, so there all rows are trained.)
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import TrainOptions
from incvec.contracts import Batch, Task, Terms
from incvec.methods.common import ImageMethod
from incvec.nets import Head, LinearHead


class FinetuneOptions(TrainOptions):
    """ResNet-32 with a linear head, SGD with steps."""

    loss_over: Literal["seen", "new"] = Field("seen", description="the classes the softmax runs over")


def local_cross_entropy(logits: Tensor, labels: Tensor, n_old: int) -> Tensor:
    """Cross-entropy of new samples over the new classes, of old samples over the old ones."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    elsewhere = (columns < n_old)[None, :] != (labels < n_old)[:, None]
    return F.cross_entropy(logits.masked_fill(elsewhere, -torch.inf), labels)


class Finetune(ImageMethod):
    name = "finetune"
    summary = "sequential training with nothing against forgetting: the lower bound"
    paper = "(a baseline, no paper of its own)"
    Options: ClassVar[type] = FinetuneOptions
    options: FinetuneOptions
    distils = False
    holds_old_rows: ClassVar[bool] = False  # whether a term of the loss besides the cross-entropy acts on them

    def make_head(self, width: int) -> Head:
        return LinearHead(width)

    def trained(self, task: Task) -> tuple[str, ...]:
        old_samples = self.exemplars or self.world.oracle
        if task.index == 0 or self.options.loss_over == "seen" or old_samples or self.holds_old_rows:
            return super().trained(task)
        return ("model.backbone", f"model.head.blocks.{task.index}", "auxiliary")

    def loss(self, batch: Batch) -> Terms:
        return {"ce": self.cross_entropy(self.model(batch.images).logits, batch.labels)}

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Over the classes that `loss_over` names."""
        if self.options.loss_over == "new":
            return local_cross_entropy(logits, labels, self.task.n_old)
        return F.cross_entropy(logits, labels)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"cnn": self.model(images).logits}
