"""BatchNorm as an affine map: read, teleported, and written with other statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from incvec.ivt.batchnorm import (
    NormMap,
    as_map,
    as_parameters,
    batchnorm_layers,
    fold,
    observe,
    teleported,
    unfold,
    write_maps,
)


@pytest.fixture
def network() -> nn.Sequential:
    """Two convolutions with BatchNorm layers that have been trained, and one on vectors."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(16, 6), nn.BatchNorm1d(6),
    )  # fmt: skip
    for norm in batchnorm_layers(net).values():
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    for _ in range(5):
        net(2 * torch.randn(32, 3, 6, 6) + 1)
    return net


def map_of(norm: nn.Module) -> NormMap:
    return as_map(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)  # type: ignore[arg-type]


def test_layer_in_eval_mode_is_its_map(network: nn.Sequential) -> None:
    x = torch.randn(8, 5, 4, 4)
    norm = network[1].eval()
    slope, offset = map_of(norm)
    assert torch.allclose(norm(x), slope[:, None, None] * x + offset[:, None, None], atol=1e-5)


def test_teleported_map_has_these_parameters() -> None:
    new, old = NormMap(torch.tensor([2.0, 4.0]), torch.ones(2)), NormMap(torch.zeros(2), torch.ones(2) * 3)
    there = teleported(new, old, (torch.tensor([0.5, 1.0]), torch.tensor([0.75, 0.5])))
    assert torch.allclose(there.slope, torch.tensor([1.0, 4.0]))
    assert torch.allclose(there.offset, torch.tensor([1.5, 2.0]))
    weight, bias = as_parameters(there, torch.tensor([1.0, -2.0]), torch.tensor([3.99999, 8.99999]), 1e-5)
    assert torch.allclose(weight, torch.tensor([2.0, 12.0]))  # slope times the deviation
    assert torch.allclose(bias, torch.tensor([2.5, -6.0]))  # offset plus slope times the mean


def test_write_maps_preserves_the_function_with_new_statistics(network: nn.Sequential) -> None:
    """Eval mode gives the same outputs as before; train mode on the probed images gives them too."""
    images = 3 * torch.randn(64, 3, 6, 6) - 2  # a different distribution than that of the statistics
    network.eval()
    before = network(images)
    maps = {norm: map_of(norm) for norm in batchnorm_layers(network).values()}
    network.train()
    assert (network(images) - before).abs().mean() > 0.5  # the effect of the other images

    def probe() -> None:
        network(images)

    write_maps(maps, observe(network, list(maps), probe).moments, probe)
    assert all(norm.training and not norm._forward_pre_hooks for norm in maps)
    inputs = network[0](images)
    assert torch.allclose(network[1].running_mean, inputs.mean((0, 2, 3)), atol=1e-5)  # type: ignore[arg-type]
    network.eval()
    assert torch.allclose(network(images), before, atol=1e-4)
    network.train()
    assert torch.allclose(network(images), before, atol=1e-4)


def test_moments_are_those_of_the_last_call() -> None:
    norm, other = nn.BatchNorm1d(1), nn.BatchNorm1d(1)

    def probe() -> None:
        x = torch.tensor([[0.0], [2.0], [4.0]])
        norm(100 * x)  # as in a method with a forward pass on other views
        norm(x)

    moments = observe(nn.ModuleList([norm, other]), [norm, other], probe).moments
    assert moments.keys() == {norm}  # the other one was not called
    mean, var = moments[norm]
    assert mean.item() == pytest.approx(2)
    assert var.item() == pytest.approx(8 / 3)
    assert norm.training


def test_unchanged_maps_give_unchanged_weights(network: nn.Sequential) -> None:
    """Maps with the statistics of a batch, written with the statistics of the same batch."""
    images = 3 * torch.randn(64, 3, 6, 6) - 2

    def probe() -> None:
        network(images)

    before = {name: value.clone() for name, value in network.named_parameters()}
    norms = list(batchnorm_layers(network).values())
    moments = observe(network, norms, probe).moments
    maps = {norm: as_map(norm.weight, norm.bias, *moments[norm], norm.eps) for norm in norms}
    write_maps(maps, moments, probe)
    assert all(torch.allclose(value, before[name], atol=1e-5) for name, value in network.named_parameters())


def test_write_maps_without_inputs_changes_nothing(network: nn.Sequential) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    write_maps({norm: map_of(norm) for norm in batchnorm_layers(network).values()}, {}, lambda: None)
    assert all(torch.allclose(value, before[name]) for name, value in network.state_dict().items())


