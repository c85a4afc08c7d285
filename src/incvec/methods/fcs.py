"""FCS: feature calibration and separation (Li et al., CVPR 2024; address below). PASS and three things more.

Separation. Every pair of the task's classes is a class of its own for images mixed half and half, with n(n-1)/2
outputs that live for this task only; label of classes a > b, counted within the task: 4 seen + a(a-1)/2 + b. And a
contrastive loss: queries q are the unit features of the turned images, keys k those of a stronger second view, from
the same weights and without gradient, and noisy prototypes of old classes. With l = q k / T, P_i the key of the same
image and all keys of the same label (the image's own key counts twice, as the authors have it),

    loss_i = 1/|P_i| sum_{p in P_i} log(1 + exp(-l_p) sum_{n not in P_i} exp(l_n)).

Calibration. A linear map T, started as the identity in each task, learns to carry old features into the new space,
mean_i || Phi(x_i) - T(Phi_old(x_i)) ||; prototype draws pass through it, and at the task's end all old prototypes do.

The sum, with PASS's distillation over turned and mixed images alike:

    CE(z / tau) + 10 || Phi - Phi_old ||_F + transfer + 10 CE(z(T(p~)) / tau, 4c) + 0.1 contrast

Where the authors permute the batch four times and drop pairs of one label, every image here draws four partners,
uniformly among the batch's images of other labels, so that shapes stay fixed: the same pairs, but always four an
image (where k classes are new, the authors keep a share of about 1 - 1/k). An image without a possible partner, and
an old one (the oracle's), has weight 0 in every term, though BatchNorm sees it. The authors' key encoder is a copy
that gets the current weights at each step; in train mode its own running statistics play no part, so the backbone
itself does the work here, and its statistics are put back.

With several ranks, partners, contrast, weighted means and the norm of the distillation act on each rank's local batch:
fewer pairs and fewer keys than in one process, and a norm of fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.contracts import Batch, Stage, Task, Terms
from incvec.data import rotate90, rotation_labels
from incvec.methods.prototypes import ROTATIONS, PrototypeMethod, PrototypeOptions, feature_distance
from incvec.nets import LinearHead


class FCSOptions(PrototypeOptions):
    radius: Literal["base", "all"] = Field("all", description="the classes whose spread makes the radius")
    lambda_transfer: float = Field(1.0, ge=0)
    lambda_contrast: float = Field(0.1, ge=0, description="0.03 in the authors' longest streams")
    contrast_temperature: float = Field(0.07, gt=0)
    mixups: int = Field(4, ge=0, description="mixed images for each image")
    mixing: int = Field(20, ge=1, description="a, where the mixing weight is drawn from Beta(a, a)")


def draw_partners(labels: Tensor, first: int, rounds: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """For each round and image an index into the batch, and whether the two make a pair.

    Uniform over images of another label, both at or above `first`: the largest of uniform draws, one a candidate.
    """
    new = labels >= first
    pairs = (labels[:, None] != labels[None, :]) & new[:, None] & new[None, :]
    draws = torch.rand(rounds, *pairs.shape, generator=generator, device=labels.device)
    return draws.masked_fill(~pairs, -1.0).argmax(2), pairs.any(1).expand(rounds, -1)


def draw_weights(shape: tuple[int, ...], a: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Beta(a, a), set to 1/2 where outside [0.4, 0.6]; exactly, as the median of 2a - 1 uniform draws."""
    draws = torch.rand(*shape, 2 * a - 1, generator=generator, device=device)
    weights = draws.sort(-1).values[..., a - 1]
    return weights.masked_fill((weights - 0.5).abs() > 0.1, 0.5)


def pair_labels(one: Tensor, other: Tensor) -> Tensor:
    """a(a-1)/2 + b for the larger a and the smaller b of two different labels, counted from 0."""
    larger, smaller = torch.maximum(one, other), torch.minimum(one, other)
    return larger * (larger - 1) // 2 + smaller


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    return (values * weight).sum() / weight.sum()


def contrastive_loss(
    queries: Tensor, keys: Tensor, query_labels: Tensor, key_labels: Tensor, temperature: float
) -> Tensor:
    """See the top of this file; unit vectors, key i being query i's own, further keys behind them.

    Every query needs a key of another label; with the four rotations of an image there always is one.
    """
    with torch.autocast(queries.device.type, enabled=False):
        similarity = queries @ keys.T / temperature
    same = query_labels[:, None] == key_labels[None, :]
    others = similarity.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    each = F.softplus(others - similarity)
    total = (each * same).sum(1) + each.diagonal()
    return (total / (same.sum(1) + 1)).mean()


@contextmanager
def buffers_put_back(module: nn.Module) -> Iterator[None]:
    """Whatever happens to the module's buffers inside, they are afterwards as before."""
    buffers = list(module.buffers())
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        torch._foreach_copy_(buffers, saved)


