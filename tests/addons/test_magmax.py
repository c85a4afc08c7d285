"""MagMax: the largest entries of the task vectors are deployed; training is not changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.addons.magmax import MagMax, larger_magnitude
from incvec.contracts import Task
from incvec.data import Dataset
from incvec.methods.finetune import Finetune
from tests.addons.tools import Tensors, record_trained, run_on, same, snapshot, state_of, watch


def test_larger_magnitude_prefers_the_later_of_equals() -> None:
    old = torch.tensor([1.0, -2.0, 3.0, 0.0, -1.0])
    new = torch.tensor([-1.0, 1.0, -4.0, 0.0, 1.0])
    assert larger_magnitude(old, new).tolist() == [-1.0, -2.0, -4.0, 0.0, 1.0]


@pytest.mark.parametrize("coefficient", [0.5, 0.8])
def test_deployed_is_the_base_plus_the_largest_entries(
    coefficient: float, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_trained(monkeypatch, MagMax)
    options = {"loss_over": "new"}
    run = run_on(few, tmp_path, "finetune", "magmax", finetune=options, magmax={"coefficient": coefficient})
    same(snapshot(run, 0), trained[0])
    for task in (1, 2):
        for name, value in snapshot(run, task).items():
            if name in trained[0]:
                base = trained[0][name].double()
                expected = torch.empty_like(base).flatten()
                for i in range(base.numel()):
                    vectors = [(trained[k][name].double() - base).flatten()[i].item() for k in range(1, task + 1)]
                    expected[i] = base.flatten()[i] + coefficient * max(reversed(vectors), key=abs)
                assert torch.allclose(value.double(), expected.view(base.shape), atol=1e-6), name
            else:
                own = int(name.split(".")[2])  # head.blocks.N: the rows of the model of task N
                assert torch.equal(value, trained[own][name]), name


def test_training_is_not_changed(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the weights and exemplars of the same run without the add-on."""
    trained = record_trained(monkeypatch, MagMax)
    merged = run_on(few, tmp_path / "merged", "podnet", "magmax")
    plain = run_on(few, tmp_path / "plain", "podnet")
    for task in range(3):
        same(trained[task], snapshot(plain, task))
    assert torch.equal(merged.parts.method.store["memory"], plain.parts.method.store["memory"])
    first, second = snapshot(merged, 2), snapshot(plain, 2)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_merge_is_evaluated(few: Dataset, tmp_path: Path) -> None:
    """With a coefficient of 0, the backbone is that of the base model."""
    run = run_on(few, tmp_path, "finetune", "magmax", magmax={"coefficient": 0.0}, finetune={"epochs": 5})
    backbone = [name for name in snapshot(run, 0) if name.startswith("backbone")]
    first, last = snapshot(run, 0), snapshot(run, 2)
    same({name: first[name] for name in backbone}, {name: last[name] for name in backbone})


@pytest.mark.parametrize("addon", ["magmax", "cofima", "imm"])
def test_rows_of_a_task_are_those_of_its_own_model(
    addon: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one softmax per task, neither later tasks nor weight decay change its rows."""
    ended: list[Tensors] = []
    watch(monkeypatch, Finetune, "end_task", before=lambda self, task: ended.append(state_of(self.model)))
    options = {"loss_over": "new", "optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}
    run = run_on(few, tmp_path, "finetune", addon, finetune=options)
    for block in range(3):
        for name in (f"head.blocks.{block}.weight", f"head.blocks.{block}.bias"):
            for task in range(block, 3):
                assert torch.equal(ended[task][name], ended[block][name]), (name, task)
                assert torch.equal(snapshot(run, task)[name], ended[block][name]), (name, task)
    moved = "backbone.stem.conv.weight"
    assert not torch.equal(ended[2][moved], ended[1][moved])


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("finetune", {"finetune": {"loss_over": "seen"}}),
        ("finetune", {"finetune": {"loss_over": "new"}, "oracle": True}),
        ("replay", {"replay": {"loss_over": "new"}}),
        ("ewc", {}),
        ("lwf", {}),
    ],
)
def test_old_rows_are_trained_if_they_have_a_loss(
    method: str, given: dict[str, Any], few: Dataset, tmp_path: Path
) -> None:
    run = run_on(few, tmp_path, method, **given)
    name = "head.blocks.0.weight"
    assert not torch.equal(snapshot(run, 1)[name], snapshot(run, 0)[name])
    assert run.parts.plan(run.parts.tasks[1])[0].groups[0].prefixes == ("model", "auxiliary")


def test_deployed_rows_ignore_later_training(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = record_trained(monkeypatch, MagMax)
    run = run_on(few, tmp_path, "finetune", "magmax")  # the softmax is over all classes seen
    name = "head.blocks.1.weight"
    assert not torch.equal(trained[2][name], trained[1][name])
    assert torch.equal(snapshot(run, 2)[name], trained[1][name])


def test_each_task_is_merged_once(few: Dataset, tmp_path: Path) -> None:
    """A second call gives the same result, even with other weights in the model."""
    run = run_on(few, tmp_path, "finetune", "magmax")
    addon, task = run.parts.addons[0], run.parts.tasks[2]
    before = {name: tensor.clone() for name, tensor in addon.state().items()}
    with torch.no_grad():
        for parameter in run.parts.method.model.parameters():
            parameter.mul_(3)
    again = addon.deployed(task)
    assert again is not None
    same(dict(again), snapshot(run, 2))
    same(before, addon.state())


def test_adapters_of_ssre_are_folded_before_the_merge(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method's end hook runs first, so task vectors refer to the same weights."""
    trained = record_trained(monkeypatch, MagMax)
    run = run_on(few, tmp_path, "ssre", "magmax")
    adapters = [name for name in trained[2] if name.endswith("adapter")]
    assert adapters
    assert all(not trained[task][name].any() for task in (1, 2) for name in adapters)
    assert all(not snapshot(run, 2)[name].any() for name in adapters)
    kernel = adapters[0].replace("adapter", "weight")
    assert not torch.equal(trained[1][kernel], trained[0][kernel])


def test_parameters_added_later_are_merged_from_their_initial_value(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mnemonics' factors are ones at the beginning of the first increment."""
    trained = record_trained(monkeypatch, MagMax)
    run = run_on(few, tmp_path, "mnemonics", "magmax", mnemonics={"lr": 0.5})
    factors = [name for name in trained[2] if name.endswith(".factor")]
    assert factors
    for name in factors:
        vectors = [trained[task][name] - 1 for task in (1, 2)]
        assert vectors[0].any()
        assert not torch.equal(*vectors)
        assert torch.equal(snapshot(run, 1)[name], 1 + 0.5 * vectors[0])
        assert torch.equal(snapshot(run, 2)[name], 1 + 0.5 * larger_magnitude(*vectors))


def test_base_task_is_evaluated_without_a_merge(few: Dataset, tmp_path: Path) -> None:
    merged = run_on(few, tmp_path / "merged", "finetune", "magmax")
    plain = run_on(few, tmp_path / "plain", "finetune")
    assert merged.progress.correct["cnn"][0] == plain.progress.correct["cnn"][0]
    assert MagMax.deployed(merged.parts.addons[0], Task(0, 0, 2)) is None  # type: ignore[arg-type]
