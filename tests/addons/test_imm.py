"""IMM: means of all tasks' weights, plain and Fisher-weighted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from incvec.addons.imm import IMM
from incvec.contracts import Task
from incvec.data import Dataset
from tests.addons.tools import Tensors, record_trained, run_on, same, snapshot, stage_names, watch


def test_mean_is_the_plain_average(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_trained(monkeypatch, IMM)
    run = run_on(few, tmp_path, "finetune", "imm", imm={"moment": "mean"})
    assert stage_names(run, 1) == ["main"]  # no Fisher pass
    same(snapshot(run, 0), trained[0])
    for task in (1, 2):
        for name, value in snapshot(run, task).items():
            thetas = [trained[i][name].double() for i in range(task + 1) if name in trained[i]]
            assert torch.allclose(value.double(), sum(thetas) / len(thetas), atol=1e-6), name  # type: ignore[arg-type]


def test_mode_is_the_fisher_weighted_average(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_trained(monkeypatch, IMM)
    fishers: list[Tensors] = []

    def record(self: IMM, task: Task, fisher: Tensors) -> None:
        fishers.append({name: f.double() for name, f in fisher.items()})

    watch(monkeypatch, IMM, "measured", before=record)
    run = run_on(few, tmp_path, "finetune", "imm", finetune={"loss_over": "new"})
    assert len(fishers) == 3
    for task in (1, 2):
        for name, value in snapshot(run, task).items():
            tasks = [i for i in range(task + 1) if name in trained[i]]
            thetas = [trained[i][name].double() for i in tasks]
            if name in fishers[tasks[0]]:
                numerator: Tensor = sum(fishers[i][name] * theta for i, theta in zip(tasks, thetas, strict=True))  # type: ignore[assignment]
                denominator: Tensor = sum(fishers[i][name] for i in tasks)  # type: ignore[assignment]
                expected = torch.where(denominator > 0, numerator / denominator, thetas[-1])
            else:
                expected = torch.stack(thetas).mean(0)  # BatchNorm statistics
            assert torch.allclose(value.double(), expected, rtol=1e-4, atol=1e-6), name


def test_parameter_without_fisher_is_that_of_the_last_task(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PODNet's logits do not depend on its scale, so its F is 0 in every task."""
    trained = record_trained(monkeypatch, IMM)
    run = run_on(few, tmp_path, "podnet", "imm")
    for task in (1, 2):
        assert not torch.equal(trained[task]["head.scale"], trained[task - 1]["head.scale"])
        assert torch.equal(snapshot(run, task)["head.scale"], trained[task]["head.scale"])


@pytest.mark.parametrize("moment", ["mean", "mode"])
def test_training_is_not_changed(moment: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_trained(monkeypatch, IMM)
    run_on(few, tmp_path / "merged", "podnet", "imm", imm={"moment": moment})
    plain = run_on(few, tmp_path / "plain", "podnet")
    for task in range(3):
        same(trained[task], snapshot(plain, task))


def test_each_task_is_merged_once(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "finetune", "imm")
    addon, task = run.parts.addons[0], run.parts.tasks[2]
    again = addon.deployed(task)
    assert again is not None
    same(dict(again), snapshot(run, 2))
