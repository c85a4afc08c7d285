"""Where images lie, and which classes are taken."""

import hashlib
import os

import numpy as np
import pytest

from incvec.data.class_lists import CLASS_LISTS, ClassList, find_class_list
from incvec.data.datasets import check, load_dataset
from incvec.data.layouts import find_layout, list_images
from incvec.errors import ConfigError, DataError
from tests.data.pictures import make_root, photo, save

NAMES = ("n00000000", "n00000001", "n00000002")


def stems(files):
    return [(file.parent.name, file.stem, label) for file, label in files]


@pytest.fixture
def root(tmp_path):
    return make_root(tmp_path / "root")


def flatten(root):
    """val/WNID/i.png becomes val/WNID-i.png in an order that is not that of the classes."""
    classes = {}
    for number, file in enumerate(sorted((root / "val").rglob("*.png"), key=lambda f: (f.stem, f.parent.name))):
        classes[f"ILSVRC2012_val_{number:08d}"] = file.parent.name
        file.rename(root / "val" / f"ILSVRC2012_val_{number:08d}.png")
    for folder in (root / "val").iterdir():
        if folder.is_dir():
            folder.rmdir()
    return classes


def labels_of(listing):
    return {file.stem: listing.classes[label] for file, label in listing.test}


def test_imagenet_in_class_folders(root):
    (root / "test").mkdir()  # ImageNet's unlabeled images, not ours
    save(photo(0, 9, 9), root / "test" / "0.png")
    found = list_images(root)
    assert (found.name, found.class_list) == ("imagenet", None)
    assert found.listing.classes == NAMES
    assert [label for _, label in found.listing.train] == [0] * 5 + [1] * 5 + [2] * 5
    assert [label for _, label in found.listing.test] == [0, 0, 1, 1, 2, 2]


def test_flat_val_with_names_and_classes(root):
    classes = flatten(root)
    with pytest.raises(DataError, match=r"no ground truth .*Name the file with --ground-truth"):
        list_images(root)
    with pytest.raises(DataError, match=r"nowhere.csv does not exist: --ground-truth names"):
        list_images(root, ground_truth=root / "nowhere.csv")
    rows = [f"{stem},{name} 1 2 3 4" for stem, name in classes.items()]
    (root / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows]))
    assert labels_of(list_images(root).listing) == classes
    assert check(root)[:2] == [
        f"3 classes in {root}, layout imagenet",
        "split: train/ and val/ by LOC_val_solution.csv",
    ]
    for part in ("train", "val"):
        (root / part / ".thumbnails").mkdir()
    assert labels_of(list_images(root).listing) == classes
    mine = root.parent / "mine.txt"
    mine.write_text("\n".join(f"{stem}.png {NAMES.index(name)}" for stem, name in classes.items()))
    found = list_images(root, ground_truth=mine)
    assert labels_of(found.listing) == classes
    assert "mine.txt" in found.listing.rule
    mine.write_text("\n".join(mine.read_text().splitlines()[:-1]))
    with pytest.raises(DataError, match=r"does not say which class .*: add a line for it, or move the image away"):
        list_images(root, ground_truth=mine)


def solution(root, classes):
    """Kaggle's file of them."""
    file = root / "LOC_val_solution.csv"
    file.write_text(
        "\n".join(["ImageId,PredictionString", *(f"{stem},{name} 1 2 3 4" for stem, name in classes.items())])
    )
    return file


def test_a_class_without_a_training_folder_is_refused(root):
    classes = flatten(root)
    solution(root, {**classes, "ILSVRC2012_val_00000003": "n00000099"})
    with pytest.raises(DataError, match=r"gives ILSVRC2012_val_00000003.png the class 'n00000099'.*no training folder"):
        list_images(root)
    # Whoever names the classes may have the training folders of these only.
    two = ClassList("two", "", NAMES[1:])
    assert {label for _, label in list_images(root, chosen=two).listing.test} == {0, 1}


