"""Joint training has one task, whatever the stream."""

from __future__ import annotations

from pathlib import Path

from incvec.data import Dataset
from tests.methods.tools import finished


def test_all_classes_are_one_task(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "joint")
    (task,) = run.parts.tasks
    assert (task.n_old, task.n_seen) == (0, 6)
    assert len(run.parts.method.begin_stage(task, run.parts.method.stages(task)[0])) == 6 * 40
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["task-00.safetensors"]
