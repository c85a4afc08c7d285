"""A network trained elsewhere becomes the first task: its predictions, its past for IVT, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file

from incvec import Classifier
from incvec.classifier.network import to_pixels
from incvec.classifier.photos import to_square
from incvec.errors import ConfigError, DataError
from incvec.nets.efficientnet import EfficientNetLite0
from tests.classifier.folders import state, write_classes
from tests.cli.conftest import invoke, message

CLASSES = ("zero", "one", "two")  # the order of the rows, not of the alphabet
BACKBONE: dict[str, Any] = {"backbone": "torchvision/shufflenet_v2_x0_5", "side": 32, "device": "cpu"}
QUICK = {"epochs": 2, "batch_size": 16, "lr": 0.01}


def make_network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torchvision.models.get_model("shufflenet_v2_x0_5", num_classes=len(CLASSES)).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one network in three forms, its photos, and photos of later classes."""
    root = tmp_path_factory.mktemp("adoption")
    weights = make_network().state_dict()
    save_file(weights, root / "mine.safetensors")
    torch.save({"model": {f"module.{name}": t for name, t in weights.items()}, "epoch": 3}, root / "mine.pth")
    save_file({n: t for n, t in weights.items() if not n.startswith("fc.")}, root / "headless.safetensors")
    torch.save(make_network(), root / "whole.pth")
    (root / "names.txt").write_text("\n".join(CLASSES) + "\n\n")
    write_classes(root / "old", [0, 1, 2], 21)
    write_classes(root / "later", [3, 4], 8)
    write_classes(root / "test", [0, 1, 2], 4, first=60)
    return root


@pytest.mark.parametrize("name", ["mine.safetensors", "mine.pth"])
def test_predictions_are_those_of_the_network(name: str, files: Path) -> None:
    adopted = Classifier.from_checkpoint(files / name, files / "names.txt", **BACKBONE)
    assert tuple(adopted.classes_) == CLASSES
    photos = sorted((files / "test").rglob("*.*"))
    p = adopted.description.preprocessing
    pixels = to_pixels(torch.stack([to_square(photo, p.stored) for photo in photos]), p)
    mean, std = (torch.tensor(values)[:, None, None] for values in (p.mean, p.std))
    with torch.no_grad():
        expected = make_network()((pixels - mean) / std).softmax(1)
    np.testing.assert_allclose(adopted.predict_proba(photos), expected, atol=1e-5)
    assert "No photo is kept" in invoke("info", adopted.path).stdout


def test_checkpoint_of_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model("test_resnet", num_classes=3).eval()
    save_file(network.state_dict(), tmp_path / "mine.safetensors")
    given = {**BACKBONE, "backbone": "timm/test_resnet"}
    adopted = Classifier.from_checkpoint(tmp_path / "mine.safetensors", CLASSES, **given)
    pixels = torch.rand(2, 3, 32, 32)
    p = adopted.description.preprocessing
    mean, std = (torch.tensor(values)[:, None, None] for values in (p.mean, p.std))
    with torch.no_grad():
        torch.testing.assert_close(adopted.network(pixels), network((pixels - mean) / std).softmax(1))


def test_command_line_adopts_then_learns(files: Path, tmp_path: Path) -> None:
    given = ["--classes", files / "names.txt", "--backbone", BACKBONE["backbone"], "--side", "32", "--device", "cpu"]
    done = invoke("adopt", files / "mine.safetensors", *given, "--out", tmp_path / "m", "--set", "lwf.epochs=1")
    assert done.exit_code == 0, done.output
    assert "3 classes (3 new)" in done.stdout
    done = invoke("learn", files / "later", "--into", tmp_path / "m", "--device", "cpu")
    assert done.exit_code == 0, done.output
    later = Classifier.load(tmp_path / "m", "cpu")
    assert later.classes_.tolist() == [*CLASSES, "four", "three"]
    assert later.description.task_sizes == (3, 2)
    assert later.undo().classes_.tolist() == list(CLASSES)
    wrong = invoke("adopt", files / "mine.safetensors", *given, "--out", tmp_path / "m")
    assert "has a classifier already" in message(wrong)


