"""Mnemonics: exemplars that are trained (Liu et al., CVPR 2020, https://arxiv.org/abs/2002.10211).

After a task its herded exemplars become parameters, pixel by pixel, and are trained so that their class means tell
the training images apart: cross-entropy of cos(f(x), mean_c) over the classes seen, where a new class's mean is that
of its exemplars' features and an old one's is what its exemplars give. They are then stored as 8-bit images in place
of the originals. In increments the network itself is trained by weight transfer: convolutions keep the weights of
the base task, and each pair of output and input channels has a learnable factor (`transfer=False`: no factors, all
weights are trained).

The paper builds on LUCIR (`host="lucir"`); what is released is the variant with iCaRL's loss (`host="icarl"`): LUCIR's
classifier, imprinting and frozen old rows, but cross-entropy plus beta T^2 KL(old || new), and the nearest class
mean decides. We differ in these: exemplars are rounded to 8 bits and clipped, where the authors cut off and wrap
around; the mirror image in class means is a real one (theirs reverses the colors); a class has 20 exemplars, where
their default is 2,000 in all. At the released rate of 1e-5 for one epoch the pixels move by so little that rounding
undoes it (on the embedded digits, for every one of them), and what is stored is what was herded; with a larger
`exemplar_lr` they do move.

Factors are new in the first increment: they have no F and no weights before, so that there `ivt`, `cofima` and
`fisher-merge` act on BatchNorm and the head's scale alone (old rows rest, kernels too); from the second on they act
on the factors as well.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.contracts import Batch, Group, Optimizer, Output, Schedule, Stage, Task, Terms, World
from incvec.data.memory import extend
from incvec.data.source import ImageSource
from incvec.errors import ConfigError
from incvec.methods.common import distillation, exchange_convs
from incvec.methods.lucir import LUCIR, LUCIROptions


class MnemonicsOptions(LUCIROptions):
    host: Literal["icarl", "lucir"] = Field("icarl", description="whose losses and classifier it goes with")
    beta: float = Field(0.25, ge=0, description="weight of iCaRL's distillation, beside the temperature squared")
    temperature: float = Field(2.0, gt=0)
    transfer: bool = Field(True, description="increments train factors on the base task's kernels")
    exemplar_epochs: int = Field(1, ge=1)
    exemplar_lr: float = Field(1e-5, gt=0)
    exemplar_weight_decay: float = Field(5e-4, ge=0)


class ScaledConv(nn.Conv2d):
    """A convolution with, from the first increment on, a factor for each pair of output and input channels."""

    factor: nn.Parameter | None

    def __init__(self, *shape: Any, **settings: Any) -> None:
        super().__init__(*shape, **settings)
        self.register_parameter("factor", None)

    def attach(self) -> None:
        """Factors of one, where there are none yet."""
        if self.factor is None:
            self.factor = nn.Parameter(torch.ones_like(self.weight[:, :, :1, :1]))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.weight if self.factor is None else self.weight * self.factor
        return F.conv2d(x, scaled, self.bias, self.stride, self.padding)


def nearest_mean_loss(features: Tensor, means: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the cosines between samples and class means, without a temperature."""
    return F.cross_entropy(F.linear(F.normalize(features, dim=1), F.normalize(means, dim=1)), labels)


