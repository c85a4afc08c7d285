"""SSRE: self-sustaining representation expansion (Zhu et al., CVPR 2022, https://arxiv.org/abs/2203.06359).

No exemplars. In an increment every 3x3 convolution of a block gets a parallel 1x1 convolution, the adapter, which
starts at zero. Only adapters and classifier are trained, so the stem keeps its weights from the base task. After the
task the adapter is padded to 3x3 and added to the kernel, so the network keeps its shape. The similarity of a sample
to the old classes, s = max_c cos(f, p_c) over their prototypes p_c, weights the losses:

    L = mean (1 - s) CE + sum s |f - f_old| + lambda CE(prototypes), with all logits divided by the temperature.

Differences: the authors fold BatchNorm into the convolutions after the base task. Here BatchNorm stays, frozen, as in
PyCIL: the same function, but optimizer steps on an adapter are scaled like the layer's outputs. Their learning rate in
increments is 2e-4; the IVT paper states 1e-3 for all methods without exemplars. The adapter and its convolution run as
one 3x3 convolution, and folding does not change outputs. The weights s carry no gradient (with the authors they do,
with PyCIL they do not) and are clamped at 0, which has no effect after a ReLU. The authors did not release the
training of the base task; it is PyCIL's, without the adapters that it trains and folds there, too. Prototypes are class
means under the test view; the authors' are under the training view, and their new rows start as those of `nn.Linear`.
PyCIL uses stronger augmentation in the first increment because of an error in a condition; we do not.

Adapters are new in the first increment: they have no F and no previous weights. So in the first increment `ivt`,
`cofima` and `fisher-merge` act only on the classifier; from the second one on they also act on the adapters. `magmax`
and `imm` merge the weights at the end of a task, with folded kernels.

The distillation term is a sum. With several ranks it is the average of the sums over the local batches.
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
from incvec.methods.common import ImageMethod, replace_convs


class SSREOptions(TrainOptions):
    epochs: int = Field(100, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = Field(1e-3, gt=0)
    milestones: Ints = (45, 90)
    temperature: float = Field(0.1, gt=0)
    lambda_distil: float = Field(1.0, ge=0)
    lambda_prototypes: float = Field(10.0, ge=0)


class AdaptedConv(nn.Conv2d):
    """A 3x3 convolution that has, from the first increment on, a parallel 1x1 adapter."""

    adapter: nn.Parameter | None

    def __init__(self, *shape: Any, **settings: Any) -> None:
        super().__init__(*shape, **settings)
        self.register_parameter("adapter", None)

    def kernel(self) -> Tensor:
        """W with A added at its center: conv3x3(x, W) + conv1x1(x, A) as one convolution."""
        return self.weight if self.adapter is None else self.weight + F.pad(self.adapter, (1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), self.bias, self.stride, self.padding)

    def attach(self) -> None:
        """Add an adapter of zeros if there is none yet."""
        if self.adapter is None:
            self.adapter = nn.Parameter(self.weight.new_zeros(self.out_channels, self.in_channels, 1, 1))

    @torch.no_grad()
    def fold(self) -> None:
        """Add the adapter to the kernel and reset it to zero."""
        if self.adapter is not None:
            self.weight.copy_(self.kernel())
            self.adapter.zero_()


def prototype_similarity(features: Tensor, prototypes: Tensor) -> Tensor:
    """s_i = max_c cos(f_i, p_c), clamped to [0, 1], without gradient."""
    cosines = F.linear(F.normalize(features.detach(), dim=1), F.normalize(prototypes, dim=1))
    return cosines.amax(1).clamp(min=0)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, similarity: Tensor, temperature: float) -> Tensor:
    """mean_i (1 - s_i) CE(z_i / T, y_i): samples unlike the old classes are learned."""
    return ((1 - similarity) * F.cross_entropy(logits / temperature, labels, reduction="none")).mean()


def weighted_distillation(new: Tensor, old: Tensor, similarity: Tensor) -> Tensor:
    """sum_i s_i |f_i - f_old,i|: samples like an old class preserve it. A sum, not a mean."""
    distance: Tensor = torch.linalg.vector_norm(new - old, dim=1)
    return (similarity * distance).sum()


class SSRE(ImageMethod):
    name = "ssre"
    summary = "1x1 adapters parallel to frozen convolutions, folded in after each task; prototypes, no exemplars"
    paper = (
        "Self-Sustaining Representation Expansion for Non-Exemplar Class-Incremental Learning, "
        "https://arxiv.org/abs/2203.06359"
    )
    Options = SSREOptions
    options: SSREOptions

    def __init__(self, options: SSREOptions, world: World) -> None:
        super().__init__(options, world)
        replace_convs(self.model.backbone.stages, AdaptedConv, lambda conv: conv.kernel_size == (3, 3))

    def adapted_convs(self) -> dict[str, AdaptedConv]:
        """The convolutions with adapters, by name."""
        named = self.model.named_modules(prefix="model")
        return {name: module for name, module in named if isinstance(module, AdaptedConv)}

    def grow(self, task: Task) -> None:
        super().grow(task)
        if task.index > 0:
            for conv in self.adapted_convs().values():
                conv.attach()

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        if task.index == 0:
            return ("model",)
        return (*(f"{name}.adapter" for name in self.adapted_convs()), "model.head")

    def stages(self, task: Task) -> list[Stage]:
        return [self.main_stage(task, batchnorm="train" if task.index == 0 else "frozen")]

    def loss(self, batch: Batch) -> Terms:
        o, task = self.options, self.task
        _, features, logits = self.model(batch.images)
        old = self.teacher_output(batch.images)
        if old is None:
            return {"ce": F.cross_entropy(logits / o.temperature, batch.labels)}
        prototypes = self.store["prototypes"]
        s = prototype_similarity(features, prototypes)
        size, device = len(batch.labels), batch.labels.device
        classes = torch.randint(task.n_old, (size,), generator=self.world.generator, device=device)
        prototype_logits = self.model.head(prototypes.index_select(0, classes))
        return {
            "ce": weighted_cross_entropy(logits, batch.labels, s, o.temperature),
            "distil": o.lambda_distil * weighted_distillation(features, old.features, s),
            "prototypes": o.lambda_prototypes * F.cross_entropy(prototype_logits / o.temperature, classes),
        }

    def end_task(self, task: Task) -> None:
        for conv in self.adapted_convs().values():
            conv.fold()
        self.append_to_store(task, prototypes=class_means(*self.new_class_features(task), task.n_new))
