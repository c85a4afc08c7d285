"""The base of the methods on pre-trained dual encoders such as CLIP: model, captions, class vectors.

The IVT paper's setting: Adam, learning rate 5e-6, 10 epochs per task, batches of 64, tasks of equal size, no
exemplars. It does not specify weight decay and schedule; here there is neither. As in the code base its numbers most
likely come from (https://github.com/wx-zhang/spu), images are prepared the same way for training and testing, without
augmentation; a training caption is `a photo of NAME`; an image is scored by its cosine with each class seen, and a
class vector is the mean over the data set's templates under the current text tower.

`schedule="spu_cosine"` is the schedule of that code: the learning rate is 0 in the first epoch of every task, full in
the second, and then falls as a cosine whose half period is as long as all tasks together, so it hardly falls (SLCA: as
long as one task).
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
from incvec.methods.common import ImageMethod, extract_features
from incvec.nets.dual import Dual, TwoTower, build_dual, check_dual, class_vectors, cosines, input_of

CENTERING_ROWS = 1000  # images of the first task from which the center of the features is computed


class DualOptions(TrainOptions):
    """The IVT paper's settings on CLIP."""

    net: str = Field("clip", description="clip, lite0-minilm, or a backbone for a randomly initialized model")
    weights: str | None = Field(None, description="for clip: a hub name, a folder, or the file of a state dict")
    tag: str | None = Field(None, description="for clip: origin of the weights, kept in the record")
    pixels: int | None = Field(None, ge=32, description="for lite0-minilm: image size; null: 224, its native size")
    templates: str = Field("photo", description="name of the prompt templates for evaluation")
    caption: str = Field("a photo of {}", description="caption of a training image; {} is the class name")
    epochs: int = Field(10, ge=1)
    batch_size: int = Field(64, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = Field(5e-6, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "steps", "spu_cosine"] = Field(  # type: ignore[assignment]
        "constant", description="spu_cosine: as in SPU's code, 0 in the first epoch of a task"
    )
    milestones: Ints = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_dual(self.net, self.weights, self.tag)
        if self.pixels is not None and self.net != "lite0-minilm":
            raise ConfigError(f"pixels = {self.pixels} is for lite0-minilm; {self.net} has a fixed input size.")
        fewest = min(self.epochs, self.base_epochs or self.epochs)
        if self.schedule == "spu_cosine" and fewest < 2:
            raise ConfigError(
                f"schedule = spu_cosine has rate 0 in the first epoch of a task: {fewest} epoch trains nothing. "
                "Use at least 2 epochs, or schedule = constant."
            )
        templates(self.templates)
        return self


class DualMethod(ImageMethod):
    """A dual encoder that classifies by the embeddings of sentences. BatchNorm layers, if any, are frozen."""

    pretrained = True
    uses_teacher = False
    model: TwoTower  # type: ignore[assignment]
    options: DualOptions

    @classmethod
    def input(cls, options: DualOptions) -> Input | None:
        return input_of(options.net, options.weights, options.tag, options.pixels)

    def __init__(self, options: DualOptions, world: Any) -> None:
        super().__init__(options, world)
        self.center_features()

    def build_dual(self) -> Dual:
        o = self.options
        return build_dual(o.net, o.weights, o.tag, self.world.image_shape[0], self.world.generator)

    def make_model(self) -> Any:
        return TwoTower(self.build_dual(), sentences(self.options.caption, self.world.class_names))

    @torch.no_grad()
    def center_features(self) -> None:
        """Set the center of the image features, if the model has one: their mean over images of the first task."""
        projection = getattr(getattr(self.model, "dual", None), "image_projection", None)
        center: Tensor | None = getattr(projection, "center", None)
        if center is None:
            return
        self.model.grow(1, self.world.generator)  # the forward pass needs a class; removed below
        rows = self.rows_of(self.world.tasks[0].classes)
        rows = rows[:: max(len(rows) // CENTERING_ROWS, 1)]
        center.copy_(extract_features(self.model, self.world, rows).mean(0))
        self.model.n_classes = 0

    # Stages ---------------------------------------------------------------------------------------------

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        return ("model",)

    def main_stage(self, task: Task, **changes: Any) -> Stage:
        stage = super().main_stage(task, **{"views": ("test",), "batchnorm": "frozen", **changes})
        if stage.schedule.kind != "spu_cosine":
            return stage
        return stage.replace(schedule=replace(stage.schedule, cycle=self.cycle(stage.epochs)))

    def cycle(self, epochs: int) -> int:
        """Epochs after which the schedule `spu_cosine` reaches 0."""
        return epochs * len(self.world.tasks)

    def captions(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors of all captions that may occur in a batch, and the index of each image's caption.

        Each class passes through the text tower once per step: the same result as one caption per image, at less cost.
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

    @property
    def classifiers(self) -> tuple[str, ...]:
        return ("text",)

    def classify(self, encoded: Tensor) -> dict[str, Tensor]:
        return {"text": 100 * cosines(self.model.adapted(encoded), self.store["classes"])}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.classify(self.encode(images))
