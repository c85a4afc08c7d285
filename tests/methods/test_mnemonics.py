"""Mnemonics: exemplars as parameters, then as rows of the source; factors on frozen kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.contracts import Batch, Stage, Task, World
from incvec.data import Dataset, ImageSource, Views
from incvec.engine import events as ev
from incvec.engine.run import Run, finish
from incvec.errors import ConfigError
from incvec.methods.mnemonics import Mnemonics, MnemonicsOptions, ScaledConv, nearest_mean_loss, to_pixels
from incvec.presets import preset
from tests.addons.tools import Tensors, same, state_of, watch
from tests.conftest import make_run, quick


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def method_of(run: Run) -> tuple[Mnemonics, ImageSource]:
    method = run.parts.method
    assert isinstance(method, Mnemonics)
    source = method.world.train
    assert isinstance(source, ImageSource)
    return method, source


def run_until(run: Run, done: Callable[[ev.Event], bool]) -> tuple[Mnemonics, ImageSource]:
    for event in run.events():
        if done(event):
            break
    return method_of(run)


def after_tasks(run: Run, tasks: int) -> tuple[Mnemonics, ImageSource]:
    return run_until(run, lambda event: run.position[0] == tasks)


@pytest.mark.parametrize("size", [1, 3])
def test_factors_scale_the_kernel_of_each_pair_of_channels(size: int) -> None:
    conv = ScaledConv(3, 4, size, 2, size // 2, bias=False)
    x = torch.randn(2, 3, 6, 6, generator=generator())
    plain = F.conv2d(x, conv.weight, stride=2, padding=size // 2)
    assert torch.equal(conv(x), plain)
    conv.attach()
    assert torch.equal(conv(x), plain)
    assert conv.factor is not None
    with torch.no_grad():
        conv.factor.copy_(torch.randn(4, 3, 1, 1, generator=generator(1)))
    kernel = torch.empty_like(conv.weight)
    for out in range(4):
        for into in range(3):
            kernel[out, into] = conv.weight[out, into].detach() * conv.factor[out, into].item()
    torch.testing.assert_close(conv(x), F.conv2d(x, kernel, stride=2, padding=size // 2))


def test_nearest_mean_loss_against_a_plain_sum() -> None:
    features, means, labels = [[1.0, 2.0], [3.0, -1.0]], [[2.0, 0.5], [0.0, 4.0], [-1.0, -1.0]], [1, 0]
    total = 0.0
    for f, y in zip(features, labels, strict=True):
        cosines = [sum(a * b for a, b in zip(f, m, strict=True)) / math.hypot(*f) / math.hypot(*m) for m in means]
        total += math.log(sum(math.exp(c) for c in cosines)) - cosines[y]
    found = nearest_mean_loss(torch.tensor(features), torch.tensor(means), torch.tensor(labels))
    assert math.isclose(found.item(), total / 2, rel_tol=1e-6)


def test_pixels_come_back_rounded_and_clipped() -> None:
    mean, std = torch.tensor([0.5, 0.4])[:, None, None], torch.tensor([0.2, 0.3])[:, None, None]
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 2, 16, 16)
    normal = (every / 255 - mean) / std
    assert torch.equal(to_pixels(normal, mean, std), every)
    step = 1 / 255 / std
    assert torch.equal(to_pixels(normal + 0.4 * step, mean, std), every)
    assert torch.equal(to_pixels(normal + 0.6 * step, mean, std), every.int().add(1).clamp(max=255).to(torch.uint8))
    assert torch.equal(to_pixels(normal - 300 * step, mean, std), torch.zeros_like(every))


def test_state_over_two_tasks(few: Dataset, tmp_path: Path) -> None:
    given = quick("mnemonics")
    method, source = after_tasks(make_run(few, tmp_path, given), 1)
    own = len(few.train_labels)
    assert method.originals == own
    assert len(source) == own + 6
    assert method.store["memory"].tolist() == [[own, own + 1, own + 2], [own + 3, own + 4, own + 5]]
    assert source.labels[own:].tolist() == [0, 0, 0, 1, 1, 1]
    first = method.store["images"].clone()
    method, source = after_tasks(make_run(few, tmp_path, given), 2)
    assert len(source) == own + 12  # six of them made again from the file
    assert torch.equal(method.store["images"][:6], first)
    assert torch.equal(source.images[own:], method.store["images"])
    assert source.labels[own:].tolist() == [c for c in range(4) for _ in range(3)]
    assert method.store["memory"].flatten().tolist() == list(range(own, own + 12))
    assert method.rows_of(range(4)).max() < own  # never taken for training images
    assert torch.equal(method.exemplar_rows(), torch.arange(own, own + 12))


def test_an_increment_leaves_the_kernels_alone(few: Dataset, tmp_path: Path) -> None:
    given = quick("mnemonics")
    method, _ = after_tasks(make_run(few, tmp_path, given), 1)
    before = {name: value.clone() for name, value in method.model.named_parameters()}
    assert not [name for name in before if name.endswith(".factor")]
    method, _ = after_tasks(make_run(few, tmp_path, given), 2)
    for name, value in method.model.named_parameters():
        if name.endswith(".factor"):
            assert torch.count_nonzero(value - 1) > 0, name
        elif "conv" in name or name == "head.blocks.0.weight":
            assert torch.equal(value, before[name]), name
        elif name in before:
            assert not torch.equal(value, before[name]), name  # norms, and the scale of the head


def test_without_transfer_all_weights_are_trained(few: Dataset, tmp_path: Path) -> None:
    given = quick("mnemonics", mnemonics={"transfer": False})
    method, _ = after_tasks(make_run(few, tmp_path, given), 1)
    before = method.model.backbone.stem.conv.weight.detach().clone()
    method, _ = after_tasks(make_run(few, tmp_path, given), 2)
    assert not torch.equal(method.model.backbone.stem.conv.weight, before)
    assert not [name for name, _ in method.named_parameters() if name.endswith(".factor")]


def test_rows_are_made_again_once_only(few: Dataset, tmp_path: Path) -> None:
    method, source = after_tasks(make_run(few, tmp_path, quick("mnemonics")), 1)
    source.images, source.labels = source.images[: method.originals], source.labels[: method.originals]
    for _ in range(2):
        method.restored()
        assert torch.equal(source.images[method.originals :], method.store["images"])
        assert torch.equal(source.labels[method.originals :], method.store["labels"])


def herded_and_kept(few: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Tensor]:
    """What was herded and what was stored, task by task."""
    pairs: list[Tensor] = []
    original = Mnemonics.end_task

    def watching(self: Mnemonics, task: Task) -> None:
        source = self.world.train
        assert isinstance(source, ImageSource)
        herded = source.images[self.store["memory"][task.first :].flatten()]
        original(self, task)
        pairs.append(torch.stack([herded, source.images[self.store["memory"][task.first :].flatten()]]))

    monkeypatch.setattr(Mnemonics, "end_task", watching)
    finish(make_run(few, out, quick("mnemonics", mnemonics=options)))
    return pairs


def test_the_released_rate_stores_what_was_herded(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = {"exemplar_lr": 1e-5, "exemplar_epochs": 1, "exemplar_weight_decay": 5e-4}
    pairs = herded_and_kept(few, tmp_path, monkeypatch, **released)
    assert len(pairs) == 3
    assert all(torch.equal(herded, kept) for herded, kept in pairs)


def test_a_larger_rate_moves_the_pixels(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for herded, kept in herded_and_kept(few, tmp_path, monkeypatch, exemplar_lr=10.0):
        assert not torch.equal(herded, kept)


def exemplar_stage(run: Run, task: int) -> tuple[Mnemonics, Batch]:
    """A method in the exemplar stage of a task, in eval mode, and a batch."""

    def begun(event: ev.Event) -> bool:
        return isinstance(event, ev.StageStarted) and event.stage == "exemplars" and event.task == task

    method, source = run_until(run, begun)
    rows = torch.cat([method.rows_of([c])[-4:] for c in range(method.task.n_seen)])
    return method, source.fetch(rows, None, ("test",))


def test_the_loss_of_the_exemplars(few: Dataset, tmp_path: Path) -> None:
    method, batch = exemplar_stage(make_run(few, tmp_path, quick("mnemonics")), 1)
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


def test_only_the_exemplars_get_a_gradient(few: Dataset, tmp_path: Path) -> None:
    method, batch = exemplar_stage(make_run(few, tmp_path, quick("mnemonics")), 1)
    assert [name for name, p in method.named_parameters() if p.requires_grad] == ["auxiliary.exemplars"]
    exemplars = method.auxiliary["exemplars"]
    before = method.exemplar_loss(batch)["means"]
    (gradient,) = torch.autograd.grad(before, exemplars)
    with torch.no_grad():
        exemplars -= 0.1 * gradient / gradient.norm()
    assert method.exemplar_loss(batch)["means"] < before


def test_the_network_rests_while_the_exemplars_are_trained(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and BatchNorm's statistics alike; both stages of a task in turn."""
    states: list[Tensors] = []

    def note(self: Mnemonics, task: Task, stage: Stage) -> None:
        if stage.name == "exemplars":
            assert stage.batchnorm == "frozen"
            states.append(state_of(self.model))

    watch(monkeypatch, Mnemonics, "begin_stage", after=note)
    watch(monkeypatch, Mnemonics, "end_stage", before=note)
    finish(make_run(few, tmp_path, quick("mnemonics")))
    assert len(states) == 6
    for before, after in zip(states[::2], states[1::2], strict=True):
        same(before, after)


