"""MRFA: gradients at the layers, the perturbation along them, and the loss."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.methods.mrfa import MRFA, layer_gradients, perturbed, perturbed_logits
from incvec.nets import Classifier, LinearHead, build_backbone
from tests.conftest import make_run, quick
from tests.methods.tools import in_task, seeded


@pytest.fixture
def model() -> Classifier:
    """Three classes, with running statistics that have been updated."""
    generator = seeded(0)
    backbone = build_backbone("tiny", channels=1, generator=generator)
    model = Classifier(backbone, LinearHead(backbone.width))
    model.grow(3, generator)
    with torch.no_grad():
        model.train()
        model(torch.randn(16, 1, 8, 8, generator=generator))
    return model


def images(count: int) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=seeded(1))


def test_logits_without_perturbation_are_the_models(model: Classifier) -> None:
    seen = []

    def record(number: int, h: Tensor) -> Tensor:
        seen.append((number, h.dim()))
        return h

    model.eval()
    torch.testing.assert_close(perturbed_logits(model, images(4), record), model(images(4)).logits, rtol=0, atol=0)
    assert seen == [(0, 4), (1, 4), (2, 2)]  # both stages of the tiny network, then the classifier


def test_layer_gradients_of_old_samples(model: Classifier) -> None:
    x, labels = images(5), torch.tensor([0, 2, 1, 2, 0])
    old = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    found = layer_gradients(model, x, labels, old)
    chosen = [0, 2, 4]
    twin = copy.deepcopy(model).eval()
    first = twin.backbone.stem(x[chosen])
    second = twin.backbone.stages[0](first)
    last = twin.backbone.stages[1](second).mean((2, 3))
    mean = F.cross_entropy(twin.head(last), labels[chosen])
    for whole, expected in zip(found, torch.autograd.grad(mean, [first, second, last]), strict=True):
        torch.testing.assert_close(whole[chosen], expected)
        assert not whole[[1, 3]].any()


def test_layer_gradients_leave_the_model_unchanged(model: Classifier) -> None:
    """Parameter gradients, statistics and modes."""
    model.backbone.stem.norm.eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    layer_gradients(model, images(4), torch.tensor([0, 1, 2, 0]), torch.ones(4))
    assert all(p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_layer_gradients_are_zero_without_old_samples(model: Classifier) -> None:
    for gradient in layer_gradients(model, images(3), torch.tensor([0, 1, 2]), torch.zeros(3)):
        assert gradient.isfinite().all()
        assert not gradient.any()


@pytest.mark.parametrize("shape", [(3, 2, 2, 2), (3, 5)])
def test_perturbation(shape: tuple[int, ...]) -> None:
    generator = seeded(2)
    h, gradient = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    amount = torch.tensor([0.0, 0.01, 0.3])
    found = perturbed(h.requires_grad_(), gradient, amount)
    for i in range(3):
        energy = sum(value**2 for value in h[i].flatten().tolist())
        torch.testing.assert_close(found[i], h[i] + float(amount[i]) * energy * gradient[i])
    (back,) = torch.autograd.grad(found.sum(), h)
    assert torch.equal(back, torch.ones(shape))  # no gradient through the norm


def logits_one_by_one(model: Classifier, x: Tensor, gradients: tuple[Tensor, ...], layer: Tensor, u: Tensor) -> Tensor:
    """Logits image by image in eval mode, with a hook that perturbs the input of the drawn layer."""
    modules = [*model.backbone.stages, model.head]
    rows = []
    for i in range(len(x)):
        number = int(layer[i])

        def hook(module: Any, given: tuple[Tensor], i: int = i, number: int = number) -> tuple[Tensor]:
            h = given[0]
            return (h + 0.5 * u[i] * float(h.detach().norm()) ** 2 * gradients[number][i : i + 1],)

        handle = modules[number].register_forward_pre_hook(hook)
        rows.append(model(x[i : i + 1]).logits)
        handle.remove()
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["scheduled", "sum"])
def test_increment_loss(kind: str, few: Dataset, tmp_path: Path) -> None:
    """Student and teacher are perturbed image by image."""
    method = in_task(MRFA, few, tmp_path, 2, mrfa={"strength": 0.5, "distillation": kind})
    assert isinstance(method.teacher, Classifier)
    method.eval()  # images do not influence each other
    rows = torch.cat([method.rows_of([0, 1, 2, 3])[::40], method.rows_of([4, 5])[::20]])
    batch = method.world.train.fetch(rows, None, ("test",))
    method.world.generator.manual_seed(3)
    terms = method.loss(batch)
    generator = method.world.generator.manual_seed(3)
    layer = torch.randint(3, (len(rows),), generator=generator)
    u = torch.rand(len(rows), generator=generator) * (batch.labels < 4)
    gradients = layer_gradients(method.model, batch.images, batch.labels, (batch.labels < 4).float())
    logits = logits_one_by_one(method.model, batch.images, gradients, layer, u)
    targets = logits_one_by_one(method.teacher, batch.images, gradients, layer, u)
    plain = method.model(batch.images).logits
    assert not torch.allclose(logits[batch.labels < 4], plain[batch.labels < 4], rtol=1e-3)
    torch.testing.assert_close(logits[batch.labels >= 4], plain[batch.labels >= 4])
    ce = kd = 0.0
    for z, target, y in zip(logits, targets, batch.labels, strict=True):
        ce += (z.logsumexp(0) - z[y]).item() / len(rows)
        p, q = F.softmax(target / 2, 0).tolist(), F.softmax(z[:4] / 2, 0).tolist()
        kd += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / len(rows)
    weights = {"scheduled": (2 * (1 - 4 / 6), 4 / 6), "sum": (1, 1)}[kind]
    assert terms["ce"].item() == pytest.approx(weights[0] * ce, rel=1e-4)
    assert terms["kd"].item() == pytest.approx(weights[1] * kd, rel=1e-3, abs=1e-6)


def test_perturbation_increases_the_loss_of_old_samples(few: Dataset, tmp_path: Path) -> None:
    method = in_task(MRFA, few, tmp_path, mrfa={"strength": 0.3})
    method.eval()
    batch = method.world.train.fetch(method.rows_of([0, 1]), None, ("test",))
    perturb = method.draw_perturbation(batch)
    with torch.no_grad():
        harder = F.cross_entropy(perturbed_logits(method.model, batch.images, perturb), batch.labels)
        plain = F.cross_entropy(method.model(batch.images).logits, batch.labels)
    assert harder > plain


def test_distillation_none_has_no_teacher(few: Dataset, tmp_path: Path) -> None:
    method = in_task(MRFA, few, tmp_path, mrfa={"distillation": "none"})
    assert method.teacher is None
    assert set(method.loss(method.world.train.fetch(method.rows_of([1, 2])[:6], None, ("test",)))) == {"ce"}


def test_memory_and_classifiers(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("mrfa"))
    record = finish(run)
    assert list(record["classifiers"]) == ["nme", "cnn"]
    assert record["classifier"] == "nme"
    memory = run.parts.method.store["memory"]
    assert memory.shape == (6, 3)
    labels = run.parts.world.train.labels
    assert torch.equal(labels[memory], torch.arange(6)[:, None].expand(6, 3))


def test_runs_in_mixed_precision(few: Dataset, tmp_path: Path) -> None:
    assert finish(make_run(few, tmp_path, quick("mrfa", "ivt", precision="bf16")))["metrics"]["AA"] > 0
