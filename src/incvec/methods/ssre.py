"""SSRE: self-sustaining representation expansion (Zhu et al., CVPR 2022, https://arxiv.org/abs/2203.06359).

No old images. In an increment every 3x3 convolution of a block gets a 1x1 one beside it, the adapter, which starts at
zero; only adapters and classifier are trained, so the stem stays what the base task made it. Afterwards the adapter is
padded to 3x3 and added to the kernel, so the network keeps its shape. A sample's likeness to the old classes,
s = max_c cos(f, p_c) over their prototypes p_c, decides what it is for: L = mean (1 - s) CE + sum s |f - f_old| +
lambda CE(prototypes), where logits are divided by the temperature throughout.

The authors fold BatchNorm into the convolutions after the base task; here it stays and runs on its statistics,
unchanged, as in PyCIL: the same function, though a step of the optimizer on an adapter is then scaled as the layer's
outputs are. Their rate in increments is 2e-4; the IVT paper names 1e-3 for all methods without exemplars. A 1x1
convolution beside a 3x3 one is the 3x3 whose kernel has it added in the middle, so both run as one, and folding
changes no output. The weights s carry no gradient (the authors let it through, PyCIL does not), and are at least 0, as
they are after a ReLU anyway. The base task's training is not part of the authors' release; it is PyCIL's. Prototypes
are class means under the test view. PyCIL's stronger augmentation in the first increment is left out: it is there by
an error in a condition.

Adapters are new in the first increment: they have no F and no weights before, so that there `ivt`, `cofima` and
`fisher-merge` act on the classifier alone; from the second on they act on adapters and classifier. `magmax` and `imm`
merge what a task ends with, the folded kernels.

The distillation is a sum, so with several ranks it acts on local batches: averaged over the ranks it weighs what it
would with a batch of the local size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.config import Ints, TrainOptions
from incvec.contracts import Batch, Stage, Task, Terms, World
from incvec.data.select import class_means
from incvec.methods.common import ImageMethod, exchange_convs, extract
from incvec.nets import Head, LinearHead


class SSREOptions(TrainOptions):
    epochs: int = Field(100, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = Field(1e-3, gt=0)
    milestones: Ints = (45, 90)
    temperature: float = Field(0.1, gt=0)
    lambda_distil: float = Field(1.0, ge=0)
    lambda_prototypes: float = Field(10.0, ge=0)


class AdaptedConv(nn.Conv2d):
    """A 3x3 convolution with, from the first increment on, a 1x1 adapter beside it."""

    adapter: nn.Parameter | None

    def __init__(self, *shape: Any, **settings: Any) -> None:
        super().__init__(*shape, **settings)
        self.register_parameter("adapter", None)

    def kernel(self) -> Tensor:
        """W + A in its middle: conv3x3(x, W) + conv1x1(x, A) as one convolution."""
        return self.weight if self.adapter is None else self.weight + F.pad(self.adapter, (1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), self.bias, self.stride, self.padding)

    def attach(self) -> None:
        """An adapter of zeros, where there is none yet."""
        if self.adapter is None:
            self.adapter = nn.Parameter(self.weight.new_zeros(self.out_channels, self.in_channels, 1, 1))

    @torch.no_grad()
    def fold(self) -> None:
        """The adapter becomes part of the kernel and starts again at zero."""
        if self.adapter is not None:
            self.weight.copy_(self.kernel())
            self.adapter.zero_()


def likeness(features: Tensor, prototypes: Tensor) -> Tensor:
    """s_i = max_c cos(f_i, p_c), from 0 to 1, without gradient."""
    cosines = F.linear(F.normalize(features.detach(), dim=1), F.normalize(prototypes, dim=1))
    return cosines.amax(1).clamp(min=0)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, likeness: Tensor, temperature: float) -> Tensor:
    """mean_i (1 - s_i) CE(z_i / T, y_i): what resembles no old class is for learning."""
    return ((1 - likeness) * F.cross_entropy(logits / temperature, labels, reduction="none")).mean()


def weighted_distillation(new: Tensor, old: Tensor, likeness: Tensor) -> Tensor:
    """sum_i s_i |f_i - f_old,i|: what resembles an old class is for keeping. A sum over the batch, as coded."""
    distance: Tensor = torch.linalg.vector_norm(new - old, dim=1)
    return (likeness * distance).sum()


class SSRE(ImageMethod):
    name = "ssre"
    summary = "1x1 adapters beside frozen convolutions, folded into them after each task; prototypes, no exemplars"
    paper = (
        "Self-Sustaining Representation Expansion for Non-Exemplar Class-Incremental Learning, "
        "https://arxiv.org/abs/2203.06359"
    )
    Options = SSREOptions
    options: SSREOptions

    def __init__(self, options: SSREOptions, world: World) -> None:
        super().__init__(options, world)
        exchange_convs(self.model.backbone.stages, AdaptedConv, lambda conv: conv.kernel_size == (3, 3))

    def make_head(self, width: int) -> Head:
        return LinearHead(width)

    def adapted(self) -> dict[str, AdaptedConv]:
        """Every convolution of the deployed model that takes an adapter, by name."""
        named = self.model.named_modules(prefix="model")
        return {name: module for name, module in named if isinstance(module, AdaptedConv)}

    def grow(self, task: Task) -> None:
        super().grow(task)
        if task.index > 0:
            for conv in self.adapted().values():
                conv.attach()

    def trained(self, task: Task) -> tuple[str, ...]:
        if task.index == 0:
            return ("model",)
        return (*(f"{name}.adapter" for name in self.adapted()), "model.head")

    def stages(self, task: Task) -> list[Stage]:
        return [self.main_stage(task, batchnorm="train" if task.index == 0 else "frozen")]

    def loss(self, batch: Batch) -> Terms:
        o, task = self.options, self.task
        _, features, logits = self.model(batch.images)
        if self.teacher is None:
            return {"ce": F.cross_entropy(logits / o.temperature, batch.labels)}
        with torch.no_grad():
            old = self.teacher(batch.images).features
        prototypes = self.store["prototypes"]
        s = likeness(features, prototypes)
        size, device = len(batch.labels), batch.labels.device
        drawn = torch.randint(task.n_old, (size,), generator=self.world.generator, device=device)
        remembered = self.model.head(prototypes.index_select(0, drawn))
        return {
            "ce": weighted_cross_entropy(logits, batch.labels, s, o.temperature),
            "distil": o.lambda_distil * weighted_distillation(features, old, s),
            "prototypes": o.lambda_prototypes * F.cross_entropy(remembered / o.temperature, drawn),
        }

    def end_task(self, task: Task) -> None:
        for conv in self.adapted().values():
            conv.fold()
        rows = self.rows_of(task.classes)
        features = extract(self.model, self.world, rows)
        new = class_means(features, self.world.train.labels[rows] - task.first, task.n_new)
        known = [self.store["prototypes"][: task.n_old]] if task.index > 0 else []
        self.store["prototypes"] = torch.cat([*known, new])

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"cnn": self.model(images).logits}
