"""Packing: right pixels, nothing lost when it is broken off, bad images named."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from PIL import Image

from incvec.data import check as check_any
from incvec.data import decode as decoding
from incvec.data import load_dataset
from incvec.data.decode import fitted, read_pixels
from incvec.data.folder import open_image
from incvec.data.layouts import list_images
from incvec.data.store import chunks
from incvec.data.store import plan as planning
from incvec.data.store import write as packing
from incvec.data.store.chunks import make_chunk
from incvec.data.store.open import check, open_store
from incvec.data.store.plan import Chunk
from incvec.data.store.write import pack
from incvec.errors import ConfigError, DataError
from tests.data.pictures import contents, make_root, make_store, photo, save

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork, to be killed


@pytest.fixture
def root(tmp_path):
    return make_root(tmp_path / "root")


def rows(store, part="train"):
    images, labels = store.images(part)
    return np.stack([images[i].numpy() for i in range(len(images))]), labels.tolist()


def test_any_file_name_will_do(root, tmp_path):
    folder = root / "train" / "n00000000"
    (folder / "000.png").rename(folder / "two\nlines.png")
    os.rename(folder / "001.png", os.fsencode(folder) + b"/latin-\xe9.png")
    (folder / os.fsdecode(b"bad-\xe9.png")).write_text("no image")
    with pytest.raises(DataError, match="1 image"):
        make_store(root, tmp_path / "store")
    assert b"bad-\xe9.png" in (tmp_path / "store" / "unreadable.txt").read_bytes()
    make_store(root, tmp_path / "store", unreadable="leave-out")
    check(tmp_path / "store")
    names = (tmp_path / "store" / "train-files.txt").read_bytes().splitlines()
    assert len(names) == 16
    assert b"train/n00000000/latin-\xe9.png" in names
    assert rb"train/n00000000/two\nlines.png" in names


@pytest.mark.parametrize(
    "shape",
    [
        (300, 211),
        (211, 300),
        (64, 64),
        (301, 64),
        (40, 57),
        (33, 90),
        (160, 40),  # as many columns as it has are used
        (40, 160),
        (192, 101),  # no scale has this width's step as its inverse
        (101, 192),
    ],
)
def test_pixels_are_those_of_torchvisions_resize_and_crop(shape):
    from torchvision.transforms import v2

    image = photo(1, *shape)
    pixels = v2.functional.pil_to_tensor(image)
    cut = v2.Compose([v2.Resize(64), v2.CenterCrop(64)])
    mine = fitted(pixels.permute(1, 2, 0).contiguous(), 64)
    assert np.array_equal(mine, cut(pixels).numpy())
    apart = np.abs(mine.astype(int) - np.asarray(cut(image), int).transpose(2, 0, 1))
    assert apart.max() <= 1  # Pillow's own arithmetic
    assert (apart > 0).mean() < 0.01


@pytest.mark.parametrize(
    ("size", "wanted", "seen"), [(500, 341, 298), (300, 500, 400), (160, 256, 160), (192, 121, 92)]
)
def test_pixels_beyond_the_square_are_made_only_where_torch_needs_them(size, wanted, seen):
    """Whatever is made is what resizing the whole makes: torch's step is the same."""
    made, scale = decoding._needed(size, wanted, seen)
    assert made == (wanted if scale is None else seen)
    assert scale is None or 1 / scale == size / wanted
    assert (scale is None) == (size in (160, 192))


@pytest.mark.parametrize("upright", [False, True])
def test_a_line_of_pixels_is_brought_to_its_square(upright, monkeypatch):
    """Resized whole, it would be 16 million pixels wide."""
    pixels = torch.zeros(1, 60_000, 3, dtype=torch.uint8)
    pixels[:, 29_999:30_001] = 200
    sizes = []
    needed = decoding._needed
    monkeypatch.setattr(decoding, "_needed", lambda *sides: (sizes.append(sides[1]), needed(*sides))[1])
    square = fitted(pixels.transpose(0, 1) if upright else pixels, 256)
    assert max(sizes) == 16 * 256
    assert square.shape == (3, 256, 256)
    assert square[:, 128, 128].tolist() == [200] * 3  # its middle


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("not enough memory")])
def test_an_image_that_cannot_be_resized_is_named_as_unreadable(root, tmp_path, monkeypatch, error):
    def refuse(pixels, side):
        if pixels.shape[0] == 99:
            raise error
        return fitted(pixels, side)

    monkeypatch.setattr(chunks, "fitted", refuse)
    save(photo(0, 20, 99), root / "train" / "n00000001" / "strange.png")
    with pytest.raises(DataError, match=r"1 image.*\n.*strange.png .*memory"):
        make_store(root, tmp_path / "store")
    assert make_store(root, tmp_path / "store", unreadable="leave-out").about["left_out"] == 1


