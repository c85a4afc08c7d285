"""PASS: prototype augmentation and self-supervision (Zhu et al., CVPR 2021; address below). No exemplars.

Self-supervision by labels: every image is seen in its four rotations, and class and rotation are told apart
jointly, label 4y + k for image y turned k times 90 degrees. With X the 4B turned images of a batch, Phi the
features, and p~ noisy prototypes of old classes (see `prototypes.py`), an increment minimizes

    CE(z(X) / tau) + 10 || Phi(X) - Phi_old(X) ||_F + 10 CE(z(p~) / tau, 4c).

Only the outputs 4y of the images as they are classify. The norm is the authors': over the whole batch, neither
squared nor averaged, so its weight grows with the root of the batch size. With several ranks it is taken over each
rank's local batch and the norms are averaged: its weight is then that of the local batch size.

The authors run the network a second time for the features (which moves BatchNorm's running statistics twice a
step); here it runs once. They take prototypes in the training view (`prototype_view="train"`), without the last
partial batch. A later code base draws more prototypes the fewer classes are new (`draws="ratio"`), and lets
new classes count in the radius (`radius="all"`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from incvec.contracts import Batch, Terms
from incvec.data import rotate90, rotation_labels
from incvec.methods.prototypes import PrototypeMethod, PrototypeOptions, feature_distance


class PASSOptions(PrototypeOptions):
    """All of PASS's settings are those it shares."""


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

    def loss(self, batch: Batch) -> Terms:
        o = self.options
        images, labels = rotate90(batch.images), rotation_labels(batch.labels)
        _, features, logits = self.model(images)
        terms = {"ce": F.cross_entropy(logits / o.temperature, labels)}
        if self.teacher is not None:
            with torch.no_grad():
                old = self.teacher(images).features
            drawn, classes = self.draw(len(batch.labels))
            scores = self.model.head(drawn)
            terms["distil"] = o.lambda_distil * feature_distance(features, old)
            terms["prototypes"] = o.lambda_prototypes * F.cross_entropy(scores / o.temperature, classes)
        return terms
