"""Each estimator of F against gradients computed one by one."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from incvec.ivt.fisher import BatchFisher, estimate
from incvec.ivt.names import float_parameters, kernel_names


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 9, 4)
    ).double()
    network[1].running_mean.uniform_(-1, 1)
    network[1].running_var.uniform_(0.5, 2)
    return network


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, 3, 3, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 1, 1])


def gradients(network, loss):
    return dict(zip(dict(network.named_parameters()), torch.autograd.grad(loss, network.parameters()), strict=True))


def squared(gradient):
    return gradient**2


def outer(gradient):
    if gradient.dim() != 4:
        return gradient**2
    o, i, k, _ = gradient.shape
    return torch.stack([torch.outer(v, v) for v in gradient.reshape(o * i, k * k)]).reshape(o, i, k * k, k * k)


def mean_over_samples(network, x, term):
    network.eval()
    totals: dict[str, torch.Tensor] = {}
    for index in range(len(x)):
        for name, value in term(index).items():
            totals[name] = totals.get(name, 0) + value / len(x)
    network.train()
    return totals


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(("structure", "square"), [("diagonal", squared), ("kernel", outer)])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_sample_is_the_mean_of_squared_sample_gradients(data, structure, square, chunk_size):
    network, (x, y) = small_network(), data

    def term(i):
        return {n: square(g) for n, g in gradients(network, functional.cross_entropy(network(x[[i]]), y[[i]])).items()}

    want = mean_over_samples(network, x, term)
    got = estimate(
        network,
        lambda batch: functional.cross_entropy(network(batch[0]), batch[1]),
        [(x[:2], y[:2]), (x[2:], y[2:])],
        kind="sample",
        structure=structure,
        chunk_size=chunk_size,
    )
    assert_same(got, want)
    assert all(module.training for module in network.modules())


@pytest.mark.parametrize(("structure", "square"), [("diagonal", squared), ("kernel", outer)])
def test_exact_is_the_expectation_over_the_models_own_labels(data, structure, square):
    network, (x, _) = small_network(), data

    def term(i):
        total: dict[str, torch.Tensor] = {}
        probabilities = network(x[[i]]).softmax(-1)[0].detach()
        for c, p in enumerate(probabilities):
            for name, g in gradients(network, -network(x[[i]]).log_softmax(-1)[0, c]).items():
                total[name] = total.get(name, 0) + p * square(g)
        return total

    want = mean_over_samples(network, x, term)
    got = estimate(network, lambda x: network(x), [x], kind="exact", structure=structure, chunk_size=4)
    assert_same(got, want)


def test_sampled_draws_labels_from_the_model_with_the_given_generator(data):
    network, (x, _) = small_network(), data
    network.eval()
    labels = torch.multinomial(network(x).float().softmax(-1), 1, generator=torch.Generator().manual_seed(7))[:, 0]

    def term(i):
        loss = functional.cross_entropy(network(x[[i]]), labels[[i]])
        return {n: g**2 for n, g in gradients(network, loss).items()}

    want = mean_over_samples(network, x, term)
    state = torch.random.get_rng_state()
    got = estimate(network, network, [x], kind="sampled", generator=torch.Generator().manual_seed(7))
    assert_same(got, want)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"torch\.Generator"):
        estimate(network, network, [x], kind="sampled")


def test_many_sampled_labels_approach_the_exact_fisher(data):
    network, (x, _) = small_network(), data
    exact = estimate(network, network, [x], kind="exact")
    assert all(type(parameter) is nn.Parameter for parameter in network.parameters())
    generator = torch.Generator().manual_seed(3)
    sampled = estimate(network, network, [x] * 300, kind="sampled", generator=generator)
    for name in exact:
        assert sampled[name].sum().item() == pytest.approx(exact[name].sum().item(), rel=0.1)


def test_batch_squares_the_mean_gradient_of_each_batch(data):
    network, (x, y) = small_network(), data
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    got = estimate(network, lambda batch: functional.cross_entropy(network(batch[0]), batch[1]), batches)
    network.eval()
    each = [gradients(network, functional.cross_entropy(network(a), b)) for a, b in batches]
    assert_same(got, {name: (each[0][name] ** 2 + each[1][name] ** 2) / 2 for name in each[0]})


def test_frozen_parameters_stay_out_of_an_estimate(data):
    network, (x, _) = small_network(), data
    network[0].requires_grad_(False)
    assert "0.weight" not in estimate(network, network, [x], kind="exact")


def test_a_batch_without_one_sample_a_row_is_refused(data):
    network, (x, _) = small_network(), data
    with pytest.raises(ValueError, match="one sample a row"):
        estimate(network, lambda batch: network(batch[0]), [(x, torch.zeros(3))], kind="exact")
    with pytest.raises(ValueError, match="'batch', 'sample', 'exact', 'sampled'"):
        estimate(network, network, [x], kind="empirical")


def test_buffers_hold_sums_and_mean_leaves_them():
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


def test_parameters_that_step_apart_are_averaged_apart():
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


def test_a_set_that_steps_for_the_first_time_after_a_mean_is_counted():
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


def test_what_was_restored_does_not_remember_who_stepped():
    parameters = {"a": nn.Parameter(torch.ones(1))}
    fisher = BatchFisher(parameters)
    parameters["a"].grad = torch.ones(1)
    fisher.accumulate(parameters.items())
    fisher.restore({}, [])
    assert not fisher.seen
    fisher.accumulate(parameters.items())
    assert list(fisher.mean()) == ["a"]


def test_half_precision_gradients_are_squared_in_float32():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.tensor([1e-4, 3e-4], dtype=torch.float16)  # squares below float16's smallest number
    fisher = BatchFisher({"p": parameter})
    fisher.accumulate([("p", parameter)])
    assert fisher.sums["p"].dtype == torch.float32
    torch.testing.assert_close(fisher.sums["p"], parameter.grad.float() ** 2)


def test_sparse_gradients_are_followed():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    fisher = BatchFisher({"weight": embedding.weight})
    fisher.accumulate([("weight", embedding.weight)])
    assert fisher.sums["weight"].tolist() == [[0, 0], [4, 4], [0, 0], [1, 1], [0, 0]]


def test_scaled_steps_are_divided_and_skipped_ones_replaced():
    parameter = nn.Parameter(torch.zeros(2))
    fisher = BatchFisher({"p": parameter})
    parameter.grad = torch.tensor([8.0, 16.0])
    fisher.accumulate([("p", parameter)], grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0))
    parameter.grad = torch.tensor([float("inf"), float("nan")])
    fisher.accumulate([("p", parameter)], grad_scale=torch.tensor([8.0]), found_inf=torch.tensor([1.0]))
    assert fisher.sums["p"].tolist() == [1.0, 4.0]
    assert fisher.counts()["p"].item() == 1


def test_kernel_names_are_convolutions_larger_than_one_pixel():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1), nn.Sequential(nn.Conv2d(2, 2, (1, 3))), nn.Linear(2, 2)
    )
    network.register_parameter("position", nn.Parameter(torch.zeros(1, 2, 7, 7)))
    assert kernel_names(network) == {"0.weight", "2.0.weight"}
    assert kernel_names(nn.Conv2d(1, 1, 3)) == {"weight"}


def test_names_are_free_of_wrappers():
    network = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 3))
    plain = list(dict(network.named_parameters()))
    compiled = torch.compile(network, backend="eager")
    assert list(float_parameters(compiled)) == plain
    assert list(float_parameters(nn.DataParallel(compiled))) == plain
    network[0] = torch.compile(network[0], backend="eager")
    assert "0._orig_mod.weight" in dict(network.named_parameters())
    assert list(float_parameters(network)) == plain
    assert kernel_names(nn.DataParallel(network)) == {"1.weight"}
