"""What methods with prototypes in place of exemplars share: their statistics, draws, and rotation classes.

Each class has one output for each rotation of an image by a multiple of 90 degrees, and is remembered by the
mean of its features (its prototype) and their spread around it. In place of old images, later tasks see draws

    p_c + r e,   e ~ N(0, I),   r^2 = mean over classes of trace(Cov_c) / d,

c uniform over the old classes. Statistics are taken in `end_task`, with the weights that are delivered.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import Ints, TrainOptions
from incvec.contracts import Task
from incvec.data import class_means
from incvec.methods.common import ImageMethod, extract
from incvec.nets import Head, LinearHead

ROTATIONS = 4  # outputs a class


class PrototypeOptions(TrainOptions):
    """The IVT paper's setting for methods without exemplars, and the weights PASS and FCS share."""

    epochs: int = Field(100, ge=1, description="epochs of an incremental task")
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(2e-4, ge=0)
    milestones: Ints = (45, 90)
    temperature: float = Field(0.1, gt=0, description="divides the logits in every cross-entropy")
    lambda_distil: float = Field(10.0, ge=0)
    lambda_prototypes: float = Field(10.0, ge=0)
    draws: Literal["batch", "ratio"] = Field(
        "batch", description="prototype draws a step: as many as images, or that times old over new classes"
    )
    radius: Literal["base", "all"] = Field("base", description="the classes whose spread makes the radius")
    prototype_view: Literal["test", "train"] = Field("test", description="the view prototypes are taken in")


@torch.no_grad()
def spread(features: Tensor, labels: Tensor, means: Tensor) -> Tensor:
    """trace(Cov_c) / d of every class, the covariance being the unbiased one; 0 for a class of one sample."""
    squares = (features - means[labels]).square().sum(1, keepdim=True)
    counts = torch.bincount(labels, minlength=len(means))
    biased = class_means(squares, labels, len(means)).squeeze(1)
    return biased * counts / (counts - 1).clamp(min=1) / features.shape[1]


def draw_around(prototypes: Tensor, radius: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` draws p_c + r e with c uniform over the rows of `prototypes`: the draws, and their classes."""
    device = prototypes.device
    classes = torch.randint(len(prototypes), (count,), generator=generator, device=device)
    noise = torch.randn(count, prototypes.shape[1], generator=generator, device=device)
    return prototypes.index_select(0, classes) + radius * noise, classes


def feature_distance(new: Tensor, old: Tensor, weight: Tensor | None = None) -> Tensor:
    """|| new - old ||, one Euclidean norm over the whole matrix, neither squared nor averaged.

    `weight` (0 or 1 for each row) leaves rows out. The value grows with the root of the number of rows.
    """
    difference = new - old if weight is None else (new - old) * weight[:, None]
    distance: Tensor = torch.linalg.vector_norm(difference)
    return distance


class PrototypeMethod(ImageMethod):
    """A head with an output for each class and rotation, and class statistics in the store."""

    options: PrototypeOptions
    head_start: ClassVar[Literal["kaiming", "default"]] = "default"

    def make_head(self, width: int) -> Head:
        return LinearHead(width, ROTATIONS, init=self.head_start)

    def draw(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Noisy prototypes of old classes and their labels among the outputs, 4c: no rotation."""
        ratio = self.task.n_old // self.task.n_new if self.options.draws == "ratio" else 1
        count = batch_size * max(ratio, 1)
        drawn, classes = draw_around(self.store["prototypes"], self.store["radius"], count, self.world.generator)
        return drawn, ROTATIONS * classes

    def end_task(self, task: Task) -> None:
        """Prototypes and spread of the task's classes, below those of the classes before."""
        rows = self.rows_of(task.classes)
        labels = self.world.train.labels[rows] - task.first
        features = extract(self.model, self.world, rows, self.options.prototype_view)
        means = class_means(features, labels, task.n_new)
        for name, new in {"prototypes": means, "spread": spread(features, labels, means)}.items():
            known = self.store.get(name)
            self.store[name] = new if known is None else torch.cat([known[: task.n_old], new])
        counted = self.world.tasks[0].n_seen if self.options.radius == "base" else task.n_seen
        self.store["radius"] = self.store["spread"][:counted].mean().sqrt()

    def begin_evaluation(self, task: Task) -> None:
        self.store["means"] = F.normalize(self.store["prototypes"], dim=1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs of the images as they are; beside them, nearness to the prototypes."""
        _, features, logits = self.model(images)
        return {"cnn": logits[:, ::ROTATIONS], "nme": self.nearest_mean(features)}
