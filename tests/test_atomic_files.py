"""Tensor files: whole or not at all, and never a damaged one taken for good."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.atomic_files import read_tensors, write_bytes, write_tensors
from incvec.data import Dataset
from incvec.engine.run import Run, finish
from incvec.errors import CheckpointError, TrainingError
from tests.conftest import always_saving_run, make_run, quick


def test_round_trip(tmp_path: Path) -> None:
    tensors = {
        "plain": torch.arange(6.0).reshape(2, 3),
        "last": torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(
            memory_format=torch.channels_last
        ),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }
    write_tensors(tmp_path / "a.safetensors", tensors, {"kind": "test", "list": [1, 2]})
    found, meta = read_tensors(tmp_path / "a.safetensors")
    assert meta["kind"] == "test"
    assert meta["list"] == [1, 2]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("where", [0.1, 0.5, 0.999])
def test_a_flipped_bit_or_a_cut_is_noticed(where: float, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}, {})
    good = path.read_bytes()
    position = int(len(good) * where)
    path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
    with pytest.raises(CheckpointError):
        read_tensors(path)
    path.write_bytes(good[:position])
    with pytest.raises(CheckpointError, match="truncated"):
        read_tensors(path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("incvec.atomic_files.os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def broken_off(few: Dataset, out: Path, given: dict[str, Any]) -> Run:
    """A run with a checkpoint and no record."""
    run = make_run(few, out, given)
    for _ in run.events():
        if run.checkpoint_path.exists():
            break
    return run


def test_a_checkpoint_of_another_configuration(few: Dataset, tmp_path: Path) -> None:
    run = broken_off(few, tmp_path / "run", quick("podnet", podnet={"lambda_flat": 1.0}))
    before = run.checkpoint_path.read_bytes()
    other = make_run(few, tmp_path / "run", quick("podnet", podnet={"lambda_flat": 2.0}))
    with pytest.raises(CheckpointError, match=r"podnet.lambda_flat: 1.0 -> 2.0"):
        finish(other)
    assert run.checkpoint_path.read_bytes() == before


def test_a_record_of_another_configuration(few: Dataset, tmp_path: Path) -> None:
    finish(make_run(few, tmp_path / "run", quick("finetune")))
    with pytest.raises(CheckpointError, match="seed: 0 -> 1"):
        finish(make_run(few, tmp_path / "run", quick("finetune", seed=1)))


def test_a_truncated_checkpoint(few: Dataset, tmp_path: Path) -> None:
    run = broken_off(few, tmp_path / "run", quick("podnet"))
    content = run.checkpoint_path.read_bytes()
    run.checkpoint_path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        finish(make_run(few, tmp_path / "run", quick("podnet")))
    assert len(run.checkpoint_path.read_bytes()) == len(content) // 2


def fill_up(handle: int) -> None:
    """What a full disk answers."""
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


def test_a_disk_that_fills_up_during_a_run(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = quick("podnet")
    run = broken_off(few, tmp_path / "run", given)
    before = run.checkpoint_path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("incvec.atomic_files.os.fsync", fill_up)
        with pytest.raises(CheckpointError, match="intact"):
            finish(make_run(few, tmp_path / "run", given))
    assert run.checkpoint_path.read_bytes() == before
    assert finish(make_run(few, tmp_path / "run", given))["metrics"]["AA"] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number(value: float, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step and the term are named, and such an epoch is never saved."""
    from incvec.methods.podnet import PODNet

    given = quick("podnet")
    run = broken_off(few, tmp_path / "run", given)
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
