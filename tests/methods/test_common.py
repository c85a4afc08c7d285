"""What the image methods share: the base task's own settings, and class means with their mirror image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from incvec.contracts import Schedule
from incvec.data import Dataset
from incvec.methods.common import extract_features
from incvec.methods.finetune import Finetune
from incvec.methods.icarl import ICaRL
from incvec.presets import load_presets, resolve
from tests.methods.endings import finished, in_task

LARGE = ("imagenet-subset", "imagenet", "tiny-imagenet-100")
BASE = {"base_epochs": 3, "base_lr": 0.3, "base_weight_decay": 0.02, "base_milestones": [2]}
LATER = {"epochs": 5, "lr": 0.05, "weight_decay": 0.001, "milestones": [3, 4], "gamma": 0.5}


def test_the_base_task_has_settings_of_its_own(few: Dataset, tmp_path: Path) -> None:
    method = in_task(Finetune, few, tmp_path, 0, finetune={**BASE, **LATER})
    base, later = (method.stages(task)[0] for task in method.world.tasks[:2])
    assert (base.epochs, base.groups[0].lr, base.groups[0].weight_decay) == (3, 0.3, 0.02)
    assert base.schedule == Schedule("steps", (2,), 0.5)
    assert (later.epochs, later.groups[0].lr, later.groups[0].weight_decay) == (5, 0.05, 0.001)
    assert later.schedule == Schedule("steps", (3, 4), 0.5)


def test_without_them_it_is_trained_as_the_others_are(few: Dataset, tmp_path: Path) -> None:
    method = in_task(Finetune, few, tmp_path, 0, finetune=LATER)
    base, later = (method.stages(task)[0] for task in method.world.tasks[:2])
    assert base == later


def test_class_means_are_averaged_with_the_mirror_image(few: Dataset, tmp_path: Path) -> None:
    method = finished(replace(few, flip=True), tmp_path, "icarl").parts.method
    assert isinstance(method, ICaRL)
    for label, rows in enumerate(method.store["memory"]):
        images = method.world.train.fetch(rows, None, ("test",)).images
        with torch.no_grad():
            method.eval()
            halves = [method.model(x).features for x in (images, images.flip(-1))]
        plain, mirrored = (F.normalize(half, dim=1).mean(0) for half in halves)
        torch.testing.assert_close(method.store["means"][label], F.normalize(plain + mirrored, dim=0))
        alone = F.normalize(extract_features(method.model, method.world, rows), dim=1).mean(0)
        assert not torch.allclose(method.store["means"][label], F.normalize(alone, dim=0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["bic", "geodl", "mnemonics", "replay", "lwf", "ewc", "joint", "finetune"])
@pytest.mark.parametrize("dataset", LARGE)
def test_large_images_have_a_network_and_a_length_of_their_own(method: str, dataset: str) -> None:
    """Not those of CIFAR-100, which the options' defaults are."""
    assert dataset in load_presets(method).datasets
    own = resolve({"method": method, "dataset": dataset}).sections[method]
    relu = "-lucir" if method in ("geodl", "mnemonics") else ""  # none after the last block
    assert own["net"] == ("resnet18-64" if dataset == "tiny-imagenet-100" else "resnet18") + relu
    assert (own["epochs"], own["milestones"], own["optimizer"], own["lr"]) == (90, [30, 60], "sgd", 0.1)
    assert (own["weight_decay"], own["batch_size"], own["memory"]) == (1e-4, 128, 20)
    assert (own["normalization"], own["brightness"]) == ("default", 0.0)
    if relu:
        assert own["lambda_base"] == 10


@pytest.mark.parametrize("dataset", LARGE)
def test_what_is_merged_from_scratch_is_trained_alike_on_all_data_sets(dataset: str) -> None:
    first, own = (
        resolve({"method": "finetune", "dataset": name, "variant": "local"}).sections["finetune"]
        for name in ("cifar100", dataset)
    )
    differ = {key for key in own if own[key] != first[key]}
    assert differ == {"net", "brightness"}


def test_the_authors_variants_on_imagenet() -> None:
    for dataset in LARGE[:2]:
        bic = resolve({"method": "bic", "dataset": dataset, "variant": "authors"}).sections["bic"]
        assert (bic["net"], bic["epochs"], bic["milestones"], bic["batch_size"]) == (
            "resnet18", 100, [30, 60, 80, 90], 256,
        )  # fmt: skip
        geodl = resolve({"method": "geodl", "dataset": dataset, "variant": "authors"}).sections["geodl"]
        assert (geodl["form"], geodl["lambda_base"], geodl["lambda_margin"]) == ("released", 10, 0)
