"""BiC: bias correction for large scale incremental learning (Wu et al., CVPR 2019, https://arxiv.org/abs/1905.13260).

A classifier trained on many new images and few exemplars prefers the new classes. BiC trains in two stages:

1. The network, on new images and exemplars, with (1 - l) CE + l KD, l = old classes / classes seen. KD compares with
   the corrected outputs of the old model at T = 2 (eq. 1 to 3).
2. With the network frozen, two numbers: the logits of the new classes become alpha z + beta (eq. 4). They are fitted
   with cross-entropy on a balanced validation set (eq. 5), plus 0.05 beta^2 as in the authors' code.

The corrections of earlier tasks stay fixed. All corrections are part of the model and of its logits.

The validation set takes 1 of 10 places of a class in the memory: 2 of 20. It is drawn before the first training on the
class and is never trained on, as in FACIL. (PyCIL draws it again for each task, from images the network may know, and
its second stage applies the softmax twice.) The oracle trains its first stage on all images except these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.config import Ints, TrainOptions
from incvec.contracts import Batch, Group, Optimizer, Output, Schedule, Stage, Task, Terms, World
from incvec.data.memory import extend
from incvec.errors import ConfigError
from incvec.methods.common import ExemplarMethod, distillation_loss
from incvec.nets import Backbone, Block, Classifier, Head


class BiCOptions(TrainOptions):
    weight_decay: float = Field(2e-4, ge=0)
    memory: int = Field(20, ge=2, description="exemplars per class, including the validation set")
    temperature: float = Field(2.0, gt=0)
    validation: float = Field(0.1, gt=0, lt=1, description="share of the memory for validation; at least 1 per class")
    bias_epochs: int = Field(200, ge=1)
    bias_lr: float = Field(0.1, gt=0)
    bias_milestones: Ints = ()
    bias_decay: float = Field(0.05, ge=0, description="weight of beta^2 in the second stage")


class Correction(nn.Module):
    """alpha z + beta for the logits of one task's classes (eq. 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(()))
        self.beta = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor) -> Tensor:
        return self.alpha * logits + self.beta


class CorrectedClassifier(Classifier):
    """A classifier with one correction per task on its logits; that of the base task stays (1, 0)."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__(backbone, head)
        self.corrections = nn.ModuleList()

    def grow(self, n_classes: int, generator: torch.Generator) -> Block:
        block = super().grow(n_classes, generator)
        self.corrections.append(Correction().to(block.weight))
        return block

    def forward(self, images: Tensor) -> Output:
        maps, features, logits = super().forward(images)
        return Output(maps, features, self.corrected(logits))

    def corrected(self, logits: Tensor) -> Tensor:
        """The head's logits, those of each task with its correction."""
        parts = logits.split([len(block.weight) for block in self.head], dim=1)
        return torch.cat([correct(part) for correct, part in zip(self.corrections, parts, strict=True)], dim=1)


class BiC(ExemplarMethod):
    name = "bic"
    summary = "distillation, then a linear correction of the new classes' logits on held-out exemplars"
    paper = "Large Scale Incremental Learning, https://arxiv.org/abs/1905.13260"
    Options = BiCOptions
    model: CorrectedClassifier
    options: BiCOptions
    later_settings = ()  # the base task leaves out the validation images, a share of the exemplars

    def __init__(self, options: BiCOptions, world: World) -> None:
        super().__init__(options, world)
        self.model = CorrectedClassifier(self.model.backbone, self.model.head).to(world.device)
        self.quota(world.tasks[-1].n_seen)  # raises if the memory will be too small

    # Memory and validation set --------------------------------------------------------------------------

    def n_validation(self, n_seen: int) -> int:
        """Validation images per class."""
        return max(1, round(self.options.validation * super().quota(n_seen)))

    def quota(self, n_seen: int) -> int:
        """Exemplars per class, without the validation set."""
        total, held = super().quota(n_seen), self.n_validation(n_seen)
        if held >= total:
            raise ConfigError(
                f"bic has {total} exemplar(s) per class for {n_seen} classes and holds out {held} for validation: none "
                "is left to train on. Raise bic.memory or bic.memory_total, or lower bic.validation."
            )
        return total - held

    def rows_of(self, classes: Sequence[int]) -> Tensor:
        """Rows of the classes, without the validation set."""
        rows = super().rows_of(classes)
        held = self.store.get("validation")
        return rows if held is None else rows[~torch.isin(rows, held)]

    def begin_task(self, task: Task) -> None:
        """Draw the validation images of the new classes."""
        rows = self.rows_of(task.classes)
        labels = self.world.train.labels[rows] - task.first
        noise = torch.rand(len(rows), generator=self.world.generator, device=rows.device, dtype=torch.float64)
        shuffled = rows[(labels + noise).argsort()]  # sorted by class, in random order within each class
        counts = torch.bincount(labels, minlength=task.n_new)
        held = self.n_validation(task.n_seen)
        positions = (counts.cumsum(0) - counts)[:, None] + torch.arange(held, device=rows.device)
        self.store["validation"] = extend(self.store.get("validation"), shuffled[positions], held)

    # Stages ---------------------------------------------------------------------------------------------

    def stages(self, task: Task) -> list[Stage]:
        main = self.main_stage(task)
        if task.index == 0:
            return [main]
        o = self.options
        bias = main.replace(
            name="bias",
            role="balance",
            epochs=o.bias_epochs,
            groups=(Group((f"model.corrections.{task.index}",), o.bias_lr),),
            optimizer=Optimizer("sgd", momentum=o.momentum),
            schedule=Schedule("steps", o.bias_milestones, o.gamma),
            batchnorm="frozen",
            loss=self.correction_loss,
        )
        return [main, bias]

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        return ("model.backbone", "model.head")

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        return self.store["validation"].flatten() if stage.name == "bias" else super().begin_stage(task, stage)

    def loss(self, batch: Batch) -> Terms:
        logits = self.model(batch.images).logits
        ce = F.cross_entropy(logits, batch.labels)
        if (old := self.teacher_output(batch.images)) is None:
            return {"ce": ce}
        share = self.task.n_old / self.task.n_seen
        kd = distillation_loss(logits, old.logits, self.options.temperature)
        return {"ce": (1 - share) * ce, "distil": share * kd}

    def correction_loss(self, batch: Batch) -> Terms:
        """Cross-entropy of the corrected logits; only alpha and beta of the current task are trained (eq. 5)."""
        newest = self.model.corrections[self.task.index]
        assert isinstance(newest, Correction)
        ce = F.cross_entropy(self.model(batch.images).logits, batch.labels)
        return {"ce": ce, "decay": self.options.bias_decay * newest.beta.square()}