def to_pixels(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalized images as 8-bit ones, each value the nearest level."""
    return ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


class Mnemonics(LUCIR):
    name = "mnemonics"
    summary = "exemplars trained as images so that their class means discriminate; factors on frozen kernels"
    paper = "Mnemonics Training: Multi-Class Incremental Learning without Forgetting, https://arxiv.org/abs/2002.10211"
    Options: ClassVar[type] = MnemonicsOptions
    options: MnemonicsOptions
    auxiliary: nn.ParameterDict

    def __init__(self, options: MnemonicsOptions, world: World) -> None:
        super().__init__(options, world)
        source = cast(ImageSource, world.train)
        stored = tuple(getattr(source, "row", None) or source.images.shape[1:])
        if stored != world.image_shape:
            raise ConfigError(
                f"mnemonics stores exemplars as the network sees them, {list(world.image_shape)}, beside images "
                f"of {list(stored)}; expected the same shape. Set image_size={stored[-1]}."
            )
        self.originals = len(world.train.labels)  # rows behind these are trained exemplars
        if options.transfer:
            exchange_convs(self.model.backbone, ScaledConv, lambda conv: True)

    def grow(self, task: Task) -> None:
        super().grow(task)
        # Class by class, a flat row an image: its gradient then has one layout, whichever the network prefers.
        shape = (task.n_new * self.quota(task.n_seen), math.prod(self.world.image_shape))
        self.auxiliary = nn.ParameterDict({"exemplars": torch.zeros(shape, device=self.world.device)})
        for module in self.model.modules():
            if isinstance(module, ScaledConv) and task.index > 0:
                module.attach()

    # Training the network -------------------------------------------------------------------------------

    def trained(self, task: Task) -> tuple[str, ...]:
        backbone, *rest = super().trained(task)
        if task.index == 0 or not self.options.transfer:
            return (backbone, *rest)
        named = list(self.model.backbone.named_modules(prefix=backbone))
        factors = [f"{name}.factor" for name, module in named if isinstance(module, ScaledConv)]
        norms = [name for name, module in named if isinstance(module, nn.BatchNorm2d)]
        return (*factors, *norms, *rest)

    def retention(self, batch: Batch, output: Output, old: Output) -> dict[str, Tensor]:
        o = self.options
        if o.host == "lucir":
            return super().retention(batch, output, old)
        weight = o.beta * o.temperature**2
        return {"distil": weight * distillation(output.logits, old.logits, o.temperature)}

    # Training the exemplars -----------------------------------------------------------------------------

    def stages(self, task: Task) -> list[Stage]:
        o = self.options
        exemplars = self.main_stage(
            task,
            name="exemplars",
            role="align",
            epochs=o.exemplar_epochs,
            groups=(Group(("auxiliary.exemplars",), o.exemplar_lr, o.exemplar_weight_decay),),
            optimizer=Optimizer("sgd", momentum=0.9),
            schedule=Schedule(),
            batchnorm="frozen",
            loss=self.exemplar_loss,
        )
        return [*super().stages(task), exemplars]

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        if stage.name != "exemplars":
            return super().begin_stage(task, stage)
        self.herd_new(task)
        self.nearest_mean_setup(task)
        herded = self.store["memory"][task.first :].flatten()
        with torch.no_grad():
            self.auxiliary["exemplars"].copy_(self.world.train.fetch(herded, None, ("test",)).images.flatten(1))
        return self.training_rows(task)

    def exemplar_images(self) -> Tensor:
        """The exemplars in training, normalized, as images."""
        images: Tensor = self.auxiliary["exemplars"].unflatten(1, self.world.image_shape)
        return images

    def exemplar_loss(self, batch: Batch) -> Terms:
        own = self.model(self.exemplar_images()).features
        new = own.unflatten(0, (self.task.n_new, -1)).mean(1)
        means = torch.cat([self.store["means"][: self.task.n_old], new])
        with torch.no_grad():
            features = self.model(batch.images).features
        return {"means": nearest_mean_loss(features, means, batch.labels)}

    def end_task(self, task: Task) -> None:
        """Store the trained exemplars as rows of the source, and remember these in place of the originals."""
        source = cast(ImageSource, self.world.train)
        trained = to_pixels(self.exemplar_images().detach(), source.views.mean, source.views.std)
        classes = torch.arange(task.first, task.last, device=self.world.device)
        count = len(trained) // task.n_new
        new = {"images": trained, "labels": classes.repeat_interleave(count)}
        rows = source.append(**new)
        for name, values in new.items():
            self.store[name] = torch.cat([self.store[name], values]) if task.index > 0 else values
        known = self.store["memory"][: task.n_old]
        self.store["memory"] = extend(known, rows.view(task.n_new, count), count)

    def refresh(self, task: Task) -> None:
        """Exemplars were trained, not only chosen; they stay."""

    # Rows beside the data set's own ---------------------------------------------------------------------

    def restored(self) -> None:
        source = cast(ImageSource, self.world.train)
        there = len(source) - self.originals
        if there < len(self.store.get("labels", ())):
            source.append(self.store["images"][there:], self.store["labels"][there:])

    def rows_of(self, classes: Any) -> Tensor:
        """Rows of the data set itself."""
        rows = super().rows_of(classes)
        return rows[rows < self.originals]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        scores = super().forward(images)
        reported = "nme" if self.options.host == "icarl" else "cnn"
        return {reported: scores[reported], **scores}
