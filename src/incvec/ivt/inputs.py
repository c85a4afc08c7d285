"""The inputs on which BatchNorm layers are observed: those of the model's last calls, or a user's probe.

A hook on the model holds a weak reference only, and copies of the model drop it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .batchnorm import Probe, batchnorm_layers, recalibrate, running_statistics
from .checks import Warner
from .names import unwrap
from .processes import process_group

INPUT_BATCHES = 4  # remembered for batchnorm="layer"; their statistics, as one batch, define a map
INPUT_BYTES = 1 << 28  # limit for them; at least one batch is used
MISSING = (
    'batchnorm="layer" and "recalibrate" need inputs of the model, but it was not called in train mode: call the model '
    "itself, not its parts, or give IVT(probe=...)"
)
Call = tuple[tuple[Any, ...], dict[str, Any]]


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
    """Inputs of the model's last calls in training, and which of its BatchNorm layers were in train mode then."""

    def __init__(self, model: nn.Module, probe: Probe | None, warn: Warner) -> None:
        # DDP calls the module inside it, and a model that has grown gets a new wrapper.
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._wrapper = model
        self._probe = probe
        self._warn = warn
        self._calls: deque[Call] = deque(maxlen=INPUT_BATCHES)
        self._norms: list[nn.Module] = []
        self._handle: Any = None

    def remember(self) -> None:
        """From now on, unless the user's probe is used."""
        self.forget()
        if self._probe is None:
            self._handle = self.model.register_forward_pre_hook(Recorder(self), with_kwargs=True)

    def forget(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._calls.clear()

    def check(self) -> None:
        """Warn if the model has not been called."""
        if self._handle is not None and not self._calls:
            self._warn("inputs", MISSING)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._calls:
            self._norms = [norm for norm in batchnorm_layers(unwrap(self.model)).values() if norm.training]
        self._calls.append((args, kwargs))

    @contextmanager
    def probing(self) -> Iterator[Probe]:
        """What runs the model on the inputs, as one batch, in the modes of training."""
        if self._probe is not None:
            yield self._probe
            return
        if not self._calls:
            raise RuntimeError(MISSING)
        args, kwargs = joined(list(self._calls))
        with self._training_modes():
            yield lambda: unwrap(self.model)(*args, **kwargs)

    @contextmanager
    def _training_modes(self) -> Iterator[None]:
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

    def share(self) -> None:
        """Every process has its own inputs: take the first one's result. A probe has the same ones everywhere."""
        group = process_group(self._wrapper)
        if group is None or self._probe is not None:
            return
        model = unwrap(self.model)
        source = torch.distributed.get_global_rank(group, 0)
        for tensor in [*model.parameters(), *running_statistics(model).values()]:
            torch.distributed.broadcast(tensor.detach(), source, group=group)

    def recalibrate(self) -> None:
        """Re-estimate the running statistics of norms that were in train mode; without inputs they stay as they are."""
        model, probe, calls = unwrap(self.model), self._probe, list(self._calls)
        with self._training_modes():
            if probe is not None:
                recalibrate(model, [None], lambda _: probe())
            elif calls:
                recalibrate(model, calls, lambda call: model(*call[0], **call[1]), self._norms)
            else:
                self._warn("inputs", MISSING)
        self.share()


def joined(calls: Sequence[Call]) -> Call:
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
    result: Call = tree_unflatten(values, spec)
    return result


def _stackable(column: Sequence[Any]) -> bool:
    tensors = [value for value in column if isinstance(value, Tensor)]
    if not tensors:
        return True
    same = len(tensors) == len(column) and len({(t.dtype, t.device, t.shape[1:]) for t in tensors}) == 1
    return same and tensors[0].dim() > 0
