"""`memory` and `snapshot_fisher`: where the anchor and Fbar are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import CheckpointError
from tests.conftest import make_run, quick, same_weights, weights


@pytest.mark.parametrize("batchnorm", ["keep", "layer"])
def test_host_memory_gives_the_same_bits(batchnorm: str, few: Dataset, tmp_path: Path) -> None:
    given = {"batchnorm": batchnorm, "snapshot_fisher": True}
    runs = [
        make_run(few, tmp_path / memory, quick("flyp", "ivt", ivt={**given, "memory": memory}))
        for memory in ("device", "host")
    ]
    first, second = (finish(run) for run in runs)
    assert first["accuracy"] == second["accuracy"]
    assert first["statistics"] == second["statistics"]
    for task in range(3):
        same_weights(runs[0].snapshot_path(task), runs[1].snapshot_path(task))


@pytest.mark.parametrize(
    ("method", "option", "stored"), [("flyp", None, False), ("flyp", True, True), ("finetune", None, True)]
)
def test_snapshots_of_pretrained_models_store_fbar_on_request(
    method: str, option: bool | None, stored: bool, few: Dataset, tmp_path: Path
) -> None:
    given = quick(method, "ivt", ivt={"snapshot_fisher": option})
    run = make_run(few, tmp_path / "run", given)
    whole = finish(run)
    assert any(name.startswith("addon/ivt/cumulative/") for name in weights(run.snapshot_path(1))) == stored
    later = make_run(few, tmp_path / "later", {**given, "start": str(run.snapshot_path(1))})
    if stored:
        assert finish(later)["accuracy"] == whole["accuracy"]
    else:
        with pytest.raises(CheckpointError, match=r"ivt\.snapshot_fisher=true"):
            finish(later)
