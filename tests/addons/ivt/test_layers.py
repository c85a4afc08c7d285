"""A convolution and its norm teleported as one map: `batchnorm` = layer; and the probe that measures their inputs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine import loop as stage_loop
from incvec.ivt.batchnorm import STATISTICS
from incvec.nets.resnet import Norm
from tests.addons.ivt.conftest import Teleports, scale_of, split_state
from tests.addons.tools import Tensors, record_batches, run_on, same, snapshot, state_of, watch
from tests.conftest import make_run, quick


@pytest.mark.parametrize("method", ["pass", "fcs"])
def test_scale_of_one_changes_no_map(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a past S is 1. With means over several batches instead of one batch, the maps would still change."""
    before: list[Tensors] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        for value in self.plugin.core.cumulative.values():
            value.zero_()
        before.append({name: p.detach().clone() for name, p in self.method.model.named_parameters()})

    def end(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        for name, p in self.method.model.named_parameters():
            assert torch.allclose(p, before[-1][name], rtol=1e-4, atol=1e-5), (name, epoch)

    watch(monkeypatch, IVTAddOn, "end_epoch", before=begin, after=end)
    given = {"batchnorm": "layer", "last": "teleport", "interval": 1}
    run_on(few, tmp_path, method, "ivt", ivt=given, **{method: {"batch_size": 8}})
    assert len(before) >= 4


def affine(state: Tensors, name: str, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset of a BatchNorm layer."""
    slope = state[f"{name}.weight"].double() / (var + 1e-5).sqrt()
    return slope, state[f"{name}.bias"].double() - slope * mean


def test_teleported_layers(few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope times the filters of the preceding convolution, and the offset, are teleported like weights, and
    written with the statistics of the new inputs."""
    start: list[Tensors] = []
    before: list[Tensors] = []
    after: list[Tensors] = []
    probes: list[dict[tuple[str, bool], list[Tensor]]] = []  # inputs of every norm, in train mode or as its map
    names: dict[int, str] = {}
    watch(monkeypatch, IVTAddOn, "begin_task", before=lambda self, task: start.append(state_of(self.method.model)))

    def begin(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        names.update({id(module): name for name, module in self.method.model.named_modules()})
        probes.append({})
        before.append(state_of(self.method.model))

    def forward(self: Any, x: Tensor) -> None:
        if self._forward_pre_hooks and id(self) in names:
            probes[-1].setdefault((names[id(self)], self.training), []).append(x.detach().double())

    def end(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        if not probes[-1]:
            probes.pop()
            before.pop()
            return
        after.append(state_of(self.method.model))
        assert all(m.training and not m._forward_pre_hooks for m in self.method.model.modules())

    watch(monkeypatch, Norm, "forward", before=forward)
    watch(monkeypatch, IVTAddOn, "end_epoch", before=begin, after=end)
    run_on(few, tmp_path, "pass", "ivt", ivt={"batchnorm": "layer", "head": "keep", "last": "teleport"})
    assert len(after) == len(probes) == 4
    for number, row in enumerate(teleports.rows):
        states = (start[number // 2], before[number], after[number])
        layers = [name.removesuffix(".running_mean") for name in states[0] if name.endswith("running_mean")]
        assert len(layers) > 3
        for name in layers:
            trained, (mapped,) = probes[number][name, True], probes[number][name, False]
            assert len(trained) == 1
            assert len(trained[0]) == len(mapped) == 4 * 64  # two batches as one, in four rotations
            rows = [x.transpose(0, 1).flatten(1) for x in (trained[0], mapped)]
            old_moments = tuple(states[0][f"{name}.{kind}"].double() for kind in STATISTICS)
            moments = [old_moments, *((x.mean(1), x.var(1, correction=0)) for x in rows)]
            for kind, expected in zip(STATISTICS, moments[2], strict=True):
                assert torch.allclose(states[2][f"{name}.{kind}"].double(), expected, rtol=1e-4, atol=1e-5)
            maps = [affine(state, name, *each) for state, each in zip(states, moments, strict=True)]
            parameters = [name.replace("norm", "conv") + ".weight", f"{name}.bias"]
            filters = [state[parameters[0]] for state in states]
            maps = [(s[:, None, None, None] * w, offset) for w, (s, offset) in zip(filters, maps, strict=True)]
            for parameter, (old, new, result) in zip(parameters, zip(*maps, strict=True), strict=True):
                expected = old + scale_of(row, parameter) * (new - old)
                assert torch.allclose(result, expected, rtol=1e-3, atol=1e-4), (number, parameter)


def test_vanished_filters(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight decay shrinks unused filters to zero, and the slopes of their norms grow to hundreds.

    Such a slope must not be combined with the anchor's filters: maps after a teleport stay within the range of the two.
    """
    sizes: list[list[float]] = []

    def largest_activation(addon: IVTAddOn) -> float:
        images = torch.rand(16, *few.image_shape, generator=torch.Generator().manual_seed(0)).sub_(0.5)
        with torch.no_grad():
            return max(float(h.abs().max()) for h in addon.method.model.backbone(images).maps)  # in train mode

    def begin(addon: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        sizes.append([])
        if task.index > 0 and stage.role == "main" and addon.plugin.teleports_after(epoch):
            before = largest_activation(addon)
            with torch.no_grad():
                addon.method.model.backbone.stages[0][0].conv1.weight[::2] = 0
            sizes[-1] = [before, largest_activation(addon)]

    def end(addon: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        if sizes[-1]:
            sizes[-1].append(largest_activation(addon))

    watch(monkeypatch, IVTAddOn, "end_epoch", before=begin, after=end)
    run_on(few, tmp_path, "pass", "ivt", ivt={"batchnorm": "layer", "interval": 2})
    rows = [row for row in sizes if row]
    assert rows
    assert not any(after > 3 * max(row) for *row, after in rows), rows


def test_layers_with_frozen_statistics(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stage that freezes BatchNorm the map is teleported and the statistics stay."""
    plan = IVTAddOn.plan

    def frozen(self: IVTAddOn, task: Task, stages: list[Stage]) -> list[Stage]:
        return [stage.replace(batchnorm="frozen") if task.index else stage for stage in plan(self, task, stages)]

    monkeypatch.setattr(IVTAddOn, "plan", frozen)
    runs = [run_on(few, tmp_path / name, "finetune", "ivt", ivt={"batchnorm": name}) for name in ("keep", "layer")]
    (weights_a, statistics_a), (weights_b, statistics_b) = (split_state(snapshot(run, 2)) for run in runs)
    same(statistics_a, statistics_b)
    assert any(not torch.equal(weights_a[name], weights_b[name]) for name in weights_a if "norm" in name)


def test_model_without_batchnorm_has_no_maps(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is teleported as with `keep`, without a probe."""
    probes: list[int] = []
    watch(monkeypatch, stage_loop.StageLoop, "probe", before=lambda loop, batches: probes.append(batches))
    monkeypatch.setattr("incvec.ivt.core.batchnorm_layers", lambda model: {})  # all small networks have some
    keep, maps = (
        run_on(few, tmp_path / name, "finetune", "ivt", ivt={"batchnorm": name}) for name in ("keep", "layer")
    )
    same(snapshot(keep, 2), snapshot(maps, 2))
    assert probes == []


def test_probe_repeats_its_batches_and_changes_nothing(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients and with the same draws each time; outside a stage it does nothing."""
    batches = record_batches(monkeypatch)
    probes: list[list[Any]] = []
    grads: list[bool] = []

    def end(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        before, loop = state_of(self.method), run.loop
        assert loop is not None
        history, loss = loop.history.clone(), loop.loss
        loop.loss = lambda batch: (grads.append(torch.is_grad_enabled()), loss(batch))[1]
        for _ in range(2):
            batches.clear()
            self.world.probe(2)
            probes.append([len(batches), batches[0].images, torch.rand(3, generator=self.world.generator)])
        with monkeypatch.context() as limited:
            limited.setattr(stage_loop, "PROBE_BYTES", 1)
            self.world.probe(2)
        assert [len(batch.images) for batch in batches] == [2 * 32, 32]  # one batch if two are too large
        loop.loss = loss
        statistics = {name for name in before if name.endswith(STATISTICS)}  # train mode updates these
        assert all(torch.equal(t, before[n]) for n, t in state_of(self.method).items() if n not in statistics)
        assert torch.equal(loop.history, history)

    watch(monkeypatch, IVTAddOn, "end_epoch", after=end)
    run = make_run(few, tmp_path, quick("pass", "ivt", tasks=1))
    with closing(run.events()) as events:
        for _ in events:
            if probes:
                break
    assert run.loop is None
    batches.clear()
    run.parts.world.probe(3)
    assert batches == []
    (count, images, draw), (_, images_again, draw_again) = probes[:2]
    assert (count, len(images)) == (1, 2 * 32)  # two batches as one
    assert torch.equal(images, images_again)
    assert torch.equal(draw, draw_again)
    assert grads
    assert not any(grads)
