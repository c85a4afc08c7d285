"""iCaRL: incremental classifier and representation learning (Rebuffi et al., CVPR 2017,
https://arxiv.org/abs/1611.07725).

Exemplars are selected by herding (alg. 4). A sample is assigned to the class whose exemplars have the nearest mean
feature (alg. 1). The network is trained on new images and exemplars to classify, and to reproduce the outputs of the
previous model for the old classes.

`loss="softmax"` is how later comparisons train it, most likely including the IVT paper: cross-entropy over the classes
seen plus KL(softmax(z_old / 2) || softmax(z / 2)) with weight 1. Three code bases write this differently: as here; as
beta T^2 N_old times the KL averaged over all elements, with T = 2 and beta = 1/4 (LUCIR); as a cross-entropy between
the softened outputs (PyCIL). All have the same gradient. `loss="sigmoid"` is the original (alg. 3): binary
cross-entropy on every output, where the target of an old class is the output of the previous model, for old and new
samples.

Class means average the features of an image and of its mirror image, as in the authors' code (PyCIL omits the latter).
Exemplars are selected once, on images without augmentation. The authors share a fixed total among the classes
(`memory_total`). One re-implementation (CLearning) selects exemplars and computes class means on random crops, without
mirror images, and has outputs for all classes of the stream from the start, whose rows weight decay shrinks until their
task begins.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.config import Normalization, TrainOptions
from incvec.contracts import Batch, Terms
from incvec.methods.common import ExemplarMethod, distillation_loss


class ICaRLOptions(TrainOptions):
    net: str = "resnet32-icarl"
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = "lucir"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    temperature: float = Field(2.0, gt=0)
    lambda_distil: float = Field(1.0, ge=0)


def sigmoid_loss(logits: Tensor, old_logits: Tensor | None, labels: Tensor, n_outputs: int) -> Tensor:
    """Binary cross-entropy with the old model's sigmoid outputs as targets of the old classes (alg. 3).

    Summed over the classes seen and divided by `n_outputs`: the authors' network has one output for every class of the
    stream from the start and averages over all of them, and their learning rate belongs to that scale.
    """
    targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    if old_logits is not None:
        targets = torch.cat([old_logits.sigmoid(), targets[:, old_logits.shape[1] :]], dim=1)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.sum(1).mean() / n_outputs


class ICaRL(ExemplarMethod):
    name = "icarl"
    summary = "distillation on old outputs, herded exemplars, nearest mean of exemplars"
    paper = "iCaRL: Incremental Classifier and Representation Learning, https://arxiv.org/abs/1611.07725"
    Options = ICaRLOptions
    reported = "nme"
    options: ICaRLOptions

    def loss(self, batch: Batch) -> Terms:
        o = self.options
        logits = self.model(batch.images).logits
        output = self.teacher_output(batch.images)
        old = None if output is None else output.logits
        if o.loss == "sigmoid":
            return {"bce": sigmoid_loss(logits, old, batch.labels, self.world.tasks[-1].n_seen)}
        terms = {"ce": F.cross_entropy(logits, batch.labels)}
        if old is not None:
            terms["distil"] = o.lambda_distil * distillation_loss(logits, old, o.temperature)
        return terms
