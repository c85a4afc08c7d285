"""BiC: bias correction for large scale incremental learning (Wu et al., CVPR 2019, https://arxiv.org/abs/1905.13260).

A classifier trained on many new images and few exemplars prefers the new classes. BiC trains in two stages. First
the network, on new images and exemplars, with (1 - l) CE + l KD, l = old classes / classes seen, where KD compares
with the old model's corrected outputs at T = 2 (eq. 1 to 3). Then, the network fixed, two numbers: the new
classes' logits become alpha z + beta (eq. 4), fitted by cross-entropy on a balanced validation set that the network
has not been trained on (eq. 5), with 0.05 beta^2 added as in the authors' code. Earlier tasks keep their alpha and
beta for good; all corrections are part of the model and of its logits.

The validation set takes 1 of 10 of a class's places in the memory: 2 of 20. It is drawn before the class is first
trained on and never trained on later, as in FACIL (in PyCIL it is drawn anew at each task, from images the network
may know, and its second stage applies the softmax twice; neither is done here). The oracle trains its first stage on
all images but these, and fits the correction on these as ever.
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
from incvec.methods.common import ExemplarMethod, distillation
from incvec.nets import Backbone, Block, Classifier, Head, LinearHead


class BiCOptions(TrainOptions):
    weight_decay: float = Field(2e-4, ge=0)
    memory: int = Field(20, ge=2, description="exemplars a class, those of the validation set included")
    temperature: float = Field(2.0, gt=0)
    validation: float = Field(0.1, gt=0, lt=1, description="share of the memory that is held out, at least one a class")
    bias_epochs: int = Field(200, ge=1)
    bias_lr: float = Field(0.1, gt=0)
    bias_milestones: Ints = ()
    bias_decay: float = Field(0.05, ge=0, description="weight of beta^2 where the correction is fitted")


class Correction(nn.Module):
    """alpha z + beta for the logits of one task's classes (eq. 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(()))
        self.beta = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor) -> Tensor:
        return self.alpha * logits + self.beta


class CorrectedClassifier(Classifier):
    """A classifier whose logits pass through one correction a task; that of the base task stays (1, 0)."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__(backbone, head)
        self.corrections = nn.ModuleList()

    def grow(self, n_classes: int, generator: torch.Generator) -> Block:
        block = super().grow(n_classes, generator)
        self.corrections.append(Correction().to(block.weight))
        return block

    def forward(self, images: Tensor) -> Output:
        maps, features, logits = super().forward(images)
        parts = logits.split([len(block.weight) for block in self.head], dim=1)
        corrected = [correct(part) for correct, part in zip(self.corrections, parts, strict=True)]
        return Output(maps, features, torch.cat(corrected, dim=1))


class BiC(ExemplarMethod):
    name = "bic"
    summary = "distillation, then a linear correction of the new classes' logits on held-out exemplars"
    paper = "Large Scale Incremental Learning, https://arxiv.org/abs/1905.13260"
    Options = BiCOptions
    model: CorrectedClassifier
    options: BiCOptions

    def __init__(self, options: BiCOptions, world: World) -> None:
        super().__init__(options, world)
        self.model = CorrectedClassifier(self.model.backbone, self.model.head).to(world.device)
        self.quota(world.tasks[-1].n_seen)  # refused here, where the memory will be too small

    def make_head(self, width: int) -> Head:
        return LinearHead(width)

    # The memory, and what of it is held out ---------------------------------------------------------------

    def held_out(self, n_seen: int) -> int:
        """Images of each class in the validation set."""
        return max(1, round(self.options.validation * super().quota(n_seen)))

    def quota(self, n_seen: int) -> int:
        """Exemplars of each class that are trained on."""
        total, held = super().quota(n_seen), self.held_out(n_seen)
        if held >= total:
            raise ConfigError(
                f"bic has {total} exemplar(s) a class for {n_seen} classes and holds out {held} of them, so none is "
                "left to train on: raise bic.memory or bic.memory_total, or lower bic.validation."
            )
        return total - held

    def rows_of(self, classes: Sequence[int]) -> Tensor:
        """All rows of the classes but those of the validation set."""
        rows = super().rows_of(classes)
        held = self.store.get("validation")
        return rows if held is None else rows[~torch.isin(rows, held)]

    def begin_task(self, task: Task) -> None:
        """Draw the validation images of the new classes."""
        rows = self.rows_of(task.classes)
        labels = self.world.train.labels[rows] - task.first
        chance = torch.rand(len(rows), generator=self.world.generator, device=rows.device, dtype=torch.float64)
        mixed = rows[(labels + chance).argsort()]  # class by class, each in random order
        counts = torch.bincount(labels, minlength=task.n_new)
        held = self.held_out(task.n_seen)
        places = (counts.cumsum(0) - counts)[:, None] + torch.arange(held, device=rows.device)
        self.store["validation"] = extend(self.store.get("validation"), mixed[places], held)

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

    def trained(self, task: Task) -> tuple[str, ...]:
        return ("model.backbone", "model.head")

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        return self.store["validation"].flatten() if stage.name == "bias" else super().begin_stage(task, stage)

    def loss(self, batch: Batch) -> Terms:
        logits = self.model(batch.images).logits
        ce = F.cross_entropy(logits, batch.labels)
        if self.teacher is None:
            return {"ce": ce}
        with torch.no_grad():
            old = self.teacher(batch.images).logits
        share = self.task.n_old / self.task.n_seen
        return {"ce": (1 - share) * ce, "distil": share * distillation(logits, old, self.options.temperature)}

    def correction_loss(self, batch: Batch) -> Terms:
        """Cross-entropy of the corrected logits; only the newest alpha and beta are trained (eq. 5)."""
        newest = self.model.corrections[self.task.index]
        assert isinstance(newest, Correction)
        ce = F.cross_entropy(self.model(batch.images).logits, batch.labels)
        return {"ce": ce, "decay": self.options.bias_decay * newest.beta.square()}
