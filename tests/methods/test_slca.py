"""SLCA: Gaussians, scales and normalized logits restated; the alignment in both forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from incvec.contracts import Batch
from incvec.data import Dataset
from incvec.data.gaussians import GaussianSource
from incvec.data.stream import split
from incvec.engine import events as ev
from incvec.engine.run import finish
from incvec.methods.slca import SLCA, NormalHead, mean_scales, normalized_logits
from tests.conftest import make_run, quick, weights
from tests.methods.tools import cross_entropy, finished, seeded, trained


def test_mean_scales() -> None:
    tasks = split(6, 0, 3)
    assert mean_scales(tasks, 0) == [1.0, 1.0]
    assert mean_scales(tasks, 2) == pytest.approx([0.9 + 0.1 / 3] * 2 + [0.9 + 0.2 / 3] * 2 + [1.0] * 2)


@pytest.mark.parametrize("per_task", [False, True])
def test_normalized_logits(per_task: bool) -> None:
    logits = [[3.0, 4.0, 1.0], [0.0, 2.0, -6.0]]
    found = normalized_logits(torch.tensor(logits), [0, 2, 3], 0.1, per_task)
    for given, row in zip(logits, found.tolist(), strict=True):
        norms = (math.hypot(given[0], given[1]), abs(given[2]))
        if per_task:
            wanted = [given[0] / norms[0], given[1] / norms[0], given[2] / norms[1]]
        else:
            wanted = [value / (sum(norms) / 2) for value in given]
        assert row == pytest.approx([value / 0.1 for value in wanted], rel=1e-4)


def test_initial_rows_of_the_head() -> None:
    head = NormalHead(50)
    block = head.grow(200, seeded())
    weight = block.weight.detach()
    assert weight.abs().max() <= 0.0401
    assert weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.03)  # a normal truncated at two std
    assert block.bias is not None
    assert not block.bias.any()


@pytest.mark.parametrize("compat", ["paper", "spu"])
def test_alignment_loss_of_two_towers(compat: str, few: Dataset, tmp_path: Path) -> None:
    method = trained(SLCA, few, tmp_path, compat=compat).eval()
    align = method.stages(method.task)[1]
    rows = method.begin_stage(method.task, align)
    assert torch.bincount(rows).tolist() == [16] * 6
    features, labels = torch.randn(3, 8, generator=seeded()), torch.tensor([5, 0, 2])
    words = ("zero", "one", "two", "three", "four", "five")
    names = [f"a photo of {words[int(name)]}" for name in method.world.class_names]
    dual = method.model.dual
    texts = dual.text_tower(dual.tokenize(names)) @ dual.text_projection.weight.T  # type: ignore[operator]
    images = features @ dual.image_projection.weight.T  # type: ignore[operator]
    logits = []
    for image in images.detach():
        row = []
        for text in texts.detach():
            length = float(image.norm()) * (1.0 if compat == "spu" else float(text.norm()))
            row.append(float(dual.logit_scale.detach().exp() * (image @ text)) / length)
        norms = [math.hypot(row[i], row[i + 1]) for i in (0, 2, 4)]
        mean = sum(norms) / 3
        logits.append([value / (0.1 * (norms[c // 2] if compat == "spu" else mean)) for c, value in enumerate(row)])
    found = method.alignment(Batch((features,), labels, labels))
    assert found["align"].item() == pytest.approx(cross_entropy(logits, labels.tolist()), rel=1e-3)


def test_compat_spu_has_zero_columns_for_future_classes(few: Dataset, tmp_path: Path) -> None:
    method = trained(SLCA, few, tmp_path, compat="spu").eval()
    method.begin_stage(method.task, method.stages(method.task)[1])
    method.store["sentences"] = method.store["sentences"][:4]
    method.task = method.world.tasks[1]
    features, labels = torch.randn(3, 8, generator=seeded()), torch.tensor([3, 0, 2])
    found = method.alignment(Batch((features,), labels, labels))["align"]
    dual = method.model.dual
    logits = normalized_logits(
        dual.similarities(method.model.unit(features), dual.embed_texts(method.store["sentences"])),
        [0, 2, 4],
        0.1,
        True,
    )
    rows = [[*row, 0.0, 0.0] for row in logits.tolist()]
    assert found.item() == pytest.approx(cross_entropy(rows, labels.tolist()), rel=1e-4)


def test_compat_spu_uses_the_first_batch_of_an_epoch(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their loop slices each batch from the previous one, so only the first has rows."""
    epochs, size, classes = 2, 16, 6
    drawn: list[Batch] = []
    fetch = GaussianSource.fetch

    def recording(self: GaussianSource, *given: Any) -> Batch:
        drawn.append(fetch(self, *given))
        return drawn[-1]

    monkeypatch.setattr(GaussianSource, "fetch", recording)
    options = {"compat": "spu", "align_epochs": epochs, "samples": size, "align_batch_size": size, "align_lr": 0.01}
    run = make_run(few, tmp_path, quick("slca", slca=options))
    for event in run.events():
        if isinstance(event, ev.StageStarted) and (event.task, event.stage) == (2, "align"):
            method = run.parts.method
            assert isinstance(method, SLCA)
            dual = method.model.dual
            found = dual.image_projection.weight, dual.text_projection.weight
            image, text = (tensor.detach().clone().requires_grad_() for tensor in found)  # type: ignore[operator]
            sentences, heat = method.store["sentences"].clone(), dual.logit_scale.detach().exp()
            drawn.clear()
    assert len(drawn) == epochs * classes
    optimizer = torch.optim.Adam([image, text], lr=0.01)
    for epoch in range(epochs):
        of_epoch = drawn[epoch * classes : (epoch + 1) * classes]
        inputs, targets = torch.cat([batch.images for batch in of_epoch]), torch.cat([b.labels for b in of_epoch])
        for step in range(classes):
            inputs, targets = (rows[step * size : (step + 1) * size] for rows in (inputs, targets))
            assert len(inputs) == (size if step == 0 else 0)
            logits = heat * F.normalize(inputs @ image.T, dim=1) @ (sentences @ text.T).T
            norms = logits.view(-1, 3, 2).norm(dim=2, keepdim=True).expand(-1, 3, 2).reshape(-1, classes)
            optimizer.zero_grad()
            F.cross_entropy(logits / (norms + 1e-7) / 0.1, targets).backward()
            optimizer.step()
    torch.testing.assert_close(found, (image.detach(), text.detach()), rtol=1e-3, atol=1e-5)
    assert not [name for name in weights(run.snapshot_path(2)) if "align_steps" in name]