def test_listed_images_that_are_missing_are_refused(root):
    classes = flatten(root)
    solution(root, classes)
    gone = next(stem for stem, name in classes.items() if name == NAMES[0])
    (root / "val" / f"{gone}.png").unlink()
    with pytest.raises(DataError, match=f"1 of the images that .*LOC_val_solution.csv lists.* such as {gone}"):
        list_images(root)
    assert len(list_images(root, chosen=ClassList("two", "", NAMES[1:])).listing.test) == 4


def test_images_that_the_truth_cannot_tell_apart_are_refused(root):
    classes = flatten(root)
    file = solution(root, classes)
    save(photo(0, 9, 9), root / "val" / "ILSVRC2012_val_00000002.jpg")
    with pytest.raises(DataError, match=r"has ILSVRC2012_val_00000002.jpg and ILSVRC2012_val_00000002.png, which"):
        list_images(root)
    (root / "val" / "ILSVRC2012_val_00000002.jpg").unlink()
    file.write_text(file.read_text() + "\nILSVRC2012_val_00000000,n00000002")
    with pytest.raises(DataError, match="gives ILSVRC2012_val_00000000 two classes, n00000000 and n00000002"):
        list_images(root)


def test_a_byte_order_mark_is_no_part_of_a_file(root, tmp_path):
    classes = flatten(root)
    file = solution(root, classes)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert labels_of(list_images(root).listing) == classes
    names = tmp_path / "mine.txt"
    names.write_bytes(b"\xef\xbb\xbfn00000001\nn00000002\n")
    assert find_class_list(names).classes == NAMES[1:]


def test_other_files_beside_flat_images_are_counted(root):
    classes = flatten(root)
    solution(root, classes).rename(root / "val" / "LOC_val_solution.csv")
    (root / "val" / "notes.txt").write_text("")
    os.mkfifo(root / "val" / "pipe.png")
    assert list_images(root).listing.ignored == 2


def test_a_hidden_ground_truth_is_none_of_the_ignored(root):
    classes = flatten(root)
    solution(root, classes).rename(root / "val" / ".truth.csv")
    assert list_images(root, ground_truth=root / "val" / ".truth.csv").listing.ignored == 0


def test_a_stray_folder_in_a_flat_val_does_not_hide_its_images(root):
    classes = flatten(root)
    solution(root, classes)
    (root / "val" / "thumbnails").mkdir()
    found = list_images(root)
    assert found.listing.rule.startswith("train/ and val/ by")
    assert labels_of(found.listing) == classes


def test_a_ground_truth_beside_class_folders_is_refused(root, tmp_path):
    truth = tmp_path / "truth.txt"
    truth.write_text("0 n00000000\n")
    with pytest.raises(ConfigError, match=r"truth.txt was given .*val has class folders: leave --ground-truth out"):
        list_images(root, ground_truth=truth)


def test_folders_of_classes_are_asked_for_where_there_are_none(root):
    """What is for packing alone is named, and how to pack it; other troubles are told as they are."""
    flatten(root)
    root = root.rename(root.with_name("my root"))
    pack = rf"Pack it, once: incvec data pack '{root}' STORE; then give --dataset packed"
    with pytest.raises(DataError, match=rf"has ImageNet's layout with a flat val/, .*val has no class.* {pack}"):
        load_dataset("folder", root)
    (root / "train" / "thumbs").mkdir()
    for look in (list_images, check, lambda path: load_dataset("folder", path)):
        with pytest.raises(DataError, match=r"flat val/, but beside 3 folders .*train has 'thumbs': move it away"):
            look(root)


def test_a_stray_folder_beside_classes_is_named(root):
    save(photo(0, 8, 8), root / "train" / "thumbs" / "0.png")
    for look in (list_images, check, lambda path: load_dataset("folder", path)):
        with pytest.raises(DataError, match=r"class 'thumbs' is in .*train but not in .*val"):
            look(root)


def test_tiny_imagenets_layout_where_there_is_another(root):
    with pytest.raises(DataError, match=r"val.images is missing: the layout 'tiny-imagenet' has val/images/ and"):
        list_images(root, "tiny-imagenet")


