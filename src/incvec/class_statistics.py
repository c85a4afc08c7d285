"""Means and covariances of classes in feature space, which follow the features while the network changes.

    statistics = ClassStatistics()
    for task in tasks:
        before = features(model, images)              # images at hand: those of the task, and any exemplars
        train(model, task)
        after = features(model, images)
        statistics.move(before, after, labels)        # those of old classes follow
        statistics.add(after[is_new], labels[is_new])
        for _ in range(steps):                        # train the classifier alone, on all classes
            x, y = statistics.sample(128)
            ...

Depends on torch only. The add-on `carry` is this with any method of the lab.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

JITTER = 1e-5  # added to variances, so that covariances have a Cholesky factor
ROUNDING = 1e-10  # relative to the variances: what rounding in float64 stays below
CHUNK = 2**26  # numbers of a temporary tensor


class Displacement(NamedTuple):
    """d(f) = offset + (f - center) slope, the expected displacement of a feature, and the covariance around it."""

    center: Tensor
    offset: Tensor
    slope: Tensor
    noise: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return self.offset + (features - self.center) @ self.slope

    def covariances(self, before: Tensor) -> Tensor:
        """Covariances of features after the displacement, from those before it."""
        jacobian = torch.eye(len(self.slope), dtype=self.slope.dtype, device=self.slope.device) + self.slope
        return jacobian.T @ before @ jacobian + self.noise


def fit_displacement(before: Tensor, after: Tensor, weights: Tensor, ridge: float) -> Displacement:
    """The weighted ridge regression of `after - before` on `before`, in float64. A large ridge leaves a translation.

    With a ridge of 0 and fewer samples than features, the solution of least norm.
    """
    before, after = (values.to(torch.promote_types(values.dtype, torch.float32)) for values in (before, after))
    x, moved, w = before.double(), (after - before).double(), (weights / weights.sum()).double()[:, None]
    center, offset = (w * x).sum(0), (w * moved).sum(0)
    x, residual = x - center, moved - offset
    gram = x.T @ (w * x)
    floor = max(ridge, ROUNDING) * gram.diagonal().mean() + torch.finfo(torch.float32).tiny
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    slope = torch.linalg.solve(gram + floor * eye, x.T @ (w * residual))
    residual = residual - x @ slope
    return Displacement(center, offset, slope, residual.T @ (w * residual))


def class_weights(labels: Tensor) -> Tensor:
    """One over the number of samples of the sample's class."""
    return 1 / torch.bincount(labels)[labels]


def cholesky_factors(covariances: Tensor, ridge: float) -> Tensor:
    """Lower factors L of the last two dimensions, L L' = covariance + ridge I, in float32.

    If the variances are so large that rounding may exceed the ridge, it is larger: `ROUNDING` times their mean.
    """
    variance = covariances.diagonal(dim1=-2, dim2=-1).mean(-1)
    eye = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
    factors: Tensor = torch.linalg.cholesky(covariances + (ROUNDING * variance).clamp(min=ridge)[..., None, None] * eye)
    return factors.float()


def class_gaussians(
    features: Tensor, labels: Tensor, classes: Sequence[int], ridge: float = JITTER
) -> tuple[Tensor, Tensor]:
    """Means [C, d] and lower factors L [C, d, d] of the classes, L L' = unbiased covariance + ridge I.

    The covariance of a class with one sample is the ridge alone. Computed in float64, returned in float32.
    """
    means, factors = [], []
    for label in classes:
        samples = features[labels == label].double()
        centered = samples - samples.mean(0)
        means.append(samples.mean(0).float())
        factors.append(cholesky_factors(centered.T @ centered / max(len(samples) - 1, 1), ridge))
    return torch.stack(means), torch.stack(factors)


def draw(means: Tensor, factors: Tensor, classes: Tensor, generator: torch.Generator | None, each: int = 1) -> Tensor:
    """`each` samples of each of the given classes, mean_c + L_c z, class by class; classes may repeat.

    One batch of matrix products over the classes as given, so shapes do not depend on values.
    """
    width = means.shape[1]
    z = torch.randn(len(classes), width, each, generator=generator, device=means.device, dtype=means.dtype)
    spread = torch.bmm(factors.index_select(0, classes), z).transpose(1, 2)
    return (means.index_select(0, classes)[:, None, :] + spread).flatten(0, 1)


