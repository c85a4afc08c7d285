"""Zero-shot classification with a pre-trained dual encoder, by sentences (CLIP, https://arxiv.org/abs/2103.00020).

Nothing is trained, so accuracy only drops because later classes are confused with earlier ones. Use it to check a
checkpoint: the IVT paper reports 68.25 % for CLIP ViT-B/16 on CIFAR-100 and 24.45 % on FGVC-Aircraft.
"""

from __future__ import annotations

from incvec.contracts import Stage, Task
from incvec.methods.dual import DualMethod, DualOptions


class ZeroShot(DualMethod):
    name = "zeroshot"
    summary = "the pre-trained dual encoder without training, classified by sentences"
    paper = "Learning Transferable Visual Models From Natural Language Supervision, https://arxiv.org/abs/2103.00020"
    Options = DualOptions
    trains = False
    frozen_encoder = True

    def stages(self, task: Task) -> list[Stage]:
        return []
