"""Sources other than images: class Gaussians, whose row c is class c, and features of a frozen network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from incvec.class_statistics import draw
from incvec.contracts import Batch


class GaussianSource:
    """Every fetched row is a new sample of its class, scale_c mean_c + L_c z with z from N(0, I)."""

    labels: Tensor
    row: tuple[int, ...]

    def __init__(self, means: Tensor, factors: Tensor, scales: Tensor | None = None) -> None:
        self.centers = means if scales is None else means * scales[:, None]
        self.factors = factors
        self.labels = torch.arange(len(means), device=means.device)
        self.row = tuple(means.shape[1:])

    def fetch(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str] = ()) -> Batch:
        return Batch((draw(self.centers, self.factors, indices, generator),), indices, indices)


class FeatureSource:
    """Features computed once; the same single view for every name."""

    labels: Tensor
    row: tuple[int, ...]

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels
        self.row = tuple(features.shape[1:])

    def fetch(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str] = ()) -> Batch:
        return Batch((self.features.index_select(0, indices),), self.labels.index_select(0, indices), indices)
