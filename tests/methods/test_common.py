"""The base class of image methods: settings of the base task, class means."""

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
from tests.methods.tools import in_task, trained

LARGE = ("imagenet-subset", "imagenet", "tiny-imagenet-100")
BASE = {"base_epochs": 3, "base_lr": 0.3, "base_weight_decay": 0.02, "base_milestones": [2]}
LATER = {"epochs": 5, "lr": 0.05, "weight_decay": 0.001, "milestones": [3, 4], "gamma": 0.5}


def test_base_task_uses_the_base_settings(few: Dataset, tmp_path: Path) -> None:
    method = in_task(Finetune, few, tmp_path, 0, finetune={**BASE, **LATER})
    base, later = (method.stages(task)[0] for task in method.world.tasks[:2])
    assert (base.epochs, base.groups[0].lr, base.groups[0].weight_decay) == (3, 0.3, 0.02)
    assert base.schedule == Schedule("steps", (2,), 0.5)
    assert (later.epochs, later.groups[0].lr, later.groups[0].weight_decay) == (5, 0.05, 0.001)
    assert later.schedule == Schedule("steps", (3, 4), 0.5)


def test_base_task_defaults_to_the_settings_of_increments(few: Dataset, tmp_path: Path) -> None:
    method = in_task(Finetune, few, tmp_path, 0, finetune=LATER)
    base, later = (method.stages(task)[0] for task in method.world.tasks[:2])
    assert base == later


def test_class_means_include_mirrored_images(few: Dataset, tmp_path: Path) -> None:
    method = trained(ICaRL, replace(few, flip=True), tmp_path)
    for label, rows in enumerate(method.store["memory"]):
        images = method.world.train.fetch(rows, None, ("test",)).images
        with torch.no_grad():
            method.eval()
            halves = [method.model(x).features for x in (images, images.flip(-1))]
        plain, mirrored = (F.normalize(half, dim=1).mean(0) for half in halves)
        torch.testing.assert_close(method.store["means"][label], F.normalize(plain + mirrored, dim=0))
        alone = F.normalize(extract_features(method.model, method.world, rows), dim=1).mean(0)
        assert not torch.allclose(method.store["means"][label], F.normalize(alone, dim=0), rtol=1e-3, atol=1e-4)


def test_backbone_rate_applies_to_increments(few: Dataset, tmp_path: Path) -> None:
    """CoFiMA's recipe: the backbone a hundred times slower than the new rows; the base task as usual."""
    options = {"backbone_rate": 0.01, "lr": 0.1, "loss_over": "new"}
    method = trained(Finetune, few, tmp_path, **options)
    groups = [method.stages(task)[0].groups for task in method.world.tasks[:2]]
    assert [[(group.prefixes, group.lr) for group in each] for each in groups] == [
        [(("model", "auxiliary"), 0.1)],
        [(("model.backbone",), pytest.approx(0.001)), (("model.head.blocks.1", "auxiliary"), 0.1)],
    ]
