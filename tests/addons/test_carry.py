"""Carried statistics: the displacement of features, what happens to old classes, and the classifier's stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from incvec.addons.carry import STAGE, Carry, scaled_logits
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.data.select import class_means
from incvec.methods.common import ImageMethod
from tests.addons.tools import Tensors, run_on, same, snapshot, stage_names, state_of, watch


class Watched:
    """The model and the statistics of a run before and after each stage of the classifier."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.weights: list[tuple[Tensors, Tensors]] = []
        self.carried: list[tuple[Tensor, Tensor]] = []
        self.true_means: list[Tensor] = []
        watch(patch, Carry, "begin_stage", after=self.begun)
        watch(patch, Carry, "end_stage", before=self.ended)

    def begun(self, addon: Carry, task: Task, stage: Stage) -> None:
        if stage.name == STAGE:
            self.start = state_of(addon.method.model)
            self.carried.append((addon.classes.means.clone(), addon.classes.factors.clone()))
            method = addon.method
            assert isinstance(method, ImageMethod)
            features = [method.new_class_features(each) for each in addon.world.tasks[: task.index + 1]]
            self.true_means.append(torch.cat([class_means(f, y, int(y.max()) + 1) for f, y in features]))

    def ended(self, addon: Carry, task: Task, stage: Stage) -> None:
        if stage.name == STAGE:
            self.weights.append((self.start, state_of(addon.method.model)))


@pytest.mark.parametrize("method", ["podnet", "mrfa", "pass"])
def test_only_the_classifier_is_trained_and_it_comes_last(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Watched(monkeypatch)
    run = run_on(few, tmp_path, method, "carry")
    assert [stage_names(run, task)[-1] == STAGE for task in range(3)] == [False, True, True]
    for before, after in seen.weights:
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed
        assert all(name.startswith("head.blocks.") for name in changed)
    same(snapshot(run, 2), seen.weights[-1][1])
    for (means, factors), classes in zip(seen.carried, (4, 6), strict=True):
        assert len(means) == len(factors) == classes


@pytest.mark.parametrize("method", ["podnet", "pass"])
def test_carried_means_are_closer_to_the_true_ones_than_stored_ones(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The true means of old classes are those of images that the run no longer has."""
    errors: dict[str, float] = {}
    for drift in ("none", "map"):
        with monkeypatch.context() as patch:
            seen = Watched(patch)
            run_on(few, tmp_path / drift, method, "carry", carry={"drift": drift}, tasks=1)
        (means, _), true = seen.carried[0], seen.true_means[0]
        assert torch.allclose(means[2:], true[2:], atol=1e-5)  # new classes: their own images
        errors[drift] = float((means[:2] - true[:2]).norm())
    assert errors["map"] < 0.7 * errors["none"]


def test_the_oracle_has_the_exact_means(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes them from all images of the old classes."""
    seen = Watched(monkeypatch)
    run_on(few, tmp_path, "podnet", "carry", oracle=True)
    for (means, _), true in zip(seen.carried, seen.true_means, strict=True):
        assert torch.allclose(means, true, atol=1e-4)


@pytest.mark.parametrize("method", ["pass", "fcs"])
def test_prototypes_of_the_method_are_the_carried_means(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the main stage trains with, whatever the method does with them at the end of a task."""
    stored: list[tuple[Tensor, Tensor]] = []

    def note(addon: Carry, task: Task, stage: Stage) -> None:
        if stage.role == "main":
            stored.append((addon.method.store["prototypes"].clone(), addon.classes.means.clone()))

    watch(monkeypatch, Carry, "begin_stage", note)
    run_on(few, tmp_path, method, "carry")
    assert len(stored) == 2
    for prototypes, means in stored:
        assert torch.equal(prototypes, means)


@pytest.mark.parametrize(("method", "factor"), [("bic", 1.0), ("podnet", None), ("pass", 10.0), ("ssre", 10.0)])
def test_logits_of_the_stage_are_those_of_the_model_as_the_loss_scales_them(
    method: str, factor: float | None, few: Dataset, tmp_path: Path
) -> None:
    run = run_on(few, tmp_path, method, "carry", tasks=1)
    assert run.state is not None
    trained: Any = run.state.parts.method.eval()
    if method == "bic":
        trained.model.corrections[1].alpha.data.fill_(0.5)
    images = trained.world.train.fetch(torch.arange(4), None, ("test",)).images
    with torch.no_grad():
        features, scores = trained.model(images).features, trained(images)["cnn"]
        expected = scores * (trained.model.head.scale if factor is None else factor)
        assert torch.allclose(scaled_logits(trained, features), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("addons", "reported"), [((), "nme"), (("carry",), "cnn")])
def test_the_trained_classifier_is_reported(
    addons: tuple[str, ...], reported: str, few: Dataset, tmp_path: Path
) -> None:
    run = run_on(few, tmp_path, "mrfa", *addons, tasks=1)
    assert next(iter(run.progress.correct)) == reported


def test_it_learns_from_the_draws(few: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 10, "samples": 40}
    run = run_on(few, tmp_path, "mrfa", "carry", carry=options, mrfa={"epochs": 6})
    losses = [row["terms"]["ce"] for row in run.progress.losses if row["stage"] == STAGE]
    assert len(losses) == 2
    assert all(row[-1] < row[0] for row in losses)
