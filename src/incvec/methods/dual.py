"""What the methods on two towers share: the model by name, its captions, and class vectors for an evaluation.

The IVT paper's setting for models that start pre-trained: Adam, learning rate 5e-6, 10 epochs a task, batches of 64,
equal tasks, no exemplars. It leaves weight decay and schedule open; here there is neither. As in the code base its
numbers most likely come from (https://github.com/wx-zhang/spu), images are prepared alike for training and testing,
without augmentation; a training caption is `a photo of NAME`; an image is scored by its cosine with each class seen,
a class vector being the mean over the data set's templates under the text tower as it now stands.

`schedule="spu_cosine"` is that code's: the rate is 0 in the first epoch of every task, whole in the second, and then
falls as a cosine whose half period is as long as all tasks together, so that it hardly falls (SLCA: as one task).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from incvec.config import Ints, TrainOptions
from incvec.contracts import Input, Stage, Task
from incvec.data.prompts import sentences, templates
from incvec.errors import ConfigError
from incvec.methods.common import ImageMethod, extract
from incvec.nets.dual import Dual, TwoTower, build_dual, check_dual, class_vectors, cosines, input_of

CENTERING_ROWS = 1000  # images of the first task that a model with a center takes it from


class DualOptions(TrainOptions):
    """The IVT paper's setting on CLIP."""

    net: str = Field("clip", description="clip, lite0-minilm, or a backbone's name for a random one")
    weights: str | None = Field(None, description="of clip: a hub name, a folder, or a state dict's file")
    tag: str | None = Field(None, description="of clip: whose weights they are; it goes into the record")
    pixels: int | None = Field(None, ge=32, description="of lite0-minilm: the images' side; none: 224, its own")
    templates: str = Field("photo", description="prompt templates of the evaluation, by name")
    caption: str = Field("a photo of {}", description="a training image's sentence; {} stands for the class")
    epochs: int = Field(10, ge=1)
    batch_size: int = Field(64, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = Field(5e-6, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "steps", "spu_cosine"] = Field(  # type: ignore[assignment]
        "constant", description="spu_cosine: as in SPU's code, 0 in a task's first epoch"
    )
    milestones: Ints = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_dual(self.net, self.weights, self.tag)
        if self.pixels is not None and self.net != "lite0-minilm":
            raise ConfigError(f"pixels = {self.pixels} is for lite0-minilm; {self.net} takes images of one size.")
        fewest = min(self.epochs, self.base_epochs or self.epochs)
        if self.schedule == "spu_cosine" and fewest < 2:
            raise ConfigError(
                f"schedule = spu_cosine has rate 0 in a task's first epoch, so that {fewest} epoch trains nothing. "
                "Give at least 2 epochs, or schedule = constant."
            )
        templates(self.templates)
        return self


class DualMethod(ImageMethod):
    """Two towers, classified by sentences. BatchNorm, where a tower has any, keeps its statistics."""

    pretrained = True
    distils = False
    model: TwoTower  # type: ignore[assignment]
    options: DualOptions

    @classmethod
    def input(cls, options: DualOptions) -> Input | None:
        return input_of(options.net, options.weights, options.tag, options.pixels)

    def __init__(self, options: DualOptions, world: Any) -> None:
        super().__init__(options, world)
        self.center()

    def build_dual(self) -> Dual:
        o = self.options
        return build_dual(o.net, o.weights, o.tag, self.world.image_shape[0], self.world.generator)

    def make_model(self) -> Any:
        return TwoTower(self.build_dual(), sentences(self.options.caption, self.world.class_names))

    @torch.no_grad()
    def center(self) -> None:
        """Where a model centers its image features: their mean over images of the first task."""
        projection = getattr(getattr(self.model, "dual", None), "image_projection", None)
        center: Tensor | None = getattr(projection, "center", None)
        if center is None:
            return
        self.model.grow(1, self.world.generator)  # a class to compare with, taken back below
        rows = self.rows_of(self.world.tasks[0].classes)
        rows = rows[:: max(len(rows) // CENTERING_ROWS, 1)]
        center.copy_(extract(self.model, self.world, rows).mean(0))
        self.model.n_classes = 0

    # Stages ---------------------------------------------------------------------------------------------

    def trained(self, task: Task) -> tuple[str, ...]:
        return ("model",)

    def main_stage(self, task: Task, **changes: Any) -> Stage:
        stage = super().main_stage(task, **{"views": ("test",), "batchnorm": "frozen", **changes})
        if stage.schedule.kind != "spu_cosine":
            return stage
        return stage.replace(schedule=replace(stage.schedule, cycle=self.cycle(stage.epochs)))

    def cycle(self, epochs: int) -> int:
        """Epochs in which the schedule `spu_cosine` comes down to 0."""
        return epochs * len(self.world.tasks)

    def captions(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors of the sentences a batch can have, and which one each image's is.

        Each class goes through the text tower once a step: the same as one caption an image, at less cost.
        """
        first = 0 if self.world.oracle else self.task.first
        return self.model.texts(first), labels - first

    # Evaluation -----------------------------------------------------------------------------------------

    def begin_evaluation(self, task: Task) -> None:
        self.model.eval()
        names = self.world.class_names[: task.n_seen]
        rows = [sentences(template, names) for template in templates(self.options.templates)]
        with self.world.autocast():
            self.store["classes"] = class_vectors(self.model.dual, rows, self.world.device)

    def encode(self, images: Tensor) -> Tensor:
        return self.model.dual.embed_images(self.model.dual.image_tower(images))

    def classify(self, encoded: Tensor) -> dict[str, Tensor]:
        return {"text": 100 * cosines(self.model.adapted(encoded), self.store["classes"])}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.classify(self.encode(images))
