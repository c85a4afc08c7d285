"""What a hurried user does: right, or an error or a warning at the earliest moment."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import incvec
from incvec import IVT

from .loops import base_task, gradients_of, grow, network, step, values


def second_task(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, IVT]:
    """A network, its optimizer and an IVT at the beginning of its second task."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, **{"interval": 1, **options})
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    return model, optimizer, ivt


# Numbers that are no numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("structure", ["diagonal", "kernel"])
def test_a_gradient_without_a_finite_square_moves_nothing_and_adds_nothing(bad: float, structure: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1, structure=structure)
    for task in range(3):
        ivt.begin_task(optimizer)
        gradients_of(model, task)
        if task == 1:
            model[0].weight.grad[0] = bad
            model[2].bias.grad[0] = bad
        start = values(model)
        optimizer.step()
        with torch.no_grad():  # as a host that guards its weights does
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name] + 1.0)
        before, past = values(model), {name: value.clone() for name, value in ivt.cumulative.items()}
        ivt.end_epoch()
        assert all(bool(value.isfinite().all()) for value in values(model).values())
        assert all(0.5 <= row["scale"] <= 1 for row in ivt.report())
        if task == 1:
            assert torch.equal(model[2].bias[0], before["2.bias"][0])  # no F, so it is left alone
            assert not torch.equal(model[2].bias[1], before["2.bias"][1])
            assert torch.equal(model[0].weight[0], before["0.weight"][0])
            with pytest.warns(UserWarning, match=r"\d+ weights had gradients in task 2's last epoch .* not finite"):
                ivt.end_task()
            assert ivt.cumulative["2.bias"][0] == past["2.bias"][0]
            assert ivt.cumulative["2.bias"][1] > past["2.bias"][1]
        elif task == 0:
            ivt.end_task()
        assert all(bool(value.isfinite().all()) for value in ivt.cumulative.values())
    assert not torch.equal(model[2].bias[0], before["2.bias"][0])  # the third task teleports it again


def test_tiny_gradients_give_the_scale_of_their_ratio() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    for size in (1e-25, 2e-25):
        ivt.begin_task(optimizer)
        model.weight.grad = torch.full((1, 1), size)
        optimizer.step()
        ivt.end_epoch()
        if ivt.task == 1:
            ivt.end_task()
    assert ivt.report()[0]["scale"] == pytest.approx((1 + 4) / (2 + 4), rel=1e-5)


def test_fishers_that_are_none_are_refused() -> None:
    model, _, ivt = second_task()
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=r"not finite|negative"):
            ivt.core.set_fisher({"0.bias": torch.full((3,), bad)})
        with pytest.raises(ValueError, match="finite numbers from 0 up"):
            incvec.scale(torch.tensor([1.0]), torch.tensor([bad]))
        state = ivt.state_dict()
        state["cumulative/0.bias"] = torch.full((3,), bad, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"'0\.bias'.*(not finite|negative)"):
            IVT.verbatim(model).load_state_dict(state)


# Calls that are forgotten or too late -------------------------------------------------------------------------


def test_a_task_without_end_epoch_says_so() -> None:
    model, optimizer, ivt = second_task()
    step(model, optimizer, seed=1)
    with pytest.warns(UserWarning, match=r"end_task\(\) without end_epoch\(\)"):
        ivt.end_task()


def test_steps_after_the_last_end_epoch_are_noticed() -> None:
    model, optimizer, ivt = second_task()
    step(model, optimizer, seed=1)
    ivt.end_epoch()
    step(model, optimizer, seed=2)
    with pytest.warns(UserWarning, match=r"steps after the last end_epoch\(\) of task 2"):
        ivt.end_task()


def test_the_first_epoch_without_a_step_warns_and_a_regular_task_does_not() -> None:
    model, optimizer, ivt = second_task()
    with pytest.warns(UserWarning, match="IVT is not listening"):
        ivt.end_epoch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            step(model, optimizer, seed=seed)
            ivt.end_epoch()
        ivt.end_task()


@pytest.mark.parametrize("replaced", ["parameter", "module"])
def test_a_parameter_replaced_within_a_task_is_an_error(replaced: str) -> None:
    model, _, ivt = second_task()
    if replaced == "module":
        model[2] = grow(model[2], 1)
    else:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    warnings.simplefilter("ignore")  # no step was seen either
    with pytest.raises(RuntimeError, match=r"'2\.weight' was replaced within task 2.*begin_task"):
        ivt.end_epoch()


def test_a_head_added_within_a_task_is_noticed() -> None:
    model, optimizer, ivt = second_task()
    model.add_module("late", nn.Linear(2, 2).double())
    optimizer.add_param_group({"params": list(model.late.parameters())})
    step(model, optimizer, seed=0)
    with pytest.warns(UserWarning, match=r"'late\.weight' was added within task 2"):
        ivt.end_epoch()


