"""Packing: rows and metadata, resuming after any interruption, unreadable images, refused folders."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from incvec.data import check, load_dataset
from incvec.data.image_files import load_square
from incvec.data.layouts import list_images
from incvec.data.store import chunks as store_chunks
from incvec.data.store import plan as store_plan
from incvec.data.store import write as store_write
from incvec.data.store.open import Store, open_store, verify_store
from incvec.data.store.write import pack
from incvec.errors import ConfigError, DataError
from tests.data.pictures import contents, make_root, make_store, photo, save

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # about fork
BAD = ("001x.jpg", "003x.jpg", "9.jpg")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root")


@pytest.fixture
def damaged(root: Path) -> Path:
    """Three unreadable images, two for training and one for testing."""
    folder = root / "train" / "n00000001"
    truncated = save(photo(5, 64, 64), folder / BAD[0])
    truncated.write_bytes(truncated.read_bytes()[:-700])
    (folder / BAD[1]).write_text("these are not pixels")
    (root / "val" / "n00000002" / BAD[2]).write_bytes(b"")
    return root


def rows(store: Store, part: str = "train") -> tuple[np.ndarray, list[int]]:
    images, labels = store.images(part)
    return np.stack([images[i].numpy() for i in range(len(images))]), labels.tolist()


def pack_slowly(source: Path, store: Path, pipe: Connection) -> None:
    make_store(source, store, progress=lambda done, total: (pipe.send(done), time.sleep(0.02)), chunk_rows=2)


def kill_after(source: Path, store: Path, images: int) -> int:
    """Pack in another process and kill it when that many images are done; returns how many were."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=pack_slowly, args=(source, store, sender))
    process.start()
    done = 0
    while done < images and receiver.poll(20):
        done = receiver.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return done


# What is written


def test_rows_are_the_files_in_order(root: Path, tmp_path: Path) -> None:
    store = make_store(root, tmp_path / "store", 16, shard_bytes=7 * 3 * 16 * 16)
    listing = list_images(root)
    assert [name for name, _ in store.parts["train"].shards] == [f"train-{i:05d}.bin" for i in range(3)]
    for part, files in (("train", listing.train), ("test", listing.test)):
        images, labels = rows(store, part)
        assert labels == [label for _, label in files]
        for row, (file, _) in zip(images, files, strict=True):
            assert np.array_equal(row, load_square(file, 16))
    assert store.classes == ("n00000000", "n00000001", "n00000002")
    assert (tmp_path / "store" / "test-files.txt").read_text().splitlines()[0] == "val/n00000000/000.png"


def test_default_chunks_lie_within_shards(root: Path, tmp_path: Path) -> None:
    part = pack(list_images(root), tmp_path / "store", 16, workers=1).parts["train"]
    assert (part.chunk_rows, part.rows, len(part.checksums)) == (256, 15, 1)


def test_file_names_may_be_any_bytes(root: Path, tmp_path: Path) -> None:
    folder = root / "train" / "n00000000"
    (folder / "000.png").rename(folder / "two\nlines.png")
    os.rename(folder / "001.png", os.fsencode(folder) + b"/latin-\xe9.png")
    (folder / os.fsdecode(b"bad-\xe9.png")).write_text("no image")
    os.mkfifo(folder / "pipe.jpg")  # must not block
    with pytest.raises(DataError, match="1 image"):
        make_store(root, tmp_path / "store")
    assert b"bad-\xe9.png" in (tmp_path / "store" / "unreadable.txt").read_bytes()
    make_store(root, tmp_path / "store", unreadable="leave-out")
    verify_store(tmp_path / "store")
    names = (tmp_path / "store" / "train-files.txt").read_bytes().splitlines()
    assert len(names) == 16
    assert b"train/n00000000/latin-\xe9.png" in names
    assert rb"train/n00000000/two\nlines.png" in names


# Unreadable images


