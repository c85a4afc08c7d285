"""Listening to a training loop: steps of optimizers, and inputs of the model.

Nothing here keeps a plug-in, an optimizer or a model alive: hooks hold weak references and are dropped by copies.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from .batchnorm import batchnorm_layers, recalibrate, running_statistics
from .fisher import BatchFisher
from .names import unwrap

if TYPE_CHECKING:
    from .plugin import IVT

T = TypeVar("T")
INPUT_BATCHES = 4  # remembered for batchnorm="layer"; their statistics, as one batch, define a map
INPUT_BYTES = 1 << 28  # limit for them; at least one batch is used
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
        """A hook before a step; `elsewhere`: for all optimizers but those attached."""
        reference = self._ivt

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
            ivt = reference()
            if ivt is None or (elsewhere and any(optimizer is known for known in ivt._listener.optimizers)):
                return None
            own = list(optimizer._optimizer_step_pre_hooks.values())  # which run after the global ones
            last = not own if elsewhere else own[-1] is before
            if elsewhere:
                names = ivt.core.names
                if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
                    return None
                last = last and list(_global_optimizer_pre_hooks.values())[-1] is before
            return ivt.before_step(optimizer, args, kwargs, last)

        return before

    def accumulate_in(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], last: bool
    ) -> Step | None:
        """Accumulate the gradients that the optimizer sees.

        A closure computes them within the step, and hooks registered later may still change them. Then they are read
        within the step, in a closure: after all hooks, before the optimizer reads them.
        """
        if isinstance(optimizer, LBFGS):
            raise RuntimeError("LBFGS evaluates its closure several times per step; IVT needs one gradient per step")
        # A bound method's arguments begin with the optimizer itself.
        position = next((i for i, argument in enumerate(args) if i > 0 or argument is not optimizer), None)
        closure = kwargs.get("closure", None if position is None else args[position])

        def accumulate() -> None:
            ivt = self._ivt()
            if ivt is not None:
                ivt.core.accumulate(
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


class Recorder:
    """A forward hook that remembers the inputs of one module in train mode. Copies of it remember nothing."""

    def __init__(self, inputs: Inputs | None = None) -> None:
        self._inputs = None if inputs is None else weakref.ref(inputs)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = None if self._inputs is None else self._inputs()
        if inputs is not None and module is inputs.model and module.training and torch.is_grad_enabled():
            inputs.record(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder()

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, ()


class Inputs:
    """Inputs of the model's last calls in training, and which of its modules were in train mode."""

    def __init__(self, model: nn.Module) -> None:
        # DDP calls the module inside it, and a model that has grown gets a new wrapper.
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._wrapper = model
        self._calls: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque(maxlen=INPUT_BATCHES)
        self._norms: list[nn.Module] = []  # BatchNorm layers in train mode
        self._handle: Any = None

    def __bool__(self) -> bool:
        return bool(self._calls)

    def remember(self) -> None:
        self.forget()
        self._handle = self.model.register_forward_pre_hook(Recorder(self), with_kwargs=True)

    def forget(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._calls.clear()

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._calls:
            self._norms = [norm for norm in batchnorm_layers(unwrap(self.model)).values() if norm.training]
        self._calls.append((args, kwargs))

    def for_maps(self) -> Callable[[], object]:
        """What runs the model on the inputs that define the maps of batchnorm="layer"."""
        if not self._calls:
            raise RuntimeError(
                'batchnorm="layer" needs inputs of the model, but in this epoch it was not called in train mode. '
                "Call the model itself, not its parts, or give IVT(probe=...)"
            )
        return self.replay

    def replay(self) -> object:
        """Run the model on the remembered inputs, as one batch."""
        args, kwargs = joined(list(self._calls))
        return unwrap(self.model)(*args, **kwargs)

    @contextmanager
    def training_modes(self) -> Iterator[None]:
        """Within it BatchNorm layers have the mode of training; dropout and the like are off."""
        model = unwrap(self.model)
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            for norm in self._norms:
                norm.train()
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def share(self, probe: Callable[[], object] | None) -> None:
        """Every process has its own inputs: take the first one's result. A probe has the same ones everywhere."""
        group = process_group(self._wrapper)
        if group is None or probe is not None:
            return
        model = unwrap(self.model)
        source = torch.distributed.get_global_rank(group, 0)
        for tensor in [*model.parameters(), *running_statistics(model).values()]:
            torch.distributed.broadcast(tensor.detach(), source, group=group)

    def recalibrate(self, model: nn.Module, probe: Callable[[], object] | None) -> None:
        """Re-estimate BatchNorm's running statistics on the remembered inputs, or by the probe."""
        if not batchnorm_layers(model):
            return
        with self.training_modes():
            if probe is not None:
                recalibrate(model, [None], lambda _: probe())
            elif self._calls:
                recalibrate(model, list(self._calls), lambda call: model(*call[0], **call[1]))
        self.share(probe)


def joined(calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of several calls as one batch: tensors are concatenated. If they do not fit, the last call's."""
    flat = [tree_flatten(call) for call in calls]
    bytes_of = [sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor)) for values, _ in flat]
    while len(flat) > 1 and sum(bytes_of[-len(flat) :]) > INPUT_BYTES:
        flat = flat[1:]
    values, spec = flat[-1]
    if all(other_spec == spec for _, other_spec in flat):
        columns = list(zip(*(values for values, _ in flat), strict=True))
        if all(_stackable(column) for column in columns):
            values = [torch.cat(column) if isinstance(column[-1], Tensor) else column[-1] for column in columns]
    result: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(values, spec)
    return result


def _stackable(column: Sequence[Any]) -> bool:
    tensors = [value for value in column if isinstance(value, Tensor)]
    if not tensors:
        return True
    same = len(tensors) == len(column) and len({(t.dtype, t.device, t.shape[1:]) for t in tensors}) == 1
    return same and tensors[0].dim() > 0


def process_group(model: nn.Module) -> Any:
    """The processes that train the model together: those of DDP, otherwise all; None if there is only one process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    group: Any = model.process_group if ddp else distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


def gradients_of(
    model: nn.Module, loss: Tensor, parameters: Sequence[nn.Parameter], keep_graph: bool = True
) -> list[Tensor | None]:
    """Gradients of a scalar, averaged over the processes; `.grad` stays as it is."""
    if loss.dim() > 0:
        raise ValueError(f"expected a scalar loss, got shape {tuple(loss.shape)}: take its mean")
    gradients: list[Tensor | None] = []
    gradients += torch.autograd.grad(loss, parameters, retain_graph=keep_graph, allow_unused=True)
    group = process_group(model)
    if group is not None:
        count = torch.distributed.get_world_size(group)
        for index, parameter in enumerate(parameters):
            gradient = gradients[index]
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=group)
            gradients[index] = gradient / count
    return gradients


def measured_fisher(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], kernels: frozenset[str], losses: Iterable[Tensor]
) -> BatchFisher:
    """The squared gradients of these losses, one per batch, summed."""
    fisher = BatchFisher(parameters, kernels)
    for loss in losses:
        gradients = gradients_of(model, loss, list(parameters.values()), keep_graph=False)
        fisher.accumulate(zip(parameters, gradients, strict=True))
    if not fisher.seen:
        raise ValueError("begin_with(): no batch gave a gradient")
    return fisher
