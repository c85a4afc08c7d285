"""What is teleported: which parameters, from which anchor, with which F; and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.ivt import IVT
from incvec.methods import METHODS, find_method
from tests.addons.ivt.conftest import Teleports, scale_of, teleported
from tests.addons.tools import Tensors, record_batches, run_on, same, snapshot, state_of, watch
from tests.conftest import make_run, quick, same_record, same_weights, weights

TRAINED = [name for name in sorted(METHODS) if find_method(name).trains and not find_method(name).joint]


@pytest.mark.parametrize("method", TRAINED)
def test_old_and_trained_parameters_are_teleported(
    method: str, few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[set[str]] = []  # the model's parameters at the end of each task
    trained: list[set[str]] = []

    def end(self: IVTAddOn, task: Task) -> None:
        names.append({name for name, _ in self.method.model.named_parameters()})
        main = next(stage for stage in self.method.stages(task) if stage.role == "main")
        trained.append({name for name in names[-1] if any(group.owns(f"model.{name}") for group in main.groups)})

    watch(monkeypatch, IVTAddOn, "end_task", before=end)
    run_on(few, tmp_path, method, "ivt", ivt={"interval": 2})
    assert [task for task, _, _ in teleports.epochs] == [1, 2]
    for row, task in enumerate((1, 2)):
        expected = trained[task] & names[task - 1]
        assert teleports.moved(row) == expected
        if not find_method(method).pretrained:  # dual encoders add no parameters
            assert f"head.blocks.{task}.weight" in trained[task] - expected  # new rows are trained, but have no past
        for name in expected:
            after = teleports.rows[row]["after"][name].double()
            assert torch.allclose(after, teleported(teleports.rows[row], name), rtol=1e-4, atol=1e-6), name


def test_frozen_proxies_of_podnet_are_not_teleported(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    run_on(few, tmp_path, "podnet", "ivt")
    heads = [{name for name in teleports.moved(row) if name.startswith("head")} for row in range(4)]
    assert heads == [{"head.scale"}] * 4


def test_anchor_is_the_model_at_the_beginning_of_the_main_stage(
    few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Tensors] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.role == "main":
            begun.append(state_of(self.method.model))

    watch(monkeypatch, IVTAddOn, "begin_stage", before=begin)
    run = run_on(few, tmp_path, "podnet", "ivt", ivt={"interval": 2})
    for row, task in enumerate((1, 2)):
        anchor, previous = teleports.rows[row]["anchor"], snapshot(run, task - 1)
        for name, value in anchor.items():
            assert torch.equal(value, begun[row][name])
            if name in previous:
                assert torch.equal(value, previous[name])  # after the balanced stage of the previous task


@pytest.mark.parametrize("method", ["pass", "mrfa"])
def test_head_keep_excludes_the_classifier(method: str, few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """`head=keep` teleports the same as `head=teleport` except for the classifier, whose F is still collected."""
    run_on(few, tmp_path / "all", method, "ivt", ivt={"interval": 2}, tasks=1)
    run_on(few, tmp_path / "body", method, "ivt", ivt={"interval": 2, "head": "keep"}, tasks=1)
    everything, body = teleports.moved(0), teleports.moved(1)
    rows = {name for name in everything if name.startswith("head.")}
    assert rows
    assert body == everything - rows
    assert rows <= teleports.rows[1]["fisher"].keys()
    for name in body:
        assert torch.equal(teleports.rows[0]["after"][name], teleports.rows[1]["after"][name]), name


@pytest.mark.parametrize("method", ["finetune", "podnet", "pass", "mrfa"])
def test_batches_are_those_of_a_plain_run_until_the_first_teleport(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and views of every fetch, including herding and evaluation."""
    batches = record_batches(monkeypatch)
    options = {method: {"epochs": 4}}
    run_on(few, tmp_path / "plain", method, **options)
    plain = list(batches)
    batches.clear()
    first: list[int] = []
    watch(monkeypatch, IVT, "teleport", before=lambda plugin: first.append(len(batches)))
    run_on(few, tmp_path / "ivt", method, "ivt", ivt={"interval": 3}, **options)
    teleport = first[0]
    assert 10 < teleport < len(plain)
    for one, other in zip(plain[:teleport], batches[:teleport], strict=True):
        assert torch.equal(one.indices, other.indices)
        assert all(torch.equal(a, b) for a, b in zip(one.views, other.views, strict=True))
    if method in ("finetune", "pass"):  # rows do not depend on features
        for one, other in zip(plain, batches, strict=True):
            assert torch.equal(one.indices, other.indices)


def test_run_without_a_teleport_equals_the_plain_run(few: Dataset, tmp_path: Path) -> None:
    plain = run_on(few, tmp_path / "plain", "podnet")
    idle = run_on(few, tmp_path / "idle", "podnet", "ivt", ivt={"interval": 9})
    for task in range(3):
        same(snapshot(plain, task), snapshot(idle, task))


