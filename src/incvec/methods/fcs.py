"""FCS: feature calibration and separation (Li et al., CVPR 2024; address below). PASS with three additions.

Separation by mix-up. Every pair of the task's classes is a class of its own for images mixed half and half, with
n(n-1)/2 outputs that exist for this task only. The label of classes a > b, counted within the task, is
4 seen + a(a-1)/2 + b.

Separation by contrast. Queries q are the unit features of the rotated images. Keys k are those of a stronger second
view, from the same weights and without gradient, and noisy prototypes of old classes. With l = q k / T, and P_i the
key of the same image and all keys of the same label (the image's own key counts twice, as in the authors' code),

    loss_i = 1/|P_i| sum_{p in P_i} log(1 + exp(-l_p) sum_{n not in P_i} exp(l_n)).

Calibration. A linear map T, initialized as the identity in each task, learns to map old features into the new space by
minimizing mean_i || Phi(x_i) - T(Phi_old(x_i)) ||. Prototype draws pass through it, and at the end of the task all old
prototypes do. In total, with PASS's distillation over rotated and mixed images:

    CE(z / tau) + 10 || Phi - Phi_old ||_F + transfer + 10 CE(z(T(p~)) / tau, 4c) + 0.1 contrast

The authors permute the batch four times and drop pairs with equal labels. Here every image draws four partners,
uniformly among the batch's images with other labels, which keeps the shapes fixed: the same pairs, but always four per
image (with k new classes, the authors keep about 1 - 1/k of them). An image without a possible partner, or an old one
(the oracle's), has weight 0 in every term, although BatchNorm sees it. The authors' key encoder is a copy that
receives the current weights at each step. In train mode its running statistics have no effect, so here the backbone
itself encodes the keys, and its statistics are restored.

With several ranks, partners, contrast, weighted means and the norm of the distillation use each rank's local batch:
fewer pairs and keys than in one process, and a norm over fewer rows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.contracts import Batch, Stage, Task, Terms
from incvec.data import rotate90, rotation_labels
from incvec.methods.common import masked_mean
from incvec.methods.prototypes import ROTATIONS, PrototypeMethod, PrototypeOptions, feature_distance
from incvec.nets import LinearHead


class FCSOptions(PrototypeOptions):
    radius: Literal["base", "all"] = Field("all", description="classes whose variance defines the radius")
    lambda_transfer: float = Field(1.0, ge=0)
    lambda_contrast: float = Field(0.1, ge=0, description="0.03 in the authors' longest streams")
    contrast_temperature: float = Field(0.07, gt=0)
    mixups: int = Field(4, ge=0, description="mixed images per image")
    mixing: int = Field(20, ge=1, description="a of Beta(a, a), the distribution of the mixing weight")


def draw_partners(labels: Tensor, first: int, rounds: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A partner's index per round and image, and whether there is one.

    Uniform over the images with another label, both labels >= `first`: the argmax of one uniform draw per candidate.
    """
    new = labels >= first
    pairs = (labels[:, None] != labels[None, :]) & new[:, None] & new[None, :]
    draws = torch.rand(rounds, *pairs.shape, generator=generator, device=labels.device)
    return draws.masked_fill(~pairs, -1.0).argmax(2), pairs.any(1).expand(rounds, -1)


def draw_weights(shape: tuple[int, ...], a: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draws of Beta(a, a), the median of 2a - 1 uniform draws; set to 1/2 outside [0.4, 0.6]."""
    draws = torch.rand(*shape, 2 * a - 1, generator=generator, device=device)
    weights = draws.sort(-1).values[..., a - 1]
    return weights.masked_fill((weights - 0.5).abs() > 0.1, 0.5)


def pair_labels(one: Tensor, other: Tensor) -> Tensor:
    """a(a-1)/2 + b for two different labels a > b."""
    larger, smaller = torch.maximum(one, other), torch.minimum(one, other)
    return larger * (larger - 1) // 2 + smaller


def contrastive_loss(
    queries: Tensor, keys: Tensor, query_labels: Tensor, key_labels: Tensor, temperature: float
) -> Tensor:
    """The contrastive loss at the top of this file, for unit vectors. Key i belongs to query i; more keys may follow.

    Every query needs a key with another label; the four rotations of an image guarantee one.
    """
    with torch.autocast(queries.device.type, enabled=False):
        similarity = queries @ keys.T / temperature
    same = query_labels[:, None] == key_labels[None, :]
    others = similarity.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    each = F.softplus(others - similarity)
    total = (each * same).sum(1) + each.diagonal()
    return (total / (same.sum(1) + 1)).mean()


class Transfer(nn.Module):
    """T(h) = W h + b, initialized as the identity."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width, device=device))
        self.bias = nn.Parameter(torch.zeros(width, device=device))

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.weight, self.bias)


