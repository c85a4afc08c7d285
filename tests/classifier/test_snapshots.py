"""A snapshot of the lab becomes a model folder that predicts as the run did, without its data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from incvec import Classifier
from incvec.atomic_files import read_meta, read_tensors, write_tensors
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError
from tests.classifier.folders import write_classes
from tests.cli.conftest import invoke, message
from tests.conftest import make_run, quick


@pytest.mark.parametrize(
    ("method", "addon", "reported"), [("icarl", "ivt", "nme"), ("icarl", "carry", "cnn"), ("pass", "ivt", "cnn")]
)
def test_predictions_are_those_of_the_run(method: str, addon: str, reported: str, few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path / "run", quick(method, addon))
    record = finish(run)
    assert record["classifier"] == reported
    done = invoke("export", tmp_path / "run" / "snapshots" / "task-02.safetensors")
    assert done.exit_code == 0, done.output
    classifier = Classifier.load(tmp_path / "run" / "model-02", "cpu")
    assert classifier.classes_.tolist() == record["class_names"]
    assert record["preprocessing"]["side"] == 8
    images = [Image.fromarray(image[0].numpy()) for image in few.test_images]
    labels = [record["class_order"].index(label) for label in few.test_labels.tolist()]
    correct = np.bincount(np.array(labels)[classifier.predict_proba(images).argmax(1) == labels], minlength=6)
    assert correct.tolist() == record["correct"][record["classifier"]][-1]
    earlier = tmp_path / "earlier"
    assert invoke("export", tmp_path / "run" / "snapshots" / "task-00.safetensors", "--out", earlier).exit_code == 0
    assert len(Classifier.load(earlier).classes_) == 2


def test_files_without_names_and_other_files_are_refused(few: Dataset, tmp_path: Path) -> None:
    finish(make_run(few, tmp_path / "run", quick("finetune", tasks=1)))
    file = tmp_path / "run" / "snapshots" / "task-00.safetensors"
    tensors, meta = read_tensors(file)
    rest = {key: value for key, value in meta.items() if key not in ("format", "hashes", "classes")}
    write_tensors(tmp_path / "old.safetensors", tensors, rest)
    assert "written by an earlier version" in message(invoke("export", tmp_path / "old.safetensors"))
    write_tensors(tmp_path / "base.safetensors", {"a": torch.zeros(1)}, {"kind": "base"})
    assert "is a base, not a snapshot" in message(invoke("export", tmp_path / "base.safetensors"))
    assert "cannot be read" in message(invoke("export", tmp_path / "none.safetensors"))
    assert read_meta(file)["preprocessing"]["mean"]


def test_method_with_exemplars_cannot_learn_more(few: Dataset, tmp_path: Path) -> None:
    finish(make_run(few, tmp_path / "run", quick("replay", tasks=1)))
    invoke("export", tmp_path / "run" / "snapshots" / "task-01.safetensors", "--out", tmp_path / "m")
    with pytest.raises(ConfigError, match="made from a snapshot"):
        Classifier.load(tmp_path / "m", "cpu").learn(write_classes(tmp_path / "p", [7], 4))
