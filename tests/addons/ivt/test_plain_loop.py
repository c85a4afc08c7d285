"""The add-on is the plug-in: a plain loop with `IVT` on the lab's batches ends with the lab's weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from incvec import IVT
from incvec.contracts import Batch, Task
from incvec.data import Dataset, ImageSource
from incvec.engine.build import build
from incvec.engine.loop import StageLoop
from incvec.presets import resolve
from tests.addons.tools import Tensors, run_on, same, snapshot, state_of, watch
from tests.conftest import quick

EPOCHS = 5
NAMES = {"keep": ["head"], "teleport": []}


class Lab:
    """A finished run of LwF + IVT with three tasks, and what a plain loop needs of it."""

    def __init__(self, data: Dataset, out: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
        self.starts: dict[int, Tensors] = {}  # weights at the beginning of each task
        self.batches: dict[tuple[int, int], list[Batch]] = {}  # by task and epoch, from 0
        self.probes: list[Batch] = []
        inside: list[list[Batch]] = []
        epochs: list[int] = []

        def begin_epoch(loop: StageLoop, epoch: int, shuffle: Any) -> None:
            task = loop.method.task.index
            epochs[:] = [epoch]
            if epoch == 0:
                self.starts[task] = state_of(loop.method.model)

        def step(loop: StageLoop) -> None:
            inside.append(self.batches.setdefault((loop.method.task.index, epochs[0]), []))

        fetch = ImageSource.fetch

        def recorded(source: ImageSource, *arguments: Any, **named: Any) -> Batch:
            batch = fetch(source, *arguments, **named)
            if inside:
                inside[-1].append(batch)
            return batch

        patch.setattr(ImageSource, "fetch", recorded)
        watch(patch, StageLoop, "begin_epoch", before=begin_epoch)
        watch(patch, StageLoop, "step", before=step, after=lambda loop: inside.pop())
        watch(
            patch, StageLoop, "probe",
            before=lambda loop, batches: inside.append(self.probes), after=lambda loop, batches: inside.pop(),
        )  # fmt: skip
        self.run = run_on(data, out, "lwf", "ivt", lwf={"epochs": EPOCHS}, ivt=options)


def plain_loop(lab: Lab, data: Dataset, options: dict[str, Any]) -> list[Tensors]:
    """The same three tasks without engine and add-on; returns the weights after each."""
    parts = build(resolve(quick("lwf", lwf={"epochs": EPOCHS})), data, torch.Generator(), torch.device("cpu"))
    method, model = parts.method, parts.method.model
    probes = iter(lab.probes)
    given = {key: value for key, value in options.items() if key != "head"}
    ivt = IVT(model, exclude=NAMES[options["head"]], probe=lambda: method.loss(next(probes)), **given)
    results = []
    for task in parts.tasks:
        grow(method, task, lab.starts[task.index])
        stage = method.stages(task)[0]
        optimizer = torch.optim.SGD(
            [
                {
                    "params": [p for n, p in method.named_parameters() if group.owns(n)],
                    "weight_decay": group.weight_decay,
                }
                for group in stage.groups
            ],
            lr=1.0,
            momentum=stage.optimizer.momentum,
            fused=True,
        )
        ivt.begin_task(optimizer, epochs=EPOCHS)
        method.train()
        for epoch, factor in enumerate(stage.schedule.factors(EPOCHS).tolist()):
            for group, settings in zip(optimizer.param_groups, stage.groups, strict=True):
                group["lr"] = float(torch.tensor(factor * settings.lr))  # the engine's rates are float32
            for batch in lab.batches[task.index, epoch]:
                terms = method.loss(batch)
                if options.get("fisher_loss") == "own" and task.index and ivt.collecting:
                    ivt.collect(terms["ce"].float())
                elif options.get("fisher_loss") == "own" and ivt.collecting:
                    ivt.collect(torch.stack([term.float() for term in terms.values()]).sum())
                optimizer.zero_grad()
                torch.stack([term.float() for term in terms.values()]).sum().backward()
                optimizer.step()
            ivt.end_epoch()
        ivt.end_task()
        results.append(state_of(model))
    assert next(probes, None) is None
    return results


def grow(method: Any, task: Task, start: Tensors) -> None:
    """Grow the head. New rows are drawn by the engine's generator, so they are taken over; the rest stays."""
    known = set(method.model.state_dict()) if task.index else set()
    method.task = task
    method.grow(task)
    method.begin_task(task)
    method.requires_grad_(True)
    if method.teacher is not None:
        method.teacher.requires_grad_(False)
    with torch.no_grad():
        for name, tensor in method.model.state_dict().items():
            if name not in known:
                tensor.copy_(start[name])
            else:
                assert torch.equal(tensor, start[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 2, "last": "skip", "head": "keep"},
        {"interval": 1, "last": "teleport", "head": "teleport"},
        {"interval": 2, "last": "teleport", "head": "keep", "batchnorm": "layer"},
        {"interval": 2, "last": "skip", "head": "keep", "fisher_loss": "own"},
        {"interval": 2, "last": "skip", "head": "keep", "memory": "host"},
    ],
    ids=str,
)
def test_a_plain_loop_with_the_plugin_ends_where_the_lab_does(
    options: dict[str, Any], few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batchnorm": "keep", **options}
    with monkeypatch.context() as patch:
        lab = Lab(few, tmp_path / "lab", patch, options)
    assert bool(lab.probes) == (options["batchnorm"] == "layer")
    plain = plain_loop(lab, few, options)
    assert len(plain) == 3
    for task, state in enumerate(plain):
        same(snapshot(lab.run, task), state)
    assert any(not torch.equal(plain[1][name], plain[2][name]) for name in plain[1])
