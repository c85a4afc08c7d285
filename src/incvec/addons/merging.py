"""Base classes of the merging add-ons: weighted means of weights, and a Fisher pass at the end of a task.

Replacing add-ons (`eopc`, `cofima`, `fisher-merge`; `carry`: the classifier) replace weights of the model after the
method's own stages, and training continues from there. Each does so at the end of a stage that it adds, so several of
them act one after the other, in the order in which they are named, with `carry` as the last. A measurement of the
method at the end of a task (EWC's Fisher) comes after them. Deploying add-ons (`magmax`, `imm`) do not change training;
they merge the weights at the end of each task. There can be one of them, named last. `ivt` acts within the method's own
stages and can be named anywhere.

F is the diagonal of the mean over batches of g^2, with g the gradient of the cross-entropy of the task's images over
all classes seen. BatchNorm is frozen, so measuring changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.config import Options
from incvec.contracts import AddOn, Batch, Group, Method, Stage, Task, Terms, World
from incvec.ivt.fisher import BatchFisher
from incvec.methods.common import ImageMethod

Tensors = dict[str, Tensor]
REPLACING = ("eopc", "cofima", "fisher-merge", "carry")
FISHER_WEIGHTED = ("cofima", "fisher-merge")
DEPLOYING = ("magmax", "imm")


def weight_share(old_weight: Tensor, new_weight: Tensor, default: float) -> Tensor:
    """w_new / (w_old + w_new), elementwise; `default` where both weights are 0."""
    total = old_weight + new_weight
    return torch.where(total > 0, new_weight / total, default)


def merge(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    """(1 - share) old + share new: with `weight_share`, (w_old old + w_new new) / (w_old + w_new)."""
    return torch.lerp(old, new.to(old), share)


def float_tensors(model: nn.Module) -> Tensors:
    """The live floating-point parameters and buffers of a model, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def copy_weights(model: nn.Module) -> Tensors:
    """Copies of the floating-point parameters and buffers, in float32 or wider."""
    live = float_tensors(model)
    return {name: t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True) for name, t in live.items()}


def pack_state(**groups: Mapping[str, Tensor]) -> Tensors:
    """Several mappings as one, `group/name -> tensor`, for `AddOn.state`."""
    return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def unpack_state(state: Mapping[str, Tensor], group: str) -> Tensors:
    """One of the mappings of `pack_state`, with cloned tensors."""
    prefix = f"{group}/"
    return {name.removeprefix(prefix): t.clone() for name, t in state.items() if name.startswith(prefix)}


def merge_incompatibility(name: str, method: type[Method], others: Sequence[str]) -> str | None:
    """Why a merging add-on cannot be used with the method, or after the add-ons named before it; or None."""
    if method.joint:
        return f"{method.name} trains all classes as one task, so there is nothing to merge."
    if not method.trains:
        return f"{method.name} trains nothing, so there is nothing to merge."
    deploying = [other for other in others if other in DEPLOYING]
    if name in DEPLOYING and deploying:
        return f"only one merge can be deployed, and {deploying[0]} deploys one already."
    if name in REPLACING and deploying:
        return f"{deploying[0]} merges the weights a task ends with, which {name} replaces; name {name} before it."
    if name in REPLACING and "carry" in others:
        return f"carry fits the classifier to weights that {name} would replace; name {name} before it."
    weighted = [other for other in others if other in FISHER_WEIGHTED]
    if name in FISHER_WEIGHTED and weighted:
        return f"{weighted[0]} has already merged the task's weights by their Fisher; use one of the two."
    return None


def before_measurements(stages: Sequence[Stage], added: Stage) -> list[Stage]:
    """The stages with one more, before the method's measurements at the end of the task, if it makes any."""
    place = len(stages)
    while stages[place - 1].role == "measure" and stages[place - 1].owner is None:
        place -= 1
    return [*stages[:place], added, *stages[place:]]


