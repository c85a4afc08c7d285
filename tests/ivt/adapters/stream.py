"""Three small tasks with a growing head, for all hosts: network, batches, and the results of Algorithm 1."""

import os
import signal
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from incvec import IVT
from incvec.ivt.reference import ReferenceTask, increment_vector_transformation

TASKS, EPOCHS, BATCHES, BATCH, INTERVAL, RATE = 3, 4, 3, 8, 2, 0.3
VERBATIM = {"interval": INTERVAL, "exclude": (), "last": "teleport"}
Weights = dict[str, Tensor]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.trunk = nn.Linear(5, 6)
        self.head = nn.Linear(6, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def grow_to(self, task: int) -> None:
        """The head of this task (from 1): two rows per task, the new ones drawn by seed."""
        while self.head.out_features < 2 * task:
            rows = self.head.out_features
            generator = torch.Generator().manual_seed(rows)
            new = torch.randn(2, 6, generator=generator).to(self.head.weight) / 2
            old, self.head = self.head, nn.Linear(6, rows + 2, dtype=self.head.weight.dtype)
            with torch.no_grad():
                self.head.weight.copy_(torch.cat([old.weight, new]))
                self.head.bias.copy_(torch.cat([old.bias, torch.zeros(2).to(old.bias)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)))


def samples(task: int) -> tuple[Tensor, Tensor]:
    """Images and labels of a task; batches are taken in this order in every epoch."""
    generator = torch.Generator().manual_seed(100 + task)
    count = BATCHES * BATCH
    return torch.randn(count, 5, generator=generator), torch.randint(2 * task, (count,), generator=generator)


def batches(task: int) -> list[tuple[Tensor, Tensor]]:
    x, y = samples(task)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@cache
def reference() -> tuple[Weights, Weights]:
    """Weights and Fbar after the three tasks by reference.py, in float64."""
    model = Network().double()

    def task(number: int) -> ReferenceTask:
        def initialize(theta: Weights) -> Weights:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(theta[name])
            model.grow_to(number)
            return weights(model)

        def gradient(theta: Weights, batch: Any) -> Weights:
            leaves = {name: value.requires_grad_() for name, value in theta.items()}
            loss = functional.cross_entropy(functional_call(model, leaves, (batch[0].double(),)), batch[1])
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

        def update(theta: Weights, g: Weights) -> Weights:
            return {name: theta[name] - RATE * g[name] for name in theta}

        return ReferenceTask(initialize, [batches(number)] * EPOCHS, gradient, update)

    return increment_vector_transformation(weights(model), [task(number + 1) for number in range(TASKS)], INTERVAL)


class Normalized(Network):
    """With BatchNorm behind a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(5, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        with torch.no_grad():
            self.narrow.weight.copy_(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.narrow(x)))


def plain(kind: type[Network] = Network, **options: Any) -> tuple[Weights, Weights]:
    """The three tasks with the plug-in in a loop of one's own."""
    model = kind()
    ivt = IVT(model, interval=INTERVAL, **options)
    for task in range(1, TASKS + 1):
        model.grow_to(task)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        ivt.begin_task(optimizer, epochs=EPOCHS)
        for _ in range(EPOCHS):
            for x, y in batches(task):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                if ivt.fisher_loss == "own" and ivt.collecting:
                    ivt.collect(loss)
                (2 * loss if ivt.fisher_loss == "own" else loss).backward()
                optimizer.step()
            ivt.end_epoch()
        ivt.end_task()
    return weights(model), dict(ivt.cumulative)


def difference(have: Weights, want: Weights) -> float:
    """The largest one, relative to the largest value of its tensor."""
    assert have.keys() == want.keys()
    return max(float((have[name] - want[name]).abs().max() / want[name].abs().max()) for name in want)


def assert_reference(model: nn.Module, ivt: IVT) -> None:
    theta, cumulative = reference()
    print(f"difference to the reference: {difference(weights(model), theta):.1e} in the weights")
    assert difference(weights(model), theta) < 1e-6
    assert difference(dict(ivt.cumulative), cumulative) < 1e-5


def assert_same(model: nn.Module, ivt: IVT, other: nn.Module, other_ivt: IVT) -> None:
    """Bit for bit."""
    assert ivt.task == other_ivt.task
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=0)
    torch.testing.assert_close(dict(ivt.cumulative), dict(other_ivt.cumulative), rtol=0, atol=0)


def killed(run: Callable[[], object]) -> None:
    """Run it in a process that kills itself."""
    process = get_context("fork").Process(target=run)
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
