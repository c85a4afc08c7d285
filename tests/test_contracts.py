"""The little that the shared types compute."""

from __future__ import annotations

import pytest
import torch

from incvec.contracts import Group, Schedule


def test_cosine_is_torchs_annealing_stepped_once_an_epoch() -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 5)
    wanted = []
    for _ in range(5):
        wanted.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        annealing.step()
    assert Schedule("cosine").factors(5).tolist() == pytest.approx(wanted)


def test_a_prefix_ends_at_a_dot() -> None:
    group = Group(("model.head.blocks.1",), 0.1)
    assert group.owns("model.head.blocks.1.weight")
    assert not group.owns("model.head.blocks.10.weight")
