"""Class statistics that follow the features: the regression, the draws, and a state that can be saved."""

from __future__ import annotations

import math

import pytest
import torch

from incvec import ClassStatistics, class_statistics
from incvec.class_statistics import JITTER, class_gaussians, class_weights, draw, fit_displacement
from incvec.data.gaussians import FeatureSource, GaussianSource
from tests.methods.tools import seeded


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
    assert torch.equal(other.factors, statistics.factors)
    other.add(features[:5] + 1, torch.full((5,), 2))
    assert len(statistics) == 2, "a loaded state shares no tensors"


def test_a_class_takes_the_numbers_of_its_mean_and_of_a_symmetric_matrix() -> None:
    """What docs/successor.md counts as the memory of a class."""
    statistics, empty = ClassStatistics(), ClassStatistics()
    empty.load_state_dict(statistics.state_dict())
    assert len(empty) == 0
    statistics.add(torch.randn(12, 5), torch.arange(12) % 3)
    state = statistics.state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == 3 * (5 + 5 * 6 // 2) + 1


def test_labels_continue_those_known() -> None:
    features, labels = two_classes(5)
    statistics = ClassStatistics()
    statistics.add(features, labels)
    with pytest.raises(ValueError, match=r"expected the labels 2, 3, \.\.\. of new classes, got \[0, 1\]"):
        statistics.add(features, labels)


def test_class_gaussians() -> None:
    features, labels = torch.randn(40, 3, generator=seeded()), torch.arange(40) % 4
    means, factors = class_gaussians(features, labels, range(1, 3), ridge=0.01)
    for row, label in enumerate((1, 2)):
        own = features[labels == label].double()
        torch.testing.assert_close(means[row].double(), own.mean(0), rtol=1e-5, atol=1e-6)
        wanted = torch.cov(own.T) + 0.01 * torch.eye(3)
        torch.testing.assert_close((factors[row] @ factors[row].T).double(), wanted.double(), rtol=1e-4, atol=1e-5)
    alone, ridge = class_gaussians(features[:1], labels[:1], range(1), ridge=0.04)
    torch.testing.assert_close(alone[0], features[0])
    torch.testing.assert_close(ridge[0], 0.2 * torch.eye(3))


def test_draws_have_the_mean_and_covariance_of_their_class() -> None:
    means, factors = torch.tensor([[5.0, 0.0], [-3.0, 1.0]]), torch.tensor([[[1.0, 0], [0.5, 2]], [[0.1, 0], [0, 0.1]]])
    batch = GaussianSource(means, factors, torch.tensor([1.0, 2.0])).fetch(torch.tensor([1, 0] * 4000), seeded())
    assert torch.equal(batch.labels, torch.tensor([1, 0] * 4000))
    torch.testing.assert_close(batch.images[1::2].mean(0), means[0], rtol=0, atol=0.1)
    torch.testing.assert_close(batch.images[::2].mean(0), 2 * means[1], rtol=0, atol=0.01)
    torch.testing.assert_close(torch.cov(batch.images[1::2].T), factors[0] @ factors[0].T, rtol=0, atol=0.2)
    several = draw(means, factors, torch.tensor([1, 0]), seeded(), each=3)
    assert several.shape == (6, 2)
    assert (several[:3, 0] < 0).all()
    assert (several[3:, 0] > 0).all()
    unaligned = FeatureSource(means, torch.tensor([7, 8])).fetch(torch.tensor([1, 1, 0]), None)
    assert unaligned.images.tolist() == [[-3, 1], [-3, 1], [5, 0]]
    assert unaligned.labels.tolist() == [8, 8, 7]


def test_features_that_do_not_fit_are_refused() -> None:
    x, y = two_classes(each=10)
    statistics = ClassStatistics()
    statistics.add(x, y)
    state = {name: value.clone() for name, value in statistics.state_dict().items()}
    width = x.shape[1]
    for features, labels in ((x[:, 1:], y + 2), (x[:, :, None], y + 2), (x, y[:5] + 2), (x, y[:, None] + 2)):
        with pytest.raises(ValueError, match=f"expected one row of {width} features per label"):
            statistics.add(features, labels)
        with pytest.raises(ValueError, match=f"expected one row of {width} features per label"):
            statistics.move(x, features, labels)
    with pytest.raises(ValueError, match="not finite"):
        statistics.add(x * math.nan, y + 2)
    with pytest.raises(ValueError, match="not finite"):
        statistics.move(x, x * math.inf, y)
    with pytest.raises(ValueError, match="expected samples"):
        statistics.move(x[:0], x[:0], y[:0])
    with pytest.raises(ValueError, match="ridge=inf"):
        statistics.move(x, x, y, ridge=math.inf)
    for name, value in statistics.state_dict().items():
        assert torch.equal(value, state[name])


def test_first_task_of_a_loop() -> None:
    """The loop of the module's docstring: nothing to move yet."""
    features, labels = two_classes(5)
    statistics = ClassStatistics()
    with pytest.raises(ValueError, match=r"add\(features, labels\)"):
        statistics.sample(3)
    statistics.move(features, features + 1, labels)
    with pytest.raises(ValueError, match="labels 0, 1"):
        statistics.add(features[:0], labels[:0])
    statistics.add(features, labels)
    assert len(statistics) == 2


def test_a_loaded_state_is_on_the_device_of_the_object() -> None:
    statistics, other = ClassStatistics(), ClassStatistics("meta")
    statistics.add(*two_classes(5))
    other.load_state_dict(statistics.state_dict())
    assert other.means.device.type == "meta"


# Numbers that are hard: few samples, large, small and half-precision features ------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("each", [1, 2, 30])
def test_covariances_have_factors_at_any_scale_with_few_samples(scale: float, each: int) -> None:
    """One class, and fewer samples than features: the covariance is singular, and rounding grows with the features."""
    before = scale * torch.randn(each, 40, generator=seeded(1))
    after = 1.5 * before + scale
    labels = torch.zeros(each, dtype=torch.int64)
    statistics = ClassStatistics()
    statistics.add(before, labels)
    for start, end in ((before, after), (after, before)):
        statistics.move(start, end, labels)
    drawn, _ = statistics.sample(50, seeded())
    assert drawn.isfinite().all()
    spread = 0 if each == 1 else torch.cov(before.T.double()).diagonal().sum().sqrt()
    assert (statistics.means - before.mean(0)).norm() < 1e-4 * before.norm() + 0.3 * spread
    assert statistics.factors.norm() < 2 * spread + 0.1


def test_without_a_ridge_few_samples_give_the_solution_of_least_norm() -> None:
    before, points = torch.randn(6, 30, generator=seeded()), torch.randn(4, 30, generator=seeded(1)).double()
    after = before + 0.1 * torch.randn(6, 30, generator=seeded(2))
    moves = fit_displacement(before, after, torch.ones(6).double(), ridge=0.0)
    x, moved = before.double() - before.double().mean(0), (after - before).double()
    expected = moved.mean(0) + (points - before.double().mean(0)) @ torch.linalg.pinv(x) @ (moved - moved.mean(0))
    torch.testing.assert_close(moves(points), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 6e4), (torch.bfloat16, 1e30)])
