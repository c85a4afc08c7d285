"""Mnemonics: trained exemplars (Liu et al., CVPR 2020, https://arxiv.org/abs/2002.10211).

After a task, the pixels of its herded exemplars become parameters. They are trained such that their class means
separate the training images: cross-entropy of cos(f(x), mean_c) over the classes seen, where the mean of a new class
comes from its exemplars in training and that of an old class from its stored exemplars. They are then stored as 8-bit
images instead of the originals. In increments, the network is trained by weight transfer: convolutions keep the
weights of the base task, and each pair of output and input channels has a learnable factor (`transfer=False`: no
factors, all weights are trained).

The paper builds on LUCIR (`host="lucir"`). The released code is the variant with iCaRL's loss (`host="icarl"`): LUCIR's
classifier, imprinting and frozen old rows, but cross-entropy plus beta T^2 KL(old || new), and the nearest class mean
classifies. Differences: exemplars are rounded to 8 bits and clipped, while the authors truncate and wrap around; class
means use a real mirror image (theirs reverses the colors); 20 exemplars per class, while their default is a total of
2,000. At the released learning rate of 1e-5 for one epoch, the pixels change so little that rounding undoes it (for all
pixels of the embedded digits), and the stored images are the herded ones. With a larger `exemplar_lr` they do change.

Factors are new in the first increment: they have no F and no previous weights. So in the first increment `ivt`,
`cofima` and `fisher-merge` act only on BatchNorm and on the head's scale (old rows and kernels are frozen); from the
second one on they also act on the factors.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.contracts import Batch, Group, Optimizer, Output, Schedule, Stage, Task, Terms, World
from incvec.data.memory import extend
from incvec.data.source import ImageSource
from incvec.errors import ConfigError
from incvec.methods.common import distillation_loss, replace_convs
from incvec.methods.lucir import LUCIR, LUCIROptions


class MnemonicsOptions(LUCIROptions):
    host: Literal["icarl", "lucir"] = Field("icarl", description="method whose losses and classifier are used")
    beta: float = Field(0.25, ge=0, description="weight of iCaRL's distillation, times the squared temperature")
    temperature: float = Field(2.0, gt=0)
    transfer: bool = Field(True, description="train channel factors on the frozen kernels of the base task")
    exemplar_epochs: int = Field(1, ge=1)
    exemplar_lr: float = Field(1e-5, gt=0)
    exemplar_weight_decay: float = Field(5e-4, ge=0)


class ScaledConv(nn.Conv2d):
    """A convolution that has, from the first increment on, a factor per pair of output and input channels."""

    factor: nn.Parameter | None

    def __init__(self, *shape: Any, **settings: Any) -> None:
        super().__init__(*shape, **settings)
        self.register_parameter("factor", None)

    def attach(self) -> None:
        """Add factors of one if there are none yet."""
        if self.factor is None:
            self.factor = nn.Parameter(torch.ones_like(self.weight[:, :, :1, :1]))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.weight if self.factor is None else self.weight * self.factor
        return F.conv2d(x, scaled, self.bias, self.stride, self.padding)


def nearest_mean_loss(features: Tensor, means: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the cosines between samples and class means, without a temperature."""
    return F.cross_entropy(F.linear(F.normalize(features, dim=1), F.normalize(means, dim=1)), labels)


