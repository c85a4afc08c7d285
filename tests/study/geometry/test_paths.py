"""Straight lines: closed forms on two parameters, and the ends of a real run's path."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.engine.seeds import derive
from incvec.errors import ConfigError, DataError
from incvec.study.geometry import path, positions, snapshot_model, task_accuracy
from tests.conftest import make_run, quick


class Point(nn.Module):
    """Two numbers and a counter."""

    def __init__(self, x: float = 0.0, y: float = 0.0, count: int = 0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([x, y], dtype=torch.float64))
        self.count: Tensor
        self.register_buffer("count", torch.tensor(count))


def bowl(model: nn.Module) -> float:
    w = model.get_parameter("w")
    return float(3 * w[0] ** 2 + (w[1] - 1) ** 2)


def test_a_quadratic_along_a_line_is_its_closed_form() -> None:
    a, b = Point(1.0, -2.0).state_dict(), Point(-3.0, 4.0).state_dict()
    found = path(Point(), a, b, bowl, points=9)
    for x, value in zip(positions(9), found, strict=True):
        assert value == pytest.approx(3 * (1 - 4 * x) ** 2 + (-3 + 6 * x) ** 2, abs=1e-12)


def test_positions() -> None:
    assert positions(5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert len(positions()) == 51
    with pytest.raises(ValueError, match="two ends"):
        positions(1)


def test_the_ends_are_the_states_themselves() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(7, 5), nn.Linear(7, 5)
    seen: list[Tensor] = []
    path(
        nn.Linear(7, 5),
        one.state_dict(),
        other.state_dict(),
        lambda m: seen.append(m.get_parameter("weight").detach().clone()),
        points=3,
    )
    assert torch.equal(seen[0], one.weight)
    assert torch.equal(seen[2], other.weight)


def test_integers_come_from_the_nearer_end_and_mappings_pass_through() -> None:
    a, b = Point(count=3).state_dict(), Point(count=9).state_dict()
    found = path(Point(), a, b, lambda m: {"count": int(m.get_buffer("count"))}, points=5)
    assert [row["count"] for row in found] == [3, 3, 9, 9, 9]


def test_batchnorm_statistics_are_interpolated() -> None:
    a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    a.running_mean, b.running_mean = torch.tensor([0.0, 4.0]), torch.tensor([2.0, 8.0])
    a.running_var, b.running_var = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 2.0])
    found = path(
        nn.BatchNorm1d(2),
        a.state_dict(),
        b.state_dict(),
        lambda m: (m.get_buffer("running_mean").tolist(), m.get_buffer("running_var").tolist()),
        points=3,
    )
    assert found[1] == ([1.0, 6.0], [2.0, 1.5])


def test_everything_is_put_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("0.weight").add_(1)
    before = copy.deepcopy(model.state_dict())
    identities = [id(p) for p in model.parameters()]

    def evaluate(m: nn.Module) -> float:
        m.eval()
        return 0.0

    def broken(m: nn.Module) -> float:
        m.train()
        raise RuntimeError("broken")

    path(model, model.state_dict(), other.state_dict(), evaluate, points=4)
    with pytest.raises(RuntimeError, match="broken"):
        path(model, other.state_dict(), model.state_dict(), broken, points=4)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [id(p) for p in model.parameters()] == identities
    assert [m.training for m in model.modules()] == [True, True, False]
    assert all(p.requires_grad for p in model.parameters())


def test_the_models_own_live_state_is_copied_first() -> None:
    model, b = Point(2.0, 1.0), Point(0.0, 1.0).state_dict()
    assert path(model, model.state_dict(), b, bowl, points=3) == [12.0, 3.0, 0.0]


def test_states_that_do_not_fit_are_named() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"weight has shape \(2, 2\) in state_a, \(3, 2\) in the model"):
        path(large, small.state_dict(), large.state_dict(), lambda m: 0)
    with pytest.raises(ValueError, match=r"state_b .* lacks bias and has nothing besides.*grow"):
        path(small, small.state_dict(), {"weight": small.weight}, lambda m: 0)


@pytest.fixture(scope="module")
def run(few: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("podnet")
    longer = {"epochs": 10, "batch_size": 16, "lr": 0.05}  # so that the accuracies tell one model from another
    return out, finish(make_run(few, out, quick("podnet", seed=3, podnet=longer)))


def test_a_path_ends_at_the_snapshots_own_accuracies(run: tuple[Path, dict[str, Any]], few: Dataset) -> None:
    out, record = run
    accuracy = record["classifiers"]["cnn"]["accuracy"]
    start, end = snapshot_model(out, 1, few), snapshot_model(out, 2, few)
    assert (start.task.index, end.task.index) == (1, 2)
    assert [task_accuracy(start, i)(start.model) for i in (0, 1)] == accuracy[1]
    grown = snapshot_model(out, 0, few, grow_to=2)
    found = path(end.model, grown.state(), end.state(), task_accuracy(end, 0), points=5)
    assert found[-1] == accuracy[2][0]
    assert found[0] == task_accuracy(grown, 0)(grown.model)
    assert found[0] > found[-1]


def test_grown_rows_start_as_they_did_in_the_run(run: tuple[Path, dict[str, Any]], few: Dataset) -> None:
    out, _ = run
    plain, grown = snapshot_model(out, 0, few).state(), snapshot_model(out, 0, few, grow_to=2).state()
    assert all(torch.equal(grown[name], value) for name, value in plain.items())
    for index in (1, 2):
        rows = grown[f"head.blocks.{index}.weight"]
        generator = torch.Generator().manual_seed(derive(3, index, "grow"))
        drawn = torch.randn(rows.shape, generator=generator) / rows.shape[1] ** 0.5
        torch.testing.assert_close(rows, drawn, rtol=0, atol=0)


def test_missing_snapshots_and_impossible_growth(run: tuple[Path, dict[str, Any]], few: Dataset) -> None:
    out, _ = run
    with pytest.raises(DataError, match=r"no snapshot .*task-07"):
        snapshot_model(out / "none", 7, few)
    with pytest.raises(ConfigError, match=r"no task 8 in .*: it has 3"):
        snapshot_model(out, 7, few)
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=f"grow_to is {wrong}"):
            snapshot_model(out, 1, few, grow_to=wrong)
