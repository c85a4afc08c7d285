"""The little that the shared types compute."""

from __future__ import annotations

import pytest
import torch

from incvec.contracts import Group, Schedule


def test_cosine_is_torchs_annealing_stepped_once_an_epoch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    wanted = []
    for _ in range(5):
        wanted += [optimizer.param_groups[0]["lr"]] * 2
        optimizer.step()
        annealing.step()
    assert Schedule("cosine").factors(5, 2).tolist() == pytest.approx(wanted)


def test_warm_up_by_epoch_and_by_step() -> None:
    assert Schedule(warmup=2).factors(3, 2).tolist() == [0.5, 0.5, 1, 1, 1, 1]
    fine = Schedule("steps", milestones=(2,), warmup=2, by="step").factors(3, 2)
    assert fine.tolist() == pytest.approx([0.5, 0.75, 1, 1, 0.1, 0.1])


def test_a_prefix_ends_at_a_dot() -> None:
    group = Group(("model.head.blocks.1",), 0.1)
    assert group.owns("model.head.blocks.1.weight")
    assert not group.owns("model.head.blocks.10.weight")
