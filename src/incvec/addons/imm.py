"""IMM: incremental moment matching (Lee et al., NeurIPS 2017, https://arxiv.org/abs/1703.08475).

The posteriors of the tasks, Gaussians around theta_i, are merged into one Gaussian, by its mean or by its mode:

    mean:  theta = 1/t sum_i theta_i                  mode:  theta = sum_i F_i theta_i / sum_i F_i

(with the paper's weights alpha_i = 1/t; F_i, the inverse covariance, is the Fisher of task i). The merge is deployed;
training continues from theta_t without the merge, which is the paper's weight-transfer. Its L2- and drop-transfer
change the training of a task and are left to the method.

A tensor that a later task added (the rows of its classes) is merged over the tasks that have it. BatchNorm statistics
have no F; they are averaged in both forms. A weight without any F is that of the last task. For the estimation of F
see `merging.py` (the authors use gradients of single samples; the formula only requires the same estimator for all
tasks). theta_i are the weights at the end of the task, including the method's own end hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from incvec.addons.merging import FisherPass, Tensors, copy_weights, merge, pack_state, unpack_state, weight_share
from incvec.config import Options
from incvec.contracts import Method, Stage, Task, World


class IMMOptions(Options):
    moment: Literal["mean", "mode"] = Field("mode", description="mean, or mode (needs a Fisher pass)")


class IMM(FisherPass):
    name = "imm"
    summary = "deploys the mean of all tasks' weights, plain or Fisher-weighted; training continues without it"
    paper = "Overcoming Catastrophic Forgetting by Incremental Moment Matching, https://arxiv.org/abs/1703.08475"
    Options = IMMOptions
    options: IMMOptions

    merged: Tensors  # over the tasks so far
    weight: Tensors  # sums of their F, or their number for tensors without F
    fisher: Tensors  # of the current task, once measured
    tasks: int  # number of tasks in `merged`

    def __init__(self, options: IMMOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.merged, self.weight, self.fisher, self.tasks = {}, {}, {}, 0

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        return super().plan(task, stages) if self.options.moment == "mode" else stages

    def measured(self, task: Task, fisher: Tensors) -> None:
        self.fisher = fisher

    def deployed(self, task: Task) -> Tensors | None:
        if self.tasks <= task.index:
            self._add_task(task)
        return None if task.index == 0 else self.merged

    @torch.no_grad()
    def _add_task(self, task: Task) -> None:
        """Merge the task's weights, once."""
        for name, theta in copy_weights(self.method.model).items():
            new = self.fisher.get(name, theta.new_ones(()))
            old = self.weight.get(name, torch.zeros_like(new))
            self.merged[name] = merge(self.merged.get(name, theta), theta, weight_share(old, new, default=1.0))
            self.weight[name] = old + new
        self.fisher, self.tasks = {}, task.index + 1

    def state(self) -> dict[str, Tensor]:
        tensors = pack_state(merged=self.merged, weight=self.weight, fisher=self.fisher)
        return tensors | {"tasks": torch.tensor(self.tasks)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.merged, self.weight, self.fisher = (unpack_state(state, group) for group in ("merged", "weight", "fisher"))
        self.tasks = int(state["tasks"]) if "tasks" in state else 0
