"""LUCIR: a unified classifier by rebalancing (Hou et al., CVPR 2019,
https://github.com/hshustc/CVPR19_Incremental_Learning).

A cosine classifier, logits = sigma cos(f, w) with one row per class and one learnable sigma, and three losses:

- cross-entropy;
- the less-forget constraint on the directions of the features (eq. 6), with a weight that grows with
  sqrt(old classes / new classes) (eq. 7);
- for old samples, a margin m between the cosine with their own class and those with the K nearest new classes (eq. 8).

New rows are imprinted: the mean direction of the class's features under the old model, with the mean norm of the old
rows.

As in the authors' code, the rows of old classes are frozen in the main stage and sigma is trained. On CIFAR-100 there
is no class-balanced stage; `balance_epochs=20` adds the one they use on ImageNet, which trains all rows on the
exemplars with BatchNorm frozen. Two differences: a batch without old samples has a margin term of 0 through a mask
instead of a branch, and class means use a real mirror image (theirs reverses the color channels). With several ranks
the margin term is a mean over the old samples of each local batch.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import Ints, Normalization, TrainOptions
from incvec.contracts import Batch, Group, Output, Schedule, Stage, Task, Terms
from incvec.data.select import class_means
from incvec.methods.common import ExemplarMethod, masked_mean
from incvec.nets import CosineHead, Head, mean_row_norm


class LUCIROptions(TrainOptions):
    net: str = "resnet32-lucir"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"
    lambda_base: float = Field(5.0, ge=0, description="less-forget weight, before sqrt(old / new classes)")
    lambda_margin: float = Field(1.0, ge=0)
    margin: float = 0.5
    hard_negatives: int = Field(2, ge=1, description="K, nearest new classes in the margin loss")
    initial_scale: float = Field(1.0, gt=0, description="initial sigma; 1 takes many epochs to grow")
    balance_epochs: int = Field(0, ge=0, description="epochs of the class-balanced stage; 0 disables it")
    balance_lr: float = Field(0.01, gt=0)
    balance_milestones: Ints = (10,)


def less_forget(new: Tensor, old: Tensor) -> Tensor:
    """Mean of 1 - cos between the features of the two models (eq. 6)."""
    return (1 - F.cosine_similarity(new, old, dim=1)).mean()


def margin_ranking(cosines: Tensor, labels: Tensor, n_old: int, margin: float, k: int) -> Tensor:
    """max(0, m - cos_y + cos_j) over the k nearest new classes j, averaged over the old samples (eq. 8).

    As in the authors' code, the sum over j in the paper is a mean.
    """
    positive = cosines.gather(1, labels[:, None])
    negatives = cosines[:, n_old:].topk(min(k, cosines.shape[1] - n_old), dim=1).values
    hinge = F.relu(margin - positive + negatives).mean(1)
    return masked_mean(hinge, (labels < n_old).float())


class LUCIR(ExemplarMethod):
    name = "lucir"
    summary = "cosine classifier, less-forget constraint, margins between old and new classes"
    paper = (
        "Learning a Unified Classifier Incrementally via Rebalancing, "
        "https://github.com/hshustc/CVPR19_Incremental_Learning"
    )
    Options: ClassVar[type] = LUCIROptions
    options: LUCIROptions

    def make_head(self, width: int) -> Head:
        return CosineHead(width, self.options.initial_scale)

    def begin_task(self, task: Task) -> None:
        """Imprint the new rows."""
        if task.index == 0:
            return
        features, labels = self.new_class_features(task)
        means = class_means(F.normalize(features, dim=1), labels, task.n_new)
        norm = mean_row_norm(self.model.head, task.index)
        self.model.head.set_block(task.index, F.normalize(means, dim=1) * norm)

    def stages(self, task: Task) -> list[Stage]:
        main = self.main_stage(task)
        o = self.options
        if task.index == 0 or o.balance_epochs == 0:
            return [main]
        rows = Group(("model.head.blocks",), o.balance_lr, o.weight_decay)
        schedule = Schedule("steps", o.balance_milestones, o.gamma)
        changes = {"epochs": o.balance_epochs, "groups": (rows,), "schedule": schedule, "batchnorm": "frozen"}
        return [main, main.replace(name="balance", role="balance", **changes)]

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        return ("model.backbone", "model.head.scale", f"model.head.blocks.{task.index}")

    def loss(self, batch: Batch) -> Terms:
        output = self.model(batch.images)
        terms = {"ce": F.cross_entropy(output.logits, batch.labels)}
        if (old := self.teacher_output(batch.images)) is not None:
            terms |= self.retention_loss(batch, output, old)
        return terms

    def retention_loss(self, batch: Batch, output: Output, old: Output) -> dict[str, Tensor]:
        """The terms against forgetting, from the second task on: less-forget constraint and margins."""
        o, task = self.options, self.task
        cosines = cast(CosineHead, self.model.head).cosines(output.features)
        weight = o.lambda_base * math.sqrt(task.n_old / task.n_new)
        ranking = margin_ranking(cosines, batch.labels, task.n_old, o.margin, o.hard_negatives)
        return {"forget": weight * less_forget(output.features, old.features), "margin": o.lambda_margin * ranking}
