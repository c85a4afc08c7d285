"""Consolidation: what a task delivers lies between a stable and a plastic solution, not at the end of the training.

An increment ends at the plastic solution: good on the new classes, worse on the old ones than the model before it. On
the straight line between the two, the loss is low everywhere once BatchNorm's statistics are re-estimated
(docs/results.md), and points inside are better on old and new classes together than a restrained training is. So,
after the main stage of an increment,

1. the plastic solution is the mean of the weights of the last epochs (`tail`), or their last value;
2. the weights become stable + share (plastic - stable), with stable the model before the task, or, with `expert`, the
   end of the main stage, which another add-on may restrain (`--addon ivt --addon consolidate`), while the plastic
   solution is that of a copy trained first, without restraint;
3. BatchNorm's statistics are re-estimated on the balanced exemplars (`statistics`);
4. a short training (`distil_epochs`) repairs what the mean has lost: features of old samples are drawn to those of the
   model before the task, features of new samples to the plastic solution's. Labels are not used, so the rows of the
   classifier keep the features they were trained for;
5. `head_epochs` of the classifier alone, on the balanced exemplars, for methods without such a stage.

Training of the next task continues from there. Every part can be switched off. Steps 1 to 3 need nothing of the lab:
`torch.optim.swa_utils.AveragedModel`, `torch.lerp` and `incvec.ivt.batchnorm.recalibrate` do the same in any loop.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from incvec.addons.merging import Tensors, float_tensors, merge_incompatibility, pack_state, unpack_state
from incvec.config import Options
from incvec.contracts import AddOn, Batch, Group, Method, Schedule, Stage, Task, Terms, World
from incvec.ivt.batchnorm import Recalibration, running_statistics
from incvec.methods.common import ImageMethod, masked_mean


class ConsolidateOptions(Options):
    tail: float = Field(0.0, ge=0, lt=1, description="fraction of the main stage's epochs whose weights are averaged")
    share: float = Field(0.5, gt=0, le=1, description="of the plastic solution in the weights; 1: no mean")
    expert: bool = Field(False, description="train a copy without restraint first, as the plastic solution")
    statistics: Literal["keep", "balanced"] = Field("balanced", description="BatchNorm's, for the mean of the weights")
    distil_epochs: int = Field(0, ge=0, description="epochs of the distillation from both solutions")
    distil_lr: float = Field(0.1, gt=0, description="its learning rate, as a factor of the main stage's")
    head_epochs: int = Field(0, ge=0, description="epochs of the classifier alone on the balanced exemplars")
    head_lr: float = Field(0.1, gt=0, description="its learning rate, as a factor of the main stage's")


def relative_distance(features: Tensor, target: Tensor) -> Tensor:
    """|f - t|^2 / |t|^2 per sample: 2 (1 - cos) for features of equal norm, whatever their scale."""
    tiny = torch.finfo(target.dtype).tiny
    return (features - target).square().sum(1) / target.square().sum(1).clamp(min=tiny)


def frozen(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model with these weights that is never trained."""
    frozen_copy = copy.deepcopy(model).requires_grad_(False).eval()
    live = float_tensors(frozen_copy)
    for name, weight in weights.items():
        live[name].copy_(weight)
    return frozen_copy


