"""Running statistics at a teleport: `batchnorm` = keep, recalibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.nets.resnet import Stem
from tests.addons.ivt.conftest import split_state
from tests.addons.tools import record_batches, run_on, same, snapshot, stage_names, watch


def test_only_statistics_change(few: Dataset, tmp_path: Path) -> None:
    """Train mode does not use running statistics, so in plain fine-tuning the weights are the same to the end."""
    keep = run_on(few, tmp_path / "keep", "finetune", "ivt")
    other = run_on(few, tmp_path / "other", "finetune", "ivt", ivt={"batchnorm": "recalibrate"})
    same(snapshot(keep, 0), snapshot(other, 0))
    for task in (1, 2):
        (weights_a, statistics_a), (weights_b, statistics_b) = (split_state(snapshot(r, task)) for r in (keep, other))
        same(weights_a, weights_b)
        assert all(not torch.equal(statistics_a[name], statistics_b[name]) for name in statistics_a)


def test_recalibrated_statistics(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average of the batches' means and variances over one pass of the main stage's rows, at the final weights."""
    batches = record_batches(monkeypatch)
    checked: list[int] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner == "ivt":
            batches.clear()

    def end(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner != "ivt":
            return
        stem: Any = self.method.model.backbone.stem  # type: ignore[union-attr]
        with torch.no_grad():
            inputs = [stem.conv(batch.images) for batch in batches]
        means = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
        variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in inputs]).mean(0)
        assert torch.allclose(stem.norm.running_mean, means, atol=1e-5)
        assert torch.allclose(stem.norm.running_var, variances, rtol=1e-4)
        assert all(m.momentum == 0.1 for m in self.method.model.modules() if hasattr(m, "momentum"))
        assert sum(len(batch.labels) for batch in batches) == 64
        checked.append(task.index)

    watch(monkeypatch, IVTAddOn, "begin_stage", after=begin)
    watch(monkeypatch, IVTAddOn, "end_stage", after=end)
    run = run_on(few, tmp_path, "finetune", "ivt", ivt={"batchnorm": "recalibrate"})
    assert checked == [1, 2]
    assert stage_names(run, 1) == ["main", "ivt-recalibrate"]


@pytest.mark.parametrize("method", ["pass", "fcs", "mrfa"])
def test_recalibration_uses_the_inputs_of_the_main_stage(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated and mixed images, if the network is trained on them."""
    inputs: list[Tensor] = []  # of the stem's norm, while its momentum is 1
    batches: list[int] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner == "ivt":
            inputs.clear()

    def stem(self: Any, x: Tensor) -> None:
        if self.norm.training and self.norm.momentum == 1.0:
            inputs.append(self.conv(x).detach())

    def end(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner != "ivt":
            return
        used = inputs[1::2] if method == "fcs" else inputs  # the first pass, of the keys, restores the statistics
        images = {"pass": 4 * 32, "fcs": 8 * 32, "mrfa": 32}[method]
        assert [len(x) for x in used] == [images] * len(used)
        model: Any = self.method.model
        expected = torch.stack([x.mean((0, 2, 3)) for x in used]).mean(0)
        assert torch.allclose(model.backbone.stem.norm.running_mean, expected, atol=1e-5)
        batches.append(len(used))

    watch(monkeypatch, IVTAddOn, "begin_stage", after=begin)
    watch(monkeypatch, IVTAddOn, "end_stage", after=end)
    watch(monkeypatch, Stem, "plain", before=stem)
    run_on(few, tmp_path, method, "ivt", ivt={"batchnorm": "recalibrate"}, tasks=1)
    assert batches[0] >= 2


def test_recalibration_precedes_the_balanced_stage(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "podnet", "ivt", ivt={"batchnorm": "recalibrate"})
    assert stage_names(run, 0) == ["main"]
    assert stage_names(run, 1) == ["main", "ivt-recalibrate", "balance"]


def test_statistics_frozen_by_the_method_stay_unchanged(few: Dataset, tmp_path: Path) -> None:
    """SSRE trains no BatchNorm layer in an increment, so no option makes a difference."""
    keep = run_on(few, tmp_path / "keep", "ssre", "ivt")
    same(split_state(snapshot(keep, 0))[1], split_state(snapshot(keep, 2))[1])
    for choice in ("recalibrate", "layer"):
        other = run_on(few, tmp_path / choice, "ssre", "ivt", ivt={"batchnorm": choice})
        assert stage_names(other, 1) == ["main"]
        same(snapshot(keep, 2), snapshot(other, 2))
