"""PASS: its loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.methods.pass_ import PASS
from tests.conftest import make_run, quick
from tests.methods.tools import in_task


def test_base_task_loss(few: Dataset, tmp_path: Path) -> None:
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


def test_increment_loss(few: Dataset, tmp_path: Path) -> None:
    """Each term, image by image, in the second task."""
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
    ce = squares = replayed = 0.0
    for image, label in zip(batch.images, batch.labels, strict=True):
        for k in range(4):
            rotated = image.rot90(k, (1, 2))[None]
            output = method.model(rotated)
            z = output.logits[0] / 0.1
            ce += (z.logsumexp(0) - z[4 * label + k]).item() / (4 * count)
            squares += (output.features - method.teacher(rotated).features).square().sum().item()
    for c, e in zip(classes, noise, strict=True):
        z = method.model.head(method.store["prototypes"][c] + method.store["radius"] * e) / 0.1
        replayed += (z.logsumexp(0) - z[4 * c]).item() / count
    assert squares > 0
    assert terms["ce"].item() == pytest.approx(ce, rel=1e-4)
    assert terms["distil"].item() == pytest.approx(10 * squares**0.5, rel=1e-3)
    assert terms["prototypes"].item() == pytest.approx(10 * replayed, rel=1e-4)


def test_second_pass_updates_running_statistics_twice(few: Dataset, tmp_path: Path) -> None:
    """With the same losses: r + (1 - 0.9^2) (b - r) instead of r + 0.1 (b - r)."""
    method = in_task(PASS, few, tmp_path).train()
    batch = method.world.train.fetch(method.rows_of([2, 3])[::16], None, ("test",))
    buffer = next(b for name, b in method.model.named_buffers() if name.endswith("running_mean"))
    before = buffer.clone()
    losses, updates = [], []
    for second in (False, True):
        method.options = method.options.model_copy(update={"second_pass": second})
        buffer.copy_(before)
        method.world.generator.manual_seed(3)
        losses.append({name: term.item() for name, term in method.loss(batch).items()})
        updates.append(buffer - before)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch.testing.assert_close(updates[1], 1.9 * updates[0])


def test_pycil_variant(few: Dataset, tmp_path: Path) -> None:
    """Biases of new rows start at zero, and prototypes are drawn by the ratio of old to new classes."""
    run = make_run(few, tmp_path, quick("pass", tasks=4, **{"pass": {"head_init": "kaiming", "draws": "ratio"}}))
    finish(run)
    method = run.parts.method
    assert isinstance(method, PASS)
    assert len(method.draw_prototypes(8)[0]) == 8 * 5  # five old classes, one new
    block = method.model.head.grow(2, method.world.generator)
    assert block.bias is not None
    assert not block.bias.any()


def test_class_statistics_are_not_trained(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("pass"))
    finish(run)
    method = run.parts.method
    assert not any(tensor.requires_grad for tensor in method.store.values())
    assert not [name for name, _ in method.named_parameters() if name.startswith("auxiliary.")]