def test_rows_are_the_files_in_their_order(root, tmp_path):
    store = make_store(root, tmp_path / "store", 16, shard_bytes=7 * 3 * 16 * 16)
    listing = list_images(root).listing
    assert [name for name, _ in store.parts["train"].shards] == [f"train-{i:05d}.bin" for i in range(3)]
    for part, files in (("train", listing.train), ("test", listing.test)):
        images, labels = rows(store, part)
        assert labels == [label for _, label in files]
        for row, (file, _) in zip(images, files, strict=True):
            pixels = torch.from_numpy(np.array(Image.open(file).convert("RGB")))
            assert np.array_equal(row, fitted(pixels, 16))
    assert store.classes == ("n00000000", "n00000001", "n00000002")
    lines = (tmp_path / "store" / "test-files.txt").read_text().splitlines()
    assert lines[0] == "val/n00000000/000.png"


def test_gray_cmyk_palette_and_turned_images(root, tmp_path):
    folder = root / "train" / "n00000000"
    save(Image.new("L", (20, 20), 77), folder / "a-gray.jpg", quality=95)
    save(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), folder / "b-cmyk.jpg", quality=95)
    save(Image.new("RGB", (20, 20), (1, 2, 3)).quantize(4), folder / "c-palette.png")
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[:10] = 255  # white above; turned by 90 degrees it is white on one side
    exif = Image.Exif()
    exif[0x0112] = 6
    save(Image.fromarray(pixels), folder / "d-turned.jpg", exif=exif, quality=95)
    images, _ = rows(make_store(root, tmp_path / "store", 16))
    gray, cmyk, palette, turned = images[5:9].astype(int)
    assert np.abs(gray - 77).max() <= 1
    assert np.abs(cmyk - np.array([255, 0, 0])[:, None, None]).max() <= 3
    assert np.abs(palette - np.array([1, 2, 3])[:, None, None]).max() == 0
    assert turned[:, :, :4].max() <= 8  # orientation 6: shown turned clockwise, so what was above is on the right
    assert turned[:, :, -4:].min() >= 247


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {}),
        ("RGB", {"subsampling": 0, "quality": 95}),
        ("RGB", {"progressive": True}),
        ("L", {}),
        ("CMYK", {}),
        ("RGB", {"orientation": 6}),
        ("L", {"orientation": 3}),
        ("RGB", {"orientation": 1}),
    ],
)
def test_whoever_decodes_the_pixels_are_pillows(tmp_path, mode, options):
    exif = Image.Exif()
    if turn := options.pop("orientation", None):
        exif[0x0112] = turn
    file = save(photo(3, 61, 47).convert(mode), tmp_path / "a.jpg", exif=exif, **options)
    pixels = read_pixels(file).numpy()
    assert pixels.shape == ((61, 47, 3) if turn == 6 else (47, 61, 3))
    assert np.array_equal(pixels, np.array(open_image(file)))


def outcome(read, file):
    """The pixels' bytes, or what was said of the file."""
    try:
        return np.asarray(read(file)).tobytes()
    except DataError as error:
        return str(error)


def test_the_fast_decoder_leaves_damaged_files_to_pillow(tmp_path):
    """Cut anywhere, a file is either refused as Pillow incompatibility it, or gives Pillow's pixels."""
    whole = save(photo(4, 64, 64), tmp_path / "a.jpg").read_bytes()
    refused = 0
    file = tmp_path / "cut.jpg"
    for end in (*range(2, len(whole), 97), len(whole) - 2):
        file.write_bytes(whole[:end])
        pillow, own = outcome(lambda path: np.array(open_image(path)), file), outcome(read_pixels, file)
        assert pillow == own
        refused += isinstance(own, str)
    assert refused > 10
    with pytest.raises(DataError, match=r"gone.jpg cannot be read: No such file"):
        read_pixels(tmp_path / "gone.jpg")


