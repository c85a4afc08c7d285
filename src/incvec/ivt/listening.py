"""Listening to the steps of optimizers. Nothing here keeps a plug-in, an optimizer or a model alive."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from .core import Core

if TYPE_CHECKING:
    from .plugin import IVT

T = TypeVar("T")
Step = tuple[tuple[Any, ...], dict[str, Any]]


class Listener:
    """The optimizers whose steps a plug-in counts."""

    def __init__(self, ivt: IVT) -> None:
        self._ivt = weakref.ref(ivt)
        self.optimizers: tuple[Optimizer, ...] = ()
        self._handles: list[Any] = []

    def attach(self, optimizers: tuple[Optimizer, ...]) -> None:
        self.detach()
        self.optimizers = optimizers
        self._handles = [optimizer.register_step_pre_hook(self.hook()) for optimizer in optimizers]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.optimizers = [], ()

    def hook(self, elsewhere: bool = False) -> Callable[..., Step | None]:
        """A hook before a step; `elsewhere`: for all optimizers of the model but those attached."""
        reference = self._ivt

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
            ivt = reference()
            if ivt is None:
                return None
            later = list(optimizer._optimizer_step_pre_hooks.values())  # they run after the global ones
            if elsewhere:
                parameters = (p for group in optimizer.param_groups for p in group["params"])
                attached = any(optimizer is known for known in ivt._listener.optimizers)
                if attached or not any(id(p) in ivt.core.names for p in parameters):
                    return None
                last = not later and list(_global_optimizer_pre_hooks.values())[-1] is before
            else:
                last = later[-1] is before
            return accumulate_in(ivt.core, optimizer, args, kwargs, last) if ivt._count_step() else None

        return before


def refuse_lbfgs(optimizers: Iterable[Optimizer]) -> None:
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise RuntimeError("LBFGS evaluates its closure several times per step; IVT needs one gradient per step")


def accumulate_in(
    core: Core, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], last: bool
) -> Step | None:
    """Accumulate the gradients that the optimizer sees; returns other arguments of the step if they are needed.

    A closure computes gradients within the step, and hooks that follow (if this is not the `last`) may still change
    them. Then they are read within the step, in a closure: after all hooks, before the optimizer reads them.
    """
    refuse_lbfgs([optimizer])
    # A bound method's arguments begin with the optimizer itself.
    position = next((i for i, argument in enumerate(args) if i > 0 or argument is not optimizer), None)
    closure = kwargs.get("closure", None if position is None else args[position])

    def accumulate() -> None:
        core.accumulate(
            ((p, p.grad) for group in optimizer.param_groups for p in group["params"]),
            grad_scale=getattr(optimizer, "grad_scale", None),
            found_inf=getattr(optimizer, "found_inf", None),
        )

    if closure is None and (last or not takes_closure(optimizer)):
        accumulate()
        return None

    def closure_then_accumulate() -> Any:
        result = None if closure is None else closure()
        accumulate()
        return result

    if position is not None:
        return (*args[:position], closure_then_accumulate, *args[position + 1 :]), kwargs
    return args, {**kwargs, "closure": closure_then_accumulate}


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether `step` has an argument `closure`. Those of torch have, though its version 2.0 hides their signature."""
    step = type(optimizer).step
    return step.__module__.startswith("torch.optim") or "closure" in inspect.signature(step).parameters


class Watched(Generic[T]):
    """See `IVT.watch`. Everything else is the loader's, such as `dataset` and `batch_size`."""

    def __init__(self, ivt: IVT, loader: Iterable[T]) -> None:
        self._ivt, self._loader = ivt, loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy asks before it has a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        handle = register_optimizer_step_pre_hook(self._ivt._listener.hook(elsewhere=True))
        try:
            yield from self._loader
        finally:
            handle.remove()
        self._ivt.end_epoch()
