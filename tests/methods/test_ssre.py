"""SSRE: adapters that are folded into kernels, losses weighted by similarity, and prototypes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from incvec.data import Dataset
from incvec.methods.common import extract_features, replace_convs
from incvec.methods.ssre import SSRE, AdaptedConv, prototype_similarity, weighted_cross_entropy, weighted_distillation
from tests.methods.tools import after_task, cosine, finished, in_task, seeded


def adapted(stride: int = 1) -> AdaptedConv:
    conv = AdaptedConv(3, 4, 3, stride, 1, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.randn(4, 3, 3, 3, generator=seeded(1)))
        conv.attach()
        assert conv.adapter is not None
        conv.adapter.copy_(torch.randn(4, 3, 1, 1, generator=seeded(2)))
    return conv


@pytest.mark.parametrize("stride", [1, 2])
def test_adapter_is_a_parallel_1x1_convolution(stride: int) -> None:
    conv = adapted(stride)
    assert conv.adapter is not None
    x = torch.randn(2, 3, 6, 6, generator=seeded(3))
    apart = F.conv2d(x, conv.weight, stride=stride, padding=1) + F.conv2d(x, conv.adapter, stride=stride)
    torch.testing.assert_close(conv(x), apart)


def test_folding_changes_no_output_and_resets_the_adapter() -> None:
    conv = adapted()
    assert conv.adapter is not None
    x = torch.randn(2, 3, 6, 6, generator=seeded(3))
    before, kernel = conv(x), conv.weight.detach().clone()
    middle = conv.adapter.detach().clone()
    parameter = conv.adapter
    conv.fold()
    assert torch.equal(conv(x), before)
    assert conv.adapter is parameter
    assert torch.count_nonzero(conv.adapter) == 0
    kernel[:, :, 1, 1] += middle[:, :, 0, 0]
    assert torch.equal(conv.weight, kernel)


def test_conv_without_adapter_is_a_plain_convolution() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.Conv2d(4, 4, 1))
    x = torch.randn(2, 3, 6, 6, generator=seeded(3))
    expected, names, objects = plain(x), list(plain.state_dict()), [id(p) for p in plain.parameters()]
    state = torch.get_rng_state()
    replace_convs(plain, AdaptedConv, lambda conv: conv.kernel_size == (3, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(plain[0], AdaptedConv)
    assert type(plain[1]) is nn.Conv2d
    assert list(plain.state_dict()) == names
    assert [id(p) for p in plain.parameters()] == objects
    assert torch.equal(plain(x), expected)


FEATURES = [[1.0, 2.0], [3.0, -1.0], [-2.0, -1.0]]
OLD = [[1.5, 2.0], [3.0, 1.0], [-2.0, -1.0]]
PROTOTYPES = [[2.0, 1.0], [0.0, 3.0]]


def test_prototype_similarity() -> None:
    features = torch.tensor(FEATURES, requires_grad=True)
    s = prototype_similarity(features, torch.tensor(PROTOTYPES))
    expected = [max(0.0, *(cosine(f, p) for p in PROTOTYPES)) for f in FEATURES]
    assert expected[2] == 0  # opposite to both
    torch.testing.assert_close(s, torch.tensor(expected))
    assert not s.requires_grad


def test_weighted_losses() -> None:
    logits, labels, s = [[1.0, 0.5, -1.0], [0.2, 0.1, 0.3]], [0, 2], [0.25, 0.9]
    total = 0.0
    for z, y, weight in zip(logits, labels, s, strict=True):
        scaled = [value / 0.1 for value in z]
        total += (1 - weight) * (math.log(sum(math.exp(v) for v in scaled)) - scaled[y])
    found = weighted_cross_entropy(torch.tensor(logits), torch.tensor(labels), torch.tensor(s), 0.1)
    assert math.isclose(found.item(), total / 2, rel_tol=1e-5)
    weights = [0.5, 0.2, 0.7]
    far = sum(w * math.dist(a, b) for w, a, b in zip(weights, FEATURES, OLD, strict=True))
    found = weighted_distillation(torch.tensor(FEATURES), torch.tensor(OLD), torch.tensor(weights))
    assert math.isclose(found.item(), far, rel_tol=1e-6)


def test_equal_features_have_a_finite_gradient() -> None:
    features = torch.tensor(FEATURES, requires_grad=True)
    weighted_distillation(features, torch.tensor(FEATURES), torch.ones(3)).backward()
    assert features.grad is not None
    assert torch.equal(features.grad, torch.zeros(3, 2))


def test_increment_changes_folded_kernels_and_head_only(few: Dataset, tmp_path: Path) -> None:
    method = after_task(SSRE, few, tmp_path, 0)
    assert method.store["prototypes"].shape == (2, 8)
    assert all(conv.adapter is None for conv in method.adapted_convs().values())
    first = method.store["prototypes"].clone()
    before = {name: value.clone() for name, value in method.model.state_dict().items()}
    method = after_task(SSRE, few, tmp_path, 1)
    assert len(method.adapted_convs()) == 4  # two in each block; the stem has none
    assert torch.equal(method.model.backbone.stem.conv.weight, before["backbone.stem.conv.weight"])
    assert torch.equal(method.store["prototypes"][:2], first)
    for conv in method.adapted_convs().values():
        assert conv.adapter is not None
        assert torch.count_nonzero(conv.adapter) == 0
    moved = set()
    for name, value in method.model.state_dict().items():
        if name in before and not torch.equal(before[name], value):
            moved.add(name)
            if "head" not in name:
                change = value - before[name]
                assert torch.count_nonzero(change[:, :, 1, 1]) > 0
                change[:, :, 1, 1] = 0
                assert torch.count_nonzero(change) == 0, name
    convs = {f"{name.removeprefix('model.')}.weight" for name in method.adapted_convs()}
    assert moved == convs | {"head.blocks.0.weight", "head.blocks.0.bias"}  # neither norms nor their statistics
    rows = method.rows_of([2, 3])
    features, labels = extract_features(method.model, method.world, rows), method.world.train.labels[rows]
    for c in (2, 3):
        torch.testing.assert_close(method.store["prototypes"][c], features[labels == c].mean(0))


def test_increment_trains_adapters_and_classifier(few: Dataset, tmp_path: Path) -> None:
    method = after_task(SSRE, few, tmp_path, 0)
    stage = method.stages(method.world.tasks[1])[0]
    assert stage.batchnorm == "frozen"
    names = stage.groups[0].prefixes
    assert "model.head" in names
    assert {n for n in names if n != "model.head"} == {f"{n}.adapter" for n in method.adapted_convs()}


def test_increment_loss(few: Dataset, tmp_path: Path) -> None:
    """The three terms, image by image, in the second task."""
    method = in_task(SSRE, few, tmp_path)
    assert method.teacher is not None
    method.eval()
    batch = method.world.train.fetch(method.rows_of([2, 3])[:7], None, ("test",))
    method.world.generator.manual_seed(3)
    terms = method.loss(batch)
    method.world.generator.manual_seed(3)
    drawn = torch.randint(2, (7,), generator=method.world.generator)
    output, old = method.model(batch.images), method.teacher(batch.images).features
    prototypes = method.store["prototypes"]
    ce = distil = 0.0
    for f, g, z, y in zip(output.features, old, output.logits, batch.labels, strict=True):
        s = max(0.0, *(F.cosine_similarity(f, p, dim=0).item() for p in prototypes))
        ce += (1 - s) * F.cross_entropy(z / 0.1, y).item() / 7
        distil += s * torch.dist(f, g).item()
    replayed = F.cross_entropy(method.model.head(prototypes[drawn]) / 0.1, drawn).item()
    assert math.isclose(terms["ce"].item(), ce, rel_tol=1e-4)
    assert math.isclose(terms["distil"].item(), distil, rel_tol=1e-3, abs_tol=1e-4)
    assert math.isclose(terms["prototypes"].item(), 10 * replayed, rel_tol=1e-4)


def test_base_task_loss_uses_the_temperature(few: Dataset, tmp_path: Path) -> None:
    method = in_task(SSRE, few, tmp_path, 0, ssre={"temperature": 0.3})
    method.eval()
    batch = method.world.train.fetch(method.rows_of([0, 1])[::10], None, ("test",))
    terms = method.loss(batch)
    assert list(terms) == ["ce"]
    logits = method.model(batch.images).logits
    torch.testing.assert_close(terms["ce"], F.cross_entropy(logits / 0.3, batch.labels))
    assert not torch.allclose(terms["ce"], F.cross_entropy(logits, batch.labels), rtol=1e-2)


def test_addons_act_on_adapters_from_the_second_increment(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "ssre", "ivt")
    first, second = (set(run.progress.statistics[task]["ivt"]) - {"teleports"} for task in (1, 2))
    assert first == {"all", "head.blocks.0"}
    assert second == {"all", "backbone.stages.0", "backbone.stages.1", "head.blocks.0", "head.blocks.1"}
