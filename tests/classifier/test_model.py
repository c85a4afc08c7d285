"""Learning, learning more, predicting and going back, on small pictures."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import incvec
from incvec import Classifier
from incvec.classifier import folder as folders
from incvec.errors import Busy, CheckpointError, ConfigError, DataError
from tests.classifier.folders import FROZEN, REPLAY, TINY, digit, state, write_classes


class Killed(BaseException):
    """Ends a process as a signal would: nothing catches it."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_classes(root / "first", range(3))
    write_classes(root / "later", range(3, 5))
    write_classes(root / "last", [5])
    write_classes(root / "all", range(5))
    write_classes(root / "test", range(5), 10, first=30)
    return root


@pytest.fixture(scope="module")
def learned(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders after the first `learn`, by method; tests work on copies."""
    root = tmp_path_factory.mktemp("models")
    for name, given in (("lda", FROZEN), ("replay", REPLAY)):
        Classifier.fit(photos / "first", root / name, **given)
    return {name: root / name for name in ("lda", "replay")}


def copy_of(folder: Path, target: Path) -> Classifier:
    shutil.copytree(folder, target)
    return Classifier.load(target, device="cpu")


def test_classes_and_predictions_have_sklearn_names(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    classifier = copy_of(learned["lda"], tmp_path / "m").learn(photos / "later")
    assert list(classifier.classes_) == ["one", "two", "zero", "four", "three"]
    probabilities = classifier.predict_proba(photos / "test")
    assert probabilities.shape == (50, 5)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    file = next((photos / "test" / "zero").iterdir())
    assert classifier.predict(file) == classifier.classes_[classifier.predict_proba(file).argmax()]
    names = classifier.predict([file, photos / "test" / "one"])
    assert len(names) == 11
    truth = [path.parent.name for path in sorted((photos / "test").rglob("*.*"))]
    guessed = classifier.predict(photos / "test")
    assert classifier.score(photos / "test") == pytest.approx(np.mean(guessed == np.array(truth)))
    # Random features: chance is 0.2, and 0.4 of 50 photos would be reached by chance once in a thousand times.
    assert classifier.score(photos / "test") > 0.4


def test_frozen_backbone_learns_the_same_in_one_step_or_in_several(learned: dict[str, Path], photos: Path) -> None:
    steps = Classifier.load(learned["lda"], "cpu").save(learned["lda"].parent / "copy").learn(photos / "later")
    whole = Classifier.fit(photos / "all", **FROZEN)
    order = [list(whole.classes_).index(name) for name in steps.classes_]
    np.testing.assert_allclose(
        steps.predict_proba(photos / "test"), whole.predict_proba(photos / "test")[:, order], atol=2e-4
    )


@pytest.mark.parametrize("method", ["lda", "replay"])
def test_two_processes_agree_on_the_same_photos(
    method: str, learned: dict[str, Path], photos: Path, tmp_path: Path
) -> None:
    first, second = (copy_of(learned[method], tmp_path / name).learn(photos / "later") for name in "ab")
    assert state(first) == state(second)


def test_folder_needs_neither_old_photos_nor_its_place(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "first", tmp_path / "photos")
    Classifier.fit(tmp_path / "photos", tmp_path / "model", **REPLAY)
    before = Classifier.load(tmp_path / "model").predict_proba(photos / "test")
    shutil.rmtree(tmp_path / "photos")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "model", tmp_path / "elsewhere" / "renamed")
    moved = Classifier.load(tmp_path / "elsewhere" / "renamed", "cpu")
    np.testing.assert_array_equal(moved.predict_proba(photos / "test"), before)
    moved.learn(photos / "later")
    assert len(moved.classes_) == 5
    assert moved.description.remembered == (3,) * 5


def test_undo_restores_the_version_before_and_learn_repeats(
    learned: dict[str, Path], photos: Path, tmp_path: Path
) -> None:
    classifier = copy_of(learned["replay"], tmp_path / "m")
    before = state(classifier)
    classifier.learn(photos / "later")
    after = state(classifier)
    assert classifier.undo().classes_.tolist() == ["one", "two", "zero"]
    assert state(classifier) == before
    assert len(list((tmp_path / "m").glob("weights-*"))) == 1
    with pytest.raises(ConfigError, match="no version before"):
        classifier.undo()
    assert state(classifier.learn(photos / "later")) == after


def test_only_the_last_two_versions_are_kept(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    classifier = copy_of(learned["lda"], tmp_path / "m").learn(photos / "later").learn(photos / "last")
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    versions = ["photos-2.zip", "photos-3.zip", "weights-2.safetensors", "weights-3.safetensors"]
    assert names == [".lock", "model.json", *versions]
    assert len(classifier.undo().classes_) == 5


@pytest.mark.parametrize("method", ["lda", "replay"])
def test_killed_at_any_write_the_folder_is_before_or_after(
    method: str, learned: dict[str, Path], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = copy_of(learned[method], tmp_path / "whole")
    before = state(whole)
    whole.learn(photos / "later")
    expected = state(whole)
    rename, writes = os.replace, 0

    def dying(source: Any, target: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == killed_at:
            raise Killed
        rename(source, target)

    killed_at, finished = 0, False
    while not finished:
        killed_at, writes = killed_at + 1, 0
        classifier = copy_of(learned[method], tmp_path / f"killed-{killed_at}")
        monkeypatch.setattr(os, "replace", dying)
        try:
            classifier.learn(photos / "later")
            finished = True
        except Killed:
            monkeypatch.setattr(os, "replace", rename)
            again = Classifier.load(classifier.path, "cpu")
            assert state(again) == before
            assert again.predict(photos / "test" / "one").shape == (10,)
            assert state(again.learn(photos / "later")) == expected
            assert not again.folder.working.exists()
        monkeypatch.setattr(os, "replace", rename)
    assert killed_at > 4  # plan, snapshot, record, weights, photos, description


def test_interrupted_training_resumes(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    whole = copy_of(learned["replay"], tmp_path / "whole").learn(photos / "later")
    classifier, seen = copy_of(learned["replay"], tmp_path / "m"), []

    def stop(event: Any) -> None:
        seen.append(type(event).__name__)
        if seen.count("EpochEnded") == 2:
            raise Killed

    with pytest.raises(Killed):
        classifier.learn(photos / "later", listen=stop)
    assert classifier.folder.working.is_dir()
    assert state(classifier.learn(photos / "later")) == state(whole)


def test_unfinished_learn_of_other_photos_is_discarded(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        raise Killed

    classifier = copy_of(learned["replay"], tmp_path / "m")
    with pytest.raises(Killed):
        classifier.learn(photos / "later", listen=stop)
    assert classifier.learn(photos / "last").classes_.tolist() == ["one", "two", "zero", "five"]


def test_full_disk_leaves_the_folder_as_before(
    learned: dict[str, Path], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = copy_of(learned["lda"], tmp_path / "m")
    before, rename = state(classifier), os.replace

    def full(source: Any, target: Any) -> None:
        if "photos-2" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"photos-2.zip .*No space left on device"):
        classifier.learn(photos / "later")
    monkeypatch.undo()
    assert state(Classifier.load(tmp_path / "m", "cpu")) == before
    assert len(classifier.learn(photos / "later").classes_) == 5


@pytest.mark.parametrize("existed", [False, True])
def test_first_learn_that_fails_leaves_no_folder_behind(existed: bool, tmp_path: Path) -> None:
    out, empty = tmp_path / "m", tmp_path / "empty"
    empty.mkdir()
    if existed:
        out.mkdir()
    with pytest.raises(DataError):
        Classifier.fit(empty, out, **TINY)
    assert out.exists() == existed


def test_learn_that_fails_before_it_trains_leaves_nothing_to_resume(
    learned: dict[str, Path], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"no file of weights none\.pth"):
        Classifier.fit(photos / "first", tmp_path / "new", backbone="torchvision/resnet18", weights="none.pth")
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        copy_of(learned["lda"], tmp_path / "m")
        with pytest.raises(ConfigError, match="finds no CUDA device"):
            Classifier.load(tmp_path / "m", "cuda").learn(photos / "later")
    assert not (tmp_path / "m" / "learning").exists()


def test_two_processes_cannot_learn_into_one_folder(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    first, second = copy_of(learned["lda"], tmp_path / "m"), Classifier.load(learned["lda"])
    second = Classifier.load(tmp_path / "m")
    with first.folder.lock:
        for action in (lambda: second.learn(photos / "later"), second.undo):
            with pytest.raises(Busy, match="another process is working"):
                action()
        assert second.predict(photos / "test" / "one").shape == (10,)  # reading needs no lock


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 1}', b'{"format": 99}'])
def test_damaged_description_is_refused(damage: bytes, learned: dict[str, Path], tmp_path: Path) -> None:
    copy_of(learned["lda"], tmp_path / "m")
    (tmp_path / "m" / "model.json").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"model\.json"):
        Classifier.load(tmp_path / "m")


def test_damaged_weights_and_photos_are_refused(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    classifier = copy_of(learned["replay"], tmp_path / "m")
    weights = tmp_path / "m" / "weights-1.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        classifier.predict(photos / "test")
    (tmp_path / "m" / "photos-1.zip").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"photos-1\.zip cannot be read"):
        classifier.learn(photos / "later")


# What is kept -----------------------------------------------------------------------------------------------


def test_no_photo_is_kept_with_memory_zero(photos: Path, tmp_path: Path) -> None:
    classifier = Classifier.fit(photos / "first", tmp_path / "m", **{**FROZEN, "memory": 0})
    classifier.learn(photos / "later")
    assert not list((tmp_path / "m").glob("photos*"))
    assert set(classifier.description.remembered) == {0}
    stored = classifier.description.preprocessing.stored
    assert all(
        np.prod(t.shape) != 3 * stored**2 for t in classifier.folder.read_weights(classifier.description)[0].values()
    )
    with pytest.raises(ConfigError, match="'replay' trains on remembered photos, but memory is 0"):
        Classifier.fit(photos / "first", tmp_path / "n", **{**REPLAY, "memory": 0})
    assert not (tmp_path / "n" / "model.json").exists()


def test_remembered_photos_are_the_photos(learned: dict[str, Path], photos: Path) -> None:
    """Each is one of the photos of its class, up to the compression."""
    from incvec.classifier.photos import load_squares

    classifier = Classifier.load(learned["replay"])
    kept, check = classifier.folder.read_photos(classifier.description)
    assert [len(own) for own in kept] == [3, 3, 3]
    assert [len(own) for own in check] == [2, 2, 2]
    for name, own, held_out in zip(classifier.classes_, kept, check, strict=True):
        files = [(file, 0) for file in sorted((photos / "first" / name).iterdir())]
        squares = load_squares(files, classifier.description.preprocessing.stored).float()
        closest = set()
        for content in (*own, *held_out):
            distances = (squares - folders.decode(content).float()).abs().mean((1, 2, 3))
            assert distances.min() < 8
            closest.add(int(distances.argmin()))
        assert len(closest) == 5  # no photo is both trained on and checked with


def test_class_with_fewer_photos_than_memory(photos: Path, tmp_path: Path) -> None:
    write_classes(tmp_path / "few", [6], 2)
    classifier = Classifier.fit(photos / "first", tmp_path / "m", **{**REPLAY, "memory": 4})
    classifier.learn(tmp_path / "few").learn(photos / "last")
    assert classifier.description.remembered == (4, 4, 4, 2, 4)


def test_accuracy_then_and_now(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    classifier = copy_of(learned["lda"], tmp_path / "m").learn(photos / "later")
    first, second = classifier.description.history
    assert {name: total for name, (_, total) in first.check.items()} == {"one": 2, "two": 2, "zero": 2}
    assert set(second.check) == set(classifier.classes_)


def test_more_photos_of_known_classes(learned: dict[str, Path], photos: Path, tmp_path: Path) -> None:
    """The statistics are those of all photos together."""
    write_classes(tmp_path / "more" / "x", [0], 8, first=22)
    shutil.copytree(photos / "later" / "three", tmp_path / "more" / "x" / "three")
    classifier = copy_of(learned["lda"], tmp_path / "m")
    with pytest.raises(DataError, match=r"'zero' is known already.*--more"):
        classifier.learn(tmp_path / "more" / "x")
    classifier.learn(tmp_path / "more" / "x", more=True)
    assert classifier.description.history[-1].more == {"zero": 8}
    assert classifier.classes_.tolist() == ["one", "two", "zero", "three"]
    counts = classifier.folder.read_weights(classifier.description)[0]["store/counts"]
    assert counts.tolist() == [20, 20, 28, 20]
    with pytest.raises(ConfigError, match="'replay' cannot learn more photos"):
        copy_of(learned["replay"], tmp_path / "r").learn(tmp_path / "more" / "x", more=True)


# Settings and inputs ----------------------------------------------------------------------------------------


def test_every_form_of_an_image_gives_the_same(learned: dict[str, Path], tmp_path: Path) -> None:
    classifier = Classifier.load(learned["lda"], "cpu")
    image = digit(1, 35)
    image.save(tmp_path / "one.png")
    array = np.array(image)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    forms: list[Any] = [
        str(tmp_path / "one.png"),
        tmp_path / "one.png",
        image,
        array,
        tensor,
        tensor / 255,
        array / 255,
    ]
    expected = classifier.predict_proba(image)
    assert expected.shape == (3,)
    for form in forms:
        np.testing.assert_array_equal(classifier.predict_proba(form), expected)
    several = classifier.predict_proba(np.stack([array, array]))  # another batch size may change the last digits
    np.testing.assert_allclose(several, np.stack([expected, expected]), atol=1e-6)
    np.testing.assert_allclose(classifier.predict_proba(forms), np.stack([expected] * len(forms)), atol=1e-6)
    gray = image.convert("L")
    np.testing.assert_array_equal(classifier.predict_proba(gray), classifier.predict_proba(np.array(gray)))
    for wrong, text in (
        (np.zeros((4, 5, 6, 7)), "shape"),
        (np.zeros((5, 5, 4), np.uint8), "shape"),
        (np.full((5, 5, 3), 3.5), "0 to 1"),
        (np.zeros((5, 5, 3), np.int32), "int32"),
        (3, "int is not an image"),
    ):
        with pytest.raises(ConfigError, match=text):
            classifier.predict(wrong)
    with pytest.raises(DataError, match="no photo"):
        classifier.predict(tmp_path / "none.png")


def test_temporary_folder_and_save(photos: Path, tmp_path: Path) -> None:
    classifier = Classifier.fit(photos / "first", **FROZEN)
    temporary, expected = classifier.path, classifier.predict_proba(photos / "test")
    classifier.save(tmp_path / "m")
    np.testing.assert_array_equal(Classifier.load(tmp_path / "m", "cpu").predict_proba(photos / "test"), expected)
    del classifier
    assert not temporary.exists()
    with pytest.raises(ConfigError, match="has a classifier already"):
        Classifier.fit(photos / "first", tmp_path / "m", **FROZEN)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"backbone": "tinny"}, "Did you mean 'tiny'"),
        ({"method": "replai"}, "Did you mean 'replay'"),
        ({"method": "flyp"}, "dual encoder"),
        ({"method": "joint"}, "all classes at once"),
        ({"addons": ["ivt"]}, "trains nothing"),
        ({"settings": {"replay": {"epochs": 2}}}, "settings of 'replay' were given"),
        ({"settings": {"lda": {"shrinkage": 2.0}}}, "lda.shrinkage"),
        ({"memory": -1}, "expected 0 or more"),
        ({"side": 0}, "expected 4 pixels or more"),
        ({"method": "replay", "memory": 0}, "that needs none: ewc, fcs, finetune, lda, lwf, pass, ssre"),
        ({"weights": "some.pth"}, "has no weights to load"),
    ],
)
def test_wrong_settings_change_nothing(given: dict[str, Any], text: str, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        Classifier.fit(photos / "first", tmp_path / "m", **{**FROZEN, **given})
    assert not (tmp_path / "m" / "model.json").exists()


def test_method_without_exemplars_and_ivt(photos: Path, tmp_path: Path) -> None:
    options = {"epochs": 2, "batch_size": 16}
    given = {
        **TINY,
        "memory": 0,
        "method": "pass",
        "addons": ["ivt"],
        "settings": {"pass": options, "ivt": {"interval": 1}},
    }
    classifier = Classifier.fit(photos / "first", tmp_path / "m", **given).learn(photos / "later")
    assert classifier.predict_proba(photos / "test").shape == (50, 5)
    tensors, _ = classifier.folder.read_weights(classifier.description)
    assert any(name.startswith("addon/ivt/") for name in tensors)  # IVT's state travels with the folder


@pytest.mark.parametrize(("memory", "checked"), [(None, (2, 2, 2)), (20, (2, 2, 2)), (0, (0, 0, 0))])
def test_lda_remembers_no_photo_it_does_not_use(
    memory: int | None, checked: tuple[int, ...], photos: Path, tmp_path: Path
) -> None:
    classifier = Classifier.fit(photos / "first", tmp_path / "m", **{**FROZEN, "memory": memory})
    for _ in range(2):
        assert not any(classifier.description.remembered)
        assert classifier.description.checked[:3] == checked
        assert bool(list((tmp_path / "m").glob("photos-*"))) == bool(sum(checked))
        assert classifier.description.history[-1].check  # accuracy is measured in any case
        if len(classifier.classes_) == 3:
            classifier.learn(photos / "later")


def test_package_exports_the_classifier_lazily() -> None:
    assert incvec.Classifier is Classifier
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        incvec.Nothing  # noqa: B018


def test_temperature_calibrates_and_keeps_the_class(photos: Path, tmp_path: Path) -> None:
    """Scores that are ten times too large get a temperature of about ten; too few photos change nothing, and those of
    the last classes alone neither."""
    from incvec.calibration import fit_temperature

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).flatten()
    assert fit_temperature(10 * logits, labels, 1.0) == pytest.approx(10, rel=0.15)
    assert fit_temperature(logits[:9], labels[:9], 3.0) == 3.0
    sure = torch.tensor([[5.0, 0.0]]).expand(40, 2)
    p = (sure / fit_temperature(sure, torch.zeros(40, dtype=torch.int64), 1.0)).softmax(1)
    assert float(p[0, 0]) == pytest.approx(40 / 41, abs=0.002)  # not 1: forty right ones do not exclude a wrong one
    write_classes(tmp_path / "p", range(4), 30)
    classifier = Classifier.fit(tmp_path / "p", tmp_path / "m", **{**FROZEN, "check": 5})
    assert sum(classifier.description.checked) == 12
    assert classifier.description.temperature != 1.0
    assert classifier.network.temperature == classifier.description.temperature
    write_classes(tmp_path / "later", range(4, 9), 30)
    nothing_kept = Classifier.fit(tmp_path / "p", tmp_path / "n", **{**FROZEN, "check": 5, "memory": 0})
    first = nothing_kept.description.temperature
    assert first != 1.0
    assert nothing_kept.learn(tmp_path / "later").description.temperature == first
    assert classifier.learn(tmp_path / "later").description.temperature != first