def to_pixels(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalized images as 8-bit images, rounded and clipped."""
    return ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


class Mnemonics(LUCIR):
    name = "mnemonics"
    summary = "exemplars trained as images for discriminative class means; channel factors on frozen kernels"
    paper = "Mnemonics Training: Multi-Class Incremental Learning without Forgetting, https://arxiv.org/abs/2002.10211"
    Options: ClassVar[type] = MnemonicsOptions
    options: MnemonicsOptions
    later_settings = ()  # the base task trains exemplars, too
    auxiliary: nn.ParameterDict

    def __init__(self, options: MnemonicsOptions, world: World) -> None:
        super().__init__(options, world)
        stored = world.train.row
        if stored != world.image_shape:
            raise ConfigError(
                f"mnemonics stores exemplars at the network's input shape {list(world.image_shape)}, but the images of "
                f"the data set have {list(stored)}; expected the same shape. Set image_size={stored[-1]}."
            )
        self.originals = len(world.train.labels)  # later rows are trained exemplars
        if options.transfer:
            replace_convs(self.model.backbone, ScaledConv, lambda conv: True)

    @property
    def source(self) -> ImageSource:
        """The training images, to which the trained exemplars are appended."""
        assert isinstance(self.world.train, ImageSource)
        return self.world.train

    def grow(self, task: Task) -> None:
        super().grow(task)
        # By class, one flat row per image: so the gradient has one memory layout, whichever the network prefers.
        shape = (task.n_new * self.quota(task.n_seen), math.prod(self.world.image_shape))
        self.auxiliary = nn.ParameterDict({"exemplars": torch.zeros(shape, device=self.world.device)})
        for module in self.model.modules():
            if isinstance(module, ScaledConv) and task.index > 0:
                module.attach()

    # The network ----------------------------------------------------------------------------------------

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        backbone, *rest = super().trained_parameters(task)
        if task.index == 0 or not self.options.transfer:
            return (backbone, *rest)
        named = list(self.model.backbone.named_modules(prefix=backbone))
        factors = [f"{name}.factor" for name, module in named if isinstance(module, ScaledConv)]
        norms = [name for name, module in named if isinstance(module, nn.BatchNorm2d)]
        return (*factors, *norms, *rest)

    def retention_loss(self, batch: Batch, output: Output, old: Output) -> dict[str, Tensor]:
        o = self.options
        if o.host == "lucir":
            return super().retention_loss(batch, output, old)
        weight = o.beta * o.temperature**2
        return {"distil": weight * distillation_loss(output.logits, old.logits, o.temperature)}

    # The exemplars --------------------------------------------------------------------------------------

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
        self.compute_class_means(task)
        herded = self.store["memory"][task.first :].flatten()
        with torch.no_grad():
            self.auxiliary["exemplars"].copy_(self.world.train.fetch(herded, None, ("test",)).images.flatten(1))
        return self.training_rows(task)

    def exemplar_images(self) -> Tensor:
        """The exemplars in training, as normalized images."""
        images: Tensor = self.auxiliary["exemplars"].unflatten(1, self.world.image_shape)
        return images

    def exemplar_loss(self, batch: Batch) -> Terms:
        features = self.model(self.exemplar_images()).features
        new_means = features.unflatten(0, (self.task.n_new, -1)).mean(1)
        means = torch.cat([self.store["means"][: self.task.n_old], new_means])
        with torch.no_grad():
            features = self.model(batch.images).features
        return {"means": nearest_mean_loss(features, means, batch.labels)}

    def end_task(self, task: Task) -> None:
        """Append the trained exemplars to the source; the memory refers to them instead of the originals."""
        views = self.source.views
        trained = to_pixels(self.exemplar_images().detach(), views.mean, views.std)
        classes = torch.arange(task.first, task.last, device=self.world.device)
        count = len(trained) // task.n_new
        new = {"images": trained, "labels": classes.repeat_interleave(count)}
        rows = self.source.append(**new)
        for name, values in new.items():
            self.store[name] = torch.cat([self.store[name], values]) if task.index > 0 else values
        known = self.store["memory"][: task.n_old]
        self.store["memory"] = extend(known, rows.view(task.n_new, count), count)

    def refresh(self, task: Task) -> None:
        """Keep the exemplars: they have been trained, not only selected."""

    def restored(self) -> None:
        """Append the stored exemplars that the source does not have yet."""
        present = len(self.source) - self.originals
        if present < len(self.store.get("labels", ())):
            self.source.append(self.store["images"][present:], self.store["labels"][present:])

    def rows_of(self, classes: Any) -> Tensor:
        """Rows of the data set, without trained exemplars."""
        rows = super().rows_of(classes)
        return rows[rows < self.originals]

    @property
    def classifiers(self) -> tuple[str, ...]:
        return ("nme", "cnn") if self.options.host == "icarl" else ("cnn", "nme")
