"""Small pure functions that become one kernel inside a captured step, and stay plain Python elsewhere.

`@fused` marks a function of tensors (and plain values) that draws nothing. The engine compiles such functions
while it builds a CUDA graph; on a CPU, in eager runs and in tests they are called as they are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_active = False


def fused(function: Function) -> Function:
    """Let the engine compile this function."""
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or not _active:
            return function(*arguments, **named)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*arguments, **named)

    return call  # type: ignore[return-value]


@contextmanager
def fusing(active: bool = True) -> Iterator[None]:
    """Within this context, marked functions run compiled."""
    global _active
    before, _active = _active, active
    try:
        yield
    finally:
        _active = before