@pytest.mark.parametrize("method", ["lda", "replay", "icarl"])
def test_with_photos_every_kind_of_method_goes_on(method: str, files: Path, tmp_path: Path) -> None:
    settings = {} if method == "lda" else {method: QUICK}
    adopted = Classifier.from_checkpoint(
        files / "mine.safetensors", CLASSES, tmp_path / "m", photos=files / "old", method=method, settings=settings,
        memory=4, **BACKBONE,
    )  # fmt: skip
    assert adopted.description.remembered == ((0,) * 3 if method == "lda" else (4,) * 3)
    assert adopted.description.checked == (2, 2, 2)
    assert set(adopted.description.history[0].check) == set(CLASSES)
    adopted.learn(files / "later")
    assert adopted.predict_proba(files / "test").shape == (12, 5)


def test_lda_has_more_features_than_the_checkpoint(files: Path, tmp_path: Path) -> None:
    """Its head is computed from the photos of the checkpoint's classes."""
    torch.manual_seed(0)
    network = EfficientNetLite0()
    save_file(network.state_dict() | {"fc.weight": torch.zeros(3, network.width)}, tmp_path / "lite0.safetensors")
    adopted = Classifier.from_checkpoint(
        tmp_path / "lite0.safetensors",
        CLASSES,
        photos=files / "old",
        backbone="lite0",
        method="lda",
        side=32,
        device="cpu",
    )
    model: Any = adopted.network.method.model
    assert model.head.width > model.backbone.width
    assert torch.equal(model.backbone.stem.conv.weight, network.stem.conv.weight)
    assert adopted.score(files / "old") > 0.8


@pytest.mark.parametrize("photos", ["old", None])
def test_ivt_has_a_past_at_the_first_new_task(photos: str | None, files: Path, tmp_path: Path) -> None:
    """Without one, the first new task would count as task 1, and nothing would be teleported."""
    learned = {}
    for addons in ((), ("ivt",)):
        settings: dict[str, Any] = {"lwf": QUICK} | ({"ivt": {"interval": 1}} if addons else {})
        adopted = Classifier.from_checkpoint(
            files / "mine.safetensors", CLASSES, tmp_path / str(len(addons)), method="lwf", addons=addons,
            photos=None if photos is None else files / photos, settings=settings, **BACKBONE,
        )  # fmt: skip
        assert adopted.description.has_past == (photos is not None)
        name = "method/model.backbone.net.conv1.0.weight"
        learned[addons] = torch.tensor(state(adopted.learn(files / "later"))[name])
        assert adopted.description.has_past
        if addons:
            tensors = adopted.folder.read_weights(adopted.description)[0]
            assert any(key.startswith("addon/ivt/") and tensor.abs().sum() > 0 for key, tensor in tensors.items())
            assert not torch.equal(learned[()], learned["ivt",])  # the same batches: only a teleport differs


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"classes": CLASSES[:2]}, "has a classifier of 3 classes, but 2 class names were given"),
        ({"classes": ("zero", "one", "Zero")}, "differ only in case"),
        ({"classes": ("zero", "one", "one")}, "'one' was given twice"),
        ({"classes": ("zero",)}, "1 class name"),
        ({"checkpoint": "headless.safetensors"}, "expected one linear classifier .* found none.*--weights"),
        ({"checkpoint": "none.safetensors"}, "there is no file of weights"),
        ({"checkpoint": "whole.pth"}, r"Weights only load failed\. Expected .*torch.save\(model.state_dict"),
        ({"backbone": "torchvision/resnet18"}, "does not contain the weights of torchvision/resnet18"),
        ({"method": "replay"}, "needs photos of the checkpoint's classes: give --photos, or .*lwf"),
        ({"method": "lucir", "photos": "old"}, "does not classify with one linear row per class"),
        ({"addons": ("carry",), "photos": "old"}, "'carry' needs what it measures when the first classes are trained"),
        ({"photos": "later"}, "has a folder 'four': expected one folder for each of the 3 class names"),
    ],
)
def test_refused(given: dict[str, Any], text: str, files: Path, tmp_path: Path) -> None:
    rest = {**BACKBONE, **{name: value for name, value in given.items() if name not in ("checkpoint", "classes")}}
    if "photos" in rest:
        rest["photos"] = files / rest["photos"]
    with pytest.raises((ConfigError, DataError), match=f"(?s){text}"):
        Classifier.from_checkpoint(
            files / given.get("checkpoint", "mine.safetensors"), given.get("classes", CLASSES), tmp_path / "m", **rest
        )
    assert not (tmp_path / "m" / "model.json").exists()
