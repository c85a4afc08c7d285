"""Mnemonics: exemplars as parameters, then as rows of the source; factors on frozen kernels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.contracts import Batch, Stage, Task, World
from incvec.data import Dataset, ImageSource, Views
from incvec.engine import events as ev
from incvec.engine.run import finish
from incvec.errors import ConfigError
from incvec.methods.mnemonics import Mnemonics, MnemonicsOptions, ScaledConv, nearest_mean_loss, to_pixels
from tests.addons.tools import Tensors, same, state_of, watch
from tests.conftest import make_run, quick
from tests.methods.tools import after_task, in_task, run_until, seeded


@pytest.mark.parametrize("size", [1, 3])
def test_factors_scale_kernels_per_channel_pair(size: int) -> None:
    conv = ScaledConv(3, 4, size, 2, size // 2, bias=False)
    x = torch.randn(2, 3, 6, 6, generator=seeded())
    plain = F.conv2d(x, conv.weight, stride=2, padding=size // 2)
    assert torch.equal(conv(x), plain)
    conv.attach()
    assert torch.equal(conv(x), plain)
    assert conv.factor is not None
    with torch.no_grad():
        conv.factor.copy_(torch.randn(4, 3, 1, 1, generator=seeded(1)))
    kernel = torch.empty_like(conv.weight)
    for out in range(4):
        for into in range(3):
            kernel[out, into] = conv.weight[out, into].detach() * conv.factor[out, into].item()
    torch.testing.assert_close(conv(x), F.conv2d(x, kernel, stride=2, padding=size // 2))


def test_nearest_mean_loss() -> None:
    features, means, labels = [[1.0, 2.0], [3.0, -1.0]], [[2.0, 0.5], [0.0, 4.0], [-1.0, -1.0]], [1, 0]
    total = 0.0
    for f, y in zip(features, labels, strict=True):
        cosines = [sum(a * b for a, b in zip(f, m, strict=True)) / math.hypot(*f) / math.hypot(*m) for m in means]
        total += math.log(sum(math.exp(c) for c in cosines)) - cosines[y]
    found = nearest_mean_loss(torch.tensor(features), torch.tensor(means), torch.tensor(labels))
    assert math.isclose(found.item(), total / 2, rel_tol=1e-6)


def test_pixels_are_rounded_and_clipped() -> None:
    mean, std = torch.tensor([0.5, 0.4])[:, None, None], torch.tensor([0.2, 0.3])[:, None, None]
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 2, 16, 16)
    normal = (every / 255 - mean) / std
    assert torch.equal(to_pixels(normal, mean, std), every)
    step = 1 / 255 / std
    assert torch.equal(to_pixels(normal + 0.4 * step, mean, std), every)
    assert torch.equal(to_pixels(normal + 0.6 * step, mean, std), every.int().add(1).clamp(max=255).to(torch.uint8))
    assert torch.equal(to_pixels(normal - 300 * step, mean, std), torch.zeros_like(every))


def test_exemplars_become_rows_of_the_source(few: Dataset, tmp_path: Path) -> None:
    method = after_task(Mnemonics, few, tmp_path, 0)
    source, own = method.source, len(few.train_labels)
    assert method.originals == own
    assert len(source) == own + 6
    assert method.store["memory"].tolist() == [[own, own + 1, own + 2], [own + 3, own + 4, own + 5]]
    assert source.labels[own:].tolist() == [0, 0, 0, 1, 1, 1]
    first = method.store["images"].clone()
    method = after_task(Mnemonics, few, tmp_path, 1)
    source = method.source
    assert len(source) == own + 12  # six of them restored from the file
    assert torch.equal(method.store["images"][:6], first)
    assert torch.equal(source.images[own:], method.store["images"])
    assert source.labels[own:].tolist() == [c for c in range(4) for _ in range(3)]
    assert method.store["memory"].flatten().tolist() == list(range(own, own + 12))
    assert method.rows_of(range(4)).max() < own  # exemplars are not training images
    assert torch.equal(method.exemplar_rows(), torch.arange(own, own + 12))


def test_increment_trains_factors_and_not_kernels(few: Dataset, tmp_path: Path) -> None:
    method = after_task(Mnemonics, few, tmp_path, 0)
    before = {name: value.clone() for name, value in method.model.named_parameters()}
    assert not [name for name in before if name.endswith(".factor")]
    method = after_task(Mnemonics, few, tmp_path, 1)
    for name, value in method.model.named_parameters():
        if name.endswith(".factor"):
            assert torch.count_nonzero(value - 1) > 0, name
        elif "conv" in name or name == "head.blocks.0.weight":
            assert torch.equal(value, before[name]), name
        elif name in before:
            assert not torch.equal(value, before[name]), name  # norms, and the scale of the head


def test_without_transfer_all_weights_are_trained(few: Dataset, tmp_path: Path) -> None:
    given = {"transfer": False}
    method = after_task(Mnemonics, few, tmp_path, 0, mnemonics=given)
    before = method.model.backbone.stem.conv.weight.detach().clone()
    method = after_task(Mnemonics, few, tmp_path, 1, mnemonics=given)
    assert not torch.equal(method.model.backbone.stem.conv.weight, before)
    assert not [name for name, _ in method.named_parameters() if name.endswith(".factor")]


def test_restored_appends_rows_once(few: Dataset, tmp_path: Path) -> None:
    method = after_task(Mnemonics, few, tmp_path, 0)
    source = method.source
    source.images, source.labels = source.images[: method.originals], source.labels[: method.originals]
    for _ in range(2):
        method.restored()
        assert torch.equal(source.images[method.originals :], method.store["images"])
        assert torch.equal(source.labels[method.originals :], method.store["labels"])


def herded_and_stored(few: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Tensor]:
    """The herded and the stored images of each task."""
    pairs: list[Tensor] = []
    original = Mnemonics.end_task

    def watching(self: Mnemonics, task: Task) -> None:
        herded = self.source.images[self.store["memory"][task.first :].flatten()]
        original(self, task)
        pairs.append(torch.stack([herded, self.source.images[self.store["memory"][task.first :].flatten()]]))

    monkeypatch.setattr(Mnemonics, "end_task", watching)
    finish(make_run(few, out, quick("mnemonics", mnemonics=options)))
    return pairs


def test_released_learning_rate_stores_the_herded_images(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = {"exemplar_lr": 1e-5, "exemplar_epochs": 1, "exemplar_weight_decay": 5e-4}
    pairs = herded_and_stored(few, tmp_path, monkeypatch, **released)
    assert len(pairs) == 3
    assert all(torch.equal(herded, stored) for herded, stored in pairs)


def test_larger_learning_rate_changes_the_pixels(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for herded, stored in herded_and_stored(few, tmp_path, monkeypatch, exemplar_lr=10.0):
        assert not torch.equal(herded, stored)


def in_exemplar_stage(few: Dataset, out: Path) -> tuple[Mnemonics, Batch]:
    """A method in the exemplar stage of its second task, and a batch."""

    def begun(event: ev.Event) -> bool:
        return isinstance(event, ev.StageStarted) and (event.stage, event.task) == ("exemplars", 1)

    method = run_until(make_run(few, out, quick("mnemonics")), Mnemonics, begun)
    rows = torch.cat([method.rows_of([c])[-4:] for c in range(method.task.n_seen)])
    return method, method.source.fetch(rows, None, ("test",))


def test_exemplar_loss(few: Dataset, tmp_path: Path) -> None:
    method, batch = in_exemplar_stage(few, tmp_path)
    method.eval()
    with torch.no_grad():
        features = method.model(batch.images).features
        means = []
        for c in range(4):
            images = method.world.train.fetch(method.store["memory"][c], None, ("test",)).images
            own = method.model(images).features
            if c < 2:  # an old class: its exemplars' directions
                means.append(F.normalize(own, dim=1).mean(0))
            else:
                mine = method.exemplar_images()[3 * (c - 2) : 3 * (c - 1)]
                torch.testing.assert_close(mine, images)  # nothing has been trained yet
                means.append(own.mean(0))
        cosines = torch.stack([F.cosine_similarity(features, m[None], dim=1) for m in means], 1)
    found = method.exemplar_loss(batch)["means"]
    torch.testing.assert_close(found, F.cross_entropy(cosines, batch.labels))


def test_exemplar_stage_trains_only_the_exemplars(few: Dataset, tmp_path: Path) -> None:
    method, batch = in_exemplar_stage(few, tmp_path)
    assert [name for name, p in method.named_parameters() if p.requires_grad] == ["auxiliary.exemplars"]
    exemplars = method.auxiliary["exemplars"]
    before = method.exemplar_loss(batch)["means"]
    (gradient,) = torch.autograd.grad(before, exemplars)
    with torch.no_grad():
        exemplars -= 0.1 * gradient / gradient.norm()
    assert method.exemplar_loss(batch)["means"] < before


def test_exemplar_stage_leaves_the_network_unchanged(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights nor BatchNorm statistics change."""
    states: list[Tensors] = []

    def record(self: Mnemonics, task: Task, stage: Stage) -> None:
        if stage.name == "exemplars":
            assert stage.batchnorm == "frozen"
            states.append(state_of(self.model))

    watch(monkeypatch, Mnemonics, "begin_stage", after=record)
    watch(monkeypatch, Mnemonics, "end_stage", before=record)
    finish(make_run(few, tmp_path, quick("mnemonics")))
    assert len(states) == 6
    for before, after in zip(states[::2], states[1::2], strict=True):
        same(before, after)


