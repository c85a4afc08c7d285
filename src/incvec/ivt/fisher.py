"""Where F comes from.

| estimator | F | needs | cost |
|---|---|---|---|
| `batch` | mean over optimizer steps of g_i^2, g_i the gradient of the batch's mean loss (Algorithm 1) | `.grad` | one fused pass over the gradients |
| `sample` | mean over samples of (grad of the sample's loss)^2 (eq. 11 read to the letter) | the loss | a further forward and backward, gradients for each sample |
| `sampled` | the same with a label drawn from the model's own prediction | the logits | two forwards and one backward, gradients for each sample |
| `exact` | its expectation over all labels, sum_c p_c (grad log p_c)^2: the Fisher information itself | the logits | one forward and a backward for each class |

Batch and per-sample values differ by about the batch size, and S depends on the ratio of old to new, so one run
must stay with one estimator.

The diagonal needs one number a weight. In the `kernel` structure the weight of a convolution with a k x k kernel
(k*k > 1) has a (k*k x k*k) block E[g g^T] for each slice (out, in) instead; everything else stays diagonal.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from .names import fisher_shape, float_parameters, kernel_names, state_dtype, unwrap

Structure = Literal["diagonal", "kernel"]
Kind = Literal["batch", "sample", "exact", "sampled"]
LossFunction = Callable[[Any], Tensor]


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse a value outside a Literal's, naming those it has."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, get_args(choices)))}")


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _square(gradient: Tensor, kernel: bool) -> Tensor:
    if not kernel:
        return gradient * gradient
    vectors = gradient.flatten(-2)
    return vectors.unsqueeze(-1) * vectors.unsqueeze(-2)


class BatchFisher:
    """Sums of squared gradients by parameter name, and how many steps went into each.

    Buffers exist before the first step and are only written in place by `accumulate`, which reads nothing back
    to the host: a captured CUDA graph can hold it. There is one step counter on the device for each set of
    parameters that has stepped together, so optimizers that step apart are averaged apart; a parameter's
    count is the sum over the sets it belongs to.
    """

    def __init__(self, parameters: Mapping[str, Tensor], kernels: Collection[str] = ()) -> None:
        self.kernels = frozenset(kernels)
        self.sums: dict[str, Tensor] = {}
        self.seen: dict[str, None] = {}  # names that have had a gradient, in order
        self._steps: dict[frozenset[str], Tensor] = {}
        self._ones: dict[torch.device, Tensor] = {}  # what a step adds to a counter; captured graphs hold them
        self._groups: list[tuple[list[Tensor], list[str]]] = []  # counters, and the names that have them: see below
        self._together: dict[tuple[str, ...], tuple[list[Tensor], Tensor]] = {}  # of a usual step: see _add_known
        self.allocate(parameters)
        if parameters:
            self.counter(parameters)

    def allocate(self, parameters: Mapping[str, Tensor]) -> None:
        """Make room for further parameters; those already known keep their buffers."""
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
            self._ones.setdefault(counter.device, torch.ones_like(counter))
        return counter

    @torch.no_grad()
    def accumulate(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Add the squares of the parameters' `.grad` and count one step; a missing gradient counts as zero.

        grad_scale and found_inf are what a GradScaler hands a fused optimizer: gradients are divided by the
        scale, and a step that found infinities is skipped, both on the device. Such a step's gradients are
        replaced by zeros, not multiplied by them: 0 * inf is not a number.
        """
        pairs = list(parameters)
        if grad_scale is None and found_inf is None and self._add_known(pairs):
            return
        names: list[str] = []
        sums: list[Tensor] = []
        gradients: list[Tensor] = []
        kept = None if found_inf is None else found_inf.reshape(()) == 0
        for name, parameter in pairs:
            gradient = parameter.grad
            if gradient is not None:
                if name not in self.sums:
                    self.allocate({name: parameter})
                total = self.sums[name]
                self.seen[name] = None
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                if gradient.dtype != total.dtype:
                    gradient = gradient.to(total.dtype)
                if grad_scale is not None:
                    gradient = gradient / grad_scale.to(gradient.device, non_blocking=True).reshape(())
                if kept is not None:
                    gradient = torch.where(kept.to(gradient.device, non_blocking=True), gradient, 0.0)
                if name in self.kernels:
                    vectors = gradient.flatten(2)
                    total.addcmul_(vectors.unsqueeze(-1), vectors.unsqueeze(-2))
                else:
                    sums.append(total)
                    gradients.append(gradient)
            if name in self.sums:
                names.append(name)
        if not names:
            return
        if sums:
            torch._foreach_addcmul_(sums, gradients, gradients)
        counter = self.counter(names)
        counter.add_(1.0 if kept is None else kept.to(counter, non_blocking=True))
        if len(sums) == len(pairs) and all((t.dtype, t.device) == (counter.dtype, counter.device) for t in sums):
            self._together[tuple(names)] = [*sums, counter], self._ones[counter.device]

    def _add_known(self, pairs: Sequence[tuple[str, Tensor]]) -> bool:
        """The usual step, with dense gradients of the sums' format for parameters that have stepped together before.

        The counter is the last of the sums and a one its gradient, so that all is one operation.
        """
        known = self._together.get(tuple(name for name, _ in pairs))
        if known is None:
            return False
        sums, one = known
        gradients = []
        for _, parameter in pairs:
            gradient = parameter.grad
            if gradient is None or gradient.dtype != one.dtype or gradient.is_sparse:
                return False
            gradients.append(gradient)
        gradients.append(one)
        torch._foreach_addcmul_(sums, gradients, gradients)
        return True

    @torch.no_grad()
    def add(self, squares: Mapping[str, Tensor], count: float) -> None:
        """Add sums of squares computed elsewhere over `count` samples."""
        for name, square in squares.items():
            self.sums[name].add_(square)
            self.seen[name] = None
        if squares:
            self.counter(squares).add_(float(count))

    def by_counters(self) -> Iterator[tuple[Tensor, list[str]]]:
        """Names that share their device and their step counters, with those counters' total."""
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
        """How many steps are in each parameter's sum: scalars on the device, so that nothing waits for it."""
        return {name: kept for steps, names in self.by_counters() for kept in [steps.clone()] for name in names}

    @torch.no_grad()
    def mean_(self) -> None:
        """Turn the sums into means in place; where there was no step they stay zero."""
        for steps, names in self.by_counters():
            torch._foreach_div_([self.sums[name] for name in names], steps.clamp_min(1.0))

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        """F by name for every parameter that has had a gradient, as new tensors; the sums stay."""
        result: dict[str, Tensor] = {}
        for steps, names in self.by_counters():
            for name in names:
                if name in self.seen:
                    result[name] = self.sums[name] / steps.clamp_min(1.0)
        return {name: result[name] for name in self.seen}

    @torch.no_grad()
    def zero_(self) -> None:
        """Begin again; buffers, counters and the set of seen parameters stay."""
        if self.sums:
            torch._foreach_zero_([*self.sums.values(), *self._steps.values()])

    @torch.no_grad()
    def restore(self, sums: Mapping[str, Tensor], steps: Sequence[float]) -> None:
        """Take over saved sums and the step counts beside them, in place; everything else becomes zero."""
        self.zero_()
        self._together.clear()
        self.seen = dict.fromkeys(sums)
        by_count: dict[float, list[str]] = {}
        for (name, value), count in zip(sums.items(), steps, strict=True):
            self.sums[name].copy_(value)
            by_count.setdefault(count, []).append(name)
        for count, names in by_count.items():
            self.counter(names).fill_(count)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """BatchNorm on its running statistics and dropout off; every module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _Closure(nn.Module):
    """Lets functional_call swap a model's parameters under a function that closes over the model."""

    def __init__(self, model: nn.Module, function: LossFunction) -> None:
        super().__init__()
        self.model = model
        # In a tuple, since a function that is a module itself must not be registered: its parameters would be
        # swapped twice and not come back.
        self._functions = (function,)

    def forward(self, batch: Any) -> Tensor:
        return self._functions[0](batch)


