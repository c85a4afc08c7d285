"""Estimators of the Fisher information from a loss or from logits, one gradient per sample.

| kind | F | needs | cost per batch |
|---|---|---|---|
| `batch` | the squared gradient of the batch's mean loss | the loss | one forward and backward |
| `sample` | mean over samples of the squared gradient of the sample's loss | the loss | one forward and backward |
| `sampled` | the same, with a label drawn from the model's prediction | the logits | two forwards, one backward |
| `exact` | its expectation over all labels, sum_c p_c (grad log p_c)^2 | the logits | one backward per class |

`batch` and per-sample values differ by about the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

FisherKind = Literal["batch", "sample", "exact", "sampled"]
Rows = tuple[Tensor, ...]  # tensors with one sample per row
LossFunction = Callable[[Rows], Tensor]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's previous mode afterwards."""
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
        # In a tuple: a function that is itself a module must not be registered, or its parameters are swapped twice.
        self._functions = (function,)

    def forward(self, rows: Rows) -> Tensor:
        return self._functions[0](rows)


def squared_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    rows: Rows,
    *,
    kind: FisherKind,
    generator: torch.Generator | None = None,
    chunk_size: int = 16,
) -> tuple[dict[str, Tensor], int]:
    """Sums of squared gradients over one batch by parameter name, and the number of terms (`batch`: 1, else samples).

    Args:
        model: its parameters are differentiated. It is in evaluation mode during the call.
        loss_fn: calls the model. It returns the mean loss of its rows for `batch` and `sample`, and the logits
            (samples, classes) for `exact` and `sampled`.
        rows: the batch, one sample per row of every tensor.
        generator: draws the labels of `sampled`.
        chunk_size: samples per vmap call. Memory: that many gradients of the model.
    """
    if kind not in get_args(FisherKind):
        raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(map(repr, get_args(FisherKind)))}")
    if kind == "sampled" and generator is None:
        raise ValueError("kind='sampled' draws labels: pass a torch.Generator on the model's device")
    closure = _Closure(model, loss_fn)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def call(values: Mapping[str, Tensor], rows: Rows) -> Tensor:
        return functional_call(closure, {f"model.{name}": value for name, value in values.items()}, (rows,))  # type: ignore[no-any-return]

    def squares(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradient * gradient for name, gradient in gradients.items()}

    def single(sample: Rows) -> Rows:
        return tuple(tensor.unsqueeze(0) for tensor in sample)

    def log_probabilities(values: Mapping[str, Tensor], sample: Rows) -> Tensor:
        return call(values, single(sample))[0].log_softmax(-1)

    def of_loss(sample: Rows, label: Tensor) -> dict[str, Tensor]:
        return squares(grad(lambda values: call(values, single(sample)).reshape(()))(values))

    def of_label(sample: Rows, label: Tensor) -> dict[str, Tensor]:
        def loss(values: Mapping[str, Tensor]) -> Tensor:
            return -log_probabilities(values, sample).gather(-1, label).reshape(())

        return squares(grad(loss)(values))

    def of_every_label(sample: Rows, label: Tensor) -> dict[str, Tensor]:
        result: Any = vjp(lambda values: log_probabilities(values, sample), values)
        output, backward = result
        total: dict[str, Tensor] = {}
        choices = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)
        for choice, probability in zip(choices, output.exp(), strict=True):
            for name, square in squares(backward(choice)[0]).items():
                total[name] = total.get(name, 0.0) + probability * square
        return total

    # Outside no_grad, the parameters not differentiated here would keep an autograd graph alive.
    with evaluation_mode(model), torch.no_grad():
        if kind == "batch":
            return squares(grad(call)(values, rows)), 1
        term = {"sample": of_loss, "sampled": of_label, "exact": of_every_label}[kind]
        samples = len(rows[0])
        sums: dict[str, Tensor] = {}
        for start in range(0, samples, chunk_size):
            chunk = tuple(tensor[start : start + chunk_size] for tensor in rows)
            labels = torch.zeros((len(chunk[0]), 1), dtype=torch.int64, device=rows[0].device)
            if kind == "sampled":
                labels = torch.multinomial(loss_fn(chunk).float().softmax(-1), 1, generator=generator)
            for name, square in vmap(term)(chunk, labels).items():
                sums[name] = sums.get(name, 0.0) + square.sum(0)
        return sums, samples