@pytest.mark.parametrize(
    ("options", "certain"),
    [
        ({}, True),
        ({"progressive": True, "comment": b"a note"}, True),
        ({"restart_marker_blocks": 1, "keep_rgb": True}, True),
        ({"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}, False),
        ({"xmp": b"<x/>"}, False),
        ({"icc_profile": b"colors"}, False),
    ],
)
def test_pillow_reads_the_headers_that_are_not_certain(tmp_path, monkeypatch, options, certain):
    asked = []
    look = decoding._is_plain
    monkeypatch.setattr(decoding, "_is_plain", lambda content: (asked.append(1), look(content))[1])
    file = save(photo(3, 61, 47), tmp_path / "a.jpg", **options)
    assert np.array_equal(read_pixels(file).numpy(), np.array(open_image(file)))
    assert asked == ([] if certain else [1])
    assert decoding._plain_jpeg(bytearray(file.read_bytes())) is not None  # and not to be left to Pillow


def test_markers_are_taken_for_plain_only_where_pillow_does(tmp_path):
    """Whatever byte before the pixels is another one."""
    draw = np.random.default_rng(0)
    whole = save(photo(4, 24, 16), tmp_path / "a.jpg", comment=b"a note").read_bytes()
    plain = 0
    for place in range(2, whole.index(b"\xff\xda") + 14):
        for byte in {0, 0xC1, 0xE1, 0xFF, int(draw.integers(256)), whole[place] ^ 1}:
            content = bytearray(whole)
            content[place] = byte
            if decoding._has_plain_markers(content):
                plain += 1
                assert decoding._is_plain(content)
    assert plain > 1000
    frame = whole[(begin := whole.index(b"\xff\xc0")) : begin + 19]
    assert not decoding._has_plain_markers(bytearray(whole.replace(frame, frame + frame)))


def test_without_torchvisions_decoder_the_store_is_the_same(tmp_path, monkeypatch):
    for number in range(4):
        for part in ("train", "val"):
            save(photo(number, 40, 30), tmp_path / "root" / part / f"n{number % 2:08d}" / f"{number}.jpg")
    fast = make_store(tmp_path / "root", tmp_path / "fast")
    monkeypatch.setattr(decoding, "_has_decoder", lambda: False)
    assert contents(make_store(tmp_path / "root", tmp_path / "slow").root) == contents(fast.root)


@pytest.fixture
def damaged(root):
    folder = root / "train" / "n00000001"
    good = save(photo(5, 64, 64), folder / "001x.jpg")
    good.write_bytes(good.read_bytes()[:-700])
    (folder / "003x.jpg").write_text("these are not pixels")
    (root / "val" / "n00000002" / "9.jpg").write_bytes(b"")
    return root


def test_unreadable_images_are_all_named_and_refused(damaged, tmp_path):
    with pytest.raises(DataError) as caught:
        make_store(damaged, tmp_path / "store")
    listed = (tmp_path / "store" / "unreadable.txt").read_text()
    for name in ("001x.jpg", "003x.jpg", "9.jpg"):
        assert name in str(caught.value)
        assert name in listed
    assert "3 image(s)" in str(caught.value)
    assert "leave-out" in str(caught.value)
    for look in (open_store, check_any, lambda path: load_dataset("packed", path)):
        with pytest.raises(
            DataError,
            match=r"broken off, for images that cannot be read.*unreadable\.txt\. Replace.*--unreadable leave",
        ):
            look(tmp_path / "store")


def test_unreadable_images_are_left_out_on_request(damaged, tmp_path):
    with pytest.raises(DataError):
        make_store(damaged, tmp_path / "store")
    store = make_store(damaged, tmp_path / "store", unreadable="leave-out")
    images, labels = rows(store)
    assert labels == [0] * 5 + [1] * 5 + [2] * 5
    assert rows(store, "test")[1] == [0, 0, 1, 1, 2, 2]
    assert store.about["left_out"] == 3
    for name in ("001x.jpg", "003x.jpg", "9.jpg"):
        (next(damaged.rglob(name))).unlink()
    clean = make_store(damaged, tmp_path / "clean")
    assert np.array_equal(images, rows(clean)[0])  # no hole is left where they were
    assert any("3 unreadable image(s) were left out" in line for line in check(tmp_path / "store"))
    assert not (tmp_path / "store" / "unreadable.txt").exists()


def test_what_could_not_be_read_before_is_not_told_of_later(damaged, tmp_path):
    with pytest.raises(DataError, match="3 image"):
        make_store(damaged, tmp_path / "store", chunk_rows=2)
    kill_after(damaged, tmp_path / "store", 20)
    with pytest.raises(DataError, match="broken off: run the same"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("chunk_rows", [4, 256])
def test_mended_images_are_taken(damaged, tmp_path, chunk_rows):
    """Also where there is one in every chunk, so that nothing is left of what was packed."""
    with pytest.raises(DataError):
        make_store(damaged, tmp_path / "store", chunk_rows=chunk_rows)
    for number, name in enumerate(("001x.jpg", "003x.jpg", "9.jpg")):
        save(photo(number, 30, 30), next(damaged.rglob(name)))
    store = make_store(damaged, tmp_path / "store", chunk_rows=chunk_rows)
    assert store.about["left_out"] == 0
    fresh = make_store(damaged, tmp_path / "fresh", chunk_rows=chunk_rows)
    assert contents(tmp_path / "store") == contents(fresh.root)


def test_removed_images_cost_what_comes_after_them(damaged, tmp_path):
    """As the message advises: those that cannot be read are removed, and the same command goes on."""
    store = tmp_path / "store"
    with pytest.raises(DataError, match="3 image"):
        make_store(damaged, store, shard_bytes=6 * 3 * 16 * 16)
    for name in ("001x.jpg", "003x.jpg", "9.jpg"):
        next(damaged.rglob(name)).unlink()
    seen = []
    make_store(damaged, store, shard_bytes=6 * 3 * 16 * 16, progress=lambda done, total: seen.append(done))
    assert seen[0] == 6 + 6  # training images before the first of them, all test images but the last
    whole = make_store(damaged, tmp_path / "whole", shard_bytes=6 * 3 * 16 * 16)
    assert contents(store) == contents(whole.root)


def test_an_image_replaced_meanwhile_is_packed_again(root, tmp_path):
    kill_after(root, tmp_path / "store", 12)
    save(photo(77, 20, 20), root / "train" / "n00000000" / "000.png")
    make_store(root, tmp_path / "store", chunk_rows=2)
    assert contents(tmp_path / "store") == contents(make_store(root, tmp_path / "whole", chunk_rows=2).root)


def test_a_class_without_a_readable_image_is_refused(root, tmp_path):
    for file in (root / "val" / "n00000001").iterdir():
        file.write_bytes(b"no")
    with pytest.raises(
        DataError, match=r"'n00000001' has no readable test image left .*unreadable.txt.*: replace some"
    ):
        make_store(root, tmp_path / "store", unreadable="leave-out")
    listed = (tmp_path / "store" / "unreadable.txt").read_text()
    assert all(str(file) in listed for file in (root / "val" / "n00000001").iterdir())


def pack_slowly(source, store, told):
    make_store(source, store, progress=lambda done, total: (told.send(done), time.sleep(0.02)), chunk_rows=2)


def kill_after(source, store, images):
    """Pack in a process of its own and kill it once that many images are done."""
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    process = context.Process(target=pack_slowly, args=(source, store, tell))
    process.start()
    done = 0
    while done < images and told.poll(20):
        done = told.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return done


def test_killed_twice_it_goes_on_to_the_same_bytes(root, tmp_path):
    whole = make_store(root, tmp_path / "whole", chunk_rows=2)
    broken = tmp_path / "broken"
    assert kill_after(root, broken, 6) >= 6
    (broken / "journal.jsonl").write_bytes((broken / "journal.jsonl").read_bytes()[:-7])  # and a torn line
    assert kill_after(root, broken, 12) >= 12
    with pytest.raises(DataError, match="run the same"):
        open_store(broken)
    first = []
    store = make_store(root, broken, chunk_rows=2, progress=lambda done, total: first.append((done, total)))
    assert first[0][0] >= 10  # what was done is not done again
    assert first[-1] == (21, 21)
    assert contents(broken) == contents(tmp_path / "whole")
    assert store.fingerprint == whole.fingerprint


def test_what_the_journal_claims_is_read_back(root, tmp_path):
    """After a power cut a file may lack what was written to it: such chunks are made again."""
    broken = tmp_path / "broken"
    kill_after(root, broken, 12)
    with open(broken / "train-00000.bin", "r+b") as file:
        file.seek(3 * 3 * 16 * 16 + 5)
        file.write(b"\0" * 50)
    make_store(root, broken, chunk_rows=2)
    assert contents(broken) == contents(make_store(root, tmp_path / "whole", chunk_rows=2).root)


def test_files_are_looked_at_chunk_by_chunk(root, tmp_path, monkeypatch):
    """Before they are decoded, so that one replaced meanwhile is packed again; not all before any is."""
    seen = []
    stamp, make = planning._stamp, chunks.make_chunk
    monkeypatch.setattr(planning, "_stamp", lambda file: (seen.append("look"), stamp(file))[1])
    monkeypatch.setattr(chunks, "make_chunk", lambda *work: (seen.append("make"), make(*work))[1])
    make_store(root, tmp_path / "store", chunk_rows=8)
    assert seen == [*["look"] * 8, "make", *["look"] * 7, "make", *["look"] * 6, "make"]


@pytest.mark.parametrize("nth", range(3))
def test_what_the_disk_did_not_take_is_made_again(root, tmp_path, monkeypatch, nth):
    """A failed write is told once, when a file is synced; read back, the bytes may still look right."""
    fsync, store, failed = os.fsync, tmp_path / "store", []

    def fail(handle):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        if name.startswith("train-0"):
            failed.append(name)
            if len(failed) == nth + 1:
                raise OSError(5, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail)
    slowly = {"chunk_rows": 2, "progress": lambda *_: time.sleep(0.01)}  # so that there is a sync between two chunks
    with pytest.raises(
        DataError, match=r"could not write .*train-00000.bin: Input/output error.*train-00000.bin was removed"
    ):
        make_store(root, store, **slowly)
    assert not (store / "train-00000.bin").exists()
    assert not (store / "store.json").exists()
    seen = []
    make_store(root, store, chunk_rows=2, progress=lambda done, total: seen.append(done))
    assert seen[0] in (0, 6)  # no training image; the test images where it was the last sync
    assert contents(store) == contents(make_store(root, tmp_path / "whole", chunk_rows=2).root)


def test_reading_back_is_told(root, tmp_path):
    done = kill_after(root, tmp_path / "store", 12)
    told = []

    def packing_begins(*_):
        told.append("packing")

    make_store(root, tmp_path / "store", chunk_rows=2, progress=packing_begins, reading_back=lambda *n: told.append(n))
    assert told[0][0] == 2
    last = told[told.index("packing") - 1]
    assert last[0] == last[1] >= done


def test_a_finished_store_needs_no_place_to_write(root, tmp_path):
    store = make_store(root, tmp_path / "store").root
    (store / ".lock").unlink()
    (store / ".lock").mkdir()  # whoever tests may be allowed everything
    assert make_store(root, store).root == store


def test_a_finished_store_that_lost_its_labels_is_not_finished(root, tmp_path):
    store = make_store(root, tmp_path / "store").root
    (store / "train-labels.bin").unlink()
    with pytest.raises(DataError, match=r"train-labels.bin is missing.*with --repair"):
        make_store(root, store)


def test_a_store_that_lost_its_account_is_known_as_one(root, tmp_path):
    store = make_store(root, tmp_path / "store").root
    (store / "store.json").unlink()
    before = contents(store)
    for look in (open_store, check_any, lambda path: make_store(root, path), lambda path: load_dataset("packed", path)):
        with pytest.raises(DataError, match=r"a packed store that has lost its store.json.*remove the store and run"):
            look(store)
    assert contents(store) == before
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "train-00000.bin").write_text("somebody else's")
    with pytest.raises(DataError, match=r"not empty \(train-00000.bin\)"):
        make_store(root, tmp_path / "words")


def test_a_new_disk_is_an_empty_place(root, tmp_path):
    (tmp_path / "store" / "lost+found").mkdir(parents=True)
    (tmp_path / "store" / ".Trash-1000").mkdir()
    assert make_store(root, tmp_path / "store").root.is_dir()


def test_a_pipe_does_not_stop_packing(root, tmp_path):
    os.mkfifo(root / "train" / "n00000000" / "pipe.jpg")
    assert make_store(root, tmp_path / "store").parts["train"].rows == 15


def test_pillows_warnings_are_kept_back(tmp_path):
    file = save(photo(0, 9, 9), tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0")  # a field is missing
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        open_image(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_pixels(file).shape == (9, 9, 3)


def test_a_finished_store_is_left_alone(root, tmp_path):
    make_store(root, tmp_path / "store")
    before = (tmp_path / "store" / "store.json").stat().st_mtime_ns
    make_store(root, tmp_path / "store", progress=lambda *_: pytest.fail("nothing is left to do"))
    assert (tmp_path / "store" / "store.json").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"other images or settings \(side 16, now 8\)"):
        make_store(root, tmp_path / "store", 8)
    (root / "train" / "n00000000" / "000.png").rename(root / "train" / "n00000000" / "000x.png")
    with pytest.raises(DataError, match=r"other images or settings \(other files\)"):
        make_store(root, tmp_path / "store")


@pytest.mark.parametrize("side", [20, 30])
def test_a_store_of_images_replaced_since_is_stale(root, tmp_path, side):
    file = save(photo(1, 20, 20), root / "train" / "n00000000" / "000.png")
    make_store(root, tmp_path / "store")
    found = file.stat()
    save(photo(2, side, side), file)
    if side == 30:  # its size tells
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(DataError, match=r"replaced since\. Remove it and run the same"):
        make_store(root, tmp_path / "store")


def test_a_finished_store_without_some_images_is_no_answer_to_refuse(damaged, tmp_path):
    make_store(damaged, tmp_path / "store", unreadable="leave-out")
    make_store(damaged, tmp_path / "store", unreadable="leave-out")
    with pytest.raises(DataError, match=r"without 3 unreadable image.*left-out.txt.*--unreadable leave-out"):
        make_store(damaged, tmp_path / "store")


def test_another_packing_is_not_gone_on_with(root, tmp_path):
    kill_after(root, tmp_path / "store", 4)
    with pytest.raises(DataError, match=r"broken-off packing with other settings \(side 16, now 8.*another place"):
        make_store(root, tmp_path / "store", 8, chunk_rows=2)
    other = make_root(tmp_path / "other", classes=4)
    before = contents(tmp_path / "store")
    with pytest.raises(DataError, match="broken-off packing of other images"):
        make_store(other, tmp_path / "store", chunk_rows=2)
    assert contents(tmp_path / "store") == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("dear to me")
    with pytest.raises(DataError, match=r"not empty \(thesis.tex\)"):
        make_store(root, tmp_path / "full")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file is a file: expected the name of a folder"):
        make_store(root, tmp_path / "file")
    with pytest.raises(DataError, match=r"cannot be made a folder: Not a directory.*Choose a place"):
        make_store(root, tmp_path / "file" / "below")
    (tmp_path / "read-only" / ".lock").mkdir(parents=True)  # whoever tests may be allowed everything
    with pytest.raises(DataError, match=r"cannot be written to: .*\. Choose a place to write to"):
        make_store(root, tmp_path / "read-only")
    for inside in (root, root / "packed", root / "train" / ".." / "deep" / "packed"):
        with pytest.raises(ConfigError, match="lies in the folder of the images"):
            make_store(root, inside)
    assert sorted(entry.name for entry in root.iterdir()) == ["train", "val"]
    with pytest.raises(ConfigError, match="side is 0"):
        make_store(root, tmp_path / "zero", 0)


def test_two_at_once_are_refused(root, tmp_path):
    def inside(done, total):
        with pytest.raises(DataError, match="another process is packing"):
            make_store(root, tmp_path / "store")

    make_store(root, tmp_path / "store", progress=inside)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_and_gone_on_from(root, tmp_path):
    shard = tmp_path / "store" / "train-00000.bin"

    def fill_disk(done, total):
        if done == 8:  # from here on, what is written finds no space
            shard.rename(tmp_path / "kept")
            shard.symlink_to("/dev/full")

    with pytest.raises(DataError, match=r"could not write .*train-00000.bin: No space left.*run the same command"):
        make_store(root, tmp_path / "store", progress=fill_disk)
    shard.unlink()
    (tmp_path / "kept").rename(shard)
    seen = []
    make_store(root, tmp_path / "store", progress=lambda done, total: seen.append(done))
    assert seen[0] == 8
    assert contents(tmp_path / "store") == contents(make_store(root, tmp_path / "whole").root)


def test_too_little_space_is_told_before_anything_is_decoded(root, tmp_path, monkeypatch):
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DataError, match=r"needs .* kB more and has 1\.0 kB free"):
        make_store(root, tmp_path / "store", progress=lambda *_: pytest.fail("too late"))
    assert contents(tmp_path / "store") == {}  # so that a smaller --size can have the place


def test_a_chunk_reports_where_it_cannot_write(tmp_path):
    file = save(photo(0, 9, 9), tmp_path / "a.png")
    with pytest.raises(DataError, match=r"could not write .*No such file"):
        make_chunk(str(tmp_path), Chunk(0, "gone.bin", 0, 8, (str(file),)))


SCRIPT = """
import sys, time
from incvec.data.layouts import list_images
from incvec.data.pack import pack
if __name__ == "__main__":
    def progress(done, total):
        print(done, flush=True)
        time.sleep(0.05)
    pack(list_images(sys.argv[1]), sys.argv[2], 16, workers=2, chunk_rows=2, progress=progress)
"""


def children(pid):
    found = subprocess.run(["ps", "-eo", "pid,ppid,stat"], capture_output=True, text=True, check=True).stdout
    table = [line.split() for line in found.splitlines()[1:]]
    own = [int(p) for p, parent, stat in table if int(parent) == pid and not stat.startswith("Z")]
    return own + [grandchild for child in own for grandchild in children(child)]


def alive(pids):
    listed = subprocess.run(["ps", "-eo", "pid,stat"], capture_output=True, text=True, check=True).stdout
    table = [line.split() for line in listed.splitlines()[1:]]
    return {int(p) for p, stat in table if not stat.startswith("Z")} & set(pids)


@pytest.mark.slow
def test_several_processes_make_the_same_bytes_and_end_with_their_parent(root, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(root), str(tmp_path / "store")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while int(process.stdout.readline()) < 4:
        pass
    workers = children(process.pid)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while alive(workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(workers)
    subprocess.run(command, check=True, capture_output=True)
    assert contents(tmp_path / "store") == contents(make_store(root, tmp_path / "one", chunk_rows=2).root)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_signal_to_its_processes_does(tmp_path, sign):
    """Asked to end, they leave that to their parent; after one was killed, the others do not keep it waiting."""
    image, root = save(photo(0, 600, 600), tmp_path / "image.png"), make_root(tmp_path / "images", classes=2)
    for i in range(300):
        os.link(image, root / "train" / "n00000000" / f"more{i}.png")  # seconds of work
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(root), str(tmp_path / "store")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while int(process.stdout.readline()) < 4:
        pass
    workers = [grandchild for child in children(process.pid) for grandchild in children(child)]
    assert len(workers) == 2
    for worker in workers if sign == signal.SIGTERM else workers[:1]:
        os.kill(worker, sign)
    try:
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    if sign == signal.SIGTERM:
        assert process.returncode == 0, told
        check(tmp_path / "store")
    else:
        assert "a packing process died" in told


def test_a_process_that_dies_while_work_is_handed_out_is_told_of(root, tmp_path, monkeypatch):
    def broken(*_):
        raise BrokenProcessPool("a child process terminated abruptly")

    monkeypatch.setattr(chunks.ProcessPoolExecutor, "submit", broken)
    with pytest.raises(DataError, match="a packing process died"):
        pack(list_images(root), tmp_path / "store", 8, workers=2, chunk_rows=2)


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_of_it(root, tmp_path):
    """Each process reads the script anew, comes upon pack() itself and dies."""
    script = tmp_path / "script.py"
    script.write_text(
        "from incvec.data.layouts import list_images\nfrom incvec.data.pack import pack\n"
        f"pack(list_images({str(root)!r}), {str(tmp_path / 'store')!r}, 8, workers=2, chunk_rows=2)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "DataError: a packing process died" in ended.stderr
    assert "below `if __name__ == '__main__':`" in ended.stderr


def test_default_chunks_lie_within_shards(root, tmp_path):
    store = pack(list_images(root), tmp_path / "store", 16, workers=1)
    assert (store.parts["train"].chunk, store.parts["train"].rows) == (256, 15)
    assert len(store.parts["train"].sums) == 1
