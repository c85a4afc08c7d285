"""CoFiMA: continual Fisher-weighted model averaging (Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977).

After each task the weights are averaged with those the task began with, and training goes on from the average:

    theta = ((1 - a) F_{t-1} theta_{t-1} + a F_t theta_t) / ((1 - a) F_{t-1} + a F_t),   a = 0.4,

F_{t-1} being that of the task just before, not a sum, and theta_{t-1} the merged model (with whatever the method
did to it at its task's end). F is clipped at 1e-4, as in the authors' code. How it is measured: `merging.py`.

Unlike there, rows of new classes keep theta_t (the authors multiply them by F_t, surely a slip), and where both F
are 0 the average is the plain one, (1 - a) theta_{t-1} + a theta_t, in place of 0/0. Their measuring pass runs in
train mode, on a network without BatchNorm; ours leaves BatchNorm's statistics alone. Alignment of the classifier
with class Gaussians belongs to their host method, not to the merge. On networks trained from scratch the IVT paper
runs it on plain fine-tuning: `finetune` with `loss_over: new`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from incvec.addons.merging import FisherReplace, MergeOptions, share_of


class CoFiMAOptions(MergeOptions):
    alpha: float = Field(0.4, ge=0, le=1, description="weight of the new model")
    clip: float | None = Field(1e-4, gt=0, description="the largest F counts as; none: F as it is")
    buffers: Literal["average", "new"] = "average"


class CoFiMA(FisherReplace):
    name = "cofima"
    summary = "after each task, the Fisher-weighted mean of the new weights and those before"
    paper = "Weighted Ensemble Models Are Strong Continual Learners, https://arxiv.org/abs/2312.08977"
    Options = CoFiMAOptions
    options: CoFiMAOptions

    def new_share(self, old: Tensor, new: Tensor) -> Tensor:
        a = self.options.alpha
        return share_of((1 - a) * old, a * new, unknown=a)

    def remember(self, old: Tensor | None, new: Tensor) -> Tensor:
        return new
