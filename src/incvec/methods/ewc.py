"""EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017, https://arxiv.org/abs/1612.00796), online.

No exemplars. A weight that mattered for the past is held where it was: the loss of a task has

    lambda / 2 sum_i F_i (theta_i - theta*_i)^2                                                        (eq. 3)

with theta* the weights the task before ended with and F the diagonal of the Fisher information. As in online EWC
(Schwarz et al., ICML 2018, https://arxiv.org/abs/1805.06370) there is one F and one theta* for all the past: F becomes
decay F + F_t when a task ends, F_t measured in a pass of its own over the task's images. `accumulate="mean"` weighs
by the classes instead, F <- (n_old F + n_new F_t) / n_seen, as PyCIL does.

The paper has no class-incremental experiment. The defaults are PyCIL's: gradients of whole batches, F cut off at 1e-4,
lambda = 1000, cross-entropy over the task's own classes (`loss_over`). F of single samples is larger by about the
batch size, so lambda belongs to the estimator (`fisher`). New rows have neither F nor theta*. The measuring pass sees
all classes seen in its softmax, as there, and BatchNorm's running statistics, which it leaves alone. F and theta* are
of the same weights: where an add-on replaces those a task was trained to, the pass comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.contracts import Batch, Stage, Task, Terms
from incvec.methods.finetune import Finetune, FinetuneOptions
from incvec.methods.fisher import FisherKind, squared_gradients


class EWCOptions(FinetuneOptions):
    loss_over: Literal["seen", "new"] = Field("new", description="the classes the softmax runs over")
    lambda_ewc: float = Field(1000.0, ge=0)
    fisher: FisherKind = "batch"
    clip: float | None = Field(1e-4, gt=0, description="the largest F_t counts as; none: F_t as it is")
    accumulate: Literal["sum", "mean"] = "sum"
    decay: float = Field(1.0, ge=0, le=1, description="what a task leaves of the F before it, for `sum`")


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All entries as one vector. A network grows by appending, so one task's vector begins the next one's."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def quadratic(weights: Tensor, anchor: Tensor, fisher: Tensor) -> Tensor:
    """1/2 sum_i F_i (theta_i - theta*_i)^2 over the weights that have an anchor, the first ones."""
    return 0.5 * (fisher * (weights[: len(anchor)] - anchor).square()).sum()


def accumulated(past: Tensor, fresh: Tensor, past_weight: float, fresh_weight: float) -> Tensor:
    """past_weight F + fresh_weight F_t; weights that are new have F_t alone."""
    both = past_weight * past + fresh_weight * fresh[: len(past)]
    return torch.cat([both, fresh[len(past) :]])


class EWC(Finetune):
    name = "ewc"
    summary = "holds weights in place by their Fisher information, no exemplars"
    paper = "Overcoming catastrophic forgetting in neural networks, https://arxiv.org/abs/1612.00796"
    Options = EWCOptions
    options: EWCOptions
    holds_old_rows = True

    def stages(self, task: Task) -> list[Stage]:
        main = self.main_stage(task)
        measure = Stage(
            name="fisher",
            role="measure",
            epochs=1,
            batch_size=main.batch_size,
            batchnorm="frozen",
            eager="torch.func takes its gradients, sample by sample where asked",
            loss=self.measure,
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
            weights = flat(dict(self.model.named_parameters()))
            penalty = quadratic(weights, self.store["anchor"], self.store["fisher"])
            terms["ewc"] = self.options.lambda_ewc * penalty
        return terms

    def measure(self, batch: Batch) -> Terms:
        """Add the batch's squared gradients; what is logged is the trace of its F."""
        kind = self.options.fisher

        def outcome(rows: tuple[Tensor, ...]) -> Tensor:
            images, labels = rows
            logits: Tensor = self.model(images).logits
            return logits if kind in ("sampled", "exact") else F.cross_entropy(logits, labels)

        parameters = dict(self.model.named_parameters())
        rows = (batch.images, batch.labels)
        with torch.autocast(batch.images.device.type, enabled=False):  # F in full precision, whatever the training's
            squares, count = squared_gradients(self.model, outcome, rows, kind=kind, generator=self.world.generator)
        found = flat({name: squares[name] for name in parameters})
        self.store["squares"] += found
        self.store["terms"] += count
        return {"trace": found.sum() / count}

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.role != "measure":
            return
        o = self.options
        fresh = self.store.pop("squares") / self.store.pop("terms")
        fresh = fresh if o.clip is None else fresh.clamp(max=o.clip)
        past = self.store.get("fisher", fresh[:0])
        shares = (o.decay, 1.0) if o.accumulate == "sum" else (task.n_old / task.n_seen, task.n_new / task.n_seen)
        self.store["fisher"] = accumulated(past, fresh, *shares)

    def end_task(self, task: Task) -> None:
        self.store["anchor"] = flat(dict(self.model.named_parameters())).detach().clone()
