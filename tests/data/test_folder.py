"""A folder of class folders: what is read, and which errors name the file or folder at fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from incvec.data import check, folder, load_dataset
from incvec.data.dataset import Dataset
from incvec.data.listing import list_class_folders
from incvec.errors import ConfigError, DataError


def paint(
    path: Path, color: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (12, 8), **options: Any
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)


def load(root: Path, **options: Any) -> Dataset:
    return load_dataset("folder", root, **{"image_size": 8} | options)


def train_names(root: Path, label: int = 0) -> list[str]:
    """The files of one class, below its folder in train/."""
    listing = list_class_folders(root)
    top = root / "train" / listing.classes[label]
    return [str(file.relative_to(top)) for file, each in listing.train if each == label]


@pytest.fixture
def split_root(tmp_path: Path) -> Path:
    """train/ and test/, classes ant (red) and bee (blue)."""
    for name, color in (("bee", (0, 0, 255)), ("ant", (255, 0, 0))):
        for i in range(3):
            paint(tmp_path / "train" / name / f"{i}.png", color)
        paint(tmp_path / "test" / name / "9.png", color)
    return tmp_path


@pytest.fixture
def flat_root(tmp_path: Path) -> Path:
    for c, name in enumerate(("ant", "bee")):
        for i in range(11):
            paint(tmp_path / name / f"{i:02d}.png", (10 * i, c, 0))
    return tmp_path


def test_train_and_test_folders(split_root: Path) -> None:
    data = load(split_root)
    assert data.class_names == ("ant", "bee")
    assert data.train_images.shape == (6, 3, 8, 8)
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 1]
    assert data.train_images[0, :, 4, 4].tolist() == [255, 0, 0]
    assert data.test_images[1, :, 4, 4].tolist() == [0, 0, 255]
    assert (data.pad, data.flip) == (1, True)
    assert data.normalizations["default"] == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_the_record_describes_the_data(split_root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Layout, split and side, under the same keys as for packed stores."""
    from incvec.engine.run import Run, finish
    from incvec.presets import resolve
    from tests.conftest import quick

    config = resolve({**quick("finetune"), "dataset": "folder", "image_size": 8, "base_classes": 1, "tasks": 1})
    data = load_dataset("folder", split_root, **config.data_options())
    record = finish(Run(config, data, tmp_path_factory.mktemp("run"), None))
    assert record["data"] == {
        "layout": "folder", "split": "train/ and test/", "class_list": None, "left_out": 0, "side": 8, "seen": 8,
    }  # fmt: skip


def test_val_is_used_if_test_is_missing_or_has_no_classes(split_root: Path) -> None:
    """Contests publish unlabeled test images in one folder."""
    (split_root / "test").rename(split_root / "val")
    assert len(load(split_root).test_images) == 2
    assert "split: train/ and val/" in check(split_root)
    paint(split_root / "test" / "0.png")
    listing = list_class_folders(split_root)
    assert listing.split == "train/ and val/; test/ has no class folders"
    assert [file.parent.parent.name for file, _ in listing.test] == ["val", "val"]
    (split_root / "test" / "0.png").unlink()
    for name in ("ant", "bee"):
        paint(split_root / "test" / name / "8.png")
    assert list_class_folders(split_root).split == "train/ and test/"


def test_the_test_folder_can_be_named(split_root: Path) -> None:
    (split_root / "test").rename(split_root / "held-out")
    with pytest.raises(DataError, match="no test/ or val/"):
        load(split_root)
    assert len(load(split_root, test_folder="held-out").test_images) == 2


def test_class_folders_without_train_are_split_by_a_rule(flat_root: Path) -> None:
    data = load(flat_root)
    assert data.test_images[:, 0, 0, 0].tolist() == [40, 90, 40, 90]  # the fifth and the tenth file of each class
    assert data.train_images[data.train_labels == 0, 0, 0, 0].tolist() == [0, 10, 20, 30, 50, 60, 70, 80, 100]
    assert load(flat_root, test_every=3).test_images[:3, 0, 0, 0].tolist() == [20, 50, 80]
    with pytest.raises(ConfigError, match=r"folder.test_every = 1 is not possible"):
        load(flat_root, test_every=1)
    paint(flat_root / "cat" / "0.png")
    refused(flat_root, str(flat_root / "cat"), "1 image(s)", "at least 5", "or create train/ and test/ yourself")


def test_a_class_called_train_is_a_class(flat_root: Path) -> None:
    (flat_root / "ant").rename(flat_root / "train")
    paint(flat_root / "train" / ".ipynb_checkpoints" / "0.png")
    assert load(flat_root).class_names == ("bee", "train")


def test_nested_images_are_read_and_other_files_are_not(split_root: Path) -> None:
    ant = split_root / "train" / "ant"
    paint(ant / "images" / "deep.JPEG")
    (ant / "boxes.txt").write_text("1 2 3")
    (ant / ".DS_Store").write_text("x")
    paint(ant / ".ipynb_checkpoints" / "0-checkpoint.png")
    paint(ant / "images" / ".thumbnails" / "below" / "0.png")
    (split_root / "train" / "lost+found").mkdir()
    assert len(load(split_root).train_images) == 7
    report = check(split_root)
    assert "1 other file(s) ignored: no image extension" in report
    assert "7 training images, 3 to 4 per class" in report
    assert any("all readable" in line for line in report)


