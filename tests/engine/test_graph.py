"""The captured engine on a CUDA device trains what it should in every task."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from incvec.data import Dataset
from incvec.engine.run import finish
from tests.conftest import make_run, quick, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_backbone_moves_in_every_task(precision: str, few: Dataset, tmp_path: Path) -> None:
    """A balanced stage freezes it in between; a compiled variant without gradients must not be taken after that."""
    given = quick("podnet", base_classes=2, tasks=4, engine="graph", precision=precision)
    run = make_run(few, tmp_path / "run", given)
    record = finish(run)
    assert record["engine"]["notices"] == []
    snapshots = [weights(run.snapshot_path(task)) for task in range(5)]
    for before, after in itertools.pairwise(snapshots):
        trained = [name for name in before if ".backbone." in name and "running" not in name]
        assert all(not torch.equal(before[name], after[name]) for name in trained)


def test_maps_are_teleported_between_replays(few: Dataset, tmp_path: Path) -> None:
    """The look runs by torch's own operators beside a captured step, and the step goes on from what it leaves."""
    given = {"base_classes": 2, "tasks": 2, "precision": "fp32", "ivt": {"batchnorm": "map", "head": "keep"}}
    runs = [make_run(few, tmp_path / way, quick("pass", "ivt", engine=way, **given)) for way in ("graph", "eager")]
    records = [finish(run) for run in runs]
    assert records[0]["engine"]["notices"] == []
    first, second = (weights(run.snapshot_path(2)) for run in runs)
    for name, tensor in first.items():
        if name.endswith(("running_mean", "running_var")) or ".norm" in name:
            assert torch.isfinite(tensor).all(), name
            assert (tensor - second[name]).abs().mean() < 0.05 * (1 + second[name].abs().mean()), name