def _samples(batch: Any) -> int:
    shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(batch)]
    sizes = {shape[0] if isinstance(shape, tuple) and shape else None for shape in shapes}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        raise ValueError(
            "a batch must be a tensor, or tensors in tuples, lists or dicts, all with one sample a row; "
            f"this one holds the shapes or values {shapes}"
        )
    return int(size)


def squared_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    parameters: Mapping[str, Tensor],
    *,
    kind: Kind,
    kernels: Collection[str] = (),
    generator: torch.Generator | None = None,
    chunk_size: int = 16,
) -> tuple[dict[str, Tensor], int]:
    """Sums of squared gradients over one batch, and over how many terms they run (`batch`: 1, else samples).

    loss_fn(batch) calls the model itself (the plain module, not a compiled or DDP wrapper of it) and returns

    - `batch`: the batch's loss, a scalar;
    - `sample`: the same; it is called on batches of one sample;
    - `exact`, `sampled`: the logits, (samples, classes), whose softmax is the model's distribution of labels.

    The last three run under torch.vmap over chunks of `chunk_size` samples (memory: that many gradients of the
    whole model), with the model in evaluation mode, as `batch` is here. `sampled` draws from `generator`.
    """
    check_choice("kind", kind, Kind)
    if kind == "sampled" and generator is None:
        raise ValueError("kind='sampled' draws labels: pass a torch.Generator on the model's device")
    bare = unwrap(model)
    raw_names = {id(parameter): name for name, parameter in bare.named_parameters()}
    raw = {name: f"model.{raw_names[id(parameter)]}" for name, parameter in parameters.items()}
    closure = _Closure(bare, loss_fn)
    values = {name: parameter.detach() for name, parameter in parameters.items()}

    def call(values: Mapping[str, Tensor], batch: Any) -> Tensor:
        return functional_call(closure, {raw[name]: value for name, value in values.items()}, (batch,))  # type: ignore[no-any-return]

    def squares(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: _square(gradient.to(state_dtype(gradient)), name in kernels) for name, gradient in gradients.items()
        }

    # Outside no_grad the parameters not differentiated here would keep an autograd graph alive.
    with evaluation_mode(bare), torch.no_grad():
        if kind == "batch":
            return squares(grad(call)(values, batch)), 1

        def log_probabilities(values: Mapping[str, Tensor], sample: Any) -> Tensor:
            return call(values, tree_map(lambda leaf: leaf.unsqueeze(0), sample))[0].log_softmax(-1)

        def of_loss(sample: Any, label: Tensor) -> dict[str, Tensor]:
            def loss(values: Mapping[str, Tensor]) -> Tensor:
                return call(values, tree_map(lambda leaf: leaf.unsqueeze(0), sample)).reshape(())

            return squares(grad(loss)(values))

        def of_label(sample: Any, label: Tensor) -> dict[str, Tensor]:
            def loss(values: Mapping[str, Tensor]) -> Tensor:
                return -log_probabilities(values, sample).gather(-1, label).reshape(())

            return squares(grad(loss)(values))

        def of_every_label(sample: Any, label: Tensor) -> dict[str, Tensor]:
            result: Any = vjp(lambda values: log_probabilities(values, sample), values)
            output, backward = result
            total: dict[str, Tensor] = {}
            choices = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)
            for choice, probability in zip(choices, output.exp(), strict=True):
                for name, square in squares(backward(choice)[0]).items():
                    total[name] = total.get(name, 0.0) + probability * square
            return total

        term = {"sample": of_loss, "sampled": of_label, "exact": of_every_label}[kind]
        samples = _samples(batch)
        sums: dict[str, Tensor] = {}
        for start in range(0, samples, chunk_size):
            chunk = tree_map(lambda leaf, start=start: leaf[start : start + chunk_size], batch)
            size = min(chunk_size, samples - start)
            device = next(iter(values.values())).device
            labels = torch.zeros((size, 1), dtype=torch.int64, device=device)
            if kind == "sampled":
                labels = torch.multinomial(loss_fn(chunk).float().softmax(-1), 1, generator=generator)
            for name, square in vmap(term)(chunk, labels).items():
                sums[name] = sums.get(name, 0.0) + square.sum(0)
        return sums, samples


def estimate(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    kind: Kind = "batch",
    structure: Structure = "diagonal",
    parameters: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
    chunk_size: int = 16,
) -> dict[str, Tensor]:
    """F over the batches, by parameter name, with the model in evaluation mode and left as it was.

    `parameters` defaults to all that require gradients; loss_fn is that of `squared_gradients`.
    """
    check_choice("structure", structure, Structure)
    if parameters is None:
        parameters = {name: p for name, p in float_parameters(model).items() if p.requires_grad}
    kernels = kernel_names(model) if structure == "kernel" else frozenset()
    fisher = BatchFisher(parameters, kernels)
    for batch in batches:
        squares, count = squared_gradients(
            model, loss_fn, batch, parameters,
            kind=kind, kernels=kernels, generator=generator, chunk_size=chunk_size,
        )  # fmt: skip
        fisher.add(squares, count)
    return fisher.mean()
