"""LwF: learning without forgetting (Li and Hoiem, ECCV 2016, https://arxiv.org/abs/1606.09282). No exemplars.

The loss is cross-entropy over the task's own classes plus KL(softmax(z_old / 2) || softmax(z / 2)) over the old classes
(fig. 2 and eq. 2 of the paper, up to a constant): the outputs of old classes on new images should not change.

The original has one head per task and knows the task at test time. In class-incremental learning the old rows form one
softmax and the new rows another, as in the code bases that use LwF there. The authors first train only the new rows
for a while; like those code bases, we train everything from the start. With `loss_over="seen"` the cross-entropy is
over all classes seen.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from incvec.contracts import Batch, Terms
from incvec.methods.common import distillation_loss
from incvec.methods.finetune import Finetune, ICaRLTrainingOptions


class LwFOptions(ICaRLTrainingOptions):
    loss_over: Literal["seen", "new"] = Field("new", description="classes in the softmax: all seen, or the task's own")
    temperature: float = Field(2.0, gt=0)
    lambda_distil: float = Field(1.0, ge=0)


class LwF(Finetune):
    name = "lwf"
    summary = "distillation on new images, no exemplars"
    paper = "Learning without Forgetting, https://arxiv.org/abs/1606.09282"
    Options = LwFOptions
    uses_teacher = True
    trains_old_rows = True
    options: LwFOptions

    def loss(self, batch: Batch) -> Terms:
        o = self.options
        logits = self.model(batch.images).logits
        terms = {"ce": self.cross_entropy(logits, batch.labels)}
        if (old := self.teacher_output(batch.images)) is not None:
            terms["distil"] = o.lambda_distil * distillation_loss(logits, old.logits, o.temperature)
        return terms
