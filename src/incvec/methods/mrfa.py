"""MRFA: multi-layer rehearsal feature augmentation (Zheng et al., ICML 2024,
https://icml.cc/virtual/2024/poster/33673).

The network soon memorizes its few exemplars. MRFA enlarges their margin: old samples are perturbed along the gradient
of their loss at one layer l, drawn per sample among the inputs h_l of all stages and of the classifier,

    h_l <- h_l + p u || h_l ||^2 G_l,   u ~ U(0, 1),   G_l = d/dh_l CE,

where G comes from a separate pass with BatchNorm in eval mode, and CE is averaged over the old samples of the batch.
The teacher is perturbed with the same G and the norm of its own h_l. The loss on the perturbed samples is iCaRL's:

    2 (1 - k) CE + k KD,   k = old classes / classes seen,   KD = KL(softmax(z_old / 2) || softmax(z / 2))

(`distillation="sum"`: CE + KD, the authors' choice for streams without a large base task; `"none"`: CE alone, their
plain replay). Differences: the authors pass only the old samples through the network for G; here the whole batch, with
weight 0 for new samples, which keeps the shapes fixed (with running statistics, samples do not influence each other).
They write KD as a cross-entropy, which has the same gradient. Their herding is the greedy form, ours is iCaRL's, and
their class means leave out the mirror images. Their code logs the accuracy of the classifier and of the nearest mean of
exemplars; iCaRL uses the latter, and it agrees with the paper's numbers. With several ranks, G's mean is over the old
samples of each local batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import TrainOptions
from incvec.contracts import Batch, Terms, World
from incvec.ivt.batchnorm import batchnorm_mode
from incvec.methods.common import ExemplarMethod, distillation_loss, masked_mean
from incvec.nets import Classifier

Perturbation = Callable[[int, Tensor], Tensor]  # index of the layer, its input -> perturbed input


class MRFAOptions(TrainOptions):
    weight_decay: float = Field(2e-4, ge=0)
    base_weight_decay: float | None = Field(5e-4, ge=0)
    strength: float = Field(1e-3, ge=0, description="p, for every layer; use 1e-4 without a large base task")
    temperature: float = Field(2.0, gt=0)
    distillation: Literal["scheduled", "sum", "none"] = "scheduled"


def perturbed_logits(model: Classifier, images: Tensor, perturb: Perturbation) -> Tensor:
    """Logits, with `perturb` applied to the input of every stage and of the classifier."""
    backbone = model.backbone
    h = backbone.stem(images)
    for number, stage in enumerate(backbone.stages):
        h = stage(perturb(number, h))
    logits: Tensor = model.head(perturb(len(backbone.stages), backbone.pool(h)))
    return logits


def layer_gradients(model: Classifier, images: Tensor, labels: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    """G_l of every layer: the gradient of the mean CE over the rows where `old` is 1; 0 for the other rows."""
    inputs: list[Tensor] = []

    def record(number: int, h: Tensor) -> Tensor:
        if number == 0:
            h = h.detach().requires_grad_()  # the gradient of the stem is not needed
        inputs.append(h)
        return h

    with torch.enable_grad(), batchnorm_mode(model, training=False):
        losses = F.cross_entropy(perturbed_logits(model, images, record), labels, reduction="none")
        return torch.autograd.grad(masked_mean(losses, old), inputs)


def perturbed(h: Tensor, gradient: Tensor, amount: Tensor) -> Tensor:
    """h + amount ||h||^2 G, per row; the added term carries no gradient."""
    axes = tuple(range(1, h.dim()))
    squared_norm = h.detach().float().square().sum(axes)
    factor = (amount * squared_norm).view(-1, *(1 for _ in axes))
    return h + (factor * gradient.float()).to(h.dtype)


class MRFA(ExemplarMethod):
    name = "mrfa"
    summary = "iCaRL with exemplars perturbed along the gradient of their loss at a random layer"
    paper = "Multi-layer Rehearsal Feature Augmentation for CIL, https://icml.cc/virtual/2024/poster/33673"
    Options = MRFAOptions
    reported = "nme"
    options: MRFAOptions

    def __init__(self, options: MRFAOptions, world: World) -> None:
        super().__init__(options, world)
        self.uses_teacher = options.distillation != "none"

    def loss(self, batch: Batch) -> Terms:
        if self.task.index == 0:
            return {"ce": F.cross_entropy(self.model(batch.images).logits, batch.labels)}
        perturb = self.draw_perturbation(batch)
        logits = perturbed_logits(self.model, batch.images, perturb)
        ce = F.cross_entropy(logits, batch.labels)
        if self.teacher is None:
            return {"ce": ce}
        assert isinstance(self.teacher, Classifier)
        with torch.no_grad():
            old_logits = perturbed_logits(self.teacher, batch.images, perturb)
        kd = distillation_loss(logits, old_logits, self.options.temperature)
        k = self.task.n_old / self.task.n_seen
        ce_weight, kd_weight = (2 * (1 - k), k) if self.options.distillation == "scheduled" else (1.0, 1.0)
        return {"ce": ce_weight * ce, "kd": kd_weight * kd}

    def draw_perturbation(self, batch: Batch) -> Perturbation:
        """One layer and one u per old sample of the batch, the same for student and teacher."""
        old = (batch.labels < self.task.n_old).float()
        gradients: Sequence[Tensor] = layer_gradients(self.model, batch.images, batch.labels, old)
        generator, device = self.world.generator, old.device
        layer = torch.randint(len(gradients), old.shape, generator=generator, device=device)
        amount = self.options.strength * torch.rand(old.shape, generator=generator, device=device) * old

        def perturb(number: int, h: Tensor) -> Tensor:
            return perturbed(h, gradients[number], amount * (layer == number))

        return perturb
