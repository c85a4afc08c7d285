"""Published layouts of image files, and lists of classes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from incvec.data import check, load_dataset
from incvec.data.class_lists import CLASS_LISTS, ClassList, find_class_list
from incvec.data.layouts import find_layout, list_images
from incvec.data.listing import Listing
from incvec.errors import ConfigError, DataError
from tests.data.pictures import make_root, photo, save

NAMES = ("n00000000", "n00000001", "n00000002")
LAST_TWO = ClassList("two", NAMES[1:])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root")


@pytest.fixture
def flat(root: Path) -> tuple[Path, dict[str, str]]:
    """val/WNID/i.png becomes val/ILSVRC2012_val_N.png, in an order other than that of the classes."""
    classes = {}
    for number, file in enumerate(sorted((root / "val").rglob("*.png"), key=lambda f: (f.stem, f.parent.name))):
        classes[f"ILSVRC2012_val_{number:08d}"] = file.parent.name
        file.rename(root / "val" / f"ILSVRC2012_val_{number:08d}.png")
    for folder in (root / "val").iterdir():
        if folder.is_dir():
            folder.rmdir()
    return root, classes


def kaggle_solution(root: Path, classes: dict[str, str]) -> Path:
    file = root / "LOC_val_solution.csv"
    rows = [f"{stem},{name} 1 2 3 4" for stem, name in classes.items()]
    file.write_text("\n".join(["ImageId,PredictionString", *rows]))
    return file


def classes_of_test_images(listing: Listing) -> dict[str, str]:
    return {file.stem: listing.classes[label] for file, label in listing.test}


def test_imagenet_in_class_folders(root: Path) -> None:
    (root / "test").mkdir()  # ImageNet's unlabeled images
    save(photo(0, 9, 9), root / "test" / "0.png")
    listing = list_images(root)
    assert (listing.layout, listing.class_list) == ("imagenet", None)
    assert listing.classes == NAMES
    assert [label for _, label in listing.train] == [0] * 5 + [1] * 5 + [2] * 5
    assert [label for _, label in listing.test] == [0, 0, 1, 1, 2, 2]


def test_flat_val_with_a_ground_truth_file(flat: tuple[Path, dict[str, str]]) -> None:
    root, classes = flat
    with pytest.raises(DataError, match=r"no ground-truth file .*Name the file with --ground-truth"):
        list_images(root)
    with pytest.raises(DataError, match=r"nowhere.csv does not exist: --ground-truth names"):
        list_images(root, ground_truth=root / "nowhere.csv")
    kaggle_solution(root, classes)
    assert classes_of_test_images(list_images(root)) == classes
    assert check(root)[:2] == [
        f"3 classes in {root}, layout imagenet",
        "split: train/ and val/ by LOC_val_solution.csv",
    ]
    for part in ("train", "val"):
        (root / part / ".thumbnails").mkdir()
    (root / "val" / "thumbnails").mkdir()  # a stray folder does not hide the images
    assert classes_of_test_images(list_images(root)) == classes
    mine = root.parent / "mine.txt"
    mine.write_text("\n".join(f"{stem}.png {NAMES.index(name)}" for stem, name in classes.items()))
    listing = list_images(root, ground_truth=mine)
    assert classes_of_test_images(listing) == classes
    assert "mine.txt" in listing.split
    mine.write_text("\n".join(mine.read_text().splitlines()[:-1]))
    with pytest.raises(DataError, match=r"has no class for .*: add a line for it, or move the image away"):
        list_images(root, ground_truth=mine)


def test_a_class_without_a_training_folder_is_refused(flat: tuple[Path, dict[str, str]]) -> None:
    root, classes = flat
    kaggle_solution(root, {**classes, "ILSVRC2012_val_00000003": "n00000099"})
    with pytest.raises(DataError, match=r"gives ILSVRC2012_val_00000003.png the class 'n00000099'.*no training folder"):
        list_images(root)
    # With a class list, the training folders of the other classes are not needed.
    assert {label for _, label in list_images(root, class_list=LAST_TWO).test} == {0, 1}


def test_missing_images_of_the_ground_truth_are_refused(flat: tuple[Path, dict[str, str]]) -> None:
    root, classes = flat
    kaggle_solution(root, classes)
    gone = next(stem for stem, name in classes.items() if name == NAMES[0])
    (root / "val" / f"{gone}.png").unlink()
    with pytest.raises(DataError, match=f"1 of the images listed in .*LOC_val_solution.csv .* such as {gone}"):
        list_images(root)
    assert len(list_images(root, class_list=LAST_TWO).test) == 4


def test_ambiguous_images_are_refused(flat: tuple[Path, dict[str, str]]) -> None:
    root, classes = flat
    file = kaggle_solution(root, classes)
    save(photo(0, 9, 9), root / "val" / "ILSVRC2012_val_00000002.jpg")
    with pytest.raises(DataError, match=r"has ILSVRC2012_val_00000002.jpg and ILSVRC2012_val_00000002.png, which"):
        list_images(root)
    (root / "val" / "ILSVRC2012_val_00000002.jpg").unlink()
    file.write_text(file.read_text() + "\nILSVRC2012_val_00000000,n00000002")
    with pytest.raises(DataError, match="gives ILSVRC2012_val_00000000 two classes, n00000000 and n00000002"):
        list_images(root)


def test_a_byte_order_mark_is_ignored(flat: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, classes = flat
    file = kaggle_solution(root, classes)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert classes_of_test_images(list_images(root)) == classes
    names = tmp_path / "mine.txt"
    names.write_bytes(b"\xef\xbb\xbfn00000001\nn00000002\n")
    assert find_class_list(names).classes == NAMES[1:]


def test_other_files_beside_flat_images_are_counted(flat: tuple[Path, dict[str, str]]) -> None:
    root, classes = flat
    truth = kaggle_solution(root, classes).rename(root / "val" / "LOC_val_solution.csv")
    (root / "val" / "notes.txt").write_text("")
    os.mkfifo(root / "val" / "pipe.png")
    assert list_images(root).ignored == 2
    hidden = truth.rename(root / "val" / ".truth.csv")
    assert list_images(root, ground_truth=hidden).ignored == 2


def test_class_numbers_need_all_training_folders(flat: tuple[Path, dict[str, str]]) -> None:
    """With fewer folders, numbers would name the wrong classes."""
    root, classes = flat
    (root / "val.txt").write_text("\n".join(f"{stem}.png {4 * NAMES.index(name)}" for stem, name in classes.items()))
    with pytest.raises(DataError, match="from 0 to 8, but there are 3"):
        list_images(root)


def test_flat_val_with_the_development_kit(flat: tuple[Path, dict[str, str]]) -> None:
    """Its numbers are positions in a table of synsets, including inner nodes, not in the sorted names."""
    from scipy.io import savemat

    root, classes = flat
    data = root / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    rows = [(1, NAMES[2], 0), (2, NAMES[0], 0), (3, NAMES[1], 0), (4, "n00000099", 3)]
    table = np.array(rows, dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")])
    savemat(data / "meta.mat", {"synsets": table[:, None]})
    number = {name: identity for identity, name, children in rows if not children}
    lines = [str(number[classes[stem]]) for stem in sorted(classes)]
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(lines) + "\n")
    assert classes_of_test_images(list_images(root)) == classes
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="5 lines for 6 images"):
        list_images(root)
    (data / "meta.mat").unlink()
    with pytest.raises(DataError, match=r"meta\.mat is missing"):
        list_images(root)


def test_the_folder_data_set_explains_how_to_pack_other_layouts(flat: tuple[Path, dict[str, str]]) -> None:
    root = flat[0].rename(flat[0].with_name("my root"))
    pack = rf"Pack it, once: incvec data pack '{root}' STORE; then give --dataset packed"
    with pytest.raises(DataError, match=rf"has ImageNet's layout with a flat val/: .*val has no class.* {pack}"):
        load_dataset("folder", root)
    (root / "train" / "thumbs").mkdir()
    for function in (list_images, check, lambda path: load_dataset("folder", path)):
        with pytest.raises(
            DataError, match=r"flat val/, but besides 3 WNID folders .*train has 'thumbs': move it away"
        ):
            function(root)


def test_a_stray_folder_beside_classes_is_named(root: Path) -> None:
    save(photo(0, 8, 8), root / "train" / "thumbs" / "0.png")
    for function in (list_images, check, lambda path: load_dataset("folder", path)):
        with pytest.raises(DataError, match=r"class 'thumbs' is in .*train but has no image in .*val"):
            function(root)


def test_tiny_imagenets_layout(tmp_path: Path) -> None:
    for label, name in enumerate(NAMES):
        for i in range(2):
            save(photo(label, 8, 8), tmp_path / "train" / name / "images" / f"{name}_{i}.JPEG")
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("x")
    lines = []
    for i, name in enumerate((NAMES[2], NAMES[0], NAMES[1], NAMES[2])):
        save(photo(i, 8, 8), tmp_path / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{name}\t0\t32\t44\t62")
    (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    save(photo(9, 8, 8), tmp_path / "test" / "images" / "test_0.JPEG")
    assert find_layout(tmp_path) == "tiny-imagenet"
    with pytest.raises(DataError, match=r"has Tiny-ImageNet's layout: .*data pack .* STORE --size 64; then"):
        load_dataset("folder", tmp_path)
    assert check(tmp_path)[0] == f"3 classes in {tmp_path}, layout tiny-imagenet"
    assert check(tmp_path)[2] == "6 training images, 2 to 2 per class"
    listing = list_images(tmp_path)
    assert len(listing.train) == 6
    assert [(file.stem, label) for file, label in listing.test] == [
        ("val_1", 0),
        ("val_2", 1),
        ("val_0", 2),
        ("val_3", 2),
    ]
    two = list_images(tmp_path, class_list=LAST_TWO)
    assert [(file.stem, label) for file, label in two.test] == [("val_2", 0), ("val_0", 1), ("val_3", 1)]


def test_class_lists_select_class_folders(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat"):
        for i in range(5):
            save(photo(i, 8, 8), tmp_path / name / f"{i}.png")
    mine = ClassList("mine", ("bee", "cat"))
    listing = list_images(tmp_path, class_list=mine)
    assert (listing.layout, listing.class_list, listing.classes) == ("folder", "mine", ("bee", "cat"))
    assert [(file.parent.name, file.stem, label) for file, label in listing.test] == [("bee", "4", 0), ("cat", "4", 1)]
    assert {file.parent.name for file, _ in listing.train} == {"bee", "cat"}
    for name in ("dog", "eel"):  # not selected: one with too few images, one with none
        (tmp_path / name).mkdir()
    save(photo(0, 8, 8), tmp_path / "dog" / "0.png")
    assert list_images(tmp_path, class_list=mine) == listing
    present = r"which has 5 folder\(s\), such as 'ant': choose other images, or another list of classes"
    with pytest.raises(DataError, match=r"1 of the 2 classes of mine are not in .* \(fox\), " + present):
        list_images(tmp_path, class_list=ClassList("mine", ("bee", "fox")))


def test_class_lists_select_from_train_and_test(tmp_path: Path) -> None:
    """Other classes may be incomplete."""
    for part, names in (("train", ("ant", "bee", "cat")), ("test", ("ant", "bee", "dog"))):
        for name in names:
            save(photo(0, 8, 8), tmp_path / part / name / "0.png")
    (tmp_path / "train" / "empty").mkdir()
    listing = list_images(tmp_path, class_list=ClassList("mine", ("ant", "bee")))
    assert (listing.classes, len(listing.train), len(listing.test)) == (("ant", "bee"), 2, 2)


def test_refused_roots_and_names(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a data root"):
        list_images(None)
    with pytest.raises(DataError, match="nowhere does not exist"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="Did you mean 'imagenet'"):
        list_images(root, "imagnet")
    with pytest.raises(ConfigError, match="ground-truth file belongs"):
        list_images(root, "folder", ground_truth=tmp_path)
    with pytest.raises(DataError, match=r"val.images is missing: the layout 'tiny-imagenet' has val/images/ and"):
        list_images(root, "tiny-imagenet")
    truth = tmp_path / "truth.txt"
    truth.write_text("0 n00000000\n")
    with pytest.raises(ConfigError, match=r"truth.txt was given .*val has class folders: omit --ground-truth"):
        list_images(root, ground_truth=truth)


def test_the_public_lists() -> None:
    for entry in CLASS_LISTS.values():
        assert len(set(entry.classes)) == 100
        assert list(entry.classes) == sorted(entry.classes)
    assert {
        name: hashlib.sha256(" ".join(entry.classes).encode()).hexdigest()[:16] for name, entry in CLASS_LISTS.items()
    } == {
        "imagenet-subset": "d6400990280ac00a",
        "cmc": "469d277522bc36e8",
        "kaggle": "b0de96c66d8d06bf",
        "mini-imagenet": "b9498a19cb394a2b",
        "tiny-imagenet-100": "64d881e02af86f84",
    }
    # Kaggle's are animals from the beginning of the thousand, tench to sea lion.
    for name, ends in (
        ("kaggle", ("n01440764", "n02077923")),
        ("mini-imagenet", ("n01532829", "n13133613")),
        ("imagenet-subset", ("n01514668", "n15075141")),
    ):
        assert CLASS_LISTS[name].classes[:: len(CLASS_LISTS[name].classes) - 1] == ends
    # n01514668 (cock) is number 7 of ImageNet's sorted thousand, the smallest that seed 1993 selects.
    assert np.random.RandomState(1993).choice(1000, 100, replace=False).min() == 7


def test_a_class_list_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# birds\nn00000002 ostrich\n\nn00000001,cock\n")
    mine = find_class_list(file)
    assert mine == ClassList("mine.txt@f1069948", ("n00000001", "n00000002"))
    file.write_text("n00000001\nn00000002\n")
    assert find_class_list(file) == mine
    file.write_text("n00000001\nn00000003\n")
    assert find_class_list(file).name != mine.name
    same_name = tmp_path / "cmc"
    same_name.write_text("n00000001\nn00000002\n")
    assert find_class_list(same_name).name == "cmc@f1069948"  # not the public list
    file.write_text("tench, a fish\n  golden retriever \nn01 x\ngolden eagle\n")
    assert find_class_list(file).classes == ("golden eagle", "golden retriever", "n01 x", "tench, a fish")
    for text, message in (("n01\nn02\nn01\n", "n01 more than once"), ("n01\n", "names 1 class")):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            find_class_list(file)
    with pytest.raises(ConfigError, match="Did you mean 'imagenet-subset'"):
        find_class_list("imagenet-subst")
