"""Exported files give the same answers in their own runtime, and contain labels and preprocessing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from incvec import Classifier
from incvec.classifier import export as exports
from incvec.classifier.network import to_pixels
from incvec.classifier.photos import to_square
from incvec.errors import ConfigError, TrainingError
from tests.classifier.folders import FROZEN, REPLAY, write_classes


@pytest.fixture(scope="module", params=["lda", "replay"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    root = tmp_path_factory.mktemp("export")
    given = FROZEN if request.param == "lda" else REPLAY
    made = Classifier.fit(write_classes(root / "a", range(2), 12), root / "m", **given)
    return made.learn(write_classes(root / "b", [2], 12))


def pixels_of(classifier: Classifier, photos: Path) -> tuple[torch.Tensor, np.ndarray]:
    files = sorted(photos.rglob("*.*"))
    preprocessing = classifier.description.preprocessing
    squares = torch.stack([to_square(file, preprocessing.stored) for file in files])
    return to_pixels(squares, preprocessing), classifier.predict_proba(files)


@pytest.fixture(scope="module")
def test_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("test"), range(3), 34, first=40)  # 102 photos


def test_onnx(classifier: Classifier, test_photos: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = classifier.export(tmp_path / "m.onnx")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    pixels, expected = pixels_of(classifier, test_photos)
    for size in (1, 3, len(pixels)):
        (given,) = session.run(None, {"images": pixels[:size].numpy()})
        np.testing.assert_allclose(given, expected[:size], atol=1e-3)
    assert (given.argmax(1) == expected.argmax(1)).mean() > 0.99
    properties = session.get_modelmeta().custom_metadata_map
    assert json.loads(properties["incvec.classes"]) == list(classifier.classes_)
    assert json.loads(properties["incvec.preprocessing"])["side"] == 16


def test_torch_program(classifier: Classifier, test_photos: Path, tmp_path: Path) -> None:
    file = classifier.export(tmp_path / "m.pt2")
    extra = {"incvec.classes": "", "incvec.preprocessing": ""}
    program = torch.export.load(file, extra_files=extra).module()
    pixels, expected = pixels_of(classifier, test_photos)
    for size in (1, 5, len(pixels)):
        np.testing.assert_allclose(program(pixels[:size]).detach(), expected[:size], atol=1e-3)
    assert json.loads(extra["incvec.classes"]) == list(classifier.classes_)
    assert json.loads(extra["incvec.preprocessing"])["resize_short_side"] == 18


def test_state_dict(classifier: Classifier, tmp_path: Path) -> None:
    file = classifier.export(tmp_path / "m.safetensors")
    with safe_open(file, framework="pt") as saved:
        assert json.loads(saved.metadata()["incvec.classes"]) == list(classifier.classes_)
        names = set(saved.keys())
        assert "head.blocks.1.weight" in names
        assert saved.get_tensor("head.blocks.1.weight").shape[0] == 1
    assert names == set(classifier.network.method.model.state_dict())


def test_a_file_that_differs_is_not_written(
    classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*given: object) -> object:
        return b"", lambda pixels: np.roll(classifier.network(pixels).numpy(), 1, axis=1)

    monkeypatch.setattr(exports, "to_torch", wrong)
    with pytest.raises(TrainingError, match="differs from the classifier"):
        classifier.export(tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()
    with pytest.raises(ConfigError, match="no known ending"):
        classifier.export(tmp_path / "m.pb")