@pytest.mark.parametrize("options", [{}, {"first_fisher": "sample"}, {"structure": "kernel"}], ids=str)
def test_shared_base_gives_the_same_run_as_scratch(options: dict[str, Any], few: Dataset, tmp_path: Path) -> None:
    given = quick("podnet", "ivt", ivt=options)
    scratch = make_run(few, tmp_path / "scratch", given)
    record = finish(scratch)
    finish(make_run(few, tmp_path / "other", quick("podnet", tasks=1), tmp_path / "bases"))  # another stream
    shared = make_run(few, tmp_path / "shared", given, tmp_path / "bases")
    same_record(finish(shared), record)
    for task in range(3):
        same_weights(scratch.snapshot_path(task), shared.snapshot_path(task))


@pytest.mark.parametrize("choice", ["keep", "reset"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_optimizer_state(choice: str, kind: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reset` zeroes the state of teleported parameters only; `keep` changes nothing."""
    states: list[tuple[Tensors, Tensors]] = []
    current: list[Tensors] = [{}]

    def flat(self: IVTAddOn, optimizer: torch.optim.Optimizer) -> Tensors:
        named = {id(p): name for name, p in self.method.model.named_parameters()}
        pairs = [(named[id(p)], key, t) for p, state in optimizer.state.items() for key, t in state.items()]
        return {f"{name}:{key}": t.clone() for name, key, t in pairs}

    def before(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        current[0] = flat(self, optimizer)

    def after(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        states.append((current[0], flat(self, optimizer)))

    watch(monkeypatch, IVTAddOn, "end_epoch", before=before, after=after)
    options = {"epochs": 3, "optimizer": kind, "lr": 0.01}
    run_on(few, tmp_path, "finetune", "ivt", finetune=options, ivt={"interval": 2, "optimizer_state": choice}, tasks=1)
    assert len(states) == 3
    for epoch, (old, new) in enumerate(states, start=1):
        assert all(tensor.any() for tensor in old.values())
        for name, tensor in new.items():
            if choice == "reset" and epoch == 2 and not name.startswith("head.blocks.1."):
                assert not tensor.any(), name
            else:
                assert torch.equal(tensor, old[name]), name


def test_optimizer_state_of_an_excluded_head_is_kept(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonzero: list[list[bool]] = []

    def after(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        parameters = dict(self.method.model.named_parameters())
        names = ("head.blocks.0.weight", "backbone.stem.conv.weight")
        nonzero.append([bool(optimizer.state[parameters[n]]["momentum_buffer"].any()) for n in names])

    watch(monkeypatch, IVTAddOn, "end_epoch", after=after)
    run_on(few, tmp_path, "finetune", "ivt", ivt={"head": "keep", "optimizer_state": "reset"}, tasks=1)
    assert nonzero == [[True, False]] * 2


def test_optimizer_without_state_can_be_reset(few: Dataset, tmp_path: Path) -> None:
    keep = run_on(few, tmp_path / "keep", "finetune", "ivt", finetune={"momentum": 0.0})
    options = {"optimizer_state": "reset"}
    reset = run_on(few, tmp_path / "reset", "finetune", "ivt", finetune={"momentum": 0.0}, ivt=options)
    same(snapshot(keep, 2), snapshot(reset, 2))


def test_recorded_statistics_use_the_last_epoch(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    run = run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": 2})
    base, *increments = (row["ivt"] for row in run.progress.statistics)
    assert base == {}
    stem = "backbone.stem.conv"
    for statistics, row in zip(increments, teleports.rows, strict=True):
        assert {"all", stem} <= set(statistics)
        assert statistics[stem]["scale"] == pytest.approx(scale_of(row, f"{stem}.weight").mean().item(), abs=2e-5)
        assert 0.5 <= statistics["all"]["scale"] <= 1
        distance = (row["after"][f"{stem}.weight"] - row["anchor"][f"{stem}.weight"]).norm().item()
        assert statistics[stem]["distance"] == pytest.approx(distance, rel=1e-3)
        rows = statistics["teleports"]
        assert (rows["of"], rows["epoch"]) == (2, [2])
        assert rows["scale"] == [pytest.approx(statistics["all"]["scale"], rel=1e-3)]
        assert rows["distance_after"] == [pytest.approx(statistics["all"]["distance"], rel=1e-3)]
        assert rows["distance_before"] > rows["distance_after"]


def test_snapshot_contains_the_state(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "finetune", "ivt")
    names = {name for name in weights(run.snapshot_path(1)) if name.startswith("addon/ivt/")}
    assert any("backbone.stem.conv.weight" in name for name in names)
