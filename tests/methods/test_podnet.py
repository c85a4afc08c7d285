"""PODNet's losses restated by plain loops, and its state over two tasks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.run import finish
from incvec.methods.podnet import PODNet, nca_loss, pod_flat, pod_spatial
from tests.conftest import make_run, quick


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_coded_nca() -> None:
    scores, labels, eta, margin = draw(4, 3), [0, 2, 1, 1], 1.7, 0.6
    total = 0.0
    for row, y in zip(scores.tolist(), labels, strict=True):
        s = [eta * (value - margin) for value in row]
        m = max(s)
        others = sum(math.exp(s[j] - m) for j in range(3) if j != y)
        total += -(s[y] - m) + math.log(1 + others)
    loss = nca_loss(scores, torch.tensor(labels), torch.tensor(eta, dtype=torch.float64), margin)
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


def test_coded_nca_does_not_depend_on_the_margin() -> None:
    scores, labels, eta = draw(5, 4), torch.tensor([0, 1, 2, 3, 0]), torch.tensor(1.3, dtype=torch.float64)
    torch.testing.assert_close(nca_loss(scores, labels, eta, 0.0), nca_loss(scores, labels, eta, 0.6))


def test_coded_nca_is_cross_entropy_where_the_target_wins() -> None:
    scores, eta = draw(6, 4), torch.tensor(2.0, dtype=torch.float64)
    labels = scores.argmax(1)
    want = torch.nn.functional.cross_entropy(eta * scores, labels)
    torch.testing.assert_close(nca_loss(scores, labels, eta, 0.6), want)


def test_the_papers_nca() -> None:
    scores, labels, eta, margin = draw(4, 3, seed=1), [0, 2, 1, 0], 3.0, 0.6
    total = 0.0
    for row, y in zip(scores.tolist(), labels, strict=True):
        ratio = math.exp(eta * (row[y] - margin)) / sum(math.exp(eta * row[j]) for j in range(3) if j != y)
        total += max(0.0, -math.log(ratio))
    loss = nca_loss(scores, torch.tensor(labels), torch.tensor(eta, dtype=torch.float64), margin, "paper")
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


def test_flat() -> None:
    new, old = draw(3, 5), draw(3, 5, seed=1)
    cosines = [
        sum(a * b for a, b in zip(n, o, strict=True)) / (math.hypot(*n) * math.hypot(*o))
        for n, o in zip(new.tolist(), old.tolist(), strict=True)
    ]
    assert pod_flat(new, old).item() == pytest.approx(sum(1 - c for c in cosines) / 3, rel=1e-9)


def test_spatial() -> None:
    """Squares first, then sums over the width and over the height, each sample's vector normalised."""
    new = (draw(2, 3, 4, 4).float(), draw(2, 5, 2, 2, seed=1).float())
    old = (draw(2, 3, 4, 4, seed=2).float(), draw(2, 5, 2, 2, seed=3).float())
    total = 0.0
    for a, b in zip(new, old, strict=True):
        for n in range(2):
            vectors = []
            for maps in (a, b):
                channels, height, width = maps.shape[1:]
                x = maps[n].tolist()
                v = [sum(x[c][h][w] ** 2 for w in range(width)) for c in range(channels) for h in range(height)]
                v += [sum(x[c][h][w] ** 2 for h in range(height)) for c in range(channels) for w in range(width)]
                length = math.hypot(*v)
                vectors.append([value / length for value in v])
            total += math.dist(*vectors) / 2
    assert pod_spatial(new, old).item() == pytest.approx(total / 2, rel=1e-5)


def turned(few: Dataset, tmp_path: Path, until: int, **given: object) -> PODNet:
    """The method of a run that has just ended task `until`."""
    run = make_run(few, tmp_path, quick("podnet", **given))  # type: ignore[arg-type]
    for event in run.events():
        if isinstance(event, ev.TaskEnded) and event.task == until:
            break
    method = run.parts.method
    assert isinstance(method, PODNet)
    return method


def test_stages_train_what_they_should(few: Dataset, tmp_path: Path) -> None:
    method = turned(few, tmp_path, 1)
    main, balance = method.stages(method.world.tasks[1])
    names = [name for name, _ in method.named_parameters() if not name.startswith("teacher.")]
    trained = {name for name in names if any(group.owns(name) for group in main.groups)}
    assert "model.head.blocks.0.weight" not in trained
    assert {"model.head.blocks.1.weight", "model.head.scale", "model.backbone.stem.conv.weight"} <= trained
    balanced = {name for name in names if any(group.owns(name) for group in balance.groups)}
    assert balanced == {"model.head.blocks.0.weight", "model.head.blocks.1.weight"}
    assert len(method.stages(method.world.tasks[0])) == 1


def test_memory_grows_by_task_and_is_never_chosen_again(few: Dataset, tmp_path: Path) -> None:
    first = turned(few, tmp_path / "a", 0).store["memory"]
    method = turned(few, tmp_path / "b", 1)
    second = method.store["memory"]
    assert first.shape == (2, 3)
    assert second.shape == (4, 3)
    assert torch.equal(second[:2], first)
    labels = method.world.train.labels[second]
    assert torch.equal(labels, torch.arange(4)[:, None].expand(4, 3))


def test_the_teacher_is_the_model_before(few: Dataset, tmp_path: Path) -> None:
    before = turned(few, tmp_path / "a", 0)
    after = turned(few, tmp_path / "b", 1)
    assert after.teacher is not None
    want = before.model.state_dict()
    got = after.teacher.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert not after.teacher.training
    assert not any(p.requires_grad for p in after.teacher.parameters())


def test_imprinted_proxies_have_the_old_ones_mean_norm(few: Dataset, tmp_path: Path) -> None:
    method = turned(few, tmp_path, 0)
    task = method.world.tasks[1]
    method.task = task
    method.grow(task)
    method.begin_task(task)
    old, new = method.model.head[0].weight, method.model.head[1].weight
    assert new.shape == (2 * 2, old.shape[1])
    # k-means centres of unit vectors lie inside the unit ball: norms are at most the old mean, and near it
    ratio = new.norm(dim=1) / old.norm(dim=1).mean()
    assert bool((ratio <= 1 + 1e-5).all())
    assert bool((ratio > 0.3).all())


def test_gradients_are_clamped(few: Dataset, tmp_path: Path) -> None:
    method = turned(few, tmp_path, 0)
    parameter = method.model.head[0].weight
    parameter.grad = torch.linspace(-9, 9, parameter.numel()).reshape(parameter.shape)
    method.gradients({"w": parameter})
    assert parameter.grad.max() == 5
    assert parameter.grad.min() == -5


def test_forgets_less_than_finetune(digits: Dataset, tmp_path: Path) -> None:
    def forgetting(method: str, *addons: str) -> tuple[float, float]:
        given = {"method": method, "addons": list(addons), "dataset": "digits"}
        given[method] = {"epochs": 10, "milestones": [7]} if method == "finetune" else {"epochs": 10}
        record = finish(make_run(digits, tmp_path / "-".join([method, *addons]), given))
        old = record["accuracy"][-1][:-1]
        return record["metrics"]["FM"], min(old)

    plain, _ = forgetting("finetune")
    for addons in ((), ("ivt",)):
        podnet, worst = forgetting("podnet", *addons)
        assert podnet < plain - 20
        assert worst > 20  # ten classes: chance is 10