def test_error_in_the_probe_leaves_no_hook(network: nn.Sequential) -> None:
    def probe() -> None:
        raise ValueError("no more memory")

    maps = {norm: map_of(norm) for norm in batchnorm_layers(network).values()}
    with pytest.raises(ValueError, match="memory"):
        write_maps(maps, dict.fromkeys(maps, (torch.zeros(1), torch.zeros(1))), probe)
    assert all(norm.training and not norm._forward_pre_hooks for norm in maps)


# A layer and its norm folded --------------------------------------------------------------------------------


def unfolded(
    product: torch.Tensor, weight: torch.Tensor, anchor: torch.Tensor, new: list[float], old: list[float], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return unfold(product, weight, anchor, torch.tensor(new), torch.tensor(old), torch.full((len(new),), scale))


def test_fold_and_unfold_change_nothing() -> None:
    """Including negative slopes; a zero filter and a filter with slope 0 keep their values."""
    torch.manual_seed(0)
    weight, slopes = torch.randn(4, 2, 3, 3), [2.0, -0.5, 3.0, 0.0]
    weight[2] = 0
    product = fold(weight, torch.tensor(slopes))
    for filters, was, slope in zip(product, weight, slopes, strict=True):
        assert torch.allclose(filters, slope * was)
    filters, slope = unfolded(product, weight, torch.randn(4, 2, 3, 3), slopes, [1.0, 2.0, 3.0, 4.0], 1.0)
    assert torch.allclose(filters, weight, atol=1e-6)
    assert torch.allclose(slope, torch.tensor([2.0, -0.5, 0.0, 0.0]), atol=1e-6)


def test_norms_of_filters_are_interpolated_with_s() -> None:
    weight, anchor = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    product = torch.tensor([[0.0, 8.0], [0.0, 2.0]])  # of any teleport
    filters, slope = unfolded(product, weight, anchor, [2.0, -1.0], [10.0, 1.0], 0.75)
    assert torch.allclose(filters.norm(dim=1), torch.tensor([1 + 0.75 * 4, 4 - 0.75 * 2]))
    assert torch.allclose(slope[:, None] * filters, product)
    assert slope[1] < 0  # filters keep their direction


@pytest.mark.parametrize("scale", [0.5, 0.999, 1.0])
@pytest.mark.parametrize("size", [1e-3, 1e-10, 1e-23, 0.0])
def test_slope_does_not_exceed_those_of_the_two_maps(size: float, scale: float) -> None:
    """A vanished filter, halfway to the anchor, has a sufficient norm for any S, even if squares underflow."""
    weight, anchor = torch.full((1, 4), size), torch.ones(1, 4)
    product = fold(weight, torch.tensor([316.0])).lerp(fold(anchor, torch.tensor([1.0])), 0.5)
    filters, slope = unfolded(product, weight, anchor, [316.0], [1.0], scale)
    assert 0 < slope.item() <= 316.001
    assert torch.allclose(slope * filters, product)
    tiny = torch.full((1, 4), 1e-23)
    filters, slope = unfolded(fold(tiny, torch.tensor([316.0])), tiny, tiny, [316.0], [316.0], scale)
    assert torch.isfinite(filters).all()
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e3])
def test_norm_of_the_anchors_filters_makes_no_difference(factor: float) -> None:
    """The same function with other filter norms gives the same result, between old and new."""
    torch.manual_seed(1)
    now, then, x = torch.randn(3, 5), torch.randn(3, 5), torch.randn(7, 5)
    new, old = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.7, 1.5, 1.0])
    wanted = 0.6 * (x @ (new[:, None] * now).T) + 0.4 * (x @ (old[:, None] * then).T)
    product = fold(now, new).lerp(fold(factor * then, old / factor), 0.4)
    filters, slope = unfolded(product, now, factor * then, new.tolist(), (old / factor).tolist(), 0.6)
    assert torch.allclose(x @ (slope[:, None] * filters).T, wanted, atol=1e-4)


def test_preceding_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.biased = (nn.Linear(3, 3, bias=bias) for bias in (False, False, True))
            self.shared = nn.Linear(3, 3, bias=False)
            self.a, self.b, self.c, self.d, self.e, self.f = (nn.BatchNorm1d(3) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(self.first(x))
            x = self.b(self.second(x).relu())  # a ReLU in between
            x = self.d(self.c(self.biased(x)))  # a bias; no layer
            x = self.shared(x)
            return self.e(x) + self.f(x)  # two norms after one layer

    net = Net()

    def probe() -> None:
        net(torch.randn(4, 3))

    norms = list(batchnorm_layers(net).values())
    assert observe(net, norms, probe).layers == {net.a: net.first}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