class Consolidate(AddOn):
    name = "consolidate"
    summary = "after each task, averages and distils the stable and the plastic solution into one network"
    paper = "this project, https://arxiv.org/abs/2109.01903 (weight-space averages for robust fine-tuning)"
    Options = ConsolidateOptions
    options: ConsolidateOptions

    before: Tensors  # the model before the task; with `expert` everything that its training may change
    plastic: Tensors  # the plastic solution, once it is known
    mean: Tensors  # of the weights of the last epochs, so far

    def __init__(self, options: ConsolidateOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.before, self.plastic, self.mean = {}, {}, {}
        self.recalibration: Recalibration | None = None  # during its stage; never saved
        self._teachers: tuple[nn.Module, nn.Module] | None = None
        self._distance = torch.zeros((), device=world.device)

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        return merge_incompatibility(cls.name, method, others)

    @classmethod
    def incompatible_options(cls, options: Any, method: type[Method], method_options: Any) -> str | None:
        if options.distil_epochs and (method.pretrained or not issubclass(method, ImageMethod)):
            return f"distil_epochs needs a network trained from scratch, and {method.name} has none. Use 0."
        if options.head_epochs and not (method.exemplars and issubclass(method, ImageMethod)):
            return f"head_epochs needs exemplars of all classes, and {method.name} stores none. Use 0."
        return None

    # Stages ---------------------------------------------------------------------------------------------

    @property
    def _weights(self) -> Tensors:
        """Live parameters and statistics of the model."""
        return float_tensors(self.method.model)

    def _own(self, main: Stage, name: str, **changes: Any) -> Stage:
        return main.replace(name=f"{self.name}-{name}", role="align", owner=self.name, **changes)

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        if task.index == 0:
            return stages
        o = self.options
        places = [i for i, stage in enumerate(stages) if stage.role == "main"]
        main, end = stages[places[-1]], places[-1] + 1
        added = []
        if o.statistics == "balanced" and main.batchnorm == "train" and running_statistics(self.method.model):
            reason = "it averages BatchNorm's batch statistics"
            statistics = self._own(main, "statistics", epochs=1, groups=(), optimizer=None, eager=reason)
            added.append(statistics.replace(role="measure", loss=self._statistics_loss))
        if o.distil_epochs:
            backbone = tuple(Group(("model.backbone",), o.distil_lr * g.lr, g.weight_decay) for g in main.groups[:1])
            changes = {"groups": backbone, "batchnorm": "frozen", "schedule": Schedule("cosine"), "loss": self._distil}
            added.append(self._own(main, "distil", epochs=o.distil_epochs, **changes))
        if o.head_epochs:
            head = tuple(Group(("model.head",), o.head_lr * g.lr, g.weight_decay) for g in main.groups[:1])
            added.append(self._own(main, "head", epochs=o.head_epochs, groups=head, schedule=Schedule("cosine")))
        expert = [self._own(main, "expert")] if o.expert else []
        first = places[0]
        return [*stages[:first], *expert, *stages[first:end], *added, *stages[end:]]

    def _main(self, task: Task) -> Stage:
        """The last main stage of the method: the consolidation follows it."""
        return [stage for stage in self.method.stages(task) if stage.role == "main"][-1]

    def begin_task(self, task: Task) -> None:
        kept = self.method.state_dict() if self.options.expert else self.method.model.state_dict(prefix="model.")
        self.before = {n: t.detach().clone() for n, t in kept.items() if not n.startswith("teacher.")}
        self.plastic, self.mean = {}, {}

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        if stage.name == f"{self.name}-statistics":
            self.recalibration = Recalibration(self.method.model)
        balanced = stage.name in (f"{self.name}-statistics", f"{self.name}-head")
        if balanced and self.method.exemplars and isinstance(self.method, ImageMethod):
            self.method.herd_new(task)
            return self.method.balanced_rows(task)
        return self.method.begin_stage(task, self._main(task))

    # Weights --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Add the weights of the last epochs to their mean."""
        final = self._main(task)
        if stage.name not in (final.name, f"{self.name}-expert") or not self.options.tail:
            return
        count = epoch - int((1 - self.options.tail) * stage.epochs)
        if count == 1:
            self.mean = {name: weight.clone() for name, weight in self._weights.items()}
        elif count > 1:
            for name, weight in self._weights.items():
                self.mean[name].lerp_(weight, 1 / count)

    @torch.no_grad()
    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.name == f"{self.name}-expert":
            self.plastic = self._end_of_training()
            live = self.method.state_dict()
            for name, value in self.before.items():
                live[name].copy_(value)
        elif stage.owner is None and stage.name == self._main(task).name:
            self._average()
        elif stage.name == f"{self.name}-statistics" and self.recalibration is not None:
            self.recalibration.finish()
            self.recalibration = None
        elif stage.owner == self.name:
            self._teachers = None
            self.method.refresh(task)

    def _end_of_training(self) -> Tensors:
        """The mean over the last epochs if there is one, else the present weights."""
        tensors, self.mean = self.mean, {}
        return tensors or {name: weight.clone() for name, weight in self._weights.items()}

    def _average(self) -> None:
        """stable + share (plastic - stable). Rows of new classes are those of the plastic solution."""
        trained = self._end_of_training()
        stable = trained if self.options.expert else self._anchor()
        self.plastic = self.plastic if self.options.expert else trained
        new_rows = f"head.blocks.{self.method.task.index}."
        total = torch.zeros((), device=self.world.device)
        for name, weight in self._weights.items():
            plastic = self.plastic[name]
            start = plastic if name.startswith(new_rows) else stable[name]
            total += (plastic - start).square().sum()
            weight.copy_(torch.lerp(start, plastic, self.options.share))
        self._distance = total.sqrt()

    def _anchor(self) -> Tensors:
        """Weights and statistics of the model before the task."""
        return {name: self.before[f"model.{name}"] for name in self._weights}

    # Losses of the stages -------------------------------------------------------------------------------

    def _statistics_loss(self, batch: Batch) -> Terms:
        """The main stage's loss in train mode: it determines the network's inputs (rotated or mixed images, ...)."""
        terms = (self._main(self.method.task).loss or self.method.loss)(batch)
        assert self.recalibration is not None
        self.recalibration.update()
        return terms

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        if stage.name == f"{self.name}-distil" and self._teachers is None:
            model = self.method.model
            self._teachers = frozen(model, self._anchor()), frozen(model, self.plastic)

    def _distil(self, batch: Batch) -> Terms:
        assert self._teachers is not None
        model = cast(ImageMethod, self.method).model
        with torch.no_grad():
            before, plastic = (teacher(batch.images).features for teacher in self._teachers)
        old = (batch.labels < self.method.task.n_old).to(before.dtype)
        target = torch.where(old[:, None] > 0, before, plastic)
        distance = relative_distance(model(batch.images).features, target)
        return {"stable": masked_mean(distance, old), "plastic": masked_mean(distance, 1 - old)}

    # State ----------------------------------------------------------------------------------------------

    def end_task(self, task: Task) -> None:
        self.before, self.plastic, self.mean = {}, {}, {}

    def state(self) -> dict[str, Tensor]:
        groups = pack_state(before=self.before, plastic=self.plastic, mean=self.mean)
        return groups | {"distance": self._distance}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.before, self.plastic, self.mean = (unpack_state(state, group) for group in ("before", "plastic", "mean"))
        self._distance = state["distance"].clone() if "distance" in state else self._distance
        self._teachers = None

    def statistics(self) -> dict[str, Any]:
        return {"distance": float(f"{float(self._distance):.5g}")}
