"""MagMax: the entries of largest magnitude of all task vectors (Marczak et al., ECCV 2024, address below).

    tau_i = theta_i - theta_0,   tau = the tau_i of largest |tau_i|, elementwise,   theta = theta_0 + 0.5 tau.

theta is deployed; training continues from theta_t without the merge. Of equal magnitudes, the later task's entry is
used.

The paper starts from a pre-trained network, theta_0, with a fixed text classifier. So do the pre-trained methods here:
theta_0 is their initial model, and every task has a tau. For networks trained from scratch, theta_0 is the model after
the base task, and tau covers the later tasks. The rows of a later task's classes have no theta_0: they are those of
their own task's model, as if each task had its own classifier (train it accordingly: `finetune` with `loss_over:
new`). For parameters that the backbone gains later (Mnemonics' factors), theta_0 is their initial value. BatchNorm
statistics are merged like weights. theta_i are the weights at the end of the task, including the method's own end
hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from incvec.addons.merging import Tensors, copy_weights, merge_incompatibility, pack_state, unpack_state
from incvec.config import Options
from incvec.contracts import AddOn, Method, Task, World


class MagMaxOptions(Options):
    coefficient: float = Field(0.5, ge=0, description="factor of the merged task vector")


def larger_magnitude(old: Tensor, new: Tensor) -> Tensor:
    """Elementwise the entry of larger magnitude; the new one if equal."""
    return torch.where(new.abs() >= old.abs(), new, old)


class MagMax(AddOn):
    name = "magmax"
    summary = "deploys the base model plus half of the task vectors' largest entries; training continues without it"
    paper = "MagMax: Leveraging Model Merging for Seamless Continual Learning, https://arxiv.org/abs/2407.06322"
    Options = MagMaxOptions
    options: MagMaxOptions

    origin: Tensors  # theta_0
    vector: Tensors  # tau so far
    own: Tensors  # parameters that later tasks added, from the end of their own task
    tasks: int  # number of tasks in `vector`

    def __init__(self, options: MagMaxOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.origin, self.vector, self.own, self.tasks = {}, {}, {}, 0
        if method.pretrained:
            self._set_origin(copy_weights(method.model))

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        return merge_incompatibility(cls.name, method, others)

    def begin_task(self, task: Task) -> None:
        weights = copy_weights(self.method.model)
        added = {name: t for name, t in weights.items() if name.startswith("backbone.") and name not in self.origin}
        self._set_origin(self.origin | added)

    def deployed(self, task: Task) -> Tensors | None:
        if self.tasks <= task.index:
            self._add_task(task)
        if task.index == 0 and not self.method.pretrained:
            return None
        merged = {name: theta + self.options.coefficient * self.vector[name] for name, theta in self.origin.items()}
        return merged | self.own

    def _add_task(self, task: Task) -> None:
        """Merge the task's weights, once."""
        weights = copy_weights(self.method.model)
        if task.index == 0 and not self.method.pretrained:
            self._set_origin(weights)
        else:
            vectors = {name: weights[name] - self.origin[name] for name in self.vector}
            self.vector = {name: larger_magnitude(tau, vectors[name]) for name, tau in self.vector.items()}
            self.own |= {name: t for name, t in weights.items() if name not in self.origin and name not in self.own}
        self.tasks = task.index + 1

    def _set_origin(self, origin: Tensors) -> None:
        self.origin = origin
        self.vector = {name: torch.zeros_like(theta) for name, theta in origin.items()} | self.vector

    def state(self) -> dict[str, Tensor]:
        return pack_state(origin=self.origin, vector=self.vector, own=self.own) | {"tasks": torch.tensor(self.tasks)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.origin, self.vector, self.own = (unpack_state(state, group) for group in ("origin", "vector", "own"))
        self.tasks = int(state["tasks"]) if "tasks" in state else 0
