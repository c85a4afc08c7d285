"""The fast plug-in against Algorithm 1 written out in float64: 80 random steps, a head that grows."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from incvec import IVT
from incvec.ivt.reference import ReferenceTask, increment_vector_transformation

EPOCHS, STEPS, INTERVAL, LEARNING_RATE = 4, 5, 2, 0.3
PENALTY = 0.5  # the weight of what stands for distillation: a term that is not the task's own


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


def with_plugin(
    dtype: torch.dtype, tasks: int, own: bool = False, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = Growing(dtype)
    ivt = IVT(model, interval=INTERVAL, **{"exclude": (), "last": "teleport", **options})
    for task in range(tasks):
        model.grow(task)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        ivt.begin_task(optimizer, epochs=EPOCHS)
        for epoch in batches(task):
            for x, y in epoch:
                optimizer.zero_grad()
                logits = model(x.to(dtype))
                loss = functional.cross_entropy(logits, y)
                if own and ivt.collecting:
                    ivt.collect(loss)
                if own:
                    loss = loss + PENALTY * logits.square().mean()
                loss.backward()
                optimizer.step()
            ivt.end_epoch()
        ivt.end_task()
    return {name: p.detach() for name, p in model.named_parameters()}, dict(ivt.cumulative)


def by_the_book(
    tasks: int, own: bool = False, **choices: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = Growing(torch.float64)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def task(index: int) -> ReferenceTask:
        def initialize(theta: Any) -> Any:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(theta[name])
            model.grow(index)
            return dict(model.named_parameters())

        def gradient(theta: Any, batch: Any, penalty: float = PENALTY if own else 0.0) -> Any:
            leaves = {name: value.requires_grad_() for name, value in theta.items()}
            logits = functional_call(model, leaves, (batch[0].double(),))
            loss = functional.cross_entropy(logits, batch[1]) + penalty * logits.square().mean()
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

        def update(theta: Any, g: Any) -> Any:
            return {name: theta[name] - LEARNING_RATE * g[name] for name in theta}

        alone = (lambda theta, batch: gradient(theta, batch, 0.0)) if own else None
        return ReferenceTask(initialize, batches(index), gradient, update, own=alone)

    return increment_vector_transformation(start, [task(index) for index in range(tasks)], INTERVAL, **choices)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-4)])
@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ({}, {}),
        ({"exclude": ["head"], "last": "skip"}, {"exclude": ["head.weight", "head.bias"], "skip_last": True}),
        ({"exclude": None}, {"exclude": ["head.weight", "head.bias"]}),  # by default, what has grown
        ({"exclude": lambda name, parameter: parameter.dim() < 2}, {"exclude": ["trunk.bias", "head.bias", "scale"]}),
        ({"own": True, "fisher_loss": "own"}, {"own": True}),
    ],
    ids=["verbatim", "exclude", "grown", "predicate", "own loss"],
)
def test_the_plugin_equals_the_reference_after_80_steps(
    dtype: Any, tolerance: Any, options: dict[str, Any], choices: dict[str, Any]
) -> None:
    theta, cumulative = with_plugin(dtype, 4, **options)
    want_theta, want_cumulative = by_the_book(4, **choices)
    assert want_theta["head.weight"].shape == (8, 6)
    assert theta.keys() == want_theta.keys() == cumulative.keys() == want_cumulative.keys()
    for name in theta:
        torch.testing.assert_close(theta[name].double(), want_theta[name], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            cumulative[name].double(), want_cumulative[name], rtol=10 * tolerance, atol=tolerance
        )


class Split(nn.Module):
    """PyCIL's PODNet: a head of old rows and a head of new ones, merged and made anew at every task."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.fc1 = nn.Linear(5, 6).double(), nn.Linear(6, 2, bias=False).double()

    def grow(self, task: int) -> None:
        torch.manual_seed(task)
        if task > 1:
            merged = nn.Linear(6, 2 * task, bias=False).double()
            merged.weight.data = torch.cat([self.fc1.weight.data, self.fc2.weight.data])
            self.fc1 = merged
        if task:
            self.fc2 = nn.Linear(6, 2, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.cat([self.fc1(hidden), self.fc2(hidden)], 1) if hasattr(self, "fc2") else self.fc1(hidden)


@pytest.mark.parametrize("told", [True, False])
def test_heads_that_are_merged_and_made_anew_keep_their_past_if_told(told: bool) -> None:
    def past(task: int) -> dict[str, Any]:
        merged = {"fc1.weight": ["fc1.weight", "fc2.weight"], "fc2.weight": None}
        return merged if task > 1 and told else {}

    model, initial = Split(), {name: p.detach().clone() for name, p in Split().named_parameters()}
    ivt, tasks = IVT.verbatim(model, interval=INTERVAL), []
    for task in range(4):
        model.grow(task)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        if task > 1 and not told:
            with pytest.warns(UserWarning, match=r"'fc2.weight' is a new Parameter.*past=\{'fc2.weight': None\}"):
                ivt.begin_task(optimizer)
            return
        ivt.begin_task(optimizer, past=past(task))
        for epoch in batches(task):
            for x, y in epoch:
                optimizer.zero_grad()
                functional.cross_entropy(model(x.double()), y).backward()
                optimizer.step()
            ivt.end_epoch()
        ivt.end_task()

        def gradient(theta: Any, batch: Any) -> Any:
            leaves = {name: value.requires_grad_() for name, value in theta.items()}
            hidden = torch.tanh(functional.linear(batch[0].double(), leaves["trunk.weight"], leaves["trunk.bias"]))
            heads = [hidden @ leaves[f"{name}.weight"].T for name in ("fc1", "fc2") if f"{name}.weight" in leaves]
            loss = functional.cross_entropy(torch.cat(heads, 1), batch[1])
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

        def initialize(theta: Any, task: int = task, start: Any = start) -> Any:
            grown = {**theta}
            if task > 1:
                grown["fc1.weight"] = torch.cat([theta["fc1.weight"], theta["fc2.weight"]])
            return {**grown, "fc2.weight": start["fc2.weight"]} if task else grown

        tasks.append(
            ReferenceTask(
                initialize, batches(task), gradient,
                lambda theta, g: {name: theta[name] - LEARNING_RATE * g[name] for name in theta},
                past={name: value or [] for name, value in past(task).items()},
            )
        )  # fmt: skip
    theta, cumulative = increment_vector_transformation(initial, tasks, INTERVAL)
    assert theta["fc1.weight"].shape == (6, 6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), theta[name], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(ivt.cumulative[name], cumulative[name], rtol=1e-10, atol=1e-11)


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
