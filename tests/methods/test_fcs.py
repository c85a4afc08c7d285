"""FCS: mixed classes, the contrastive loss and the transfer."""

from __future__ import annotations

import copy
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.contracts import Task
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.methods.fcs import FCS, contrastive_loss, draw_partners, draw_weights, pair_labels
from tests.addons.tools import run_on, watch
from tests.conftest import make_run, quick, weights
from tests.methods.tools import in_task, seeded


def test_partners_are_uniform_over_new_images_of_other_labels() -> None:
    labels = torch.tensor([1, 2, 3, 3, 2, 4])  # class 1 is old
    partners, paired = draw_partners(labels, 2, 4000, seeded(0))
    assert partners.shape == paired.shape == (4000, 6)
    assert torch.equal(paired[7], torch.tensor([False, True, True, True, True, True]))
    for i, allowed in {1: {2, 3, 5}, 2: {1, 4, 5}, 5: {1, 2, 3, 4}}.items():
        counts = torch.bincount(partners[:, i], minlength=6).tolist()
        assert {j for j, count in enumerate(counts) if count} == allowed
        for j in allowed:
            assert counts[j] == pytest.approx(4000 / len(allowed), rel=0.1)


def test_batch_of_one_label_has_no_pairs() -> None:
    partners, paired = draw_partners(torch.tensor([3, 3, 3]), 2, 2, seeded(0))
    assert not paired.any()
    assert partners.min() >= 0
    assert partners.max() < 3


def test_mixing_weights_are_a_clipped_beta_distribution() -> None:
    found = draw_weights((100, 200), 20, seeded(0), torch.device("cpu"))
    assert found.shape == (100, 200)
    assert found.min() >= 0.4
    assert found.max() <= 0.6
    # Beta(20, 20), numerically integrated
    xs = [(i + 0.5) / 20000 for i in range(20000)]
    density = [(x * (1 - x)) ** 19 for x in xs]
    total = sum(density)
    inside = sum(d for x, d in zip(xs, density, strict=True) if 0.4 <= x <= 0.6) / total
    variance = sum(d * (x - 0.5) ** 2 for x, d in zip(xs, density, strict=True) if 0.4 <= x <= 0.6) / total
    assert (found != 0.5).float().mean().item() == pytest.approx(inside, abs=0.02)
    assert (found - 0.5).square().mean().item() == pytest.approx(variance, rel=0.05)


def test_pair_labels_are_unique() -> None:
    pairs = list(combinations(range(6), 2))
    one, other = (torch.tensor(column) for column in zip(*pairs, strict=True))
    found = pair_labels(one, other)
    assert sorted(found.tolist()) == list(range(15))
    assert torch.equal(found, pair_labels(other, one))
    assert pair_labels(torch.tensor([4]), torch.tensor([1])).item() == 4 * 3 // 2 + 1


def test_contrastive_loss() -> None:
    generator = seeded(0)
    queries = F.normalize(torch.randn(4, 3, generator=generator), dim=1).requires_grad_()
    keys = F.normalize(torch.randn(6, 3, generator=generator), dim=1)
    query_labels, key_labels = [0, 1, 0, 2], [0, 1, 0, 2, 1, 5]
    found = contrastive_loss(queries, keys, torch.tensor(query_labels), torch.tensor(key_labels), 0.3)
    losses = []
    for i in range(4):
        own = float(queries[i].detach() @ keys[i]) / 0.3
        entries = [(own, True)]
        for j in range(6):
            entries.append((float(queries[i].detach() @ keys[j]) / 0.3, query_labels[i] == key_labels[j]))
        others = sum(math.exp(value) for value, positive in entries if not positive)
        positives = [value for value, positive in entries if positive]
        losses.append(sum(math.log(1 + math.exp(-value) * others) for value in positives) / len(positives))
    assert found.item() == pytest.approx(sum(losses) / 4, rel=1e-5)
    (gradient,) = torch.autograd.grad(found, queries)
    assert gradient.isfinite().all()


