"""Consolidation: the mean of two solutions, BatchNorm's statistics, and the distillation from both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.addons.consolidate import Consolidate, frozen, relative_distance
from incvec.contracts import Batch, Stage, Task
from incvec.data import Dataset
from incvec.engine.build import check_names
from incvec.errors import ConfigError
from incvec.ivt.batchnorm import running_statistics
from incvec.presets import resolve
from tests.addons.tools import Tensors, run_on, same, snapshot, stage_names, state_of, watch
from tests.conftest import quick

OFF: dict[str, Any] = {"share": 1.0, "statistics": "keep"}


def at_stage_end(patch: pytest.MonkeyPatch, name: str) -> tuple[list[Tensors], list[Tensors]]:
    """The model before and after the add-on's part of the end of every stage of that name."""
    before: list[Tensors] = []
    after: list[Tensors] = []

    def note(into: list[Tensors]) -> Any:
        def receive(self: Consolidate, task: Task, stage: Stage) -> None:
            if stage.name == name:
                into.append(state_of(self.method.model))

        return receive

    watch(patch, Consolidate, "end_stage", note(before), note(after))
    return before, after


def test_with_all_parts_off_it_changes_nothing(few: Dataset, tmp_path: Path) -> None:
    plain = run_on(few, tmp_path / "plain", "podnet")
    off = run_on(few, tmp_path / "off", "podnet", "consolidate", consolidate=OFF)
    for task in range(3):
        same(snapshot(plain, task), snapshot(off, task))


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_weights_are_the_mean_with_the_model_before(
    share: float, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Tensors] = []
    watch(
        monkeypatch, Consolidate, "begin_task", after=lambda self, task: starts.append(state_of(self.method.model))
    )
    before, after = at_stage_end(monkeypatch, "main")
    run_on(few, tmp_path, "podnet", "consolidate", consolidate={"share": share})
    assert len(before) == len(starts) == 2
    for task, (start, trained, mean) in enumerate(zip(starts, before, after, strict=True), 1):
        assert any(not torch.equal(start[name], tensor) for name, tensor in trained.items())
        for name, tensor in mean.items():
            if name.startswith(f"head.blocks.{task}.") or not tensor.is_floating_point():
                assert torch.equal(tensor, trained[name]), name
            else:
                wanted = start[name] + share * (trained[name] - start[name])
                assert torch.allclose(tensor, wanted, atol=1e-6), name


def test_tail_averages_the_last_epochs(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensors] = []

    def note(self: Consolidate, task: Task, stage: Stage, *rest: Any) -> None:
        if stage.name == "main" and task.index == 1:
            seen.append(state_of(self.method.model))

    watch(monkeypatch, Consolidate, "end_epoch", note)
    _, after = at_stage_end(monkeypatch, "main")
    run_on(few, tmp_path, "podnet", "consolidate", consolidate={**OFF, "tail": 0.5}, podnet={"epochs": 4}, tasks=1)
    assert len(seen) == 4
    for name, tensor in after[0].items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, (seen[2][name] + seen[3][name]) / 2, atol=1e-6), name


