"""LwF: cross-entropy over the task's own classes, distillation over the old ones, no exemplars."""

from __future__ import annotations

from pathlib import Path

import pytest

from incvec.data import Dataset
from incvec.methods.lwf import LwF
from tests.methods.tools import cross_entropy, finished, kl_divergence, some_batch, trained


@pytest.mark.parametrize("over", ["new", "seen"])
def test_increment_loss(over: str, few: Dataset, tmp_path: Path) -> None:
    method = trained(LwF, few, tmp_path, lambda_distil=0.7, temperature=3.0, loss_over=over)
    assert method.teacher is not None
    method.eval()
    rows = method.training_rows(method.task)[::5]
    batch = method.world.train.fetch(rows, None, ("test",))
    assert set(batch.labels.tolist()) == {4, 5}  # no image of an old class
    terms = method.loss(batch)
    logits, old = method.model(batch.images).logits.tolist(), method.teacher(batch.images).logits.tolist()
    first = 4 if over == "new" else 0
    want = cross_entropy([row[first:] for row in logits], [y - first for y in batch.labels.tolist()])
    assert terms["ce"].item() == pytest.approx(want, rel=1e-4)
    assert terms["distil"].item() == pytest.approx(0.7 * kl_divergence(logits, old, 3.0), rel=1e-3)


def test_cross_entropy_does_not_reach_old_rows(few: Dataset, tmp_path: Path) -> None:
    method = trained(LwF, few, tmp_path, lambda_distil=0.0)
    method.requires_grad_(True)
    batch = method.world.train.fetch(method.training_rows(method.task)[:20], None, ("test",))
    sum(method.loss(batch).values()).backward()
    blocks = [method.model.head[t].weight.grad for t in range(3)]
    assert [bool(grad is not None and grad.any()) for grad in blocks] == [False, False, True]


def test_store_is_empty(few: Dataset, tmp_path: Path) -> None:
    method = finished(few, tmp_path, "lwf").parts.method
    assert method.store == {}
    assert some_batch(method).labels.min() == 0
    assert list(method(some_batch(method).images)) == ["cnn"]
