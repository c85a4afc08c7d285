"""IVT in an ordinary loop: what Algorithm 1 does, and what happens to a model that changes."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import incvec
from incvec import IVT

from .loops import base_task, grow, network, step, values


def test_one_epoch_is_the_mean_of_squares_and_the_next_starts_from_zero() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    for epoch in range(2):
        seen = [step(model, optimizer, seed=10 * epoch + i) for i in range(3)]
        ivt.end_epoch()
        for name, value in ivt.fisher.items():
            torch.testing.assert_close(value, sum(g[name] ** 2 for g in seen) / 3)
    assert ivt.fisher.keys() == dict(model.named_parameters()).keys()
    last = {name: value.clone() for name, value in ivt.fisher.items()}
    ivt.end_task()
    torch.testing.assert_close(dict(ivt.cumulative), last)


def test_teleport_comes_every_interval_th_epoch_and_not_in_the_first_task() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=2)
    for task in (1, 2):
        ivt.begin_task(optimizer=optimizer)
        assert ivt.task == task
        for epoch in range(1, 6):
            step(model, optimizer, seed=epoch)
            before = values(model)
            moved = ivt.end_epoch()
            assert ivt.epoch == epoch
            assert moved == (task == 2 and epoch in (2, 4))
            if moved:
                for name, value in values(model).items():
                    a, f = ivt.cumulative[name], ivt.fisher[name]
                    s = (a + f) / (a + a + f)
                    torch.testing.assert_close(value, ivt.anchor[name] + s * (before[name] - ivt.anchor[name]))
            else:
                torch.testing.assert_close(values(model), before, rtol=0, atol=0)
        ivt.end_task()


def test_cumulative_adds_the_last_epoch_of_each_task() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=None)
    total: dict[str, torch.Tensor] = {}
    for task in range(3):
        ivt.begin_task(optimizer)
        for epoch in range(2):
            gradients = step(model, optimizer, seed=task * 7 + epoch)
            ivt.end_epoch()
        total = {name: total.get(name, 0) + g**2 for name, g in gradients.items()}
        ivt.end_task()
    torch.testing.assert_close(dict(ivt.cumulative), total)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_cumulative_of_the_first_task_is_a_copy(memory: Any) -> None:
    """A captured step still adds into the old sums when it is replayed after the task."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, memory=memory)
    ivt.begin_task(optimizer)
    gradients = step(model, optimizer, seed=3)
    ivt.end_epoch()
    sums = ivt.fisher
    ivt.end_task()
    for total in sums.values():
        total.add_(1)
    torch.testing.assert_close(dict(ivt.cumulative), {name: g**2 for name, g in gradients.items()})


def test_without_interval_the_user_teleports() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=None)
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer=optimizer)
    before = values(model)
    gradients = step(model, optimizer, seed=5)
    ivt.teleport()
    for name, value in values(model).items():
        s = incvec.scale(ivt.cumulative[name], gradients[name] ** 2)
        torch.testing.assert_close(value, before[name] - 0.1 * s * gradients[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ivt.end_epoch()
    ivt.end_task()


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
        lambda ps: torch.optim.RMSprop(ps, lr=0.1),
    ],
)
def test_parameter_objects_and_optimizer_state_survive_a_teleport(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=3)
    objects = [(id(p), p.data_ptr()) for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    before = values(model)
    assert ivt.end_epoch()
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == objects
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert not torch.equal(values(model)["0.weight"], before["0.weight"])
    moved = values(model)["0.weight"]
    step(model, optimizer, seed=4)
    assert not torch.equal(model[0].weight, moved)


def test_optimizer_state_can_be_reset_in_place() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1, optimizer_state="reset")
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=3)
    pointers = {p: {k: v.data_ptr() for k, v in optimizer.state[p].items()} for p in model.parameters()}
    ivt.end_epoch()
    for p in model.parameters():
        assert {k: v.data_ptr() for k, v in optimizer.state[p].items()} == pointers[p]
        assert all(bool((v == 0).all()) for v in optimizer.state[p].values())
    before = values(model)
    gradients = step(model, optimizer, seed=4)
    for name, value in values(model).items():  # the first step of a fresh Adam is lr * sign(g)
        torch.testing.assert_close(value, before[name] - 0.1 * gradients[name].sign(), rtol=1e-4, atol=1e-6)
    ivt.end_task()
    with pytest.raises(ValueError, match="reset"):
        IVT.verbatim(model, optimizer_state="reset").begin_task()


def test_reset_leaves_the_state_of_new_parameters_alone() -> None:
    model = nn.ModuleDict({"old": nn.Linear(2, 2)})
    ivt = IVT.verbatim(model, interval=1, optimizer_state="reset")
    for task in range(2):
        if task:
            model["new"] = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ivt.begin_task(optimizer)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        ivt.end_epoch()
        if task == 0:
            ivt.end_task()
    buffers = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    assert not buffers["old.weight"].any()
    assert buffers["new.weight"].all()


