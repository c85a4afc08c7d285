"""Sources other than images: class Gaussians, whose row c is class c, and features of a frozen network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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


def draw(means: Tensor, factors: Tensor, classes: Tensor, generator: torch.Generator | None, each: int = 1) -> Tensor:
    """`each` samples of each of the given classes, mean_c + L_c z, class by class; classes may repeat.

    One batch of matrix products over the classes as given, so shapes do not depend on values.
    """
    width = means.shape[1]
    z = torch.randn(len(classes), width, each, generator=generator, device=means.device, dtype=means.dtype)
    spread = torch.bmm(factors.index_select(0, classes), z).transpose(1, 2)
    return (means.index_select(0, classes)[:, None, :] + spread).flatten(0, 1)


def class_gaussians(
    features: Tensor, labels: Tensor, classes: range, ridge: float, shrink: bool = False
) -> tuple[Tensor, Tensor]:
    """Means [C, d] and lower factors L [C, d, d] of the classes, L L' = unbiased covariance + ridge I.

    The covariance of a class with one sample is the ridge alone. With `shrink`, the mean of the diagonal is added to
    the diagonal and the mean of the other entries to those. Computed in float64, returned in float32.
    """
    means, factors = [], []
    for label in classes:
        samples = features[labels == label].double()
        centered = samples - samples.mean(0)
        covariance = centered.T @ centered / max(len(samples) - 1, 1)
        eye = torch.eye(samples.shape[1], dtype=samples.dtype, device=samples.device)
        if shrink:
            diagonal = covariance.diagonal().mean()
            others = (covariance.sum() - covariance.diagonal().sum()) / max(eye.numel() - len(eye), 1)
            covariance = covariance + diagonal * eye + others * (1 - eye)
        means.append(samples.mean(0).float())
        factors.append(torch.linalg.cholesky(covariance + ridge * eye).float())
    return torch.stack(means), torch.stack(factors)