def test_displacements_of_half_precision_features(dtype: torch.dtype, largest: float) -> None:
    """The difference of two numbers may be too large for their type, or have more digits than fit."""
    before = (largest * torch.tensor([[-1.0, 1 / 3], [1.0, 1.0]])).to(dtype)
    after = (largest * torch.tensor([[1.0, -1.0], [1.0, 0.7]])).to(dtype)
    moves = fit_displacement(before, after, torch.ones(2), ridge=1e12)
    torch.testing.assert_close(moves.offset, (after.double() - before.double()).mean(0), rtol=1e-6, atol=0)


def test_features_of_zeros() -> None:
    zeros, labels = torch.zeros(4, 3), torch.tensor([0, 0, 1, 1])
    statistics = ClassStatistics()
    statistics.add(zeros, labels)
    statistics.move(zeros, zeros, labels)
    assert float(statistics.shift) == 0
    torch.testing.assert_close(statistics.factors[0], (2 * JITTER) ** 0.5 * torch.eye(3))


def test_a_move_that_fails_changes_nothing() -> None:
    features, labels = two_classes(5)
    statistics = ClassStatistics()
    statistics.add(features, labels)
    state = {name: value.clone() for name, value in statistics.state_dict().items()}
    huge = 1e300 * features.double()  # finite, but its square is not
    with pytest.raises(RuntimeError):
        statistics.move(huge, huge, labels)
    for name, value in statistics.state_dict().items():
        assert torch.equal(value, state[name])


def test_labels_of_any_integer_type() -> None:
    features, labels = two_classes(5)
    expected = ClassStatistics()
    expected.add(features, labels)
    expected.move(features, features + 1, labels)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        statistics = ClassStatistics()
        statistics.add(features, labels.to(dtype))
        statistics.move(features, features + 1, labels.to(dtype))
        assert torch.equal(statistics.means, expected.means)
    for wrong in (labels.float(), labels - 1):
        with pytest.raises(ValueError, match="expected labels that are integers from 0 up"):
            expected.move(features, features, wrong)


def test_temporary_tensors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw copies the factor of its class: with 2,048 features, 128 draws at once would take 2 GB."""
    features, labels = two_classes()
    whole, parts = ClassStatistics(), ClassStatistics()
    for statistics, numbers in ((whole, class_statistics.CHUNK), (parts, 4)):
        monkeypatch.setattr(class_statistics, "CHUNK", numbers)
        statistics.add(features, labels)
        statistics.move(features, 1.1 * features, labels)
    torch.testing.assert_close(parts.factors, whole.factors)
    assert torch.equal(parts.means, whole.means)
    sizes: list[int] = []

    def recorded(*arguments: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        sizes.append(len(arguments[2]))
        return draw(*arguments, **rest)

    monkeypatch.setattr(class_statistics, "draw", recorded)
    drawn, classes = parts.sample(6, seeded())
    assert sizes == [1] * 6
    nearest = torch.cdist(drawn, parts.means).argmin(1)
    assert torch.equal(nearest, classes)
    assert parts.sample(0)[0].shape == (0, 2)
