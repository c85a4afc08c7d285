"""LUCIR: a unified classifier by rebalancing (Hou et al., CVPR 2019, https://github.com/hshustc/CVPR19_Incremental_Learning).

Cosine classifier, logits = sigma cos(f, w), one row a class and one learnable sigma for all, and three
losses: cross-entropy; the less-forget constraint on the features' directions (eq. 6), whose weight grows with
sqrt(old classes / new classes) (eq. 7); and, for old samples only, a margin m between the cosine with their own
class and those with the K new classes that come closest (eq. 8). New rows are imprinted: the mean direction of the
class's features under the old model, as long as the old rows are on average.

As the authors' code has it: the old rows do not move in the main stage, sigma does. On CIFAR-100 there is no
class-balanced stage after it; `balance_epochs=20` gives the one they run on ImageNet, which trains all rows on the
exemplars, BatchNorm fixed. Unlike there, a batch without old samples has a margin term of 0 by a mask, not by a
branch, and class means use a real mirror image (theirs reverses the color channels). With several ranks the margin
term is a mean over the old samples of each local batch.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import Ints, Normalization, TrainOptions
from incvec.contracts import Batch, Group, Output, Schedule, Stage, Task, Terms
from incvec.data.select import class_means
from incvec.methods.common import ExemplarMethod, extract
from incvec.nets import CosineHead, Head, mean_row_norm


class LUCIROptions(TrainOptions):
    net: str = "resnet32-lucir"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"
    lambda_base: float = Field(5.0, ge=0, description="less-forget weight, before sqrt(old / new classes)")
    lambda_margin: float = Field(1.0, ge=0)
    margin: float = 0.5
    hard_negatives: int = Field(2, ge=1, description="new classes an old sample is held apart from")
    balance_epochs: int = Field(0, ge=0, description="epochs of the class-balanced stage; 0: none")
    balance_lr: float = Field(0.01, gt=0)
    balance_milestones: Ints = (10,)


def less_forget(new: Tensor, old: Tensor) -> Tensor:
    """Mean of 1 - cos between the features of the two models (eq. 6)."""
    return (1 - F.cosine_similarity(new, old, dim=1)).mean()


def margin_ranking(cosines: Tensor, labels: Tensor, n_old: int, margin: float, k: int) -> Tensor:
    """max(0, m - cos_y + cos_j) over the k new classes j that come closest, averaged over the old samples (eq. 8).

    The authors average over samples and classes alike, so the sum over j in the paper is a mean here.
    """
    own = cosines.gather(1, labels[:, None])
    rivals = cosines[:, n_old:].topk(min(k, cosines.shape[1] - n_old), dim=1).values
    hinge = F.relu(margin - own + rivals).mean(1)
    old = (labels < n_old).float()
    return (hinge * old).sum() / old.sum().clamp(min=1)


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
        return CosineHead(width)

    def begin_task(self, task: Task) -> None:
        """Imprint the new rows."""
        if task.index == 0:
            return
        rows = self.rows_of(task.classes)
        directions = F.normalize(extract(self.model, self.world, rows), dim=1)
        means = class_means(directions, self.world.train.labels[rows] - task.first, task.n_new)
        length = mean_row_norm(self.model.head, task.index)
        self.model.head.set_block(task.index, F.normalize(means, dim=1) * length)

    def stages(self, task: Task) -> list[Stage]:
        main = self.main_stage(task)
        o = self.options
        if task.index == 0 or o.balance_epochs == 0:
            return [main]
        rows = Group(("model.head.blocks",), o.balance_lr, o.weight_decay)
        schedule = Schedule("steps", o.balance_milestones, o.gamma)
        changes = {"epochs": o.balance_epochs, "groups": (rows,), "schedule": schedule, "batchnorm": "frozen"}
        return [main, main.replace(name="balance", role="balance", **changes)]

    def trained(self, task: Task) -> tuple[str, ...]:
        return ("model.backbone", "model.head.scale", f"model.head.blocks.{task.index}")

    def loss(self, batch: Batch) -> Terms:
        output = self.model(batch.images)
        terms = {"ce": F.cross_entropy(output.logits, batch.labels)}
        if self.teacher is not None:
            with torch.no_grad():
                old: Output = self.teacher(batch.images)
            terms |= self.retention(batch, output, old)
        return terms

    def retention(self, batch: Batch, output: Output, old: Output) -> dict[str, Tensor]:
        """What holds the past from the second task on: the less-forget term and the margins."""
        o, task = self.options, self.task
        cosines = cast(CosineHead, self.model.head).cosines(output.features)
        weight = o.lambda_base * math.sqrt(task.n_old / task.n_new)
        ranking = margin_ranking(cosines, batch.labels, task.n_old, o.margin, o.hard_negatives)
        return {"forget": weight * less_forget(output.features, old.features), "margin": o.lambda_margin * ranking}
