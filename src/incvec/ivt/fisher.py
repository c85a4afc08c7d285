"""F_t, the diagonal Fisher of a task: the mean over steps of the squared batch gradients (Algorithm 1).

The `diagonal` structure has one number per weight. In the `kernel` structure the weight of a convolution with a k x k
kernel (k*k > 1) has a (k*k x k*k) block E[g g^T] per slice (out, in); every other parameter stays diagonal.

Squares are stored as multiples of 2^-64: gradients are multiplied by 2^32 first. S depends on ratios only, and the
square of a gradient below 1e-19 would lose bits in float32, or vanish. A power of two changes no other bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .names import fisher_shape, state_dtype

Structure = Literal["diagonal", "kernel"]
EXPONENT = 64  # F is stored as F * 2^EXPONENT
_GRADIENT_FACTOR = 2.0 ** (EXPONENT // 2)
_CHUNK_ELEMENTS = 1 << 24  # transient memory of a step: this many scaled gradients at a time
_DIVIDES_BY_TENSOR = hasattr(torch.ops.aten._foreach_div_, "Tensor")  # older torch reads the divisor back to the host


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError if the value is not one of a Literal's, naming the choices."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, get_args(choices)))}")


def check_fisher(name: str, value: Tensor, kernel: bool = False) -> None:
    """Raise ValueError unless every number is finite and, on the diagonal, not negative. Synchronizes."""
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"F of {name!r} has numbers that are not finite")
    if bool(((value.diagonal(dim1=-2, dim2=-1) if kernel else value) < 0).any()):
        raise ValueError(f"F of {name!r} has negative numbers; it is a mean of squares")


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def in_chunks(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Ranges of tensors with a bounded number of elements."""
    start = elements = 0
    for index, tensor in enumerate(tensors):
        if index > start and elements + tensor.numel() > _CHUNK_ELEMENTS:
            yield slice(start, index)
            start, elements = index, 0
        elements += tensor.numel()
    if start < len(tensors):
        yield slice(start, len(tensors))


