"""Curvature: quadratic forms by hand, and the Fisher of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from incvec.atomic_files import read_tensors
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import DataError
from incvec.study.geometry import EvaluationOptions
from incvec.study.geometry.curvature import by_layer_group, layer_group, quadratic_form, run_curvature
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import LONGER, FinishedRuns


def test_quadratic_form_of_diagonals_and_kernel_blocks() -> None:
    d = torch.tensor([1.0, -2.0])
    assert quadratic_form(torch.tensor([3.0, 0.5]), d) == 3 + 2
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    assert quadratic_form(matrix[None, None], d.reshape(1, 1, 1, 2)) == 2 - 4 + 12


def test_layer_groups_by_hand() -> None:
    past = {"backbone.stages.0.conv.weight": torch.tensor([1.0, 3.0]), "head.scale": torch.tensor([0.0])}
    now = {"backbone.stages.0.conv.weight": torch.tensor([2.0, 3.0]), "head.scale": torch.tensor([5.0])}
    start = {name: torch.zeros_like(t) for name, t in past.items()}
    end = {"backbone.stages.0.conv.weight": torch.tensor([3.0, 4.0]), "head.scale": torch.tensor([12.0])}
    groups = by_layer_group(past, now, start, end)
    # S = (A + F) / (2A + F): 2/3 and 1/2; without a past S = 1
    assert groups["stages.0"] == {
        "fisher_ratio": pytest.approx(0.25), "scale": pytest.approx((2 / 3 + 1 / 2) / 2), "distance": 5.0,
    }  # fmt: skip
    assert groups["head"] == {"fisher_ratio": None, "scale": 1.0, "distance": 12.0}
    assert groups["all"]["distance"] == 13.0
    assert layer_group("backbone.stem.conv.weight") == "stem"


def test_untrained_weights_are_left_out(runs: FinishedRuns, few: Dataset) -> None:
    """As in the record: S is not applied to PODNet's older proxies, so they are not part of its mean."""
    same = torch.ones(3)
    before, after = {"head.old": same, "head.scale": same}, {"head.old": same, "head.scale": 2 * same}
    groups = by_layer_group(before, after, *({"head.old": x * same, "head.scale": x * same} for x in (0, 1)))
    assert groups["head"]["scale"] == pytest.approx(2 / 3)
    recorded = [statistics["ivt"] for statistics in runs.records["ivt"]["statistics"][1:]]
    totals = [task["parts"]["all"] for task in run_curvature(runs.ivt, few, EvaluationOptions(points=2))["tasks"]]
    assert [each["scale"] for each in totals] == pytest.approx([r["all"]["scale"] for r in recorded], rel=1e-3)


def test_prediction_and_fisher_ratio_of_a_run(runs: FinishedRuns, few: Dataset) -> None:
    data = run_curvature(runs.ivt, few, EvaluationOptions(points=3))
    assert [task["task"] for task in data["tasks"]] == [1, 2]
    # computed again from the files for the last task
    old, new = (read_tensors(runs.ivt / "snapshots" / f"task-0{t}.safetensors")[0] for t in (1, 2))
    prefix, half, sums = "addon/ivt/cumulative/", 0.0, [0.0, 0.0]
    for key in old:
        if key.startswith(prefix):
            fisher, later = (tensors[key] * 2.0**-64 for tensors in (old, new))  # the unit of stored Fishers
            name = "method/model." + key.removeprefix(prefix)
            half += 0.5 * float((fisher.double() * (new[name].double() - old[name].double()) ** 2).sum())
            if not torch.equal(later, fisher):  # PODNet's older proxies are not trained
                sums[0] += float((later.double() - fisher.double()).sum())
                sums[1] += float(fisher.double().sum())
    task = data["tasks"][1]
    assert task["predicted"] == pytest.approx([0.0, half / 4, half], rel=1e-5)
    assert task["predicted_per_sample"][-1] == pytest.approx(LONGER["batch_size"] * half, rel=1e-5)
    assert task["parts"]["all"]["fisher_ratio"] == pytest.approx(sums[0] / sums[1], rel=1e-3)
    assert task["measured"][0] == 0.0
    assert task["counts"] == runs.records["ivt"]["test_counts"][:2]


def test_kernel_blocks(few: Dataset, tmp_path: Path) -> None:
    finish(make_run(few, tmp_path, quick("finetune", "ivt", ivt={"structure": "kernel"})))
    data = run_curvature(tmp_path, few, EvaluationOptions(points=2))
    assert all(0.5 <= task["parts"]["all"]["scale"] <= 1 for task in data["tasks"])
    assert all(task["predicted"][-1] > 0 for task in data["tasks"])


def test_run_without_ivt_is_refused(runs: FinishedRuns, few: Dataset) -> None:
    with pytest.raises(DataError, match=r"without the add-on ivt.*\n  incvec run --method podnet --addon ivt"):
        run_curvature(runs.plain, few, EvaluationOptions(points=2))
