"""SLCA: slow learner with classifier alignment (Zhang et al., ICCV 2023, https://arxiv.org/abs/2303.05118).

A pre-trained network is tuned slowly, its classifier faster. Then the classifier alone is aligned on draws from one
Gaussian per class seen, N(k mean_c, covariance_c), k = 0.9 + 0.1 (task of c + 1) / (task + 1), with the statistics
from the task of the class. The alignment divides the logits of a sample by tau = 0.1 times the mean, over the tasks,
of the norms of the tasks' logits.

Two forms. `linear` is the original: an image tower with a new linear block per task, cross-entropy over the task's own
classes, alignment from the second task on, and the head restored afterwards, before the next task. `two-tower` is most
likely what the IVT paper ran, SPU's code (https://github.com/wx-zhang/spu): FLYP's loss on both towers, with the two
projections as the classifier, which is aligned after every task with the sentences of the classes and not restored.

Differences from that code: samples are drawn again for every step (one per class and position in the epoch), and all
are used; text vectors are normalized, the norms are averaged, and only classes seen have a column. `compat="spu"`
reproduces its vectors, norms and columns, and its loop, which takes each batch from the previous one: after the first
(256 of the shuffled samples), the batches of an epoch are empty, and Adam continues with a gradient of 0. Its larger
learning rate of the projections is canceled by its schedule; here `head_rate` is 1 for the two-tower form. The
original's augmentation is omitted; its SGD schedule is the preset's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.class_statistics import class_gaussians
from incvec.contracts import Batch, Group, Optimizer, Schedule, Stage, Task, Terms
from incvec.data.gaussians import GaussianSource
from incvec.data.prompts import sentences
from incvec.methods.common import extract_features
from incvec.methods.dual import DualOptions
from incvec.methods.finetune import local_cross_entropy
from incvec.methods.flyp import FLYP
from incvec.nets.dual import TowerClassifier
from incvec.nets.heads import LinearHead

SOURCE = "gaussians"


class SLCAOptions(DualOptions):
    form: Literal["two-tower", "linear"] = "two-tower"
    head_rate: float = Field(1.0, gt=0, description="learning rate of the classifier relative to the rest")
    align_caption: str = Field("a photo of a {}", description="sentence of a class in the alignment")
    align_epochs: int = Field(3, ge=0)
    align_lr: float = Field(5e-6, gt=0)
    align_batch_size: int = Field(256, ge=1)
    align_schedule: Literal["constant", "cosine", "spu_cosine"] = "constant"
    samples: int = Field(256, ge=1, description="draws per class and epoch")
    tau: float = Field(0.1, gt=0, description="temperature of the normalized logits")
    ridge: float = Field(1e-4, gt=0, description="added to the diagonal of the covariances")
    compat: Literal["paper", "spu"] = Field("paper", description="alignment as in the paper, or as in SPU's code")


class NormalHead(LinearHead):
    """A linear head initialized from a normal distribution with std 0.02, truncated at two std; biases are 0."""

    def initial(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        uniform = torch.rand(rows, self.width, generator=generator, device=generator.device)
        low, high = (torch.special.ndtr(torch.tensor(float(end))).item() for end in (-2, 2))
        weight = 0.02 * torch.special.ndtri(low + (high - low) * uniform)
        return weight, torch.zeros(rows, device=generator.device)


def mean_scales(tasks: Sequence[Task], now: int) -> list[float]:
    """k of every class seen: 0.9 + 0.1 (t + 1) / (now + 1) for the classes of task t."""
    return [0.9 + 0.1 * (task.index + 1) / (now + 1) for task in tasks[: now + 1] for _ in task.classes]


def normalized_logits(logits: Tensor, bounds: Sequence[int], tau: float, per_task: bool = False) -> Tensor:
    """logits / (tau n), with n the mean over the tasks of the norms of their logits; `per_task`: each task's norm."""
    blocks = [logits[:, first:last] for first, last in pairwise(bounds)]
    norms = torch.stack([block.norm(dim=1) for block in blocks], dim=1) + 1e-7
    if per_task:
        return torch.cat([block / norm[:, None] for block, norm in zip(blocks, norms.unbind(1), strict=True)], 1) / tau
    return logits / (norms.mean(1, keepdim=True) * tau)