def test_a_parameter_given_twice_counts_once() -> None:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, too
        optimizer = torch.optim.SGD([model[0].weight, model[0].weight, model[2].weight], lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    gradients = step(model, optimizer, seed=0)
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["0.weight"], gradients["0.weight"] ** 2)


def test_an_interval_longer_than_the_task_is_noticed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"interval": 10}, 9, "use a smaller interval"),
        ({"interval": 10}, 10, "use a smaller interval"),
        ({"interval": 9, "last": "teleport"}, 8, "use a smaller interval"),
        ({"interval": 1}, 1, 'use interval=1 and last="teleport"'),
    ]
    for options, epochs, remedy in cases:
        ivt = IVT(model, **options)
        base_task(model, ivt, optimizer)
        with pytest.warns(UserWarning, match=rf"IVT changes nothing in a task of {epochs} epoch.*: {remedy}"):
            ivt.begin_task(optimizer, epochs=epochs)
    ivt = IVT(model, interval=1)
    base_task(model, ivt, optimizer)
    with pytest.warns(UserWarning, match="was not told the number of epochs"):
        ivt.begin_task(optimizer)


def test_batchnorm_left_to_chance_is_noticed_once() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2))
    with pytest.warns(UserWarning, match='BatchNorm.*batchnorm="layer"'):
        IVT(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IVT(model, batchnorm="keep")
        IVT.verbatim(model)
        IVT(network())


# Hooks, copies and lifetimes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_clipping_hook_is_seen_whenever_it_was_registered(when: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    if when == "before":
        optimizer.register_step_pre_hook(clip)
    ivt.begin_task(optimizer)
    if when == "after":
        optimizer.register_step_pre_hook(clip)
    step(model, optimizer, seed=0)
    ivt.end_epoch()
    assert 0 < ivt.fisher["0.weight"].max() <= 0.01**2 * 1.0001


def test_a_closure_is_followed_and_its_loss_returned() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    x = torch.ones(3, 4, dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    before = closure().item()
    squares = model[0].weight.grad ** 2
    optimizer.zero_grad()
    assert optimizer.step(closure).item() == before
    ivt.end_epoch()
    torch.testing.assert_close(ivt.fisher["0.weight"], squares)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_within_a_task_listens_again_once_it_is_attached(how: str) -> None:
    model, optimizer, ivt = second_task()
    step(model, optimizer, seed=0)
    both = (model, ivt)
    copied_model, copied = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert copied.core.model is copied_model
    for call in (copied.end_epoch, copied.teleport, copied.end_task):
        with pytest.raises(RuntimeError, match=r"copied or unpickled within a task.*attach"):
            call()
    fresh = torch.optim.SGD(copied_model.parameters(), lr=0.1)
    copied.attach(fresh)
    for each, of in ((optimizer, model), (fresh, copied_model)):
        step(of, each, seed=1)
    assert ivt.end_epoch()
    assert copied.end_epoch()
    torch.testing.assert_close(values(copied_model), values(model), rtol=0, atol=0)
    ivt.end_task()
    copied.end_task()
    again = copy.deepcopy(copied)  # between tasks nothing is missing
    again.begin_task(torch.optim.SGD(again.core.model.parameters(), lr=0.1))


class WithItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.ivt = IVT.verbatim(self, interval=1)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_module_can_contain_its_plugin(how: str) -> None:
    """As a LightningModule might; a copy serves as a teacher, for example."""
    model = WithItsOwn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base_task(model, model.ivt, optimizer)
    model.ivt.begin_task(optimizer)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert copied.ivt.core.model is copied
    fresh = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied.ivt.attach(fresh)
    for each, of in ((optimizer, model), (fresh, copied)):
        step(of, each, seed=1)
        assert of.ivt.end_epoch()
    torch.testing.assert_close(values(copied), values(model), rtol=0, atol=0)


def test_nothing_keeps_a_dropped_ivt_or_its_optimizer_alive() -> None:
    model, optimizer, ivt = second_task()
    gone = weakref.ref(ivt)
    del ivt
    gc.collect()
    assert gone() is None
    step(model, optimizer, seed=0)  # the hook that is left does nothing
    model, optimizer, ivt = second_task()
    step(model, optimizer, seed=0)
    ivt.end_epoch()
    ivt.end_task()
    gone_optimizer = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone_optimizer() is None
    assert ivt.task == 2


def test_detach_removes_every_hook() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2, bias=False), nn.BatchNorm2d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, batchnorm="layer")
    ivt.begin_task(optimizer, epochs=1)
    assert model._forward_pre_hooks
    assert optimizer._optimizer_step_pre_hooks
    pickle.loads(pickle.dumps(copy.deepcopy(model)))  # a hook of ours is no obstacle
    ivt.detach()
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
        lambda p: torch.optim.ASGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adadelta(p, lr=0.1),
    ],
    ids=["SGD", "SGD with dampening", "Adam", "NAdam", "Rprop", "ASGD", "Adagrad", "Adadelta"],
)
def test_a_reset_optimizer_steps_like_a_fresh_one(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    ivt = IVT.verbatim(model, interval=1, optimizer_state="reset")
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    for seed in range(3):
        step(model, optimizer, seed=seed)
    assert ivt.end_epoch()
    other = copy.deepcopy(model)
    fresh = make(other.parameters())
    for seed in (7, 8):
        step(model, optimizer, seed=seed)
        step(other, fresh, seed=seed)
        torch.testing.assert_close(values(model), values(other))


# Models, names and states -------------------------------------------------------------------------------------


def test_complex_parameters_are_refused_unless_they_are_left_alone() -> None:
    model = network()
    model.register_parameter("wave", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"'wave' is complex.*exclude=\['wave'\]"):
        IVT(model).begin_task(optimizer)
    IVT(model, exclude=["wave"]).begin_task(optimizer)


@pytest.mark.parametrize("exclude", [["nowhere."], ["head"], nn.Linear(1, 1), [3]])
def test_an_exclusion_that_matches_nothing_is_refused(exclude: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="exclude"):
        IVT(network(), exclude=exclude).begin_task()


@pytest.mark.parametrize(
    "exclude", ["2", "2.", ["2"], ("2.weight", "2.bias"), lambda name, parameter: name.startswith("2.")]
)
def test_what_is_excluded_stays_and_collects(exclude: Any) -> None:
    model, optimizer, ivt = second_task(exclude=exclude)
    step(model, optimizer, seed=0)
    before = values(model)
    assert ivt.end_epoch()
    after = values(model)
    assert all(torch.equal(after[name], before[name]) == name.startswith("2.") for name in before)
    ivt.end_task()
    assert ivt.cumulative.keys() == before.keys()


def test_a_module_can_be_excluded() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model, interval=1, exclude=model[0], last="teleport")
    base_task(model, ivt, optimizer)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=0)
    before = values(model)
    assert ivt.end_epoch()
    assert torch.equal(values(model)["0.weight"], before["0.weight"])
    assert not torch.equal(values(model)["2.weight"], before["2.weight"])


