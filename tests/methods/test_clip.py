"""Dual-encoder methods on CLIP: a tiny random model saved and loaded by transformers, two tasks each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from incvec.data import Dataset
from incvec.engine.run import finish
from tests.conftest import make_run, quick, weights
from tests.methods.tools import seeded
from tests.nets.test_dual import letters, tiny_clip


class Letters:
    """Replaces the tokenizer: the last letters of a sentence, which contain the class name."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
        return {"input_ids": letters([text.rstrip(".")[-8:] for text in texts])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip")
    tiny_clip().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def colors() -> Dataset:
    """Four classes of noisy 8 x 8 images, one color per class."""
    generator = seeded(0)
    labels = torch.arange(4).repeat_interleave(24)
    centers = torch.tensor([[200, 40, 40], [40, 200, 40], [40, 40, 200], [180, 180, 40]])[labels][:, :, None, None]
    images = (centers + torch.randint(-40, 40, (96, 3, 8, 8), generator=generator)).to(torch.uint8)
    norms = {"default": ((0.5,) * 3, (0.25,) * 3)}
    names = ("red", "green", "blue", "yellow")
    return Dataset("colors", images, labels, images[::6], labels[::6], names, 4, False, "colors", norms)


@pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])
@pytest.mark.parametrize("method", ["flyp", "slca", "spu", "rapf"])
def test_two_tasks(
    method: str,
    addons: tuple[str, ...],
    colors: Dataset,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_: Letters())
    own = {"net": "clip", "weights": str(folder), "tag": "mine", "lr": 1e-3, "epochs": 3}
    run = make_run(colors, tmp_path, quick(method, *addons, dataset="cifar100", base_classes=0, **{method: own}))
    record = finish(run)
    assert [len(row) for row in record["accuracy"]] == [1, 2]
    assert record["config"][method]["tag"] == "mine"
    before, after = (weights(run.snapshot_path(task)) for task in (0, 1))
    named = [name for name, _ in run.parts.method.named_parameters()]
    moved = {name: before[f"method/{name}"] != after[f"method/{name}"] for name in named}
    if method == "rapf":
        assert {name for name, entries in moved.items() if entries.any()} == {"model.adapter.weight"}
    elif method == "spu":
        check_spu(moved, after)
    else:
        still = {name for name, entries in moved.items() if not entries.any()}
        assert not {name for name in still if not name.endswith("k_proj.bias")}  # the softmax is invariant to it
    if addons:
        assert 0.5 <= record["statistics"][1]["ivt"]["all"]["scale"] <= 1


def check_spu(moved: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """The first MLP layers are `mlp.fc1` of two blocks per tower."""
    masks = {name.removeprefix("store/mask."): mask for name, mask in after.items() if name.startswith("store/mask.")}
    towers = ("image_tower.model", "text_tower.model")
    wanted = {f"model.dual.{tower}.encoder.layers.{i}.mlp.fc1.weight" for tower in towers for i in (0, 1)}
    assert masks.keys() == wanted
    for name, entries in moved.items():
        if name in masks:
            assert masks[name].sum() == int(0.1 * entries.numel())
            assert not (entries & ~masks[name]).any(), name
        trained = name in masks or name.endswith("mlp.fc1.bias") or "image_projection" in name
        assert entries.any() == trained, name
