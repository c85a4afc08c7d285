"""The stages that the IVT add-on adds: a measuring pass for F_1, and one that recalibrates BatchNorm.

Both see the images and run the loss of the main stage, which determines the network's inputs (rotated or mixed images,
...). The first changes no statistics, the second nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from incvec.addons.ivt_options import IVTOptions
from incvec.contracts import Batch, Group, Method, Stage, Task, Terms
from incvec.ivt.batchnorm import Recalibration, running_statistics

FISHER, RECALIBRATE = "ivt-fisher", "ivt-recalibrate"


def main_stage(stages: Sequence[Stage]) -> Stage:
    return next(stage for stage in stages if stage.role == "main")


def measuring_stage(name: str, main: Stage, **settings: Any) -> Stage:
    """One epoch without an optimizer on the main stage's images."""
    same = {key: getattr(main, key) for key in ("batch_size", "source", "views", "batchnorm", "loss")}
    return Stage(name=name, role="measure", epochs=1, owner="ivt", **{**same, **settings})


class IVTStages:
    def __init__(self, options: IVTOptions, method: Method) -> None:
        self.options = options
        self.method = method
        # While a stage runs; never saved, since it has one epoch.
        self._statistics: dict[str, Tensor] = {}  # running statistics before the measuring pass
        self._recalibration: Recalibration | None = None

    @property
    def measures_first(self) -> bool:
        """Whether F_1 needs a pass of its own: the F that all runs share is diagonal, of batch gradients."""
        return self.options.first_fisher == "sample" or self.options.structure == "kernel"

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        main, o = main_stage(stages), self.options
        if task.index == 0:
            if not self.measures_first:
                return stages
            size = 1 if o.first_fisher == "sample" else main.batch_size
            fisher = measuring_stage(
                FISHER,
                main,
                batch_size=size,
                groups=tuple(Group(group.prefixes, 0.0) for group in main.groups),
                batchnorm="frozen" if size == 1 else main.batchnorm,
            )
            return [*stages, fisher]
        if o.batchnorm != "recalibrate" or main.batchnorm == "frozen":  # statistics frozen by the method stay frozen
            return stages
        recalibrate = measuring_stage(
            RECALIBRATE, main, loss=self._loss, eager="it averages BatchNorm's batch statistics"
        )
        place = 1 + max(i for i, stage in enumerate(stages) if stage.role == "main")
        return [*stages[:place], recalibrate, *stages[place:]]

    def begin(self, task: Task, stage: Stage) -> Tensor:
        """Prepare one of these stages; returns its rows, those of the main stage."""
        if stage.name == FISHER:
            live = running_statistics(self.method.model)
            self._statistics = {name: buffer.clone() for name, buffer in live.items()}
        else:
            self._recalibration = Recalibration(self.method.model)
        return self.method.begin_stage(task, main_stage(self.method.stages(task)))

    def _loss(self, batch: Batch) -> Terms:
        """The main stage's loss, in train mode."""
        terms = (main_stage(self.method.stages(self.method.task)).loss or self.method.loss)(batch)
        assert self._recalibration is not None
        self._recalibration.update()
        return terms

    def end(self, stage: Stage) -> None:
        if stage.name == FISHER:
            for name, buffer in running_statistics(self.method.model).items():
                buffer.copy_(self._statistics[name])
        elif self._recalibration is not None:
            self._recalibration.finish()
        self._statistics, self._recalibration = {}, None