def add_squares_(sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """sums += (2^32 gradient)^2, in place: the way with the least work on the host."""
    if gradients and all(gradient.is_cpu for gradient in gradients):
        # A CPU computes (2^64 gradient) gradient: the same bits without a copy. CUDA would square the gradient first.
        torch._foreach_addcmul_(list(sums), list(gradients), list(gradients), 2.0**EXPONENT)
        return
    for part in in_chunks(gradients):
        scaled = torch._foreach_mul(list(gradients[part]), _GRADIENT_FACTOR)
        torch._foreach_addcmul_(list(sums[part]), scaled, scaled)


def _same_strides(sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    return all(total.stride() == gradient.stride() for total, gradient in zip(sums, gradients, strict=False))


def add_flat_squares_(total: Tensor, gradients: Sequence[Tensor]) -> None:
    """The same for sums that lie next to each other: the way with the least work on a device.

    Operations on lists of tensors give each small tensor to few threads; one on a flat tensor uses the whole device.
    """
    start = 0
    for part in in_chunks(gradients):
        flat = torch.cat([gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients[part]])
        flat.mul_(_GRADIENT_FACTOR)
        total[start : start + len(flat)].addcmul_(flat, flat)
        start += len(flat)


class BatchFisher:
    """Sums of squared gradients by parameter name, times 2^64, and the number of steps in each.

    Buffers exist before the first step and are only written in place by `accumulate`, which reads nothing back
    to the host: it can be captured in a CUDA graph. There is one step counter on the device per set of
    parameters that step together, so that optimizers which step separately are averaged separately; a
    parameter's count is the sum over the sets it belongs to.
    """

    def __init__(self, parameters: Mapping[str, Tensor], kernels: Collection[str] = ()) -> None:
        self.kernels = frozenset(kernels)
        self.sums: dict[str, Tensor] = {}
        self.seen: dict[str, None] = {}  # names that have had a gradient, in order
        self._steps: dict[frozenset[str], Tensor] = {}
        self._units: dict[torch.device, Tensor] = {}  # a gradient that adds one to a counter; graphs refer to them
        self._groups: list[tuple[list[Tensor], list[str]]] = []  # counters, and the names that use them
        self._together: dict[tuple[str, ...], tuple[list[Tensor], Tensor]] = {}  # see _add_known
        self._flat: dict[tuple[str, ...], Tensor] = {}  # sums of parameters that step together, as one tensor
        self.allocate(parameters)
        if parameters:
            self.counter(parameters)

    def allocate(self, parameters: Mapping[str, Tensor]) -> None:
        """Allocate buffers for further parameters; known ones keep theirs."""
        for name, parameter in parameters.items():
            if name in self.sums:
                continue
            self._groups = []
            if capturing(parameter):
                raise RuntimeError(
                    f"{name!r} has its first gradient inside a CUDA graph capture, where no buffer can be made; "
                    "run a step before capturing, or let the parameter require gradients when the task begins"
                )
            if name in self.kernels:
                self.sums[name] = parameter.new_zeros(fisher_shape(parameter, True), dtype=state_dtype(parameter))
            else:
                self.sums[name] = torch.zeros_like(parameter, dtype=state_dtype(parameter), requires_grad=False)

    def counter(self, names: Iterable[str]) -> Tensor:
        """The step counter of parameters that step together: a scalar on the device."""
        key = frozenset(names)
        counter = self._steps.get(key)
        if counter is None:
            like = self.sums[next(iter(key))]
            if capturing(like):
                raise RuntimeError(
                    f"a set of {len(key)} parameters steps for the first time inside a CUDA graph capture; "
                    "run one step with the same parameters before capturing"
                )
            self._groups = []
            counter = self._steps[key] = torch.zeros((), dtype=torch.float32, device=like.device)
            self._units.setdefault(counter.device, torch.full_like(counter, 1 / _GRADIENT_FACTOR))
        return counter

    @torch.no_grad()
    def accumulate(
        self,
        gradients: Iterable[tuple[str, Tensor | None]],
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Add the squares of the gradients, given by parameter name, and count one step; None counts as zero.

        grad_scale and found_inf are what a GradScaler passes to a fused optimizer: gradients are divided by the
        scale, and a step that found infinities is skipped, both on the device. Such a step's gradients are
        replaced by zeros, not multiplied by them: 0 * inf is not a number.
        """
        pairs = list(gradients)
        if grad_scale is None and found_inf is None and self._add_known(pairs):
            return
        names: list[str] = []
        sums: list[Tensor] = []
        dense: list[Tensor] = []
        finite = None if found_inf is None else found_inf.reshape(()) == 0
        for name, gradient in pairs:
            if gradient is not None:
                if name not in self.sums:
                    self.allocate({name: gradient})
                total = self.sums[name]
                self.seen[name] = None
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                if gradient.dtype != total.dtype:
                    gradient = gradient.to(total.dtype)
                if grad_scale is not None:
                    gradient = gradient / grad_scale.to(gradient.device, non_blocking=True).reshape(())
                if finite is not None:
                    gradient = torch.where(finite.to(gradient.device, non_blocking=True), gradient, 0.0)
                if name in self.kernels:
                    vectors = gradient.flatten(2) * _GRADIENT_FACTOR
                    total.addcmul_(vectors.unsqueeze(-1), vectors.unsqueeze(-2))
                else:
                    sums.append(total)
                    dense.append(gradient)
            if name in self.sums:
                names.append(name)
        if not names:
            return
        add_squares_(sums, dense)
        counter = self.counter(names)
        counter.add_(1.0 if finite is None else finite.to(counter, non_blocking=True))
        if len(sums) == len(pairs) and all((t.dtype, t.device) == (counter.dtype, counter.device) for t in sums):
            self._join(names)
            self._together[tuple(names)] = [*(self.sums[name] for name in names), counter], self._units[counter.device]

    def _join(self, names: Sequence[str]) -> None:
        """Move the sums of parameters that step together next to each other, once."""
        key, joined = tuple(names), {name for names in self._flat for name in names}
        if key in self._flat or joined & set(names) or capturing(self.sums[names[0]]):
            return
        flat = torch.cat([self.sums[name].as_strided((self.sums[name].numel(),), (1,)) for name in names])
        start = 0
        for name in names:
            total = self.sums[name]
            self.sums[name] = flat.as_strided(total.shape, total.stride(), start)
            start += total.numel()
        self._flat[key] = flat

    def _add_known(self, pairs: Sequence[tuple[str, Tensor | None]]) -> bool:
        """The common step: dense gradients of the sums' dtype, for parameters that have stepped together before.

        The counter is appended to the sums with a gradient whose scaled square is one, so that all is one operation.
        """
        names = tuple(name for name, _ in pairs)
        known = self._together.get(names)
        if known is None:
            return False
        sums, unit = known
        dtype, gradients = unit.dtype, []
        for _, gradient in pairs:
            if gradient is None or gradient.dtype != dtype or gradient.is_sparse:
                return False
            gradients.append(gradient)
        flat = self._flat.get(names)
        if capturing(unit) and flat is not None and _same_strides(sums, gradients):
            add_flat_squares_(flat, gradients)
            sums[-1].add_(1.0)
        else:
            add_squares_(sums, [*gradients, unit])
        return True

    def by_counters(self) -> Iterator[tuple[Tensor, list[str]]]:
        """Names that share a device and step counters, with the counters' total."""
        if not self._groups:
            groups: dict[tuple[object, ...], list[str]] = {}
            for name, total in self.sums.items():
                key = (total.device, *(name in names for names in self._steps))
                groups.setdefault(key, []).append(name)
            for names in groups.values():
                counters = [counter for those, counter in self._steps.items() if names[0] in those]
                self._groups.append((counters, names))
        for counters, names in self._groups:
            device = self.sums[names[0]].device
            total = (
                torch.zeros((), dtype=torch.float32, device=device) if len(counters) != 1 else counters[0].to(device)
            )
            for counter in counters if len(counters) > 1 else ():
                total = total + counter.to(device, non_blocking=True)
            yield total, names

    def counts(self) -> dict[str, Tensor]:
        """The number of steps in each parameter's sum, as scalars on the device (no synchronization)."""
        return {name: count for steps, names in self.by_counters() for count in [steps.clone()] for name in names}

    @torch.no_grad()
    def mean_(self) -> None:
        """Turn the sums into means in place, still times 2^64; without steps they stay zero."""
        for steps, names in self.by_counters():
            sums, divisor = [self.sums[name] for name in names], steps.clamp_min(1.0)
            torch._foreach_div_(sums, divisor if _DIVIDES_BY_TENSOR else [divisor] * len(sums))

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        """F by name for every parameter that has had a gradient, as new tensors; the sums are unchanged."""
        result: dict[str, Tensor] = {}
        for steps, names in self.by_counters():
            for name in names:
                if name in self.seen:
                    result[name] = self.sums[name] / steps.clamp_min(1.0) * 2.0**-EXPONENT
        return {name: result[name] for name in self.seen}

    @torch.no_grad()
    def zero_(self) -> None:
        """Zero the sums and counters in place; the set of seen parameters stays."""
        if self.sums:
            torch._foreach_zero_([*self.sums.values(), *self._steps.values()])

    @torch.no_grad()
    def restore(self, sums: Mapping[str, Tensor], steps: Sequence[float]) -> None:
        """Load saved sums (times 2^64) and their step counts in place; everything else becomes zero."""
        self.zero_()
        self._together.clear()
        self.seen = dict.fromkeys(sums)
        by_count: dict[float, list[str]] = {}
        for (name, value), count in zip(sums.items(), steps, strict=True):
            self.sums[name].copy_(value)
            by_count.setdefault(count, []).append(name)
        for count, names in by_count.items():
            self.counter(names).fill_(count)