@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_have_the_layout_of_the_exemplars(channels: int) -> None:
    """Fused optimizers require the same memory layout, but a network may use channels_last."""
    views = Views(0, False, 0.0, [0.5] * channels, [0.5] * channels)
    source = ImageSource(torch.zeros(4, channels, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), views)
    task = Task(0, 0, 2)
    world = World(torch.device("cpu"), (task,), {"train": source}, seeded(), (channels, 8, 8))
    method = Mnemonics(MnemonicsOptions.model_validate({"net": "tiny", "memory": 2}), world)
    method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method.task = task
    method.grow(task)
    method.store["means"] = torch.zeros(0, 8)
    with torch.no_grad():
        method.auxiliary["exemplars"].normal_(generator=seeded(1))
    batch = source.fetch(torch.arange(4), None, ("test",))
    (gradient,) = torch.autograd.grad(method.exemplar_loss(batch)["means"], method.auxiliary["exemplars"])
    assert gradient.stride() == method.auxiliary["exemplars"].stride()


def test_stored_images_of_another_size_are_refused() -> None:
    """When the method is built, before any training."""
    views = Views(0, False, 0.0, [0.5], [0.5])
    source = ImageSource(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), views)
    world = World(torch.device("cpu"), (Task(0, 0, 2),), {"train": source}, seeded(), (1, 6, 6))
    with pytest.raises(ConfigError, match=r"input shape \[1, 6, 6\].* \[1, 8, 8\].*image_size=8"):
        Mnemonics(MnemonicsOptions.model_validate({"net": "tiny"}), world)


