"""Plain replay: cross-entropy on new images and exemplars."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from incvec.data import Dataset
from incvec.methods.replay import Replay
from tests.methods.endings import cross_entropy, ending, finished, old_accuracy, some_batch


def test_loss_rows_and_classifiers(few: Dataset, tmp_path: Path) -> None:
    method = finished(few, tmp_path, "replay").parts.method
    assert isinstance(method, Replay)
    assert method.teacher is None
    method.eval()
    batch = some_batch(method)
    terms = method.loss(batch)
    assert list(terms) == ["ce"]
    logits = method.model(batch.images).logits.tolist()
    assert terms["ce"].item() == pytest.approx(cross_entropy(logits, batch.labels.tolist()), rel=1e-4)
    assert list(method(batch.images)) == ["cnn", "nme"]
    method.store["memory"] = method.store["memory"][:4]  # as it was when the last task began
    rows = method.training_rows(method.task)
    assert torch.equal(rows[80:], method.store["memory"].flatten())
    assert set(method.world.train.labels[rows[:80]].tolist()) == {4, 5}


@pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])
def test_keeps_old_digits_where_finetuning_loses_them(addons: tuple[str, ...]) -> None:
    record, plain = ending("replay", *addons), ending("finetune")
    assert old_accuracy(record) > 25
    assert record["metrics"]["FM"] < plain["metrics"]["FM"] - 20
