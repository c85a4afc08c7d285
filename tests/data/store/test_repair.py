"""A damaged store is mended where it is damaged, to the bytes it had."""

import multiprocessing
import os
import signal

import pytest

from incvec.data.layouts import list_images
from incvec.data.store import chunks
from incvec.data.store import plan as planning
from incvec.data.store import write as packing
from incvec.data.store.open import check, open_store
from incvec.data.store.repair import repair
from incvec.errors import ConfigError, DataError
from tests.data.pictures import contents, make_root, make_store, photo, save

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork, to be killed
SETTINGS = {"chunk_rows": 4, "shard_bytes": 6 * 3 * 16 * 16, "workers": 1}  # three training shards of two chunks each


@pytest.fixture
def root(tmp_path):
    return make_root(tmp_path / "root")


@pytest.fixture
def store(root, tmp_path):
    return make_store(root, tmp_path / "store", 16, **SETTINGS).root


def mend(root, store, side=16, **options):
    return repair(list_images(root), store, side, **{**SETTINGS, **options})[1]


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def lose(file):
    file.unlink()


def cut(file):
    file.write_bytes(file.read_bytes()[:1000])


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"more")


@pytest.mark.parametrize(
    ("name", "damage", "mended"),
    [
        ("train-00001.bin", lambda file: flip(file, 3 * 16 * 16 * 5), ["train-00001.bin, rows 4 to 5"]),
        ("test-00000.bin", lambda file: flip(file, 0), ["test-00000.bin, rows 0 to 3"]),
        ("train-00002.bin", cut, ["train-00002.bin, rows 0 to 2"]),
        ("train-00000.bin", lose, ["train-00000.bin, rows 0 to 3", "train-00000.bin, rows 4 to 5"]),
        ("train-00000.bin", lengthen, []),
        ("train-labels.bin", lose, ["train-labels.bin"]),
        ("test-labels.bin", lambda file: flip(file, 4), ["test-labels.bin"]),
        ("test-files.txt", lambda file: flip(file, 9), ["test-files.txt"]),
        ("train-files.txt", lose, ["train-files.txt"]),
    ],
)
def test_what_is_damaged_alone_is_made_again(root, store, monkeypatch, name, damage, mended):
    before, made, told = contents(store), [], []
    make = chunks.make_chunk
    monkeypatch.setattr(chunks, "make_chunk", lambda *work: (made.append(work), make(*work))[1])
    damage(store / name)
    with pytest.raises(DataError, match=f"{name}.* with --repair"):
        check(store)
    assert mend(root, store, reading_back=lambda *n: told.append(n)) == mended
    assert contents(store) == before
    assert len(made) == sum("rows" in place for place in mended)
    assert told[-1] == (21, 21)
    check(store)


def test_all_of_it_at_once_and_by_several_processes(root, store):
    before = contents(store)
    for name in ("train-00000.bin", "train-00001.bin", "test-labels.bin", "train-files.txt"):
        (store / name).unlink()
    flip(store / "test-00000.bin", 7)
    told = []
    assert len(mend(root, store, workers=2, progress=lambda *n: told.append(n))) == 7
    assert (told[0], told[-1]) == ((0, 16), (16, 16))
    assert contents(store) == before


@pytest.fixture
def without_some(root, tmp_path):
    """A store that leaves out three images."""
    for place in ("train/n00000001/001x.jpg", "train/n00000002/x.jpg", "val/n00000000/9.jpg"):
        (root / place).write_text("no image")
    return make_store(root, tmp_path / "store", 16, unreadable="leave-out", **SETTINGS).root


def test_lost_labels_of_a_store_without_some_images(root, without_some):
    store, before = without_some, contents(without_some)
    (store / "train-labels.bin").unlink()
    (store / "test-labels.bin").unlink()
    flip(store / "train-00001.bin", 3 * 16 * 16)
    with pytest.raises(DataError, match=r"without 3 unreadable image.*To keep it so, say --unreadable leave-out"):
        mend(root, store)
    mended = mend(root, store, unreadable="leave-out")
    assert mended == ["train-00001.bin, rows 0 to 3", "train-labels.bin", "test-labels.bin"]
    assert contents(store) == before
    assert len(open_store(store).images("train")[0]) == 15


def test_a_lost_list_of_what_was_left_out_is_made_again(root, without_some):
    store, before = without_some, contents(without_some)
    (store / "left-out.txt").unlink()
    assert mend(root, store, unreadable="leave-out") == ["left-out.txt"]
    assert contents(store) == before
    (store / "left-out.txt").unlink()
    (root / "train" / "n00000002" / "x.jpg").unlink()  # replaced since: its row is left out all the same
    save(photo(0, 20, 20), root / "train" / "n00000002" / "x.jpg")
    assert mend(root, store, unreadable="leave-out") == ["left-out.txt"]
    lines = (store / "left-out.txt").read_text().splitlines()
    assert len(lines) == 3
    assert lines[1] == f"{root / 'train' / 'n00000002' / 'x.jpg'} was left out"


