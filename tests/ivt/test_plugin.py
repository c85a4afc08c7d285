"""IVT in ordinary loops."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import incvec
from incvec import IVT


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def gradients_of(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, seed: int) -> dict[str, torch.Tensor]:
    gradients_of(model, seed)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for optimizer in optimizers:
        optimizer.step()
    return gradients


def base_task(model: nn.Module, ivt: IVT, *optimizers: torch.optim.Optimizer) -> None:
    ivt.begin_task(optimizer=optimizers)
    for seed in range(3):
        step(model, *optimizers, seed=seed)
    ivt.end_epoch()
    ivt.end_task()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_one_epoch_is_the_mean_of_squares_and_the_next_starts_from_zero():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer)
    ivt.begin_task()
    for epoch in range(2):
        seen = [step(model, optimizer, seed=10 * epoch + i) for i in range(3)]
        ivt.end_epoch()
        for name, value in ivt.fisher.items():
            torch.testing.assert_close(value, sum(g[name] ** 2 for g in seen) / 3)
    assert ivt.fisher.keys() == dict(model.named_parameters()).keys()
    last = {name: value.clone() for name, value in ivt.fisher.items()}
    ivt.end_task()
    torch.testing.assert_close(dict(ivt.cumulative), last)


def test_teleport_comes_every_interval_th_epoch_and_not_in_the_first_task():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=2)
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


def test_cumulative_adds_the_last_epoch_of_each_task():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=None)
    total: dict[str, torch.Tensor] = {}
    for task in range(3):
        ivt.begin_task()
        for epoch in range(2):
            gradients = step(model, optimizer, seed=task * 7 + epoch)
            ivt.end_epoch()
        total = {name: total.get(name, 0) + g**2 for name, g in gradients.items()}
        ivt.end_task()
    torch.testing.assert_close(dict(ivt.cumulative), total)


def test_without_interval_the_user_teleports():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=None)
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
def test_parameter_objects_and_optimizer_state_survive_a_teleport(make):
    model = network()
    optimizer = make(model.parameters())
    ivt = IVT(model, optimizer, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task()
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


def test_optimizer_state_can_be_reset_in_place():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1, optimizer_state="reset")
    base_task(model, ivt, optimizer)
    ivt.begin_task()
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
        IVT(model, optimizer_state="reset").begin_task()


def grow(linear: nn.Linear, rows: int) -> nn.Linear:
    grown = nn.Linear(linear.in_features, linear.out_features + rows).double()
    with torch.no_grad():
        grown.weight[: linear.out_features] = linear.weight
        grown.bias[: linear.out_features] = linear.bias
    return grown


def test_new_rows_and_new_parameters_never_move_and_vanished_ones_are_dropped():
    model = network()
    model.register_parameter("old", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1)
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
def test_a_parameter_that_changed_otherwise_is_refused(shape):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer)
    base_task(model, ivt, optimizer)
    model[2].weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'2\.weight'.*dimension 0"):
        ivt.begin_task(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_growing_after_begin_task_is_noticed():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task()
    step(model, optimizer, seed=0)
    model[2] = grow(model[2], 1)
    with pytest.raises(RuntimeError, match="before begin_task"):
        ivt.end_epoch()


def test_only_the_stepping_optimizers_parameters_enter_f():
    model = network()
    model[0].bias.requires_grad_(False)
    groups = [{"params": [model[0].weight, model[0].bias], "lr": 0.1}, {"params": [model[2].weight], "lr": 0.01}]
    extra = nn.Parameter(torch.ones(1, dtype=torch.float64))  # auxiliary: trained, but not of the model
    optimizer = torch.optim.SGD([*groups, {"params": [extra]}], lr=1.0)
    ivt = IVT(model, optimizer, interval=1)
    ivt.begin_task()
    extra.grad = torch.ones(1, dtype=torch.float64)
    step(model, optimizer, seed=0)  # 2.bias has a gradient, but no optimizer
    ivt.end_epoch()
    assert set(ivt.fisher) == {"0.weight", "2.weight"}
    ivt.end_task()
    assert set(ivt.cumulative) == {"0.weight", "2.weight"}


def test_optimizers_that_step_at_their_own_pace_are_averaged_apart():
    model = network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.1)
    ivt = IVT(model, first, second)
    ivt.begin_task()
    both = step(model, first, second, seed=0)
    alone = step(model, first, seed=1)
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["0.weight"], (both["0.weight"] ** 2 + alone["0.weight"] ** 2) / 2)
    torch.testing.assert_close(ivt.fisher["2.weight"], both["2.weight"] ** 2)


def test_a_missing_gradient_counts_as_zero_and_is_no_obstacle():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer)
    ivt.begin_task()
    gradients = step(model, optimizer, seed=0)
    model[2].bias.grad = None
    optimizer.step()
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["2.bias"], gradients["2.bias"] ** 2 / 2)
    torch.testing.assert_close(ivt.fisher["0.bias"], gradients["0.bias"] ** 2)


def test_a_parameter_unfrozen_within_the_task_joins_with_its_value():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1)
    base_task(model, ivt, optimizer)
    model[0].requires_grad_(False)
    model.zero_grad()
    ivt.begin_task()
    assert "0.weight" not in ivt.anchor
    step(model, optimizer, seed=0)
    model[0].requires_grad_(True)
    start = model[0].weight.detach().clone()
    gradients = step(model, optimizer, seed=1)
    ivt.end_epoch()
    assert torch.equal(ivt.anchor["0.weight"], start)
    s = incvec.scale(ivt.cumulative["0.weight"], gradients["0.weight"] ** 2)
    torch.testing.assert_close(model[0].weight.detach(), start - 0.1 * s * gradients["0.weight"])


def test_accumulated_gradients_are_squared_once_a_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer)
    ivt.begin_task()
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


def test_a_closure_is_refused():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    ivt = IVT(model, optimizer)

    def closure():
        return 0.0

    optimizer.step(closure)  # outside a task IVT does not listen
    ivt.begin_task()
    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        with pytest.raises(RuntimeError, match=r"LBFGS\.step\(closure\).*without a closure"):
            call()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt.attach(sgd)
    gradients_of(model, 0)
    sgd.step(None)


def test_a_lost_hook_is_noticed_as_a_task_without_steps():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer)
    ivt.begin_task()
    lost = copy.deepcopy(optimizer, {id(p): p for p in model.parameters()})
    assert lost.param_groups[0]["params"][0] is model[0].weight
    step(model, lost, seed=0)
    ivt.end_epoch()
    step(model, lost, seed=0)
    with pytest.warns(UserWarning, match="without a step"):
        ivt.end_epoch()
    with pytest.raises(RuntimeError, match=r"task 1 ends without a step.*deep copy"):
        ivt.end_task()
    ivt.set_fisher({name: torch.ones_like(p) for name, p in model.named_parameters()})
    ivt.end_task()
    assert ivt.cumulative["0.bias"].tolist() == [1.0, 1.0, 1.0]


def test_an_optimizer_of_another_model_is_refused_at_once():
    model = network()
    _, optimizer = copy.deepcopy((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(ValueError, match="another model"):
        IVT(model, optimizer).begin_task()


def test_a_new_optimizer_replaces_the_old_one():
    model = network()
    old, new = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    ivt = IVT(model, old)
    ivt.begin_task(optimizer=new)
    gradients = step(model, new, seed=0)
    step(model, old, seed=1)
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["0.weight"], gradients["0.weight"] ** 2)


def test_steps_between_tasks_are_not_listened_to():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer)
    step(model, optimizer, seed=0)
    base_task(model, ivt, optimizer)
    fisher = {name: value.clone() for name, value in ivt.cumulative.items()}
    step(model, optimizer, seed=0)  # a balanced stage, say
    ivt.begin_task()
    torch.testing.assert_close(dict(ivt.cumulative), fisher, rtol=0, atol=0)
    torch.testing.assert_close(dict(ivt.anchor), values(model), rtol=0, atol=0)


def test_a_host_without_hooks_accumulates_itself():
    model = network()
    ivt = IVT(model, interval=1)
    hooked = network()
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.1)
    by_hook = IVT(hooked, optimizer, interval=1)
    for task in range(2):
        ivt.begin_task()
        by_hook.begin_task()
        for epoch in range(2):
            ivt.begin_epoch()
            ivt.begin_epoch()  # again changes nothing
            for i in range(3):
                gradients_of(model, 100 * task + 10 * epoch + i)
                ivt.accumulate(model.parameters() if i else None)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=-0.1)
                step(hooked, optimizer, seed=100 * task + 10 * epoch + i)
            assert ivt.end_epoch() == by_hook.end_epoch()
            torch.testing.assert_close(values(model), values(hooked))
        ivt.end_task()
        by_hook.end_task()
    torch.testing.assert_close(dict(ivt.cumulative), dict(by_hook.cumulative))


def test_listen_false_knows_the_optimizer_but_registers_nothing():
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    ivt = IVT(model, optimizer, listen=False)
    ivt.begin_task()
    step(model, optimizer, seed=0)
    assert not ivt.fisher
    ivt.accumulate()
    assert set(ivt.fisher) == {"2.weight", "2.bias"}


class Operations(TorchDispatchMode):
    """Notes what runs: on the device, anything here that reads a value back would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_is_two_in_place_operations_and_nothing_reads_back():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, interval=1)
    ivt.begin_task()
    gradients_of(model, 0)
    with Operations() as operations:
        ivt.accumulate(model.parameters())
    assert operations.names == ["_foreach_addcmul_", "add_"]
    ivt.end_epoch()
    ivt.end_task()

    ivt.begin_task(optimizer=optimizer)
    buffers = {name: value.data_ptr() for name, value in ivt._fisher.sums.items()}
    with Operations() as operations:
        for epoch in range(2):
            ivt.begin_epoch()
            step(model, optimizer, seed=epoch)
            assert ivt.end_epoch()
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "index", "equal", "is_nonzero"}
    assert not waiting & set(operations.names)
    assert {name: value.data_ptr() for name, value in ivt._fisher.sums.items()} == buffers


