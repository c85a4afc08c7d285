"""Heads: their formulas, and that growing adds a block and touches nothing else."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from incvec.nets import CosineHead, Head, LinearHead, ProxyHead, mean_row_norm

HEADS: dict[str, Callable[[], Head]] = {
    "linear": lambda: LinearHead(5),
    "linear, default": lambda: LinearHead(5, init="default"),
    "linear, four outputs": lambda: LinearHead(5, outputs_per_class=4),
    "cosine": lambda: CosineHead(5),
    "proxy": lambda: ProxyHead(5, proxies=3),
}
every_head = pytest.mark.parametrize("make", HEADS.values(), ids=HEADS.keys())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(batch: int = 4, width: int = 5) -> Tensor:
    return torch.randn(batch, width, generator=seeded(99))


@every_head
def test_growing_appends_and_touches_nothing_else(make: Callable[[], Head]) -> None:
    head = make()
    head.grow(3, seeded())
    head.set_block(0, torch.randn(head[0].weight.shape, generator=seeded(7)))
    names = [name for name, _ in head.named_parameters()]
    objects = dict(head.named_parameters())
    values = {name: p.detach().clone() for name, p in objects.items()}
    old_scores = head(features())
    block = head.grow(2, seeded(1))
    assert block is head[1]
    assert [name for name, _ in head.named_parameters()][: len(names)] == names
    for name, parameter in head.named_parameters():
        if name in values:
            assert parameter is objects[name]
            assert torch.equal(parameter, values[name])
        else:
            assert name.startswith("blocks.1.")
    assert head.n_classes == 5
    outputs = head.rows_per_class if isinstance(head, LinearHead) else 1
    scores = head(features())
    assert scores.shape == (4, 5 * outputs)
    torch.testing.assert_close(scores[:, : 3 * outputs], old_scores)


def test_parameter_names() -> None:
    linear, cosine, proxy = LinearHead(5), CosineHead(5), ProxyHead(5)
    for head in (linear, cosine, proxy):
        head.grow(2, seeded())
        head.grow(1, seeded())
    assert set(linear.state_dict()) == {
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
        "blocks.1.bias",
    }
    assert set(cosine.state_dict()) == {"blocks.0.weight", "blocks.1.weight", "scale"}
    assert set(proxy.state_dict()) == {"blocks.0.weight", "blocks.1.weight", "scale"}
    assert not list(linear.named_buffers())


@every_head
def test_drawn_from_the_generator_and_nothing_else(make: Callable[[], Head]) -> None:
    state = torch.random.get_rng_state()
    heads = [make(), make(), make()]
    for head, seed in zip(heads, (3, 3, 4), strict=True):
        head.grow(2, seeded(seed))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(heads[0][0].weight, heads[1][0].weight)
    assert not torch.equal(heads[0][0].weight, heads[2][0].weight)


@every_head
def test_new_blocks_follow_the_head(make: Callable[[], Head]) -> None:
    head = make().double().eval()
    block = head.grow(2, seeded())
    assert {p.dtype for p in head.parameters()} == {torch.float64}
    assert not block.training
    twin = copy.deepcopy(head)
    twin.grow(1, seeded())
    assert twin[1].weight.dtype == torch.float64
    assert (head.n_classes, twin.n_classes) == (2, 3)
    moved = make().to("meta")
    moved.grow(2, seeded())
    assert moved[0].weight.device.type == "meta"


@every_head
def test_scores_are_float32_under_autocast(make: Callable[[], Head]) -> None:
    head = make()
    head.grow(3, seeded())
    h = features().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = head(h)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, head(h.float()), rtol=0, atol=0)


def test_linear_scores_by_hand() -> None:
    head = LinearHead(2)
    head.grow(1, seeded())
    head.grow(2, seeded())
    head.set_block(0, torch.tensor([[1.0, 2.0]]), torch.tensor([10.0]))
    head.set_block(1, torch.tensor([[3.0, 0.0], [0.0, -1.0]]), torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(
        head(torch.tensor([[1.0, 1.0], [2.0, 4.0]])), torch.tensor([[13.0, 3, -0.5], [20, 6, -3.5]])
    )


def test_linear_initial_values() -> None:
    d, n = 48, 400
    kaiming, default = LinearHead(d), LinearHead(d, init="default")
    for head in (kaiming, default):
        head.grow(n, seeded())
    assert kaiming[0].weight.abs().max().item() == pytest.approx(math.sqrt(3 / d), rel=1e-2)
    assert kaiming[0].weight.std().item() == pytest.approx(1 / math.sqrt(d), rel=2e-2)
    assert kaiming[0].bias is not None
    assert (kaiming[0].bias == 0).all()
    assert default[0].weight.abs().max().item() == pytest.approx(1 / math.sqrt(d), rel=1e-2)
    assert default[0].bias is not None
    assert default[0].bias.abs().max().item() == pytest.approx(1 / math.sqrt(d), rel=5e-2)
    with pytest.raises(ValueError, match="'xavier'"):
        LinearHead(d, init="xavier")  # type: ignore[arg-type]


def test_cosine_scores_by_hand() -> None:
    head = CosineHead(2, scale=3.0)
    head.grow(2, seeded())
    head.set_block(0, torch.tensor([[2.0, 0.0], [0.0, -5.0]]))
    h = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(head.cosines(h), torch.tensor([[0.6, -0.8]]))
    torch.testing.assert_close(head(h), torch.tensor([[1.8, -2.4]]))
    assert CosineHead(2).scale.item() == 1
    fresh = CosineHead(64)
    fresh.grow(300, seeded())
    assert fresh[0].weight.abs().max().item() == pytest.approx(1 / 8, rel=1e-2)


def test_proxy_scores_restated() -> None:
    """Class by class and proxy by proxy, from squared distances, in plain Python."""
    head = ProxyHead(3, proxies=2)
    head.grow(2, seeded(1))
    head.grow(1, seeded(2))
    h = features(4, 3)
    rows = [block.weight[j].tolist() for block in head for j in range(block.weight.shape[0])]

    def unit(v: list[float]) -> list[float]:
        length = math.sqrt(sum(x * x for x in v))
        return [x / length for x in v]

    expected = []
    for sample in h.tolist():
        scores = []
        for c in range(3):
            s = [-sum((a - b) ** 2 for a, b in zip(unit(sample), unit(rows[2 * c + k]), strict=True)) for k in (0, 1)]
            total = sum(math.exp(x) for x in s)
            scores.append(sum(math.exp(x) / total * x for x in s))
        expected.append(scores)
    torch.testing.assert_close(head(h), torch.tensor(expected))
    assert head.similarities(h).shape == (4, 3, 2)
    assert head.similarities(h).max() <= 0
    assert head.similarities(h).min() >= -4
    assert head.scale.item() == 1


def test_proxy_scale_is_left_to_the_loss() -> None:
    head = ProxyHead(3, proxies=2)
    head.grow(2, seeded())
    before = head(features(4, 3))
    head.scale.data.fill_(5)
    assert torch.equal(head(features(4, 3)), before)
    assert head.proxies == 2
    assert ProxyHead(3).proxies == 10


def test_proxy_initial_values() -> None:
    head = ProxyHead(64)
    head.grow(50, seeded())
    assert head[0].weight.shape == (500, 64)
    assert head[0].weight.std().item() == pytest.approx(1 / 8, rel=2e-2)


def test_mean_row_norm() -> None:
    head = CosineHead(2)
    head.grow(1, seeded())
    head.grow(2, seeded())
    head.set_block(0, torch.tensor([[3.0, 4.0]]))
    head.set_block(1, torch.tensor([[0.0, 1.0], [6.0, 8.0]]))
    assert mean_row_norm(head).item() == pytest.approx(16 / 3)
    assert mean_row_norm(head, 1).item() == 5
    assert not mean_row_norm(head).requires_grad
    with pytest.raises(ValueError, match="no blocks"):
        mean_row_norm(head, 0)


def test_set_block_writes_in_place_and_checks_shapes() -> None:
    head = LinearHead(2)
    weight = head.grow(2, seeded()).weight
    head.set_block(0, torch.eye(2))
    assert head[0].weight is weight
    assert weight.requires_grad
    assert torch.equal(weight, torch.eye(2))
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(2, 3\)"):
        head.set_block(0, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(2,\).*\(1,\)"):
        head.set_block(0, torch.eye(2), torch.ones(1))
    cosine = CosineHead(2)
    cosine.grow(2, seeded())
    with pytest.raises(ValueError, match="no bias"):
        cosine.set_block(0, torch.eye(2), torch.ones(2))


def test_impossible_requests_are_refused() -> None:
    head = LinearHead(2)
    with pytest.raises(ValueError, match="no classes yet"):
        head(torch.ones(1, 2))
    with pytest.raises(ValueError, match="got 0"):
        head.grow(0, seeded())
    with pytest.raises(ValueError, match="width"):
        ProxyHead(2, proxies=0)