def test_numbers_beside_some_of_the_classes_only_are_refused(root):
    """Numbers count all classes; beside fewer folders they would name the wrong ones."""
    classes = flatten(root)
    truth = root / "val.txt"
    truth.write_text("\n".join(f"{stem}.png {4 * NAMES.index(name)}" for stem, name in classes.items()))
    with pytest.raises(DataError, match="from 0 to 8, but there are 3"):
        list_images(root)


def test_flat_val_with_the_development_kit(root):
    """Its numbers are positions in a table of synsets, inner nodes included, not in the sorted names."""
    from scipy.io import savemat

    classes = flatten(root)
    data = root / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    rows = [(1, NAMES[2], 0), (2, NAMES[0], 0), (3, NAMES[1], 0), (4, "n00000099", 3)]
    table = np.array(rows, dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")])
    savemat(data / "meta.mat", {"synsets": table[:, None]})
    number = {name: identity for identity, name, children in rows if not children}
    lines = [str(number[classes[stem]]) for stem in sorted(classes)]
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(lines) + "\n")
    assert labels_of(list_images(root).listing) == classes
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="5 lines for 6 images"):
        list_images(root)
    (data / "meta.mat").unlink()
    with pytest.raises(DataError, match=r"meta\.mat is missing"):
        list_images(root)


def test_tiny_imagenets_own_layout(tmp_path):
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
    with pytest.raises(DataError, match=r"has Tiny-ImageNet's own layout, .*data pack .* STORE --size 64; then"):
        load_dataset("folder", tmp_path)
    assert check(tmp_path)[0] == f"3 classes in {tmp_path}, layout tiny-imagenet"
    assert check(tmp_path)[2] == "6 training images, 2 to 2 a class"
    listing = list_images(tmp_path).listing
    assert len(listing.train) == 6
    assert [(file.stem, label) for file, label in listing.test] == [
        ("val_1", 0),
        ("val_2", 1),
        ("val_0", 2),
        ("val_3", 2),
    ]
    two = list_images(tmp_path, chosen=ClassList("two", "", NAMES[1:])).listing
    assert [(file.stem, label) for file, label in two.test] == [("val_2", 0), ("val_0", 1), ("val_3", 1)]


def test_class_folders_split_by_rule_and_a_list(tmp_path):
    for name in ("ant", "bee", "cat"):
        for i in range(5):
            save(photo(i, 8, 8), tmp_path / name / f"{i}.png")
    found = list_images(tmp_path, chosen=ClassList("mine", "", ("bee", "cat")))
    assert (found.name, found.class_list) == ("folder", "mine")
    assert found.listing.classes == ("bee", "cat")
    assert stems(found.listing.test) == [("bee", "4", 0), ("cat", "4", 1)]
    assert {file.parent.name for file, _ in found.listing.train} == {"bee", "cat"}
    for name in ("dog", "eel"):  # not asked for: one with too few images, one with none
        (tmp_path / name).mkdir()
    save(photo(0, 8, 8), tmp_path / "dog" / "0.png")
    assert list_images(tmp_path, chosen=ClassList("mine", "", ("bee", "cat"))).listing == found.listing
    there = r"which has 5 folder\(s\), such as 'ant': choose other images, or another list of classes"
    with pytest.raises(DataError, match=r"1 of the 2 classes of mine are not in .* \(fox\), " + there):
        list_images(tmp_path, chosen=ClassList("mine", "", ("bee", "fox")))


def test_of_halves_the_chosen_classes_alone_are_looked_at(tmp_path):
    for part, names in (("train", ("ant", "bee", "cat")), ("test", ("ant", "bee", "dog"))):
        for name in names:
            save(photo(0, 8, 8), tmp_path / part / name / "0.png")
    listing = list_images(tmp_path, chosen=ClassList("mine", "", ("ant", "bee"))).listing
    assert (listing.classes, len(listing.train), len(listing.test)) == (("ant", "bee"), 2, 2)