@pytest.mark.parametrize("host", ["icarl", "lucir"])
def test_increment_loss(host: str, few: Dataset, tmp_path: Path) -> None:
    method = in_task(Mnemonics, few, tmp_path, mnemonics={"host": host})
    batch = method.source.fetch(method.rows_of([1, 2])[35:45], None, ("test",))
    method.eval()
    assert next(iter(method(batch.images))) == {"icarl": "nme", "lucir": "cnn"}[host]  # the reported classifier
    terms = method.loss(batch)
    if host == "lucir":
        assert list(terms) == ["ce", "forget", "margin"]
        return
    assert method.teacher is not None
    total = 0.0
    new, old = (model(batch.images).logits.detach() for model in (method.model, method.teacher))
    for z, reference in zip(new, old, strict=True):
        p, q = (reference / 2).softmax(0), (z[:2] / 2).softmax(0)
        total += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))
    assert math.isclose(terms["distil"].item(), 0.25 * 4 * total / 10, rel_tol=1e-3, abs_tol=1e-6)
    torch.testing.assert_close(terms["ce"].detach(), F.cross_entropy(new, batch.labels))


def test_addons_act_on_factors_from_the_second_increment(few: Dataset, tmp_path: Path) -> None:
    """Of the stem's convolution and norm, only the norm has an F in the first increment."""
    run = make_run(few, tmp_path, quick("mnemonics", "ivt"))
    finish(run)
    first, second = ({p for p in run.progress.statistics[task]["ivt"] if "stem" in p} for task in (1, 2))
    assert first == {"backbone.stem.norm"}
    assert second == {"backbone.stem.conv", "backbone.stem.norm"}


def test_fixed_total_shrinks_the_memory(few: Dataset, tmp_path: Path) -> None:
    method = after_task(Mnemonics, few, tmp_path, 1, mnemonics={"memory_total": 12})
    source, own = method.source, len(few.train_labels)
    assert len(source) == own + 2 * 6 + 2 * 3
    assert method.store["memory"].shape == (4, 3)
    assert method.store["memory"][1].tolist() == [own + 6, own + 7, own + 8]
    assert source.labels[method.exemplar_rows()].tolist() == [c for c in range(4) for _ in range(3)]