class TaskModules(nn.Module):
    """Modules that exist for one task: the outputs of mixed classes, and the transfer."""

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
    auxiliary: TaskModules

    def grow(self, task: Task) -> None:
        super().grow(task)
        device, width = self.world.device, self.model.backbone.width
        self.auxiliary = TaskModules()
        if task.n_new > 1 and self.options.mixups:
            self.auxiliary.mixed = LinearHead(width).to(device)
            self.auxiliary.mixed.grow(task.n_new * (task.n_new - 1) // 2, self.world.generator)
        if task.index > 0:
            self.auxiliary.transfer = Transfer(width, device)

    def stages(self, task: Task) -> list[Stage]:
        return [self.main_stage(task, views=("train", "strong"))]

    def loss(self, batch: Batch) -> Terms:
        o, mixed, transfer = self.options, self.auxiliary.mixed, self.auxiliary.transfer
        keys = self.keys(rotate90(batch.views[1]))  # before any graph saves the statistics it restores
        images, labels, weight = self.inputs(batch.images, batch.labels)
        rotated = ROTATIONS * len(batch.labels)
        _, features, logits = self.model(images)
        if mixed is not None:
            logits = torch.cat([logits, mixed(features)], 1)
        losses = F.cross_entropy(logits / o.temperature, labels, reduction="none")
        terms = {"ce": masked_mean(losses, weight)}
        key_labels = labels[:rotated]
        output = self.teacher_output(images)
        if output is not None and transfer is not None:
            old = output.features
            prototypes, prototype_labels = self.draw_prototypes(len(batch.labels))
            scores = self.model.head(transfer(prototypes).detach())
            terms["distil"] = o.lambda_distil * feature_distance(features, old, weight)
            terms["transfer"] = o.lambda_transfer * masked_mean((features - transfer(old)).norm(dim=1), weight)
            terms["prototypes"] = o.lambda_prototypes * F.cross_entropy(scores / o.temperature, prototype_labels)
            keys = torch.cat([keys, F.normalize(prototypes, dim=1)])
            key_labels = torch.cat([key_labels, prototype_labels])
        queries = F.normalize(features[:rotated], dim=1)
        contrast = contrastive_loss(queries, keys, labels[:rotated], key_labels, o.contrast_temperature)
        return {**terms, "contrast": o.lambda_contrast * contrast}

    @torch.no_grad()
    def keys(self, images: Tensor) -> Tensor:
        """Unit features with the current weights; BatchNorm's running statistics stay unchanged."""
        buffers = list(self.model.backbone.buffers())
        saved = [buffer.clone() for buffer in buffers]
        keys = F.normalize(self.model.features(images), dim=1)
        torch._foreach_copy_(buffers, saved)
        return keys

    def memory(self) -> dict[str, int]:
        o = self.options
        mixed = 4 * min(o.batch_size, len(self.world.train.labels)) * o.mixups
        return {"mixups": mixed * math.prod(self.world.image_shape), "mixing": mixed * (2 * o.mixing - 1)}

    def inputs(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated images followed by mixed images, their labels among all outputs, and their weights."""
        rotated, rotated_labels = rotate90(images), rotation_labels(labels)
        weight = torch.ones(len(rotated), device=rotated.device)
        if self.auxiliary.mixed is None:
            return rotated, rotated_labels, weight
        o, task, generator = self.options, self.task, self.world.generator
        partners, paired = draw_partners(labels, task.first, o.mixups, generator)
        share = draw_weights(tuple(partners.shape), o.mixing, generator, images.device)[..., None, None, None]
        mixed = share * images + (1 - share) * images[partners]
        label = pair_labels(labels - task.first, labels[partners] - task.first) + ROTATIONS * task.n_seen
        label = label.masked_fill(~paired, 0)  # weight 0, but it has to be a valid index
        return (
            torch.cat([rotated, mixed.flatten(0, 1)]),
            torch.cat([rotated_labels, label.flatten()]),
            torch.cat([weight, paired.float().flatten()]),
        )

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        """Map the old prototypes into the new feature space, then compute those of the task's classes."""
        transfer, known = self.auxiliary.transfer, self.store.get("prototypes")
        if transfer is not None and known is not None:
            # In float64: a float32 product may round differently for a tensor that was loaded from a file.
            moved = F.linear(known[: task.n_old].double(), transfer.weight.double(), transfer.bias.double())
            self.store["prototypes"] = moved.to(known.dtype)
        super().end_task(task)
