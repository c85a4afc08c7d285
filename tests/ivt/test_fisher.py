"""The accumulator of squared gradients, and the names it uses."""

import pytest
import torch
from torch import Tensor, nn

from incvec.ivt.fisher import BatchFisher, add_flat_squares_, add_squares_
from incvec.ivt.names import float_parameters, kernel_names

from .loops import TORCH


def unscaled(fisher: BatchFisher, name: str) -> Tensor:
    """A sum of squares: the accumulator stores it times 2^64."""
    return fisher.sums[name] * 2.0**-64


def test_buffers_hold_sums_and_mean_leaves_them() -> None:
    a, b = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([[3.0]]))
    fisher = BatchFisher({"a": a, "b": b})
    for gradient in ([1.0, -2.0], [3.0, 0.0]):
        a.grad = torch.tensor(gradient)
        fisher.accumulate([("a", a.grad), ("b", b.grad)])
    assert unscaled(fisher, "a").tolist() == [10.0, 4.0]
    assert {name: value.tolist() for name, value in fisher.mean().items()} == {"a": [5.0, 2.0]}
    assert unscaled(fisher, "a").tolist() == [10.0, 4.0]
    b.grad = torch.tensor([[4.0]])
    fisher.accumulate([("a", a.grad), ("b", b.grad)])
    assert fisher.mean()["b"].item() == pytest.approx(16 / 3)  # two of the three steps gave it nothing
    fisher.mean_()
    assert unscaled(fisher, "b").item() == pytest.approx(16 / 3)
    count = fisher.counts()["a"].item()
    fisher.accumulate([("a", None), ("b", None)])  # a step without any gradient
    assert fisher.counts()["a"].item() == count + 1
    fisher.zero_()
    assert fisher.mean()["a"].tolist() == [0.0, 0.0]
    fisher.mean_()  # of no step at all
    assert unscaled(fisher, "a").tolist() == [0.0, 0.0]


def test_parameters_that_step_apart_are_averaged_apart() -> None:
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    for parameter, value in ((a, 1.0), (b, 2.0), (c, 3.0)):
        parameter.grad = torch.tensor([value])
    fisher = BatchFisher({"a": a, "b": b, "c": c})
    for _ in range(4):
        fisher.accumulate([("a", a.grad), ("b", b.grad)])
    fisher.accumulate([("c", c.grad)])
    fisher.accumulate([("b", b.grad), ("c", c.grad)])
    assert [fisher.counts()[name].item() for name in "abc"] == [4, 5, 2]
    assert {name: value.item() for name, value in fisher.mean().items()} == {"a": 1.0, "b": 4.0, "c": 9.0}


def test_a_set_that_steps_for_the_first_time_after_a_mean_is_counted() -> None:
    parameters = {name: nn.Parameter(torch.ones(1)) for name in "ab"}
    fisher = BatchFisher(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.full((1,), 2.0)
    fisher.accumulate((name, p.grad) for name, p in parameters.items())
    fisher.mean()  # lays out the counters
    fisher.zero_()
    for _ in range(3):
        fisher.accumulate([("a", parameters["a"].grad)])
    assert fisher.mean()["a"].item() == 4.0


def test_what_was_restored_does_not_remember_who_stepped() -> None:
    parameters = {"a": nn.Parameter(torch.ones(1))}
    fisher = BatchFisher(parameters)
    parameters["a"].grad = torch.ones(1)
    fisher.accumulate((name, p.grad) for name, p in parameters.items())
    fisher.restore({}, [])
    assert not fisher.seen
    fisher.accumulate((name, p.grad) for name, p in parameters.items())
    assert list(fisher.mean()) == ["a"]


def test_half_precision_gradients_are_squared_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.tensor([1e-4, 3e-4], dtype=torch.float16)  # squares below float16's smallest number
    fisher = BatchFisher({"p": parameter})
    fisher.accumulate([("p", parameter.grad)])
    assert fisher.sums["p"].dtype == torch.float32
    torch.testing.assert_close(unscaled(fisher, "p"), parameter.grad.float() ** 2)


def test_sparse_gradients_are_followed() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    fisher = BatchFisher({"weight": embedding.weight})
    fisher.accumulate([("weight", embedding.weight.grad)])
    assert unscaled(fisher, "weight").tolist() == [[0, 0], [4, 4], [0, 0], [1, 1], [0, 0]]


def test_scaled_steps_are_divided_and_skipped_ones_replaced() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    fisher = BatchFisher({"p": parameter})
    parameter.grad = torch.tensor([8.0, 16.0])
    fisher.accumulate([("p", parameter.grad)], grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0))
    parameter.grad = torch.tensor([float("inf"), float("nan")])
    fisher.accumulate([("p", parameter.grad)], grad_scale=torch.tensor([8.0]), found_inf=torch.tensor([1.0]))
    assert unscaled(fisher, "p").tolist() == [1.0, 4.0]
    assert fisher.counts()["p"].item() == 1


