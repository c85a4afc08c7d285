"""Each estimator of the Fisher information against gradients computed one by one."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from incvec.methods.fisher import FisherKind, squared_gradients


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 9, 4)
    ).double()
    network[1].running_mean.uniform_(-1, 1)
    network[1].running_var.uniform_(0.5, 2)
    return network


X = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 3, 1, 1])


def estimate(
    network: nn.Module,
    function: Callable[[tuple[Tensor, ...]], Tensor],
    batches: Iterable[tuple[Tensor, ...]],
    kind: FisherKind,
    generator: torch.Generator | None = None,
    chunk_size: int = 16,
) -> dict[str, Tensor]:
    """The mean over all batches."""
    totals: dict[str, Tensor] = {}
    terms = 0
    for rows in batches:
        squares, count = squared_gradients(
            network, function, rows, kind=kind, generator=generator, chunk_size=chunk_size
        )
        totals = {name: totals.get(name, 0) + square for name, square in squares.items()}
        terms += count
    return {name: total / terms for name, total in totals.items()}


def gradients(network: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(dict(network.named_parameters()), torch.autograd.grad(loss, network.parameters()), strict=True))


def mean_over_samples(network: nn.Module, term: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    network.eval()
    totals: dict[str, Tensor] = {}
    for index in range(len(X)):
        for name, value in term(index).items():
            totals[name] = totals.get(name, 0) + value / len(X)
    network.train()
    return totals


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_sample_is_the_mean_of_squared_sample_gradients(network: nn.Sequential, chunk_size: int) -> None:
    def term(i: int) -> dict[str, Tensor]:
        return {n: g**2 for n, g in gradients(network, functional.cross_entropy(network(X[[i]]), Y[[i]])).items()}

    expected = mean_over_samples(network, term)
    actual = estimate(
        network,
        lambda rows: functional.cross_entropy(network(rows[0]), rows[1]),
        [(X[:2], Y[:2]), (X[2:], Y[2:])],
        "sample",
        chunk_size=chunk_size,
    )
    assert_same(actual, expected)
    assert all(module.training for module in network.modules())


def test_exact_is_the_expectation_over_the_predicted_labels(network: nn.Sequential) -> None:
    def term(i: int) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        probabilities = network(X[[i]]).softmax(-1)[0].detach()
        for c, p in enumerate(probabilities):
            for name, g in gradients(network, -network(X[[i]]).log_softmax(-1)[0, c]).items():
                total[name] = total.get(name, 0) + p * g**2
        return total

    expected = mean_over_samples(network, term)
    running_mean = network[1].running_mean.clone()
    assert_same(estimate(network, lambda rows: network(rows[0]), [(X,)], "exact", chunk_size=4), expected)
    assert torch.equal(network[1].running_mean, running_mean)
    assert all(type(parameter) is nn.Parameter for parameter in network.parameters())


def test_sampled_draws_labels_from_the_model_with_the_given_generator(network: nn.Sequential) -> None:
    network.eval()
    labels = torch.multinomial(network(X).float().softmax(-1), 1, generator=torch.Generator().manual_seed(7))[:, 0]

    def term(i: int) -> dict[str, Tensor]:
        loss = functional.cross_entropy(network(X[[i]]), labels[[i]])
        return {n: g**2 for n, g in gradients(network, loss).items()}

    expected = mean_over_samples(network, term)
    state = torch.random.get_rng_state()

    def logits(rows: tuple[Tensor, ...]) -> Tensor:
        return network(rows[0])

    assert_same(estimate(network, logits, [(X,)], "sampled", torch.Generator().manual_seed(7)), expected)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"torch\.Generator"):
        estimate(network, logits, [(X,)], "sampled")
    exact = estimate(network, logits, [(X,)], "exact")
    many = estimate(network, logits, [(X,)] * 300, "sampled", torch.Generator().manual_seed(3))
    for name in exact:
        assert many[name].sum().item() == pytest.approx(exact[name].sum().item(), rel=0.1)


def test_batch_squares_the_mean_gradient_of_each_batch(network: nn.Sequential) -> None:
    batches = [(X[:2], Y[:2]), (X[2:], Y[2:])]
    actual = estimate(network, lambda rows: functional.cross_entropy(network(rows[0]), rows[1]), batches, "batch")
    network.eval()
    each = [gradients(network, functional.cross_entropy(network(a), b)) for a, b in batches]
    assert_same(actual, {name: (each[0][name] ** 2 + each[1][name] ** 2) / 2 for name in each[0]})


def test_unknown_kind_is_refused(network: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="'batch', 'sample', 'exact', 'sampled'"):
        estimate(network, lambda rows: network(rows[0]), [(X,)], "empirical")  # type: ignore[arg-type]
