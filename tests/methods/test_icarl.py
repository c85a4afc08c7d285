"""iCaRL: its losses restated as plain loops, its memory and class means."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from incvec.data import Dataset
from incvec.methods.common import distillation_loss, extract_features
from incvec.methods.icarl import ICaRL, sigmoid_loss
from tests.conftest import weights
from tests.methods.tools import cross_entropy, finished, kl_divergence, randn, some_batch


def test_distillation_loss() -> None:
    new, old = randn(5, 6), randn(5, 4, seed=1)
    want = kl_divergence(new.tolist(), old.tolist(), 2.0)
    assert distillation_loss(new, old, 2.0).item() == pytest.approx(want, rel=1e-9)
    assert distillation_loss(torch.cat([old, new], 1), old, 2.0).item() == pytest.approx(0, abs=1e-12)


def test_three_forms_of_distillation_have_the_same_gradient() -> None:
    """KL; KL averaged over elements, times T^2, 1/4 and the old classes; cross-entropy of softened outputs."""
    new, old = randn(5, 6).requires_grad_(), randn(5, 4, seed=1)
    prediction, target = (new[:, :4] / 2).log_softmax(1), (old / 2).softmax(1)
    elements = F.kl_div(prediction, target, reduction="none").mean() * 4 * 0.25 * 4
    soft = -(target * prediction).sum() / 5
    losses = (distillation_loss(new, old, 2.0), elements, soft)
    first, *others = [torch.autograd.grad(loss, new, retain_graph=True)[0] for loss in losses]
    assert torch.count_nonzero(first) > 0
    for other in others:
        torch.testing.assert_close(first, other)


@pytest.mark.parametrize("n_old", [0, 3])
def test_sigmoid_loss_targets_are_the_old_outputs(n_old: int) -> None:
    logits, labels = randn(4, 5), [0, 4, 3, 2]
    old = randn(4, n_old, seed=1) if n_old else None
    total = 0.0
    for i, y in enumerate(labels):
        for c in range(5):
            p = 1 / (1 + math.exp(-logits[i, c].item()))
            target = float(c == y)
            if old is not None and c < n_old:
                target = 1 / (1 + math.exp(-old[i, c].item()))
            total -= target * math.log(p) + (1 - target) * math.log(1 - p)
    got = sigmoid_loss(logits, old, torch.tensor(labels), n_outputs=10)
    assert got.item() == pytest.approx(total / 4 / 10, rel=1e-9)


def test_increment_loss(few: Dataset, tmp_path: Path) -> None:
    method = finished(few, tmp_path, "icarl", lambda_distil=0.7).parts.method
    assert method.teacher is not None
    method.eval()
    batch = some_batch(method)
    terms = method.loss(batch)
    logits, old = method.model(batch.images).logits.tolist(), method.teacher(batch.images).logits.tolist()
    assert [len(logits[0]), len(old[0])] == [6, 4]
    assert terms["ce"].item() == pytest.approx(cross_entropy(logits, batch.labels.tolist()), rel=1e-4)
    assert terms["distil"].item() == pytest.approx(0.7 * kl_divergence(logits, old, 2.0), rel=1e-3)


def test_memory_and_class_means(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "icarl")
    method = run.parts.method
    assert isinstance(method, ICaRL)
    memories = [weights(run.snapshot_path(task))["store/memory"] for task in range(3)]
    assert [list(memory.shape) for memory in memories] == [[2, 3], [4, 3], [6, 3]]
    assert torch.equal(memories[2][:4], memories[1])  # selected once
    labels = method.world.train.labels
    assert torch.equal(labels[memories[2]], torch.arange(6)[:, None].expand(6, 3))
    rows = method.training_rows(method.task)
    assert len(rows) == 2 * 40 + 6 * 3  # the task's images, and the exemplars in the store
    means = method.store["means"]
    for label in range(6):  # digits are not mirrored
        features = extract_features(method.model, method.world, memories[2][label])
        mean = torch.stack([f / f.norm() for f in features]).mean(0)
        torch.testing.assert_close(means[label], mean / mean.norm(), rtol=1e-5, atol=1e-6)
    batch = some_batch(method)
    method.eval()
    scores = method(batch.images)
    assert list(scores) == ["nme", "cnn"]
    unit = F.normalize(method.model(batch.images).features, dim=1)
    assert torch.equal(scores["nme"].argmax(1), torch.cdist(unit, means).argmin(1))


def test_sigmoid_loss_decreases(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "icarl", loss="sigmoid", epochs=4)
    (*_, last) = run.progress.losses
    assert list(last["terms"]) == ["bce"]
    assert last["terms"]["bce"][-1] < last["terms"]["bce"][0]
