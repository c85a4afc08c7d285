"""Helpers of the add-on tests: short runs, and observers of what happens in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from incvec.contracts import Batch
from incvec.data import Dataset, ImageSource
from incvec.engine.run import Run, finish
from tests.conftest import make_run, quick, weights

Tensors = dict[str, Tensor]


def watch(
    patch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Call `before` and `after` with the arguments of every call of a method."""
    original = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments, **named)
        result = original(*arguments, **named)
        if after is not None:
            after(*arguments, **named)
        return result

    patch.setattr(owner, name, watched)


def record_batches(patch: pytest.MonkeyPatch) -> list[Batch]:
    """A list that receives every batch that a source returns from now on."""
    seen: list[Batch] = []
    original = ImageSource.fetch

    def fetch(self: ImageSource, *arguments: Any, **named: Any) -> Batch:
        batch = original(self, *arguments, **named)
        seen.append(batch)
        return batch

    patch.setattr(ImageSource, "fetch", fetch)
    return seen


def state_of(model: torch.nn.Module) -> Tensors:
    """A copy of the state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def snapshot(run: Run, task: int) -> Tensors:
    """The deployed model of a task, from its snapshot file."""
    prefix = "method/model."
    found = weights(run.snapshot_path(task))
    return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}


def run_on(data: Dataset, out: Path, method: str, *addons: str, **given: Any) -> Run:
    """A very short run, finished."""
    run = make_run(data, out, quick(method, *addons, **given))
    finish(run)
    return run


def same(a: Tensors, b: Tensors) -> None:
    """Assert that all tensors are equal, bit for bit."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def stage_names(run: Run, task: int) -> list[str]:
    """The stages of a task, with those of the add-ons."""
    return [stage.name for stage in run.parts.plan(run.parts.tasks[task])]


def record_trained(patch: pytest.MonkeyPatch, kind: type) -> list[Tensors]:
    """A list that receives the weights at the end of each task, before a merge is deployed."""
    trained: list[Tensors] = []
    watch(patch, kind, "deployed", before=lambda self, task: trained.append(state_of(self.method.model)))
    return trained
