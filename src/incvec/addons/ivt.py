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
from typing import Any

import torch
from torch import Tensor, nn

from incvec.addons.ivt_options import IVTOptions, incompatible, no_teleport
from incvec.addons.ivt_stages import FISHER, IVTStages, main_stage
from incvec.contracts import AddOn, Method, Stage, Task, World
from incvec.errors import CheckpointError
from incvec.ivt import IVT
from incvec.ivt.inputs import INPUT_BATCHES
from incvec.ivt.optimizer_state import reset_state
from incvec.ivt.statistics import by_column, part_statistics


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
        self.stages = IVTStages(options, method)
        self._statistics: dict[str, Any] = {}

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        if not method.trains:
            return f"{method.name} trains nothing: there is no increment."
        return f"{method.name} trains all classes as one task: there is no increment." if method.joint else None

    @classmethod
    def incompatible_options(cls, options: Any, method: type[Method], method_options: Any) -> str | None:
        return incompatible(options, method, method_options)

    def notice(self) -> str | None:
        return no_teleport(self.options, getattr(self.method.options, "epochs", None))

    # Stages of its own ----------------------------------------------------------------------------------

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        return self.stages.plan(task, stages)

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        if stage.name == FISHER:
            self._begin(1)
        return self.stages.begin(task, stage)

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.owner == self.name:
            self.stages.end(stage)

    # The plug-in's calls --------------------------------------------------------------------------------

    def _begin(self, epochs: int) -> None:
        self.method.model.requires_grad_(True)  # the previous stage may have frozen some; the next one sets it again
        self.plugin.begin_task(epochs=epochs)

    def begin_task(self, task: Task) -> None:
        self._begin(main_stage(self.method.stages(task)).epochs)

    @staticmethod
    def _collects(stage: Stage) -> bool:
        return stage.role == "main" or stage.name == FISHER

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        if self._collects(stage):
            self.plugin.epochs = stage.epochs  # a state of an earlier version does not have it
            self.plugin.interval = self.options.interval or stage.epochs  # null: once, at the end
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
        if task.index == 0 and not self.stages.measures_first:
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
