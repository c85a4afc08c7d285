"""What the merging add-ons share: weighted means of weights, a Fisher pass at a task's end, and their order.

Replacing add-ons (`eopc`, `cofima`, `fisher-merge`) put other weights into the model once the method's own stages
are trained, and training goes on from there. Each does so at the end of a stage that it adds, so several of them act
one after the other in the order they are named; what a method measures of the weights a task ends with (EWC's
Fisher), it measures after them. Deploying add-ons (`magmax`, `imm`) leave training alone and
merge the weights each task has ended with; they are named last, and there is one of them. `ivt` acts inside the
method's own stages and may stand anywhere.

F is the diagonal of mean over batches of g^2, g the gradient of the cross-entropy of the task's own images over
all classes seen. Where a head has k outputs a class (PASS and FCS: the rotations), class y is the output k y, that
of the image as it is. BatchNorm runs on its running statistics, so that measuring changes nothing.
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
REPLACING = ("eopc", "cofima", "fisher-merge")
DEPLOYING = ("magmax", "imm")


def share_of(old_weight: Tensor, new_weight: Tensor, unknown: float) -> Tensor:
    """w_new / (w_old + w_new), element by element; `unknown` where both weights are 0."""
    total = old_weight + new_weight
    return torch.where(total > 0, new_weight / total, unknown)


def merge(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    """(1 - share) old + share new: with `share_of`, (w_old old + w_new new) / (w_old + w_new)."""
    return torch.lerp(old, new.to(old), share)


def class_outputs(logits: Tensor, n_seen: int) -> Tensor:
    """One output a class: of k outputs a class the first, which stands for the image as it is."""
    return logits[:, :: logits.shape[1] // n_seen]


def floats(model: nn.Module) -> Tensors:
    """The live floating-point tensors of a model's state, parameters and buffers, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def copies(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies in float32, or in their own format where that is wider."""
    return {name: t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True) for name, t in tensors.items()}


def flat(**groups: Mapping[str, Tensor]) -> Tensors:
    """Several mappings as one, for `AddOn.state`: `group/name`."""
    return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def group_of(state: Mapping[str, Tensor], group: str) -> Tensors:
    """One of the mappings that `flat` put together, its tensors cloned."""
    prefix = f"{group}/"
    return {name.removeprefix(prefix): t.clone() for name, t in state.items() if name.startswith(prefix)}


def refusal(name: str, method: type[Method], others: Sequence[str]) -> str | None:
    """Why a merging add-on makes no sense with the method, or after the add-ons named before it; or None."""
    if method.joint:
        return f"{method.name} trains all classes as one task, so there is nothing to merge."
    if not method.trains:
        return f"{method.name} trains nothing, so there is nothing to merge."
    deploying = [other for other in others if other in DEPLOYING]
    if name in DEPLOYING and deploying:
        return f"only one merge can be deployed, and {deploying[0]} deploys one already."
    if name in REPLACING and deploying:
        return f"{deploying[0]} merges the weights a task ends with, which {name} replaces; name {name} before it."
    weighted = [other for other in others if other in ("cofima", "fisher-merge")]
    if name in ("cofima", "fisher-merge") and weighted:
        return f"{weighted[0]} has merged the task's weights by their Fisher already; choose one of the two."
    return None


