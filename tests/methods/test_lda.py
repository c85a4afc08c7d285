"""LDA against scikit-learn's, and learning class by class against learning all at once."""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from incvec.data import Dataset
from incvec.methods.common import extract_features
from incvec.methods.lda import LDA, discriminants, signed_power
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


def test_one_image_per_class_is_nearest_mean() -> None:
    means = randn(4, 3)
    weight, bias = discriminants(means, torch.zeros(3, 3), torch.tensor(4), 0.3)
    points = randn(50, 3, seed=1)
    assert torch.equal((points @ weight.T + bias).argmax(1), torch.cdist(points, means).argmin(1))


def test_signed_power() -> None:
    torch.testing.assert_close(signed_power(torch.tensor([4.0, -9.0, 0.0]), 0.5), torch.tensor([2.0, -3.0, 0.0]))


def test_tasks_and_parts_of_classes_add_up(few: Dataset, tmp_path: Path) -> None:
    """After three tasks, the statistics are those of all images; so they are if images arrive in two parts."""
    method = trained(LDA, few, tmp_path, adapt_epochs=1)
    rows = method.rows_of(range(6))
    features = signed_power(extract_features(method.model, method.world, rows), 0.5).double()
    labels = method.world.train.labels[rows]
    means = torch.stack([features[labels == c].mean(0) for c in range(6)])
    centered = features - means[labels]
    for _ in range(2):
        assert method.store["counts"].tolist() == torch.bincount(labels).tolist()
        torch.testing.assert_close(method.store["prototypes"].double(), means, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(method.store["scatter"].double(), centered.T @ centered, rtol=1e-4, atol=1e-3)
        weight, _ = discriminants(means, centered.T @ centered, torch.tensor(len(rows)), 0.5)
        torch.testing.assert_close(method.model.head.weight.double(), weight, rtol=1e-3, atol=1e-2)
        method.store = {}
        for part in (rows[::3], rows[1::3], rows[2::3]):
            method.update(part, 6)


def test_backbone_is_trained_in_the_first_task_only(few: Dataset, tmp_path: Path) -> None:
    method = trained(LDA, few, tmp_path, adapt_epochs=2)
    assert [len(method.stages(task)) for task in method.world.tasks] == [1, 0, 0]
    assert not list(method.auxiliary.parameters())
    frozen = trained(LDA, few, tmp_path / "frozen", adapt_epochs=0)
    assert [len(frozen.stages(task)) for task in frozen.world.tasks] == [0, 0, 0]
