"""RAPF: fusion, close pairs and losses restated; the towers are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.class_statistics import draw
from incvec.contracts import Batch
from incvec.data import Dataset
from incvec.methods.rapf import RAPF, close_pairs, draws_per_step, fuse, separation
from tests.conftest import weights
from tests.methods.tools import cross_entropy, finished, seeded, trained


def test_fuse() -> None:
    old, new = (
        torch.randn(4, 4, generator=seeded(), dtype=torch.float64),
        torch.randn(4, 4, generator=seeded(1)).double(),
    )
    u, s, vt = torch.linalg.svd(old)
    p, q = u.T @ new, torch.diag(s) @ vt
    wanted = torch.zeros(4, 4, dtype=torch.float64)
    largest = max(abs(float(p[i, j] - q[i, j])) for i in range(4) for j in range(4))
    for i in range(4):
        for j in range(4):
            share = min(abs(float(p[i, j] - q[i, j])) / largest + 0.6, 1.0)
            wanted[i, j] = p[i, j] * share + q[i, j] * (1 - share)
    torch.testing.assert_close(fuse(old, new, 0.6), u @ wanted)
    torch.testing.assert_close(fuse(old, new, 1.0), new)
    torch.testing.assert_close(fuse(old, old.clone(), 0.0), old)


def test_close_pairs() -> None:
    angles = torch.tensor([0.0, 1.0, 0.1, 1.2, 3.0])
    texts = torch.stack([angles.cos(), angles.sin()], 1)
    assert close_pairs(texts, 2, 0.3).tolist() == [[0, 2], [1, 3]]
    assert close_pairs(texts, 0, 0.3).shape == (0, 2)
    assert close_pairs(texts, 2, 0.01).shape == (0, 2)


def test_separation() -> None:
    vectors, texts = (F.normalize(torch.randn(n, 3, generator=seeded(n)), dim=1) for n in (4, 5))
    pairs = torch.tensor([[0, 3], [1, 4]])
    total = 0.0
    for row, vector in enumerate(vectors):
        old, new = pairs[row // 2]
        total += max(0.0, float(vector @ texts[new]) - float(vector @ texts[old]) + 0.1)
    assert separation(vectors, texts, pairs, 0.1).item() == pytest.approx(total / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("steps", "n_old", "wanted"),
    [
        (50, 10, (2, 20)),  # CIFAR-100 in 10 tasks, the authors' setting
        (25, 50, (4, 20)),  # tasks of 5 classes, the authors' setting
        (100, 20, (1, 20)),  # CIFAR-100 in 5 tasks
        (6, 10, (10, 33)),  # FGVC-Aircraft in 10 tasks: all old classes, with more draws
        (6, 50, (17, 20)),
        (13, 20, (8, 19)),  # in 5 tasks
        (500, 10, (1, 4)),
    ],
)
def test_draws_per_step(steps: int, n_old: int, wanted: tuple[int, int]) -> None:
    classes, each = draws_per_step(2000, steps, n_old, 20)
    assert (classes, each) == wanted
    assert steps * classes * each == pytest.approx(2000, rel=0.05)


@pytest.mark.parametrize("batch_size", [10, 40, 1000])
def test_draws_per_epoch_of_a_run(
    batch_size: int, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two classes of 40 images per task: 8, 2 and 1 steps in one epoch; the last task has 4 old classes."""
    drawn: list[int] = []

    def recording(means: Tensor, *given: Any) -> Tensor:
        result = draw(means, *given)
        drawn.append(len(result))
        return result

    monkeypatch.setattr("incvec.methods.rapf.draw", recording)
    own = {"epochs": 1, "batch_size": batch_size, "threshold": 0.0, "old_classes": None, "draws": 240}
    finished(few, tmp_path, "rapf", **own)
    steps = {10: 8, 40: 2, 1000: 1}[batch_size]
    assert len(drawn) == 2 * steps
    assert sum(drawn[:steps]) == sum(drawn[steps:]) == 240


@pytest.mark.parametrize("threshold", [0.0, 10.0], ids=["no pairs", "all pairs"])
def test_loss(threshold: float, few: Dataset, tmp_path: Path) -> None:
    method = trained(RAPF, few, tmp_path, threshold=threshold, samples=3).eval()
    task = method.task
    method.store["means"], method.store["factors"] = (method.store[name][: task.n_old] for name in ("means", "factors"))
    method.begin_task(task)
    method.begin_stage(task, method.stages(task)[0])
    vectors, labels = method.store["vectors"][::9], method.store["labels"][::9]
    images = method.world.train.fetch(method.rows_of(task.classes)[::9], None, ("test",)).images
    torch.testing.assert_close(vectors, method.model.dual.embed_images(method.model.dual.image_tower(images)))
    method.world.generator.manual_seed(4)
    terms = method.loss(Batch((vectors,), labels, labels))
    method.world.generator.manual_seed(4)
    few_old = torch.rand(4, generator=method.world.generator).argsort()[:4]
    old = draw(method.store["means"], method.store["factors"], few_old, method.world.generator, 3)
    every = F.normalize(torch.cat([vectors, old]) @ method.model.adapter.weight.T, dim=1)  # type: ignore[operator]
    texts = method.model.texts()
    logits = method.model.dual.logit_scale.exp() * every @ texts.T
    wanted = cross_entropy(logits.tolist(), [*labels.tolist(), *(c for c in few_old.tolist() for _ in range(3))])
    assert terms["ce"].item() == pytest.approx(wanted, rel=1e-4)
    assert ("separation" in terms) == (threshold > 0)
    assert len(method.store["pairs"]) == (8 if threshold > 0 else 0)


def test_only_the_matrix_is_trained(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "rapf")
    first, last = weights(run.snapshot_path(0)), weights(run.snapshot_path(2))
    for name, _ in run.parts.method.named_parameters():
        assert torch.equal(first[f"method/{name}"], last[f"method/{name}"]) == ("adapter" not in name)
    assert {name for name in last if name.startswith("store/")} == {"store/means", "store/factors", "store/classes"}
    assert last["store/means"].shape == (6, 16)
    assert torch.equal(last["store/means"][:2], first["store/means"])


def test_matrices_are_fused_at_the_end_of_a_stage(few: Dataset, tmp_path: Path) -> None:
    method = trained(RAPF, few, tmp_path, fusion=0.3).eval()
    adapter: Any = method.model.adapter.weight
    old = torch.randn(16, 16, generator=seeded())
    method.store["before"] = old
    new = adapter.detach().clone()
    method.end_stage(method.task, method.stages(method.task)[0])
    torch.testing.assert_close(adapter.detach(), fuse(old, new, 0.3))
    assert not torch.allclose(adapter, new)
