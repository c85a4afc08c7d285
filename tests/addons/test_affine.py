"""BatchNorm as an affine map: told, taken back, and told again by other statistics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from incvec.addons.affine import Affine, moments, norms_of, renormalise


@pytest.fixture
def network() -> nn.Sequential:
    """Two convolutions with norms that have lived, and a norm of vectors."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(16, 6), nn.BatchNorm1d(6),
    )  # fmt: skip
    for norm in norms_of(net).values():
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    for _ in range(5):
        net(2 * torch.randn(32, 3, 6, 6) + 1)
    return net


def map_of(norm: nn.Module) -> Affine:
    return Affine.of(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)  # type: ignore[arg-type]


def test_a_layer_on_its_running_statistics_is_its_map(network: nn.Sequential) -> None:
    x = torch.randn(8, 5, 4, 4)
    norm = network[1].eval()
    slope, offset = map_of(norm)
    assert torch.allclose(norm(x), slope[:, None, None] * x + offset[:, None, None], atol=1e-5)


def test_taken_back_and_told() -> None:
    norm = nn.BatchNorm1d(2)
    norm.running_mean, norm.running_var = torch.tensor([1.0, -2.0]), torch.tensor([3.99999, 8.99999])
    new, old = Affine(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0])), Affine(torch.zeros(2), torch.ones(2) * 3)
    there = new.teleported(old, (torch.tensor([0.5, 1.0]), torch.tensor([0.75, 0.5])))
    assert torch.allclose(there.slope, torch.tensor([1.0, 4.0]))
    assert torch.allclose(there.offset, torch.tensor([1.5, 2.0]))
    there.tell(norm)
    assert torch.allclose(norm.weight, torch.tensor([2.0, 12.0]))  # slope times the deviation
    assert torch.allclose(norm.bias, torch.tensor([2.5, -6.0]))  # offset plus slope times the mean


def test_renormalising_changes_no_function_but_whose_statistics_tell_it(network: nn.Sequential) -> None:
    """Evaluation stays what it was; training on the images looked at now does the same."""
    images = 3 * torch.randn(64, 3, 6, 6) - 2  # of another kind than the statistics are of
    network.eval()
    before = network(images)
    maps = {norm: map_of(norm) for norm in norms_of(network).values()}
    network.train()
    assert (network(images) - before).abs().mean() > 0.5  # what the change of images alone does

    def looks() -> Iterator[None]:
        network(images)
        yield None

    renormalise(maps, looks())  # the pass in training mode has moved the statistics, so these are no longer the maps
    assert all(norm.training and not norm._forward_pre_hooks for norm in maps)
    inputs = network[0](images)
    assert torch.allclose(network[1].running_mean, inputs.mean((0, 2, 3)), atol=1e-5)  # type: ignore[arg-type]
    network.eval()
    assert torch.allclose(network(images), before, atol=1e-4)
    network.train()
    assert torch.allclose(network(images), before, atol=1e-4)


def test_statistics_are_means_over_looks_and_the_last_call_counts() -> None:
    norm, other = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    inputs = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [8.0]])]

    def looks() -> Iterator[None]:
        for x in inputs:
            norm(100 * x)  # as a method that looks at other views first
            norm(x)
            yield None

    found = moments([norm, other], looks())
    assert found.keys() == {norm}  # nobody called the other one
    mean, var = found[norm]
    assert mean.item() == pytest.approx((1 + 6) / 2)
    assert var.item() == pytest.approx((1 + 4) / 2)
    assert norm.training


def test_where_nothing_went_back_nothing_changes(network: nn.Sequential) -> None:
    """The map by the batches' statistics, told by the same: training goes on as it was."""
    images = 3 * torch.randn(64, 3, 6, 6) - 2

    def looks() -> Iterator[None]:
        network(images)
        yield None

    before = {name: value.clone() for name, value in network.named_parameters()}
    norms = norms_of(network).values()
    found = moments(norms, looks())
    renormalise({norm: Affine.of(norm.weight, norm.bias, *found[norm], norm.eps) for norm in norms}, looks())
    assert all(torch.allclose(value, before[name], atol=1e-5) for name, value in network.named_parameters())


def test_nothing_seen_nothing_changed(network: nn.Sequential) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    renormalise({norm: map_of(norm) for norm in norms_of(network).values()}, ())
    assert all(torch.allclose(value, before[name]) for name, value in network.state_dict().items())


def test_an_error_while_looking_leaves_no_hook(network: nn.Sequential) -> None:
    def looks() -> Iterator[None]:
        raise ValueError("no more memory")
        yield None

    maps = {norm: map_of(norm) for norm in norms_of(network).values()}
    with pytest.raises(ValueError, match="memory"):
        renormalise(maps, looks())
    assert all(norm.training and not norm._forward_pre_hooks for norm in maps)
