"""A backbone with a head: the model that most methods deploy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from incvec.contracts import Output
from incvec.nets.heads import Block, Head, to_float32
from incvec.nets.resnet import Backbone


class Classifier(nn.Module):
    """images -> Output(maps, features, logits), where logits are the scores of the head."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        if head.width != backbone.width:
            raise ValueError(
                f"the head takes features of width {head.width}, the backbone gives {backbone.width}: "
                "build the head with backbone.width"
            )
        self.backbone = backbone
        self.head = head

    @property
    def n_classes(self) -> int:
        return self.head.n_classes

    def grow(self, n_classes: int, generator: torch.Generator) -> Block:
        """Append a block of new classes to the head."""
        return self.head.grow(n_classes, generator)

    def features(self, images: Tensor) -> Tensor:
        """Pooled features, float32 or wider."""
        return to_float32(self.backbone(images).features)

    def forward(self, images: Tensor) -> Output:
        maps, features = self.backbone(images)
        features = to_float32(features)
        return Output(maps, features, self.head(features))
