"""Increment Vector Transformation as an add-on: the plug-in (`incvec.IVT`), with the engine's events as its calls.

Every `interval` epochs of the main stage the deployed parameters are teleported, theta <- anchor + S (theta - anchor),
S = (Fbar_{t-1} + Fbar_t)^-1 Fbar_t, with the anchor at the beginning of the task. Balanced and alignment stages have no
teleport and no Fisher. F_1 is the batch Fisher of the base task's last epoch, which all runs share, or comes from a
measuring pass over single samples (`first_fisher="sample"`).

A snapshot contains Fbar, which a run that starts there and the study's curvature need. It is as large as the model, so
snapshots of pre-trained models contain it only with `snapshot_fisher`.

The defaults are Algorithm 1 verbatim; the presets differ (presets/ivt.yaml). The questions that the algorithm leaves
open are in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from incvec.config import Options
from incvec.contracts import AddOn, Batch, Group, Method, Stage, Task, Terms, World
from incvec.errors import CheckpointError
from incvec.ivt import IVT
from incvec.ivt.batchnorm import Recalibration, running_statistics
from incvec.ivt.listening import INPUT_BATCHES
from incvec.ivt.optimizer_state import reset_state
from incvec.ivt.statistics import by_column, part_statistics


class IVTOptions(Options):
    interval: int | None = Field(10, ge=1, description="epochs between teleports; null: once, at the end of the stage")
    structure: Literal["diagonal", "kernel"] = Field("diagonal", description="of F; kernel: one block per kernel slice")
    first_fisher: Literal["batch", "sample"] = Field("batch", description="gradients of F_1: of batches or of samples")
    fisher_loss: Literal["whole", "own"] = Field(
        "whole", description="the loss of F: the whole one, or the terms of the task's own samples"
    )
    optimizer_state: Literal["keep", "reset"] = Field("keep", description="of teleported parameters, at a teleport")
    batchnorm: Literal["keep", "layer", "recalibrate"] = Field("keep", description="BatchNorm layers at a teleport")
    last: Literal["teleport", "skip"] = Field("teleport", description="the teleport after the last epoch of a stage")
    head: Literal["teleport", "keep"] = Field("teleport", description="the classifier's old rows, at a teleport")
    memory: Literal["device", "host"] = Field("device", description="where the anchor and Fbar are stored")
    snapshot_fisher: bool | None = Field(
        None, description="store Fbar in snapshots; null: only for models trained from scratch"
    )


class IVTAddOn(AddOn):
    name = "ivt"
    summary = "teleports the parameters every few epochs along the transformed increment vector"
    paper = "Closing the Oracle Gap: Increment Vector Transformation for CIL, https://arxiv.org/abs/2509.21898"
    Options = IVTOptions
    options: IVTOptions

    def __init__(self, options: IVTOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.plugin = IVT(
            method.model,
            interval=options.interval,
            exclude=["head"] if options.head == "keep" else [],
            last=options.last,
            batchnorm="layer" if options.batchnorm == "layer" else "keep",  # recalibration is a stage of its own
            fisher_loss=options.fisher_loss,
            structure=options.structure,
            memory=options.memory,
            probe=lambda: world.probe(INPUT_BATCHES),
        )
        self.plugin.silence("idle")  # `notice` says it before training
        # During the Fisher pass; never saved, since the pass has one epoch.
        self.statistics_before: dict[str, Tensor] = {}
        self.recalibration: Recalibration | None = None  # during its stage; never saved
        self._statistics: dict[str, Any] = {}

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        if not method.trains:
            return f"{method.name} trains nothing: there is no increment."
        return f"{method.name} trains all classes as one task: there is no increment." if method.joint else None

    @classmethod
    def incompatible_options(cls, options: Any, method: type[Method], method_options: Any) -> str | None:
        if options.first_fisher == "sample" and method.uses_batch_contrast(method_options):
            return (
                f"first_fisher=sample needs gradients of single images, but {method.name}'s loss contrasts the images "
                "of a batch: with a single image its gradient is 0. Use ivt.first_fisher=batch."
            )
        if options.fisher_loss == "own" and not method.own_terms:
            return (
                f"fisher_loss=own needs a method that names the loss terms of the task's own samples; {method.name} "
                "names none. Use ivt.fisher_loss=whole."
            )
        if options.interval is None and options.last == "skip":
            return (
                "interval=null has a single teleport, at the end, and last=skip omits it: ivt never teleports. Use "
                "ivt.last=teleport, or an interval."
            )
        return None

    def notice(self) -> str | None:
        epochs, o = getattr(self.method.options, "epochs", None), self.options
        if epochs is None or o.interval is None:
            return None
        skipped = o.last == "skip" and epochs % o.interval == 0
        if epochs // o.interval > skipped:
            return None
        reason = ", and ivt.last=skip omits the one after the last epoch" if skipped else ""
        remedy = ", or ivt.last=teleport" if skipped else ""
        return (
            f"ivt changes nothing in this run: an increment has {epochs} epoch(s), with a teleport every {o.interval}"
            f"{reason}. Use a smaller ivt.interval{remedy}."
        )

    # Stages of the add-on -------------------------------------------------------------------------------

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        o = self.options
        main = self._main(stages)
        if task.index == 0:
            if not self._measures_first:
                return stages
            size = 1 if o.first_fisher == "sample" else main.batch_size
            groups = tuple(Group(group.prefixes, 0.0) for group in main.groups)
            return [*stages, self._measure(main, "fisher", size, groups, None)]
        if o.batchnorm != "recalibrate" or main.batchnorm == "frozen":  # statistics frozen by the method stay frozen
            return stages
        place = 1 + max(i for i, stage in enumerate(stages) if stage.role == "main")
        recalibrate = self._measure(main, "recalibrate", main.batch_size, (), self._recalibration_loss)
        return [*stages[:place], recalibrate, *stages[place:]]

    @property
    def _measures_first(self) -> bool:
        """Whether F_1 needs a pass of its own: the F that all runs share is diagonal, of batch gradients."""
        return self.options.first_fisher == "sample" or self.options.structure == "kernel"

    def _measure(self, main: Stage, name: str, batch_size: int, groups: tuple[Group, ...], loss: Any) -> Stage:
        return Stage(
            name=f"ivt-{name}",
            role="measure",
            epochs=1,
            batch_size=batch_size,
            groups=groups,
            source=main.source,
            views=main.views,
            batchnorm="frozen" if batch_size == 1 else main.batchnorm,
            owner=self.name,
            loss=loss or main.loss,
            eager="it averages BatchNorm's batch statistics" if name == "recalibrate" else None,
        )

    @staticmethod
    def _main(stages: Sequence[Stage]) -> Stage:
        return next(stage for stage in stages if stage.role == "main")

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        if stage.name == "ivt-fisher":
            self._begin(1)
            live = running_statistics(self.method.model)
            self.statistics_before = {name: buffer.clone() for name, buffer in live.items()}
        else:
            self.recalibration = Recalibration(self.method.model)
        return self.method.begin_stage(task, self._main(self.method.stages(task)))

    def _recalibration_loss(self, batch: Batch) -> Terms:
        """The main stage's loss in train mode: it determines the network's inputs (rotated or mixed images, ...)."""
        terms = (self._main(self.method.stages(self.method.task)).loss or self.method.loss)(batch)
        assert self.recalibration is not None
        self.recalibration.update()
        return terms

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.name == "ivt-fisher":
            for name, buffer in running_statistics(self.method.model).items():
                buffer.copy_(self.statistics_before[name])
            self.statistics_before = {}
        if self.recalibration is not None and stage.name == "ivt-recalibrate":
            self.recalibration.finish()
            self.recalibration = None

    # The plug-in's calls --------------------------------------------------------------------------------

    def _begin(self, epochs: int) -> None:
        self.method.model.requires_grad_(True)  # the previous stage may have frozen some; the next one sets it again
        self.plugin.begin_task(epochs=epochs)

    def begin_task(self, task: Task) -> None:
        self._begin(self._main(self.method.stages(task)).epochs)

    @staticmethod
    def _collects(stage: Stage) -> bool:
        return stage.role == "main" or stage.name == "ivt-fisher"

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        if self._collects(stage):
            self.plugin.epochs = stage.epochs  # a state of an earlier version does not have it
            self.plugin.interval = self.options.interval or stage.epochs
            self.plugin.begin_epoch(epoch)

    def gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        if self._collects(stage) and (self.options.fisher_loss == "whole" or stage.owner == self.name):
            self._accumulate(parameters)

    def _accumulate(self, parameters: Mapping[str, nn.Parameter]) -> None:
        model = [p for name, p in parameters.items() if name.startswith("model.")]
        self.plugin.core.accumulate((p, p.grad) for p in model)

    def uses_own_gradients(self, stage: Stage) -> bool:
        return self.options.fisher_loss == "own" and stage.role == "main" and self.plugin.collecting

    def own_gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        self._accumulate(parameters)

    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        if not self._collects(stage):
            return
        moved = self.plugin.end_epoch()
        if moved and self.options.optimizer_state == "reset" and optimizer is not None:
            parameters = self.plugin.core.parameters
            reset_state([optimizer], [parameters[name] for name, *_ in self.plugin.core.statistics])

    def end_task(self, task: Task) -> None:
        if task.index == 0 and not self._measures_first:
            assert self.world.base_fisher is not None
            self._begin(1)
            try:
                self.plugin.core.set_fisher(self.world.base_fisher)
            except (KeyError, ValueError) as error:
                raise CheckpointError(
                    f"the saved base task cannot be used: {error}. Delete its file to train it again."
                ) from None
        plugin, self._statistics = self.plugin, {}
        if task.index > 0:
            parameters = dict(self.method.model.named_parameters())
            self._statistics = dict(part_statistics(parameters, plugin.anchor, plugin.cumulative, plugin.fisher))
            if rows := plugin.teleports():
                self._statistics["teleports"] = by_column(rows, plugin.epochs)
        plugin.end_task()

    # State and statistics -------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        return self.plugin.state_dict()

    def snapshot(self) -> dict[str, Tensor]:
        wanted = self.options.snapshot_fisher
        return self.state() if (not self.method.pretrained if wanted is None else wanted) else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.plugin.load_state_dict(state)

    def statistics(self) -> dict[str, Any]:
        return self._statistics
