"""Selection of images by their features: herding, k-means, class means.

All classes are processed at once, their rows in one padded array with a mask. Arithmetic is in float64, so that the
choice does not depend on the rounding of a batched product. These functions synchronize with the device: they run
between stages, never inside a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from incvec.errors import DataError, TrainingError

CHUNK = 64  # classes per padded array: bounds the memory for padding and float64
HERDING_LIMIT = 1000  # iterations, as in LUCIR and iCaRL
CHECK_EVERY = 16  # iterations between two checks for completion; the result does not depend on it


@torch.no_grad()
def herd(features: Tensor, labels: Tensor, classes: Sequence[int], m: int) -> Tensor:
    """Herding as implemented by iCaRL and LUCIR: the rows of `m` exemplars of each class, best first.

    With D the L2-normalized features of a class, mu their mean and w = mu at first, repeat: j = argmax_i <w, D_i>;
    append j unless it was chosen before; in either case w <- w + mu - D_j. Stop at `m` rows or 1,000 iterations.
    If fewer rows are chosen by then, the argmax is taken over those not yet chosen. Ties go to the first row.

    `features` [n, d], `labels` [n]; the result is int64 [len(classes), m], positions in `features`.
    """
    if not bool(torch.isfinite(features).all()):
        raise TrainingError("exemplars cannot be selected: some features are not finite. Has the training diverged?")
    if m == 0 or len(classes) == 0:
        return torch.empty(len(classes), m, dtype=torch.int64, device=features.device)
    chosen = []
    for rows, mask in _padded_rows(labels, classes, m, "for its exemplars: lower their number or add images"):
        padded = F.normalize(features[rows].double(), dim=2) * mask[:, :, None]
        mean = padded.sum(1) / mask.sum(1, keepdim=True)
        chosen.append(rows.gather(1, _herd(padded, mask, mean, m)))
    return torch.cat(chosen)


def _herd(features: Tensor, mask: Tensor, mean: Tensor, m: int) -> Tensor:
    k, n, _ = features.shape
    classes = torch.arange(k, device=features.device)
    rank = torch.full((k, n), m, device=features.device)  # m: not chosen
    count = torch.zeros(k, dtype=torch.int64, device=features.device)
    w = mean.clone()

    def step(allowed: Tensor) -> None:
        scores = torch.bmm(features, w[:, :, None])[:, :, 0].masked_fill(~allowed, -torch.inf)
        j = scores.argmax(1)
        new = (rank[classes, j] == m) & (count < m)
        rank[classes, j] = torch.where(new, count, rank[classes, j])
        count.add_(new)
        w.add_(mean - features[classes, j])

    for iteration in range(HERDING_LIMIT):
        if iteration % CHECK_EVERY == 0 and bool((count >= m).all()):
            break
        step(mask)
    if bool((count < m).any()):
        for _ in range(m):
            step(mask & (rank == m))
    return rank.argsort(dim=1, stable=True)[:, :m]


def _padded_rows(labels: Tensor, classes: Sequence[int], at_least: int, why: str) -> Iterator[tuple[Tensor, Tensor]]:
    """For up to `CHUNK` classes at a time: their rows [k, longest] in ascending order, and the mask."""
    order = labels.argsort(stable=True)
    class_labels = torch.as_tensor(list(classes), dtype=labels.dtype, device=labels.device)
    ascending = labels[order]
    first = torch.searchsorted(ascending, class_labels)
    counts = torch.searchsorted(ascending, class_labels, right=True) - first
    for label, count in zip(classes, counts.tolist(), strict=True):
        if count < at_least:
            raise DataError(f"class {label} has {count} image(s), {at_least} are needed {why}")
    for at in range(0, len(classes), CHUNK):
        start, count = first[at : at + CHUNK, None], counts[at : at + CHUNK, None]
        column = torch.arange(int(count.max()), device=labels.device)
        mask = column < count
        yield order[torch.where(mask, start + column, start)], mask


@torch.no_grad()
def class_means(features: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """The mean feature of every class 0 .. n_classes - 1, [n_classes, d], without normalization."""
    if n_classes == 0:
        return features.new_empty(0, features.shape[1])
    means = [
        (features[rows].double() * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        for rows, mask in _padded_rows(labels, range(n_classes), 1, "for its mean")
    ]
    return torch.cat(means).to(features.dtype)


@torch.no_grad()
def kmeans(
    points: Tensor,
    k: int,
    generator: Generator,
    mask: Tensor | None = None,
    restarts: int = 10,
    iterations: int = 100,
) -> Tensor:
    """Lloyd's k-means on each of b sets of points: `points` [b, n, d] -> centers [b, k, d].

    Initialized by k-means++; the result is the best of `restarts` by inertia. `mask` [b, n] marks the real points if
    sets differ in size. A center that loses all its points does not move, and a set with fewer than k different points
    has repeated centers.
    """
    b, n, d = points.shape
    mask = torch.ones(b, n, dtype=torch.bool, device=points.device) if mask is None else mask
    if not bool(mask.any(1).all()) or k < 1 or restarts < 1:
        raise ValueError(f"k = {k}, {restarts} restarts: expected 1 or more, and points in every set")
    x = torch.where(mask[:, :, None], points.double(), 0.0)
    centers = _kmeans_plus_plus(x, mask, k, restarts, generator)
    nearest = torch.full((b, n, restarts), -1, device=points.device)
    for iteration in range(iterations):
        before, nearest = nearest, _distances(x, centers).argmin(3)
        if iteration % CHECK_EVERY == 0 and bool((before == nearest).all()):
            break
        members = (F.one_hot(nearest, k) * mask[:, :, None, None]).double().flatten(2)
        counts = members.sum(1).view(b, restarts, k, 1)
        sums = torch.bmm(members.mT, x).view(b, restarts, k, d)
        centers = torch.where(counts > 0, sums / counts.clamp(min=1), centers)
    inertia = (_distances(x, centers).amin(3) * mask[:, :, None]).sum(1)
    best = centers[torch.arange(b, device=points.device), inertia.argmin(1)]
    return best.to(points.dtype)


def _distances(x: Tensor, centers: Tensor) -> Tensor:
    """Squared distances of x [b, n, d] to centers [b, r, k, d]: [b, n, r, k]."""
    b, r, k, _ = centers.shape
    flat = centers.flatten(1, 2)
    squared = x.square().sum(2)[:, :, None] - 2 * torch.bmm(x, flat.mT) + flat.square().sum(2)[:, None, :]
    return squared.clamp(min=0).view(b, x.shape[1], r, k)


def _kmeans_plus_plus(x: Tensor, mask: Tensor, k: int, restarts: int, generator: Generator) -> Tensor:
    """Initial centers: each is a point drawn with probability proportional to its squared distance to the nearest."""
    b, n, d = x.shape
    rounding = 1e-12 * x.square().sum(2).amax(1)[:, None, None]
    uniform = mask.double()[:, None].expand(b, restarts, n)
    weights, centers = uniform, []
    distance = torch.full((b, restarts, n), torch.inf, dtype=x.dtype, device=x.device)
    for _ in range(k):
        drawn = torch.multinomial(weights.reshape(b * restarts, n), 1, generator=generator).view(b, restarts)
        center = x.gather(1, drawn[:, :, None].expand(b, restarts, d))
        centers.append(center)
        distance = torch.minimum(distance, _distances(x, center[:, :, None])[..., 0].mT)
        # The distance of a chosen point is 0 up to rounding: it must not be drawn again.
        weights = (distance * uniform).masked_fill(distance <= rounding, 0)
        weights = torch.where(weights.sum(2, keepdim=True) > 0, weights, uniform)
    return torch.stack(centers, 2)
