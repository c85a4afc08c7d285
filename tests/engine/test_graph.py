"""The captured engine on a CUDA device: it trains what it should in every task, and draws anew in every step."""

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


def test_draws_differ_from_step_to_step(few: Dataset, tmp_path: Path) -> None:
    """The same rows in two replays of one graph are seen through different crops."""
    run = make_run(few, tmp_path / "run", quick("finetune", engine="graph", finetune={"brightness": 0.2}))
    seen: list[torch.Tensor] = []
    for _ in run.events():
        loop = run.loop
        if loop is not None and loop.replay is not None and not seen:
            for _ in range(2):
                loop.cursor.zero_()
                loop.replay()
                torch.cuda.synchronize()
                seen.append(loop.history[0].clone())
            break
    assert not torch.equal(*seen)
