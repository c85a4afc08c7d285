"""LwF: learning without forgetting (Li and Hoiem, ECCV 2016, https://arxiv.org/abs/1606.09282).

No exemplars: the old model's answers to the new images stand for the past. The loss is cross-entropy over the
task's own classes plus KL(softmax(z_old / 2) || softmax(z / 2)) over the old ones (fig. 2 and eq. 2 of the paper, up
to a constant), so what new images say about old classes stays what it was.

The original has one head for each old task and tells them apart at test time; in class-incremental learning the
old rows form one softmax and so do the new ones, as in the code bases that use it there. The authors train the new
rows alone for a while first; like those code bases we train everything at once. `loss_over="seen"` has the
cross-entropy run over all classes seen.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from incvec.config import Normalization
from incvec.contracts import Batch, Terms
from incvec.methods.common import distillation
from incvec.methods.finetune import Finetune, FinetuneOptions


class LwFOptions(FinetuneOptions):
    net: str = "resnet32-icarl"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"
    loss_over: Literal["seen", "new"] = Field("new", description="the classes the softmax runs over")
    temperature: float = Field(2.0, gt=0)
    lambda_distil: float = Field(1.0, ge=0)


class LwF(Finetune):
    name = "lwf"
    summary = "distillation on new images, no exemplars"
    paper = "Learning without Forgetting, https://arxiv.org/abs/1606.09282"
    Options = LwFOptions
    distils = True
    holds_old_rows = True
    options: LwFOptions

    def loss(self, batch: Batch) -> Terms:
        logits = self.model(batch.images).logits
        terms = {"ce": self.cross_entropy(logits, batch.labels)}
        if self.teacher is not None:
            with torch.no_grad():
                old = self.teacher(batch.images).logits
            terms["distil"] = self.options.lambda_distil * distillation(logits, old, self.options.temperature)
        return terms
