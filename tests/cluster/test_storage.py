"""Storage at an fsspec address: a run goes on in another place with nothing but what was stored."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from incvec.atomic_files import write_bytes
from incvec.cluster import storage as module
from incvec.cluster.job import absolute
from incvec.cluster.storage import Storage, check_storage, fetch_folder, scratch_folder
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.run import finish
from incvec.errors import ConfigError, StorageError
from tests.conftest import always_saving_run, make_run, quick, same_record, same_weights

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """An S3 server on this machine."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder as an fsspec address, or a bucket."""
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    for name, value in (("ENDPOINT_URL", request.getfixturevalue("s3_server")), ("ACCESS_KEY_ID", "a"),
                        ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket = f"bucket-{abs(hash(tmp_path)) % 10**8}"
    module.open_address(f"s3://{bucket}")[0].mkdir(bucket)
    return f"s3://{bucket}/runs"


def listing(address: str) -> set[str]:
    """All files at the address, relative to it."""
    files, root = module.open_address(address)
    return {str(path).removeprefix(root).strip("/") for path in files.find(root)}


def test_run_continues_elsewhere_from_what_was_stored(few: Dataset, address: str, tmp_path: Path) -> None:
    """The first node is lost in the second task; the other one has never seen its files."""
    given = quick("podnet", "ivt")
    first = Storage(address, tmp_path / "first")
    first.prepare("run")
    with first.mirrored():
        for event in (events := always_saving_run(few, first.run_folder("run"), given, first.bases).events()):
            if isinstance(event, ev.Saved) and (tmp_path / "first/run/snapshots/task-00.safetensors").exists():
                break
        events.close()
    shutil.rmtree(tmp_path / "first")
    stored = listing(address)
    assert {"run/checkpoint.safetensors", "run/snapshots/task-00.safetensors"} <= stored
    assert sum(name.startswith("bases/") for name in stored) == 1

    second = Storage(address, tmp_path / "second")
    second.prepare("run")
    with second.mirrored():
        resumed = list(make_run(few, second.run_folder("run"), given, second.bases).events())
    assert all(event.task > 0 for event in resumed if isinstance(event, ev.EpochEnded))
    second.finish("run")
    assert not second.run_folder("run").exists()

    alone = finish(make_run(few, tmp_path / "alone", given))
    third = Storage(address, tmp_path / "third")
    same_record(third.read_record("run") or {}, alone)
    assert "run/checkpoint.safetensors" not in listing(address)
    for task in range(3):
        name = f"snapshots/task-{task:02d}.safetensors"
        third.fetch(third.run_folder("run") / name)
        same_weights(third.run_folder("run") / name, tmp_path / "alone" / name)


def test_base_is_found_by_runs_elsewhere(few: Dataset, address: str, tmp_path: Path) -> None:
    for place, given in (("first", quick("podnet")), ("second", quick("podnet", "ivt"))):
        storage = Storage(address, tmp_path / place)
        with storage.mirrored():
            record = finish(make_run(few, storage.run_folder(place), given, storage.bases))
        assert bool(record["base"].get("shared")) == (place == "second")


def test_what_is_not_stored_is_missing(address: str, tmp_path: Path) -> None:
    storage = Storage(address, tmp_path / "scratch")
    assert storage.read_record("run") is None
    storage.prepare("run")
    assert not (tmp_path / "scratch/run").exists()


def test_a_failing_storage_is_tried_again_then_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIES", (0.0, 0.0))
    storage = Storage(f"file://{tmp_path}/remote", tmp_path / "scratch")
    failures = 2
    original = storage._files.put_file

    def unreliable(*arguments: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EIO, "broken")
        original(*arguments)

    monkeypatch.setattr(storage._files, "put_file", unreliable)
    with storage.mirrored():
        write_bytes(tmp_path / "scratch/a", b"1")
        assert (tmp_path / "remote/a").read_bytes() == b"1"
        failures = 3
        with pytest.raises(StorageError, match=r"file://.*cannot be used \(OSError.*all nodes"):
            write_bytes(tmp_path / "scratch/a", b"2")
    assert (tmp_path / "remote/a").read_bytes() == b"1"
    write_bytes(tmp_path / "scratch/a", b"3")  # no longer mirrored
    assert (tmp_path / "remote/a").read_bytes() == b"1"


def test_scratch_folders_of_killed_workers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INCVEC_SCRATCH", str(tmp_path))
    killed = os.fork()
    if killed == 0:
        with scratch_folder("sweep", "killed") as folder:
            (folder / "left").write_text("x")
            time.sleep(60)
    left = tmp_path / "incvec-sweep/killed/left"
    limit = time.monotonic() + 30
    while not left.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    with scratch_folder("sweep", "first"):
        assert left.exists()  # its worker is alive
    os.kill(killed, 9)
    os.waitpid(killed, 0)
    with scratch_folder("sweep", "second") as folder:
        assert not left.exists()
        assert folder.is_dir()
    assert not (tmp_path / "incvec-sweep").exists()


def test_scratch_folder_that_a_starting_worker_took_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the creation of the lock file and its lock, another worker may take the folder for a leftover."""
    monkeypatch.setenv("INCVEC_SCRATCH", str(tmp_path))
    original, removed = module.FileLock.acquire, []

    def too_late(lock: module.FileLock) -> bool:
        acquired = original(lock)
        if not removed:
            removed.append(lock.path)
            shutil.rmtree(lock.path.parent)
        return acquired

    monkeypatch.setattr(module.FileLock, "acquire", too_late)
    with scratch_folder("sweep", "worker") as folder:
        assert removed == [folder / ".lock"]
        assert (folder / ".lock").exists()


def test_scratch_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody may create names in the folder of temporary files, also links to folders of ours."""
    monkeypatch.setenv("INCVEC_SCRATCH", str(tmp_path / "scratch"))
    ours = tmp_path / "home/project"
    ours.mkdir(parents=True)
    (ours / ".lock").touch()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/incvec-sweep").symlink_to(tmp_path / "home")
    with pytest.raises(StorageError, match="Set INCVEC_SCRATCH"), scratch_folder("sweep", "worker"):
        pass
    assert ours.exists()
    (tmp_path / "scratch/incvec-sweep").unlink()
    (tmp_path / "scratch/incvec-sweep/no-lock").mkdir(parents=True)
    with scratch_folder("sweep", "worker"):
        assert (tmp_path / "scratch/incvec-sweep/no-lock").exists()  # not made by a worker


def test_a_checkpoint_that_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIES", ())
    storage = Storage(f"file://{tmp_path}/remote", tmp_path / "scratch")
    (tmp_path / "scratch/run").mkdir(parents=True)

    def refuse(_: str) -> None:
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(storage._files, "rm_file", refuse)
    storage.finish("run")
    assert not (tmp_path / "scratch/run").exists()


def test_storage_is_checked_before_anything_starts(address: str, tmp_path: Path) -> None:
    """Something is written, and nothing is left."""
    check_storage(address)
    assert listing(address) == set()
    check_storage(str(tmp_path / "new/folder"))
    assert list((tmp_path / "new/folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"could not write .*/file/.*a folder that all nodes may write to"):
        check_storage(str(tmp_path / "file"))


def test_address_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIES", ())
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be used"):
        check_storage(f"file://{tmp_path}/file")


def test_node_that_does_not_see_the_folder_is_refused(tmp_path: Path) -> None:
    """Its runs would be on its own disk, where nobody looks for them."""
    with pytest.raises(StorageError, match="missing does not exist on this node"):
        Storage(str(tmp_path / "missing"), tmp_path)


def test_address_of_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="nothing://"):
        Storage("nothing://bucket", Path("scratch"))


def test_folders_become_absolute_and_addresses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(tmp_path / "runs")
    assert absolute("s3://bucket/runs/") == "s3://bucket/runs"


def test_data_is_copied_to_a_node_once(address: str, tmp_path: Path) -> None:
    files, root = module.open_address(address)
    for name in ("data/train/a.bin", "data/b.bin"):
        files.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        files.pipe_file(f"{root}/{name}", name.encode())
    folder = tmp_path / "node/data"
    fetch_folder(f"{address}/data", folder)
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {"train/a.bin": "data/train/a.bin", "b.bin": "data/b.bin"}
    files.rm(f"{root}/data", recursive=True)
    fetch_folder(f"{address}/data", folder)  # it is here
    with pytest.raises(StorageError, match="could not be copied"):
        fetch_folder(f"{address}/data", tmp_path / "other")
    assert not (tmp_path / "other").exists()
