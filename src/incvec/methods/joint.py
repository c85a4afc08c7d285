"""Joint training: all classes at once, in one task. The multi-task optimum.

Whatever stream is configured, there is one task, so AA = LA and FM is undefined. (The oracle of a method is different:
it keeps the stream and starts each task from the previous weights.)
"""

from __future__ import annotations

from incvec.methods.finetune import Finetune, ICaRLTrainingOptions


class JointOptions(ICaRLTrainingOptions):
    """Trained like the base task of iCaRL."""


class Joint(Finetune):
    name = "joint"
    summary = "all classes in one task: the multi-task optimum"
    paper = "(the multi-task optimum, without a paper)"
    Options = JointOptions
    joint = True
