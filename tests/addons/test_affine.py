"""BatchNorm as an affine map: told, taken back, and told again by other statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from incvec.addons.affine import Affine, Folded, input_moments, preceding_layers, write_maps
from incvec.nets.batchnorm import batchnorm_layers


@pytest.fixture
def network() -> nn.Sequential:
    """Two convolutions with norms that have lived, and a norm of vectors."""
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


def map_of(norm: nn.Module) -> Affine:
    return Affine.from_batchnorm(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)  # type: ignore[arg-type]


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
    there.write_to(norm)
    assert torch.allclose(norm.weight, torch.tensor([2.0, 12.0]))  # slope times the deviation
    assert torch.allclose(norm.bias, torch.tensor([2.5, -6.0]))  # offset plus slope times the mean


def test_renormalizing_changes_no_function_but_whose_statistics_tell_it(network: nn.Sequential) -> None:
    """Evaluation stays what it was; training on the images looked at now does the same."""
    images = 3 * torch.randn(64, 3, 6, 6) - 2  # of another kind than the statistics are of
    network.eval()
    before = network(images)
    maps = {norm: map_of(norm) for norm in batchnorm_layers(network).values()}
    network.train()
    assert (network(images) - before).abs().mean() > 0.5  # what the change of images alone does

    def look() -> None:
        network(images)

    write_maps(maps, look)  # the pass in training mode has moved the statistics, so these are no longer the maps
    assert all(norm.training and not norm._forward_pre_hooks for norm in maps)
    inputs = network[0](images)
    assert torch.allclose(network[1].running_mean, inputs.mean((0, 2, 3)), atol=1e-5)  # type: ignore[arg-type]
    network.eval()
    assert torch.allclose(network(images), before, atol=1e-4)
    network.train()
    assert torch.allclose(network(images), before, atol=1e-4)


def test_statistics_of_what_is_seen_and_the_last_call_counts() -> None:
    norm, other = nn.BatchNorm1d(1), nn.BatchNorm1d(1)

    def look() -> None:
        x = torch.tensor([[0.0], [2.0], [4.0]])
        norm(100 * x)  # as a method that looks at other views first
        norm(x)

    found = input_moments([norm, other], look)
    assert found.keys() == {norm}  # nobody called the other one
    mean, var = found[norm]
    assert mean.item() == pytest.approx(2)
    assert var.item() == pytest.approx(8 / 3)
    assert norm.training


def test_where_nothing_went_back_nothing_changes(network: nn.Sequential) -> None:
    """The map by the batches' statistics, told by the same: training goes on as it was."""
    images = 3 * torch.randn(64, 3, 6, 6) - 2

    def look() -> None:
        network(images)

    before = {name: value.clone() for name, value in network.named_parameters()}
    norms = batchnorm_layers(network).values()
    found = input_moments(norms, look)
    write_maps({norm: Affine.from_batchnorm(norm.weight, norm.bias, *found[norm], norm.eps) for norm in norms}, look)
    assert all(torch.allclose(value, before[name], atol=1e-5) for name, value in network.named_parameters())


def test_nothing_seen_nothing_changed(network: nn.Sequential) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    write_maps({norm: map_of(norm) for norm in batchnorm_layers(network).values()}, lambda: None)
    assert all(torch.allclose(value, before[name]) for name, value in network.state_dict().items())


def test_an_error_while_looking_leaves_no_hook(network: nn.Sequential) -> None:
    def look() -> None:
        raise ValueError("no more memory")

    maps = {norm: map_of(norm) for norm in batchnorm_layers(network).values()}
    with pytest.raises(ValueError, match="memory"):
        write_maps(maps, look)
    assert all(norm.training and not norm._forward_pre_hooks for norm in maps)


# A layer and its norm as one -------------------------------------------------------------------------------


def fold(weight: torch.Tensor, anchor: torch.Tensor, new: list[float], old: list[float], scale: float) -> Folded:
    nothing = torch.zeros(len(new))
    maps = (Affine(torch.tensor(slopes), nothing) for slopes in (new, old))
    return Folded(weight, anchor, *maps, torch.full((len(new),), scale))


