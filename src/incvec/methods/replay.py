"""Plain replay: cross-entropy on the task's images and the exemplars of all previous classes.

It shows what a memory contributes by itself. See "On Tiny Episodic Memories in Continual Learning" (Chaudhry et al.,
2019, https://arxiv.org/abs/1902.10486), which draws exemplars at random. Here they are herded, as for all other methods
with a memory, and batches are drawn uniformly from new images and exemplars, without re-balancing.
"""

from __future__ import annotations

from incvec.methods.common import ExemplarMethod
from incvec.methods.finetune import Finetune, ICaRLTrainingOptions


class ReplayOptions(ICaRLTrainingOptions):
    """Trained like iCaRL."""


class Replay(ExemplarMethod, Finetune):
    name = "replay"
    summary = "cross-entropy on new images and exemplars: the contribution of a memory by itself"
    paper = "On Tiny Episodic Memories in Continual Learning, https://arxiv.org/abs/1902.10486"
    Options = ReplayOptions
    options: ReplayOptions
