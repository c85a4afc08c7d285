"""Bad input is refused with what was given, what was expected and what to do; odd but valid photos are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from incvec import Classifier
from incvec.classifier.photos import load_squares, to_square
from incvec.errors import DataError
from tests.classifier.folders import FROZEN, digit, state, write_classes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    Classifier.fit(write_classes(root / "photos", range(2), 4), root / "m", **FROZEN)
    return root / "m"


def corrupt(root: Path) -> None:
    write_classes(root, [2], 3)
    (root / "two" / "000.png").write_bytes(b"\x89PNG not really")


def sixteen_bits(root: Path) -> None:
    write_classes(root, [2], 3)
    Image.fromarray(np.full((9, 9), 40000, np.uint16)).save(root / "two" / "deep.png")


def heic(root: Path) -> None:
    write_classes(root, [2], 3)
    (root / "two" / "IMG_1.HEIC").write_bytes(b"....ftypheic")


def loose(root: Path) -> None:
    root.mkdir()
    digit(2, 0).save(root / "a.png")


def empty_class(root: Path) -> None:
    write_classes(root, [2], 3)
    (root / "hollow").mkdir()


def one_photo(root: Path) -> None:
    write_classes(root, [2], 1)


def known(root: Path) -> None:
    write_classes(root, [1, 2], 3)


def other_case(root: Path) -> None:
    write_classes(root, [1], 3)
    (root / "one").rename(root / "One")


def two_cases(root: Path) -> None:
    write_classes(root, [2], 3)
    shutil.copytree(root / "two", root / "Two")


def one_level_too_high(root: Path) -> None:
    write_classes(root / "first", [2, 3], 3)
    write_classes(root / "later", [4], 3)


def nothing(root: Path) -> None:
    root.mkdir()


def absent(root: Path) -> None: ...


def a_file(root: Path) -> None:
    digit(2, 0).save(root, format="png")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (corrupt, r"1 of 3 photos cannot be read:\s+.*two/000\.png cannot be read as an image.*Replace it or remove"),
        (sixteen_bits, r"two/deep\.png .*more than 8 bits.*convert"),
        (heic, r"such as .*IMG_1\.HEIC.*Convert them to JPEG.*pip install pillow-heif"),
        (loose, r"1 photo\(s\), but no folders: expected one folder per class"),
        (empty_class, r"class folder .*hollow is empty"),
        (one_photo, r"class 'two' has 1 photo .*expected 2 or more"),
        (known, r"'one' is known already.*--more"),
        (other_case, r"'one' and 'One' differ only in case"),
        (two_cases, r"'Two' and 'two' differ only in case"),
        (one_level_too_high, r"such as .*first with 'three', 'two'.*expected one folder per class.*give that folder"),
        (nothing, r"nothing to learn from: expected one folder per class"),
        (absent, r"does not exist: expected a folder"),
        (a_file, r"is a file: expected a folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_and_the_folder_is_as_before(make: object, text: str, model: Path, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path / "new")
    shutil.copytree(model, tmp_path / "m")
    classifier = Classifier.load(tmp_path / "m", "cpu")
    before = state(classifier)
    with pytest.raises(DataError, match=f"(?s){text}"):
        classifier.learn(tmp_path / "new")
    assert state(Classifier.load(tmp_path / "m", "cpu")) == before
    assert len(list((tmp_path / "m").glob("weights-*"))) == 1
    if make in (heic, loose, empty_class, one_level_too_high, nothing, absent, a_file):
        with pytest.raises(DataError, match=f"(?s){text}"):
            Classifier.fit(tmp_path / "new", tmp_path / "fresh", **FROZEN)
        assert not (tmp_path / "fresh" / "model.json").exists()


def test_heic_alone_is_named_without_a_search(tmp_path: Path) -> None:
    for name in ("IMG_1.HEIC", "IMG_2.HEIC"):
        (tmp_path / name).write_bytes(b"....ftypheic")
    with pytest.raises(DataError, match=r"1 file\(s\) .*IMG_2\.HEIC"):
        to_square(tmp_path / "IMG_2.HEIC", 8)


def test_photos_of_a_class_may_be_in_one_folder_below_it(model: Path, tmp_path: Path) -> None:
    """As in Tiny-ImageNet's layout; and .jfif is JPEG."""
    write_classes(tmp_path / "new", [2, 3], 3)
    for name in ("two", "three"):
        (tmp_path / "new" / name / "images").mkdir()
        for file in (tmp_path / "new" / name).glob("*.png"):
            with Image.open(file) as image:
                image.convert("RGB").save(file.parent / "images" / f"{file.stem}.jfif", "JPEG")
            file.unlink()
    shutil.copytree(model, tmp_path / "m")
    learned = Classifier.load(tmp_path / "m", "cpu").learn(tmp_path / "new")
    assert list(learned.classes_) == ["one", "zero", "three", "two"]


def test_first_learn_needs_two_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 1 class folder"):
        Classifier.fit(write_classes(tmp_path / "p", [0], 3), tmp_path / "m", **FROZEN)


def test_odd_photos_are_read(model: Path, tmp_path: Path) -> None:
    """CMYK, palette, transparent, gray, animated, rotated by EXIF, very wide."""
    folder = tmp_path / "new" / "odd"
    folder.mkdir(parents=True)
    image = digit(3, 0, (40, 30))
    image.convert("CMYK").save(folder / "cmyk.jpg")
    image.convert("P").save(folder / "palette.png")
    image.convert("RGBA").save(folder / "transparent.png")
    image.convert("L").save(folder / "gray.png")
    image.save(folder / "animated.gif", save_all=True, append_images=[digit(4, 0, (40, 30))])
    digit(3, 1, (2000, 20)).save(folder / "wide.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=turned)
    shutil.copytree(model, tmp_path / "m")
    classifier = Classifier.load(tmp_path / "m", "cpu").learn(tmp_path / "new")
    assert classifier.description.history[-1].photos == 7
    upright = classifier.predict_proba(image)
    np.testing.assert_allclose(classifier.predict_proba(folder / "turned.png"), upright, atol=1e-5)
    np.testing.assert_allclose(classifier.predict_proba(folder / "transparent.png"), upright, atol=1e-5)


def test_evaluation_counts_and_refuses_unknown_classes(model: Path, tmp_path: Path) -> None:
    classifier = Classifier.load(model, "cpu")
    photos = write_classes(tmp_path / "test", range(2), 5, first=20)
    result = classifier.evaluate(photos)
    assert result.confusion.shape == (2, 2)
    assert result.confusion.sum(1).tolist() == [5, 5]
    assert result.accuracy == pytest.approx(classifier.score(photos))
    assert result.by_learn() == [(int(result.confusion.trace()), 10)]
    write_classes(photos, [5], 2)
    with pytest.raises(DataError, match=r"1 class\(es\) that were not learned, such as 'five'"):
        classifier.evaluate(photos)


def test_photos_that_do_not_fit_into_memory_are_refused(tmp_path: Path) -> None:
    digit(0, 0).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"1 photos of 10000000 x 10000000 pixels take 300000\.0 GB .*smaller side"):
        load_squares([(tmp_path / "a.png", 0)], 10**7)
