"""The base class of PASS and FCS: class statistics, draws around prototypes, and the store."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from incvec.data import Dataset
from incvec.engine.run import Run, finish
from incvec.methods.prototypes import PrototypeMethod, class_variances, draw_around, feature_distance
from tests.conftest import make_run, quick, weights
from tests.methods.tools import seeded

HOSTS = ["pass", "fcs"]


def test_class_variances() -> None:
    generator = seeded(0)
    features = torch.randn(12, 3, generator=generator) * 2 + 50  # far from 0: E[x^2] - E[x]^2 would lose precision
    labels = torch.tensor([0, 1, 2, 1, 0, 1, 2, 2, 1, 0, 0, 3])
    means = torch.stack([features[labels == c].mean(0) for c in range(4)])
    found = class_variances(features, labels, means)
    for c in range(3):
        expected = np.trace(np.cov(features[labels == c].double().numpy().T)) / 3
        assert found[c].item() == pytest.approx(expected, rel=1e-4)
    assert found[3] == 0  # one sample


def test_draws_around_prototypes() -> None:
    generator = seeded(0)
    prototypes = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, -10.0]])
    drawn, classes = draw_around(prototypes, torch.tensor(0.5), 6000, generator)
    assert drawn.shape == (6000, 2)
    for c in range(3):
        own = drawn[classes == c]
        assert len(own) == pytest.approx(2000, rel=0.1)
        torch.testing.assert_close(own.mean(0), prototypes[c], atol=0.05, rtol=0)
        torch.testing.assert_close(own.std(0), torch.tensor([0.5, 0.5]), atol=0.03, rtol=0)
    again = draw_around(prototypes, torch.tensor(0.5), 6000, generator.manual_seed(0))
    assert torch.equal(again[0], drawn)
    assert torch.equal(again[1], classes)


def test_feature_distance_is_one_norm_over_the_matrix() -> None:
    new, old = torch.tensor([[1.0, 2.0], [0.0, 5.0]]), torch.tensor([[0.0, 0.0], [3.0, 1.0]])
    assert feature_distance(new, old).item() == pytest.approx((1 + 4 + 9 + 16) ** 0.5)
    assert feature_distance(new, old, torch.tensor([0.0, 1.0])).item() == pytest.approx(5.0)
    same = torch.ones(2, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(feature_distance(same, torch.ones(2, 2)), same)
    assert not gradient.any()  # and not NaN


def features_by_class(run: Run, view: str = "test") -> list[Tensor]:
    """Features of the training images of each class with the final weights, image by image."""
    method, train = run.parts.method, run.parts.world.train
    method.eval()
    found = []
    for c in range(6):
        rows = torch.arange(len(train.labels))[train.labels == c]
        batch = train.fetch(rows, seeded(0), (view,))
        with torch.no_grad():
            found.append(torch.cat([method.model(batch.images[i : i + 1]).features for i in range(len(rows))]))
    return found


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])
def test_statistics_use_the_final_weights(host: str, addons: tuple[str, ...], few: Dataset, tmp_path: Path) -> None:
    """Also after IVT's teleport following the last epoch (interval 1)."""
    run = make_run(few, tmp_path, quick(host, *addons))
    finish(run)
    store = run.parts.method.store
    features = features_by_class(run)
    for c in (4, 5):  # of the last task
        torch.testing.assert_close(store["prototypes"][c], features[c].mean(0), atol=1e-5, rtol=1e-5)
        trace = np.trace(np.cov(features[c].double().numpy().T)) / 8
        assert store["spread"][c].item() == pytest.approx(trace, rel=1e-3)
    torch.testing.assert_close(store["means"].norm(dim=1), torch.ones(6))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("radius", ["base", "all"])
def test_store_over_three_tasks(host: str, radius: str, few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick(host, **{host: {"radius": radius}}))
    finish(run)
    states = [weights(run.snapshot_path(t)) for t in range(3)]
    for t, state in enumerate(states):
        n_seen = 2 * (t + 1)
        assert state["store/prototypes"].shape == (n_seen, 8)
        counted = state["store/spread"][: 2 if radius == "base" else n_seen]
        torch.testing.assert_close(state["store/radius"], counted.mean().sqrt())
    for before, after in pairwise(states):
        n_old = len(before["store/spread"])
        assert torch.equal(after["store/spread"][:n_old], before["store/spread"])
        old, new = before["store/prototypes"], after["store/prototypes"][:n_old]
        if host == "fcs":
            transfer = "method/auxiliary.transfer"
            old = old @ after[f"{transfer}.weight"].T + after[f"{transfer}.bias"]
            assert not torch.equal(new, before["store/prototypes"])
        torch.testing.assert_close(new, old, rtol=1e-5 if host == "fcs" else 0, atol=1e-6 if host == "fcs" else 0)


@pytest.mark.parametrize(("draws", "count"), [("batch", 5), ("ratio", 10)])
def test_number_of_prototype_draws(draws: str, count: int, few: Dataset, tmp_path: Path) -> None:
    """The third task has four old and two new classes."""
    run = make_run(few, tmp_path, quick("pass", **{"pass": {"draws": draws}}))
    finish(run)
    method = run.parts.method
    assert isinstance(method, PrototypeMethod)
    method.store["prototypes"] = method.store["prototypes"][:4]
    drawn, labels = method.draw_prototypes(5)
    assert drawn.shape == (count, 8)
    assert set(labels.tolist()) <= {0, 4, 8, 12}


def test_prototypes_in_the_training_view(few: Dataset, tmp_path: Path) -> None:
    def prototypes(view: str) -> Tensor:
        run = make_run(few, tmp_path / view, quick("pass", **{"pass": {"prototype_view": view}}))
        finish(run)
        return run.parts.method.store["prototypes"]

    assert not torch.equal(prototypes("train")[:2], prototypes("test")[:2])


@pytest.mark.parametrize("host", HOSTS)
def test_outputs_without_rotation_classify(host: str, few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick(host))
    record = finish(run)
    assert list(record["classifiers"]) == ["cnn", "nme"]
    method = run.parts.method.eval()
    images = torch.rand(3, 1, 8, 8, generator=seeded(0))
    logits: Any = method.model(images).logits
    assert logits.shape == (3, 24)
    assert torch.equal(method(images)["cnn"], torch.stack([logits[:, 4 * c] for c in range(6)], 1))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("given", [{"precision": "bf16"}, {"oracle": True}], ids=["bf16", "oracle"])
def test_mixed_precision_and_the_oracle(host: str, given: dict[str, Any], few: Dataset, tmp_path: Path) -> None:
    record = finish(make_run(few, tmp_path, quick(host, "ivt", **given)))
    assert record["metrics"]["AA"] > 0
    assert set(record["losses"][-1]["terms"]) >= {"ce", "distil", "prototypes"}
