"""FLYP: fine-tune like you pre-train (Goyal et al., CVPR 2023, https://arxiv.org/abs/2212.00638), one task after
another.

Both towers, the projections and the temperature are trained with CLIP's own loss on images and their captions:

    S = exp(s) u v',   loss = (CE(S, diagonal) + CE(S', diagonal)) / 2

There is no measure against forgetting; the optimizer is reset with each task. As in the class-incremental code of SPU
(https://github.com/wx-zhang/spu), an image's target is its own caption even if another image has the same one, so with
m images of its class in the batch the loss approaches log m.

Unlike with the authors, a class has one fixed caption, learning rate and optimizer are the IVT paper's, and there is
neither weight decay nor a schedule (the IVT paper states none).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from incvec.contracts import Batch, Terms
from incvec.methods.dual import DualMethod, DualOptions


def contrastive_loss(similarities: Tensor) -> Tensor:
    """The mean cross-entropy of both directions, with targets on the diagonal."""
    rows, columns = similarities.log_softmax(1), similarities.T.log_softmax(1)
    return -(rows.diagonal() + columns.diagonal()).mean() / 2


class FLYP(DualMethod):
    name = "flyp"
    summary = "fine-tunes both towers of a pre-trained model with its own contrastive loss"
    paper = (
        "Finetune like you pretrain: Improved finetuning of zero-shot vision models, https://arxiv.org/abs/2212.00638"
    )
    Options: ClassVar[type] = DualOptions
    options: DualOptions
    own_terms = ()  # its only term contrasts all samples

    @classmethod
    def uses_batch_contrast(cls, options: DualOptions) -> bool:
        return True

    def loss(self, batch: Batch) -> Terms:
        dual = self.model.dual
        images = self.model.unit(dual.image_tower(batch.images))
        texts, index = self.captions(batch.labels)
        return {"contrastive": contrastive_loss(dual.similarities(images, texts.index_select(0, index)))}
