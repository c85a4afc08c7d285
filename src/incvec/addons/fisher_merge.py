"""Fisher merging over all tasks (Matena and Raffel, NeurIPS 2022, https://arxiv.org/abs/2111.09832), in sequence.

    theta = sum_i F_i theta_i / sum_i F_i,   i = 1 .. t,

theta_i the weights task i was trained to. The sums need not be kept apart: with Fbar = sum_{i<t} F_i and
thetabar the merged weights so far, which are the ones the task began with, this is
(Fbar thetabar + F_t theta_t) / (Fbar + F_t).

The paper merges models fine-tuned side by side from one start; here each begins at the merge before. It averages
squared gradients of single samples with labels drawn from the model; ours are of batches with the true labels,
as for the other merges (`merging.py`): only the ratio of the tasks' F counts. A weight that has no F at all
stays as trained. Mode-IMM (`imm`) has the same formula, but never trains from a merge.
"""

from __future__ import annotations

from torch import Tensor

from incvec.addons.merging import FisherReplace, MergeOptions, share_of


class FisherMergeOptions(MergeOptions):
    """F as it is, of every task alike."""


class FisherMerge(FisherReplace):
    name = "fisher-merge"
    summary = "after each task, the Fisher-weighted mean of the weights of all tasks"
    paper = "Merging Models with Fisher-Weighted Averaging, https://arxiv.org/abs/2111.09832"
    Options = FisherMergeOptions

    def new_share(self, old: Tensor, new: Tensor) -> Tensor:
        return share_of(old, new, unknown=1.0)

    def remember(self, old: Tensor | None, new: Tensor) -> Tensor:
        return new if old is None else old + new
