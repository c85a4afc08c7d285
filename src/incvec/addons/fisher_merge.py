"""Fisher merging over all tasks (Matena and Raffel, NeurIPS 2022, https://arxiv.org/abs/2111.09832), sequentially.

    theta = sum_i F_i theta_i / sum_i F_i,   i = 1 .. t,

with theta_i the weights at the end of task i. With Fbar = sum_{i<t} F_i and thetabar the merged weights so far, at
which the task begins, this is (Fbar thetabar + F_t theta_t) / (Fbar + F_t).

The paper merges models that are fine-tuned independently from one initialization; here each task begins at the
previous merge. It averages squared gradients of single samples with labels drawn from the model; here they are of
batches with the true labels, as for the other merges (`merging.py`): only the ratio of the F matters. A weight without
any F stays as trained. Mode-IMM (`imm`) has the same formula, but does not train from a merge.
"""

from __future__ import annotations

from torch import Tensor

from incvec.addons.merging import FisherReplace, MergeOptions, weight_share


class FisherMergeOptions(MergeOptions):
    """F without a bound, with equal weights of all tasks."""


class FisherMerge(FisherReplace):
    name = "fisher-merge"
    summary = "after each task, the Fisher-weighted mean of the weights of all tasks"
    paper = "Merging Models with Fisher-Weighted Averaging, https://arxiv.org/abs/2111.09832"
    Options = FisherMergeOptions

    def new_share(self, old: Tensor, new: Tensor) -> Tensor:
        return weight_share(old, new, default=1.0)

    def accumulate_fisher(self, old: Tensor | None, new: Tensor) -> Tensor:
        return new if old is None else old + new
