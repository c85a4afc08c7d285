"""A folder of class folders: what is read, and what is refused by name."""

import os
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from incvec.data import datasets, folder
from incvec.errors import ConfigError, DataError


def paint(path, color=(255, 0, 0), size=(12, 8), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)


@pytest.fixture
def split_root(tmp_path):
    """train/ and test/, classes ant (red) and bee (blue)."""
    for name, color in (("bee", (0, 0, 255)), ("ant", (255, 0, 0))):
        for i in range(3):
            paint(tmp_path / "train" / name / f"{i}.png", color)
        paint(tmp_path / "test" / name / "9.png", color)
    return tmp_path


@pytest.fixture
def flat_root(tmp_path):
    for c, name in enumerate(("ant", "bee")):
        for i in range(11):
            paint(tmp_path / name / f"{i:02d}.png", (10 * i, c, 0))
    return tmp_path


def test_train_and_test_folders(split_root):
    data = datasets.load_dataset("folder", split_root, size=8)
    assert data.class_names == ("ant", "bee")
    assert data.train_images.shape == (6, 3, 8, 8)
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 1]
    assert data.train_images[0, :, 4, 4].tolist() == [255, 0, 0]
    assert data.test_images[1, :, 4, 4].tolist() == [0, 0, 255]
    assert data.pad == 1
    assert data.flip
    assert data.normalization() == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_what_it_is_stands_in_the_record(split_root, tmp_path_factory):
    """The layout, the split's rule and the side, under the names that packed stores have for them."""
    from incvec.engine.run import Run, finish
    from incvec.presets import resolve
    from tests.conftest import quick

    config = resolve({**quick("finetune"), "dataset": "folder", "image_size": 8, "base_classes": 1, "tasks": 1})
    data = datasets.load_dataset("folder", split_root, **config.data_options())
    record = finish(Run(config, data, tmp_path_factory.mktemp("run"), None))
    assert record["data"] == {
        "layout": "folder",
        "split": "train/ and test/",
        "class_list": None,
        "left_out": 0,
        "side": 8,
        "seen": 8,
    }


def test_val_serves_where_there_is_no_test(split_root):
    (split_root / "test").rename(split_root / "val")
    assert len(datasets.load_dataset("folder", split_root, size=8).test_images) == 2
    assert any("train/ and val/" in line for line in datasets.check(split_root))


def test_a_test_folder_without_classes_gives_way_to_val(split_root):
    """Contests give unlabeled test images in one folder."""
    (split_root / "test").rename(split_root / "val")
    paint(split_root / "test" / "0.png")
    listing = folder.list_files(split_root)
    assert listing.rule == "train/ and val/; test/ has no class folders"
    assert [file.parent.parent.name for file, _ in listing.test] == ["val", "val"]
    (split_root / "test" / "0.png").unlink()
    for name in ("ant", "bee"):
        paint(split_root / "test" / name / "8.png")
    assert folder.list_files(split_root).rule == "train/ and test/"


def test_the_test_folder_can_be_named(split_root):
    (split_root / "test").rename(split_root / "held-out")
    with pytest.raises(DataError, match="no test/ or val/"):
        datasets.load_dataset("folder", split_root, size=8)
    assert len(datasets.load_dataset("folder", split_root, size=8, test_folder="held-out").test_images) == 2


def test_one_folder_is_split_by_the_stated_rule(flat_root):
    data = datasets.load_dataset("folder", flat_root, size=8)
    red = data.test_images[:, 0, 0, 0].tolist()
    assert red == [40, 90, 40, 90]  # the fifth and the tenth file of either class
    assert data.train_images[data.train_labels == 0, 0, 0, 0].tolist() == [0, 10, 20, 30, 50, 60, 70, 80, 100]
    thirds = datasets.load_dataset("folder", flat_root, size=8, test_every=3)
    assert thirds.test_images[:3, 0, 0, 0].tolist() == [20, 50, 80]
    with pytest.raises(ConfigError, match="test_every is 1"):
        datasets.load_dataset("folder", flat_root, test_every=1)


