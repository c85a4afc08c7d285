"""LwF: cross-entropy over the task's own classes, distillation over the old ones, no exemplars."""

from __future__ import annotations

from pathlib import Path

import pytest

from incvec.data import Dataset
from incvec.methods.lwf import LwF
from tests.methods.endings import cross_entropy, ending, finished, old_accuracy, soft_divergence, some_batch


@pytest.mark.parametrize("over", ["new", "seen"])
def test_the_loss_of_an_increment(over: str, few: Dataset, tmp_path: Path) -> None:
    method = finished(few, tmp_path, "lwf", lambda_distil=0.7, temperature=3.0, loss_over=over).parts.method
    assert isinstance(method, LwF)
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
    assert terms["distil"].item() == pytest.approx(0.7 * soft_divergence(logits, old, 3.0), rel=1e-3)


def test_old_rows_learn_from_the_teacher_alone(few: Dataset, tmp_path: Path) -> None:
    method = finished(few, tmp_path, "lwf", lambda_distil=0.0).parts.method
    assert isinstance(method, LwF)
    method.requires_grad_(True)
    batch = method.world.train.fetch(method.training_rows(method.task)[:20], None, ("test",))
    sum(method.loss(batch).values()).backward()
    blocks = [method.model.head[t].weight.grad for t in range(3)]
    assert [bool(grad is not None and grad.any()) for grad in blocks] == [False, False, True]


def test_nothing_is_kept_but_the_model(few: Dataset, tmp_path: Path) -> None:
    method = finished(few, tmp_path, "lwf").parts.method
    assert method.store == {}
    assert some_batch(method).labels.min() == 0
    assert list(method(some_batch(method).images)) == ["cnn"]


@pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])
def test_keeps_old_digits_where_finetuning_loses_them(addons: tuple[str, ...]) -> None:
    record, plain = ending("lwf", *addons), ending("finetune")
    assert old_accuracy(record) > 25
    assert record["metrics"]["FM"] < plain["metrics"]["FM"] - 20
