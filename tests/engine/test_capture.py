"""Training with captured CUDA graphs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from incvec.addons.ivt import IVTAddOn
from incvec.data import Dataset
from incvec.engine import device_errors
from incvec.engine import events as ev
from incvec.engine.loop import StageLoop
from incvec.engine.run import finish
from incvec.nets import kernels
from tests.addons.tools import watch
from tests.conftest import make_run, quick, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_backbone_changes_in_every_task(precision: str, few: Dataset, tmp_path: Path) -> None:
    """A balanced stage freezes it in between. Afterwards, compiled code without gradients must not be reused."""
    given = quick("podnet", base_classes=2, tasks=4, engine="graph", precision=precision)
    run = make_run(few, tmp_path / "run", given)
    record = finish(run)
    assert record["engine"]["notices"] == []
    snapshots = [weights(run.snapshot_path(task)) for task in range(5)]
    for before, after in itertools.pairwise(snapshots):
        trained = [name for name in before if ".backbone." in name and "running" not in name]
        assert all(not torch.equal(before[name], after[name]) for name in trained)


def test_layers_are_teleported_between_replays(few: Dataset, tmp_path: Path) -> None:
    """A probe runs beside the captured step. Layers with forward hooks do not use our kernels."""
    given = {"base_classes": 2, "tasks": 2, "precision": "bf16", "engine": "graph", "pass": {"net": "resnet32-pycil"}}
    seen = {}
    for choice in ("keep", "layer"):
        run = make_run(few, tmp_path / choice, quick("pass", "ivt", ivt={"batchnorm": choice, "head": "keep"}, **given))
        assert finish(run)["engine"]["notices"] == []
        seen[choice] = weights(run.snapshot_path(2))
    for name in seen["keep"]:
        assert torch.isfinite(seen["layer"][name]).all(), name
        if name.endswith("norm1.weight") and name.startswith("method/model."):
            assert not torch.equal(seen["layer"][name], seen["keep"][name]), name


def test_layers_do_not_change_if_scale_is_one(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an old Fisher S is 1. Training is in bfloat16, but the probe that sets weights is not."""
    before: list[dict[str, torch.Tensor]] = []

    def norms(addon: IVTAddOn) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in addon.method.model.named_parameters() if "norm" in name}

    def before_end_epoch(self: IVTAddOn, *_: object) -> None:
        for value in self.plugin.core.cumulative.values():
            value.zero_()
        before.append(norms(self))

    def after_end_epoch(self: IVTAddOn, *_: object) -> None:
        for name, weight in norms(self).items():
            assert torch.allclose(weight, before[-1][name], rtol=0.02, atol=0.01), name

    watch(monkeypatch, IVTAddOn, "end_epoch", before=before_end_epoch, after=after_end_epoch)
    own = {"net": "resnet32-pycil", "batch_size": 8}
    given = quick("pass", "ivt", ivt={"interval": 1}, engine="graph", precision="bf16", tasks=2, **{"pass": own})
    assert finish(make_run(few, tmp_path, {**given, "base_classes": 2}))["engine"]["notices"] == []
    assert before


@pytest.mark.parametrize("method", ["podnet", "pass"])
def test_last_batch_is_captured(method: str, few: Dataset, tmp_path: Path) -> None:
    """A second graph. The first epochs have the losses of an eager run."""
    losses = {}
    for engine in ("eager", "graph"):
        given = quick(method, "ivt", engine=engine, precision="fp32", last_batch="keep", device="cuda")
        run = make_run(few, tmp_path / engine, given)
        loops = [run.loop for event in run.events() if isinstance(event, ev.StageStarted)]
        captured = [bool(loop.last_replays) for loop in loops if loop is not None and loop.last_batch]
        assert captured == [engine == "graph"] * len(captured) != []
        record = json.loads(run.record_path.read_text())
        assert record["engine"]["notices"] == []
        losses[engine] = record["losses"]
    for one, other in zip(losses["eager"][:2], losses["graph"][:2], strict=True):
        for term, values in one["terms"].items():
            assert values[0] == pytest.approx(other["terms"][term][0], rel=0.02, abs=1e-3), (one["stage"], term)