def test_a_list_chooses_and_an_empty_class_outside_it_does_no_harm(root):
    (root / "train" / "n00000009").mkdir()
    with pytest.raises(DataError, match="n00000009 is empty"):
        list_images(root)
    found = list_images(root, chosen=ClassList("mine", "", (NAMES[0], NAMES[2])))
    assert found.listing.classes == (NAMES[0], NAMES[2])
    assert [label for _, label in found.listing.test] == [0, 0, 1, 1]
    assert found.class_list == "mine"
    with pytest.raises(DataError, match=r"1 of the 2 classes of mine .*n00000007"):
        list_images(root, chosen=ClassList("mine", "", (NAMES[0], "n00000007")))


def test_refused_roots_and_names(root, tmp_path):
    with pytest.raises(DataError, match="needs a data root"):
        list_images(None)
    with pytest.raises(DataError, match="nowhere does not exist"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="Did you mean 'imagenet'"):
        list_images(root, "imagnet")
    with pytest.raises(ConfigError, match="ground-truth file belongs"):
        list_images(root, "folder", ground_truth=tmp_path)
    save(photo(0, 8, 8), root / "train" / "n00000005" / "0.png")
    with pytest.raises(DataError, match=r"'n00000005' is in .*train but has no image in .*val"):
        list_images(root)


def test_the_public_lists():
    for entry in CLASS_LISTS.values():
        assert len(set(entry.classes)) == 100
        assert list(entry.classes) == sorted(entry.classes)
    assert len({entry.classes for entry in CLASS_LISTS.values()}) == len(CLASS_LISTS) == 5
    # All hundred of each, not the first and the last alone.
    assert {
        name: hashlib.sha256(" ".join(entry.classes).encode()).hexdigest()[:16] for name, entry in CLASS_LISTS.items()
    } == {
        "imagenet-subset": "d6400990280ac00a",
        "cmc": "469d277522bc36e8",
        "kaggle": "b0de96c66d8d06bf",
        "mini-imagenet": "b9498a19cb394a2b",
        "tiny-imagenet-100": "64d881e02af86f84",
    }
    # Kaggle's are all animals from the beginning of the thousand, tench to sea lion.
    assert (CLASS_LISTS["kaggle"].classes[0], CLASS_LISTS["kaggle"].classes[-1]) == ("n01440764", "n02077923")
    assert (CLASS_LISTS["mini-imagenet"].classes[0], CLASS_LISTS["mini-imagenet"].classes[-1]) == (
        "n01532829",
        "n13133613",
    )
    subset = CLASS_LISTS["imagenet-subset"].classes
    assert (subset[0], subset[-1]) == ("n01514668", "n15075141")
    # cock, the class before it, is number 7 of ImageNet's sorted thousand: the smallest that seed 1993 chooses
    assert np.random.RandomState(1993).choice(1000, 100, replace=False).min() == 7


def test_a_list_of_ones_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("# birds\nn00000002 ostrich\n\nn00000001,cock\n")
    mine = find_class_list(file)
    assert mine == ClassList("mine.txt@f1069948", str(file), ("n00000001", "n00000002"))
    file.write_text("n00000001\nn00000002\n")
    assert find_class_list(file) == mine
    file.write_text("n00000001\nn00000003\n")
    assert find_class_list(file).name != mine.name
    lookalike = tmp_path / "cmc"
    lookalike.write_text("n00000001\nn00000002\n")
    assert find_class_list(lookalike).name == "cmc@f1069948"  # not the public list
    file.write_text("tench, a fish\n  golden retriever \nn01 x\ngolden eagle\n")
    assert find_class_list(file).classes == ("golden eagle", "golden retriever", "n01 x", "tench, a fish")
    file.write_text("n01\nn02\nn01\n")
    with pytest.raises(DataError, match="n01 more than once"):
        find_class_list(file)
    file.write_text("n01\n")
    with pytest.raises(DataError, match="names 1 class"):
        find_class_list(file)
    with pytest.raises(ConfigError, match="Did you mean 'imagenet-subset'"):
        find_class_list("imagenet-subst")
