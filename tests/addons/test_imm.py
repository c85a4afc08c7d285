"""IMM: means of all tasks' weights, plain and weighted by Fisher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from incvec.addons.imm import IMM
from incvec.contracts import Task
from incvec.data import Dataset
from tests.addons.test_magmax import record_trained
from tests.addons.tools import Tensors, run_on, same, snapshot, watch


def test_mean_is_the_plain_average(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_trained(monkeypatch, IMM)
    run = run_on(few, tmp_path, "finetune", "imm", imm={"moment": "mean"})
    assert [stage.name for stage in run.parts.plan(run.parts.tasks[1])] == ["main"]  # no Fisher pass
    same(snapshot(run, 0), trained[0])
    for task in (1, 2):
        for name, value in snapshot(run, task).items():
            having = [trained[i][name].double() for i in range(task + 1) if name in trained[i]]
            assert torch.allclose(value.double(), sum(having) / len(having), atol=1e-6), name  # type: ignore[arg-type]


def test_mode_weighs_by_fisher(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_trained(monkeypatch, IMM)
    fishers: list[Tensors] = []

    def note(self: IMM, task: Task, fisher: Tensors) -> None:
        fishers.append({name: f.double() for name, f in fisher.items()})

    watch(monkeypatch, IMM, "measured", before=note)
    run = run_on(few, tmp_path, "finetune", "imm", finetune={"loss_over": "new"})
    assert len(fishers) == 3
    for task in (1, 2):
        for name, value in snapshot(run, task).items():
            tasks = [i for i in range(task + 1) if name in trained[i]]
            thetas = [trained[i][name].double() for i in tasks]
            if name in fishers[tasks[0]]:
                above: Tensor = sum(fishers[i][name] * theta for i, theta in zip(tasks, thetas, strict=True))  # type: ignore[assignment]
                below: Tensor = sum(fishers[i][name] for i in tasks)  # type: ignore[assignment]
                wanted = torch.where(below > 0, above / below, thetas[-1])
            else:
                wanted = torch.stack(thetas).mean(0)  # BatchNorm's statistics
            assert torch.allclose(value.double(), wanted, rtol=1e-4, atol=1e-6), name


def test_a_weight_without_fisher_is_the_last_tasks(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PODNet's scale is no part of the logits, so its F is 0 in every task."""
    trained = record_trained(monkeypatch, IMM)
    run = run_on(few, tmp_path, "podnet", "imm")
    for task in (1, 2):
        assert not torch.equal(trained[task]["head.scale"], trained[task - 1]["head.scale"])
        assert torch.equal(snapshot(run, task)["head.scale"], trained[task]["head.scale"])


@pytest.mark.parametrize("moment", ["mean", "mode"])
def test_training_is_left_alone(moment: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_trained(monkeypatch, IMM)
    run_on(few, tmp_path / "merged", "podnet", "imm", imm={"moment": moment})
    plain = run_on(few, tmp_path / "plain", "podnet")
    for task in range(3):
        same(trained[task], snapshot(plain, task))


def test_a_task_is_taken_in_once(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "finetune", "imm")
    addon, task = run.parts.addons[0], run.parts.tasks[2]
    again = addon.deployed(task)
    assert again is not None
    same(dict(again), snapshot(run, 2))
