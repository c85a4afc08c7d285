"""PASS: prototype augmentation and self-supervision (Zhu et al., CVPR 2021; address below). No exemplars.

Self-supervision through labels: every image is used in its four rotations, and class and rotation are predicted
jointly, with label 4y + k for an image of class y rotated k times by 90 degrees. With X the 4B rotated images of a
batch, Phi the features, and p~ noisy prototypes of old classes (see `prototypes.py`), an increment minimizes

    CE(z(X) / tau) + 10 || Phi(X) - Phi_old(X) ||_F + 10 CE(z(p~) / tau, 4c).

Only the outputs 4y, of images without rotation, classify. As in the authors' code, the norm is over the whole batch,
neither squared nor averaged, so its weight grows with the square root of the batch size. With several ranks, the norms
of the local batches are averaged, so the weight is that of the local batch size.

The authors run the network a second time for the features, which updates BatchNorm's running statistics twice per
step of an increment; here it runs once (`second_pass` does as they do). They compute prototypes in the training view
(`prototype_view="train"`) without the last partial batch. A later code base (PyCIL, variant `pycil`) draws more
prototypes the fewer classes are new (`draws="ratio"`), includes new classes in the radius (`radius="all"`), initializes
the rows of new classes as Kaiming-uniform (`head_init="kaiming"`) and trains in float32.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import Field

from incvec.contracts import Batch, Terms
from incvec.data import rotate90, rotation_labels
from incvec.methods.prototypes import ROTATIONS, PrototypeMethod, PrototypeOptions, feature_distance
from incvec.nets import Head, LinearHead


class PASSOptions(PrototypeOptions):
    """The settings that PASS shares with FCS, and two in which code bases differ."""

    head_init: Literal["default", "kaiming"] = Field("default", description="initial rows of new classes")
    second_pass: bool = Field(False, description="a second forward pass for the features of the distillation")


class PASS(PrototypeMethod):
    name = "pass"
    summary = "prototype augmentation and self-supervision by rotations, no exemplars"
    paper = (
        "Prototype Augmentation and Self-Supervision for Incremental Learning, "
        "https://openaccess.thecvf.com/content/CVPR2021/html/"
        "Zhu_Prototype_Augmentation_and_Self-Supervision_for_Incremental_Learning_CVPR_2021_paper.html"
    )
    Options = PASSOptions
    options: PASSOptions

    def make_head(self, width: int) -> Head:
        return LinearHead(width, ROTATIONS, init=self.options.head_init)

    def loss(self, batch: Batch) -> Terms:
        o = self.options
        images, labels = rotate90(batch.images), rotation_labels(batch.labels)
        _, features, logits = self.model(images)
        terms = {"ce": F.cross_entropy(logits / o.temperature, labels)}
        if (old := self.teacher_output(images)) is not None:
            if o.second_pass:
                features = self.model.features(images)
            prototypes, prototype_labels = self.draw_prototypes(len(batch.labels))
            scores = self.model.head(prototypes)
            terms["distil"] = o.lambda_distil * feature_distance(features, old.features)
            terms["prototypes"] = o.lambda_prototypes * F.cross_entropy(scores / o.temperature, prototype_labels)
        return terms
