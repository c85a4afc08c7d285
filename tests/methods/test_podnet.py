"""PODNet: its losses restated as plain loops, its stages, teacher, exemplars and imprinting."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from incvec.contracts import Optimizer
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.methods.podnet import PODNet, nca_loss, pod_flat, pod_spatial
from tests.conftest import make_run, quick
from tests.methods.tools import after_task, in_task, randn, some_batch


def test_coded_nca() -> None:
    scores, labels, eta, margin = randn(4, 3), [0, 2, 1, 1], 1.7, 0.6
    total = 0.0
    for row, y in zip(scores.tolist(), labels, strict=True):
        s = [eta * (value - margin) for value in row]
        m = max(s)
        others = sum(math.exp(s[j] - m) for j in range(3) if j != y)
        total += -(s[y] - m) + math.log(1 + others)
    loss = nca_loss(scores, torch.tensor(labels), torch.tensor(eta, dtype=torch.float64), margin)
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


def test_coded_nca_does_not_depend_on_the_margin() -> None:
    scores, labels, eta = randn(5, 4), torch.tensor([0, 1, 2, 3, 0]), torch.tensor(1.3, dtype=torch.float64)
    torch.testing.assert_close(nca_loss(scores, labels, eta, 0.0), nca_loss(scores, labels, eta, 0.6))


def test_coded_nca_is_cross_entropy_if_the_target_has_the_maximum() -> None:
    scores, eta = randn(6, 4), torch.tensor(2.0, dtype=torch.float64)
    labels = scores.argmax(1)
    expected = torch.nn.functional.cross_entropy(eta * scores, labels)
    torch.testing.assert_close(nca_loss(scores, labels, eta, 0.6), expected)


def test_nca_of_the_paper() -> None:
    scores, labels, eta, margin = randn(4, 3, seed=1), [0, 2, 1, 0], 3.0, 0.6
    total = 0.0
    for row, y in zip(scores.tolist(), labels, strict=True):
        ratio = math.exp(eta * (row[y] - margin)) / sum(math.exp(eta * row[j]) for j in range(3) if j != y)
        total += max(0.0, -math.log(ratio))
    loss = nca_loss(scores, torch.tensor(labels), torch.tensor(eta, dtype=torch.float64), margin, "paper")
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


def test_pod_flat() -> None:
    new, old = randn(3, 5), randn(3, 5, seed=1)
    cosines = [
        sum(a * b for a, b in zip(n, o, strict=True)) / (math.hypot(*n) * math.hypot(*o))
        for n, o in zip(new.tolist(), old.tolist(), strict=True)
    ]
    assert pod_flat(new, old).item() == pytest.approx(sum(1 - c for c in cosines) / 3, rel=1e-9)


def test_pod_spatial() -> None:
    """Squares are summed over the width and over the height; the vector of each sample is normalized."""
    new = (randn(2, 3, 4, 4).float(), randn(2, 5, 2, 2, seed=1).float())
    old = (randn(2, 3, 4, 4, seed=2).float(), randn(2, 5, 2, 2, seed=3).float())
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


def expected_pooled(maps: Tensor) -> Tensor:
    """Sums of squares along each row and each column of every map, as one unit vector per sample."""
    squares = maps.double() ** 2
    both = torch.cat([torch.einsum("nchw->nch", squares).flatten(1), torch.einsum("nchw->ncw", squares).flatten(1)], 1)
    return both / both.square().sum(1, keepdim=True).sqrt()


@torch.no_grad()
def test_increment_loss(few: Dataset, tmp_path: Path) -> None:
    """All terms with their weights, in the third task: six classes seen, four of them old."""
    given = {"lambda_flat": 0.7, "lambda_spatial": 5.0}
    method = in_task(PODNet, few, tmp_path, 2, podnet=given)
    assert method.teacher is not None
    method.eval()
    batch = some_batch(method)
    terms = method.loss(batch)
    assert list(terms) == ["nca", "flat", "spatial"]
    new, old = method.model(batch.images), method.teacher(batch.images)
    eta = method.model.head.scale.item()
    assert isinstance(eta, float)
    nca = 0.0
    for row, y in zip(new.logits.tolist(), batch.labels.tolist(), strict=True):
        s = [eta * score for score in row]
        nca += max(s) - s[y] + math.log(1 + sum(math.exp(s[j] - max(s)) for j in range(6) if j != y))
    assert terms["nca"].item() == pytest.approx(nca / len(batch.labels), rel=1e-4)
    a, b = new.features.double(), old.features.double()
    flat = (1 - (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()).mean()
    distances = [
        (expected_pooled(one) - expected_pooled(other)).square().sum(1).sqrt().mean().item()
        for one, other in zip(new.maps, old.maps, strict=True)
    ]
    factor = math.sqrt((4 + 2) / 2)
    assert flat.item() > 1e-4
    assert terms["flat"].item() == pytest.approx(0.7 * factor * flat.item(), rel=1e-3)
    assert terms["spatial"].item() == pytest.approx(5.0 * factor * sum(distances) / len(distances), rel=1e-3)


def test_base_task_has_no_distillation(few: Dataset, tmp_path: Path) -> None:
    method = in_task(PODNet, few, tmp_path, 0)
    assert list(method.loss(some_batch(method)._replace(labels=torch.zeros(24, dtype=torch.int64)))) == ["nca"]


def test_balanced_stage_settings(few: Dataset, tmp_path: Path) -> None:
    """A constant learning rate, the main stage's weight decay and optimizer, BatchNorm in train mode."""
    given = {"balance_lr": 0.03, "weight_decay": 0.007, "balance_epochs": 4, "lr": 0.2, "momentum": 0.8}
    method = in_task(PODNet, few, tmp_path, 0, podnet=given)
    main, balance = method.stages(method.world.tasks[1])
    assert (main.groups[0].lr, main.groups[0].weight_decay, main.schedule.kind) == (0.2, 0.007, "cosine")
    (group,) = balance.groups
    assert (group.lr, group.weight_decay) == (0.03, 0.007)
    assert balance.schedule.factors(4).tolist() == [1.0] * 4
    assert (balance.role, balance.epochs, balance.batch_size) == ("balance", 4, 32)
    assert balance.optimizer == main.optimizer == Optimizer("sgd", momentum=0.8)
    assert (balance.batchnorm, balance.views) == ("train", ("train",))


