"""Joint training: all classes at once, in one task. The multi-task optimum that increments are measured against.

Whatever stream the configuration names, there is one task here, so AA = LA and there is no FM. (The oracle of a
method is another thing: it keeps the stream, and starts each task from the weights before.)
"""

from __future__ import annotations

from pydantic import Field

from incvec.config import Normalization
from incvec.methods.finetune import Finetune, FinetuneOptions


class JointOptions(FinetuneOptions):
    net: str = "resnet32-icarl"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"


class Joint(Finetune):
    name = "joint"
    summary = "all classes in one task: the multi-task optimum"
    paper = "(the multi-task optimum, no paper of its own)"
    Options = JointOptions
    joint = True
