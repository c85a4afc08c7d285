"""IVT as an Avalanche plugin: one experience is one task.

    strategy = Replay(..., plugins=[IVTPlugin(interval=10)])

A task begins with its first epoch, after the strategy has adapted model and optimizer. Teleports come before the
periodic evaluation. Avalanche's checkpoints contain the plugin.

In an online stream the task is the experience that was split, and an epoch is one pass over its data: all of its
sub-experiences, or `subexperiences` of them. So give an interval in these, for example
`IVTPlugin(interval=1, subexperiences=50)`: a teleport after every 50 sub-experiences.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .hosted import Hosted, Target, import_host

_core = import_host("avalanche.core", install="avalanche-lib")

# Avalanche's checkpoints are written by dill, which looks up torch.optim.sgd.SGD by the attribute `sgd` of torch.optim.
# torch deletes these attributes, dill then copies the class itself, and with torch 2.15 that fails.
for _name, _module in list(sys.modules.items()):
    if _name.startswith("torch.optim.") and not hasattr(torch.optim, _name.removeprefix("torch.optim.")):
        setattr(torch.optim, _name.removeprefix("torch.optim."), _module)


class IVTPlugin(Hosted, _core.SupervisedPlugin):  # type: ignore[name-defined,misc]
    """Takes the model to teleport (by default the strategy's) and the options of `IVT`.

    subexperiences: of an online stream, how many are an epoch. None: all those of a task.
    """

    def __init__(self, model: Target = None, *, subexperiences: int | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        if subexperiences is not None and subexperiences < 1:
            raise ValueError(f"subexperiences={subexperiences}: give a number from 1 up, or None for all of a task")
        self._subexperiences = subexperiences
        self._trained = 0  # sub-experiences of the current task

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        experience = strategy.experience
        if not _online(experience):
            self.start(strategy.model, [strategy.optimizer], resumed=False)
        elif not experience.access_task_boundaries:
            raise ValueError(
                "IVT needs to know where a task begins and ends: make the online stream with "
                "access_task_boundaries=True"
            )
        elif experience.is_first_subexp:
            self.start(strategy.model, [strategy.optimizer], resumed=False)
            self._trained = 0
        elif self._ivt is None or not self._ivt.in_task:
            raise RuntimeError("this sub-experience is in the middle of a task whose first one was not trained")
        else:
            self._ivt.attach(strategy.optimizer)  # a strategy loaded from a checkpoint has a copy of it

    def before_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # Other plugins may change weights in before_training_exp.
        if not self.ivt.in_task:
            self.ivt.begin_task(strategy.optimizer, epochs=self._epochs(strategy))

    def _epochs(self, strategy: Any) -> int | None:
        if not _online(strategy.experience):
            return int(strategy.train_epochs)
        length = strategy.experience.sub_stream_length
        if self._subexperiences is None:
            return 1
        return None if length is None else -(-int(length) // self._subexperiences)

    def after_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        if not _online(strategy.experience):
            self.ivt.end_epoch()

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        experience = strategy.experience
        last = True
        if _online(experience):
            self._trained += 1
            # Avalanche 0.6 marks no sub-experience as the last one if all have the same size.
            last = experience.is_last_subexp or self._trained == experience.sub_stream_length
            if last or (self._subexperiences is not None and self._trained % self._subexperiences == 0):
                self.ivt.end_epoch()
        if last:
            self.ivt.end_task()


def _online(experience: Any) -> bool:
    return hasattr(experience, "access_task_boundaries")
