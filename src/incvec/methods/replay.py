"""Plain replay: cross-entropy on the task's images and the exemplars of all classes before, nothing else.

What a memory alone is worth; a well-known account of it is "On Tiny Episodic Memories in Continual Learning"
(Chaudhry et al., 2019, https://arxiv.org/abs/1902.10486), which draws exemplars at random. Here they are herded,
as for every other method with a memory, and join the batches uniformly, without any re-balancing.
"""

from __future__ import annotations

from pydantic import Field

from incvec.config import Normalization
from incvec.methods.common import ExemplarMethod
from incvec.methods.finetune import Finetune, FinetuneOptions


class ReplayOptions(FinetuneOptions):
    net: str = "resnet32-icarl"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"


class Replay(ExemplarMethod, Finetune):
    name = "replay"
    summary = "cross-entropy on new images and exemplars: what a memory alone is worth"
    paper = "On Tiny Episodic Memories in Continual Learning, https://arxiv.org/abs/1902.10486"
    Options = ReplayOptions
    options: ReplayOptions