def test_a_class_called_train_is_a_class(flat_root):
    (flat_root / "ant").rename(flat_root / "train")
    paint(flat_root / "train" / ".ipynb_checkpoints" / "0.png")
    assert datasets.load_dataset("folder", flat_root, size=8).class_names == ("bee", "train")


def test_nested_images_count_and_other_files_do_not(split_root):
    paint(split_root / "train" / "ant" / "images" / "deep.JPEG")
    (split_root / "train" / "ant" / "boxes.txt").write_text("1 2 3")
    (split_root / "train" / "ant" / ".DS_Store").write_text("x")
    paint(split_root / "train" / "ant" / ".ipynb_checkpoints" / "0-checkpoint.png")
    paint(split_root / "train" / "ant" / "images" / ".thumbnails" / "below" / "0.png")
    assert len(datasets.load_dataset("folder", split_root, size=8).train_images) == 7
    report = datasets.check(split_root)
    assert any(line.startswith("1 other file") for line in report)
    assert any("7 training images, 3 to 4 a class" in line for line in report)
    assert any("all readable" in line for line in report)


def test_linked_folders_are_walked_and_loops_are_not(split_root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    paint(elsewhere / "more" / "7.png")
    ant = split_root / "train" / "ant"
    (ant / "linked").symlink_to(elsewhere / "more")
    (ant / "deep").mkdir()
    (ant / "deep" / "back").symlink_to(ant)
    (elsewhere / "more" / "up").symlink_to("..")
    (split_root / "train" / "cat").symlink_to(elsewhere / "more")
    (split_root / "test" / "cat").symlink_to(elsewhere / "more")
    listing = folder.list_files(split_root)
    assert listing.classes == ("ant", "bee", "cat")
    names = [str(file.relative_to(ant)) for file, label in listing.train if label == 0]
    assert names == ["0.png", "1.png", "2.png", "linked/7.png"]


def test_no_image_comes_twice_or_from_another_class(split_root):
    ant = split_root / "train" / "ant"
    (ant / "up").symlink_to("..")
    (ant / "all").symlink_to(split_root)
    (ant / "v1").mkdir()
    (ant / "2.png").rename(ant / "v1" / "2.png")
    (ant / "latest").symlink_to("v1")  # its own name comes first in the alphabet
    (ant / "same").symlink_to("v1")
    listing = folder.list_files(split_root)
    names = [str(file.relative_to(ant)) for file, label in listing.train if label == 0]
    assert names == ["0.png", "1.png", "v1/2.png"]


def test_a_link_to_itself_is_no_folder_and_no_image(split_root):
    ant = split_root / "train" / "ant"
    (ant / "loop").symlink_to("loop")
    assert folder.list_files(split_root).ignored == 1
    (ant / "loop.png").symlink_to("loop.png")
    refused(split_root, str(ant / "loop.png"), "cannot be read")


def test_pillows_warnings_of_odd_tags_are_not_shown(split_root, recwarn):
    picture = Image.new("RGB", (8, 8))
    tags = picture.getexif()
    tags[270] = "a description that is cut off" * 4
    exif = tags.tobytes()
    picture.save(split_root / "train" / "ant" / "odd.jpg", exif=exif[:-60])
    datasets.check(split_root)
    assert not [str(w.message) for w in recwarn if "PIL" in str(w.filename)]


def test_files_are_sorted_folder_by_folder(split_root):
    for name in ("a b/0.png", "a/1.png", "a.png", "a/b/0.png"):
        paint(split_root / "train" / "ant" / name)
    files = [file for file, label in folder.list_files(split_root).train if label == 0]
    assert files == sorted(files)
    assert len(files) == 7


def test_a_folder_that_cannot_be_listed_is_named(split_root, monkeypatch):
    closed = split_root / "train" / "ant" / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refuse(path):  # whoever tests may be allowed everything
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused(split_root, f"{closed} cannot be listed: Permission denied", "Make it readable")


def test_pipes_are_no_images_and_links_to_nothing_are_bad_ones(split_root):
    ant = split_root / "train" / "ant"
    os.mkfifo(ant / "pipe.jpg")
    listing = folder.list_files(split_root)
    assert (len(listing.train), listing.ignored) == (6, 1)
    (ant / "gone.jpg").symlink_to("nowhere.jpg")
    refused(split_root, str(ant / "gone.jpg"), "cannot be read")


def test_what_a_disk_has_at_its_top_is_no_class(split_root):
    (split_root / "train" / "lost+found").mkdir()
    assert folder.list_files(split_root).classes == ("ant", "bee")


def test_short_side_is_resized_and_the_centre_kept(tmp_path):
    """A 40 x 20 picture, black - white - black: at size 10 only the white middle is left."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 10:30] = 255
    square = folder.square(Image.fromarray(pixels), 10)
    assert square.shape == (10, 10, 3)
    assert (square[:, 2:8] == 255).all()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8))
    assert np.array_equal(folder.square(image, 9), np.asarray(image))
    # antialiased: a fine chessboard becomes gray, not black or white
    board = np.indices((64, 64)).sum(0)[:, :, None] % 2 * np.full(3, 255)
    small = folder.square(Image.fromarray(board.astype(np.uint8)), 8)
    assert np.abs(small.astype(int) - 127).max() < 8


def test_a_line_of_pixels_is_brought_to_its_square(monkeypatch):
    line = np.zeros((1, 60_000, 3), np.uint8)
    line[:, 29_999:30_001] = 200
    sizes = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda image, size, how: (sizes.append(size), resize(image, size, how))[1]
    )
    for pixels in (line, line.transpose(1, 0, 2)):
        square = folder.square(Image.fromarray(pixels), 64)
        assert square.shape == (64, 64, 3)
        assert square[32, 32].min() >= 200  # its middle
    assert max(max(size) for size in sizes) <= 17 * 64


def test_exif_orientation_is_obeyed(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = 255  # the stored picture is white above
    exif = Image.Exif()
    exif[0x0112] = 3  # to be turned by 180 degrees
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    upright = np.asarray(folder.open_image(tmp_path / "a.png"))
    assert upright[0].max() == 0
    assert upright[-1].min() == 255


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_as_pillow_turns_them(tmp_path, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / name, exif=exif)
    with Image.open(tmp_path / name) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(np.asarray(folder.open_image(tmp_path / name)), expected)
    assert expected.shape == ((9, 5, 3) if 5 <= orientation <= 8 else (5, 9, 3))


def test_a_bad_tag_beside_the_orientation_does_no_harm(tmp_path):
    """A negative number in a field that has no sign, which cannot be written again."""
    fields = ((0x0100, 9, struct.pack("<i", -5)), (0x0112, 3, struct.pack("<HH", 6, 0)))
    entries = b"".join(struct.pack("<HHI", tag, kind, 1) + value for tag, kind, value in fields)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries + bytes(4)
    paint(tmp_path / "a.jpg", size=(12, 8), exif=exif)
    assert folder.open_image(tmp_path / "a.jpg").size == (8, 12)


def test_gray_and_palette_images_become_rgb(tmp_path):
    Image.new("L", (8, 8), 77).save(tmp_path / "gray.png")
    Image.new("RGB", (8, 8), (1, 2, 3)).quantize(4).save(tmp_path / "palette.png")
    assert folder.square(folder.open_image(tmp_path / "gray.png"), 8)[0, 0].tolist() == [77, 77, 77]
    assert folder.square(folder.open_image(tmp_path / "palette.png"), 8)[0, 0].tolist() == [1, 2, 3]


def refused(root, *words):
    for work in (lambda: datasets.load_dataset("folder", root, size=8), lambda: datasets.check(root)):
        with pytest.raises(DataError) as caught:
            work()
        for word in words:
            assert word in str(caught.value)


def test_a_text_file_called_jpg_is_refused(split_root):
    bad = split_root / "train" / "bee" / "1x.jpg"
    bad.write_text("these are not pixels")
    refused(split_root, str(bad), "cannot be read")


def test_checking_names_all_bad_images_and_tells_how_far_it_is(split_root, monkeypatch):
    bad = [split_root / part / name / "x.jpg" for part, name in (("train", "bee"), ("train", "ant"), ("test", "ant"))]
    for file in bad:
        file.write_text("these are not pixels")
    told = []
    with pytest.raises(DataError, match="3 of 11 images cannot be read") as caught:
        datasets.check(split_root, lambda done, total: told.append((done, total)))
    assert all(str(file) in str(caught.value) for file in bad)
    assert told[-1] == (11, 11)
    monkeypatch.setattr(folder, "NAMED_AT_MOST", 2)
    with pytest.raises(DataError, match="and 1 more"):
        datasets.check(split_root)


def test_a_truncated_image_is_refused(split_root):
    good = split_root / "test" / "ant" / "big.png"
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(noise).save(good)
    good.write_bytes(good.read_bytes()[:-500])
    refused(split_root, str(good), "cannot be read")


def test_sixteen_bit_pixels_are_refused(split_root):
    deep = split_root / "train" / "ant" / "deep.png"
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(deep)
    refused(split_root, str(deep), "more than 8 bits", "convert it to 8 bits")


def test_an_empty_class_is_refused(split_root):
    empty = split_root / "train" / "cat"
    empty.mkdir()
    (empty / "notes.txt").write_text("soon")
    refused(split_root, str(empty), "empty")


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_class_in_one_half_only_is_refused(split_root, part):
    paint(split_root / part / "cat" / "0.png")
    refused(split_root, "'cat'", str(split_root / "test"), str(split_root / "train"))


def test_too_few_files_for_the_rule_are_refused(flat_root):
    paint(flat_root / "cat" / "0.png")
    refused(flat_root, str(flat_root / "cat"), "1 image(s)", "at least 5", "or make train/ and test/ yourself")
    with pytest.raises(DataError) as caught:
        datasets.check(flat_root)
    assert "test_every" not in str(caught.value)  # no command has such an option


def test_halves_without_class_folders_are_refused(tmp_path):
    paint(tmp_path / "train" / "0.png")
    paint(tmp_path / "test" / "0.png")
    refused(tmp_path, str(tmp_path / "train"), "0 class folder(s)")


def test_roots_that_hold_nothing_are_refused(tmp_path):
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, str(tmp_path))
    with pytest.raises(DataError, match="data root"):
        datasets.load_dataset("folder")
    with pytest.raises(ConfigError, match="size is 0"):
        datasets.load_dataset("folder", tmp_path, size=0)


def test_a_packed_store_is_named_as_one(tmp_path):
    (tmp_path / "store.json").write_text("{}")
    (tmp_path / "shards").mkdir()
    with pytest.raises(DataError, match="open it with --dataset packed"):
        datasets.load_dataset("folder", tmp_path)


def test_fingerprint_sees_names_pixels_and_size(split_root):
    def fingerprint(size=8):
        return datasets.load_dataset("folder", split_root, size=size).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(4) != first
    file = split_root / "train" / "ant" / "0.png"
    before = file.read_bytes()
    paint(file, (254, 0, 0))
    assert fingerprint() != first
    file.write_bytes(before)
    assert fingerprint() == first
    file.rename(file.with_name("00.png"))
    assert fingerprint() != first


def test_images_keep_their_files_order(tmp_path):
    """Threads decode; rows must still be those of the sorted files."""
    for name in ("a", "b"):
        for i in range(60):
            paint(tmp_path / name / f"{i:03d}.png", (i, 0, 0), size=(4 + i, 4 + i))
    data = datasets.load_dataset("folder", tmp_path, size=4)
    expected = [i for i in range(60) if i % 5 != 4]
    assert data.train_images[:, 0, 0, 0].tolist() == expected * 2
    assert torch.equal(data.train_labels, torch.tensor([0] * 48 + [1] * 48))