def test_kernel_names_are_convolutions_larger_than_one_pixel() -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1), nn.Sequential(nn.Conv2d(2, 2, (1, 3))), nn.Linear(2, 2)
    )
    network.register_parameter("position", nn.Parameter(torch.zeros(1, 2, 7, 7)))
    assert kernel_names(network) == {"0.weight", "2.0.weight"}
    assert kernel_names(nn.Conv2d(1, 1, 3)) == {"weight"}


@pytest.mark.skipif(TORCH < (2, 1), reason="torch 2.1 is the first to compile on Python 3.11")
def test_names_are_free_of_wrappers() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 3))
    plain = list(dict(network.named_parameters()))
    compiled = torch.compile(network, backend="eager")
    assert list(float_parameters(compiled)) == plain
    assert list(float_parameters(nn.DataParallel(compiled))) == plain
    network[0] = torch.compile(network[0], backend="eager")
    assert "0._orig_mod.weight" in dict(network.named_parameters())
    assert list(float_parameters(network)) == plain
    assert kernel_names(nn.DataParallel(network)) == {"1.weight"}


@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e-20, 1.0, 1e9])
def test_ratios_of_squares_survive_tiny_and_huge_gradients(size: float) -> None:
    """In float32 the square of 1e-25 is zero; F is stored in a unit in which it is not."""
    parameter = nn.Parameter(torch.zeros(2))
    fisher = BatchFisher({"p": parameter})
    for _ in range(2):
        fisher.accumulate([("p", torch.tensor([size, 3 * size]))])
    fisher.mean_()
    small, large = fisher.sums["p"].tolist()
    assert large / small == pytest.approx(9, rel=1e-6 if size > 1e-28 else 0.1)
    assert small == pytest.approx(size**2 * 2.0**64, rel=1e-6 if size > 1e-28 else 0.1)


def test_the_way_of_a_cpu_gives_the_same_bits() -> None:
    """As the way of other devices, which scales the gradients first: of all sizes, also those that have no square."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        size = torch.logspace(-44, 38, 3001, dtype=torch.float64)
        gradient = (size * torch.randn(3001, generator=generator, dtype=torch.float64)).to(dtype)
        gradient[:3] = torch.tensor([0.0, float("inf"), float("nan")])
        for start in (0.0, torch.rand(3001, generator=generator, dtype=dtype) * size.to(dtype).square() * 2.0**64):
            total = torch.zeros_like(gradient) + start
            scaled = gradient * 2.0**32
            expected = total.addcmul(scaled, scaled)
            add_squares_([total], [gradient])
            torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)


def test_the_way_of_captured_steps_gives_the_same_bits() -> None:
    """Sums that lie next to each other, in the parameters' memory formats, as a captured step adds to them."""
    torch.manual_seed(0)
    parameters = {
        "a": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last), "b": torch.randn(5), "c": torch.randn(2, 7),
    }  # fmt: skip
    fisher, other = BatchFisher(parameters), BatchFisher(parameters)
    gradients = [{name: torch.randn_like(p) for name, p in parameters.items()} for _ in range(3)]
    for number, each in enumerate(gradients):
        fisher.accumulate(each.items())
        if number == 0:
            other.accumulate(each.items())
            (names,) = other._flat
        else:
            add_flat_squares_(other._flat[names], [each[name] for name in names])
    for name, total in fisher.sums.items():
        assert torch.equal(total, other.sums[name]), name
        assert total.stride() == parameters[name].stride()
    one, two = (fisher.sums[name].untyped_storage().data_ptr() for name in "ac")
    assert one == two