class FisherPass(AddOn):
    """An add-on that measures F after the other stages of every task, including the base task."""

    def __init__(self, options: Any, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self._sums = BatchFisher({})

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        return merge_incompatibility(cls.name, method, others)

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        main = next(stage for stage in stages if stage.role == "main")
        measure = Stage(
            name=f"{self.name}-fisher",
            role="measure",
            epochs=1,
            batch_size=main.batch_size,
            groups=(Group(("model",), 0.0),),
            views=main.views[:1],  # from the images, even if the main stage has another source: the model takes images
            batchnorm="frozen",
            owner=self.name,
            loss=self.cross_entropy,
        )
        return [*stages, measure]

    def cross_entropy(self, batch: Batch) -> Terms:
        """Over all outputs of the head; with several outputs per class, the target is the one that classifies."""
        logits = self.method.model(batch.images).logits
        columns = torch.arange(logits.shape[1], device=logits.device)
        targets = self.method.class_logits(columns[None]).squeeze(0).index_select(0, batch.labels)
        return {"ce": F.cross_entropy(logits, targets)}

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        self._sums = BatchFisher(dict(self.method.model.named_parameters()))
        classes = range(0 if self.world.oracle else task.first, task.last)
        return cast(ImageMethod, self.method).rows_of(classes)

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        if stage.owner == self.name:
            self._sums.zero_()

    def gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        if stage.owner == self.name:
            self._sums.accumulate((name.removeprefix("model."), p.grad) for name, p in parameters.items())

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.owner == self.name:
            zeros = {name: torch.zeros_like(total) for name, total in self._sums.sums.items()}
            fisher, self._sums = zeros | self._sums.mean(), BatchFisher({})
            self.measured(task, fisher)

    def measured(self, task: Task, fisher: Tensors) -> None:
        """Receives F of every parameter of the model, by name; 0 for parameters that the logits do not depend on."""
        raise TypeError(f"{type(self).__name__} has to implement measured()")


class MergeOptions(Options):
    clip: float | None = Field(None, gt=0, description="upper bound of F; null: no bound")
    buffers: Literal["average", "new", "anchor"] = Field(
        "average", description="BatchNorm statistics: merged, the task's, or those from before the task"
    )


class FisherReplace(FisherPass):
    """Merges the task's weights with the weights at the beginning of the task, as far as these have an F.

    New parameters (the rows of new classes) stay as trained. Buffers have no gradient. With `buffers="average"` they
    count as F = 1, so BatchNorm statistics become a plain weighted mean; with `"new"` they stay as trained; with
    `"anchor"` they are those from the beginning of the task.
    """

    options: MergeOptions
    anchor: Tensors  # weights and buffers at the beginning of the task
    fisher: Tensors  # F of the previous tasks, by name
    share: Tensor  # mean share of the new weights in the last merge

    def __init__(self, options: MergeOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.anchor, self.fisher, self.share = {}, {}, torch.zeros((), device=world.device)

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        """The merge comes before the method's final measurements; after the base task nothing is merged."""
        *before, merge = super().plan(task, stages)
        return before_measurements(before, merge) if task.index > 0 else [*before, merge]

    def new_share(self, old: Tensor, new: Tensor) -> Tensor:
        """The share of the new weights in the merged ones, from F of the previous tasks and of this one."""
        raise TypeError(f"{type(self).__name__} has to implement new_share()")

    def accumulate_fisher(self, old: Tensor | None, new: Tensor) -> Tensor:
        """F of the previous tasks after this task."""
        raise TypeError(f"{type(self).__name__} has to implement accumulate_fisher()")

    def begin_task(self, task: Task) -> None:
        self.anchor = copy_weights(self.method.model)

    @torch.no_grad()
    def measured(self, task: Task, fisher: Tensors) -> None:
        live = float_tensors(self.method.model)
        if self.options.clip is not None:
            fisher = {name: f.clamp(max=self.options.clip) for name, f in fisher.items()}
        if self.options.buffers == "average":
            fisher = {name: fisher.get(name, live[name].new_ones(())) for name in live}
        total, size = torch.zeros((), device=self.world.device), 0
        for name, tensor in live.items():  # in the model's order, so that the sum does not depend on a file's order
            if name in self.anchor and name in self.fisher and name in fisher:
                share = self.new_share(self.fisher[name], fisher[name])
                tensor.copy_(merge(self.anchor[name], tensor, share))
                total += share.expand_as(tensor).sum()
                size += tensor.numel()
            elif self.options.buffers == "anchor" and name in self.anchor and name not in fisher:
                tensor.copy_(self.anchor[name])
        self.share = total / max(size, 1)
        self.fisher = {name: self.accumulate_fisher(self.fisher.get(name), new) for name, new in fisher.items()}
        self.anchor = {}
        if task.index > 0:
            self.method.refresh(task)

    def state(self) -> dict[str, Tensor]:
        return pack_state(anchor=self.anchor, fisher=self.fisher) | {"share": self.share}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.anchor, self.fisher = unpack_state(state, "anchor"), unpack_state(state, "fisher")
        self.share = state["share"].clone() if "share" in state else self.share

    def statistics(self) -> dict[str, Any]:
        return {"share": round(float(self.share), 5)}
