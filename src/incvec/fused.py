"""Small pure functions that become one kernel inside a captured step, and stay plain Python elsewhere.

`@fused` marks a function of tensors (and plain values) that draws nothing. The engine compiles such functions
while it builds a CUDA graph; on a CPU, in eager runs and in tests they are called as they are written.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

SETTINGS = {
    "recompile_limit": 64,  # train and eval, with and without gradients, a few batch sizes: all are legitimate
    "skip_tensor_guards_with_matching_dict_tags": False,  # freezing a parameter changes no dictionary: look at it
    "use_recursive_dict_tags_for_guards": False,
}

_active = False


@overload
def fused(function: Function) -> Function: ...


@overload
def fused(*, dynamic: bool | None = None) -> Callable[[Function], Function]: ...


def fused(function: Callable[..., Any] | None = None, *, dynamic: bool | None = None) -> Any:
    """Let the engine compile this function. `dynamic=False`: once for each shape, where shapes are few.

    A method of a module will do: its parameters are inputs, so all instances of one shape share what was compiled.
    """
    if function is None:
        return functools.partial(fused, dynamic=dynamic)
    compiled: list[Callable[..., Any]] = []

    def keyed(key: tuple[bool, ...], *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    # The compiler remembers by code which sizes have varied: functions that shared theirs would make each other's
    # sizes variables, and compile anew for each other's sake.
    own = keyed.__code__.replace(co_name=function.__qualname__, co_filename=function.__code__.co_filename)
    keyed = types.FunctionType(own, keyed.__globals__, function.__qualname__, None, keyed.__closure__)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or not _active:
            return function(*arguments, **named)
        if not compiled:
            compiled.append(torch.compile(keyed, dynamic=dynamic))
        return compiled[0](_trained(arguments), *arguments, **named)

    return call


def _trained(arguments: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which parameters of the modules among the arguments require gradients.

    By default the compiler takes a parameter for unchanged as long as its module's dictionary is: a block that was
    frozen for one stage would then go on without gradients in the next. This key makes it part of the call.
    """
    modules = [argument for argument in arguments if isinstance(argument, nn.Module)]
    return tuple(parameter.requires_grad for module in modules for parameter in module.parameters())


@contextmanager
def fusing(active: bool = True) -> Iterator[None]:
    """Within this context, marked functions run compiled."""
    global _active
    if not active:
        yield
        return
    import torch._dynamo

    before, _active = _active, True
    try:
        settings = {name: value for name, value in SETTINGS.items() if hasattr(torch._dynamo.config, name)}
        with torch._dynamo.config.patch(settings):
            yield
    finally:
        _active = before
