"""Methods on dual encoders: FLYP's loss and SPU's mask restated, zero-shot, and short runs on the digits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.contracts import Batch, Schedule
from incvec.data import DATASETS, Dataset
from incvec.engine import events as ev
from incvec.engine.loop import StageLoop
from incvec.engine.run import Run, finish
from incvec.errors import ConfigError
from incvec.methods import find_method
from incvec.methods.dual import DualMethod
from incvec.methods.flyp import FLYP, contrastive_loss
from incvec.methods.spu import SPU, row_energy, top_mask
from incvec.methods.zeroshot import ZeroShot
from incvec.nets.dual import Dual
from incvec.presets import resolve
from tests.conftest import make_run, quick, weights
from tests.methods.tools import cross_entropy, finished, seeded, some_batch, trained

NO_CLIP = {"weights": None, "tag": None}


def encode_images(dual: Dual, images: Tensor) -> Tensor:
    """Unit vectors of images."""
    return F.normalize(dual.embed_images(dual.image_tower(images)), dim=-1)


def some(rows: int, columns: int) -> Tensor:
    return 3 * torch.randn(rows, columns, generator=seeded(1))


# The contrastive loss ----------------------------------------------------------------------------------------


def test_contrastive_loss() -> None:
    similarities = some(5, 5)
    rows: list[list[float]] = similarities.tolist()
    columns = [list(column) for column in zip(*rows, strict=True)]
    wanted = (cross_entropy(rows, list(range(5))) + cross_entropy(columns, list(range(5)))) / 2
    assert contrastive_loss(similarities).item() == pytest.approx(wanted, rel=1e-5)


def test_loss_with_m_images_per_class_approaches_log_m() -> None:
    perfect = 50 * torch.block_diag(torch.ones(3, 3), torch.ones(3, 3))
    assert contrastive_loss(perfect).item() == pytest.approx(math.log(3), rel=1e-4)


@pytest.mark.parametrize("oracle", [False, True])
def test_batch_loss_has_one_caption_per_image(oracle: bool, few: Dataset, tmp_path: Path) -> None:
    method = trained(FLYP, few, tmp_path).eval()
    method.world.oracle = oracle
    whole = some_batch(method)
    rows = slice(None) if oracle else whole.labels >= method.task.first
    batch = Batch((whole.images[rows],), whole.labels[rows], whole.indices[rows])
    names = [method.world.class_names[label] for label in batch.labels.tolist()]
    words = ("zero", "one", "two", "three", "four", "five")
    dual = method.model.dual
    captions = dual.encode_texts(dual.tokenize([f"a photo of {words[int(name)]}" for name in names]))
    similarities = dual.logit_scale.exp() * encode_images(dual, batch.images) @ captions.T
    count = len(names)
    rows_of: list[list[float]] = similarities.tolist()
    wanted = cross_entropy(rows_of, list(range(count))) + cross_entropy(similarities.T.tolist(), list(range(count)))
    terms = method.loss(batch)
    assert list(terms) == ["contrastive"]
    assert terms["contrastive"].item() == pytest.approx(wanted / 2, rel=1e-4)


# Runs --------------------------------------------------------------------------------------------------------


def test_all_parameters_are_trained_and_batchnorm_is_frozen(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "flyp")
    first, last = weights(run.snapshot_path(0)), weights(run.snapshot_path(2))
    for name, _ in run.parts.method.named_parameters():
        assert not torch.equal(first[f"method/{name}"], last[f"method/{name}"]), name
    for name, _ in run.parts.method.named_buffers(remove_duplicate=False):
        if name.endswith(("running_mean", "running_var")):
            assert torch.equal(first[f"method/{name}"], last[f"method/{name}"]), name


def test_classifier_uses_the_current_text_tower(few: Dataset, tmp_path: Path) -> None:
    method = trained(FLYP, few, tmp_path, templates="aircraft").eval()
    words = {"0": "zero", "1": "one", "2": "two", "3": "three", "4": "four", "5": "five"}
    dual, found = method.model.dual, method.store["classes"]
    for row, name in zip(found, method.world.class_names, strict=True):
        both = [f"a photo of {article} {words[name]}, a type of aircraft." for article in ("a", "the")]
        mean = dual.encode_texts(dual.tokenize(both)).mean(0)
        torch.testing.assert_close(row, mean / mean.norm())
    images = some_batch(method).images
    scores = method(images)
    assert list(scores) == ["text"]
    torch.testing.assert_close(scores["text"], 100 * encode_images(dual, images) @ found.T)
    with torch.autocast("cpu", torch.bfloat16):
        assert method(images)["text"].dtype == torch.float32


def test_zeroshot_changes_nothing(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("zeroshot"))
    record = finish(run)
    first, last = weights(run.snapshot_path(0)), weights(run.snapshot_path(2))
    for name, tensor in first.items():
        if name.startswith("method/"):
            assert torch.equal(tensor, last[name])
    assert record["losses"] == []
    assert len(record["accuracy"]) == 3


@pytest.mark.parametrize("method", ["zeroshot", "rapf"])
def test_frozen_towers_encode_each_test_image_once(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    encode = DualMethod.encode

    def counting(self: DualMethod, images: Tensor) -> Tensor:
        counts.append(len(images))
        return encode(self, images)

    monkeypatch.setattr(DualMethod, "encode", counting)
    record = finish(make_run(few, tmp_path / "once", quick(method)))
    assert sum(counts) == len(few.test_labels)
    monkeypatch.setattr(find_method(method), "frozen_encoder", False)
    counts.clear()
    again = finish(make_run(few, tmp_path / "anew", quick(method)))
    assert sum(counts) == len(few.test_labels) * (2 + 4 + 6) / 6
    assert again["correct"] == record["correct"]
    assert again["accuracy"] == record["accuracy"]


def test_magmax_starts_from_the_pretrained_weights(few: Dataset, tmp_path: Path) -> None:
    begin = {n: t.clone() for n, t in trained(ZeroShot, few, tmp_path / "none").model.named_parameters()}
    plain = finished(few, tmp_path / "plain", "flyp")
    merged = finished(few, tmp_path / "merged", "flyp", "magmax")
    tasks = [weights(plain.snapshot_path(task)) for task in range(3)]
    for task in range(3):
        deployed = weights(merged.snapshot_path(task))
        for name, theta in begin.items():
            vectors = torch.stack([tasks[t][f"method/model.{name}"] - theta for t in range(task + 1)])
            largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
            torch.testing.assert_close(deployed[f"method/model.{name}"], theta + 0.5 * largest)


@pytest.mark.parametrize("method", ["flyp", "spu", "slca", "rapf"])
@pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])
def test_two_tasks_on_digits(method: str, addons: tuple[str, ...], few: Dataset, tmp_path: Path) -> None:
    given = {
        "method": method,
        "addons": addons,
        "dataset": "digits",
        "base_classes": 3,
        "tasks": 1,
        method: {"epochs": 6},
    }
    record = finish(Run(resolve(given), few, tmp_path))
    (base,), (_, new) = record["accuracy"]
    assert base > 60  # chance is 33
    assert new > 35  # chance is 17
    if addons:
        assert record["config"]["ivt"]["interval"] == 3
        assert 0.5 <= record["statistics"][1]["ivt"]["all"]["scale"] <= 1


def test_settings_of_pretrained_methods() -> None:
    config = resolve({"method": "flyp", "addons": ["ivt"], "dataset": "cifar100"})
    assert (config.base_classes, config.tasks) == (0, 10)
    own = config.sections["flyp"]
    assert (own["optimizer"], own["lr"], own["epochs"], own["batch_size"]) == ("adam", 5e-6, 10, 64)
    assert (own["weight_decay"], own["schedule"], own["tag"]) == (0, "constant", "openai")
    assert config.sections["ivt"]["interval"] == 3
    for dataset in DATASETS:
        other = resolve({"method": "flyp", "addons": ["ivt"], "dataset": dataset, "flyp": {"net": "small", **NO_CLIP}})
        assert (other.sections["ivt"]["interval"], other.base_classes) == (3, 0), dataset
    scratch = resolve({"method": "podnet", "addons": ["ivt"], "dataset": "cifar100"})
    assert (scratch.base_classes, scratch.sections["ivt"]["interval"]) == (50, 10)
    small = resolve({"method": "slca", "dataset": "aircraft", "variant": "lite"}).sections["slca"]
    assert (small["net"], small["tag"], small["templates"]) == ("lite0-minilm", None, "aircraft")
    for method in ("zeroshot", "flyp", "slca", "spu"):  # another model, learning rate and size; the same sentences
        clip, lite = (
            resolve({"method": method, "dataset": "cifar100", "variant": v}).sections for v in ("paper", "lite")
        )
        changed = {key for key, value in lite[method].items() if value != clip[method][key]}
        assert changed - {"lr", "align_lr"} == {"net", "weights", "tag", "pixels"}
    with pytest.raises(ConfigError, match="`tag`, the origin of the weights"):
        resolve({"method": "flyp", "dataset": "folder"})


def test_spu_cosine_schedule() -> None:
    """The learning rates of SPU's scheduler in units of 1e-6, for 10 epochs and 10 tasks at 5e-6."""
    flyp = 5 * Schedule("spu_cosine", cycle=100).factors(10)
    assert flyp[:2].tolist() == [0, 5]
    assert flyp[9].item() == pytest.approx(4.92, abs=0.005)
    slca = 5 * Schedule("spu_cosine").factors(10)
    assert slca[0] == 0
    assert slca[1:].tolist() == pytest.approx([5.0, 4.85, 4.42, 3.75, 2.93, 2.07, 1.25, 0.59, 0.15], abs=0.006)
    assert (5 * Schedule("spu_cosine").factors(3)).tolist() == pytest.approx([0, 5, 2.5])


