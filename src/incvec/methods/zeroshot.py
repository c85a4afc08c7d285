"""Zero-shot classification: the pre-trained model as it is, by sentences (CLIP, https://arxiv.org/abs/2103.00020).

Nothing is trained, so nothing is forgotten but by confusion with classes that come later. Of a real checkpoint this is
the first thing to look at: the IVT paper has 68.25 % for CLIP ViT-B/16 on CIFAR-100 and 24.45 % on FGVC-Aircraft.
"""

from __future__ import annotations

from incvec.contracts import Stage, Task
from incvec.methods.dual import DualMethod, DualOptions


class ZeroShot(DualMethod):
    name = "zeroshot"
    summary = "the pre-trained model of two towers as it is, classified by sentences"
    paper = "Learning Transferable Visual Models From Natural Language Supervision, https://arxiv.org/abs/2103.00020"
    Options = DualOptions
    trains = False
    frozen_encoder = True

    def stages(self, task: Task) -> list[Stage]:
        return []