def test_linked_folders_are_followed_without_loops(split_root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    paint(elsewhere / "more" / "7.png")
    ant = split_root / "train" / "ant"
    (ant / "linked").symlink_to(elsewhere / "more")
    (ant / "deep").mkdir()
    (ant / "deep" / "back").symlink_to(ant)
    (elsewhere / "more" / "up").symlink_to("..")
    (split_root / "train" / "cat").symlink_to(elsewhere / "more")
    (split_root / "test" / "cat").symlink_to(elsewhere / "more")
    assert list_class_folders(split_root).classes == ("ant", "bee", "cat")
    assert train_names(split_root) == ["0.png", "1.png", "2.png", "linked/7.png"]


def test_no_image_is_listed_twice_or_in_another_class(split_root: Path) -> None:
    ant = split_root / "train" / "ant"
    (ant / "up").symlink_to("..")
    (ant / "all").symlink_to(split_root)
    (ant / "v1").mkdir()
    (ant / "2.png").rename(ant / "v1" / "2.png")
    (ant / "latest").symlink_to("v1")  # before v1 in the alphabet
    (ant / "same").symlink_to("v1")
    assert train_names(split_root) == ["0.png", "1.png", "v1/2.png"]


def test_files_are_sorted_as_paths(split_root: Path) -> None:
    for name in ("a b/0.png", "a/1.png", "a.png", "a/b/0.png"):
        paint(split_root / "train" / "ant" / name)
    files = [file for file, label in list_class_folders(split_root).train if label == 0]
    assert files == sorted(files)
    assert len(files) == 7


def test_pillow_warnings_are_not_shown(split_root: Path, recwarn: pytest.WarningsRecorder) -> None:
    image = Image.new("RGB", (8, 8))
    tags = image.getexif()
    tags[270] = "a description that is cut off" * 4
    image.save(split_root / "train" / "ant" / "odd.jpg", exif=tags.tobytes()[:-60])
    check(split_root)
    assert not [str(w.message) for w in recwarn if "PIL" in str(w.filename)]


def test_images_are_in_the_order_of_their_files(tmp_path: Path) -> None:
    """Threads decode them."""
    for name in ("a", "b"):
        for i in range(60):
            paint(tmp_path / name / f"{i:03d}.png", (i, 0, 0), size=(4 + i, 4 + i))
    data = load(tmp_path, image_size=4)
    assert data.train_images[:, 0, 0, 0].tolist() == [i for i in range(60) if i % 5 != 4] * 2
    assert torch.equal(data.train_labels, torch.tensor([0] * 48 + [1] * 48))


def test_the_fingerprint_depends_on_names_pixels_and_size(split_root: Path) -> None:
    first = load(split_root).fingerprint
    assert load(split_root).fingerprint == first
    assert load(split_root, image_size=4).fingerprint != first
    file = split_root / "train" / "ant" / "0.png"
    before = file.read_bytes()
    paint(file, (254, 0, 0))
    assert load(split_root).fingerprint != first
    file.write_bytes(before)
    assert load(split_root).fingerprint == first
    file.rename(file.with_name("00.png"))
    assert load(split_root).fingerprint != first


def refused(root: Path, *words: str) -> None:
    """Both loading and checking raise an error with these words."""
    for function in (load, check):
        with pytest.raises(DataError) as caught:
            function(root)
        for word in words:
            assert word in str(caught.value)


def test_links_to_themselves_or_nothing_and_pipes(split_root: Path) -> None:
    ant = split_root / "train" / "ant"
    os.mkfifo(ant / "pipe.jpg")
    (ant / "loop").symlink_to("loop")
    listing = list_class_folders(split_root)
    assert (len(listing.train), listing.ignored) == (6, 2)
    for name, target in (("loop.png", "loop.png"), ("gone.jpg", "nowhere.jpg")):
        (ant / name).symlink_to(target)
        refused(split_root, str(ant / name), "cannot be read")
        (ant / name).unlink()


def test_a_folder_that_cannot_be_listed_is_named(split_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = split_root / "train" / "ant" / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:  # the user running the tests may be root
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused(split_root, f"{closed} cannot be listed: Permission denied", "Make it readable")


def test_checking_names_all_unreadable_images_and_reports_progress(
    split_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [split_root / part / name / "x.jpg" for part, name in (("train", "bee"), ("train", "ant"), ("test", "ant"))]
    for file in bad:
        file.write_text("these are not pixels")
    refused(split_root, "x.jpg", "cannot be read")
    progress: list[tuple[int, int]] = []
    with pytest.raises(DataError, match="3 of 11 images cannot be read") as caught:
        check(split_root, lambda done, total: progress.append((done, total)))
    assert all(str(file) in str(caught.value) for file in bad)
    assert progress[-1] == (11, 11)
    monkeypatch.setattr(folder, "SHOWN", 2)
    with pytest.raises(DataError, match="and 1 more"):
        check(split_root)


def test_empty_and_one_sided_classes_are_refused(split_root: Path) -> None:
    empty = split_root / "train" / "cat"
    empty.mkdir()
    (empty / "notes.txt").write_text("soon")
    refused(split_root, str(empty), "empty")
    for part, other in (("train", "test"), ("test", "train")):
        paint(split_root / part / "cat" / "0.png")
        refused(split_root, f"class 'cat' is in {split_root / part} but has no image in {split_root / other}")
        (split_root / part / "cat" / "0.png").unlink()
        (split_root / "train" / "cat" / "notes.txt").unlink(missing_ok=True)
        (split_root / part / "cat").rmdir()


def test_roots_without_class_folders_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, str(tmp_path))
    with pytest.raises(ConfigError, match=r"folder.image_size = 0 is not possible"):
        load(tmp_path, image_size=0)
    paint(tmp_path / "train" / "0.png")
    paint(tmp_path / "test" / "0.png")
    refused(tmp_path, str(tmp_path / "train"), "0 class folder(s)")


def test_a_packed_store_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    (tmp_path / "shards").mkdir()
    with pytest.raises(DataError, match="open it with --dataset packed"):
        load(tmp_path)
