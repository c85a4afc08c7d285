"""Whose gradients enter F, and when: optimizers, hooks, hosts without hooks."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import incvec
from incvec import IVT

from .loops import base_task, gradients_of, network, step, values


def test_only_the_stepping_optimizers_parameters_enter_f() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    groups = [{"params": [model[0].weight, model[0].bias], "lr": 0.1}, {"params": [model[2].weight], "lr": 0.01}]
    extra = nn.Parameter(torch.ones(1, dtype=torch.float64))  # auxiliary: trained, but not of the model
    optimizer = torch.optim.SGD([*groups, {"params": [extra]}], lr=1.0)
    ivt = IVT.verbatim(model, interval=1)
    ivt.begin_task(optimizer)
    extra.grad = torch.ones(1, dtype=torch.float64)
    step(model, optimizer, seed=0)  # 2.bias has a gradient, but no optimizer
    ivt.end_epoch()
    assert set(ivt.fisher) == {"0.weight", "2.weight"}
    ivt.end_task()
    assert set(ivt.cumulative) == {"0.weight", "2.weight"}


def test_optimizers_that_step_at_their_own_pace_are_averaged_apart() -> None:
    model = network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task([first, second])
    both = step(model, first, second, seed=0)
    alone = step(model, first, seed=1)
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["0.weight"], (both["0.weight"] ** 2 + alone["0.weight"] ** 2) / 2)
    torch.testing.assert_close(ivt.fisher["2.weight"], both["2.weight"] ** 2)


def test_a_missing_gradient_counts_as_zero_and_is_no_obstacle() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    gradients = step(model, optimizer, seed=0)
    model[2].bias.grad = None
    optimizer.step()
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["2.bias"], gradients["2.bias"] ** 2 / 2)
    torch.testing.assert_close(ivt.fisher["0.bias"], gradients["0.bias"] ** 2)


def test_what_never_had_a_gradient_is_not_teleported() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    model.zero_grad()
    ivt.begin_task(optimizer)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    with torch.no_grad():
        model[2].weight.add_(1.0)  # moved by someone else: IVT knows no F_t for it
    before = values(model)
    assert ivt.end_epoch()
    after = values(model)
    assert torch.equal(after["2.weight"], before["2.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])


def test_a_parameter_unfrozen_within_the_task_joins_with_its_value() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    model[0].requires_grad_(False)
    model.zero_grad()
    ivt.begin_task(optimizer)
    assert "0.weight" not in ivt.anchor
    step(model, optimizer, seed=0)
    model[0].requires_grad_(True)
    start = model[0].weight.detach().clone()
    gradients = step(model, optimizer, seed=1)
    ivt.end_epoch()
    assert torch.equal(ivt.anchor["0.weight"], start)
    s = incvec.scale(ivt.cumulative["0.weight"], gradients["0.weight"] ** 2)
    torch.testing.assert_close(model[0].weight.detach(), start - 0.1 * s * gradients["0.weight"])


def test_accumulated_gradients_are_squared_once_a_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        for part in x.split(2):
            (model(part).square().mean() / 4).backward()
        gradient = model[0].weight.grad.clone()
        optimizer.step()
    ivt.end_epoch()
    assert not torch.allclose(gradient, torch.zeros_like(gradient))
    model_before = network()
    model_before(x).square().mean().backward()
    torch.testing.assert_close(ivt.fisher["0.weight"], (model_before[0].weight.grad ** 2 + gradient**2) / 2)


def test_lbfgs_is_refused() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    ivt = IVT.verbatim(model)

    def closure() -> Any:
        return 0.0

    with pytest.raises(RuntimeError, match="LBFGS"):
        ivt.begin_task(optimizer)
    assert not ivt.in_task
    ivt.begin_task()
    with pytest.raises(RuntimeError, match="LBFGS"):
        ivt.attach(optimizer)
    batches = iter(ivt.watch([0]))
    next(batches)
    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        with pytest.raises(RuntimeError, match="LBFGS evaluates its closure several times"):
            call()
    batches.close()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt.attach(sgd)
    gradients_of(model, 0)
    sgd.step(None)


def test_a_lost_hook_is_noticed_as_a_task_without_steps() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    lost = copy.deepcopy(optimizer, {id(p): p for p in model.parameters()})
    assert lost.param_groups[0]["params"][0] is model[0].weight
    step(model, lost, seed=0)
    with pytest.warns(UserWarning, match="without a step"):
        ivt.end_epoch()
    with pytest.raises(RuntimeError, match=r"task 1 ends without a step.*deep copy"):
        ivt.end_task()
    ivt.core.set_fisher({name: torch.ones_like(p) for name, p in model.named_parameters()})
    ivt.end_task()
    assert ivt.cumulative["0.bias"].tolist() == [1.0, 1.0, 1.0]


def test_an_optimizer_of_another_model_is_refused_at_once() -> None:
    model = network()
    _, optimizer = copy.deepcopy((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(ValueError, match="another model"):
        IVT.verbatim(model).begin_task(optimizer)


def test_a_new_optimizer_replaces_the_old_one() -> None:
    model = network()
    old, new = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer=new)
    gradients = step(model, new, seed=0)
    step(model, old, seed=1)
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["0.weight"], gradients["0.weight"] ** 2)


def test_attach_takes_optimizers_as_begin_task_does() -> None:
    model = network()
    parts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    ivt = IVT.verbatim(model)
    for given in ((parts,), tuple(parts), (iter(parts),)):
        ivt.begin_task(parts[0])
        ivt.attach(*given)
        gradients = step(model, *parts, seed=0)
        assert ivt.fisher.keys() == gradients.keys()
        ivt.abandon_task()


def test_steps_between_tasks_are_not_listened_to() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    step(model, optimizer, seed=0)
    base_task(model, ivt, optimizer)
    fisher = {name: value.clone() for name, value in ivt.cumulative.items()}
    step(model, optimizer, seed=0)  # a balanced stage, say
    ivt.begin_task(optimizer)
    torch.testing.assert_close(dict(ivt.cumulative), fisher, rtol=0, atol=0)
    torch.testing.assert_close(dict(ivt.anchor), values(model), rtol=0, atol=0)


def test_a_host_without_hooks_accumulates_itself() -> None:
    model = network()
    ivt = IVT.verbatim(model, interval=1)
    hooked = network()
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.1)
    by_hook = IVT.verbatim(hooked, interval=1)
    for task in range(2):
        ivt.begin_task()
        by_hook.begin_task(optimizer)
        for epoch in range(2):
            ivt.begin_epoch()
            ivt.begin_epoch()  # again changes nothing
            for i in range(3):
                gradients_of(model, 100 * task + 10 * epoch + i)
                ivt.core.accumulate([(p, p.grad) for p in model.parameters()] if i else None)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=-0.1)
                step(hooked, optimizer, seed=100 * task + 10 * epoch + i)
            assert ivt.end_epoch() == by_hook.end_epoch()
            torch.testing.assert_close(values(model), values(hooked))
        ivt.end_task()
        by_hook.end_task()
    torch.testing.assert_close(dict(ivt.cumulative), dict(by_hook.cumulative))


class Operations(TorchDispatchMode):
    """Notes what runs: on the device, anything here that reads a value back would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_is_few_operations_and_nothing_reads_back() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    ivt.begin_task(optimizer)
    gradients_of(model, 0)
    with Operations() as operations:
        ivt.core.accumulate((p, p.grad) for p in model.parameters())
    assert operations.names == ["_foreach_addcmul_", "add_"]
    ivt.end_epoch()
    ivt.end_task()

    ivt.begin_task(optimizer=optimizer)
    buffers = {name: value.data_ptr() for name, value in ivt.core.fisher.sums.items()}
    with Operations() as operations:
        for epoch in range(2):
            ivt.begin_epoch()
            step(model, optimizer, seed=epoch)
            assert ivt.end_epoch()
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "index", "equal", "is_nonzero"}
    assert not waiting & set(operations.names)
    assert {name: value.data_ptr() for name, value in ivt.core.fisher.sums.items()} == buffers
