"""Structures, and arguments or calls that are refused."""

from typing import Any

import pytest
import torch
from torch import nn

import incvec
from incvec import IVT

from .loops import TORCH, base_task, network, step, values


def test_calls_out_of_order_say_what_to_do() -> None:
    model = network()
    ivt = IVT.verbatim(model)
    for call in (ivt.begin_epoch, ivt.end_epoch, ivt.teleport, ivt.end_task, lambda: ivt.watch([])):
        with pytest.raises(RuntimeError, match=r"begin_task\(\) first"):
            call()
    ivt.begin_task()
    with pytest.raises(RuntimeError, match=r"inside task 1.*end_task\(\) first"):
        ivt.begin_task()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval=0"),
        ({"interval": 2.5}, "interval=2.5"),
        ({"structure": "full"}, "'diagonal', 'kernel'"),
        ({"optimizer_state": "drop"}, "'keep', 'reset'"),
        ({"batchnorm": "map"}, "'keep', 'layer', 'recalibrate'"),
        ({"last": "never"}, "'skip', 'teleport'"),
        ({"fisher_loss": "half"}, "'whole', 'own'"),
    ],
)
def test_impossible_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IVT(network(), **options)


def test_a_batch_is_no_probe() -> None:
    probe: Any = torch.zeros(2, 4)
    with pytest.raises(TypeError, match="probe: expected a function"):
        IVT(network(), batchnorm="layer", probe=probe)


def test_something_that_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="Sequential"):
        IVT.verbatim(network()).begin_task(network())


@pytest.mark.parametrize("model", [None, list(network().parameters())])
def test_something_that_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got (NoneType|list)"):
        IVT.verbatim(model)


@pytest.mark.skipif(TORCH < (2, 1), reason="torch 2.1 is the first to compile on Python 3.11")
def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    ivt = IVT.verbatim(compiled, interval=1)
    base_task(model, ivt, optimizer)
    assert set(ivt.cumulative) == set(dict(model.named_parameters()))
    state = ivt.state_dict()
    plain = IVT.verbatim(model, interval=1)
    plain.load_state_dict(state)
    plain.begin_task(optimizer)
    compiled(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert plain.end_epoch()


def test_kernel_structure_solves_slices_and_leaves_the_rest_diagonal() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1, structure="kernel")
    ivt.begin_task(optimizer)
    for seed in range(12):
        step(model, optimizer, seed=seed)
    ivt.end_epoch()
    ivt.end_task()
    ivt.begin_task(optimizer)
    seen = [step(model, optimizer, seed=50 + i) for i in range(12)]
    before = values(model)
    ivt.end_epoch()
    assert ivt.fisher["0.weight"].shape == (3, 2, 9, 9)
    assert ivt.fisher["1.weight"].shape == (2, 3, 1, 1)
    for o in range(3):
        for i in range(2):
            vectors = torch.stack([g["0.weight"][o, i].reshape(9) for g in seen])
            f, a = vectors.T @ vectors / 12, ivt.cumulative["0.weight"][o, i]
            torch.testing.assert_close(ivt.fisher["0.weight"][o, i], f)
            ridge = 1e-6 * torch.trace(2 * a + f) * torch.eye(9, dtype=torch.float64)
            s = torch.linalg.solve(2 * a + f + ridge, a + f + ridge)
            anchor = ivt.anchor["0.weight"][o, i].reshape(9)
            want = anchor + s @ (before["0.weight"][o, i].reshape(9) - anchor)
            torch.testing.assert_close(model[0].weight[o, i].reshape(9).detach(), want)
    s = incvec.scale(ivt.cumulative["1.weight"], sum(g["1.weight"] ** 2 for g in seen) / 12)
    want = ivt.anchor["1.weight"] + s * (before["1.weight"] - ivt.anchor["1.weight"])
    torch.testing.assert_close(model[1].weight.detach(), want)
    row = ivt.report()[0]
    assert row["fisher_new"] == pytest.approx(sum(g["0.weight"] ** 2 for g in seen).mean().item() / 12)
    assert 0.5 <= row["scale"] <= 1
    ivt.end_task()

    wider = nn.Conv2d(2, 4, 3).double()
    model[0] = wider
    model[1] = nn.Conv2d(3, 2, 1).double()
    ivt.begin_task(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert ivt.cumulative["0.weight"].shape == (4, 2, 9, 9)
    assert not ivt.cumulative["0.weight"][3].any()


@pytest.mark.parametrize("always", [False, True])
def test_collect_takes_one_epoch_however_often_it_is_called(always: bool) -> None:
    """Outside the epochs whose F is used, `collect` adds nothing."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, interval=2, exclude=(), last="teleport", fisher_loss="own")
    for task in range(2):
        ivt.begin_task(optimizer, epochs=4)
        for epoch in range(4):
            squares = {name: torch.zeros_like(value) for name, value in values(model).items()}
            for batch in range(3):
                images = torch.randn(5, 4, generator=torch.Generator().manual_seed(epoch * 3 + batch)).double()
                loss = model(images).square().mean()
                if always or ivt.collecting:
                    ivt.collect(loss)
                optimizer.zero_grad()
                loss.backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    squares[name] += parameter.grad.square() / 3
                optimizer.step()
            moved = ivt.end_epoch()
            assert moved == (task == 1 and epoch % 2 == 1)
            if moved or epoch == 3:
                torch.testing.assert_close(dict(ivt.fisher), squares)
        ivt.end_task()


def test_without_a_schedule_every_epoch_collects() -> None:
    """The user may teleport after any epoch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, interval=None, exclude=(), fisher_loss="own")
    ivt.begin_task(optimizer, epochs=3)
    assert ivt.collecting


def test_a_task_without_collect_says_so() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, exclude=(), fisher_loss="own")
    ivt.begin_task(optimizer, epochs=1)
    step(model, optimizer, seed=0)
    with pytest.warns(UserWarning, match=r"collect\(loss\)"):
        ivt.end_epoch()
    with pytest.raises(RuntimeError, match=r"without a step.*collect\(loss\)"):
        ivt.end_task()