def test_no_more_space_is_asked_for_than_is_lacking(root, store, monkeypatch):
    """Shards may take less of the disk than they are long, where it compresses or leaves out zeros."""
    before = contents(store)
    (store / "train-00000.bin").unlink()
    (store / "train-00000.bin").touch()
    os.truncate(store / "train-00000.bin", len(before["train-00000.bin"]))
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    mend(root, store)
    assert contents(store) == before
    cut(store / "train-00000.bin")
    with pytest.raises(DataError, match=r"needs 3\.6 kB more and has 1\.0 kB free\. Free some\.$"):
        mend(root, store)


def test_images_replaced_since_cannot_mend_it(root, store):
    """Others may have new times, as copies do: what counts is the bytes that are made of them."""
    for file in root.rglob("*.png"):
        os.utime(file, (1, 1))
    flip(store / "train-00000.bin", 0)
    assert mend(root, store) == ["train-00000.bin, rows 0 to 3"]
    check(store)
    flip(store / "train-00000.bin", 0)
    save(photo(99, 20, 20), root / "train" / "n00000000" / "000.png")
    with pytest.raises(
        DataError, match=r"train-00000.bin, rows 0 to 3 cannot be made again as it was.*Put back .*remove the"
    ):
        mend(root, store)
    (root / "train" / "n00000000" / "000.png").write_text("no image")
    with pytest.raises(DataError, match=r"Of its images 1 cannot be read, the first: .*000.png.*Put back"):
        mend(root, store)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_repair_that_cannot_succeed_leaves_all_as_it_was(root, store, workers):
    """The rows of a bad chunk that are right, and a store that is refused."""
    flip(store / "train-00000.bin", 0)
    flip(store / "train-00000.bin", 3 * 16 * 16 * 5)
    lengthen(store / "test-00000.bin")
    cut(store / "train-00001.bin")
    lose(store / "train-00002.bin")
    before = contents(store)
    for file in root.rglob("*.png"):
        save(photo(99, 20, 20), file)
    with pytest.raises(DataError, match="cannot be made again as it was"):
        mend(root, store, workers=workers)
    assert contents(store) == before


def test_a_shard_of_which_a_part_cannot_be_made_is_not_opened(root, store):
    before = contents(store)
    lose(store / "train-00000.bin")
    image = root / "train" / "n00000000" / "004.png"
    content = image.read_bytes()
    image.write_bytes(b"")
    with pytest.raises(DataError, match=r"rows 4 to 5 cannot be made again as it was.*004.png"):
        mend(root, store)
    with pytest.raises(DataError, match=r"train-00000.bin is cut short"):
        open_store(store)
    image.write_bytes(content)
    assert mend(root, store) == ["train-00000.bin, rows 4 to 5"]
    assert contents(store) == before


def mend_until(root, store, writes):
    """Be killed when half of that piece is written."""
    write, count = os.pwrite, 0

    def pwrite(handle, content, place):
        nonlocal count
        count += 1
        if count == writes:
            write(handle, content[: len(content) // 2], place)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, content, place)

    os.pwrite = pwrite
    mend(root, store)


@pytest.mark.parametrize("damage", [lose, cut])
@pytest.mark.parametrize("name", ["train-00000.bin", "train-00002.bin", "test-00000.bin"])
def test_killed_at_whatever_write_a_store_is_refused_until_it_is_whole(root, store, damage, name):
    before, context, lives, status = contents(store), multiprocessing.get_context("fork"), 0, -signal.SIGKILL
    damage(store / name)
    while status == -signal.SIGKILL:
        with pytest.raises(DataError, match=f"{name} is (missing|cut short).* with --repair"):
            open_store(store)
        lives += 1
        process = context.Process(target=mend_until, args=(root, store, lives))
        process.start()
        process.join()
        status = process.exitcode
    assert status == 0
    assert lives == 2 + (name != "train-00002.bin")
    assert contents(store) == before


def test_a_store_made_with_other_versions_is_mended_where_the_bytes_agree(root, tmp_path, monkeypatch):
    with monkeypatch.context() as then:
        then.setitem(planning.VERSIONS, "torch", "2.0")
        store = make_store(root, tmp_path / "store", 16, **SETTINGS).root
    before = contents(store)
    (store / "train-00000.bin").unlink()
    mend(root, store)
    assert contents(store) == before


def test_another_store_is_not_mended(root, store, tmp_path):
    before = contents(store)
    with pytest.raises(DataError, match=r"other images or settings \(side 16, now 8\)"):
        mend(root, store, 8)
    with pytest.raises(DataError, match=r"other images or settings \(classes 3, now 4\)"):
        mend(make_root(tmp_path / "other", classes=4), store)
    with pytest.raises(ConfigError, match="lies in the folder of the images"):
        mend(root, root / "store")
    flip(store / "store.json", 40)
    with pytest.raises(DataError, match=r"store.json is damaged.*remove the store"):
        mend(root, store)
    flip(store / "store.json", 40)
    assert contents(store) == before