def test_new_rows_and_new_parameters_never_move_and_vanished_ones_are_dropped() -> None:
    model = network()
    model.register_parameter("old", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    assert "old" in ivt.cumulative
    first = {name: value.clone() for name, value in ivt.cumulative.items()}

    model[2] = grow(model[2], 3)
    del model.old
    model.register_parameter("new", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt.begin_task(optimizer=optimizer)
    assert "old" not in ivt.cumulative
    assert "new" not in ivt.cumulative
    torch.testing.assert_close(ivt.cumulative["2.weight"], torch.cat([first["2.weight"], torch.zeros(3, 3).double()]))
    step(model, optimizer, seed=9)
    before = values(model)
    ivt.end_epoch()
    after = values(model)
    assert torch.equal(after["new"], before["new"])
    assert torch.equal(after["2.weight"][2:], before["2.weight"][2:])
    assert torch.equal(after["2.bias"][2:], before["2.bias"][2:])
    assert not torch.isclose(after["2.weight"][:2], before["2.weight"][:2]).any()
    ivt.end_task()
    assert ivt.cumulative["2.weight"].shape == (5, 3)
    assert "new" in ivt.cumulative


@pytest.mark.parametrize("shape", [(3, 5), (1, 3), (3,)])
def test_a_parameter_that_changed_otherwise_is_refused(shape: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    base_task(model, ivt, optimizer)
    model[2].weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'2\.weight'.*dimension 0"):
        ivt.begin_task(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_growing_after_begin_task_is_noticed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=0)
    model[2] = grow(model[2], 1)
    with pytest.raises(RuntimeError, match="grow the model first"):
        ivt.end_epoch()


def test_memory_is_anchor_cumulative_and_fisher() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=0)
    ivt.end_epoch()
    size = sum(p.numel() for p in model.parameters())
    kept = [*ivt.anchor.values(), *ivt.cumulative.values(), *ivt.core.fisher.sums.values()]
    assert sum(value.numel() for value in kept) == 3 * size
    assert len({value.data_ptr() for value in kept}) == len(kept)
    ivt.end_task()
    assert not ivt.anchor
    assert not ivt.fisher


def test_state_is_float32_or_wider_whatever_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2), nn.Linear(2, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=0)
    assert ivt.end_epoch()
    for part in (ivt.anchor, ivt.cumulative, ivt.fisher):
        assert [part[f"{i}.weight"].dtype for i in range(3)] == [torch.float32, torch.float32, torch.float64]
    assert model[0].weight.dtype == torch.bfloat16


def test_report_tells_of_the_last_teleport() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    base_task(model, ivt, optimizer)
    assert ivt.report() == []
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=0)
    before = values(model)
    ivt.end_epoch()
    rows = {row["name"]: row for row in ivt.report()}
    assert rows.keys() == before.keys()
    for name, row in rows.items():
        a, f = ivt.cumulative[name], ivt.fisher[name]
        assert row["elements"] == a.numel()
        assert row["scale"] == pytest.approx(((a + f) / (2 * a + f)).mean().item())
        assert row["distance_before"] == pytest.approx((before[name] - ivt.anchor[name]).norm().item())
        assert row["distance_after"] == pytest.approx((values(model)[name] - ivt.anchor[name]).norm().item())
        assert row["fisher_new"] == pytest.approx(f.mean().item())
        assert row["fisher_prev"] == pytest.approx(a.mean().item())
        assert row["ratio"] == pytest.approx(f.mean().item() / a.mean().item())


def test_teleports_of_a_task_are_reported_one_by_one_and_survive_a_restart() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=2)
    base_task(model, ivt, optimizer)
    assert ivt.teleports() == []
    ivt.begin_task(optimizer, epochs=4)
    expected = []
    for epoch in range(1, 5):
        step(model, optimizer, seed=epoch)
        before = parameters_to_vector(model.parameters()).detach().clone()
        if ivt.end_epoch():
            names = dict(model.named_parameters())
            mappings = ivt.anchor, ivt.cumulative, ivt.fisher
            anchor, a, f = (torch.cat([each[name].flatten() for name in names]) for each in mappings)
            distances = [(before - anchor).norm(), (parameters_to_vector(model.parameters()) - anchor).norm()]
            expected.append([epoch, ((a + f) / (2 * a + f)).mean().item(), *(float(d) for d in distances)])
        if epoch == 3:
            state = ivt.state_dict()
            ivt.load_state_dict({key: value for key, value in state.items() if not key.startswith("teleport")})
            assert ivt.teleports() == []  # a state of an earlier version
            ivt.load_state_dict(state)
            with pytest.raises(ValueError, match="statistics of the teleports"):
                ivt.load_state_dict({**state, "teleports": torch.zeros(2)})
    assert [epoch for epoch, *_ in expected] == [2, 4]
    assert [list(row.values()) for row in ivt.teleports()] == [pytest.approx(row) for row in expected]
    ivt.end_task()
    assert len(ivt.teleports()) == 2
    ivt.begin_task(optimizer)
    assert ivt.teleports() == []


def test_set_fisher_stands_for_the_tasks_own() -> None:
    model = network()
    ivt = IVT.verbatim(model)
    ivt.begin_task()
    with pytest.raises(KeyError, match="nowhere"):
        ivt.core.set_fisher({"nowhere": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'0\.bias'.*\(3,\).*\(2,\)"):
        ivt.core.set_fisher({"0.bias": torch.ones(2)})
    given = {"0.bias": torch.full((3,), 2.0), "2.weight": torch.ones(2, 3)}
    ivt.core.set_fisher(given)
    ivt.end_task()
    assert {name: value.tolist() for name, value in ivt.cumulative.items()} == {n: v.tolist() for n, v in given.items()}
