"""LDA against scikit-learn's, and learning class by class against learning all at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from incvec.calibration import fit_temperature
from incvec.data import Dataset
from incvec.methods.common import extract_features
from incvec.methods.lda import LDA, discriminants, signed_power, stage_features
from incvec.nets import Features
from tests.methods.tools import randn, trained


def test_discriminants_are_those_of_sklearn() -> None:
    labels = torch.arange(3).repeat_interleave(20)
    samples = randn(60, 5) @ randn(5, 5, seed=1) + 2 * randn(3, 5, seed=2)[labels]
    means = torch.stack([samples[labels == c].mean(0) for c in range(3)])
    centered = samples - means[labels]
    weight, bias = discriminants(means, centered.T @ centered, torch.tensor(60), 0.3)
    expected = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit(samples.numpy(), labels.numpy())
    torch.testing.assert_close(weight, torch.from_numpy(expected.coef_))
    torch.testing.assert_close(bias, torch.from_numpy(expected.intercept_) + torch.tensor(3.0).double().log())


def test_parts_of_the_features_are_shrunk_by_their_own_scale() -> None:
    """As scikit-learn does with features whose parts have been divided by their deviations within classes."""
    labels, parts = torch.arange(3).repeat_interleave(20), (slice(0, 2), slice(2, 5))
    samples = randn(60, 5) @ randn(5, 5, seed=1) + 2 * randn(3, 5, seed=2)[labels]
    samples[:, 2:] *= 100
    means = torch.stack([samples[labels == c].mean(0) for c in range(3)])
    centered = samples - means[labels]
    scale = torch.cat([centered[:, part].square().mean().sqrt().expand(part.stop - part.start) for part in parts])
    weight, bias = discriminants(means, centered.T @ centered, torch.tensor(60), 0.3, [2, 3])
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit((samples / scale).numpy(), labels.numpy())
    torch.testing.assert_close(weight, torch.from_numpy(model.coef_) / scale)
    torch.testing.assert_close(bias, torch.from_numpy(model.intercept_) + torch.tensor(3.0).double().log())


def test_stage_features_are_means_and_deviations_of_earlier_maps() -> None:
    first, last, features = randn(2, 3, 4, 5).float(), randn(2, 6, 2, 2).float(), randn(2, 6).float()
    found = stage_features(Features((first, last), features))
    expected = [features.numpy(), first.numpy().mean((2, 3)), first.numpy().std((2, 3))]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_one_image_per_class_is_nearest_mean() -> None:
    means = randn(4, 3)
    weight, bias = discriminants(means, torch.zeros(3, 3), torch.tensor(4), 0.3)
    points = randn(50, 3, seed=1)
    assert torch.equal((points @ weight.T + bias).argmax(1), torch.cdist(points, means).argmin(1))


def test_signed_power() -> None:
    torch.testing.assert_close(signed_power(torch.tensor([4.0, -9.0, 0.0]), 0.5), torch.tensor([2.0, -3.0, 0.0]))


@pytest.mark.parametrize("features", ["last", "stages"])
def test_tasks_and_parts_of_classes_add_up(features: str, few: Dataset, tmp_path: Path) -> None:
    """After three tasks, the statistics are those of all images; so they are if images arrive in two parts."""
    method = trained(LDA, few, tmp_path, adapt_epochs=1, features=features)
    rows = method.rows_of(range(6))
    z = signed_power(extract_features(method.model, method.world, rows), 0.5).double()
    labels = method.world.train.labels[rows]
    means = torch.stack([z[labels == c].mean(0) for c in range(6)])
    centered = z - means[labels]
    for _ in range(2):
        assert method.store["counts"].tolist() == torch.bincount(labels).tolist()
        torch.testing.assert_close(method.store["prototypes"].double(), means, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(method.store["scatter"].double(), centered.T @ centered, rtol=1e-4, atol=1e-3)
        widths = [8, 4, 4] if features == "stages" else None  # of the last stage, then mean and deviation of the first
        weight, _ = discriminants(means, centered.T @ centered, torch.tensor(len(rows)), 0.5, widths)
        found = method.model.head.weight.double()  # divided by a temperature
        torch.testing.assert_close(found / found.norm(), weight / weight.norm(), rtol=1e-3, atol=1e-3)
        method.store = {}
        for part in (rows[::3], rows[1::3], rows[2::3]):
            method.update(part, 6)


def test_scores_are_calibrated_on_samples_held_out(few: Dataset, tmp_path: Path) -> None:
    """The temperature is that of photos scored by the discriminants of the others, a fourth of each class at a time."""
    method = trained(LDA, few, tmp_path, adapt_epochs=1)
    rows, store = method.rows_of(range(6)), method.store
    z = signed_power(extract_features(method.model, method.world, rows), 0.5).double()
    labels = method.world.train.labels[rows]
    method.store = {}
    method.update(rows, 6)
    position = torch.tensor([labels[:i].tolist().count(label) for i, label in enumerate(labels.tolist())])
    scores = torch.zeros(len(z), 6, dtype=torch.float64)
    for fold in range(4):
        x, y = z[position % 4 != fold], labels[position % 4 != fold]
        means = torch.stack([x[y == c].mean(0) for c in range(6)])
        centered = x - means[y]
        weight, bias = discriminants(means, centered.T @ centered, torch.tensor(len(x)), 0.5)
        scores[position % 4 == fold] = z[position % 4 == fold] @ weight.T + bias
    temperature = fit_temperature(scores, labels, 1.0)
    assert temperature != 1.0
    means = store["prototypes"].double()
    weight, _ = discriminants(means, store["scatter"], torch.tensor(len(z)), 0.5)
    torch.testing.assert_close(method.model.head.weight.double(), weight / temperature, rtol=1e-3, atol=1e-2)


def test_single_images_are_never_held_out(few: Dataset, tmp_path: Path) -> None:
    """Of new classes; the score of a class without any statistics would mean nothing."""
    method = trained(LDA, few, tmp_path, adapt_epochs=1)
    method.store = {}
    method.update(torch.stack([method.rows_of([c])[0] for c in range(6)]), 6)
    assert torch.isfinite(method.model.head.weight).all()
    assert method.store["counts"].tolist() == [1.0] * 6


def test_backbone_is_trained_in_the_first_task_only(few: Dataset, tmp_path: Path) -> None:
    method = trained(LDA, few, tmp_path, adapt_epochs=2)
    assert [len(method.stages(task)) for task in method.world.tasks] == [1, 0, 0]
    assert not list(method.auxiliary.parameters())
    frozen = trained(LDA, few, tmp_path / "frozen", adapt_epochs=0)
    assert [len(frozen.stages(task)) for task in frozen.world.tasks] == [0, 0, 0]
