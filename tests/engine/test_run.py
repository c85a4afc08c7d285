"""The order of hooks and rows, logged loss terms, and evaluation."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Batch, Terms
from incvec.data import Dataset, source
from incvec.engine import evaluate
from incvec.engine.loss_history import LossHistory, mean_terms
from incvec.engine.run import finish
from incvec.errors import TrainingError
from incvec.methods.finetune import Finetune
from tests.addons.tools import record_batches, run_on, watch
from tests.conftest import make_run, quick


def test_hooks_are_called_in_the_documented_order(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    hooks = {
        "m": (Finetune, "grow begin_task begin_stage gradients end_stage end_task begin_evaluation"),
        "a": (IVTAddOn, "begin_task begin_stage begin_epoch gradients end_epoch end_stage end_task deployed"),
    }
    for who, (owner, names) in hooks.items():
        for name in names.split():
            watch(monkeypatch, owner, name, before=lambda *_, text=f"{who}.{name}", **__: calls.append(text))
    run_on(few, tmp_path, "finetune", "ivt", finetune={"epochs": 1}, tasks=1)
    steps = ["m.gradients", "a.gradients"]
    second = calls[len(calls) - calls[::-1].index("m.grow") - 1 :]
    order = [text for text, _ in groupby("steps" if text in steps else text for text in second)]
    assert order == [
        "m.grow", "m.begin_task", "a.begin_task", "m.begin_stage", "a.begin_stage", "a.begin_epoch", "steps",
        "a.end_epoch", "a.end_stage", "m.end_stage", "a.end_task", "m.end_task", "a.deployed", "m.begin_evaluation",
    ]  # fmt: skip
    in_steps = [text for text in second if text in steps]
    assert in_steps == steps * (len(in_steps) // 2)


def test_every_epoch_shuffles_rows_differently(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_batches(monkeypatch)
    run = run_on(few, tmp_path, "joint", joint={"epochs": 3, "batch_size": 4})
    steps = len(run.parts.world.train.labels) // 4
    epochs = [torch.cat([batch.indices for batch in seen[e * steps : (e + 1) * steps]]) for e in range(3)]
    for order in epochs:
        assert len(order.unique()) == 4 * steps  # no row twice
        assert not torch.equal(order, order.sort().values)
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])


def test_logged_term_is_the_mean_over_the_steps() -> None:
    history = LossHistory(0, torch.tensor([[1.0, 2.0], [3.0, 6.0]]), 1.0, None)
    assert mean_terms(history, ["a", "b"], "", str) == {"a": 2.0, "b": 4.0}


def test_padding_of_the_last_chunk_is_not_counted(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(few, tmp_path, "finetune", finetune={"epochs": 5}, tasks=1)
    parts, task = run.parts, run.parts.tasks[-1]
    rows = parts.test.rows_of(0, task.n_seen)
    whole = evaluate.confusion_by_classifier(parts.method, parts.world, parts.test, rows, task)["cnn"]
    assert whole.diagonal().sum() > 0
    assert whole.sum(1).tolist() == parts.test.counts().tolist()[: task.n_seen]
    for chunk in range(2, 12):
        monkeypatch.setattr(source, "MAX_ROWS", chunk)
        again = evaluate.confusion_by_classifier(parts.method, parts.world, parts.test, rows, task)["cnn"]
        assert torch.equal(again, whole)


def test_record_has_the_confusion_of_the_last_task(few: Dataset, tmp_path: Path) -> None:
    """Of the reported classifier, in class order like the names; not with many classes."""
    record = finish(make_run(few, tmp_path / "run", quick("finetune", order_seed=3)))
    assert [row[k] for k, row in enumerate(record["confusion"])] == record["correct"]["cnn"][-1]
    assert [sum(row) for row in record["confusion"]] == record["class_counts"]
    assert record["class_names"] == [few.class_names[label] for label in record["class_order"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("incvec.engine.task.MAX_CONFUSION", 3)
        assert finish(make_run(few, tmp_path / "many", quick("finetune")))["confusion"] is None


def test_loss_without_gradients_for_the_backbone_is_refused(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Finetune.loss

    def cut(self: Finetune, batch: Batch) -> Terms:
        with torch.no_grad():
            features = self.model(batch.images).features
        return {"ce": self.model.head(features).square().mean()} if self.task.index else original(self, batch)

    monkeypatch.setattr(Finetune, "loss", cut)
    with pytest.raises(TrainingError, match="depends on none of them"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))
