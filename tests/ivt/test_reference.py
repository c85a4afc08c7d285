"""The fast plug-in against Algorithm 1 written out in float64: 100 random steps, a head that grows."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from incvec import IVT
from incvec.ivt.reference import ReferenceTask, increment_vector_transformation

EPOCHS, STEPS, INTERVAL, LEARNING_RATE = 5, 5, 2, 0.3


class Growing(nn.Module):
    """A trunk, a linear head that gains rows in place, and a scale that the second task adds."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.trunk = nn.Linear(5, 6, dtype=dtype)
        self.head = nn.Linear(6, 2, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def grow(self, task: int) -> None:
        if task == 0:
            return
        generator = torch.Generator().manual_seed(task)
        old = self.head
        self.head = nn.Linear(6, old.out_features + 2, dtype=old.weight.dtype)
        with torch.no_grad():
            self.head.weight.copy_(torch.cat([old.weight, torch.randn(2, 6, generator=generator).to(old.weight) / 2]))
            self.head.bias.copy_(torch.cat([old.bias, torch.zeros(2).to(old.bias)]))
        if task == 1:
            self.scale = nn.Parameter(torch.ones(6, dtype=old.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return self.head(hidden * self.scale if hasattr(self, "scale") else hidden)


def batches(task: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(100 + task)
    classes = 2 + 2 * task
    return [
        [
            (torch.randn(8, 5, generator=generator), torch.randint(classes, (8,), generator=generator))
            for _ in range(STEPS)
        ]
        for _ in range(EPOCHS)
    ]


def with_plugin(dtype: torch.dtype, tasks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = Growing(dtype)
    ivt = IVT.verbatim(model, interval=INTERVAL)
    for task in range(tasks):
        model.grow(task)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        ivt.begin_task(optimizer=optimizer)
        for epoch in batches(task):
            for x, y in epoch:
                optimizer.zero_grad()
                functional.cross_entropy(model(x.to(dtype)), y).backward()
                optimizer.step()
            ivt.end_epoch()
        ivt.end_task()
    return {name: p.detach() for name, p in model.named_parameters()}, dict(ivt.cumulative)


def by_the_book(tasks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = Growing(torch.float64)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def task(index: int) -> ReferenceTask:
        def initialize(theta: Any) -> Any:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(theta[name])
            model.grow(index)
            return dict(model.named_parameters())

        def gradient(theta: Any, batch: Any) -> Any:
            leaves = {name: value.requires_grad_() for name, value in theta.items()}
            loss = functional.cross_entropy(functional_call(model, leaves, (batch[0].double(),)), batch[1])
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

        def update(theta: Any, g: Any) -> Any:
            return {name: theta[name] - LEARNING_RATE * g[name] for name in theta}

        return ReferenceTask(initialize, batches(index), gradient, update)

    return increment_vector_transformation(start, [task(index) for index in range(tasks)], INTERVAL)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-4)])
def test_the_plugin_equals_the_reference_after_100_steps(dtype: Any, tolerance: Any) -> None:
    theta, cumulative = with_plugin(dtype, tasks=4)
    want_theta, want_cumulative = by_the_book(tasks=4)
    assert want_theta["head.weight"].shape == (8, 6)
    assert theta.keys() == want_theta.keys() == cumulative.keys() == want_cumulative.keys()
    for name in theta:
        torch.testing.assert_close(theta[name].double(), want_theta[name], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            cumulative[name].double(), want_cumulative[name], rtol=10 * tolerance, atol=tolerance
        )


def test_the_reference_teleports_at_all() -> None:
    with_ivt, _ = by_the_book(tasks=2)
    global INTERVAL
    interval, INTERVAL = INTERVAL, None
    try:
        without, _ = by_the_book(tasks=2)
    finally:
        INTERVAL = interval
    assert not torch.allclose(with_ivt["trunk.weight"], without["trunk.weight"], atol=1e-2)


def test_two_tasks_of_quadratics_end_at_the_oracle() -> None:
    """Proposition 1 through the whole plug-in: gradients whose squares are the Hessians, exact minima."""
    generator = torch.Generator().manual_seed(5)
    h1, h2 = (torch.rand(2, 6, generator=generator, dtype=torch.float64) + 0.1).unbind()
    theta_1, c = torch.randn(2, 6, generator=generator, dtype=torch.float64).unbind()
    model = nn.ParameterDict({"theta": nn.Parameter(theta_1.clone())})
    ivt = IVT.verbatim(model, interval=1)
    ivt.begin_task()
    model["theta"].grad = h1.sqrt()
    ivt.core.accumulate()
    ivt.end_epoch()
    ivt.end_task()
    ivt.begin_task()
    model["theta"].grad = -h2.sqrt()
    ivt.core.accumulate()
    with torch.no_grad():
        model["theta"].copy_((h2 * c + h1 * theta_1) / (h1 + h2))  # the minimum of eq. 8
    ivt.end_epoch()
    oracle = (h2 * c + 2 * h1 * theta_1) / (2 * h1 + h2)  # the minimum of eq. 9
    torch.testing.assert_close(model["theta"].detach(), oracle, rtol=1e-14, atol=1e-14)
