"""`@fused`: marks a pure function of tensors that the engine compiles with `torch.compile` inside a captured step.

A fused function takes tensors and plain values and draws no random numbers. It is compiled only within the context
`fusing()`, which the engine enters while it captures a CUDA graph. On a CPU, in eager runs and in tests it is called as
written.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

SETTINGS = {
    "recompile_limit": 64,  # train and eval, with and without gradients, a few batch sizes
    "skip_tensor_guards_with_matching_dict_tags": False,  # or a frozen parameter would go unnoticed
    "use_recursive_dict_tags_for_guards": False,
}

_active = False


@overload
def fused(function: Function) -> Function: ...


@overload
def fused(*, dynamic: bool | None = None) -> Callable[[Function], Function]: ...


def fused(function: Callable[..., Any] | None = None, *, dynamic: bool | None = None) -> Any:
    """Let the engine compile this function. With `dynamic=False` it is compiled once per shape, for few shapes.

    It may be a method of a module. The module's parameters are inputs, so modules of the same shapes share the
    compiled code.
    """
    if function is None:
        return functools.partial(fused, dynamic=dynamic)
    compiled: list[Callable[..., Any]] = []

    def keyed(key: tuple[bool, ...], *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    # The compiler tracks by code object which sizes vary. Functions that share one would make each other's sizes
    # dynamic and trigger recompilations, so each gets its own.
    code = keyed.__code__.replace(co_name=function.__qualname__, co_filename=function.__code__.co_filename)
    keyed = types.FunctionType(code, keyed.__globals__, function.__qualname__, None, keyed.__closure__)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or not _active:
            return function(*arguments, **named)
        if not compiled:
            compiled.append(torch.compile(keyed, dynamic=dynamic))
        return compiled[0](_requires_grad(arguments), *arguments, **named)

    return call


def _requires_grad(arguments: tuple[Any, ...]) -> tuple[bool, ...]:
    """`requires_grad` of all parameters of modules among the arguments: part of the key of the compiled code.

    By default the compiler assumes that a parameter has not changed if its module's dictionary has not. Then a block
    that was frozen in one stage would have no gradients in the next one either.
    """
    modules = [argument for argument in arguments if isinstance(argument, nn.Module)]
    return tuple(parameter.requires_grad for module in modules for parameter in module.parameters())


def _kept_buffers() -> AbstractContextManager[Any]:
    """Compiled backward passes that can run twice, for gradients of a part of the loss."""
    import torch._functorch.config as config

    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else nullcontext()


@contextmanager
def fusing(active: bool = True) -> Iterator[None]:
    """Within this context, fused functions run compiled."""
    global _active
    if not active:
        yield
        return
    import torch._dynamo

    before, _active = _active, True
    try:
        settings = {name: value for name, value in SETTINGS.items() if hasattr(torch._dynamo.config, name)}
        with torch._dynamo.config.patch(settings), _kept_buffers():
            yield
    finally:
        _active = before
