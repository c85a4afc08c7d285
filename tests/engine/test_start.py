"""Runs that start from a snapshot of another run, and the lock of a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from incvec.data import Dataset
from incvec.engine import run as run_module
from incvec.engine.run import finish
from incvec.errors import CheckpointError
from incvec.presets import changed_settings
from tests.conftest import always_saving_run, make_run, quick, same_weights


def test_start_from_a_snapshot_ends_with_the_same_bits(few: Dataset, tmp_path: Path) -> None:
    given = quick("podnet", "ivt")
    whole = make_run(few, tmp_path / "whole", given)
    record = finish(whole)
    later = make_run(few, tmp_path / "later", {**given, "start": str(whole.snapshot_path(1))})
    assert finish(later)["accuracy"] == record["accuracy"]
    same_weights(whole.snapshot_path(2), later.snapshot_path(2))


def test_start_from_the_own_base_counts_as_a_shared_base(few: Dataset, tmp_path: Path) -> None:
    """Only a snapshot of the base task that the run would have trained itself counts as a shared base."""
    whole = make_run(few, tmp_path / "whole", quick("podnet"))
    finish(whole)
    cases: list[tuple[int, dict[str, Any], bool]] = [
        (0, {"oracle": True}, True), (1, {}, False), (0, {"seed": 3}, False), (0, {"precision": "bf16"}, False),
    ]  # fmt: skip
    for number, (task, change, shared) in enumerate(cases):
        given = {**quick("podnet", start=str(whole.snapshot_path(task))), **change}
        record = finish(make_run(few, tmp_path / str(number), given))
        assert (record["base"]["snapshot"], record["base"]["shared"]) == (given["start"], shared)
        assert ("start" in changed_settings(record["config"])) is not shared
        same_weights(whole.snapshot_path(task), make_run(few, tmp_path / str(number), given).snapshot_path(task))
        assert finish(make_run(few, tmp_path / str(number), given)) == record  # finished before
        without = {key: value for key, value in given.items() if key != "start"}
        if shared:
            assert finish(make_run(few, tmp_path / str(number), without)) == record
        for other in [{**given, "start": str(whole.snapshot_path(2))}, *([] if shared else [without])]:
            with pytest.raises(CheckpointError, match="another configuration"):
                finish(make_run(few, tmp_path / str(number), other))


def test_start_from_a_snapshot_in_the_same_folder_leaves_it_unchanged(few: Dataset, tmp_path: Path) -> None:
    whole = make_run(few, tmp_path / "whole", quick("podnet"))
    finish(whole)
    whole.record_path.unlink()
    before = whole.snapshot_path(0).read_bytes()
    finish(make_run(few, tmp_path / "whole", quick("podnet", oracle=True, start=str(whole.snapshot_path(0)))))
    assert whole.snapshot_path(0).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order_seed": 5}, "its classes so far, or their images, differ"),
        ({"addons": ["ivt"]}, "did not use the add-on ivt"),
        ({"podnet": {"net": "small"}}, "podnet with small"),
        ({"stop_after": 1}, "it is of task 2, this run ends after task 1"),
        ({"stop_after": 2}, "it is of task 2, this run ends after task 2, so nothing is left to train"),
        ({"base_classes": 4, "tasks": 2}, r"its tasks so far have \[2, 2\] classes, this run's \[4, 1\]"),
    ],
)
def test_snapshot_with_another_past_is_refused(
    change: dict[str, object], message: str, few: Dataset, tmp_path: Path
) -> None:
    whole = make_run(few, tmp_path / "whole", quick("podnet"))
    finish(whole)
    given = quick("podnet", start=str(whole.snapshot_path(1)))
    given = {**given, **change, "podnet": {**given["podnet"], **change.get("podnet", {})}}  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=message):
        finish(make_run(few, tmp_path / "later", given))


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b"no tensors", "it is damaged")])
def test_unreadable_start_is_refused(content: bytes | None, message: str, few: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "task-00.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{message}.*RUN/snapshots/task-NN"):
        finish(make_run(few, tmp_path / "run", quick("podnet", start=str(file))))


def test_snapshot_is_refused_as_a_checkpoint(few: Dataset, tmp_path: Path) -> None:
    """If it were accepted, the folder would lack the snapshots of earlier tasks."""
    run = make_run(few, tmp_path / "run", quick("finetune"))
    finish(run)
    run.record_path.unlink()
    run.checkpoint_path.write_bytes(run.snapshot_path(1).read_bytes())
    with pytest.raises(CheckpointError, match=r"is a snapshot, not a checkpoint\. Move it away"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))


def test_two_runs_in_one_folder_are_refused(few: Dataset, tmp_path: Path) -> None:
    first = make_run(few, tmp_path / "run", quick("finetune"))
    events = first.events()
    next(events)
    with pytest.raises(CheckpointError, match="another process is working"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))
    events.close()
    finish(make_run(few, tmp_path / "run", quick("finetune")))


def test_folder_is_checked_before_data_is_loaded(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = always_saving_run(few, tmp_path / "run", quick("finetune"))
    events = first.events()
    for _ in events:
        if first.checkpoint_path.exists():
            break

    def build(*_: Any) -> Any:
        raise AssertionError("data was loaded onto the device")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "build", build)
        with pytest.raises(CheckpointError, match="another process is working"):
            finish(make_run(few, tmp_path / "run", quick("finetune")))
        events.close()
        with pytest.raises(CheckpointError, match=r"another configuration \(seed: 0 -> 1\)"):
            finish(make_run(few, tmp_path / "run", quick("finetune", seed=1)))
    finish(make_run(few, tmp_path / "run", quick("finetune")))  # neither holds the lock