def test_statistics_are_those_of_the_balanced_exemplars(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[torch.Tensor] = []
    watch(monkeypatch, Consolidate, "_statistics_loss", lambda self, batch: labels.append(batch.labels))
    before, after = at_stage_end(monkeypatch, "consolidate-statistics")
    run = run_on(few, tmp_path, "podnet", "consolidate", tasks=1)
    assert stage_names(run, 1) == ["main", "consolidate-statistics", "balance"]
    assert torch.cat(labels).bincount().tolist() == [3] * 6  # exemplars per class
    names = set(running_statistics(run.parts.method.model))
    for name, tensor in after[0].items():
        assert name in names or torch.equal(tensor, before[0][name]), name


def test_methods_without_exemplars_use_the_rows_of_the_main_stage(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[torch.Tensor] = []
    watch(monkeypatch, Consolidate, "_statistics_loss", lambda self, batch: labels.append(batch.labels))
    run_on(few, tmp_path, "pass", "consolidate", tasks=1)
    assert set(torch.cat(labels).tolist()) == {2, 3, 4, 5}


def test_expert_is_trained_without_restraint_from_the_same_start(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Tensors] = []
    experts: list[Tensors] = []
    watch(
        monkeypatch, Consolidate, "begin_task", after=lambda self, task: starts.append(state_of(self.method.model))
    )
    trained, restored = at_stage_end(monkeypatch, "consolidate-expert")
    before, after = at_stage_end(monkeypatch, "main")
    run = run_on(few, tmp_path, "podnet", "ivt", "consolidate", consolidate={"expert": True}, tasks=1)
    assert stage_names(run, 1) == ["consolidate-expert", "main", "consolidate-statistics", "balance"]
    same(restored[0], starts[0])
    experts = trained
    for name, mean in after[0].items():
        if mean.is_floating_point() and not name.startswith("head.blocks.1."):
            wanted = (before[0][name] + experts[0][name]) / 2
            assert torch.allclose(mean, wanted, atol=1e-6), name
    moved = {
        kind: sum(float((end[name] - starts[0][name]).norm()) for name in end if "conv" in name)
        for kind, end in (("expert", experts[0]), ("ivt", before[0]))
    }
    assert moved["ivt"] < moved["expert"]


def test_distillation_draws_old_features_to_one_teacher_and_new_ones_to_the_other(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms: list[dict[str, float]] = []
    trained: list[Tensors] = []
    anchors: list[Tensors] = []

    def check(self: Consolidate, batch: Batch) -> None:
        assert self._teachers is not None
        anchor, plastic = self._teachers
        same(state_of(anchor), {**state_of(anchor), **anchors[0]})
        same({n: t for n, t in state_of(plastic).items() if t.is_floating_point()}, trained[0])
        with torch.no_grad():
            student = self.method.model(batch.images).features
            before, after = anchor(batch.images).features, plastic(batch.images).features
            old = batch.labels < 2
            found = self._distil_unwatched(batch)  # type: ignore[attr-defined]
        if bool(old.any()):
            assert torch.allclose(found["stable"], relative_distance(student[old], before[old]).mean(), rtol=1e-4)
        assert torch.allclose(found["plastic"], relative_distance(student[~old], after[~old]).mean(), rtol=1e-4)
        terms.append({name: float(value) for name, value in found.items()})

    def note_end(self: Consolidate, task: Task, stage: Stage) -> None:
        if stage.name == "main":
            trained.append({name: tensor.clone() for name, tensor in self._weights.items()})
            anchors.append({name: tensor.clone() for name, tensor in self._anchor().items()})

    monkeypatch.setattr(Consolidate, "_distil_unwatched", Consolidate._distil, raising=False)
    watch(monkeypatch, Consolidate, "_distil", check)
    watch(monkeypatch, Consolidate, "end_stage", note_end)
    before, after = at_stage_end(monkeypatch, "consolidate-distil")
    options = {"distil_epochs": 6}
    run = run_on(few, tmp_path, "podnet", "consolidate", consolidate=options, tasks=1)
    assert stage_names(run, 1) == ["main", "consolidate-statistics", "consolidate-distil", "balance"]
    first, last = (sum(row.values()) for row in (terms[0], terms[-1]))
    assert last < first
    same({n: t for n, t in before[0].items() if n.startswith("head")}, snapshot_head(after[0]))


def snapshot_head(state: Tensors) -> Tensors:
    return {name: tensor for name, tensor in state.items() if name.startswith("head")}


def test_head_alone_is_trained_on_balanced_exemplars(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Tensors] = []

    def note(self: Consolidate, task: Task, stage: Stage) -> None:
        if stage.name == "consolidate-head":
            begun.append(state_of(self.method.model))

    watch(monkeypatch, Consolidate, "begin_stage", note)
    _, after = at_stage_end(monkeypatch, "consolidate-head")
    run = run_on(few, tmp_path, "mrfa", "consolidate", consolidate={"head_epochs": 2}, tasks=1)
    assert stage_names(run, 1) == ["main", "consolidate-statistics", "consolidate-head"]
    changed = {name for name, tensor in after[0].items() if not torch.equal(tensor, begun[0][name])}
    parameters = {name for name, _ in run.parts.method.model.named_parameters()}
    assert {name for name in changed & parameters if not name.startswith("head.")} == set()
    assert any(name.startswith("head.blocks.0") for name in changed)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [("pass", {"head_epochs": 1}, "stores none"), ("flyp", {"distil_epochs": 1}, "trained from scratch")],
)
def test_impossible_parts_are_refused(method: str, options: dict[str, Any], reason: str) -> None:
    given = {"method": method, "addons": ["consolidate"], "dataset": "cifar100", "consolidate": options}
    with pytest.raises(ConfigError, match=reason):
        check_names(resolve(given))


def test_a_frozen_copy_has_the_given_weights_and_is_not_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    weights = {"0.bias": torch.tensor([5.0, 6.0])}
    copied = frozen(model, weights)
    assert not copied.training and not any(p.requires_grad for p in copied.parameters())
    assert torch.equal(copied.get_parameter("0.bias").detach(), weights["0.bias"])
    assert torch.equal(copied.get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert model.training and model.get_parameter("0.bias").requires_grad


def test_relative_distance_does_not_depend_on_the_scale() -> None:
    a, b = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert torch.allclose(relative_distance(a, b), torch.tensor([2.0, 1.0]))
    assert torch.allclose(relative_distance(10 * a, 10 * b), relative_distance(a, b))
