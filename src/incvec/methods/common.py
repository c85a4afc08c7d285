"""Base classes of the methods with a backbone and a growing head: teacher, exemplars, stages from the options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.config import TrainOptions
from incvec.contracts import Group, Method, Optimizer, Output, Schedule, Stage, Task, World
from incvec.data.memory import extend, indices, quota
from incvec.data.select import class_means, herd
from incvec.data.source import inference_batch_size
from incvec.nets import Classifier, Head, LinearHead, build_backbone


@torch.no_grad()
def extract_features(
    model: nn.Module, world: World, rows: Tensor, view: str = "test", batch: int | None = None
) -> Tensor:
    """Pooled features of the given training images, in float32, with the model in eval mode."""
    source, training = world.train, model.training
    model.eval()
    chunks, size = [], batch or inference_batch_size(source)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        padded = part
        if len(part) < size and world.device.type == "cuda":  # a new shape would trigger a recompilation
            padded = torch.cat([part, part[:1].expand(size - len(part))])
        with world.autocast():
            images = source.fetch(padded, world.generator, (view,)).images
            chunks.append(model(images).features[: len(part)].float())
    model.train(training)
    return torch.cat(chunks)


def replace_convs(module: nn.Module, kind: Callable[..., nn.Conv2d], condition: Callable[[nn.Conv2d], bool]) -> None:
    """Replace every plain convolution that meets the condition by a `kind` with the same parameters and names.

    The new layer is created on the meta device, so it does not draw initial values.
    """
    for parent in list(module.modules()):
        for name, old in list(parent.named_children()):
            if type(old) is nn.Conv2d and condition(old):
                shape = (old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding)
                new = kind(*shape, bias=old.bias is not None, device="meta")
                new.weight, new.bias = old.weight, old.bias
                setattr(parent, name, new)


def distillation_loss(logits: Tensor, old_logits: Tensor, temperature: float) -> Tensor:
    """KL(softmax(old_logits / T) || softmax(logits / T)) over the old classes, averaged over the samples.

    It has the same gradient as the cross-entropy between the two, and it is 0 when they agree.
    """
    targets = (old_logits / temperature).log_softmax(1)
    predictions = (logits[:, : old_logits.shape[1]] / temperature).log_softmax(1)
    return (targets.exp() * (targets - predictions)).sum(1).mean()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values at which `mask` is 1; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


class ImageMethod(Method):
    """A backbone and a growing head, trained in one main stage; subclasses add their losses.

    The teacher is a copy of the model with the final weights of the previous task. `grow` makes it.
    """

    model: Classifier
    options: TrainOptions
    uses_teacher: bool = True
    # Exemplars are selected when the base task ends.
    later_settings: ClassVar[tuple[str, ...]] = ("memory", "memory_total")

    def __init__(self, options: TrainOptions, world: World) -> None:
        super().__init__(options, world)
        self.model = self.make_model().to(world.device)

    def make_model(self) -> Any:
        """The backbone that the options select, with the method's head."""
        channels = self.world.image_shape[0]
        backbone = build_backbone(self.options.net, channels=channels, generator=self.world.generator)
        return Classifier(backbone, self.make_head(backbone.width))

    def make_head(self, width: int) -> Head:
        return LinearHead(width)

    def grow(self, task: Task) -> None:
        if self.uses_teacher and task.index > 0:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.model.grow(task.n_new, self.world.generator)

    def teacher_output(self, images: Tensor) -> Output | None:
        """Output of the model before this task, without gradients; None if there is none."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            output: Output = self.teacher(images)
        return output

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"cnn": self.class_logits(self.model(images).logits)}

    # Stages ---------------------------------------------------------------------------------------------

    def stages(self, task: Task) -> list[Stage]:
        return [self.main_stage(task)]

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        """Name prefixes of the parameters that the main stage trains."""
        return ("model", "auxiliary")

    def main_stage(self, task: Task, **changes: Any) -> Stage:
        o = self.options
        base = task.index == 0

        def pick(first: Any, later: Any) -> Any:
            return first if base and first is not None else later

        lr, decay = pick(o.base_lr, o.lr), pick(o.base_weight_decay, o.weight_decay)
        stage = Stage(
            name="main",
            role="main",
            epochs=pick(o.base_epochs, o.epochs),
            batch_size=o.batch_size,
            groups=(Group(self.trained_parameters(task), lr, decay),),
            optimizer=Optimizer(o.optimizer, momentum=o.momentum),
            schedule=Schedule(o.schedule, pick(o.base_milestones, o.milestones), o.gamma),
        )
        return stage.replace(**changes)

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        if stage.role == "main":
            return self.training_rows(task)
        if stage.role == "balance" and self.exemplars:
            self.herd_new(task)
            return self.balanced_rows(task)
        raise ValueError(f"{self.name} has no rows for stage {stage.name!r}: return them from begin_stage")

    # Rows of the training set ---------------------------------------------------------------------------

    def training_rows(self, task: Task) -> Tensor:
        """The task's images and the past: the exemplars, or all past images for the oracle."""
        new = self.rows_of(task.classes)
        if task.index == 0:
            return new
        if self.world.oracle:
            return torch.cat([new, self.rows_of(range(task.n_old))])
        if self.exemplars:
            return torch.cat([new, self.exemplar_rows()])
        return new

    def rows_of(self, classes: Sequence[int]) -> Tensor:
        """Rows of consecutive classes, sorted by class."""
        labels = self.world.train.labels
        rows = torch.arange(len(labels), device=labels.device)
        selected = (labels >= classes[0]) & (labels <= classes[-1])
        return rows[selected][labels[selected].argsort(stable=True)]

    def new_class_features(self, task: Task, view: str = "test") -> tuple[Tensor, Tensor]:
        """Features of the task's images under the current weights, and their labels within the task (from 0)."""
        rows = self.rows_of(task.classes)
        return extract_features(self.model, self.world, rows, view), self.world.train.labels[rows] - task.first

    def append_to_store(self, task: Task, **tensors: Tensor) -> None:
        """Append one row per new class to entries of the store that have one row per class."""
        for name, new in tensors.items():
            known = self.store.get(name)
            self.store[name] = new if known is None else torch.cat([known[: task.n_old], new])

    # Exemplars ------------------------------------------------------------------------------------------

    def exemplar_rows(self) -> Tensor:
        """Rows of the exemplars of all classes that have any."""
        memory = self.store["memory"]
        return indices(memory, self.quota(len(memory)))

    def quota(self, n_seen: int) -> int:
        """Exemplars per class."""
        o = self.options
        return quota(n_seen, o.memory if o.memory_total is None else None, o.memory_total)

    def herd_new(self, task: Task) -> None:
        """Select the exemplars of the task's classes with the current weights."""
        rows = self.rows_of(task.classes)
        features = extract_features(self.model, self.world, rows)
        count = self.quota(task.n_seen)
        labels = self.world.train.labels[rows]
        selected = rows[herd(features, labels, list(task.classes), count)]
        known = self.store.get("memory")
        known = None if known is None else known[: task.n_old]
        self.store["memory"] = extend(known, selected, count)

    def refresh(self, task: Task) -> None:
        """Herd the task's classes again if the replaced weights have already herded them."""
        if len(self.store.get("memory", ())) >= task.n_seen:
            self.herd_new(task)

    def balanced_rows(self, task: Task) -> Tensor:
        """The exemplars of all classes seen, or all their images for the oracle."""
        return self.rows_of(range(task.n_seen)) if self.world.oracle else self.exemplar_rows()

    # Nearest-mean classifier ----------------------------------------------------------------------------

    def compute_class_means(self, task: Task) -> None:
        """Class means of the exemplars' normalized features, averaged with those of the mirrored images."""
        rows = self.balanced_rows(task)
        labels = self.world.train.labels[rows]
        total = torch.zeros(task.n_seen, self.model.backbone.width, device=self.world.device)
        for view in ("test", "flipped"):
            features = F.normalize(extract_features(self.model, self.world, rows, view), dim=1)
            total += class_means(features, labels, task.n_seen)
        self.store["means"] = F.normalize(total, dim=1)

    def nearest_mean(self, features: Tensor) -> Tensor:
        """Scores: minus the squared distance to each class mean."""
        unit = F.normalize(features.float(), dim=1)
        return -(unit[:, None, :] - self.store["means"][None]).square().sum(-1)


class ExemplarMethod(ImageMethod):
    """Herds exemplars of every class once; classifies with its head and with the nearest class mean."""

    exemplars = True
    reported: ClassVar[str] = "cnn"  # the classifier whose accuracy is reported: "cnn" or "nme"

    def end_task(self, task: Task) -> None:
        if len(self.store.get("memory", ())) < task.n_seen:  # a balanced stage has herded already
            self.herd_new(task)

    def begin_evaluation(self, task: Task) -> None:
        self.compute_class_means(task)

    @property
    def classifiers(self) -> tuple[str, ...]:
        return ("nme", "cnn") if self.reported == "nme" else ("cnn", "nme")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        _, features, logits = self.model(images)
        scores = {"cnn": logits, "nme": self.nearest_mean(features)}
        return {name: scores[name] for name in self.classifiers}
