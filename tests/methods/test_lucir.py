"""LUCIR: its losses restated as plain loops, imprinting, and the parameters of each stage."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.data import Dataset
from incvec.methods.common import extract_features
from incvec.methods.lucir import LUCIR, less_forget, margin_ranking
from incvec.nets import CosineHead
from tests.addons.tools import watch
from tests.conftest import weights
from tests.methods.tools import cosine, finished, randn, some_batch, trained


def expected_ranking(cosines: list[list[float]], labels: list[int], n_old: int, margin: float, k: int) -> float:
    hinges = []
    for row, y in zip(cosines, labels, strict=True):
        if y < n_old:
            negatives = sorted(row[n_old:], reverse=True)[:k]
            hinges += [max(0.0, margin - row[y] + negative) for negative in negatives]
    return sum(hinges) / len(hinges) if hinges else 0.0


def test_less_forget() -> None:
    new, old = randn(3, 5), randn(3, 5, seed=1)
    want = sum(1 - cosine(a, b) for a, b in zip(new.tolist(), old.tolist(), strict=True)) / 3
    assert less_forget(new, old).item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_margin_ranking(k: int) -> None:
    cosines, labels, n_old = randn(6, 6).tanh(), [0, 5, 2, 3, 1, 2], 3
    want = expected_ranking(cosines.tolist(), labels, n_old, 0.5, k)
    got = margin_ranking(cosines, torch.tensor(labels), n_old, 0.5, k)
    assert got.item() == pytest.approx(want, rel=1e-9)
    assert want > 0


def test_margin_ranking_is_zero_without_old_samples() -> None:
    cosines = randn(4, 5).tanh().requires_grad_()
    loss = margin_ranking(cosines, torch.tensor([3, 4, 4, 3]), 3, 0.5, 2)
    (gradient,) = torch.autograd.grad(loss, cosines)
    assert loss.item() == 0
    assert torch.count_nonzero(gradient) == 0


def test_margin_ranking_has_gradients_for_old_samples_only() -> None:
    cosines = randn(4, 5).tanh().requires_grad_()
    loss = margin_ranking(cosines, torch.tensor([0, 4, 1, 3]), 3, 2.0, 2)
    (gradient,) = torch.autograd.grad(loss, cosines)
    assert [bool(row.any()) for row in gradient] == [True, False, True, False]


def test_increment_loss(few: Dataset, tmp_path: Path) -> None:
    method = trained(LUCIR, few, tmp_path, lambda_base=3.0, margin=0.9, hard_negatives=1)
    assert method.teacher is not None
    method.eval()
    batch = some_batch(method)
    terms = method.loss(batch)
    output, old = method.model(batch.images), method.teacher(batch.images)
    head = method.model.head
    assert isinstance(head, CosineHead)
    rows = torch.cat([head[t].weight for t in range(3)]).tolist()
    cosines = [[cosine(f, row) for row in rows] for f in output.features.tolist()]
    logits = torch.tensor(cosines) * head.scale
    torch.testing.assert_close(terms["ce"], F.cross_entropy(logits, batch.labels), rtol=1e-4, atol=1e-5)
    apart = [1 - cosine(a, b) for a, b in zip(output.features.tolist(), old.features.tolist(), strict=True)]
    # four old and two new classes
    assert terms["forget"].item() == pytest.approx(3 * math.sqrt(4 / 2) * sum(apart) / len(apart), rel=1e-3)
    want = expected_ranking(cosines, batch.labels.tolist(), 4, 0.9, 1)
    assert terms["margin"].item() == pytest.approx(want, rel=1e-4)
    assert list(terms) == ["ce", "forget", "margin"]


def test_new_rows_are_imprinted(few: Dataset, tmp_path: Path) -> None:
    method = trained(LUCIR, few, tmp_path)
    method.begin_task(method.task)
    blocks = [method.model.head[t].weight for t in range(3)]
    length = torch.cat(blocks[:2]).norm(dim=1).mean()
    for row, label in zip(blocks[2], method.task.classes, strict=True):
        features = extract_features(method.model, method.world, method.rows_of([label]))
        mean = torch.stack([f / f.norm() for f in features]).mean(0)
        torch.testing.assert_close(row, mean / mean.norm() * length, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("balanced", [False, True])
def test_old_rows_are_trained_in_the_balanced_stage_only(balanced: bool, few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "lucir", balance_epochs=2 if balanced else 0)
    first, second = weights(run.snapshot_path(0)), weights(run.snapshot_path(1))
    rows = "method/model.head.blocks.0.weight"
    assert torch.equal(first[rows], second[rows]) != balanced
    assert not torch.equal(first["method/model.head.scale"], second["method/model.head.scale"])
    stages = run.parts.method.stages(run.parts.tasks[1])
    assert [stage.name for stage in stages] == (["main", "balance"] if balanced else ["main"])
    assert second["store/memory"].shape == (4, 3)


def test_balanced_stage_settings_and_frozen_statistics(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm statistics are the same before and after."""
    statistics: list[Tensor] = []

    def record(self: LUCIR, *_: object) -> None:
        statistics.append(self.model.backbone.stem.norm.running_mean.clone())

    watch(monkeypatch, LUCIR, "begin_stage", before=record)
    watch(monkeypatch, LUCIR, "end_stage", before=record)
    given = {"balance_epochs": 4, "balance_lr": 0.02, "balance_milestones": [1, 3], "weight_decay": 0.003, "gamma": 0.5}
    run = finished(few, tmp_path, "lucir", **given)
    main, balance = run.parts.method.stages(run.parts.tasks[1])
    assert (main.batchnorm, balance.batchnorm) == ("train", "frozen")
    assert balance.schedule.factors(4).tolist() == [1.0, 0.5, 0.5, 0.25]
    assert (balance.epochs, balance.groups[0].lr, balance.groups[0].weight_decay) == (4, 0.02, 0.003)
    _, _, begun, trained, before, after, *_ = statistics  # base task, then the two stages of the next task
    assert not torch.equal(begun, trained)
    assert torch.equal(before, after)


def test_frozen_rows_are_not_teleported(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "lucir", "ivt")
    parts = run.progress.statistics[2]["ivt"]
    assert "head.scale" in parts
    assert not [part for part in parts if part.startswith("head.blocks")]