def test_alignment_trains_only_the_projections(few: Dataset, tmp_path: Path) -> None:
    plain, aligned = (finished(few, tmp_path / str(n), "slca", align_epochs=n) for n in (0, 2))
    before, after = weights(plain.snapshot_path(0)), weights(aligned.snapshot_path(0))
    for name, _ in aligned.parts.method.named_parameters():
        same = torch.equal(before[f"method/{name}"], after[f"method/{name}"])
        assert same == ("projection" not in name), name


def test_old_classes_keep_their_statistics(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "slca")
    first, last = weights(run.snapshot_path(0)), weights(run.snapshot_path(2))
    assert first["store/means"].shape == (2, 8)
    assert last["store/factors"].shape == (6, 8, 8)
    assert torch.equal(first["store/means"], last["store/means"][:2])
    assert "store/sentences" not in last


def test_linear_form(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "slca", form="linear", head_rate=100.0, align_lr=0.01)
    method = run.parts.method
    assert isinstance(method, SLCA)
    assert [stage.name for stage in method.stages(run.parts.tasks[0])] == ["main"]
    main, align = method.stages(method.task)
    assert [(group.prefixes, round(group.lr / main.groups[1].lr)) for group in main.groups] == [
        (("model.head.blocks.2",), 100),
        (("model.tower",), 1),
    ]
    assert align.groups[0].prefixes == ("model.head.blocks",)
    names = [name for name, _ in method.model.named_parameters()]
    assert not [name for name in names if "text" in name]
    # The aligned head is evaluated; the trained head is restored before the next task.
    last = weights(run.snapshot_path(2))
    unaligned = [name for name in last if name.startswith("store/unaligned.")]
    assert len(unaligned) == 6
    for name in unaligned:
        assert not torch.equal(last[name], last["method/model." + name.removeprefix("store/unaligned.")])
    old = weights(run.snapshot_path(1))
    for block in (0, 1):  # older blocks are frozen in the main stage, so their unaligned rows do not change
        name = f"store/unaligned.head.blocks.{block}.weight"
        assert torch.equal(last[name], old[name])
    method.begin_task(method.task)
    assert not [name for name in method.store if name.startswith("unaligned.")]
    for name in unaligned:
        assert torch.equal(method.model.get_parameter(name.removeprefix("store/unaligned.")), last[name])


def test_losses_of_the_linear_form(few: Dataset, tmp_path: Path) -> None:
    method = trained(SLCA, few, tmp_path, form="linear").eval()
    batch = method.world.train.fetch(method.training_rows(method.task)[::10], None, ("test",))
    logits = method.model(batch.images).logits[:, method.task.first :]
    wanted = cross_entropy(logits.tolist(), (batch.labels - method.task.first).tolist())
    assert method.loss(batch)["ce"].item() == pytest.approx(wanted, rel=1e-4)
    features, labels = torch.randn(3, 8, generator=seeded()), torch.tensor([5, 0, 2])
    head: Any = method.model.get_submodule("head")
    rows = normalized_logits(features @ head.weight.T + head.bias, [0, 2, 4, 6], 0.1).tolist()
    found = method.alignment(Batch((features,), labels, labels))["align"].item()
    assert found == pytest.approx(cross_entropy(rows, labels.tolist()), rel=1e-3)


@pytest.mark.parametrize("addon", ["ivt", "cofima", "magmax"])
def test_linear_form_with_addons(addon: str, few: Dataset, tmp_path: Path) -> None:
    record = finish(make_run(few, tmp_path, quick("slca", addon, slca={"form": "linear"})))
    assert len(record["accuracy"]) == 3
