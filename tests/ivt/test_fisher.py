"""The accumulator of squared gradients, and the names it uses."""

import pytest
import torch
from torch import nn

from incvec.ivt.fisher import BatchFisher
from incvec.ivt.names import float_parameters, kernel_names


def test_buffers_hold_sums_and_mean_leaves_them() -> None:
    a, b = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([[3.0]]))
    fisher = BatchFisher({"a": a, "b": b})
    for gradient in ([1.0, -2.0], [3.0, 0.0]):
        a.grad = torch.tensor(gradient)
        fisher.accumulate([("a", a), ("b", b)])
    assert fisher.sums["a"].tolist() == [10.0, 4.0]
    assert {name: value.tolist() for name, value in fisher.mean().items()} == {"a": [5.0, 2.0]}
    assert fisher.sums["a"].tolist() == [10.0, 4.0]
    b.grad = torch.tensor([[4.0]])
    fisher.accumulate([("a", a), ("b", b)])
    assert fisher.mean()["b"].item() == pytest.approx(16 / 3)  # two of the three steps gave it nothing
    fisher.mean_()
    assert fisher.sums["b"].item() == pytest.approx(16 / 3)
    fisher.zero_()
    assert fisher.mean()["a"].tolist() == [0.0, 0.0]
    fisher.mean_()  # of no step at all
    assert fisher.sums["a"].tolist() == [0.0, 0.0]


def test_parameters_that_step_apart_are_averaged_apart() -> None:
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    for parameter, value in ((a, 1.0), (b, 2.0), (c, 3.0)):
        parameter.grad = torch.tensor([value])
    fisher = BatchFisher({"a": a, "b": b, "c": c})
    for _ in range(4):
        fisher.accumulate([("a", a), ("b", b)])
    fisher.accumulate([("c", c)])
    fisher.accumulate([("b", b), ("c", c)])
    assert [fisher.counts()[name].item() for name in "abc"] == [4, 5, 2]
    assert {name: value.item() for name, value in fisher.mean().items()} == {"a": 1.0, "b": 4.0, "c": 9.0}


def test_a_set_that_steps_for_the_first_time_after_a_mean_is_counted() -> None:
    parameters = {name: nn.Parameter(torch.ones(1)) for name in "ab"}
    fisher = BatchFisher(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.full((1,), 2.0)
    fisher.accumulate(parameters.items())
    fisher.mean()  # lays out the counters
    fisher.zero_()
    for _ in range(3):
        fisher.accumulate([("a", parameters["a"])])
    assert fisher.mean()["a"].item() == 4.0


def test_what_was_restored_does_not_remember_who_stepped() -> None:
    parameters = {"a": nn.Parameter(torch.ones(1))}
    fisher = BatchFisher(parameters)
    parameters["a"].grad = torch.ones(1)
    fisher.accumulate(parameters.items())
    fisher.restore({}, [])
    assert not fisher.seen
    fisher.accumulate(parameters.items())
    assert list(fisher.mean()) == ["a"]


def test_half_precision_gradients_are_squared_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.tensor([1e-4, 3e-4], dtype=torch.float16)  # squares below float16's smallest number
    fisher = BatchFisher({"p": parameter})
    fisher.accumulate([("p", parameter)])
    assert fisher.sums["p"].dtype == torch.float32
    torch.testing.assert_close(fisher.sums["p"], parameter.grad.float() ** 2)


def test_sparse_gradients_are_followed() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    fisher = BatchFisher({"weight": embedding.weight})
    fisher.accumulate([("weight", embedding.weight)])
    assert fisher.sums["weight"].tolist() == [[0, 0], [4, 4], [0, 0], [1, 1], [0, 0]]


def test_scaled_steps_are_divided_and_skipped_ones_replaced() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    fisher = BatchFisher({"p": parameter})
    parameter.grad = torch.tensor([8.0, 16.0])
    fisher.accumulate([("p", parameter)], grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0))
    parameter.grad = torch.tensor([float("inf"), float("nan")])
    fisher.accumulate([("p", parameter)], grad_scale=torch.tensor([8.0]), found_inf=torch.tensor([1.0]))
    assert fisher.sums["p"].tolist() == [1.0, 4.0]
    assert fisher.counts()["p"].item() == 1


def test_kernel_names_are_convolutions_larger_than_one_pixel() -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1), nn.Sequential(nn.Conv2d(2, 2, (1, 3))), nn.Linear(2, 2)
    )
    network.register_parameter("position", nn.Parameter(torch.zeros(1, 2, 7, 7)))
    assert kernel_names(network) == {"0.weight", "2.0.weight"}
    assert kernel_names(nn.Conv2d(1, 1, 3)) == {"weight"}


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