def test_unreadable_images_are_refused_and_all_named(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 image\(s\) .*") as caught:
        make_store(damaged, tmp_path / "store")
    listed = (tmp_path / "store" / "unreadable.txt").read_text()
    assert all(name in str(caught.value) and name in listed for name in BAD)
    assert "leave-out" in str(caught.value)
    for function in (open_store, check, lambda path: load_dataset("packed", path)):
        with pytest.raises(DataError, match=r"cannot be read, .*unreadable\.txt\. Replace .*--unreadable leave-out"):
            function(tmp_path / "store")


def test_unreadable_images_are_left_out_on_request(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        make_store(damaged, tmp_path / "store")
    store = make_store(damaged, tmp_path / "store", unreadable="leave-out")
    images, labels = rows(store)
    assert labels == [0] * 5 + [1] * 5 + [2] * 5
    assert rows(store, "test")[1] == [0, 0, 1, 1, 2, 2]
    assert store.about["left_out"] == 3
    assert any("3 unreadable image(s) were left out" in line for line in verify_store(store.root))
    assert len((store.root / "unreadable.txt").read_text().splitlines()) == 3
    make_store(damaged, store.root, unreadable="leave-out")
    with pytest.raises(DataError, match=r"without 3 unreadable image.*unreadable.txt.*--unreadable leave-out"):
        make_store(damaged, store.root)
    for name in BAD:
        next(damaged.rglob(name)).unlink()
    assert np.array_equal(images, rows(make_store(damaged, tmp_path / "clean"))[0])  # without gaps


@pytest.mark.parametrize("chunk_rows", [4, 256])
def test_replaced_images_are_packed(damaged: Path, tmp_path: Path, chunk_rows: int) -> None:
    """With chunks of 256 rows, every chunk has an unreadable image, so no chunk is reused."""
    with pytest.raises(DataError):
        make_store(damaged, tmp_path / "store", chunk_rows=chunk_rows)
    for number, name in enumerate(BAD):
        save(photo(number, 30, 30), next(damaged.rglob(name)))
    store = make_store(damaged, tmp_path / "store", chunk_rows=chunk_rows)
    assert store.about["left_out"] == 0
    assert contents(store.root) == contents(make_store(damaged, tmp_path / "fresh", chunk_rows=chunk_rows).root)


def test_after_removed_images_only_the_following_ones_are_packed_again(damaged: Path, tmp_path: Path) -> None:
    store, shard_bytes = tmp_path / "store", 6 * 3 * 16 * 16
    with pytest.raises(DataError, match="3 image"):
        make_store(damaged, store, shard_bytes=shard_bytes)
    for name in BAD:
        next(damaged.rglob(name)).unlink()
    progress: list[int] = []
    make_store(damaged, store, shard_bytes=shard_bytes, progress=lambda done, total: progress.append(done))
    assert progress[0] == 6 + 6  # training images before the first removed one, all test images but the last
    assert contents(store) == contents(make_store(damaged, tmp_path / "whole", shard_bytes=shard_bytes).root)


def test_a_class_without_a_readable_image_is_refused(root: Path, tmp_path: Path) -> None:
    for file in (root / "val" / "n00000001").iterdir():
        file.write_bytes(b"no")
    with pytest.raises(DataError, match=r"'n00000001' has no readable test image .*unreadable.txt.*: replace some"):
        make_store(root, tmp_path / "store", unreadable="leave-out")
    listed = (tmp_path / "store" / "unreadable.txt").read_text()
    assert all(str(file) in listed for file in (root / "val" / "n00000001").iterdir())


# Resuming


def test_killed_packing_resumes_to_the_same_bytes(root: Path, tmp_path: Path) -> None:
    whole = make_store(root, tmp_path / "whole", chunk_rows=2)
    broken = tmp_path / "broken"
    assert kill_after(root, broken, 6) >= 6
    (broken / "journal.jsonl").write_bytes((broken / "journal.jsonl").read_bytes()[:-7])  # a torn line
    before = kill_after(root, broken, 12)
    assert before >= 12
    with pytest.raises(DataError, match="Run the same"):
        open_store(broken)
    progress: list[Any] = []
    store = make_store(
        root,
        broken,
        chunk_rows=2,
        progress=lambda *counts: progress.append(("pack", *counts)),
        verify_progress=lambda *counts: progress.append(("verify", *counts)),
    )
    packing = [row[1:] for row in progress if row[0] == "pack"]
    assert packing[0][0] >= 10  # what was done is not done again
    assert packing[-1] == (21, 21)
    verifying = [row for row in progress if row[0] == "verify"]
    assert verifying == progress[: len(verifying)]  # before packing
    assert verifying[0][1] == 2
    assert verifying[-1][1] == verifying[-1][2] >= before
    assert contents(broken) == contents(whole.root)
    assert store.fingerprint == whole.fingerprint


@pytest.mark.parametrize("change", ["lost bytes", "replaced image"])
def test_chunks_of_other_bytes_or_files_are_written_again(root: Path, tmp_path: Path, change: str) -> None:
    """After a power failure a file may lack bytes that were written to it."""
    broken = tmp_path / "broken"
    kill_after(root, broken, 12)
    if change == "lost bytes":
        with open(broken / "train-00000.bin", "r+b") as file:
            file.seek(3 * 3 * 16 * 16 + 5)
            file.write(b"\0" * 50)
    else:
        save(photo(77, 20, 20), root / "train" / "n00000000" / "000.png")
    make_store(root, broken, chunk_rows=2)
    assert contents(broken) == contents(make_store(root, tmp_path / "whole", chunk_rows=2).root)


def test_the_list_of_unreadable_images_is_not_outdated(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 image"):
        make_store(damaged, tmp_path / "store", chunk_rows=2)
    kill_after(damaged, tmp_path / "store", 20)
    with pytest.raises(DataError, match=r"interrupted\. Run the same"):
        open_store(tmp_path / "store")


def test_files_are_stamped_before_they_are_decoded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file that is replaced meanwhile is packed again."""
    calls: list[str] = []
    stamp, decode = store_plan._size_and_time, store_chunks.load_square
    monkeypatch.setattr(store_plan, "_size_and_time", lambda file: (calls.append("stamp"), stamp(file))[1])
    monkeypatch.setattr(store_chunks, "load_square", lambda *work: (calls.append("decode"), decode(*work))[1])
    make_store(root, tmp_path / "store", chunk_rows=8)
    assert calls == [call for rows in (8, 7, 6) for call in ("stamp", "decode") for _ in range(rows)]


def test_a_shard_that_cannot_be_synced_is_written_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write is reported once, when a file is synced; read back, the bytes may still look right."""
    fsync, store = os.fsync, tmp_path / "store"

    def fail(handle: int) -> None:
        if os.path.basename(os.readlink(f"/proc/self/fd/{handle}")) == "train-00000.bin":
            raise OSError(5, "Input/output error")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(DataError, match=r"train-00000.bin: Input/output error.*train-00000.bin was removed"):
            make_store(root, store, chunk_rows=2)
    assert not (store / "train-00000.bin").exists()
    assert not (store / "store.json").exists()
    progress: list[int] = []
    make_store(root, store, chunk_rows=2, progress=lambda done, total: progress.append(done))
    assert progress[0] == 6  # the test images
    assert contents(store) == contents(make_store(root, tmp_path / "whole", chunk_rows=2).root)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_packing_resumes_after_a_full_disk(root: Path, tmp_path: Path) -> None:
    shard = tmp_path / "store" / "train-00000.bin"

    def fill_disk(done: int, total: int) -> None:
        if done == 8:
            shard.rename(tmp_path / "backup")
            shard.symlink_to("/dev/full")

    with pytest.raises(DataError, match=r"could not write .*train-00000.bin: No space left.*run the same command"):
        make_store(root, tmp_path / "store", progress=fill_disk)
    shard.unlink()
    (tmp_path / "backup").rename(shard)
    progress: list[int] = []
    make_store(root, tmp_path / "store", progress=lambda done, total: progress.append(done))
    assert progress[0] == 8
    assert contents(tmp_path / "store") == contents(make_store(root, tmp_path / "whole").root)


# Folders that exist already


def test_a_complete_store_is_not_written_again(root: Path, tmp_path: Path) -> None:
    store = make_store(root, tmp_path / "store").root
    before = contents(store)
    (store / ".lock").unlink()
    (store / ".lock").mkdir()  # a read-only store cannot be locked
    make_store(root, store, progress=lambda *_: pytest.fail("nothing is left to do"))
    assert contents(store) == before
    with pytest.raises(DataError, match=r"other images or settings \(side 16, now 8\)"):
        make_store(root, store, 8)
    (store / "train-labels.bin").unlink()
    with pytest.raises(DataError, match=r"train-labels.bin is missing.*pack the images again"):
        make_store(root, store)


@pytest.mark.parametrize("change", ["name", "time", "size"])
def test_a_complete_store_of_changed_images_is_refused(root: Path, tmp_path: Path, change: str) -> None:
    file = save(photo(1, 20, 20), root / "train" / "n00000000" / "000.png")
    make_store(root, tmp_path / "store")
    status = file.stat()
    if change == "name":
        file.rename(file.with_name("000x.png"))
    else:
        side = 20 if change == "time" else 30
        save(photo(2, side, side), file)
        if change == "size":
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=r"\(files were added, removed or replaced\)\. Choose another folder"):
        make_store(root, tmp_path / "store")


def test_a_store_without_its_metadata_is_recognized(root: Path, tmp_path: Path) -> None:
    store = make_store(root, tmp_path / "store").root
    (store / "store.json").unlink()
    before = contents(store)
    for function in (
        open_store,
        check,
        lambda path: make_store(root, path),
        lambda path: load_dataset("packed", path),
    ):
        with pytest.raises(DataError, match=r"a packed store without store.json.*Remove the store and pack"):
            function(store)
    assert contents(store) == before


def test_folders_of_something_else_are_refused(root: Path, tmp_path: Path) -> None:
    kill_after(root, tmp_path / "store", 4)
    with pytest.raises(DataError, match=r"incomplete store with other settings \(side 16, now 8.*another folder"):
        make_store(root, tmp_path / "store", 8, chunk_rows=2)
    before = contents(tmp_path / "store")
    with pytest.raises(DataError, match="incomplete store of other images"):
        make_store(make_root(tmp_path / "other", classes=4), tmp_path / "store", chunk_rows=2)
    assert contents(tmp_path / "store") == before
    for name in ("thesis.tex", "train-00000.bin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("important")
        with pytest.raises(DataError, match=rf"not empty \({name}\)"):
            make_store(root, tmp_path / name)
    (tmp_path / "file").write_text("")
    (tmp_path / "read-only" / ".lock").mkdir(parents=True)
    for name in ("file", "file/below", "read-only"):
        with pytest.raises(DataError, match=r"could not write .*\. Choose a folder you may write to"):
            make_store(root, tmp_path / name)
    for inside in (root, root / "packed", root / "train" / ".." / "deep" / "packed"):
        with pytest.raises(ConfigError, match="is inside the folder of the images"):
            make_store(root, inside)
    assert sorted(entry.name for entry in root.iterdir()) == ["train", "val"]
    with pytest.raises(ConfigError, match="side is 0"):
        make_store(root, tmp_path / "zero", 0)


def test_a_new_disk_is_an_empty_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "lost+found").mkdir(parents=True)
    (tmp_path / "store" / ".Trash-1000").mkdir()
    assert make_store(root, tmp_path / "store").root.is_dir()


def test_two_processes_cannot_pack_into_one_folder(root: Path, tmp_path: Path) -> None:
    def inside(done: int, total: int) -> None:
        with pytest.raises(DataError, match="another process is working in"):
            make_store(root, tmp_path / "store")

    make_store(root, tmp_path / "store", progress=inside)


def test_too_little_space_is_reported_before_decoding(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_write.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DataError, match=r"needs .* kB more and has 1\.0 kB free"):
        make_store(root, tmp_path / "store", progress=lambda *_: pytest.fail("too late"))
    assert contents(tmp_path / "store") == {}  # so that a smaller --size can use the folder


# Several processes

SCRIPT = """
import sys, time
from incvec.data.layouts import list_images
from incvec.data.store.write import pack
if __name__ == "__main__":
    def progress(done, total):
        print(done, flush=True)
        time.sleep(0.05)
    pack(list_images(sys.argv[1]), sys.argv[2], 16, workers=2, chunk_rows=2, progress=progress)
"""


@pytest.fixture
def packing(root: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A packing process with two workers that has packed some images, and has seconds of work left."""
    image = save(photo(0, 600, 600), tmp_path / "image.png")
    for i in range(200):
        os.link(image, root / "train" / "n00000000" / f"more{i}.png")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(root), str(tmp_path / "store")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 4:
        pass
    yield process
    process.kill()
    process.wait()


def running() -> dict[int, int]:
    """Parent by process, without zombies."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,stat"], capture_output=True, text=True, check=True).stdout
    table = [line.split() for line in listed.splitlines()[1:]]
    return {int(pid): int(parent) for pid, parent, state in table if not state.startswith("Z")}


def workers_of(pid: int) -> list[int]:
    """The children of the fork server."""
    parents = running()
    return [worker for worker, server in parents.items() if parents.get(server) == pid]


@pytest.mark.slow
def test_workers_write_the_same_bytes_and_exit_with_their_parent(
    packing: subprocess.Popen[str], root: Path, tmp_path: Path
) -> None:
    workers = workers_of(packing.pid)
    assert len(workers) == 2
    packing.kill()
    packing.wait()
    deadline = time.monotonic() + 10
    while set(workers) & set(running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(workers) & set(running())
    subprocess.run(packing.args, check=True, capture_output=True)
    assert contents(tmp_path / "store") == contents(make_store(root, tmp_path / "one", chunk_rows=2).root)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_signals_to_workers(packing: subprocess.Popen[str], tmp_path: Path, sign: int) -> None:
    """Workers ignore SIGTERM, which is for their parent. If one is killed, the parent reports it without hanging."""
    workers = workers_of(packing.pid)
    assert len(workers) == 2
    for worker in workers if sign == signal.SIGTERM else workers[:1]:
        os.kill(worker, sign)
    _, errors = packing.communicate(timeout=60)
    if sign == signal.SIGTERM:
        assert packing.returncode == 0, errors
        verify_store(tmp_path / "store")
    else:
        assert "a packing process died" in errors


def test_a_worker_that_dies_at_the_start_is_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BrokenProcessPool("a child process terminated abruptly")

    monkeypatch.setattr(store_chunks.ProcessPoolExecutor, "submit", fail)
    with pytest.raises(DataError, match=r"a packing process died.*below `if __name__ == '__main__':`"):
        pack(list_images(root), tmp_path / "store", 8, workers=2, chunk_rows=2)


def test_processes_are_not_interrupted(tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of a terminal; from their first instruction on, only the parent acts on it."""
    root = make_root(tmp_path / "images")
    program = (
        "import os, signal, sys\n"
        "from incvec.data.layouts import list_images\n"
        "from incvec.data.store import chunks, write\n"
        "start = chunks.forkserver.ensure_running\n"
        "def ensure_running():\n"
        "    start()\n"
        "    os.kill(chunks.forkserver._forkserver._forkserver_pid, signal.SIGINT)\n"
        "chunks.forkserver.ensure_running = ensure_running\n"
        "if __name__ == '__main__':\n"
        "    write.pack(list_images(sys.argv[1]), sys.argv[2], side=8, workers=2, chunk_rows=4)\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", root, tmp_path / "store"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "store" / "store.json").is_file()
