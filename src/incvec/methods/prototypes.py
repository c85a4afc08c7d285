"""The base of PASS and FCS: prototypes instead of exemplars, and rotation labels.

Each class has four outputs, one per rotation of an image by a multiple of 90 degrees. Old classes are represented by
the mean of their features (the prototype) and the variance around it. Instead of old images, later tasks train on
draws

    p_c + r e,   e ~ N(0, I),   r^2 = mean over classes of trace(Cov_c) / d,

with c uniform over the old classes. `end_task` computes the statistics with the final weights of the task.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import Ints, TrainOptions
from incvec.contracts import Task
from incvec.data import class_means
from incvec.methods.common import ImageMethod
from incvec.nets import Head, LinearHead

ROTATIONS = 4  # outputs per class


class PrototypeOptions(TrainOptions):
    """The IVT paper's settings for methods without exemplars, and the weights that PASS and FCS share."""

    epochs: int = Field(100, ge=1, description="epochs of an incremental task")
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(2e-4, ge=0)
    milestones: Ints = (45, 90)
    temperature: float = Field(0.1, gt=0, description="divides the logits in every cross-entropy")
    lambda_distil: float = Field(10.0, ge=0)
    lambda_prototypes: float = Field(10.0, ge=0)
    draws: Literal["batch", "ratio"] = Field(
        "batch", description="prototype draws per step: the batch size, or the batch size times old / new classes"
    )
    radius: Literal["base", "all"] = Field("base", description="classes whose variance defines the radius")
    prototype_view: Literal["test", "train"] = Field("test", description="view in which prototypes are computed")


@torch.no_grad()
def class_variances(features: Tensor, labels: Tensor, means: Tensor) -> Tensor:
    """trace(Cov_c) / d per class, with the unbiased covariance; 0 for a class with one sample."""
    squares = (features - means[labels]).square().sum(1, keepdim=True)
    counts = torch.bincount(labels, minlength=len(means))
    biased = class_means(squares, labels, len(means)).squeeze(1)
    return biased * counts / (counts - 1).clamp(min=1) / features.shape[1]


def draw_around(prototypes: Tensor, radius: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` draws p_c + r e with c uniform over the rows of `prototypes`, and their classes c."""
    device = prototypes.device
    classes = torch.randint(len(prototypes), (count,), generator=generator, device=device)
    noise = torch.randn(count, prototypes.shape[1], generator=generator, device=device)
    return prototypes.index_select(0, classes) + radius * noise, classes


def feature_distance(new: Tensor, old: Tensor, weight: Tensor | None = None) -> Tensor:
    """|| new - old ||_F over the whole matrix, neither squared nor averaged.

    It grows with the square root of the number of rows. `weight` (0 or 1 per row) excludes rows.
    """
    difference = new - old if weight is None else (new - old) * weight[:, None]
    distance: Tensor = torch.linalg.vector_norm(difference)
    return distance


class PrototypeMethod(ImageMethod):
    """A head with one output per class and rotation, and class statistics in the store."""

    options: PrototypeOptions

    def make_head(self, width: int) -> Head:
        return LinearHead(width, ROTATIONS)

    def class_logits(self, logits: Tensor) -> Tensor:
        """The outputs of images without rotation."""
        return logits[:, ::ROTATIONS]

    def draw_prototypes(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Noisy prototypes of old classes, and their labels 4c (no rotation)."""
        ratio = self.task.n_old // self.task.n_new if self.options.draws == "ratio" else 1
        count = batch_size * max(ratio, 1)
        drawn, classes = draw_around(self.store["prototypes"], self.store["radius"], count, self.world.generator)
        return drawn, ROTATIONS * classes

    def end_task(self, task: Task) -> None:
        """Compute prototypes and variances of the task's classes."""
        features, labels = self.new_class_features(task, self.options.prototype_view)
        means = class_means(features, labels, task.n_new)
        self.append_to_store(task, prototypes=means, spread=class_variances(features, labels, means))
        counted = self.world.tasks[0].n_seen if self.options.radius == "base" else task.n_seen
        self.store["radius"] = self.store["spread"][:counted].mean().sqrt()

    def begin_evaluation(self, task: Task) -> None:
        self.store["means"] = F.normalize(self.store["prototypes"], dim=1)

    @property
    def classifiers(self) -> tuple[str, ...]:
        return ("cnn", "nme")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The head's logits, and the distances to the prototypes."""
        _, features, logits = self.model(images)
        return {"cnn": self.class_logits(logits), "nme": self.nearest_mean(features)}
