"""PASS: its loss, its settings, and what it is good for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.methods.pass_ import PASS
from incvec.presets import preset, resolve
from tests.conftest import make_run, quick
from tests.methods.endings import in_task


def test_the_base_task_has_one_term(few: Dataset, tmp_path: Path) -> None:
    method = in_task(PASS, few, tmp_path, 0).eval()
    batch = method.world.train.fetch(method.world.train.labels.argsort()[:6], None, ("test",))
    terms = method.loss(batch)
    assert list(terms) == ["ce"]
    expected = 0.0
    for image, label in zip(batch.images, batch.labels, strict=True):
        for k in range(4):
            z = method.model(image.rot90(k, (1, 2))[None]).logits[0] / 0.1
            expected += (z.logsumexp(0) - z[4 * label + k]).item() / 24
    assert terms["ce"].item() == pytest.approx(expected, rel=1e-4)


def test_the_loss_of_an_increment(few: Dataset, tmp_path: Path) -> None:
    """Each term by hand, image by image, on a method in the middle of its second task."""
    method = in_task(PASS, few, tmp_path)
    assert method.teacher is not None
    method.eval()
    batch = method.world.train.fetch(method.rows_of([2, 3])[::16], None, ("test",))
    count = len(batch.labels)
    method.world.generator.manual_seed(3)
    terms = method.loss(batch)
    generator = method.world.generator.manual_seed(3)
    classes = torch.randint(2, (count,), generator=generator)
    noise = torch.randn(count, 8, generator=generator)
    ce = squares = remembered = 0.0
    for image, label in zip(batch.images, batch.labels, strict=True):
        for k in range(4):
            turned = image.rot90(k, (1, 2))[None]
            output = method.model(turned)
            z = output.logits[0] / 0.1
            ce += (z.logsumexp(0) - z[4 * label + k]).item() / (4 * count)
            squares += (output.features - method.teacher(turned).features).square().sum().item()
    for c, e in zip(classes, noise, strict=True):
        z = method.model.head(method.store["prototypes"][c] + method.store["radius"] * e) / 0.1
        remembered += (z.logsumexp(0) - z[4 * c]).item() / count
    assert squares > 0
    assert terms["ce"].item() == pytest.approx(ce, rel=1e-4)
    assert terms["distil"].item() == pytest.approx(10 * squares**0.5, rel=1e-3)
    assert terms["prototypes"].item() == pytest.approx(10 * remembered, rel=1e-4)


def test_the_statistics_carry_no_gradient_and_are_not_trained(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("pass"))
    finish(run)
    method = run.parts.method
    assert not any(tensor.requires_grad for tensor in method.store.values())
    assert not [name for name, _ in method.named_parameters() if name.startswith("auxiliary.")]


def test_presets() -> None:
    assert preset("pass", "cifar100") == {}
    o = resolve({"method": "pass", "dataset": "cifar100"}).options("pass", PASS.Options)
    assert (o.net, o.optimizer, o.lr, o.weight_decay) == ("resnet32-pycil", "adam", 1e-3, 2e-4)
    assert (o.epochs, o.milestones, o.batch_size, o.radius) == (100, (45, 90), 128, "base")
    authors = preset("pass", "cifar100", "authors")
    assert (authors["net"], authors["epochs"], authors["batch_size"]) == ("resnet18-cifar", 101, 64)
