"""Class statistics that follow the features: the regression, the draws, and a state that can be saved."""

from __future__ import annotations

import math

import pytest
import torch

from incvec import ClassStatistics
from incvec.class_statistics import JITTER, class_weights, fit_displacement


def test_an_affine_displacement_is_found_exactly() -> None:
    before = torch.randn(50, 4, dtype=torch.float64)
    slope, offset = 0.1 * torch.randn(4, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    after = before + before @ slope + offset
    moves = fit_displacement(before, after, torch.ones(50), ridge=0.0)
    points = torch.randn(3, 4, dtype=torch.float64)
    assert torch.allclose(moves(points), points @ slope + offset, atol=1e-8)
    assert moves.noise.abs().max() < 1e-12
    turn = torch.eye(4, dtype=torch.float64) + slope
    covariance = torch.cov(before.T)
    assert torch.allclose(moves.covariances(covariance), turn.T @ covariance @ turn, atol=1e-8)


def test_a_large_ridge_leaves_a_translation_and_its_noise() -> None:
    before = torch.randn(200, 3, dtype=torch.float64)
    after = 2 * before + 1
    moves = fit_displacement(before, after, torch.ones(200), ridge=1e9)
    assert torch.allclose(moves(torch.zeros(1, 3).double()), (after - before).mean(0), atol=1e-6)
    assert torch.allclose(moves.noise, torch.cov(before.T, correction=0), atol=1e-6)


def test_every_class_has_the_same_weight() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    weights = class_weights(labels)
    assert torch.allclose(weights, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))
    before = torch.zeros(4, 1)
    moves = fit_displacement(before, torch.tensor([[1.0], [1.0], [1.0], [3.0]]), weights, 1.0)
    assert math.isclose(float(moves(torch.zeros(1, 1).double())), 2.0, rel_tol=1e-6)


def two_classes(each: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(2).repeat_interleave(each)
    spread = torch.tensor([[1.0, 0.0], [0.8, 0.3]])
    features = torch.randn(2 * each, 2, generator=generator) @ spread.T + 4.0 * labels[:, None]
    return features, labels


def test_statistics_follow_an_affine_change_of_the_features() -> None:
    """Of both classes, although only images of class 0 are at hand."""
    features, labels = two_classes()
    turn, offset = torch.tensor([[1.1, 0.2], [-0.1, 0.9]]), torch.tensor([1.0, -2.0])
    moved = features @ turn.T + offset
    carried, known = ClassStatistics(), ClassStatistics()
    carried.add(features, labels)
    known.add(moved, labels)
    one = labels == 0
    carried.move(features[one], moved[one], labels[one], ridge=0.0)
    assert torch.allclose(carried.means, known.means, atol=1e-3)
    difference = carried.factors @ carried.factors.mT - known.factors @ known.factors.mT
    assert difference.abs().max() < 1e-3
    before, after = features.view(2, -1, 2).mean(1), moved.view(2, -1, 2).mean(1)
    expected = (after - before).norm(dim=1).mean() / before.norm(dim=1).mean()
    assert math.isclose(float(carried.shift), float(expected), rel_tol=1e-3)


def test_draws_have_the_statistics_of_their_class() -> None:
    features, labels = two_classes()
    statistics = ClassStatistics()
    statistics.add(features, labels)
    drawn, classes = statistics.sample(40_000, torch.Generator().manual_seed(1))
    for label in range(2):
        own = drawn[classes == label]
        assert abs(len(own) - 20_000) < 500
        assert torch.allclose(own.mean(0), statistics.means[label], atol=0.03)
        covariance = torch.cov(features[labels == label].T) + JITTER * torch.eye(2)
        assert torch.allclose(torch.cov(own.T), covariance, atol=0.05)


def test_state_is_restored() -> None:
    features, labels = two_classes(20)
    statistics, other = ClassStatistics(), ClassStatistics()
    statistics.add(features, labels)
    other.load_state_dict(statistics.state_dict())
    assert len(other) == 2
    assert torch.equal(other.means, statistics.means)
    other.add(features[:5] + 1, torch.full((5,), 2))
    assert len(statistics) == 2, "a loaded state shares no tensors"


def test_labels_continue_those_known() -> None:
    features, labels = two_classes(5)
    statistics = ClassStatistics()
    statistics.add(features, labels)
    with pytest.raises(ValueError, match=r"expected the labels 2, 3, \.\.\. of new classes, got \[0, 1\]"):
        statistics.add(features, labels)