class ClassStatistics:
    """The mean and the covariance of every class seen so far. Labels count from 0 in the order of the classes.

    Features may have any floating-point type; statistics and draws are float32. The state has d + d (d + 1) / 2 numbers
    per class, the object d + d². 1e-5 is added to variances (`JITTER`): scale up features whose variances are not well
    above it. If a class has fewer images than features, its draws stay in the space that its images span.
    """

    means: Tensor  # [C, d]
    factors: Tensor  # [C, d, d], lower Cholesky factors of the covariances
    shift: Tensor  # mean length of the last displacement of the means, relative to their norm

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.means = torch.zeros(0, 0, device=device)
        self.factors = torch.zeros(0, 0, 0, device=device)
        self.shift = torch.zeros((), device=device)

    def __len__(self) -> int:
        return len(self.means)

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add the classes after those known, from features of all their images."""
        labels = self._check(labels, features)
        first, classes = len(self), labels.unique().tolist()
        if not classes or classes != list(range(first, first + len(classes))):
            raise ValueError(f"expected the labels {first}, {first + 1}, ... of new classes, got {classes[:10]}")
        means, factors = class_gaussians(features, labels, classes)
        if first:
            means, factors = torch.cat([self.means, means]), torch.cat([self.factors, factors])
        self.means, self.factors = means, factors

    @torch.no_grad()
    def move(self, before: Tensor, after: Tensor, labels: Tensor, ridge: float = 0.01) -> None:
        """Let the statistics follow the features, which are those of the same images before and after a training.

        Compute both in eval mode and without random augmentation, as for `add`.
        A ridge regression, every class with the same weight, gives the displacement of a feature as an affine function
        of the feature. It is applied to means and covariances. `ridge`: of the linear part, relative to the variance.
        Without any class yet, nothing is done.
        """
        if not len(self):
            return
        labels = self._check(labels, before, after)
        if not len(labels) or not 0 <= ridge < math.inf:
            raise ValueError(f"expected samples and a finite ridge from 0 up, got {len(labels)} and ridge={ridge}")
        moves = fit_displacement(before, after, class_weights(labels), ridge)
        moved = []
        for chunk in self.factors.split(self._chunk()):
            factors = chunk.double()  # before the product, whose rounding may exceed JITTER
            moved.append(cholesky_factors(moves.covariances(factors @ factors.mT), JITTER))
        shift = moves(self.means.double())
        norm = self.means.norm(dim=1).mean().clamp(min=torch.finfo(torch.float32).tiny)
        self.shift = (shift.norm(dim=1).mean() / norm).float()
        self.means, self.factors = (self.means + shift).to(self.means), torch.cat(moved)

    def _chunk(self) -> int:
        """Number of matrices [d, d] that make a temporary tensor of at most `CHUNK` numbers."""
        return max(CHUNK // self.means.shape[1] ** 2, 1)

    def _check(self, labels: Tensor, *features: Tensor) -> Tensor:
        """The labels as int64; ValueError if the arguments do not fit."""
        width = self.means.shape[1] if len(self) else features[0].shape[-1]
        shapes = [tuple(values.shape) for values in features]
        if labels.dim() != 1 or any(shape != (len(labels), width) for shape in shapes):
            raise ValueError(
                f"expected one row of {width} features per label, got shapes {shapes} for {tuple(labels.shape)} labels"
            )
        if labels.is_floating_point() or bool((labels < 0).any()):
            raise ValueError(f"expected labels that are integers from 0 up, got {labels.dtype}, {labels[:10].tolist()}")
        if not all(bool(values.isfinite().all()) for values in features):
            raise ValueError("the features have numbers that are not finite")
        return labels.long()

    def sample(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Features and labels of `count` draws, every class equally likely."""
        if not len(self):
            raise ValueError("there are no classes to draw from yet: call add(features, labels) first")
        labels = torch.randint(len(self), (count,), generator=generator, device=self.means.device)
        chunks = labels.split(self._chunk())  # every draw copies the factor of its class
        return torch.cat([draw(self.means, self.factors, chunk, generator) for chunk in chunks]), labels

    def state_dict(self) -> dict[str, Tensor]:
        """Of the factors the lower triangles: d + d (d + 1) / 2 numbers per class, and one more for all."""
        rows, columns = torch.tril_indices(*self.factors.shape[1:])
        return {"means": self.means, "factors": self.factors[:, rows, columns], "shift": self.shift}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        device = self.means.device
        means, packed, self.shift = (state[name].to(device, copy=True) for name in ("means", "factors", "shift"))
        classes, width = means.shape
        rows, columns = torch.tril_indices(width, width)
        self.means, self.factors = means, packed.new_zeros(classes, width, width)
        self.factors[:, rows, columns] = packed