def test_keys_leave_statistics_unchanged(few: Dataset, tmp_path: Path) -> None:
    method = in_task(FCS, few, tmp_path, 0)
    method.train()
    images = torch.rand(8, 1, 8, 8, generator=seeded(0))
    before = copy.deepcopy(method.state_dict())
    keys = method.keys(images)
    assert not keys.requires_grad
    for name, tensor in method.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    twin = copy.deepcopy(method.model)
    torch.testing.assert_close(keys, F.normalize(twin(images).features, dim=1).detach())
    moved = dict(twin.named_buffers())["backbone.stem.norm.running_mean"]
    assert not torch.equal(moved, before["model.backbone.stem.norm.running_mean"])  # without restoring


def test_inputs_are_rotated_then_mixed_images(few: Dataset, tmp_path: Path) -> None:
    """Mixed images have the labels and weights of their pairs."""
    method = in_task(FCS, few, tmp_path, 1)
    rows = torch.cat([method.rows_of([1])[:1], method.rows_of([2])[:2], method.rows_of([3])[:2]])
    batch = method.world.train.fetch(rows, None, ("test",))
    method.world.generator.manual_seed(1)
    images, labels, weight = method.inputs(batch.images, batch.labels)
    generator = method.world.generator.manual_seed(1)
    partners, _ = draw_partners(batch.labels, 2, 4, generator)
    share = draw_weights((4, 5), 20, generator, torch.device("cpu"))
    assert images.shape == (40, 1, 8, 8)
    assert torch.equal(images[5], batch.images[1].rot90(1, (1, 2)))
    assert labels[:20].tolist() == [4 * y + k for y in [1, 2, 2, 3, 3] for k in range(4)]
    assert weight.tolist() == [1.0] * 20 + [0.0, 1.0, 1.0, 1.0, 1.0] * 4  # class 1 is old: it is not mixed
    for r in range(4):
        for i in range(1, 5):
            at, j, s = 20 + 5 * r + i, int(partners[r, i]), float(share[r, i])
            torch.testing.assert_close(images[at], s * batch.images[i] + (1 - s) * batch.images[j])
            assert labels[at] == 16  # the only pair of new classes, after 4 x 4 outputs
            assert batch.labels[j] != batch.labels[i]


def test_increment_loss(few: Dataset, tmp_path: Path) -> None:
    """Each term, image by image, in the second task."""
    method = in_task(FCS, few, tmp_path, 1, fcs={"lambda_contrast": 0.5, "lambda_transfer": 2.0})
    transfer, mixed = method.auxiliary.transfer, method.auxiliary.mixed
    assert transfer is not None
    assert mixed is not None
    assert method.teacher is not None
    method.eval()
    rows = torch.cat([method.rows_of([0])[:1], method.rows_of([2, 3])[::20]])
    batch = method.world.train.fetch(rows, None, ("test", "flipped"))
    batch = batch._replace(views=(batch.images, batch.images.flip(-1)))
    count = len(rows)
    method.world.generator.manual_seed(3)
    terms = method.loss(batch)
    method.world.generator.manual_seed(3)
    images, labels, weight = method.inputs(batch.images, batch.labels)
    drawn, classes = method.draw_prototypes(count)
    ce = squares = moved = replayed = 0.0
    queries = []
    for image, label, w in zip(images, labels, weight.tolist(), strict=True):
        new, old = method.model.features(image[None])[0], method.teacher(image[None]).features[0]
        z = torch.cat([method.model.head(new), mixed(new)]) / 0.1
        ce += w * (z.logsumexp(0) - z[label]).item()
        squares += w * (new - old).square().sum().item()
        moved += w * (new - transfer.weight @ old - transfer.bias).norm().item()
        queries.append(F.normalize(new, dim=0))
    for p, label in zip(drawn, classes, strict=True):
        z = method.model.head(transfer.weight @ p + transfer.bias) / 0.1
        replayed += (z.logsumexp(0) - z[label]).item() / count
    keys = [
        F.normalize(method.model.features(image.rot90(k, (1, 2))[None])[0], dim=0)
        for image in batch.views[1]
        for k in range(4)
    ]
    keys += [F.normalize(p, dim=0) for p in drawn]
    rotated = 4 * count
    contrast = contrastive_loss(
        torch.stack(queries[:rotated]),
        torch.stack(keys),
        labels[:rotated],
        torch.cat([labels[:rotated], classes]),
        0.07,
    )
    total = float(weight.sum())
    assert 0 < total - rotated < 4 * count  # mixed images of the old image have weight 0
    assert terms["ce"].item() == pytest.approx(ce / total, rel=1e-4)
    assert terms["distil"].item() == pytest.approx(3 * squares**0.5, rel=1e-3)  # 3 in the preset for the digits
    assert terms["transfer"].item() == pytest.approx(2 * moved / total, rel=1e-3)
    assert terms["prototypes"].item() == pytest.approx(10 * replayed, rel=1e-4)
    assert terms["contrast"].item() == pytest.approx(0.5 * contrast.item(), rel=1e-3)


