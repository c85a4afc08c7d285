"""Carried class statistics: a classifier of all classes, trained on Gaussians that follow the features.

Most of the gap to the oracle is in the classifier, not in the features (docs/successor.md): the oracle's rows are
trained on all images of the old classes, ours on a few exemplars. So the mean and the covariance of each class's
features are stored in the task of the class, from all its images. After every later increment,

1. the statistics follow the features. Images at hand (those of the task, and the exemplars) are passed through the
   model before and after the increment. A ridge regression, every class with the same weight, gives the displacement
   of a feature as an affine function of the feature, and it is applied to means and covariances (`drift`);
2. the classifier alone is trained on draws from the Gaussians of all classes, as many of each.

The closest published method is AdaGauss, which maps draws by a network and has no exemplars; to train a classifier on
class Gaussians is SLCA's idea. The page compares them. The statistics stay exact as far as the features stay, so it can
be combined with add-ons that restrain the increment: `--addon ivt --addon carry`. For 64 features a class takes 2,144
numbers (the covariance is symmetric), 8,576 bytes, as much as 2.8 exemplars of 32 x 32 pixels: 17 exemplars with it
take no more memory than 20 without. The classifier that it trains is the one reported, also for methods that report the
nearest mean of exemplars. Prototypes that a method stores (PASS, FCS, SSRE) are the carried means when the next task
begins.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.addons.merging import (
    Tensors,
    before_measurements,
    float_tensors,
    merge_incompatibility,
    pack_state,
    unpack_state,
)
from incvec.class_statistics import ClassStatistics
from incvec.config import Options
from incvec.contracts import AddOn, Batch, Group, Method, Schedule, Stage, Task, Terms, World
from incvec.data.gaussians import GaussianSource
from incvec.methods.bic import BiC
from incvec.methods.common import ExemplarMethod, ImageMethod, extract_features
from incvec.methods.prototypes import PrototypeMethod
from incvec.methods.ssre import SSRE
from incvec.nets import ProxyHead

SOURCE = "carried"  # draws of the classes' features
STAGE = "carry-classifier"


class CarryOptions(Options):
    epochs: int = Field(20, ge=1, description="epochs of the classifier alone")
    lr: float = Field(0.5, gt=0, description="its first learning rate, as a factor of the main stage's")
    samples: int = Field(100, ge=1, description="draws per class and epoch")
    drift: Literal["map", "none"] = Field("map", description="how statistics follow the features: an affine map; none")
    ridge: float = Field(0.01, ge=0, description="of the map's linear part, relative to the variance of the features")


def report_trained(method: Method) -> None:
    """Let the method report the classifier that is trained, not the nearest mean."""
    if isinstance(method, ExemplarMethod):
        setattr(method, "reported", "cnn")  # noqa: B010  a class variable


def scaled_logits(method: ImageMethod, features: Tensor) -> Tensor:
    """The class logits of features as the model computes them, multiplied as in the method's own loss."""
    logits = method.model.head(features)
    if isinstance(method, BiC):
        logits = method.model.corrected(logits)
    logits = method.class_logits(logits)
    if isinstance(method.model.head, ProxyHead):
        return logits * method.model.head.scale
    return logits / method.options.temperature if isinstance(method, PrototypeMethod | SSRE) else logits


class Carry(AddOn):
    name = "carry"
    summary = "carries feature statistics of old classes along, and trains the classifier on draws from all classes"
    paper = (
        "this project (docs/successor.md); the closest published method: AdaGauss, Task-recency bias strikes back, "
        "https://arxiv.org/abs/2409.18265"
    )
    Options = CarryOptions
    options: CarryOptions

    before: Tensors  # the model before the task, without rows of new classes
    classes: ClassStatistics

    def __init__(self, options: CarryOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.before = {}
        self.classes = ClassStatistics(world.device)
        report_trained(method)

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        reason = merge_incompatibility(cls.name, method, others)
        if reason is None and (method.pretrained or not issubclass(method, ImageMethod)):
            return f"it trains the head of a network trained from scratch, and {method.name} is pre-trained."
        return reason

    def memory(self) -> dict[str, int]:
        return {"samples": 8 * self.world.tasks[-1].last * self.options.samples}

    # The stage ------------------------------------------------------------------------------------------

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        """The classifier comes last, before the method's final measurements."""
        if task.index == 0:
            return stages
        o, main = self.options, next(stage for stage in stages if stage.role == "main")
        classifier = main.replace(
            name=STAGE,
            role="align",
            epochs=o.epochs,
            groups=(Group(("model.head.blocks",), o.lr * main.groups[0].lr, main.groups[0].weight_decay),),
            schedule=Schedule("cosine"),
            source=SOURCE,
            batchnorm="frozen",
            owner=self.name,
            loss=self.loss,
        )
        return before_measurements(stages, classifier)

    def begin_task(self, task: Task) -> None:
        new = f"head.blocks.{task.index}."
        live = float_tensors(self.method.model)
        self.before = {name: t.detach().clone() for name, t in live.items() if not name.startswith(new)}
        if "prototypes" in self.method.store:  # here, since FCS moves its own at the end of a task
            self.method.store["prototypes"][: task.n_old] = self.classes.means[: task.n_old]

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        self.update(task)
        return torch.arange(task.n_seen, device=self.world.device).repeat_interleave(self.options.samples)

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy of drawn features over all classes."""
        return {"ce": F.cross_entropy(scaled_logits(cast(ImageMethod, self.method), batch.images), batch.labels)}

    # Statistics -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, task: Task) -> None:
        """Move the statistics of the old classes with the features, and add those of the task's classes."""
        method, labels = cast(ImageMethod, self.method), self.world.train.labels
        if self.world.oracle:  # it has all images of the old classes
            self.classes = ClassStatistics(self.world.device)
            old, new = labels[:0], method.rows_of(range(task.n_seen))
        else:
            old, new = self._old_rows(task), method.rows_of(task.classes)
        rows = torch.cat([old, new])
        after = extract_features(method.model, self.world, rows)
        if len(self.classes) and self.options.drift == "map":
            before = extract_features(self._model_before(), self.world, rows)
            self.classes.move(before, after, labels[rows], self.options.ridge)
        self.classes.add(after[len(old) :], labels[new])
        self.world.add_source(SOURCE, GaussianSource(self.classes.means, self.classes.factors))

    def _old_rows(self, task: Task) -> Tensor:
        """The exemplars of old classes, if there are any."""
        method = cast(ImageMethod, self.method)
        rows = method.exemplar_rows() if "memory" in method.store else self.world.train.labels[:0]
        return rows[self.world.train.labels[rows] < task.n_old]

    def _model_before(self) -> nn.Module:
        model = copy.deepcopy(self.method.model).requires_grad_(False).eval()
        live = float_tensors(model)
        for name, tensor in self.before.items():
            live[name].copy_(tensor)
        return model

    def end_task(self, task: Task) -> None:
        if task.index == 0:
            self.update(task)
        self.before = {}

    # State ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        return pack_state(before=self.before) | self.classes.state_dict()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.before = unpack_state(state, "before")
        self.classes.load_state_dict(state)
        if len(self.classes):
            self.world.add_source(SOURCE, GaussianSource(self.classes.means, self.classes.factors))

    def statistics(self) -> dict[str, Any]:
        """How far the means of old classes were moved, relative to their norm."""
        return {"shift": float(f"{float(self.classes.shift):.5g}")}
