"""FLYP: fine-tune like you pre-train (Goyal et al., CVPR 2023, https://arxiv.org/abs/2212.00638), task after task.

Both towers, the projections and the temperature are trained by CLIP's own loss on images and their captions:

    S = exp(s) u v',   loss = (CE(S, diagonal) + CE(S', diagonal)) / 2

Nothing is kept of the past; the optimizer starts anew with each task. As in the class-incremental code of SPU
(https://github.com/wx-zhang/spu), an image's target is its own caption even where another image has the same one,
so with m images of its class in the batch the loss ends near log m. `targets="shared"` spreads the target evenly over
equal captions instead; `"classes"` is cross-entropy over the sentences of the task's classes.

Unlike the authors', a caption is always the same sentence, learning rate and optimizer are the IVT paper's, and
neither weight decay nor a schedule is used (the IVT paper names none).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.contracts import Batch, Terms
from incvec.methods.dual import DualMethod, DualOptions

Targets = Literal["diagonal", "shared", "classes"]


class FLYPOptions(DualOptions):
    targets: Targets = Field("diagonal", description="what an image is to find: its caption, equal ones, or its class")


def contrastive(similarities: Tensor, labels: Tensor | None = None) -> Tensor:
    """The mean of both directions' cross-entropy; with labels, targets are shared by all pairs of equal label."""
    if labels is None:
        targets = torch.eye(len(similarities), device=similarities.device)
    else:
        targets = (labels[:, None] == labels[None, :]).float()
        targets = targets / targets.sum(1, keepdim=True)
    rows, columns = similarities.log_softmax(1), similarities.T.log_softmax(1)
    return -(targets * (rows + columns)).sum(1).mean() / 2


class FLYP(DualMethod):
    name = "flyp"
    summary = "fine-tunes both towers of a pre-trained model by its own contrastive loss, task after task"
    paper = (
        "Finetune like you pretrain: Improved finetuning of zero-shot vision models, https://arxiv.org/abs/2212.00638"
    )
    Options: ClassVar[type] = FLYPOptions
    options: FLYPOptions

    @classmethod
    def uses_batch_contrast(cls, options: FLYPOptions) -> bool:
        return options.targets != "classes"

    def loss(self, batch: Batch) -> Terms:
        dual = self.model.dual
        images = self.model.unit(dual.image_tower(batch.images))
        texts, which = self.captions(batch.labels)
        if self.options.targets == "classes":
            return {"ce": F.cross_entropy(dual.similarities(images, texts), which)}
        similarities = dual.similarities(images, texts.index_select(0, which))
        shared = batch.labels if self.options.targets == "shared" else None
        return {"contrastive": contrastive(similarities, shared)}