def test_stages_have_a_strong_second_view(few: Dataset, tmp_path: Path) -> None:
    method = in_task(FCS, few, tmp_path, 0)
    assert [stage.views for task in method.world.tasks for stage in method.stages(task)] == [("train", "strong")] * 3


def test_prototype_draws_do_not_train_the_transfer(few: Dataset, tmp_path: Path) -> None:
    method = in_task(FCS, few, tmp_path, 1)
    assert method.auxiliary.transfer is not None
    batch = method.world.train.fetch(method.rows_of([2, 3])[:8], method.world.generator, ("train", "strong"))
    weight = method.auxiliary.transfer.weight
    terms = method.loss(batch)
    none: Any = torch.autograd.grad(terms["prototypes"], [weight], allow_unused=True, retain_graph=True)[0]
    assert none is None
    assert torch.autograd.grad(terms["transfer"], [weight], retain_graph=True)[0].any()
    reached = torch.autograd.grad(terms["transfer"], [method.model.backbone.stem.conv.weight])[0]
    assert reached.any()  # it also trains the features


def test_auxiliary_modules_exist_for_one_task(few: Dataset, tmp_path: Path) -> None:
    """Mixed classes and transfer are created for each task, trained, and never anchored."""
    run = make_run(few, tmp_path, quick("fcs", "ivt", base_classes=3, tasks=1, fcs={"mixups": 2}))
    finish(run)
    base, last = (weights(run.snapshot_path(t)) for t in range(2))
    mixed = "method/auxiliary.mixed.blocks.0.weight"
    assert base[mixed].shape == last[mixed].shape == (3, 8)
    assert not torch.equal(base[mixed], last[mixed])
    assert "method/auxiliary.transfer.weight" not in base
    assert not torch.equal(last["method/auxiliary.transfer.weight"], torch.eye(8))
    own = [name for name in last if name.startswith("addon/ivt/")]
    assert own
    assert not [name for name in own if "mixed" in name or "transfer" in name]


def test_transfer_starts_as_identity(few: Dataset, tmp_path: Path) -> None:
    method = in_task(FCS, few, tmp_path, 1)
    method.grow(method.world.tasks[1])
    assert method.auxiliary.transfer is not None
    h = torch.randn(3, 8, generator=seeded(0))
    assert torch.equal(method.auxiliary.transfer(h), h)


def test_old_prototypes_are_mapped_by_the_transfer(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[tuple[Tensor, Tensor]] = []

    def before(self: FCS, task: Task) -> None:
        if task.index > 0:
            known, transfer = self.store["prototypes"], self.auxiliary.transfer
            assert transfer is not None
            rows.append((known.clone(), (known @ transfer.weight.T + transfer.bias).detach()))

    def after(self: FCS, task: Task) -> None:
        if task.index > 0:
            known, wanted = rows[-1]
            found = self.store["prototypes"][: task.n_old]
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(found, known)

    watch(monkeypatch, FCS, "end_task", before=before, after=after)
    run_on(few, tmp_path, "fcs")
    assert len(rows) == 2


def test_tasks_of_one_class_have_no_mixed_classes(few: Dataset, tmp_path: Path) -> None:
    """All other terms remain."""
    record = finish(make_run(few, tmp_path, quick("fcs", base_classes=4, tasks=2)))
    assert set(record["losses"][-1]["terms"]) == {"ce", "distil", "transfer", "prototypes", "contrast"}
