"""What the image methods share: a growing classifier, its teacher, exemplars, and stages from plain options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.config import TrainOptions
from incvec.contracts import Group, Method, Optimizer, Schedule, Source, Stage, Task, World
from incvec.data.memory import extend, indices, quota
from incvec.data.select import class_means, herd
from incvec.data.source import chunk
from incvec.nets import Classifier, Head, build_backbone


@torch.no_grad()
def extract(model: nn.Module, world: World, rows: Tensor, view: str = "test", source: Source | None = None) -> Tensor:
    """Pooled features of the given rows, in float32, with BatchNorm on its running statistics."""
    source = source or world.train
    training = model.training
    model.eval()
    chunks, size = [], chunk(source)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        padded = part
        if len(part) < size and world.device.type == "cuda":  # a new shape would be compiled anew
            padded = torch.cat([part, part[:1].expand(size - len(part))])
        with world.autocast():
            images = source.fetch(padded, world.generator, (view,)).images
            chunks.append(model(images).features[: len(part)].float())
    model.train(training)
    return torch.cat(chunks)


def exchange_convs(module: nn.Module, kind: Callable[..., nn.Conv2d], suits: Callable[[nn.Conv2d], bool]) -> None:
    """Put a `kind` in the place of every plain convolution that suits, its parameters the same objects and names.

    The new one is made without values, so it draws none.
    """
    for parent in list(module.modules()):
        for name, old in list(parent.named_children()):
            if type(old) is nn.Conv2d and suits(old):
                shape = (old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding)
                new = kind(*shape, bias=old.bias is not None, device="meta")
                new.weight, new.bias = old.weight, old.bias
                setattr(parent, name, new)


def distillation(logits: Tensor, old: Tensor, temperature: float) -> Tensor:
    """KL(softmax(old / T) || softmax(logits / T)) over the old model's classes, averaged over the samples.

    Its gradient is that of the cross-entropy between the two; where they agree it is 0.
    """
    wanted = (old / temperature).log_softmax(1)
    given = (logits[:, : old.shape[1]] / temperature).log_softmax(1)
    return (wanted.exp() * (wanted - given)).sum(1).mean()


class ImageMethod(Method):
    """A backbone and a growing head, trained stage by stage; subclasses add their losses.

    The teacher is split off in `grow`, from the final weights of the task before, and never changes after.
    """

    model: Classifier
    options: TrainOptions
    distils: bool = True  # whether a teacher is kept

    def __init__(self, options: TrainOptions, world: World) -> None:
        super().__init__(options, world)
        self.model = self.make_model().to(world.device)

    def make_model(self) -> Any:
        """A backbone of the options' choice with the method's head."""
        channels = self.world.image_shape[0]
        backbone = build_backbone(self.options.net, channels=channels, generator=self.world.generator)
        return Classifier(backbone, self.make_head(backbone.width))

    def make_head(self, width: int) -> Head:
        raise TypeError(f"{type(self).__name__} names no head")

    def grow(self, task: Task) -> None:
        if self.distils and task.index > 0:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.model.grow(task.n_new, self.world.generator)

    # Stages ---------------------------------------------------------------------------------------------

    def stages(self, task: Task) -> list[Stage]:
        return [self.main_stage(task)]

    def trained(self, task: Task) -> tuple[str, ...]:
        """Name prefixes of what the main stage trains."""
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
            groups=(Group(self.trained(task), lr, decay),),
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
        raise ValueError(f"{self.name} does not know which rows stage {stage.name!r} trains on")

    def training_rows(self, task: Task) -> Tensor:
        """The task's own images and the past: its exemplars, or all of it for the oracle."""
        new = self.rows_of(task.classes)
        if task.index == 0:
            return new
        if self.world.oracle:
            return torch.cat([new, self.rows_of(range(task.n_old))])
        if self.exemplars:
            return torch.cat([new, self.exemplar_rows()])
        return new

    def rows_of(self, classes: Sequence[int]) -> Tensor:
        labels = self.world.train.labels
        rows = torch.arange(len(labels), device=labels.device)
        chosen = (labels >= classes[0]) & (labels <= classes[-1])
        rows, kept = rows[chosen], labels[chosen]
        return rows[kept.argsort(stable=True)]

    # Exemplars ------------------------------------------------------------------------------------------

    def exemplar_rows(self) -> Tensor:
        """Indices of the exemplars of all classes that have any."""
        memory = self.store["memory"]
        return indices(memory, self.quota(len(memory)))

    def quota(self, n_seen: int) -> int:
        o = self.options
        return quota(n_seen, o.memory if o.memory_total is None else None, o.memory_total)

    def herd_new(self, task: Task) -> None:
        """Choose the exemplars of the task's classes with the weights at hand, once and for good."""
        rows = self.rows_of(task.classes)
        features = extract(self.model, self.world, rows)
        count = self.quota(task.n_seen)
        labels = self.world.train.labels[rows]
        chosen = rows[herd(features, labels, list(task.classes), count)]
        known = self.store.get("memory")
        known = None if known is None else known[: task.n_old]
        self.store["memory"] = extend(known, chosen, count)

    def refresh(self, task: Task) -> None:
        """Herd the task's classes once more, where the weights now replaced have done so already."""
        if len(self.store.get("memory", ())) >= task.n_seen:
            self.herd_new(task)

    def balanced_rows(self, task: Task) -> Tensor:
        """As many rows of each class seen: the exemplars, or everything for the oracle."""
        return self.rows_of(range(task.n_seen)) if self.world.oracle else self.exemplar_rows()

    # Classifiers ----------------------------------------------------------------------------------------

    def nearest_mean_setup(self, task: Task) -> None:
        """Class means of the exemplars' normalized features, each averaged with its mirror image."""
        rows = self.balanced_rows(task)
        labels = self.world.train.labels[rows]
        total = torch.zeros(task.n_seen, self.model.backbone.width, device=self.world.device)
        for view in ("test", "flipped"):
            features = F.normalize(extract(self.model, self.world, rows, view), dim=1)
            total += class_means(features, labels, task.n_seen)
        self.store["means"] = F.normalize(total, dim=1)

    def nearest_mean(self, features: Tensor) -> Tensor:
        """Scores: minus the squared distance to each class mean."""
        unit = F.normalize(features.float(), dim=1)
        return -(unit[:, None, :] - self.store["means"][None]).square().sum(-1)


class ExemplarMethod(ImageMethod):
    """Herds exemplars of every class once, and classifies by its head and by the nearest class mean."""

    exemplars = True
    reported: ClassVar[str] = "cnn"  # of the two classifiers

    def end_task(self, task: Task) -> None:
        if len(self.store.get("memory", ())) < task.n_seen:  # a balanced stage herds before it begins
            self.herd_new(task)

    def begin_evaluation(self, task: Task) -> None:
        self.nearest_mean_setup(task)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        _, features, logits = self.model(images)
        scores = {"cnn": logits, "nme": self.nearest_mean(features)}
        return {name: scores[name] for name in sorted(scores, key=lambda name: name != self.reported)}
