"""CoFiMA: continual Fisher-weighted model averaging (Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977).

After each task the weights are averaged with those at the beginning of the task, and training continues from the
average:

    theta = ((1 - a) F_{t-1} theta_{t-1} + a F_t theta_t) / ((1 - a) F_{t-1} + a F_t),   a = 0.4.

F_{t-1} is the F of the previous task, not a sum, and theta_{t-1} is the merged model (including the method's changes
at the end of its task). F is clipped at 1e-4, as in the authors' code. For its estimation see `merging.py`.

Differences: rows of new classes keep theta_t (the authors multiply them by F_t, probably by mistake). Where both F are
0, the average is (1 - a) theta_{t-1} + a theta_t instead of 0/0. Their measuring pass runs in train mode, on a network
without BatchNorm; here BatchNorm is frozen. Aligning the classifier with class Gaussians belongs to their host method,
not to the merge. On networks trained from scratch, the IVT paper uses it with fine-tuning: `finetune` with `loss_over:
new`.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from incvec.addons.merging import FisherReplace, MergeOptions, weight_share


class CoFiMAOptions(MergeOptions):
    alpha: float = Field(0.4, ge=0, le=1, description="weight of the new model")
    clip: float | None = Field(1e-4, gt=0, description="upper bound of F; null: no bound")


class CoFiMA(FisherReplace):
    name = "cofima"
    summary = "after each task, the Fisher-weighted mean of the new and the previous weights"
    paper = "Weighted Ensemble Models Are Strong Continual Learners, https://arxiv.org/abs/2312.08977"
    Options = CoFiMAOptions
    options: CoFiMAOptions

    def new_share(self, old: Tensor, new: Tensor) -> Tensor:
        a = self.options.alpha
        return weight_share((1 - a) * old, a * new, default=a)

    def accumulate_fisher(self, old: Tensor | None, new: Tensor) -> Tensor:
        return new