class SLCA(FLYP):
    name = "slca"
    summary = "tunes a pre-trained model slowly, then aligns its classifier on class Gaussians"
    paper = "SLCA: Slow Learner with Classifier Alignment for Continual Learning, https://arxiv.org/abs/2303.05118"
    Options = SLCAOptions
    options: SLCAOptions

    @classmethod
    def uses_batch_contrast(cls, options: DualOptions) -> bool:
        assert isinstance(options, SLCAOptions)
        return options.form == "two-tower" and super().uses_batch_contrast(options)

    @property
    def linear(self) -> bool:
        return self.options.form == "linear"

    def make_model(self) -> Any:
        if not self.linear:
            return super().make_model()
        dual = self.build_dual()
        return TowerClassifier(dual.image_tower, NormalHead(dual.image_width))

    # Stages ---------------------------------------------------------------------------------------------

    def head_prefixes(self, task: Task) -> tuple[str, ...]:
        if self.linear:
            return (f"model.head.blocks.{task.index}",)
        return ("model.dual.image_projection", "model.dual.text_projection")

    def stages(self, task: Task) -> list[Stage]:
        o = self.options
        main = self.main_stage(task)
        (whole,) = main.groups
        fast = Group(self.head_prefixes(task), whole.lr * o.head_rate, whole.weight_decay)
        rest = Group(("model.tower",), whole.lr, whole.weight_decay) if self.linear else whole
        main = main.replace(groups=(fast, rest))
        if o.align_epochs == 0 or (self.linear and task.index == 0):
            return [main]
        head = ("model.head.blocks",) if self.linear else self.head_prefixes(task)
        align = Stage(
            name="align",
            role="align",
            epochs=o.align_epochs,
            batch_size=o.align_batch_size,
            groups=(Group(head, o.align_lr, whole.weight_decay),),
            optimizer=Optimizer(o.optimizer, momentum=o.momentum),
            schedule=Schedule(o.align_schedule),
            source=SOURCE,
            batchnorm="frozen",
            loss=self.alignment,
        )
        return [main, align]

    def cycle(self, epochs: int) -> int:
        return epochs

    def begin_task(self, task: Task) -> None:
        """Restore the head from before its last alignment, in the linear form."""
        for name in [name for name in self.store if name.startswith("unaligned.")]:
            parameter = self.model.get_parameter(name.removeprefix("unaligned."))
            with torch.no_grad():
                parameter.copy_(self.store.pop(name))

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        if stage.role != "align":
            return super().begin_stage(task, stage)
        if self.linear:
            head = self.model.get_submodule("head")
            self.store |= {f"unaligned.head.{name}": p.detach().clone() for name, p in head.named_parameters()}
        else:
            tokens = self.model.dual.tokenize(
                sentences(self.options.align_caption, self.world.class_names[: task.n_seen])
            ).to(self.world.device)
            self.model.eval()
            with torch.no_grad(), self.world.autocast():  # frozen in this stage, except for its projection
                self.store["sentences"] = self.model.dual.text_tower(tokens).float()
        self.update_gaussians(task)
        if self.options.compat == "spu":
            self.store["align_steps"] = torch.zeros((), dtype=torch.int64, device=self.world.device)
        return torch.arange(task.n_seen, device=self.world.device).repeat_interleave(self.options.samples)

    def memory(self) -> dict[str, int]:
        return {"samples": 8 * self.world.tasks[-1].last * self.options.samples}

    def update_gaussians(self, task: Task) -> None:
        """Compute mean and covariance of the task's classes, unless done already."""
        if len(self.store.get("means", ())) < task.n_seen:
            rows = self.rows_of(task.classes)
            features = extract_features(self.model, self.world, rows)
            means, factors = class_gaussians(features, self.world.train.labels[rows], task.classes, self.options.ridge)
            self.append_to_store(task, means=means, factors=factors)
        self.restored()

    def restored(self) -> None:
        """Add the source of class Gaussians."""
        if len(self.store.get("means", ())) == self.task.n_seen:
            scales = torch.tensor(mean_scales(self.world.tasks, self.task.index), device=self.world.device)
            self.world.add_source(SOURCE, GaussianSource(self.store["means"], self.store["factors"], scales))

    def refresh(self, task: Task) -> None:
        """Recompute the Gaussians of the task's classes with the new weights."""
        for name in ("means", "factors"):
            if name in self.store:
                self.store[name] = self.store[name][: task.n_old]
        self.update_gaussians(task)

    def end_task(self, task: Task) -> None:
        self.store.pop("sentences", None)
        self.store.pop("align_steps", None)
        self.update_gaussians(task)  # if there was no alignment

    # Losses ---------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> Terms:
        if not self.linear:
            return super().loss(batch)
        return {"ce": local_cross_entropy(self.model(batch.images).logits, batch.labels, self.task.n_old)}

    def alignment(self, batch: Batch) -> Terms:
        """Cross-entropy of drawn features over the classes seen, with normalized logits."""
        o, (features,) = self.options, batch.views
        spu = o.compat == "spu"
        if self.linear:
            logits = cast(Any, self.model).head(features)
        else:
            dual = self.model.dual
            texts = dual.embed_texts(self.store["sentences"])
            logits = dual.similarities(self.model.unit(features), texts if spu else F.normalize(texts, dim=1))
        bounds = [0, *(task.last for task in self.world.tasks[: self.task.index + 1])]
        logits = normalized_logits(logits, bounds, o.tau, per_task=spu)
        if spu:  # future classes have a column of zeros
            logits = F.pad(logits, (0, self.world.tasks[-1].last - logits.shape[1]))
        loss = F.cross_entropy(logits, batch.labels)
        return {"align": loss * self.is_first_step() if spu else loss}

    def is_first_step(self) -> Tensor:
        """1 in the first step of each epoch of the alignment, 0 otherwise."""
        count = self.task.n_seen * self.options.samples
        steps = count // min(self.options.align_batch_size, count)
        first = self.store["align_steps"] % steps == 0
        self.store["align_steps"] += 1
        return first.float()

    # Evaluation -----------------------------------------------------------------------------------------

    def begin_evaluation(self, task: Task) -> None:
        if not self.linear:
            super().begin_evaluation(task)

    @property
    def classifiers(self) -> tuple[str, ...]:
        return ("cnn",) if self.linear else super().classifiers

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"cnn": self.model(images).logits} if self.linear else super().forward(images)
