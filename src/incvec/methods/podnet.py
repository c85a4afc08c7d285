"""PODNet: pooled outputs distillation (Douillard et al., ECCV 2020, https://arxiv.org/abs/2004.13513).

Each class has ten proxies, and the classifier is trained with an NCA loss (eq. 5). Distillation compares the features
of the old and the new model (POD-flat) and their stage maps pooled over width and height (POD-spatial, eq. 2 to 4).
After an increment, the proxies alone are trained on the balanced exemplars.

The authors' code differs from the paper, and we follow the code: the margin is subtracted from every class, so it
cancels; and the target is excluded from the denominator by replacing its term with 1 (`nca="paper"` is eq. 5). The old
proxies are frozen in the main stage. Both distillation terms are weighted with sqrt(classes seen / new classes).
Exemplars are selected once, before the balanced stage. Their code inserts one more brightness jitter into a shared
transform at every task, so that task t trains under t jitters, one after the other (`jitters="accumulate"`). This is
probably a mistake, so the default is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.config import Normalization, TrainOptions
from incvec.contracts import Batch, Group, Schedule, Stage, Task, Terms
from incvec.data.select import kmeans
from incvec.fused import fused
from incvec.methods.common import ExemplarMethod
from incvec.nets import Head, ProxyHead, mean_row_norm


class PODNetOptions(TrainOptions):
    net: str = "resnet32-rebuffi"
    schedule: Literal["constant", "cosine", "steps"] = "cosine"
    normalization: Normalization = "lucir"
    proxies: int = Field(10, ge=1, description="proxies per class")
    margin: float = 0.6
    initial_scale: float = Field(1.0, gt=0, description="initial eta; 1 takes many epochs to grow")
    nca: Literal["coded", "paper"] = "coded"
    lambda_flat: float = Field(1.0, ge=0)
    lambda_spatial: float = Field(3.0, ge=0)
    clamp: float = Field(5.0, gt=0, description="gradients are clamped elementwise to ± this")
    jitters: Literal["one", "accumulate"] = Field("one", description="brightness jitters: one, or as many as tasks")
    balance_epochs: int = Field(20, ge=0)
    balance_lr: float = Field(0.05, gt=0)


@fused
def nca_loss(scores: Tensor, labels: Tensor, scale: Tensor, margin: float, form: str = "coded") -> Tensor:
    """NCA over class scores. `coded`: -(s_y - m) + log(1 + sum_{j != y} exp(s_j - m)), s = scale (score - margin)
    and m its maximum; `paper` (eq. 5): [-log(exp(scale (s_y - margin)) / sum_{j != y} exp(scale s_j))]_+ .
    """
    target = labels[:, None] == torch.arange(scores.shape[1], device=scores.device)  # one_hot fixes a size
    if form == "paper":
        positive = (scale * (scores - margin)).gather(1, labels[:, None]).squeeze(1)
        others = (scale * scores).masked_fill(target, -torch.inf).logsumexp(1)
        return F.relu(others - positive).mean()
    similarities = scale * (scores - margin)
    similarities = similarities - similarities.amax(1, keepdim=True)
    others = similarities.exp().masked_fill(target, 0.0).sum(1)
    positive = similarities.gather(1, labels[:, None]).squeeze(1)
    return (torch.log1p(others) - positive).mean()


@fused
def pod_flat(new: Tensor, old: Tensor) -> Tensor:
    """Mean of 1 - cos between the features of the two models."""
    return (1 - F.cosine_similarity(new, old, dim=1)).mean()


def pooled(maps: Tensor) -> Tensor:
    """Squares summed over the width and over the height, flattened and normalized per sample."""
    energy = maps.float().square()
    both = torch.cat([energy.sum(3).flatten(1), energy.sum(2).flatten(1)], dim=1)
    return F.normalize(both, dim=1)


@fused
def pod_spatial(new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> Tensor:
    """Distance between the pooled maps (eq. 4), averaged over samples and maps."""
    distances = [(pooled(a) - pooled(b)).norm(dim=1).mean() for a, b in zip(new, old, strict=True)]
    return torch.stack(distances).mean()


class PODNet(ExemplarMethod):
    name = "podnet"
    summary = "pooled outputs distillation, multi-proxy classifier, balanced stage"
    paper = "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning, https://arxiv.org/abs/2004.13513"
    Options = PODNetOptions
    options: PODNetOptions
    own_terms = ("nca",)

    def make_head(self, width: int) -> Head:
        return ProxyHead(width, self.options.proxies, self.options.initial_scale)

    def memory(self) -> dict[str, int]:
        return {"proxies": 4 * self.options.proxies * self.world.tasks[-1].last * self.model.head.width}

    def begin_task(self, task: Task) -> None:
        """Imprint the new classes' proxies: k-means centers of their features under the old model."""
        if task.index == 0:
            return
        features, labels = self.new_class_features(task)
        features = F.normalize(features, dim=1)
        counts = torch.bincount(labels, minlength=task.n_new)
        points = features.new_zeros(task.n_new, int(counts.max()), features.shape[1])  # by class, zero-padded
        position = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels]
        points[labels, position] = features
        mask = torch.arange(points.shape[1], device=labels.device)[None] < counts[:, None]
        centers = kmeans(points, self.options.proxies, self.world.generator, mask=mask)
        norm = mean_row_norm(self.model.head, task.index)
        self.model.head.set_block(task.index, (centers * norm).flatten(0, 1))

    def stages(self, task: Task) -> list[Stage]:
        view = f"train*{task.index + 1}" if self.options.jitters == "accumulate" and task.index > 0 else "train"
        main = self.main_stage(task, views=(view,))
        if task.index == 0 or self.options.balance_epochs == 0:
            return [main]
        proxies = Group(("model.head.blocks",), self.options.balance_lr, self.options.weight_decay)
        balance = main.replace(
            name="balance",
            role="balance",
            epochs=self.options.balance_epochs,
            groups=(proxies,),
            schedule=Schedule("constant"),
        )
        return [main, balance]

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        return ("model.backbone", "model.head.scale", f"model.head.blocks.{task.index}")

    def loss(self, batch: Batch) -> Terms:
        o, task = self.options, self.task
        maps, features, scores = self.model(batch.images)
        scale = cast(ProxyHead, self.model.head).scale
        terms = {"nca": nca_loss(scores, batch.labels, scale, o.margin, o.nca)}
        if (old := self.teacher_output(batch.images)) is not None:
            factor = math.sqrt(task.n_seen / task.n_new)
            terms["flat"] = o.lambda_flat * factor * pod_flat(features, old.features)
            terms["spatial"] = o.lambda_spatial * factor * pod_spatial(maps, old.maps)
        return terms

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        torch._foreach_clamp_max_(gradients, self.options.clamp)
        torch._foreach_clamp_min_(gradients, -self.options.clamp)