def test_jitters_accumulate_over_the_tasks(few: Dataset, tmp_path: Path) -> None:
    """The base task has one, the second increment three; in the balanced stage, too."""
    for choice, expected in (("one", ["train"] * 5), ("accumulate", ["train", *["train*2"] * 2, *["train*3"] * 2])):
        run = make_run(few, tmp_path / choice, quick("podnet", podnet={"jitters": choice}))
        finish(run)
        stages = [stage for task in run.parts.tasks for stage in run.parts.method.stages(task)]
        assert [view for stage in stages for view in stage.views] == expected


def test_parameters_of_each_stage(few: Dataset, tmp_path: Path) -> None:
    method = after_task(PODNet, few, tmp_path, 1)
    main, balance = method.stages(method.world.tasks[1])
    names = [name for name, _ in method.named_parameters() if not name.startswith("teacher.")]
    trained = {name for name in names if any(group.owns(name) for group in main.groups)}
    assert "model.head.blocks.0.weight" not in trained
    assert {"model.head.blocks.1.weight", "model.head.scale", "model.backbone.stem.conv.weight"} <= trained
    balanced = {name for name in names if any(group.owns(name) for group in balance.groups)}
    assert balanced == {"model.head.blocks.0.weight", "model.head.blocks.1.weight"}
    assert len(method.stages(method.world.tasks[0])) == 1


def test_exemplars_are_selected_once(few: Dataset, tmp_path: Path) -> None:
    first = after_task(PODNet, few, tmp_path / "a", 0).store["memory"]
    method = after_task(PODNet, few, tmp_path / "b", 1)
    second = method.store["memory"]
    assert first.shape == (2, 3)
    assert second.shape == (4, 3)
    assert torch.equal(second[:2], first)
    labels = method.world.train.labels[second]
    assert torch.equal(labels, torch.arange(4)[:, None].expand(4, 3))


def test_oracle_trains_on_all_images_of_the_classes_seen(few: Dataset, tmp_path: Path) -> None:
    method = in_task(PODNet, few, tmp_path, 1, oracle=True)
    wanted = (method.world.train.labels < method.task.n_seen).nonzero().flatten()
    stages = method.stages(method.task)
    assert [stage.name for stage in stages] == ["main", "balance"]
    for stage in stages:
        assert torch.equal(method.begin_stage(method.task, stage).sort().values, wanted)


def test_teacher_is_the_previous_model(few: Dataset, tmp_path: Path) -> None:
    before = after_task(PODNet, few, tmp_path / "a", 0)
    after = after_task(PODNet, few, tmp_path / "b", 1)
    assert after.teacher is not None
    want = before.model.state_dict()
    got = after.teacher.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert not after.teacher.training
    assert not any(p.requires_grad for p in after.teacher.parameters())


def test_imprinted_proxies_have_the_mean_norm_of_old_proxies(few: Dataset, tmp_path: Path) -> None:
    method = after_task(PODNet, few, tmp_path, 0)
    task = method.world.tasks[1]
    method.task = task
    method.grow(task)
    method.begin_task(task)
    old, new = method.model.head[0].weight, method.model.head[1].weight
    assert new.shape == (2 * 2, old.shape[1])
    # k-means centers of unit vectors lie in the unit ball, so norms are at most the old mean
    ratio = new.norm(dim=1) / old.norm(dim=1).mean()
    assert bool((ratio <= 1 + 1e-5).all())
    assert bool((ratio > 0.3).all())


def test_gradients_are_clamped(few: Dataset, tmp_path: Path) -> None:
    method = after_task(PODNet, few, tmp_path, 0)
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
