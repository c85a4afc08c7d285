"""Plain replay: cross-entropy on new images and exemplars."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from incvec.data import Dataset
from incvec.methods.replay import Replay
from tests.methods.tools import cross_entropy, some_batch, trained


def test_loss_rows_and_classifiers(few: Dataset, tmp_path: Path) -> None:
    method = trained(Replay, few, tmp_path)
    assert method.teacher is None
    method.eval()
    batch = some_batch(method)
    terms = method.loss(batch)
    assert list(terms) == ["ce"]
    logits = method.model(batch.images).logits.tolist()
    assert terms["ce"].item() == pytest.approx(cross_entropy(logits, batch.labels.tolist()), rel=1e-4)
    assert list(method(batch.images)) == ["cnn", "nme"]
    method.store["memory"] = method.store["memory"][:4]  # as at the beginning of the last task
    rows = method.training_rows(method.task)
    assert torch.equal(rows[80:], method.store["memory"].flatten())
    assert set(method.world.train.labels[rows[:80]].tolist()) == {4, 5}
