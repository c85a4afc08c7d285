"""MRFA: multi-layer rehearsal feature augmentation (Zheng et al., ICML 2024, https://icml.cc/virtual/2024/poster/33673).

Exemplars are few and soon known by heart. MRFA widens their margin: an old sample is pushed along the gradient of
its own loss at one layer drawn anew each time, among the inputs h_l of all stages and of the classifier,

    h_l <- h_l + p u || h_l ||^2 G_l,   u ~ U(0, 1),   G_l = d/dh_l CE,

where G comes from a pass of its own with BatchNorm on its running statistics, CE averaged over the batch's old
samples. The teacher is pushed by the same G, with the norm of its own h_l. On that, iCaRL's loss:

    2 (1 - k) CE + k KD,   k = old classes / classes seen,   KD = KL(softmax(z_old / 2) || softmax(z / 2))

(`distillation="sum"`: CE + KD, the authors' choice for streams without a large base task; `"none"`: CE alone, their
plain replay). They pass only the old samples through the network for G; here the whole batch goes, the new ones with
weight 0: the shapes stay fixed, and with running statistics no sample sees another. They write KD as a cross-entropy,
which has the same gradient. Their herding is the greedy form, ours iCaRL's own. Their code logs two accuracies, by the
classifier and by the nearest mean of exemplars; iCaRL's is the second, and with it the paper's numbers agree. With
several ranks, G's mean is over the old samples of each local batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.config import TrainOptions
from incvec.contracts import Batch, Terms, World
from incvec.methods.common import ExemplarMethod, distillation
from incvec.nets import Classifier, Head, LinearHead

Disturbance = Callable[[int, Tensor], Tensor]  # number of the layer, what goes into it -> what shall go into it


class MRFAOptions(TrainOptions):
    weight_decay: float = Field(2e-4, ge=0)
    base_weight_decay: float | None = Field(5e-4, ge=0)
    strength: float = Field(1e-3, ge=0, description="p, the same for every layer; 1e-4 without a large base task")
    temperature: float = Field(2.0, gt=0)
    distillation: Literal["scheduled", "sum", "none"] = "scheduled"


def by_layer(model: Classifier, images: Tensor, disturb: Disturbance) -> Tensor:
    """Logits, with `disturb` standing before every stage and before the classifier."""
    backbone = model.backbone
    h = backbone.stem(images)
    for number, stage in enumerate(backbone.stages):
        h = stage(disturb(number, h))
    scores: Tensor = model.head(disturb(len(backbone.stages), backbone.pool(h)))
    return scores


@contextmanager
def running_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm on its running statistics, and back to whatever mode each layer was in."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    modes = [norm.training for norm in norms]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm, mode in zip(norms, modes, strict=True):
            norm.train(mode)


def layer_gradients(model: Classifier, images: Tensor, labels: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    """G_l for every layer: the gradient of the mean CE over the rows where `old` is 1; the other rows get 0."""
    points: list[Tensor] = []

    def note(number: int, h: Tensor) -> Tensor:
        if number == 0:
            h = h.detach().requires_grad_()  # nothing is asked of the stem
        points.append(h)
        return h

    with torch.enable_grad(), running_statistics(model):
        losses = F.cross_entropy(by_layer(model, images, note), labels, reduction="none")
        mean = (losses * old).sum() / old.sum().clamp(min=1)
        return torch.autograd.grad(mean, points)


def pushed(h: Tensor, gradient: Tensor, amount: Tensor) -> Tensor:
    """h + amount ||h||^2 G, row by row; the push itself carries no gradient."""
    rest = tuple(range(1, h.dim()))
    energy = h.detach().float().square().sum(rest)
    factor = (amount * energy).view(-1, *(1 for _ in rest))
    return h + (factor * gradient.float()).to(h.dtype)


class MRFA(ExemplarMethod):
    name = "mrfa"
    summary = "iCaRL with exemplars pushed along the gradient of their loss at a random layer"
    paper = "Multi-layer Rehearsal Feature Augmentation for CIL, https://icml.cc/virtual/2024/poster/33673"
    Options = MRFAOptions
    reported = "nme"
    options: MRFAOptions

    def __init__(self, options: MRFAOptions, world: World) -> None:
        super().__init__(options, world)
        self.distils = options.distillation != "none"

    def make_head(self, width: int) -> Head:
        return LinearHead(width)

    def loss(self, batch: Batch) -> Terms:
        if self.task.index == 0:
            return {"ce": F.cross_entropy(self.model(batch.images).logits, batch.labels)}
        push = self.pushes(batch)
        logits = by_layer(self.model, batch.images, push)
        ce = F.cross_entropy(logits, batch.labels)
        if self.teacher is None:
            return {"ce": ce}
        assert isinstance(self.teacher, Classifier)
        with torch.no_grad():
            targets = by_layer(self.teacher, batch.images, push)
        kd = distillation(logits, targets, self.options.temperature)
        share = self.task.n_old / self.task.n_seen
        ours, theirs = (2 * (1 - share), share) if self.options.distillation == "scheduled" else (1.0, 1.0)
        return {"ce": ours * ce, "kd": theirs * kd}

    def pushes(self, batch: Batch) -> Disturbance:
        """For each old sample of the batch one layer and one u; the same for the student and the teacher."""
        old = (batch.labels < self.task.n_old).float()
        gradients: Sequence[Tensor] = layer_gradients(self.model, batch.images, batch.labels, old)
        generator, device = self.world.generator, old.device
        layer = torch.randint(len(gradients), old.shape, generator=generator, device=device)
        amount = self.options.strength * torch.rand(old.shape, generator=generator, device=device) * old

        def push(number: int, h: Tensor) -> Tensor:
            return pushed(h, gradients[number], amount * (layer == number))

        return push