@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_lie_as_the_exemplars_do(channels: int) -> None:
    """Fused optimizers walk parameter and gradient alike, but a network may work in another memory format."""
    views = Views(0, False, 0.0, [0.5] * channels, [0.5] * channels)
    source = ImageSource(torch.zeros(4, channels, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), views)
    task = Task(0, 0, 2, 1)
    world = World(torch.device("cpu"), (task,), {"train": source}, generator(), (channels, 8, 8))
    method = Mnemonics(MnemonicsOptions.model_validate({"net": "tiny", "memory": 2}), world)
    method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method.task = task
    method.grow(task)
    method.store["means"] = torch.zeros(0, 8)
    with torch.no_grad():
        method.auxiliary["exemplars"].normal_(generator=generator(1))
    batch = source.fetch(torch.arange(4), None, ("test",))
    (gradient,) = torch.autograd.grad(method.exemplar_loss(batch)["means"], method.auxiliary["exemplars"])
    assert gradient.stride() == method.auxiliary["exemplars"].stride()


def test_images_stored_larger_than_they_are_seen_are_refused() -> None:
    """Before the base task is trained, not when its exemplars are to be stored."""
    views = Views(0, False, 0.0, [0.5], [0.5])
    source = ImageSource(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), views)
    world = World(torch.device("cpu"), (Task(0, 0, 2, 1),), {"train": source}, generator(), (1, 6, 6))
    with pytest.raises(ConfigError, match=r"input shape \[1, 6, 6\].* \[1, 8, 8\].*image_size=8"):
        Mnemonics(MnemonicsOptions.model_validate({"net": "tiny"}), world)


