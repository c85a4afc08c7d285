"""Fused functions compute the same values and gradients compiled and as written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from incvec.fused import fused, fusing
from incvec.methods.podnet import nca_loss
from incvec.nets import build_backbone

calls: list[bool] = []


@fused
def energy(x: torch.Tensor, power: int) -> torch.Tensor:
    calls.append(torch.compiler.is_compiling())
    return (x**power).sum(1).sqrt().mean()


def test_function_is_not_compiled_outside_of_fusing() -> None:
    calls.clear()
    energy(torch.ones(2, 3), 2)
    assert calls == [False]


def test_compiled_function_equals_the_plain_one() -> None:
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


def test_fusing_ends_after_an_error() -> None:
    try:
        with fusing():
            raise KeyError
    except KeyError:
        pass
    calls.clear()
    energy(torch.ones(2, 3), 2)
    assert calls == [False]


def test_dynamic_sizes_of_one_function_do_not_affect_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second function is compiled once, for its only size."""
    compiled: list[tuple[str, int]] = []

    def note(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nodes = list(module.graph.nodes)
        called = str([node.target for node in nodes if node.op.startswith("call")])
        compiled.append(("sqrt" if "sqrt" in called else "mul", sum(node.op == "placeholder" for node in nodes)))
        return module.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **named: real(f, backend=note, **named))

    @fused
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @fused
    def rooted(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()

    with fusing():
        for size in (3, 4, 5, 6):
            doubled(torch.ones(size))
            rooted(torch.ones(7))
    assert compiled == [("mul", 1), ("sqrt", 1), ("mul", 2)]  # the second input is the dynamic size


def test_loss_of_a_growing_head_is_compiled_for_any_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.fx.GraphModule] = []

    def note(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    torch._dynamo.reset()  # forget the sizes seen by `nca_loss`, whose name this function shares
    plain = nca_loss.__wrapped__  # type: ignore[attr-defined]
    own = fused(plain)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **named: real(f, backend=note, **named))
    with fusing():
        for classes in (5, 6, 7, 8, 9):
            given = (torch.rand(4, classes), torch.arange(4), torch.tensor(2.0), 0.6)
            torch.testing.assert_close(own(*given), plain(*given))
    assert len(compiled) == 2  # the first size, then any


@pytest.mark.slow
def test_compiled_backbone_equals_a_plain_one() -> None:
    """Features, gradients and running statistics. A copy of the network shares the compiled code."""
    plain = build_backbone("tiny", channels=1, generator=torch.Generator().manual_seed(0)).train()
    compiled = copy.deepcopy(plain)
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    plain(images).features.square().sum().backward()
    with fusing():
        compiled(images).features.square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)
    for (name, a), (_, b) in zip(plain.named_buffers(), compiled.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    other = copy.deepcopy(compiled)
    with fusing(), torch.compiler.set_stance("fail_on_recompile"):
        other(images)


def test_requires_grad_is_part_of_the_key_of_compiled_code() -> None:
    """Without it, the bug shows on a GPU only. So the key itself is tested."""
    block = build_backbone("tiny", channels=1)
    block.stem.requires_grad_(False)
    keys: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **named: lambda *arguments: keys.append(arguments[0]))
        watched = fused(lambda module: module)
        with fusing():
            watched(block)
            block.requires_grad_(True)
            watched(block)
    assert len(set(keys)) == 2


def test_fusing_makes_the_compiler_check_every_parameter() -> None:
    import torch._dynamo

    before = torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags
    with fusing():
        assert not torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags
        assert not torch._dynamo.config.use_recursive_dict_tags_for_guards
    assert torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags == before


@pytest.mark.slow
def test_block_trains_again_after_it_was_frozen() -> None:
    """Frozen in one stage and not in the next: the compiled block follows."""
    block = build_backbone("tiny", channels=1, generator=torch.Generator().manual_seed(0)).train()
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with fusing():
        for trained in [flag for flag in (True, False, True, False, True) for _ in range(3)]:
            block.requires_grad_(trained)
            features = block(images).features
            assert features.requires_grad == trained
            if trained:
                gradients = torch.autograd.grad(features.square().sum(), list(block.parameters()))
                assert all(gradient.abs().sum() > 0 for gradient in gradients)