def test_memory_is_anchor_cumulative_and_fisher():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task()
    step(model, optimizer, seed=0)
    ivt.end_epoch()
    size = sum(p.numel() for p in model.parameters())
    kept = [*ivt.anchor.values(), *ivt.cumulative.values(), *ivt._fisher.sums.values()]
    assert sum(value.numel() for value in kept) == 3 * size
    assert len({value.data_ptr() for value in kept}) == len(kept)
    ivt.end_task()
    assert not ivt.anchor
    assert not ivt.fisher


def test_state_is_float32_or_wider_whatever_the_model():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2), nn.Linear(2, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1)
    base_task(model, ivt, optimizer)
    ivt.begin_task()
    step(model, optimizer, seed=0)
    assert ivt.end_epoch()
    for part in (ivt.anchor, ivt.cumulative, ivt.fisher):
        assert [part[f"{i}.weight"].dtype for i in range(3)] == [torch.float32, torch.float32, torch.float64]
    assert model[0].weight.dtype == torch.bfloat16


def test_report_tells_of_the_last_teleport():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1)
    base_task(model, ivt, optimizer)
    assert ivt.report() == []
    ivt.begin_task()
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


def test_set_fisher_stands_for_the_tasks_own():
    model = network()
    ivt = IVT(model)
    ivt.begin_task()
    with pytest.raises(KeyError, match="nowhere"):
        ivt.set_fisher({"nowhere": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'0\.bias'.*\(3,\).*\(2,\)"):
        ivt.set_fisher({"0.bias": torch.ones(2)})
    given = {"0.bias": torch.full((3,), 2.0), "2.weight": torch.ones(2, 3)}
    ivt.set_fisher(given)
    ivt.end_task()
    assert {name: value.tolist() for name, value in ivt.cumulative.items()} == {n: v.tolist() for n, v in given.items()}


def test_calls_out_of_order_say_what_to_do():
    model = network()
    ivt = IVT(model)
    for call in (ivt.begin_epoch, ivt.accumulate, ivt.end_epoch, ivt.teleport, ivt.end_task):
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
        ({"fisher": "empirical"}, "'batch', 'sample', 'exact', 'sampled'"),
        ({"optimizer_state": "drop"}, "'keep', 'reset'"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        IVT(network(), **options)


def test_something_that_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="got Sequential"):
        IVT(network(), network())


def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    ivt = IVT(compiled, optimizer, interval=1)
    base_task(model, ivt, optimizer)
    assert set(ivt.cumulative) == set(dict(model.named_parameters()))
    state = ivt.state_dict()
    plain = IVT(model, optimizer, interval=1)
    plain.load_state_dict(state)
    plain.begin_task()
    compiled(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert plain.end_epoch()


def test_kernel_structure_solves_slices_and_leaves_the_rest_diagonal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, optimizer, interval=1, structure="kernel")
    ivt.begin_task()
    for seed in range(12):
        step(model, optimizer, seed=seed)
    ivt.end_epoch()
    ivt.end_task()
    ivt.begin_task()
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


@pytest.mark.parametrize("kind", ["sample", "exact", "sampled"])
@pytest.mark.parametrize("structure", ["diagonal", "kernel"])
def test_observed_estimators_feed_the_same_schedule(kind, structure):
    from incvec.ivt.fisher import estimate

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 2, 0, 1])

    def function(batch):
        output = model(batch[0])
        return nn.functional.cross_entropy(output, batch[1]) if kind == "sample" else output

    def seeded():
        return torch.Generator().manual_seed(3) if kind == "sampled" else None

    ivt = IVT(model, optimizer, interval=1, fisher=kind, structure=structure)
    for task in range(2):
        ivt.begin_task()
        step(model, optimizer, seed=task)
        running = model[1].running_mean.clone()
        generator = seeded()
        ivt.observe(function, (x[:2], y[:2]), generator=generator)
        ivt.observe(function, (x[2:], y[2:]), generator=generator)
        assert torch.equal(model[1].running_mean, running)
        assert model[1].training
        batches = [(x[:2], y[:2]), (x[2:], y[2:])]
        want = estimate(model, function, batches, kind=kind, structure=structure, generator=seeded())
        before = values(model)
        assert ivt.end_epoch() == (task == 1)
        torch.testing.assert_close(dict(ivt.fisher), want)
        if task == 1:
            s = incvec.scale(ivt.cumulative["3.weight"], want["3.weight"])
            anchor = ivt.anchor["3.weight"]
            torch.testing.assert_close(values(model)["3.weight"], anchor + s * (before["3.weight"] - anchor))
        with pytest.raises(RuntimeError, match="observe"):
            ivt.accumulate()
        ivt.end_task()
    with pytest.raises(RuntimeError, match="listens to the optimizer"):
        by_steps = IVT(model, optimizer)
        by_steps.begin_task()
        by_steps.observe(function, (x, y))