@pytest.mark.parametrize(("method", "cycle"), [("flyp", 9), ("spu", 9), ("slca", 3)])
def test_run_with_spu_cosine_schedule(method: str, cycle: int, few: Dataset, tmp_path: Path) -> None:
    """Three tasks of three epochs."""
    options: dict[str, Any] = {"epochs": 3, "schedule": "spu_cosine", "lr": 0.01}
    if method == "slca":
        options |= {"align_schedule": "spu_cosine", "align_epochs": 3, "align_lr": 0.02}
    run = make_run(few, tmp_path, quick(method, **{method: options}))
    rates: dict[str, list[float]] = {"main": [], "align": []}
    prepare = StageLoop.begin_epoch

    def recording(self: StageLoop, *given: Any) -> None:
        prepare(self, *given)
        if self.optimizer is not None:
            rates[self.stage.name].append(float(self.optimizer.param_groups[0]["lr"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLoop, "begin_epoch", recording)
        for event in run.events():
            if isinstance(event, ev.StageStarted) and event.stage == "main":
                begin = [p.detach().clone() for p in run.parts.method.parameters()]
    falling = 0.01 * (1 + math.cos(math.pi / (cycle - 1))) / 2
    assert rates["main"] == pytest.approx(3 * [0, 0.01, falling])
    assert rates["align"] == pytest.approx(3 * [0, 0.02, 0.01] if method == "slca" else [])
    assert any(not torch.equal(a, b) for a, b in zip(begin, run.parts.method.parameters(), strict=True))


def test_spu_cosine_with_one_epoch_is_refused() -> None:
    for epochs in ({"epochs": 1}, {"base_epochs": 1}):
        with pytest.raises(ConfigError, match="trains nothing"):
            resolve({"method": "flyp", "dataset": "digits", "flyp": {"schedule": "spu_cosine", **epochs}})


# SPU ---------------------------------------------------------------------------------------------------------


def test_spu_energy_and_mask() -> None:
    assert row_energy(torch.tensor([[1.0, 2.0], [3.0, 0.0]])).item() == pytest.approx((5 + 9) / 2)
    score = torch.tensor([[0.1, -5.0, 2.0], [0.0, 3.0, -0.2]])
    assert top_mask(score, 0.5).tolist() == [[False, True, True], [False, True, False]]
    assert top_mask(score, 0.01).sum() == 1


def test_spu_updates_a_tenth_of_the_first_layers(few: Dataset, tmp_path: Path) -> None:
    begin = dict(trained(ZeroShot, few, tmp_path / "none").model.named_parameters())
    run = make_run(few, tmp_path / "spu", quick("spu", tasks=1, base_classes=4))
    finish(run)
    after = weights(run.snapshot_path(0))
    free = 0
    for name, old in begin.items():
        moved = after[f"method/model.{name}"] != old
        if "image_projection" in name or name.endswith("fc1.bias"):
            assert moved.all(), name
            free += 1
        elif "conv1" in name or "fc1" in name:
            mask = after[f"store/mask.model.{name}"]
            assert mask.sum() == max(1, int(0.1 * old.numel()))
            assert torch.equal(moved, mask), name
            free += 1
        else:
            assert not moved.any(), name
    assert free == 5  # two convolutions, a linear layer's two tensors, the projection


def test_spu_scores_are_summed_gradients(few: Dataset, tmp_path: Path) -> None:
    method = trained(SPU, few, tmp_path).eval()
    score, main = method.stages(method.task)
    rows = method.begin_stage(method.task, score)
    assert len(rows) == 20  # a quarter of two classes of 40
    assert (score.optimizer, score.role, main.role) == (None, "measure", "main")
    batches = [method.world.train.fetch(part, None, ("test",)) for part in rows.split(10)]
    named = {name: p for name, p in method.named_parameters() if any(group.owns(name) for group in score.groups)}
    total: dict[str, Tensor] = {}
    for parameter in method.parameters():
        parameter.requires_grad_(True)
    for batch in batches:
        similarities = method.model.dual.similarities(
            encode_images(method.model.dual, batch.images), method.captions(batch.labels)[0]
        )[:, batch.labels - method.task.first]
        energy = sum((row**2).sum() for row in similarities) / len(similarities)
        for name, gradient in zip(named, torch.autograd.grad(energy, list(named.values())), strict=True):
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
        found = torch.autograd.grad(method.energy(batch)["energy"], list(named.values()))
        for parameter, gradient in zip(named.values(), found, strict=True):
            parameter.grad = gradient
        method.gradients(named)
    for name in [name for name, p in method.candidates().items() if p.dim() > 1]:
        torch.testing.assert_close(method.store[f"score.{name}"], total[name], rtol=1e-3, atol=1e-4)
    method.end_stage(method.task, score)
    method.gradients(named)
    for name in [name for name, p in method.candidates().items() if p.dim() > 1]:
        gradient = named[name].grad
        assert gradient is not None
        assert torch.equal(gradient != 0, method.store[f"mask.{name}"])