@pytest.mark.parametrize(("share", "grows"), [(-1.0, False), (1.0, True)])
def test_memory_of_dropped_graphs_is_released(
    share: float, grows: bool, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is released once it exceeds a share of the device's memory (here: always, never)."""
    monkeypatch.setattr(device_errors, "MAX_IDLE_SHARE", share)
    device_errors.release_memory()
    given = quick("finetune", base_classes=2, tasks=4, engine="graph", finetune={"net": "resnet32-pycil", "epochs": 1})
    reserved = [
        torch.cuda.memory_reserved()
        for event in make_run(few, tmp_path / "run", given).events()
        if isinstance(event, ev.StageStarted)
    ]
    segment = 2 << 20  # the least memory of a captured step
    assert (reserved[-1] - reserved[1] >= 3 * segment) == grows, reserved  # after the second and the fifth capture


@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_own_loss_has_a_captured_step_of_its_own(last_batch: str, few: Dataset, tmp_path: Path) -> None:
    """Gradients of the method's own terms, in the epochs whose F is used: captured, and close to the eager ones.

    The learning rate is small: rounding differs between the engines, and large steps would amplify it.
    """
    seen = {}
    for engine in ("graph", "eager"):
        given = {"precision": "fp32", "engine": engine, "last_batch": last_batch}
        options = {"fisher_loss": "own", "interval": 2, "last": "skip", "snapshot_fisher": True}
        run = make_run(few, tmp_path / engine, quick("lwf", "ivt", lwf={"epochs": 5, "lr": 1e-4}, ivt=options, **given))
        assert finish(run)["engine"]["notices"] == []
        seen[engine] = weights(run.snapshot_path(2))
    for name, tensor in seen["eager"].items():
        if name.startswith("addon/ivt/cumulative/"):
            error = (tensor - seen["graph"][name]).norm() / tensor.norm().clamp_min(1e-30)
            assert error < 0.02, (name, error)


@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_fisher_of_ewc_is_measured_in_a_captured_step(last_batch: str, few: Dataset, tmp_path: Path) -> None:
    """Sums in `store` are written in place by the replays, and the warm-up steps leave no trace in them.

    Close to the eager ones; the learning rate is small, as above.
    """
    seen = {}
    for engine in ("graph", "eager"):
        given = quick("ewc", ewc={"lr": 1e-4, "clip": None}, engine=engine, precision="fp32", last_batch=last_batch)
        run = make_run(few, tmp_path / engine, {**given, "device": "cuda"})
        stages = [event for event in run.events() if isinstance(event, ev.StageStarted)]
        assert [stage.stage for stage in stages] == ["main", "fisher"] * 3
        assert json.loads(run.record_path.read_text())["engine"]["notices"] == []
        seen[engine] = [weights(run.snapshot_path(task)) for task in range(3)]
    for one, other in zip(seen["eager"], seen["graph"], strict=True):
        assert not {"store/squares", "store/terms"} & {*one, *other}
        for name in ("store/fisher", "store/anchor"):
            error = (one[name] - other[name]).norm() / one[name].norm()
            assert error < 0.02, (name, error)


def test_graph_of_other_epochs_is_captured_again_after_a_failure(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed capture makes the generators unusable that the loop's other graph draws from."""

    original = StageLoop._own_backward

    def reading(self: StageLoop, terms: Mapping[str, torch.Tensor]) -> None:
        bool(terms["ce"])
        original(self, terms)

    monkeypatch.setattr(StageLoop, "_own_backward", reading)
    monkeypatch.setattr(kernels, "available", lambda: False)  # they would be disabled for the tests that follow
    given = quick("lwf", "ivt", lwf={"epochs": 5}, ivt={"fisher_loss": "own", "interval": 2}, engine="graph")
    run = make_run(few, tmp_path / "run", given)
    captured: dict[int, set[bool]] = {}
    for event in run.events():
        if isinstance(event, ev.EpochEnded) and run.loop is not None:
            captured.setdefault(event.task, set()).update(run.loop.replays)
    notices = json.loads(run.record_path.read_text())["engine"]["notices"]
    assert notices, "the step of the own loss could be captured"
    assert captured == {0: {False}, 1: {False}, 2: {False}}