@pytest.mark.parametrize("host", ["icarl", "lucir"])
def test_the_loss_of_an_increment(host: str, few: Dataset, tmp_path: Path) -> None:
    def epoch(event: ev.Event) -> bool:
        return isinstance(event, ev.EpochEnded) and event.task == 1

    method, source = run_until(make_run(few, tmp_path, quick("mnemonics", mnemonics={"host": host})), epoch)
    batch = source.fetch(method.rows_of([1, 2])[35:45], None, ("test",))
    method.eval()
    assert next(iter(method(batch.images))) == {"icarl": "nme", "lucir": "cnn"}[host]  # the one that is reported
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


def test_add_ons_reach_the_factors_from_the_second_increment_on(few: Dataset, tmp_path: Path) -> None:
    """The stem has a convolution and a norm: of the two only the norm has a past in the first increment."""
    run = make_run(few, tmp_path, quick("mnemonics", "ivt"))
    finish(run)
    first, second = ({p for p in run.progress.statistics[task]["ivt"] if "stem" in p} for task in (1, 2))
    assert first == {"backbone.stem.norm"}
    assert second == {"backbone.stem.conv", "backbone.stem.norm"}


def test_a_fixed_total_shrinks_the_memory(few: Dataset, tmp_path: Path) -> None:
    method, source = after_tasks(make_run(few, tmp_path, quick("mnemonics", mnemonics={"memory_total": 12})), 2)
    own = len(few.train_labels)
    assert len(source) == own + 2 * 6 + 2 * 3
    assert method.store["memory"].shape == (4, 3)
    assert method.store["memory"][1].tolist() == [own + 6, own + 7, own + 8]
    assert source.labels[method.exemplar_rows()].tolist() == [c for c in range(4) for _ in range(3)]


def test_presets_differ_as_the_settings_do() -> None:
    assert preset("mnemonics", "cifar100") == {}
    assert preset("mnemonics", "cifar100", "authors") == {"memory_total": 2000}
