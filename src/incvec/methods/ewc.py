"""EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017, https://arxiv.org/abs/1612.00796), online.

No exemplars. Weights that are important for previous tasks are held in place by a penalty,

    lambda / 2 sum_i F_i (theta_i - theta*_i)^2                                                        (eq. 3)

with theta* the weights at the end of the previous task and F the diagonal of the Fisher information. As in online EWC
(Schwarz et al., ICML 2018, https://arxiv.org/abs/1805.06370) there is one F and one theta* for all previous tasks: at
the end of a task, F becomes decay F + F_t, where F_t is measured in a separate pass over the task's images.
`accumulate="mean"` weights by the number of classes instead, F <- (n_old F + n_new F_t) / n_seen, as PyCIL does.

The paper has no class-incremental experiment. The defaults are PyCIL's: gradients of whole batches, F clipped at 1e-4,
lambda = 1000, cross-entropy over the task's own classes (`loss_over`). F of single samples is larger by about the batch
size, so lambda depends on the estimator. New rows have neither F nor theta*. As in PyCIL, the softmax of the measuring
pass is over all classes seen, and BatchNorm is in eval mode. F and theta* belong to the same weights: if an add-on
replaces the weights of a task, the pass comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.contracts import Batch, Group, Stage, Task, Terms
from incvec.methods.finetune import Finetune, FinetuneOptions


class EWCOptions(FinetuneOptions):
    loss_over: Literal["seen", "new"] = Field("new", description="classes in the softmax: all seen, or the task's own")
    lambda_ewc: float = Field(1000.0, ge=0)
    clip: float | None = Field(1e-4, gt=0, description="upper bound of F_t; null: no bound")
    accumulate: Literal["sum", "mean"] = "sum"
    decay: float = Field(1.0, ge=0, le=1, description="factor of the previous F, for `accumulate=sum`")


def to_vector(tensors: Mapping[str, Tensor]) -> Tensor:
    """All entries as one vector. Growing appends parameters, so the vector of a task is a prefix of the next one's."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def quadratic(weights: Tensor, anchor: Tensor, fisher: Tensor) -> Tensor:
    """1/2 sum_i F_i (theta_i - theta*_i)^2 over the weights that have an anchor: the first ones."""
    return 0.5 * (fisher * (weights[: len(anchor)] - anchor).square()).sum()


def accumulated(old: Tensor, new: Tensor, old_weight: float, new_weight: float) -> Tensor:
    """old_weight F + new_weight F_t; F_t for parameters without an F."""
    both = old_weight * old + new_weight * new[: len(old)]
    return torch.cat([both, new[len(old) :]])


class EWC(Finetune):
    name = "ewc"
    summary = "a quadratic penalty on weight changes, weighted by the Fisher information; no exemplars"
    paper = "Overcoming catastrophic forgetting in neural networks, https://arxiv.org/abs/1612.00796"
    Options = EWCOptions
    options: EWCOptions
    trains_old_rows = True

    def stages(self, task: Task) -> list[Stage]:
        main = self.main_stage(task)
        measure = Stage(
            name="fisher",
            role="measure",
            epochs=1,
            batch_size=main.batch_size,
            groups=(Group(("model",), 0.0),),
            batchnorm="frozen",
            loss=self.measured_loss,
        )
        return [main, measure]

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        if stage.role == "measure":
            size = sum(parameter.numel() for parameter in self.model.parameters())
            self.store["squares"] = torch.zeros(size, device=self.world.device)
            self.store["terms"] = torch.zeros((), device=self.world.device)
            return self.training_rows(task)
        return super().begin_stage(task, stage)

    def loss(self, batch: Batch) -> Terms:
        terms = dict(super().loss(batch))
        if self.task.index > 0:
            weights = to_vector(dict(self.model.named_parameters()))
            penalty = quadratic(weights, self.store["anchor"], self.store["fisher"])
            terms["ewc"] = self.options.lambda_ewc * penalty
        return terms

    def measured_loss(self, batch: Batch) -> Terms:
        """The loss of F, in full precision."""
        with torch.autocast(batch.images.device.type, enabled=False):
            return {"ce": F.cross_entropy(self.model(batch.images).logits, batch.labels)}

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the squared gradients in the measuring pass."""
        if "squares" in self.store:
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
            self.store["squares"] += to_vector(gradients).square()
            self.store["terms"] += 1

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.role != "measure":
            return
        o = self.options
        new = self.store.pop("squares") / self.store.pop("terms")
        new = new if o.clip is None else new.clamp(max=o.clip)
        old = self.store.get("fisher", new[:0])
        weights = (o.decay, 1.0) if o.accumulate == "sum" else (task.n_old / task.n_seen, task.n_new / task.n_seen)
        self.store["fisher"] = accumulated(old, new, *weights)

    def end_task(self, task: Task) -> None:
        self.store["anchor"] = to_vector(dict(self.model.named_parameters())).detach().clone()
