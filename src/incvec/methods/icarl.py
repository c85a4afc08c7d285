"""iCaRL: representation learning with exemplars, nearest-mean-of-exemplars classifier (Rebuffi et al., CVPR 2017,
https://arxiv.org/abs/1611.07725).

Exemplars are chosen by herding (alg. 4), and a sample belongs to the class whose exemplars' mean feature is nearest
to its own (alg. 1). The network is trained on new images and exemplars to classify and, on the outputs of the old
classes, to agree with the model before the task.

`loss="softmax"` is how later comparisons train it, the IVT paper's most likely among them: cross-entropy over the
classes seen plus KL(softmax(z_old / 2) || softmax(z / 2)) with weight 1. Three code bases write it in three ways: as
it stands here; as beta T^2 N_old times the KL averaged over all elements, with T = 2 and beta = 1/4 (LUCIR's); as a
cross-entropy between the softened outputs (PyCIL's). They have the same gradient, so they are one option here.
`loss="sigmoid"` is the original (alg. 3): binary cross-entropy on every output, the target of an old class being the
old model's own output, for old and new samples alike.

Class means average a feature with that of the mirror image, as the authors' code does. Exemplars are chosen once, on
images as they are; the authors re-balance a fixed total (`memory_total`), some re-implementations choose on random
crops.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import Normalization, TrainOptions
from incvec.contracts import Batch, Terms
from incvec.methods.common import ExemplarMethod, distillation
from incvec.nets import Head, LinearHead


class ICaRLOptions(TrainOptions):
    net: str = "resnet32-icarl"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    temperature: float = Field(2.0, gt=0)
    lambda_distil: float = Field(1.0, ge=0)


def sigmoid_loss(logits: Tensor, old: Tensor | None, labels: Tensor, outputs: int) -> Tensor:
    """Binary cross-entropy with the old model's sigmoid outputs as the old classes' targets (alg. 3).

    Summed over the classes seen and divided by `outputs`: the authors' network has one output for every class of
    the stream from the start and averages over all of them, and their learning rate belongs to that scale.
    """
    targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    if old is not None:
        targets = torch.cat([old.sigmoid(), targets[:, old.shape[1] :]], dim=1)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.sum(1).mean() / outputs


class ICaRL(ExemplarMethod):
    name = "icarl"
    summary = "distillation on old outputs, herded exemplars, nearest mean of exemplars"
    paper = "iCaRL: Incremental Classifier and Representation Learning, https://arxiv.org/abs/1611.07725"
    Options = ICaRLOptions
    reported = "nme"
    options: ICaRLOptions

    def make_head(self, width: int) -> Head:
        return LinearHead(width)

    def loss(self, batch: Batch) -> Terms:
        o = self.options
        logits = self.model(batch.images).logits
        old = None
        if self.teacher is not None:
            with torch.no_grad():
                old = self.teacher(batch.images).logits
        if o.loss == "sigmoid":
            return {"bce": sigmoid_loss(logits, old, batch.labels, self.world.tasks[-1].n_seen)}
        terms = {"ce": F.cross_entropy(logits, batch.labels)}
        if old is not None:
            terms["distil"] = o.lambda_distil * distillation(logits, old, o.temperature)
        return terms
