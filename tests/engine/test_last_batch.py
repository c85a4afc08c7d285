"""`last_batch`: an epoch's last, smaller batch is dropped or trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.data import Dataset, StreamedSource
from incvec.engine import events as ev
from incvec.engine.distributed import Distributed
from incvec.engine.loop import StageLoop
from incvec.engine.loss_history import LossHistory, mean_terms
from incvec.engine.run import Run, finish
from incvec.engine.shared_bases import base_key
from incvec.errors import CheckpointError
from tests.conftest import always_saving_run, make_run, quick, same_record, same_weights
from tests.engine.test_resume import interrupt_after
from tests.engine.test_streamed_run import run as stored_run
from tests.engine.test_streamed_run import store  # noqa: F401

KEEP = {"last_batch": "keep"}


def batches(run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], list[list[int]]]:
    """The rows of every training step, by task and stage."""
    seen: dict[tuple[int, str], list[list[int]]] = {}
    original = StageLoop._step

    def step(self: StageLoop, indices: torch.Tensor) -> None:
        rows = self.order[self.cursor * self.batch + indices]
        seen.setdefault((self.method.task.index, self.stage.name), []).append(rows.tolist())
        original(self, indices)

    with monkeypatch.context() as patch:
        patch.setattr(StageLoop, "_step", step)
        finish(run)
    return seen


def test_every_image_is_trained_on_once_per_epoch(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 images at a batch of 32: 32, 32 and 16. The full batches are those of a run that drops the rest."""
    dropped = batches(make_run(few, tmp_path / "drop", quick("replay")), monkeypatch)
    kept = batches(make_run(few, tmp_path / "keep", quick("replay") | KEEP), monkeypatch)
    assert [len(rows) for rows in kept[0, "main"]] == [32, 32, 16] * 2
    assert [rows for rows in kept[0, "main"] if len(rows) == 32] == dropped[0, "main"]
    for (task, _), steps in kept.items():
        images = 80 + 6 * task  # three exemplars of each of two old classes per task
        first_epoch = [row for rows in steps[: len(steps) // 2] for row in rows]
        assert len(set(first_epoch)) == len(first_epoch) == images


def test_a_single_remaining_image_is_dropped(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = quick("finetune", finetune={"batch_size": 79}) | KEEP
    assert [len(rows) for rows in batches(make_run(few, tmp_path, given), monkeypatch)[0, "main"]] == [79, 79]


@pytest.mark.parametrize(("processes", "expected"), [(1, 16), (3, 15), (7, 14), (16, 0)])
def test_processes_share_the_last_batch_equally(few: Dataset, tmp_path: Path, processes: int, expected: int) -> None:
    """What cannot be divided is dropped, and everything if a process would have a single image."""
    run = make_run(few, tmp_path, quick("finetune"))
    for event in run.events():
        if isinstance(event, ev.Started):
            break
    state, task = run.state, run.parts.tasks[0]
    assert state is not None
    batch = 32 - 32 % processes
    stage = state.parts.plan(task)[0].replace(batch_size=batch)
    run.parts.method.grow(task)
    rows = torch.arange(2 * batch + 16)
    loops = [
        StageLoop(
            run.parts.method, [], run.parts.world, stage, rows, Distributed(rank, processes), False, keep_last=True
        )
        for rank in range(processes)
    ]
    assert {loop.last_batch for loop in loops} == {expected}
    assert {loop.steps for loop in loops} == {2 + (expected > 0)}
    assert sorted(i for loop in loops for i in loop.last_indices.tolist()) == list(range(expected))


@pytest.mark.parametrize(("method", "addons"), [("podnet", ("ivt",)), ("icarl", ("eopc",)), ("pass", ("ivt",))])
def test_interrupted_run_resumes_to_the_same_bits(
    method: str, addons: tuple[str, ...], few: Dataset, tmp_path: Path
) -> None:
    given = quick(method, *addons) | KEEP
    whole = make_run(few, tmp_path / "whole", given)
    record = finish(whole)
    assert record["config"]["last_batch"] == "keep"
    out, breaks = tmp_path / "broken", 0
    while not interrupt_after(always_saving_run(few, out, given), 2 + breaks % 3):
        breaks += 1
    same_record(finish(make_run(few, out, given)), record)
    same_weights(whole.snapshot_path(2), out / "snapshots" / "task-02.safetensors")


def test_streamed_and_resident_runs_end_with_the_same_bits(store: Path, tmp_path: Path) -> None:  # noqa: F811
    """24 images at a batch of 10: the last four take a part of the buffer."""
    given = quick("podnet", "ivt", podnet={"batch_size": 10}) | KEEP
    runs = {place: stored_run(store, tmp_path / place, place, given) for place in ("resident", "streamed")}
    records = [finish(one) for one in runs.values()]
    assert isinstance(runs["streamed"].parts.world.train, StreamedSource)
    same_record(*records)
    same_weights(*(one.snapshot_path(2) for one in runs.values()))


def test_losses_are_means_over_images() -> None:
    """Two batches of four images and one of two."""
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0], [10.0, 7.0]])
    means = mean_terms(LossHistory(0, values, 0.5, None), ["a", "b"], "", str)
    assert means == pytest.approx({"a": (4 * 1 + 4 * 3 + 2 * 10) / 10, "b": (4 * 2 + 4 * 2 + 2 * 7) / 10})


def test_setting_is_part_of_the_run(few: Dataset, tmp_path: Path) -> None:
    """A record without it, from before the setting existed, belongs to a run that drops the last batch."""
    keys: dict[str, Any] = {}
    for choice in ("drop", "keep"):
        run = make_run(few, tmp_path / choice, quick("finetune") | {"last_batch": choice})
        record = finish(run)
        assert record["config"].get("last_batch", "drop") == choice
        keys[choice] = base_key(run.config, few, run.parts)
    assert keys["drop"] != keys["keep"]
    with pytest.raises(CheckpointError, match="last_batch"):
        finish(make_run(few, tmp_path / "keep", quick("finetune")))
