"""Saving and going on: nothing may change."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from incvec import IVT

from .loops import network, step


def build(head: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, head))


def run(stop: tuple[int, int, int] | None, structure: str = "diagonal", through: Any = lambda state: state) -> Any:
    """Two tasks of two epochs of three steps; at `stop` everything is made anew from saved states."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ivt = IVT.verbatim(model, interval=1, structure=structure)
    for task in range(2):
        ivt.begin_task(optimizer)
        for epoch in range(2):
            for i in range(4):
                if (task, epoch, i) == stop:
                    saved = model.state_dict(), optimizer.state_dict(), through(ivt.state_dict())
                    ivt.core.accumulate()  # what happens after saving must not reach into the saved state
                    model = build()
                    model.load_state_dict(saved[0])
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                    optimizer.load_state_dict(saved[1])
                    ivt = IVT.verbatim(model, interval=1, structure=structure)
                    ivt.load_state_dict(saved[2])
                    ivt.attach(optimizer)
                if i < 3:
                    generator = torch.Generator().manual_seed(100 * task + 10 * epoch + i)
                    for parameter in model.parameters():
                        parameter.grad = torch.randn(parameter.shape, generator=generator)
                    optimizer.step()
            ivt.end_epoch()
        ivt.end_task()
    return {**model.state_dict(), **{f"F/{name}": value for name, value in ivt.cumulative.items()}}


@pytest.mark.parametrize("structure", ["diagonal", "kernel"])
@pytest.mark.parametrize("stop", [(0, 0, 0), (0, 1, 2), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 2), (1, 1, 3)])
def test_saving_and_loading_in_the_middle_of_an_epoch_changes_nothing(stop: Any, structure: str) -> None:
    torch.testing.assert_close(run(stop, structure), run(None, structure), rtol=0, atol=0)


def test_a_state_goes_through_a_safetensors_file_as_it_is(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def through(state: Any) -> Any:
        safetensors.save_file(state, tmp_path / "state.safetensors")
        return safetensors.load_file(tmp_path / "state.safetensors")

    torch.testing.assert_close(run((1, 1, 2), through=through), run(None), rtol=0, atol=0)


def test_the_keys_are_flat_and_say_what_they_hold() -> None:
    model = nn.Linear(2, 2)
    ivt = IVT.verbatim(model)
    ivt.begin_task()
    model.weight.grad = torch.ones(2, 2)
    ivt.core.accumulate()
    state = ivt.state_dict()
    assert set(state) == {
        "anchor/weight", "anchor/bias", "fisher/weight", "steps", "task", "epoch", "in_task", "epoch_finalized",
        "epochs", "exponent",
    }  # fmt: skip
    assert all(value.is_contiguous() for value in state.values())
    counters = {key: (value.dtype, value.item()) for key, value in state.items() if value.dim() == 0}
    assert counters == {
        "task": (torch.int64, 1), "epoch": (torch.int64, 0),
        "in_task": (torch.int64, 1), "epoch_finalized": (torch.int64, 0),
        "epochs": (torch.int64, -1), "exponent": (torch.int64, 64),
    }  # fmt: skip
    ivt.end_epoch()
    ivt.end_task()
    assert set(ivt.state_dict()) == {
        "cumulative/weight", "steps", "task", "epoch", "in_task", "epoch_finalized", "epochs", "exponent"
    }  # fmt: skip


def test_channels_last_states_are_saved_contiguous_and_come_back() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ivt = IVT.verbatim(model)
    ivt.begin_task()
    assert ivt.anchor["weight"].is_contiguous(memory_format=torch.channels_last)
    model.weight.grad = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    ivt.core.accumulate([(model.weight, model.weight.grad)])
    state = ivt.state_dict()
    assert all(value.is_contiguous() for value in state.values())
    other = IVT.verbatim(model)
    other.load_state_dict(state)
    torch.testing.assert_close(other.fisher["weight"], model.weight.grad**2)


def test_loading_writes_into_the_buffers_that_are_there() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    for _ in range(2):
        ivt.begin_task(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if ivt.task == 1:
            ivt.end_epoch()
            ivt.end_task()
    state = ivt.state_dict()

    def pointers() -> Any:
        parts = (ivt.core.anchor, ivt.core.cumulative, ivt.core.fisher.sums)
        counters = [*ivt.core.fisher._steps.values(), *ivt.core.fisher._units.values()]
        return [value.data_ptr() for part in parts for _, value in sorted(part.items())] + [
            counter.data_ptr() for counter in counters
        ]

    before = pointers()
    optimizer.step()
    ivt.load_state_dict(state)
    assert pointers() == before
    torch.testing.assert_close(ivt.state_dict(), state, rtol=0, atol=0)


def test_optimizers_at_their_own_pace_keep_their_counts() -> None:
    def drive(reload: bool) -> dict[str, torch.Tensor]:
        model = build()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)
        ivt = IVT.verbatim(model)
        ivt.begin_task([first, second])
        for i in range(5):
            if reload and i == 3:
                state = ivt.state_dict()
                ivt = IVT.verbatim(model)
                ivt.load_state_dict(state)
                ivt.attach(first, second)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(i))
            first.step()
            if i % 2:
                second.step()
        ivt.end_epoch()
        return {name: value.clone() for name, value in ivt.fisher.items()}

    got = drive(True)
    torch.testing.assert_close(got, drive(False), rtol=0, atol=0)
    assert got["0.bias"][0].item() == pytest.approx((0 + 1 + 4 + 9 + 16) / 5)
    assert got["2.bias"][0].item() == pytest.approx((1 + 9) / 2)


