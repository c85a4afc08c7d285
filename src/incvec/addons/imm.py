"""IMM: incremental moment matching (Lee et al., NeurIPS 2017, https://arxiv.org/abs/1703.08475).

The posteriors of the tasks, Gaussians around theta_i, are merged into one Gaussian, by its mean or by its mode:

    mean:  theta = 1/t sum_i theta_i                  mode:  theta = sum_i F_i theta_i / sum_i F_i

(the paper's weights alpha_i = 1/t for every task; F_i, the inverse covariance, is the Fisher of task i). Deployed is
the merge; training goes on from the un-merged theta_t, which is the paper's weight-transfer. Its L2- and
drop-transfer change how a task is trained and are left to the method.

A tensor that a later task added (the rows of its classes) is merged over the tasks that have had it. BatchNorm's
statistics have no F; they are averaged in both forms. A weight without any F is the last task's. How F is
measured: `merging.py` (the authors take gradients of single samples; the same estimator for all tasks leaves the
formula as it is). theta_i is what the task ends with, the method's own end hook included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from incvec.addons.merging import FisherPass, Tensors, copies, flat, floats, group_of, merge, share_of
from incvec.config import Options
from incvec.contracts import Method, Stage, Task, World


class IMMOptions(Options):
    moment: Literal["mean", "mode"] = Field("mode", description="of the merged Gaussian; the mode needs a Fisher pass")


class IMM(FisherPass):
    name = "imm"
    summary = "deploys the mean of all tasks' weights, plain or weighted by Fisher; trains on un-merged"
    paper = "Overcoming Catastrophic Forgetting by Incremental Moment Matching, https://arxiv.org/abs/1703.08475"
    Options = IMMOptions
    options: IMMOptions

    merged: Tensors  # over the tasks taken in so far
    weight: Tensors  # sums of their F; where there is none, their number
    fisher: Tensors  # of the task under way, once measured
    tasks: int  # how many tasks are in these

    def __init__(self, options: IMMOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.merged, self.weight, self.fisher, self.tasks = {}, {}, {}, 0

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        return super().plan(task, stages) if self.options.moment == "mode" else stages

    def measured(self, task: Task, fisher: Tensors) -> None:
        self.fisher = fisher

    def deployed(self, task: Task) -> Tensors | None:
        if self.tasks <= task.index:
            self._take(task)
        return None if task.index == 0 else self.merged

    @torch.no_grad()
    def _take(self, task: Task) -> None:
        """Take the task's weights in, once."""
        for name, theta in copies(floats(self.method.model)).items():
            new = self.fisher.get(name, theta.new_ones(()))
            old = self.weight.get(name, torch.zeros_like(new))
            self.merged[name] = merge(self.merged.get(name, theta), theta, share_of(old, new, unknown=1.0))
            self.weight[name] = old + new
        self.fisher, self.tasks = {}, task.index + 1

    def state(self) -> dict[str, Tensor]:
        found = flat(merged=self.merged, weight=self.weight, fisher=self.fisher)
        return found | {"tasks": torch.tensor(self.tasks)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.merged, self.weight, self.fisher = (group_of(state, group) for group in ("merged", "weight", "fisher"))
        self.tasks = int(state["tasks"]) if "tasks" in state else 0
