"""Joint training: one task, whatever the stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from incvec.data import Dataset
from tests.methods.endings import ending, finished


def test_there_is_one_task(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "joint")
    (task,) = run.parts.tasks
    assert (task.n_old, task.n_seen, task.of) == (0, 6, 1)
    assert len(run.parts.method.begin_stage(task, run.parts.method.stages(task)[0])) == 6 * 40
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["task-00.safetensors"]


def test_it_is_the_optimum_of_all_tasks() -> None:
    record = ending("joint")
    assert record["tasks"] == 2  # the stream it stands beside
    assert record["config"]["base_classes"] == 4
    metrics = record["metrics"]
    assert metrics["AA"] == metrics["LA"] == pytest.approx(record["accuracy"][0][0])
    assert metrics["FM"] is None
    assert metrics["LA"] > 95
    assert metrics["LA"] > ending("icarl")["metrics"]["LA"]
