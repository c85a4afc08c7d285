"""A run's story: hooks in their order, rows in an order of their own, terms as logged, images as scored."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch

from incvec.addons.ivt import IVTAddOn
from incvec.data import Dataset, source
from incvec.engine import evaluate
from incvec.engine.losses import LossHistory, mean_terms
from incvec.methods.finetune import Finetune
from tests.addons.tools import record_batches, run_on, watch


def test_hooks_run_in_the_order_of_architecture_md(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    hooks = {
        "m": (Finetune, "grow begin_task begin_stage gradients end_stage end_task begin_evaluation"),
        "a": (IVTAddOn, "begin_task begin_stage begin_epoch gradients end_epoch end_stage end_task deployed"),
    }
    for who, (owner, names) in hooks.items():
        for name in names.split():
            watch(monkeypatch, owner, name, before=lambda *_, text=f"{who}.{name}", **__: heard.append(text))
    run_on(few, tmp_path, "finetune", "ivt", finetune={"epochs": 1}, tasks=1)
    steps = ["m.gradients", "a.gradients"]
    second = heard[len(heard) - heard[::-1].index("m.grow") - 1 :]
    told = [text for text, _ in groupby("steps" if text in steps else text for text in second)]
    assert told == [
        "m.grow", "m.begin_task", "a.begin_task", "m.begin_stage", "a.begin_stage", "a.begin_epoch", "steps",
        "a.end_epoch", "a.end_stage", "m.end_stage", "a.end_task", "m.end_task", "a.deployed", "m.begin_evaluation",
    ]  # fmt: skip
    taken = [text for text in second if text in steps]
    assert taken == steps * (len(taken) // 2)


def test_every_epoch_has_an_order_of_its_own(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_batches(monkeypatch)
    run = run_on(few, tmp_path, "joint", joint={"epochs": 3, "batch_size": 4})
    steps = len(run.parts.world.train.labels) // 4
    epochs = [torch.cat([batch.indices for batch in seen[e * steps : (e + 1) * steps]]) for e in range(3)]
    for order in epochs:
        assert len(order.unique()) == 4 * steps  # no row twice
        assert not torch.equal(order, order.sort().values)
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])


def test_a_logged_term_is_the_mean_over_the_epochs_steps() -> None:
    history = LossHistory(0, torch.tensor([[1.0, 2.0], [3.0, 6.0]]), None)
    assert mean_terms(history, ["a", "b"], "", str) == {"a": 2.0, "b": 4.0}


def test_the_padding_of_the_last_chunk_counts_for_nothing(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(few, tmp_path, "finetune", finetune={"epochs": 5}, tasks=1)
    parts, task = run.parts, run.parts.tasks[-1]
    rows = parts.test.rows_of(0, task.n_seen)
    whole = evaluate.correct_by_class(parts.method, parts.world, parts.test, rows, task)
    assert sum(whole["cnn"]) > 0
    for chunk in range(2, 12):
        monkeypatch.setattr(source, "CHUNK", chunk)
        assert evaluate.correct_by_class(parts.method, parts.world, parts.test, rows, task) == whole
