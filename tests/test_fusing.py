"""Marked functions give the same values compiled and plain, gradients included."""

from __future__ import annotations

import torch

from incvec.fusing import fused, fusing

calls: list[bool] = []


@fused
def energy(x: torch.Tensor, power: int) -> torch.Tensor:
    calls.append(torch.compiler.is_compiling())
    return (x**power).sum(1).sqrt().mean()


def test_plain_unless_asked_for() -> None:
    calls.clear()
    energy(torch.ones(2, 3), 2)
    assert calls == [False]


def test_compiled_equals_plain() -> None:
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain = energy(x, 2)
    (want,) = torch.autograd.grad(plain, x)
    with fusing():
        compiled = energy(x, 2)
    (got,) = torch.autograd.grad(compiled, x)
    assert compiled.grad_fn is not None
    assert "Compiled" in type(compiled.grad_fn).__name__
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(got, want)


def test_the_switch_goes_back_after_an_error() -> None:
    try:
        with fusing():
            raise KeyError
    except KeyError:
        pass
    calls.clear()
    energy(torch.ones(2, 3), 2)
    assert calls == [False]
