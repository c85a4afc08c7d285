"""Runs on a packed store: on the device or streamed, with the same record and the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.data import StreamedSource, load_dataset
from incvec.data.class_lists import CLASS_LISTS, find_class_list
from incvec.engine.run import Run, finish
from incvec.presets import resolve
from tests.conftest import quick, same_record, same_weights
from tests.data.pictures import make_root, make_store, photo, save

CHOICES = ("resident", "streamed")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_root(tmp_path_factory.mktemp("images"), classes=6, train=12, test=3)
    return make_store(root, tmp_path_factory.mktemp("store") / "s", 12).root


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_root(tmp_path_factory.mktemp("large-images"), classes=4, train=6, test=2)
    return make_store(root, tmp_path_factory.mktemp("large") / "s", 128).root


def run(store: Path, out: Path, placement: str, given: dict[str, Any]) -> Run:
    config = resolve({**given, "dataset": "packed"})
    return Run(config, load_dataset("packed", store, image_size=config.image_size, placement=placement), out, None)


@pytest.mark.parametrize(("method", "addons"), [("podnet", ("ivt",)), ("pass", ()), ("fcs", ()), ("bic", ())])
def test_streamed_and_resident_runs_end_with_the_same_bits(
    store: Path, tmp_path: Path, method: str, addons: tuple[str, ...]
) -> None:
    given = quick(method, *addons, **{method: {"batch_size": 8}}, **({"ivt": {"batchnorm": "layer"}} if addons else {}))
    runs = {placement: run(store, tmp_path / placement, placement, given) for placement in CHOICES}
    records = [finish(one) for one in runs.values()]
    assert isinstance(runs["streamed"].parts.world.train, StreamedSource)
    assert not isinstance(runs["resident"].parts.world.train, StreamedSource)
    same_record(*records)
    last = f"snapshots/task-{len(records[0]['accuracy']) - 1:02d}.safetensors"
    same_weights(tmp_path / "resident" / last, tmp_path / "streamed" / last)


def test_network_input_has_image_size(large: Path, tmp_path: Path) -> None:
    given = {**quick("finetune", finetune={"batch_size": 4}), "base_classes": 2, "tasks": 1, "image_size": 24}
    one = run(large, tmp_path / "run", "streamed", given)
    record = finish(one)
    assert one.parts.world.image_shape == (3, 24, 24)
    assert len(record["accuracy"]) == 2


def test_record_describes_the_packed_data(store: Path, tmp_path: Path) -> None:
    record = finish(run(store, tmp_path / "run", "resident", quick("finetune")))
    assert record["data"]["side"] == 12
    assert record["data"]["class_list"] is None


def test_notice_about_a_network_for_larger_images(store: Path, large: Path, tmp_path: Path) -> None:
    """Images of 12 x 12 with the network of the packed store's preset, whose stride is 32."""
    given = quick("finetune", finetune={"batch_size": 8, "epochs": 1, "net": "resnet18"}, stop_after=1)
    notices = finish(run(store, tmp_path / "small", "resident", given))["engine"]["notices"]
    assert notices == [
        "for images of 12 x 12 the last feature maps of resnet18 are 1 x 1; resnet18-cifar is made for smaller images "
        "(--set finetune.net=resnet18-cifar)"
    ]
    notices = finish(run(large, tmp_path / "large", "resident", {**given, "tasks": 1}))["engine"]["notices"]
    assert notices == []


def test_record_contains_the_class_list(store: Path, tmp_path: Path) -> None:
    """A public list by its name, a file by its name and a hash of its classes."""
    names = tmp_path / "four.txt"
    names.write_text("".join(f"n{label:08d}\n" for label in (0, 1, 2, 4)))
    config = resolve({**quick("finetune"), "dataset": "packed", "class_list": str(names)})
    data = load_dataset("packed", store, **config.data_options())
    record = finish(Run(config, data, tmp_path / "run", None))
    assert record["data"]["class_list"] == find_class_list(names).name
    assert record["data"]["class_list"].startswith("four.txt@")
    assert json.loads((tmp_path / "run" / "record.json").read_text())["data"] == record["data"]


def test_record_of_a_named_data_set_contains_its_class_list(tmp_path: Path) -> None:
    chosen = CLASS_LISTS["cmc"]
    for part in ("train", "val"):
        for number, name in enumerate(chosen.classes):
            save(photo(number, 8, 8), tmp_path / "images" / part / name / "0.png")
    store = make_store(tmp_path / "images", tmp_path / "store", 8, chunk_rows=64).root
    given = {**quick("finetune"), "dataset": "imagenet-subset", "base_classes": 98, "tasks": 1, "image_size": 8}
    config = resolve({**given, "class_list": "cmc"})
    record = finish(Run(config, load_dataset(config.dataset, store, **config.data_options()), tmp_path / "run", None))
    assert (record["data"]["class_list"], record["config"]["class_list"]) == ("cmc", "cmc")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", ["padded", "resized", "last batch"])
def test_captured_streamed_run_trains_like_a_resident_one(store: Path, large: Path, tmp_path: Path, shape: str) -> None:
    """Up to rounding, since kernels sum in any order. A late or repeated batch would change all digits.

    Rounding may choose another exemplar, and there are two per class: later stages differ by more.
    """
    given = quick("podnet", "ivt", engine="graph", precision="fp32", podnet={"batch_size": 8, "memory": 2})
    if shape == "resized":
        given |= {"base_classes": 2, "tasks": 1, "image_size": 24}
    elif shape == "last batch":
        given |= {"last_batch": "keep", "podnet": {**given["podnet"], "batch_size": 10}}
    runs = {c: run(large if shape == "resized" else store, tmp_path / c, c, given) for c in CHOICES}
    records = {name: finish(one) for name, one in runs.items()}
    assert all(record["engine"]["notices"] == [] for record in records.values())
    assert isinstance(runs["streamed"].parts.world.train, StreamedSource)
    for number, (one, other) in enumerate(zip(*(record["losses"] for record in records.values()), strict=True)):
        within = 0.02 if number < 2 else 0.15
        for term, values in one["terms"].items():
            assert values[0] == pytest.approx(other["terms"][term][0], rel=within, abs=1e-3), (one["stage"], term)
