"""SPU: selective parameter update (Zhang et al., CVPR 2024, https://arxiv.org/abs/2308.12462).

Only the first layer of every block's MLP, in both towers, and the image projection are trained. Before a task, a pass
over a quarter of its images sums the gradient of

    mean over the rows of ||S_row||^2,   S = exp(s) u v' of a batch's images and captions.

In each of these weight matrices, only the 10 % of entries with the largest |sum| are updated; biases and the
projection are updated completely. Training uses FLYP's loss, with the gradients multiplied by the mask.

The authors keep a buffer of old images; the IVT paper lists SPU as a method without exemplars, and so it is here.
Their pass does not clear gradients between its batches, so early ones count several times; here each counts once. It
also goes on beyond the quarter while any entry of a sum is below 1e-12 in magnitude; here it ends there.
Their weight decay also changes masked entries; with Adam and no weight decay, as here, masked entries do not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor, nn

from incvec.contracts import Batch, Stage, Task, Terms
from incvec.methods.dual import DualOptions
from incvec.methods.flyp import FLYP

SCORE, MASK = "score.", "mask."


class SPUOptions(DualOptions):
    share: float = Field(0.1, gt=0, le=1, description="share of the entries of a matrix that are updated")
    score_share: float = Field(0.25, gt=0, le=1, description="share of the task's images for the scores")


def row_energy(similarities: Tensor) -> Tensor:
    """Mean squared norm of the rows."""
    return similarities.square().sum(1).mean()


def top_mask(score: Tensor, share: float) -> Tensor:
    """True for the given share of the entries: those of largest magnitude."""
    count = max(1, int(share * score.numel()))
    largest = score.abs().flatten().topk(count).indices
    mask = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    mask[largest] = True
    return mask.view_as(score)


class SPU(FLYP):
    name = "spu"
    summary = "fine-tunes a tenth of the weights in the first MLP layers of both towers, selected by gradient"
    paper = "Overcoming Generic Knowledge Loss with Selective Parameter Update, https://arxiv.org/abs/2308.12462"
    Options = SPUOptions
    options: SPUOptions

    def candidates(self) -> dict[str, nn.Parameter]:
        """The parameters of the first MLP layers, by their names in the method."""
        layers = self.model.dual.first_layers
        named = self.model.dual.named_parameters(prefix="model.dual")
        return {name: p for name, p in named if any(layer in name for layer in layers)}

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        return (*self.candidates(), "model.dual.image_projection")

    def stages(self, task: Task) -> list[Stage]:
        main = self.main_stage(task)
        groups = tuple(replace(group, lr=0.0, weight_decay=0.0) for group in main.groups)
        score = main.replace(name="score", role="measure", epochs=1, groups=groups, optimizer=None, loss=self.energy)
        return [score, main]

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        if stage.role != "measure":
            return super().begin_stage(task, stage)
        for name in [name for name in self.store if name.startswith(MASK)]:
            del self.store[name]
        self.store |= {SCORE + name: torch.zeros_like(p) for name, p in self.candidates().items() if p.dim() > 1}
        rows = self.training_rows(task)
        shuffled = torch.randperm(len(rows), generator=self.world.generator, device=rows.device)
        return rows[shuffled[: math.ceil(self.options.score_share * len(rows))]]

    def energy(self, batch: Batch) -> Terms:
        dual = self.model.dual
        texts, index = self.captions(batch.labels)
        images = self.model.unit(dual.image_tower(batch.images))
        return {"energy": row_energy(dual.similarities(images, texts.index_select(0, index)))}

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the scores in the measuring pass, apply the mask in training: the store has the entries of only one."""
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            if SCORE + name in self.store:
                self.store[SCORE + name] += parameter.grad
            elif MASK + name in self.store:
                parameter.grad.mul_(self.store[MASK + name])

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.role == "measure":
            for name in [name for name in self.store if name.startswith(SCORE)]:
                self.store[MASK + name.removeprefix(SCORE)] = top_mask(self.store.pop(name), self.options.share)