class Transfer(nn.Module):
    """T(h) = W h + b, at first the identity."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width, device=device))
        self.bias = nn.Parameter(torch.zeros(width, device=device))

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.weight, self.bias)


class OneTask(nn.Module):
    """What FCS trains beside the model and drops after the task: outputs of mixed classes, and the transfer."""

    mixed: LinearHead | None
    transfer: Transfer | None

    def __init__(self) -> None:
        super().__init__()
        self.mixed = None
        self.transfer = None


class FCS(PrototypeMethod):
    name = "fcs"
    summary = "PASS with mixed classes, calibrated prototypes and a contrastive loss, no exemplars"
    paper = (
        "FCS: Feature Calibration and Separation for Non-Exemplar Class Incremental Learning, "
        "https://openaccess.thecvf.com/content/CVPR2024/html/"
        "Li_FCS_Feature_Calibration_and_Separation_for_Non-Exemplar_Class_Incremental_Learning_CVPR_2024_paper.html"
    )
    Options = FCSOptions
    options: FCSOptions
    auxiliary: OneTask
    head_start = "kaiming"

    def grow(self, task: Task) -> None:
        super().grow(task)
        device, width = self.world.device, self.model.backbone.width
        self.auxiliary = OneTask()
        if task.n_new > 1 and self.options.mixups:
            self.auxiliary.mixed = LinearHead(width).to(device)
            self.auxiliary.mixed.grow(task.n_new * (task.n_new - 1) // 2, self.world.generator)
        if task.index > 0:
            self.auxiliary.transfer = Transfer(width, device)

    def stages(self, task: Task) -> list[Stage]:
        return [self.main_stage(task, views=("train", "strong"))]

    def loss(self, batch: Batch) -> Terms:
        o, mixed, transfer = self.options, self.auxiliary.mixed, self.auxiliary.transfer
        keys = self.keys(rotate90(batch.views[1]))  # first, while no graph holds the statistics it puts back
        images, labels, weight = self.inputs(batch.images, batch.labels)
        turned = ROTATIONS * len(batch.labels)
        _, features, logits = self.model(images)
        if mixed is not None:
            logits = torch.cat([logits, mixed(features)], 1)
        losses = F.cross_entropy(logits / o.temperature, labels, reduction="none")
        terms = {"ce": weighted_mean(losses, weight)}
        key_labels = labels[:turned]
        if self.teacher is not None and transfer is not None:
            with torch.no_grad():
                old = self.teacher(images).features
            drawn, classes = self.draw(len(batch.labels))
            scores = self.model.head(transfer(drawn).detach())
            terms["distil"] = o.lambda_distil * feature_distance(features, old, weight)
            terms["transfer"] = o.lambda_transfer * weighted_mean((features - transfer(old)).norm(dim=1), weight)
            terms["prototypes"] = o.lambda_prototypes * F.cross_entropy(scores / o.temperature, classes)
            keys = torch.cat([keys, F.normalize(drawn, dim=1)])
            key_labels = torch.cat([key_labels, classes])
        queries = F.normalize(features[:turned], dim=1)
        contrast = contrastive_loss(queries, keys, labels[:turned], key_labels, o.contrast_temperature)
        return {**terms, "contrast": o.lambda_contrast * contrast}

    @torch.no_grad()
    def keys(self, images: Tensor) -> Tensor:
        """Unit features from the current weights, without a trace in BatchNorm's statistics."""
        with buffers_put_back(self.model.backbone):
            return F.normalize(self.model.features(images), dim=1)

    def inputs(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turned images and then mixed ones, their labels among all outputs, and their weights."""
        turned, turned_labels = rotate90(images), rotation_labels(labels)
        weight = torch.ones(len(turned), device=turned.device)
        if self.auxiliary.mixed is None:
            return turned, turned_labels, weight
        o, task, generator = self.options, self.task, self.world.generator
        partners, paired = draw_partners(labels, task.first, o.mixups, generator)
        share = draw_weights(tuple(partners.shape), o.mixing, generator, images.device)[..., None, None, None]
        mixed = share * images + (1 - share) * images[partners]
        label = pair_labels(labels - task.first, labels[partners] - task.first) + ROTATIONS * task.n_seen
        label = label.masked_fill(~paired, 0)  # of no weight, but an index all the same
        return (
            torch.cat([turned, mixed.flatten(0, 1)]),
            torch.cat([turned_labels, label.flatten()]),
            torch.cat([weight, paired.float().flatten()]),
        )

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        """Carry the old prototypes over, then take those of the task's classes."""
        transfer, known = self.auxiliary.transfer, self.store.get("prototypes")
        if transfer is not None and known is not None:
            # In float64: a float32 product may round differently for a tensor that was loaded from a file.
            moved = F.linear(known[: task.n_old].double(), transfer.weight.double(), transfer.bias.double())
            self.store["prototypes"] = moved.to(known.dtype)
        super().end_task(task)