def test_names_that_vanish_are_noticed_and_can_be_continued() -> None:
    for past in (None, {"new.weight": "old.weight", "new.bias": "old.bias"}):
        model = nn.ModuleDict({"body": nn.Linear(4, 3), "old": nn.Linear(3, 2)}).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ivt = IVT.verbatim(model)
        base_task(model, ivt, optimizer)
        earlier = ivt.cumulative["old.weight"]
        model["new"] = model.pop("old")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if past is None:
            with pytest.warns(UserWarning, match=r"no longer has 2 .*'old\.weight'.*past="):
                ivt.begin_task(optimizer)
            assert "new.weight" not in ivt.cumulative
        else:
            ivt.begin_task(optimizer, past=past)
            torch.testing.assert_close(ivt.cumulative["new.weight"], earlier)
            ivt.abandon_task()
            torch.testing.assert_close(ivt.cumulative["old.weight"], earlier)
            assert ivt.task == 1
    with pytest.raises(KeyError, match="no parameters"):
        ivt.begin_task(optimizer, past={"nowhere": "old.weight"})
    with pytest.raises(KeyError, match="cannot continue"):
        ivt.begin_task(optimizer, past={"new.weight": "nowhere"})


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_head_that_is_left_alone_can_be_made_anew(rows: int) -> None:
    """Its past makes no difference, so it needs neither `past` nor a warning, whatever its size."""
    model = network()
    ivt = IVT.verbatim(model, interval=1, exclude=["2"])
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            base_task(model, ivt, optimizer)
        model[2] = nn.Linear(3, rows).double()
    assert {row["name"] for row in ivt.report()} == {"0.weight", "0.bias"}


def test_warnings_name_the_line_of_the_loop() -> None:
    model, optimizer, ivt = second_task()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        IVT(nn.BatchNorm1d(1))
        for _ in ivt.watch([]):
            pass
        step(model, optimizer, seed=0)
        ivt.end_epoch()
        step(model, optimizer, seed=0)
        ivt.end_task()
        ivt.interval = 5
        ivt.begin_task(optimizer, epochs=2)
    expected = ["batchnorm= was not given", "without a step", "steps after the last", "changes nothing"]
    for warning, text in zip(caught, expected, strict=True):
        assert text in str(warning.message)
        assert warning.filename == __file__


