"""The few computations of the shared interfaces."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from incvec.contracts import Group, Schedule, Stage, Task, World
from incvec.data.gaussians import FeatureSource


def test_cosine_is_torchs_annealing_by_epoch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    expected = []
    for _ in range(5):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        annealing.step()
    assert Schedule("cosine").factors(5).tolist() == pytest.approx(expected)


def test_steps_multiply_by_gamma_at_each_milestone() -> None:
    assert Schedule("steps", (1, 3), 0.5).factors(4).tolist() == [1, 0.5, 0.5, 0.25]
    assert Schedule().factors(2).tolist() == [1, 1]


def test_prefix_of_a_group_ends_at_a_dot() -> None:
    group = Group(("model.head.blocks.1",), 0.1)
    assert group.owns("model.head.blocks.1.weight")
    assert not group.owns("model.head.blocks.10.weight")


def test_description_of_a_stage_does_not_depend_on_the_wording_of_its_reason() -> None:
    stage = Stage("main", "main", epochs=1, batch_size=2, eager="a reason")
    assert stage.describe() == stage.replace(eager="the same in other words").describe()
    assert stage.describe() != stage.replace(eager=None).describe()
    assert stage.describe() != stage.replace(epochs=2).describe()


def test_sources_are_added_but_the_training_images_stay() -> None:
    source = FeatureSource(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    world = World(torch.device("cpu"), (Task(0, 0, 2),), {"train": source}, torch.Generator(), (1, 8, 8))
    world.add_source("features", source)
    assert set(world.sources) == {"train", "features"}
    with pytest.raises(ValueError, match="cannot be replaced"):
        world.add_source("train", source)
    with pytest.raises(TypeError):
        cast(Any, world.sources)["train"] = None
