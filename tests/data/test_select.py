"""Herding, k-means and class means compared with plain loops over one class at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from incvec.data import select
from incvec.data.select import class_means, herd, kmeans
from incvec.errors import DataError, TrainingError


def herd_one_class(features: np.ndarray, m: int, limit: int = 1000) -> list[int]:
    """iCaRL's loop, in numpy; rows still missing after 1,000 iterations are the best of the rest."""
    d = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    mu = d.mean(0)
    w, chosen = mu.copy(), []
    for _ in range(limit):
        if len(chosen) == m:
            return chosen
        j = int(np.argmax(d @ w))
        if j not in chosen:
            chosen.append(j)
        w = w + mu - d[j]
    while len(chosen) < m:
        scores = d @ w
        scores[chosen] = -np.inf
        j = int(np.argmax(scores))
        chosen.append(j)
        w = w + mu - d[j]
    return chosen


def uneven_classes(seed: int, d: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes of 7, 12 and 30 rows, shuffled together, each about a center of its own."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0] * 7 + [1] * 12 + [2] * 30)[torch.randperm(49, generator=generator)]
    centers = torch.randn(3, d, generator=generator)
    return centers[labels] + 0.7 * torch.randn(49, d, generator=generator), labels


def assert_equals_plain_loop(m: int, d: int = 5, zeros: bool = False, limit: int = 1000) -> None:
    for seed in range(20):
        features, labels = uneven_classes(seed, d)
        if zeros:
            features[::9] = 0
        classes = [2, 0, 1]
        chosen = herd(features, labels, classes, m)
        assert chosen.shape == (3, m)
        for row, c in zip(chosen.tolist(), classes, strict=True):
            positions = torch.nonzero(labels == c).flatten().numpy()
            assert row == positions[herd_one_class(features[positions].double().numpy(), m, limit)].tolist()


def test_herding_equals_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two dimensions the best row repeats and has to be skipped; zero features stay zero after normalization."""
    for chunk in (1, 2, 64):
        monkeypatch.setattr(select, "CHUNK", chunk)
        assert_equals_plain_loop(6)
    assert_equals_plain_loop(7, d=2)
    assert_equals_plain_loop(6, zeros=True)


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_the_limit_of_iterations_is_obeyed(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """After the limit, rows are the best not yet chosen, even with negative scores."""
    monkeypatch.setattr(select, "HERDING_LIMIT", limit)
    assert_equals_plain_loop(7, d=2, limit=limit)


def test_rows_that_are_never_the_argmax_are_added_in_order() -> None:
    """Identical features: the argmax is always the first row."""
    features = torch.ones(6, 3)
    labels = torch.tensor([1, 0, 1, 1, 0, 1])
    assert herd(features, labels, [1], 3).tolist() == [[0, 2, 3]]
    assert herd(features, labels, [1, 0], 2).tolist() == [[0, 2], [1, 4]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 7))
def test_herded_rows_are_distinct_and_belong_to_their_class(seed: int, m: int) -> None:
    features, labels = uneven_classes(seed)
    chosen = herd(features, labels, range(3), m)
    assert torch.equal(labels[chosen], torch.arange(3)[:, None].expand(3, m))
    assert all(len(set(row)) == m for row in chosen.tolist())


def test_a_longer_selection_begins_with_the_shorter_one() -> None:
    features, labels = uneven_classes(4)
    assert torch.equal(herd(features, labels, [1, 2], 9)[:, :4], herd(features, labels, [1, 2], 4))


def test_fewer_images_than_exemplars_are_refused() -> None:
    features, labels = uneven_classes(0)
    with pytest.raises(DataError, match=r"class 0 has 7 image\(s\), 8 are needed"):
        herd(features, labels, [2, 0], 8)
    with pytest.raises(DataError, match=r"class 5 has 0 image\(s\)"):
        herd(features, labels, [5], 1)
    assert herd(features, labels, [0], 7).sort(1).values.tolist() == [torch.nonzero(labels == 0).flatten().tolist()]
    assert herd(features, labels, [0, 1], 0).shape == (2, 0)


def test_non_finite_features_are_refused() -> None:
    features, labels = uneven_classes(0)
    features[3, 1] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        herd(features, labels, [0], 2)


def test_class_means() -> None:
    features, labels = uneven_classes(1)
    means = class_means(features, labels, 3)
    assert means.dtype == features.dtype
    for c in range(3):
        assert torch.allclose(means[c], features[labels == c].mean(0), atol=1e-6)
    with pytest.raises(DataError, match="class 3 has 0"):
        class_means(features, labels, 4)


def lloyd(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    for _ in range(100):
        near = ((points[:, None] - centers[None]) ** 2).sum(2).argmin(1)
        centers = np.stack([points[near == j].mean(0) if (near == j).any() else c for j, c in enumerate(centers)])
    return centers


def inertia(points: np.ndarray, centers: np.ndarray) -> float:
    return float(((points[:, None] - centers[None]) ** 2).sum(2).min(1).sum())


def test_kmeans_finds_separated_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = 10 * torch.randn(3, 4, 6, generator=generator)
    points = (truth[:, :, None] + 0.01 * torch.randn(3, 4, 15, 6, generator=generator)).flatten(1, 2)
    centers = kmeans(points, 4, generator)
    expected = points.view(3, 4, 15, 6).mean(2)
    distance = torch.cdist(centers, expected)
    assert distance.amin(2).max() < 1e-4
    assert (distance.argmin(2).sort(1).values == torch.arange(4)).all()


def test_kmeans_converges_to_an_inertia_like_sklearns() -> None:
    from sklearn.cluster import KMeans

    points = torch.randn(2, 60, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    centers = kmeans(points, 5, torch.Generator().manual_seed(2), restarts=100)
    for x, c in zip(points.numpy(), centers.numpy(), strict=True):
        assert np.allclose(lloyd(x, c), c, atol=1e-10)
        theirs = KMeans(5, n_init=20, random_state=0).fit(x)
        assert inertia(x, c) <= theirs.inertia_ * 1.03


def test_kmeans_plus_plus_draws_by_squared_distance() -> None:
    """Points 0, 1 and 3 on a line: the second center is drawn in proportion to its squared distance."""
    points = torch.tensor([[[0.0], [1.0], [3.0]]]).expand(6000, 3, 1)
    starts = kmeans(points, 2, torch.Generator().manual_seed(0), restarts=1, iterations=0)[:, :, 0]
    for first, second, share in ((0, 3, 9 / 10), (1, 3, 4 / 5), (3, 0, 9 / 13)):
        rows = starts[starts[:, 0] == first]
        assert 1850 < len(rows) < 2150
        assert abs((rows[:, 1] == second).float().mean() - share) < 0.035


def test_kmeans_returns_the_best_restart() -> None:
    points = torch.randn(1, 80, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    one = [
        inertia(points[0].numpy(), kmeans(points, 8, torch.Generator().manual_seed(s), restarts=1)[0].numpy())
        for s in range(8)
    ]
    many = inertia(points[0].numpy(), kmeans(points, 8, torch.Generator().manual_seed(0), restarts=30)[0].numpy())
    assert max(one) > min(one)
    assert many <= min(one) * 1.01


def test_kmeans_depends_on_its_generator_alone() -> None:
    points = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(4))
    before = torch.get_rng_state()
    a, b, c = (kmeans(points, 6, torch.Generator().manual_seed(s), restarts=1) for s in (7, 7, 8))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())
    assert a.dtype == points.dtype


def test_kmeans_ignores_masked_points() -> None:
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(2, 20, 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(20) < torch.tensor([[12], [20]])
    wild = torch.where(mask[:, :, None], points, 1e6)
    wild[0, 19] = torch.nan
    alone = kmeans(points[:1, :12], 3, torch.Generator().manual_seed(0), restarts=30)
    masked = kmeans(wild, 3, torch.Generator().manual_seed(0), mask=mask, restarts=30)
    x = points[0, :12].numpy()
    assert masked.abs().max() < 10
    assert np.isclose(inertia(x, masked[0].numpy()), inertia(x, alone[0].numpy()))


def test_kmeans_with_fewer_different_points_than_centers() -> None:
    points = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]])
    centers = kmeans(points, 3, torch.Generator().manual_seed(0))[0]
    assert {tuple(c) for c in centers.tolist()} == {(0.0, 0.0), (3.0, 4.0)}
    with pytest.raises(ValueError, match="points in every set"):
        kmeans(points, 2, torch.Generator(), mask=torch.zeros(1, 4, dtype=torch.bool))
