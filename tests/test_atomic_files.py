"""Files that are written whole or not at all, and locks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.atomic_files import FileLock, read_tensors, write_bytes, write_tensors
from incvec.errors import CheckpointError, DataError


def test_tensors_and_meta_round_trip(tmp_path: Path) -> None:
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
def test_flipped_bit_or_truncated_file_is_refused(where: float, tmp_path: Path) -> None:
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


def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("incvec.atomic_files.os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_lock_is_held_by_one_object_at_a_time(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "folder" / ".lock"), FileLock(tmp_path / "folder" / ".lock", error=DataError)
    assert first.acquire()
    assert first.acquire()  # again, by its holder
    assert not second.acquire()
    with pytest.raises(DataError, match=r"another process is working in .*folder"):
        second.__enter__()
    first.release()
    with second:
        assert not first.acquire()
    assert first.acquire()


def test_lock_in_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"could not write .*Choose a folder you may write to"):
        FileLock(tmp_path / "file" / ".lock", error=DataError).acquire()


def test_error_of_a_failed_write_is_that_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"could not write .*\(0.0 MB\): .*\. Earlier files are intact"):
        write_bytes(tmp_path / "file" / "a", b"", error=DataError)
