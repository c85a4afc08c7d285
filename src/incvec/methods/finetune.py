"""Plain sequential training: cross-entropy on the task's own images, nothing against forgetting.

The lower bound every method is measured against. With `oracle` it becomes training on all classes seen,
started from the weights before.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from incvec.config import TrainOptions
from incvec.contracts import Batch, Terms
from incvec.methods.common import ImageMethod
from incvec.nets import Head, LinearHead


class FinetuneOptions(TrainOptions):
    """ResNet-32 with a linear head, SGD with steps."""


class Finetune(ImageMethod):
    name = "finetune"
    summary = "sequential training with nothing against forgetting: the lower bound"
    paper = "(a baseline, no paper of its own)"
    Options = FinetuneOptions
    distils = False

    def make_head(self, width: int) -> Head:
        return LinearHead(width)

    def loss(self, batch: Batch) -> Terms:
        return {"ce": F.cross_entropy(self.model(batch.images).logits, batch.labels)}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"cnn": self.model(images).logits}
