"""Recalibration: statistics averaged over batches, modes and momenta restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from incvec.ivt.batchnorm import batchnorm_mode, recalibrate


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))


def test_recalibrate_averages_the_batch_statistics() -> None:
    model = network().eval()
    weights = [p.clone() for p in model.parameters()]
    batches = list(torch.randn(4, 6, 1, 5, 5))
    recalibrate(model, batches)
    maps = [model[0](batch) for batch in batches]
    mean = torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0)
    var = torch.stack([m.var((0, 2, 3), correction=1) for m in maps]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, var)
    assert not model[1].training
    assert model[1].momentum == 0.1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_recalibrate_calls_the_given_forward() -> None:
    model, seen = network(), []
    recalibrate(model, ["a", "b"], lambda batch: seen.append(batch) or model(torch.randn(2, 1, 5, 5)))
    assert seen == ["a", "b"]


def test_model_without_batchnorm_is_left_alone() -> None:
    recalibrate(nn.Sequential(nn.Linear(2, 2)), [torch.randn(3, 2)])


def test_modes_are_restored() -> None:
    model = network()
    model[1].eval()
    with batchnorm_mode(model, training=True):
        assert model[1].training
    assert not model[1].training


def test_modes_and_momenta_are_restored_after_an_error() -> None:
    model = network()

    def fail(batch: torch.Tensor) -> None:
        assert model[1].training
        raise KeyError("no more batches")

    model[1].eval()
    with pytest.raises(KeyError):
        recalibrate(model, [torch.zeros(1)], fail)
    assert not model[1].training
    assert model[1].momentum == 0.1
