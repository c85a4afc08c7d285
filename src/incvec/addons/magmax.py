"""MagMax: of all task vectors, the entry of largest magnitude (Marczak et al., ECCV 2024, address below).

    tau_i = theta_i - theta_0,   tau = the tau_i of largest |tau_i|, element by element,   theta = theta_0 + 0.5 tau.

Deployed is theta; training goes on from the un-merged theta_t. Of entries equally large the later task's counts.

The paper starts from a pre-trained network, its theta_0, with a fixed text classifier, and so do methods that are
pre-trained here: theta_0 is their model as it was made, and every task has a tau. Trained from scratch, theta_0
is the model after the base task, whose accuracy is hence that of the base model, and tau runs over the tasks after
it. The rows of a later task's classes have no theta_0: they are those of their own task's model, as if each task
had a classifier of its own (train it so: `finetune` with `loss_over: new`). What the network itself gains later
(Mnemonics' factors) has the value it starts with for theta_0. BatchNorm's statistics are merged as
weights are. theta_i is what the task ends with, the method's own end hook included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from incvec.addons.merging import Tensors, copies, flat, floats, group_of, refusal
from incvec.config import Options
from incvec.contracts import AddOn, Method, Task, World


class MagMaxOptions(Options):
    coefficient: float = Field(0.5, ge=0, description="how much of the merged task vector is added")


def larger(old: Tensor, new: Tensor) -> Tensor:
    """Of each pair of entries the one of larger magnitude; of equals the new."""
    return torch.where(new.abs() >= old.abs(), new, old)


class MagMax(AddOn):
    name = "magmax"
    summary = "deploys the base model plus half of the task vectors' largest entries; trains on un-merged"
    paper = "MagMax: Leveraging Model Merging for Seamless Continual Learning, https://arxiv.org/abs/2407.06322"
    Options = MagMaxOptions
    options: MagMaxOptions

    origin: Tensors  # theta_0
    vector: Tensors  # tau so far
    own: Tensors  # what later tasks added, as their own model had it
    tasks: int  # how many tasks are in these

    def __init__(self, options: MagMaxOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.origin, self.vector, self.own, self.tasks = {}, {}, {}, 0
        if method.pretrained:
            self._begin_at(copies(floats(method.model)))

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        return refusal(cls.name, method, others)

    def begin_task(self, task: Task) -> None:
        live = copies(floats(self.method.model))
        gained = {name: t for name, t in live.items() if name.startswith("backbone.") and name not in self.origin}
        self._begin_at(self.origin | gained)

    def deployed(self, task: Task) -> Tensors | None:
        if self.tasks <= task.index:
            self._take(task)
        if task.index == 0 and not self.method.pretrained:
            return None
        merged = {name: theta + self.options.coefficient * self.vector[name] for name, theta in self.origin.items()}
        return merged | self.own

    def _take(self, task: Task) -> None:
        """Take the task's weights in, once."""
        live = copies(floats(self.method.model))
        if task.index == 0 and not self.method.pretrained:
            self._begin_at(live)
        else:
            self.vector = {name: larger(tau, live[name] - self.origin[name]) for name, tau in self.vector.items()}
            self.own |= {name: t for name, t in live.items() if name not in self.origin and name not in self.own}
        self.tasks = task.index + 1

    def _begin_at(self, origin: Tensors) -> None:
        self.origin = origin
        self.vector = {name: torch.zeros_like(theta) for name, theta in origin.items()} | self.vector

    def state(self) -> dict[str, Tensor]:
        return flat(origin=self.origin, vector=self.vector, own=self.own) | {"tasks": torch.tensor(self.tasks)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.origin, self.vector, self.own = (group_of(state, group) for group in ("origin", "vector", "own"))
        self.tasks = int(state["tasks"]) if "tasks" in state else 0