class FisherPass(AddOn):
    """An add-on that measures F after the other stages of every task, the base task's included."""

    def __init__(self, options: Any, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self._sums = BatchFisher({})

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        return refusal(cls.name, method, others)

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        main = next(stage for stage in stages if stage.role == "main")
        measure = Stage(
            name=f"{self.name}-fisher",
            role="measure",
            epochs=1,
            batch_size=main.batch_size,
            groups=(Group(("model",), 0.0),),
            views=main.views[:1],  # of the images, whatever source the main stage has: the model takes images
            batchnorm="frozen",
            owner=self.name,
            loss=self.cross_entropy,
        )
        return [*stages, measure]

    def cross_entropy(self, batch: Batch) -> Terms:
        """Over all classes seen, with the true labels."""
        logits = self.method.model(batch.images).logits
        return {"ce": F.cross_entropy(logits, batch.labels * (logits.shape[1] // self.method.task.n_seen))}

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
            self._sums.accumulate((name.removeprefix("model."), p) for name, p in parameters.items())

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.owner == self.name:
            self._sums.mean_()
            fisher, self._sums = self._sums.sums, BatchFisher({})
            self.measured(task, fisher)

    def measured(self, task: Task, fisher: Tensors) -> None:
        """F of every parameter of the model, by name; 0 for one that the logits do not depend on."""
        raise TypeError(f"{type(self).__name__} does nothing with its Fisher")


class MergeOptions(Options):
    clip: float | None = Field(None, gt=0, description="the largest F counts as; none: F as it is")
    buffers: Literal["average", "new"] = Field("average", description="BatchNorm's statistics: merged, or the task's")


class FisherReplace(FisherPass):
    """Merges the task's weights into those the task began with, as far as the past has an F of them.

    What is new (the rows of new classes) stays as trained. A buffer has no gradient; it counts as F = 1, so that
    BatchNorm's statistics become a plain weighted mean (`buffers="average"`), or it stays as it is (`"new"`).
    """

    options: MergeOptions
    anchor: Tensors  # the weights and buffers the task began with
    fisher: Tensors  # what the past knows, by name
    share: Tensor  # of the new in the last merge, the mean over all that was merged

    def __init__(self, options: MergeOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.anchor, self.fisher, self.share = {}, {}, torch.zeros((), device=world.device)

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        """The merge comes before what the method measures in the end; after the base task nothing is merged."""
        *before, merge = super().plan(task, stages)
        place = len(before)
        while task.index > 0 and before[place - 1].role == "measure" and before[place - 1].owner is None:
            place -= 1
        return [*before[:place], merge, *before[place:]]

    def new_share(self, old: Tensor, new: Tensor) -> Tensor:
        """How much of the merged weight is the new one, from the past's F and the task's."""
        raise TypeError(f"{type(self).__name__} weighs nothing")

    def remember(self, old: Tensor | None, new: Tensor) -> Tensor:
        """The past's F once the task is over."""
        raise TypeError(f"{type(self).__name__} remembers nothing")

    def begin_task(self, task: Task) -> None:
        self.anchor = copies(floats(self.method.model))

    @torch.no_grad()
    def measured(self, task: Task, fisher: Tensors) -> None:
        live = floats(self.method.model)
        if self.options.clip is not None:
            fisher = {name: f.clamp(max=self.options.clip) for name, f in fisher.items()}
        if self.options.buffers == "average":
            fisher = {name: fisher.get(name, live[name].new_ones(())) for name in live}
        total, size = torch.zeros((), device=self.world.device), 0
        for name, tensor in live.items():  # in the model's order, so that the sum does not hang on a file's
            if name in self.anchor and name in self.fisher and name in fisher:
                share = self.new_share(self.fisher[name], fisher[name])
                tensor.copy_(merge(self.anchor[name], tensor, share))
                total += share.expand_as(tensor).sum()
                size += tensor.numel()
        self.share = total / max(size, 1)
        self.fisher = {name: self.remember(self.fisher.get(name), new) for name, new in fisher.items()}
        self.anchor = {}
        if task.index > 0:
            self.method.refresh(task)

    def state(self) -> dict[str, Tensor]:
        return flat(anchor=self.anchor, fisher=self.fisher) | {"share": self.share}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.anchor, self.fisher = group_of(state, "anchor"), group_of(state, "fisher")
        self.share = state["share"].clone() if "share" in state else self.share

    def statistics(self) -> dict[str, Any]:
        return {"share": round(float(self.share), 5)}
