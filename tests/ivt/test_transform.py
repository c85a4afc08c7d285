"""S and the teleport against the formulas of the paper, restated here on plain numbers."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import incvec
from incvec.ivt.transform import RIDGE, block_scale, block_teleport_, teleport_

squares = st.one_of(
    st.just(0.0), st.floats(min_value=-36, max_value=36).map(lambda exponent: 10.0**exponent), st.floats(0, 1)
)
weights = st.floats(-100, 100)


def test_scale_is_fbar_t_over_fbar_before_plus_fbar_t() -> None:
    prev, new = torch.tensor([1.0, 1.0, 3.0, 0.5]), torch.tensor([1.0, 2.0, 1.0, 8.0])
    expected = [(a + f) / (a + (a + f)) for a, f in zip(prev.tolist(), new.tolist(), strict=True)]
    assert incvec.scale(prev, new).tolist() == pytest.approx(expected)
    assert incvec.scale(prev, new).tolist()[0] == pytest.approx(2 / 3)


@given(st.lists(st.tuples(squares, squares), min_size=1, max_size=8), st.sampled_from([torch.float32, torch.float64]))
def test_scale_lies_between_one_half_and_one_and_keeps_its_precision(pairs: Any, dtype: Any) -> None:
    prev, new = torch.tensor(pairs, dtype=dtype).unbind(-1)
    s = incvec.scale(prev, new)
    assert s.dtype == dtype
    assert bool(((s >= 0.5) & (s <= 1)).all())
    for a, f, value in zip(prev.tolist(), new.tolist(), s.tolist(), strict=True):
        expected = (a + f) / (2 * a + f) if a + f > 0 else 1.0
        assert value == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-12, 1.0, 1e30, 3e38])
def test_scale_depends_on_the_ratio_only_however_small_or_large_the_squares(size: Any) -> None:
    one = torch.tensor([size])
    assert incvec.scale(one, one).item() == pytest.approx(2 / 3)
    assert incvec.scale(one, torch.zeros(1)).item() == 0.5
    assert incvec.scale(torch.zeros(1), one).item() == 1.0


def test_scale_is_one_at_zero_over_zero() -> None:
    assert incvec.scale(torch.zeros(3), torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_scale_is_a_new_tensor_and_refuses_other_shapes() -> None:
    prev, new = torch.ones(2), torch.ones(2)
    incvec.scale(prev, new)
    assert prev.tolist() == new.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"fisher_prev.*\(2,\).*fisher_new.*\(1,\)"):
        incvec.scale(prev, torch.ones(1))


def test_teleport_moves_the_increment_by_s_and_touches_nothing() -> None:
    theta, anchor = torch.tensor([4.0, -1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0])
    prev, new = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 0.0, 1.0])
    moved = incvec.teleport(theta, anchor, prev, new)
    assert moved.tolist() == pytest.approx([1 + 2 / 3 * 3, 0.0, 2.0])
    assert theta.tolist() == [4.0, -1.0, 2.0]


def test_teleport_of_a_parameter_is_a_plain_tensor_of_its_dtype() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.bfloat16))
    moved = incvec.teleport(parameter, torch.ones(1), torch.ones(1), torch.zeros(1))
    assert (moved.dtype, moved.requires_grad, moved.item()) == (torch.bfloat16, False, 2.0)


@given(st.lists(st.tuples(weights, weights, squares), min_size=1, max_size=8))
def test_teleport_keeps_every_bit_where_the_past_is_silent(rows: Any) -> None:
    theta, anchor, new = torch.tensor(rows).unbind(-1)
    assert torch.equal(incvec.teleport(theta, anchor, torch.zeros_like(new), new), theta)


@given(st.lists(st.tuples(weights, squares, squares), min_size=1, max_size=8))
def test_teleport_of_an_unchanged_model_is_the_identity(rows: Any) -> None:
    theta, prev, new = torch.tensor(rows).unbind(-1)
    assert torch.equal(incvec.teleport(theta, theta.clone(), prev, new), theta)


@given(st.lists(st.tuples(weights, weights), min_size=1, max_size=8))
def test_teleport_goes_to_the_midpoint_where_the_new_task_is_silent(rows: Any) -> None:
    theta, anchor = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    moved = incvec.teleport(theta, anchor, torch.ones_like(theta), torch.zeros_like(theta))
    torch.testing.assert_close(moved, (theta + anchor) / 2, rtol=1e-14, atol=1e-13)


def spectrum(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 3 + 0.1


def test_proposition_1_is_exact_on_diagonal_quadratics() -> None:
    """L_1 = |theta - theta_1|_{H_1}/2, L_2 = |theta - c|_{H_2}/2: the transformed theta_2 minimizes eq. 9."""
    generator = torch.Generator().manual_seed(0)
    h1, h2 = spectrum(generator, 7), spectrum(generator, 7)
    theta_1, c = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    incremental = (h2 * c + h1 * theta_1) / (h1 + h2)  # argmin L_2 + |theta - theta_1|_{H_1}/2, eq. 8
    oracle = (h2 * c + 2 * h1 * theta_1) / (2 * h1 + h2)  # argmin L_1 + L_2 + the same, eq. 9
    torch.testing.assert_close(incvec.teleport(incremental, theta_1, h1, h2), oracle, rtol=1e-14, atol=1e-14)


def test_proposition_1_is_exact_on_full_quadratics_of_a_kernel_slice() -> None:
    generator = torch.Generator().manual_seed(1)
    roots = torch.randn(2, 3, 2, 9, 9, generator=generator, dtype=torch.float64)
    h1, h2 = (root @ root.mT + 0.1 * torch.eye(9, dtype=torch.float64) for root in roots)
    theta_1, c = (torch.randn(3, 2, 9, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    incremental = torch.linalg.solve(h1 + h2, h2 @ c + h1 @ theta_1)
    oracle = torch.linalg.solve(2 * h1 + h2, h2 @ c + 2 * h1 @ theta_1)
    s = block_scale(h1, h2, ridge=0.0)
    torch.testing.assert_close(theta_1 + s @ (incremental - theta_1), oracle, rtol=1e-12, atol=1e-12)


def test_block_scale_has_the_ridge_in_numerator_and_denominator() -> None:
    generator = torch.Generator().manual_seed(2)
    roots = torch.randn(2, 4, 9, 3, generator=generator, dtype=torch.float64)  # rank 3 of 9
    prev, new = (root @ root.mT for root in roots)
    s = block_scale(prev, new)
    for a, f, value in zip(prev, new, s, strict=True):
        r = RIDGE * torch.trace(2 * a + f) * torch.eye(9, dtype=torch.float64)
        expected = torch.linalg.inv(a + (a + f) + r) @ (a + f + r)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    eigenvalues = torch.linalg.eigvals(s).real
    assert eigenvalues.min() >= 0.5 - 1e-6
    assert eigenvalues.max() <= 1 + 1e-6


def test_block_scale_is_the_identity_without_a_past_and_at_zero_over_zero() -> None:
    eye = torch.eye(4, dtype=torch.float64)
    some = torch.diag(torch.tensor([1e-20, 0.0, 2e-20, 1e-22]))
    assert torch.equal(block_scale(torch.zeros(4, 4), some), eye)
    assert torch.equal(block_scale(torch.zeros(4, 4), torch.zeros(4, 4)), eye)


@given(st.lists(st.tuples(squares, squares), min_size=4, max_size=4))
@settings(max_examples=50)
def test_block_scale_of_diagonal_blocks_is_the_diagonal_scale_up_to_the_ridge(pairs: Any) -> None:
    prev, new = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    s = block_scale(torch.diag(prev), torch.diag(new)).diagonal()
    exact = [(Fraction(a), Fraction(f)) for a, f in pairs]  # the smallest squares times the ridge are no float
    r = Fraction(RIDGE) * sum(2 * a + f for a, f in exact)
    for (a, f), value in zip(exact, s.tolist(), strict=True):
        assert value == pytest.approx(float((a + f + r) / (2 * a + f + r)) if r > 0 else 1.0, rel=1e-9)


def test_block_scale_of_the_smallest_squares() -> None:
    past = torch.diag(torch.tensor([0.0, 5e-324], dtype=torch.float64))
    s = block_scale(past, torch.zeros(2, 2, dtype=torch.float64)).diagonal()
    assert s.tolist() == pytest.approx([1.0, 0.5], rel=2e-6)


def test_many_tensors_teleport_in_place_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("incvec.ivt.transform._CHUNK_ELEMENTS", 10)  # several chunks, some of one tensor
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 4), (5,), (), (2, 2, 3, 3), (1,), (0, 3), (7,)]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float32]
    parameters, anchors, prevs, news = [], [], [], []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        wide = torch.promote_types(dtype, torch.float32)
        draw = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
        parameters.append(draw[0].to(dtype))
        anchors.append(draw[1].to(wide))
        prevs.append(draw[2].square().to(wide))
        news.append(draw[3].square().to(wide))
    rows = list(zip(parameters, anchors, prevs, news, strict=True))
    expected = [incvec.teleport(*row) for row in rows]
    before = [(p.to(a.dtype) - a).norm() for p, a, *_ in rows]
    measured = teleport_(parameters, anchors, prevs, news)
    for (p, a, prev, new), value, distance, row in zip(rows, expected, before, measured, strict=True):
        torch.testing.assert_close(p, value)
        pulled = (1 - incvec.scale(prev, new)).sum()
        after = (p.to(a.dtype) - a).norm()
        want = torch.stack([pulled, distance, after, new.sum(), prev.sum()])
        torch.testing.assert_close(row, want, rtol=2e-2 if p.dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_channels_last_parameters_keep_their_layout() -> None:
    generator = torch.Generator().manual_seed(4)
    draws = [torch.randn(4, 3, 3, 3, generator=generator) for _ in range(2)]
    prev, new = torch.ones(4, 3, 3, 3), torch.rand(4, 3, 3, 3, generator=generator)
    parameter = draws[0].clone().contiguous(memory_format=torch.channels_last)
    teleport_([parameter], [draws[1]], [prev], [new])
    assert parameter.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(parameter, incvec.teleport(draws[0], draws[1], prev, new))


def test_a_convolution_teleports_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("incvec.ivt.transform._CHUNK_BLOCKS", 4)
    generator = torch.Generator().manual_seed(5)
    parameter, anchor = (torch.randn(3, 2, 2, 2, generator=generator) for _ in range(2))
    roots = torch.randn(2, 3, 2, 4, 6, generator=generator)
    prev, new = (root @ root.mT for root in roots)
    old = parameter.clone()
    statistics = block_teleport_(parameter, anchor, prev, new)
    s = block_scale(prev, new)
    for o in range(3):
        for i in range(2):
            v = (old - anchor)[o, i].reshape(4).double()
            torch.testing.assert_close(parameter[o, i].reshape(4), anchor[o, i].reshape(4) + (s[o, i] @ v).float())
    traces = s.diagonal(dim1=-2, dim2=-1).sum()
    assert statistics[0].item() == pytest.approx(old.numel() - traces.item(), rel=1e-5)
    assert statistics[1].item() == pytest.approx((old - anchor).norm().item(), rel=1e-5)
    assert statistics[2].item() == pytest.approx((parameter - anchor).norm().item(), rel=1e-5)
    assert math.isclose(statistics[3].item(), new.diagonal(dim1=-2, dim2=-1).sum().item(), rel_tol=1e-5)