def test_folded_and_parted_at_once_nothing_changes() -> None:
    """Negative slopes too; and a filter of nothing, and one that a slope of nothing hides, stay as they are."""
    torch.manual_seed(0)
    weight, slopes = torch.randn(4, 2, 3, 3), [2.0, -0.5, 3.0, 0.0]
    weight[2] = 0
    before = weight.clone()
    product = fold(weight, torch.randn(4, 2, 3, 3), slopes, [1.0, 2.0, 3.0, 4.0], 1.0)
    for filters, was, slope in zip(weight, before, slopes, strict=True):
        assert torch.allclose(filters, slope * was)
    slope = product.unfold()
    assert torch.allclose(weight, before, atol=1e-6)
    assert torch.allclose(slope, torch.tensor([2.0, -0.5, 0.0, 0.0]), atol=1e-6)


def test_filters_are_as_long_as_s_says() -> None:
    weight, anchor = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    product = fold(weight, anchor, [2.0, -1.0], [10.0, 1.0], 0.75)
    assert torch.allclose(product.anchor, torch.tensor([[10.0, 0.0], [0.0, 4.0]]))
    weight.copy_(torch.tensor([[0.0, 8.0], [0.0, 2.0]]))  # wherever they are taken
    slope = product.unfold()
    assert torch.allclose(weight.norm(dim=1), torch.tensor([1 + 0.75 * 4, 4 - 0.75 * 2]))
    assert torch.allclose(slope[:, None] * weight, torch.tensor([[0.0, 8.0], [0.0, 2.0]]))
    assert slope[1] < 0  # filters point where they pointed before


@pytest.mark.parametrize("scale", [0.5, 0.999, 1.0])
@pytest.mark.parametrize("size", [1e-3, 1e-10, 1e-23, 0.0])
def test_no_slope_is_steeper_than_those_it_lies_between(size: float, scale: float) -> None:
    """A filter that has vanished goes half the way back, and is long enough then, whatever S of the slope says.

    Down to squares that are too small for a number.
    """
    weight = torch.full((1, 4), size)
    product = fold(weight, torch.ones(1, 4), [316.0], [1.0], scale)
    weight.lerp_(product.anchor, 0.5)
    wanted = weight.clone()
    slope = product.unfold()
    assert 0 < slope.item() <= 316.001
    assert torch.allclose(slope * weight, wanted)
    tiny = torch.full((1, 4), 1e-23)
    both = fold(tiny, torch.full((1, 4), 1e-23), [316.0], [316.0], scale)
    assert torch.isfinite(both.unfold()).all()
    assert torch.isfinite(tiny).all()


@pytest.mark.parametrize("longer", [1.0, 1e-3, 1e3])
def test_how_long_the_anchors_filters_are_makes_no_difference_to_one_s(longer: float) -> None:
    """The same function, told by other lengths: what goes back is the same, and lies between old and new."""
    torch.manual_seed(1)
    now, then, x = torch.randn(3, 5), torch.randn(3, 5), torch.randn(7, 5)
    new, old = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.7, 1.5, 1.0])
    wanted = 0.6 * (x @ (new[:, None] * now).T) + 0.4 * (x @ (old[:, None] * then).T)
    weight = now.clone()
    product = fold(weight, longer * then, new.tolist(), (old / longer).tolist(), 0.6)
    weight.lerp_(product.anchor, 0.4)
    slope = product.unfold()
    assert torch.allclose(x @ (slope[:, None] * weight).T, wanted, atol=1e-4)


def test_which_layer_feeds_a_norm() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.biased = (nn.Linear(3, 3, bias=bias) for bias in (False, False, True))
            self.shared = nn.Linear(3, 3, bias=False)
            self.a, self.b, self.c, self.d, self.e, self.f = (nn.BatchNorm1d(3) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(self.first(x))
            x = self.b(self.second(x).relu())  # not as it is
            x = self.d(self.c(self.biased(x)))  # a bias, and no layer at all
            x = self.shared(x)
            return self.e(x) + self.f(x)  # two norms of one layer

    net = Net()

    def look() -> None:
        net(torch.randn(4, 3))

    assert preceding_layers(net, look) == {net.a: net.first}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