def test_states_of_other_models_are_refused_between_tasks_too() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    base_task(model, ivt, optimizer)
    state = ivt.state_dict()
    with pytest.raises(KeyError, match=r"the state is of a model with parameters \['0\.bias'"):
        IVT(nn.ModuleDict({"a": nn.Linear(2, 2)})).load_state_dict(state)
    with pytest.raises(ValueError, match=r"'0\.bias'.*only rows appended"):
        IVT(network()).load_state_dict({**state, "cumulative/0.bias": torch.ones(4)})
    with pytest.raises(ValueError, match=r"cumulative/0\.bias was saved as torch.int64"):
        IVT(network()).load_state_dict({**state, "cumulative/0.bias": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match="step counts"):
        IVT(network()).load_state_dict({**state, "steps": torch.tensor(1.0)})


def test_a_task_can_be_abandoned_and_begun_again() -> None:
    model, optimizer, ivt = second_task()
    earlier = {name: value.clone() for name, value in ivt.cumulative.items()}
    step(model, optimizer, seed=0)
    with pytest.raises(RuntimeError, match=r"abandon_task\(\)"):
        ivt.begin_task(optimizer)
    ivt.abandon_task()
    assert ivt.task == 1
    torch.testing.assert_close(dict(ivt.cumulative), earlier, rtol=0, atol=0)
    ivt.begin_task(optimizer)
    assert ivt.task == 2
    ivt.abandon_task()
    with pytest.raises(RuntimeError, match="nothing to abandon"):
        ivt.abandon_task()


# Watching, and a past from elsewhere --------------------------------------------------------------------------


def test_watch_counts_whatever_steps_and_ends_the_epoch() -> None:
    model, other = network(), nn.Linear(1, 1)
    ivt = IVT.verbatim(model, interval=1)
    for task in range(2):
        ivt.begin_task()
        for epoch in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # as late as can be
            foreign = torch.optim.SGD(other.parameters(), lr=0.1)
            watched = ivt.watch([3, 4])
            assert len(watched) == 2
            assert watched.index(4) == 1  # the loader's own methods
            seen = []
            for seed in watched:
                other.weight.grad = torch.ones(1, 1)
                foreign.step()
                seen.append(step(model, optimizer, seed=seed))
            assert ivt.epoch == epoch + 1
        for name, value in ivt.fisher.items():
            torch.testing.assert_close(value, sum(g[name] ** 2 for g in seen) / 2)
        assert bool(ivt.report()) == (task > 0)
        ivt.end_task()


def test_watch_counts_an_attached_optimizer_once_and_a_broken_loop_ends_no_epoch() -> None:
    model, optimizer, ivt = second_task()
    for seed in ivt.watch(range(3)):
        gradients = step(model, optimizer, seed=seed)
        if seed == 0:
            break
    assert ivt.epoch == 0
    torch.testing.assert_close(ivt.fisher["0.weight"], gradients["0.weight"] ** 2)
    for seed in ivt.watch([5]):
        step(model, optimizer, seed=seed)
    assert ivt.epoch == 1
    step(model, optimizer, seed=1)  # no longer watched, but attached
    assert not _global_optimizer_pre_hooks


def test_a_model_trained_elsewhere_gets_a_past() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ivt = IVT.verbatim(model, interval=1)
    ivt.begin_with(data, lambda x: model(x).square().mean())
    assert ivt.task == 1
    squares = []
    for x in data:
        squares.append(torch.autograd.grad(model(x).square().mean(), model[0].weight)[0] ** 2)
    torch.testing.assert_close(ivt.cumulative["0.weight"], sum(squares) / 6)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=0)
    assert ivt.end_epoch()
    with pytest.raises(RuntimeError, match="before the first"):
        ivt.begin_with(data, lambda x: model(x).sum())


def test_measuring_a_past_changes_no_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    data = torch.randn(2, 6, 4)
    ivt = IVT(model, batchnorm="recalibrate", probe=lambda: model(data[0]))
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ivt.begin_with(data, lambda x: model(x).square().mean())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_repr_says_where_it_stands() -> None:
    model, optimizer, ivt = second_task(exclude=["2"])
    assert repr(IVT(network())) == "<IVT of Sequential: no task yet; interval=10, last='skip', batchnorm='keep'>"
    step(model, optimizer, seed=0)
    ivt.end_epoch()
    assert "task 2, epoch 1; interval=1, last='teleport'" in repr(ivt)
    assert "exclude=['2']" in repr(ivt)