def test_states_that_do_not_fit_are_refused() -> None:
    model = build()
    ivt = IVT.verbatim(model)
    with pytest.raises(KeyError, match="not a state of IVT"):
        ivt.load_state_dict({"weight": torch.ones(1)})
    ivt.begin_task()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ivt.core.accumulate()
    state = ivt.state_dict()
    with pytest.raises(ValueError, match=r"anchor/2\.bias was saved with shape \(2,\).*\(4,\).*task 1"):
        IVT.verbatim(build(head=4)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"fisher/0\.weight.*structure"):
        IVT.verbatim(model, structure="kernel").load_state_dict(state)
    with pytest.raises(KeyError, match="no such parameter"):
        IVT.verbatim(nn.Linear(2, 2)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"step counts of shape \(1,\), but 4 sums"):
        ivt.load_state_dict({**state, "steps": torch.ones(1)})


def test_a_state_saved_between_tasks_fits_a_model_that_has_grown_since() -> None:
    model = build()
    ivt = IVT.verbatim(model)
    ivt.begin_task()
    ivt.core.set_fisher({name: torch.ones_like(p) for name, p in model.named_parameters()})
    ivt.end_task()
    grown = IVT.verbatim(build(head=3))
    grown.load_state_dict(ivt.state_dict())
    grown.begin_task()
    assert grown.task == 2
    assert grown.cumulative["2.bias"].tolist() == [1.0, 1.0, 0.0]


def test_a_loaded_state_without_its_optimizer_is_noticed_at_the_first_epoch() -> None:
    """An IVT that was told of its optimizer by begin_task() must be told again; F_t would stay the saved one."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 1, 3, 3)).square().sum().backward()
        optimizer.step()

    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer=optimizer)
    step()
    ivt.end_epoch()
    loaded = IVT.verbatim(model)
    loaded.load_state_dict(ivt.state_dict())
    step()
    with pytest.warns(UserWarning, match="not listening"):
        loaded.end_epoch()
    with pytest.raises(RuntimeError, match=r"only attach\(\) the optimizer"):
        loaded.begin_task(optimizer=optimizer)
    loaded.attach(optimizer)
    step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.end_epoch()


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_any_cut_of_an_epoch_gives_the_same_fisher(seed: Any, steps: Any, cut: Any) -> None:
    model = nn.Linear(3, 2)
    straight, broken = IVT.verbatim(model), IVT.verbatim(model)
    straight.begin_task()
    broken.begin_task()
    generator = torch.Generator().manual_seed(seed)
    for i in range(steps):
        if i == cut:
            state = broken.state_dict()
            broken = IVT.verbatim(model)
            broken.load_state_dict(state)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        straight.core.accumulate()
        broken.core.accumulate()
    straight.end_epoch()
    broken.end_epoch()
    torch.testing.assert_close(dict(broken.fisher), dict(straight.fisher), rtol=0, atol=0)


def test_state_saved_under_the_earlier_name_of_a_counter_loads() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    step(model, optimizer, seed=0)
    ivt.end_epoch()
    state = ivt.state_dict()
    state["epoch_finalised"] = state.pop("epoch_finalized")
    other = IVT.verbatim(model)
    other.load_state_dict(state)
    assert other.state_dict().keys() == ivt.state_dict().keys()
    assert other.epoch == 1
