"""Checkpoints that must not be used, disks that fill up, and losses that are not finite."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.atomic_files import read_tensors, write_tensors
from incvec.data import Dataset
from incvec.engine import checkpoint_writer
from incvec.engine import events as ev
from incvec.engine.checkpoint_writer import CheckpointWriter
from incvec.engine.run import Run, finish
from incvec.errors import CheckpointError, TrainingError
from tests.conftest import always_saving_run, make_run, quick


def interrupted_run(few: Dataset, out: Path, given: dict[str, Any]) -> Run:
    """A run with a checkpoint and no record."""
    run = make_run(few, out, given)
    for _ in run.events():
        if run.checkpoint_path.exists():
            break
    return run


def test_checkpoint_of_another_configuration_is_refused(few: Dataset, tmp_path: Path) -> None:
    run = interrupted_run(few, tmp_path / "run", quick("podnet", podnet={"lambda_flat": 1.0}))
    before = run.checkpoint_path.read_bytes()
    other = make_run(few, tmp_path / "run", quick("podnet", podnet={"lambda_flat": 2.0}))
    with pytest.raises(CheckpointError, match=r"podnet.lambda_flat: 1.0 -> 2.0"):
        finish(other)
    assert run.checkpoint_path.read_bytes() == before


def test_record_of_another_configuration_is_refused(few: Dataset, tmp_path: Path) -> None:
    finish(make_run(few, tmp_path / "run", quick("finetune")))
    with pytest.raises(CheckpointError, match="seed: 0 -> 1"):
        finish(make_run(few, tmp_path / "run", quick("finetune", seed=1)))


def test_truncated_checkpoint_is_refused(few: Dataset, tmp_path: Path) -> None:
    run = interrupted_run(few, tmp_path / "run", quick("podnet"))
    content = run.checkpoint_path.read_bytes()
    run.checkpoint_path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        finish(make_run(few, tmp_path / "run", quick("podnet")))
    assert len(run.checkpoint_path.read_bytes()) == len(content) // 2


def fill_up(handle: int) -> None:
    """Raise the error of a full disk."""
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


def test_full_disk_during_a_run_leaves_the_checkpoint(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = quick("podnet")
    run = interrupted_run(few, tmp_path / "run", given)
    before = run.checkpoint_path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("incvec.atomic_files.os.fsync", fill_up)
        with pytest.raises(CheckpointError, match="intact"):
            finish(make_run(few, tmp_path / "run", given))
    assert run.checkpoint_path.read_bytes() == before
    assert finish(make_run(few, tmp_path / "run", given))["metrics"]["AA"] > 0


def test_write_in_a_thread_has_the_values_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: training goes on while the file is written."""
    weight, meta = torch.zeros(3), {"losses": [1]}
    writer = CheckpointWriter(tmp_path / "checkpoint.safetensors", torch.device("cpu"), interval=0)
    writer.in_thread = True
    go = threading.Event()

    def slow(*arguments: Any) -> None:
        go.wait(10)
        write_tensors(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", slow)
    writer.save({"weight": weight, "same": weight}, meta)
    assert not writer.due()
    weight += 1
    meta["losses"].append(2)
    go.set()
    writer.wait()
    assert writer.due()
    tensors, saved = read_tensors(writer.path)
    assert torch.equal(tensors["weight"], torch.zeros(3))
    assert saved["losses"] == [1]


def test_error_of_a_write_in_a_thread_is_raised_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = CheckpointWriter(tmp_path / "file" / "checkpoint.safetensors", torch.device("cpu"))
    writer.in_thread = True
    writer.save({"weight": torch.zeros(3)}, {})
    with pytest.raises(CheckpointError, match="could not write"):
        writer.save({"weight": torch.zeros(3)}, {})
    writer.wait()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_is_reported_and_not_saved(
    value: float, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the step and the term, and the epoch is not saved."""
    from incvec.methods.podnet import PODNet

    given = quick("podnet")
    run = interrupted_run(few, tmp_path / "run", given)
    before = run.checkpoint_path.read_bytes()
    original = PODNet.loss
    calls = 0

    def poisoned(self: PODNet, batch: Any) -> Any:
        nonlocal calls
        terms = dict(original(self, batch))
        calls += "flat" in terms
        if calls == 2:
            terms["flat"] = terms["flat"] * value
        return terms

    monkeypatch.setattr(PODNet, "loss", poisoned)
    with pytest.raises(TrainingError, match=r"'flat' became (nan|inf) in task 2, stage 'main', epoch 1, step 2"):
        finish(always_saving_run(few, tmp_path / "run", given))
    assert run.checkpoint_path.read_bytes() != before
    saved = read_tensors(run.checkpoint_path)[0]
    assert all(t.isfinite().all() for t in saved.values() if t.is_floating_point())


def test_weights_that_the_last_step_of_an_epoch_made_infinite_are_not_saved(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All losses of the epoch are finite: only the weights show it before the checkpoint."""
    from incvec.methods.podnet import PODNet

    calls, target = 0, -1
    original = PODNet.gradients

    def poisoned(self: PODNet, parameters: Any) -> None:
        nonlocal calls
        original(self, parameters)
        calls += 1
        if calls == target:
            next(iter(parameters.values())).grad.fill_(float("inf"))

    monkeypatch.setattr(PODNet, "gradients", poisoned)
    run = always_saving_run(few, tmp_path / "run", quick("podnet"))
    events = run.events()
    for event in events:
        if isinstance(event, ev.StageStarted) and (event.task, event.stage) == (1, "main"):
            target = calls + event.steps
            break
    with pytest.raises(TrainingError, match="no longer finite after task 2, stage 'main'"):
        list(events)
    saved = read_tensors(run.checkpoint_path)[0]
    assert all(t.isfinite().all() for t in saved.values() if t.is_floating_point())


@pytest.fixture(scope="module")
def saved(few: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run in its second task."""
    run = always_saving_run(few, tmp_path_factory.mktemp("saved") / "run", quick("podnet", "ivt"))
    events = run.events()
    while run.state is None or run.position < (1, 0, 1):
        next(events)
    events.close()
    return run.checkpoint_path


def rewrite(saved: Path, out: Path, **changes: Any) -> Path:
    """A copy in the folder `out` with another header and right hashes; a value of None removes a key."""
    tensors, meta = read_tensors(saved)
    header = {k: v for k, v in (meta | changes).items() if k not in ("format", "hashes") and v is not None}
    write_tensors(out / "checkpoint.safetensors", tensors, header)
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config is .*: Field required"),
        ({"config": 5}, "config is 5: Input should be an object"),
        ({"kind": "x"}, "kind is 'x': Input should be 'checkpoint', 'base' or 'snapshot'"),
        ({"position": [1, 0]}, "position.* Field required"),
        ({"position": [1, 0, -1]}, "position.2 is -1: Input should be greater than or equal to 0"),
        ({"position": [1, {}, 1]}, "position.1 is {}: Input should be a valid integer"),
        ({"grown": 0}, r"grown is 0, which does not belong to position \[1, 0, 1\]"),
        ({"grown": 10**30}, "grown"),
        ({"fingerprint": 3}, "fingerprint is 3: Input should be a valid string"),
        ({"code": []}, r"code is \[\]: Input should be a valid string"),
        ({"class_order": "x"}, "class_order is 'x': Input should be a valid array"),
        ({"progress": {"correct": 1.5}}, "progress.correct is 1.5: Input should be an object"),
        ({"progress": {"odd": 1}}, "progress.odd is 1: Unexpected keyword argument"),
        ({"progress": {"correct": {"cnn": []}}}, "progress.correct does not have a row for each of 1 tasks"),
        ({"progress": {"losses": [{"task": 0}]}}, "progress.losses.0.stage .*: Field required"),
    ],
)
def test_invalid_header_is_refused_with_file_and_key(
    change: dict[str, Any], message: str, saved: Path, few: Dataset, tmp_path: Path
) -> None:
    out = rewrite(saved, tmp_path, **change)
    before = (out / "checkpoint.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=rf"checkpoint.safetensors has an invalid header: {message}"):
        finish(make_run(few, out, quick("podnet", "ivt")))
    assert (out / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"has the classifiers \[\], but podnet has \['cnn', 'nme'\] after 1 tasks"),
        ({"cnn": None}, r"has the classifiers \['cnn'\], but podnet has \['cnn', 'nme'\]"),
        ({"cnn": None, "nme": None, "odd": None}, "has the classifiers"),
        ({"nme": None, "cnn": None}, "has the classifiers"),
        ({"cnn": None, "nme": [[1]]}, "nme is invalid: row 0 of correct_by_class has 1 classes"),
        ({"cnn": [[10**6] * 4], "nme": None}, r"cnn is invalid: after task 0, class 0 has 1000000 correct"),
    ],
)
def test_counts_of_other_classifiers_or_classes_are_refused(
    change: dict[str, Any], message: str, saved: Path, few: Dataset, tmp_path: Path
) -> None:
    """`correct` with the given classifiers; None has the saved counts of one of them."""
    progress = read_tensors(saved)[1]["progress"]
    rows = progress["correct"]["cnn"]
    correct = {name: rows if changed is None else changed for name, changed in change.items()}
    rewrite(saved, tmp_path, progress=progress | {"correct": correct})
    with pytest.raises(CheckpointError, match=rf"checkpoint\.safetensors: progress\.correct.?{message}"):
        finish(make_run(few, tmp_path, quick("podnet", "ivt")))


def test_position_behind_the_end_of_the_run_is_refused(saved: Path, few: Dataset, tmp_path: Path) -> None:
    for position in ([1, 9, 1], [1, 0, 99], [9, 0, 1]):
        progress = read_tensors(saved)[1]["progress"] | {"correct": {}}
        rewrite(saved, tmp_path, position=position, grown=position[0], progress=progress)
        with pytest.raises(CheckpointError, match=r"position .* is behind the end of this run"):
            finish(make_run(few, tmp_path, quick("podnet", "ivt")))


def test_saved_tensors_that_do_not_fit_are_refused(saved: Path, few: Dataset, tmp_path: Path) -> None:
    tensors, meta = read_tensors(saved)
    header = {key: value for key, value in meta.items() if key not in ("format", "hashes")}
    weight = next(name for name in tensors if name.startswith("method/model.backbone") and tensors[name].dim() == 4)
    fisher = next(name for name in tensors if name.startswith("addon/ivt/fisher/"))
    momentum = next(name for name in tensors if name.startswith("loop/optimizer/"))
    for name, tensor, message in (
        (weight, tensors[weight].double(), "type torch.float64, expected"),
        (weight, tensors[weight] * float("nan"), "values that are not finite"),
        (momentum, tensors[momentum].reshape(-1)[:1], "has shape"),
        (fisher, tensors[fisher].reshape(-1)[:0], "cannot be restored"),
        ("addon/ivt/odd", tensors[fisher], "cannot be restored"),
    ):
        write_tensors(tmp_path / "checkpoint.safetensors", {**tensors, name: tensor}, header)
        with pytest.raises(CheckpointError, match=rf"checkpoint\.safetensors.*{message}"):
            finish(make_run(few, tmp_path, quick("podnet", "ivt")))
