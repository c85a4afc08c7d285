"""Paths: closed forms on two parameters, and paths between the snapshots of real runs."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError, DataError
from incvec.study.geometry import EvaluationOptions, barrier, load_snapshot, path, positions
from incvec.study.geometry.paths import linear_fit, run_paths
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import FinishedRuns


class Point(nn.Module):
    """Two numbers and a counter."""

    def __init__(self, x: float = 0.0, y: float = 0.0, count: int = 0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([x, y], dtype=torch.float64))
        self.count: Tensor
        self.register_buffer("count", torch.tensor(count))


def quadratic(model: nn.Module) -> float:
    w = model.get_parameter("w")
    return float(3 * w[0] ** 2 + (w[1] - 1) ** 2)


def test_path_of_a_quadratic_has_its_closed_form() -> None:
    model, b = Point(1.0, -2.0), Point(-3.0, 4.0).state_dict()
    values = path(model, model.state_dict(), b, quadratic, points=9)  # the live state is copied first
    expected = [3 * (1 - 4 * x) ** 2 + (-3 + 6 * x) ** 2 for x in positions(9)]
    assert values == pytest.approx(expected, abs=1e-12)


def test_positions() -> None:
    assert positions(5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert len(positions()) == 51
    with pytest.raises(ValueError, match=r"at least 2 points.*given 1"):
        positions(1)


def test_path_ends_are_the_given_states_bit_for_bit() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(7, 5), nn.Linear(7, 5)

    def weight(model: nn.Module) -> Tensor:
        return model.get_parameter("weight").detach().clone()

    seen = path(nn.Linear(7, 5), one.state_dict(), other.state_dict(), weight, points=3)
    assert torch.equal(seen[0], one.weight)
    assert torch.equal(seen[2], other.weight)


def test_integer_buffers_are_those_of_the_nearer_end() -> None:
    a, b = Point(count=3).state_dict(), Point(count=9).state_dict()
    values = path(Point(), a, b, lambda m: {"count": int(m.get_buffer("count"))}, points=5)
    assert [row["count"] for row in values] == [3, 3, 9, 9, 9]


def test_batchnorm_statistics_are_interpolated() -> None:
    a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    a.running_mean, b.running_mean = torch.tensor([0.0, 4.0]), torch.tensor([2.0, 8.0])
    a.running_var, b.running_var = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 2.0])

    def statistics(m: nn.Module) -> tuple[list[float], list[float]]:
        return m.get_buffer("running_mean").tolist(), m.get_buffer("running_var").tolist()

    values = path(nn.BatchNorm1d(2), a.state_dict(), b.state_dict(), statistics, points=3)
    assert values[1] == ([1.0, 6.0], [2.0, 1.5])


def test_path_restores_the_model_also_after_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("0.weight").add_(1)
    before = copy.deepcopy(model.state_dict())
    identities = [id(p) for p in model.parameters()]

    def fail(m: nn.Module) -> float:
        m.train()
        raise RuntimeError("broken")

    path(model, model.state_dict(), other.state_dict(), lambda m: m.eval(), points=4)
    with pytest.raises(RuntimeError, match="broken"):
        path(model, other.state_dict(), model.state_dict(), fail, points=4)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [id(p) for p in model.parameters()] == identities
    assert [m.training for m in model.modules()] == [True, True, False]
    assert all(p.requires_grad for p in model.parameters())


def test_path_refuses_states_of_another_model() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"weight has shape \(2, 2\) in state_a, expected \(3, 2\)"):
        path(large, small.state_dict(), large.state_dict(), lambda m: 0)
    with pytest.raises(ValueError, match=r"state_b .* missing bias; unexpected none.*grow"):
        path(small, small.state_dict(), {"weight": small.weight}, lambda m: 0)


def test_barrier() -> None:
    """80, 50, 60 is 20 below the line between its ends; 80, 75, 60 is above it."""
    assert [barrier(curve) for curve in ([80.0, 50.0, 60.0], [80.0, 75.0, 60.0], [5.0, 4.0])] == [20.0, 0.0, 0.0]
    assert [barrier(curve, falls=False) for curve in ([1.0, 3.0, 2.0], [1.0, 1.0, 2.0])] == [1.5, 0.0]


def test_linear_fit() -> None:
    assert linear_fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == {"slope": 2.0, "intercept": 1.0, "r2": 1.0}
    fit = linear_fit([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 2.0])
    assert [fit["slope"], fit["intercept"], fit["r2"]] == pytest.approx([0.6, 0.1, 0.9])
    assert linear_fit([4.0, 4.0], [1.0, 2.0])["slope"] is None


def test_paths_of_plain_run_ivt_and_oracle(runs: FinishedRuns, few: Dataset) -> None:
    data = run_paths([runs.plain, runs.ivt], runs.oracle, few, 0, None, EvaluationOptions(points=5))
    assert [curve["name"] for curve in data["curves"]] == ["PODNet", "PODNet + IVT", "PODNet oracle"]
    assert (data["start"], data["task_to"]) == ("oracle", 2)
    assert len({curve["accuracy"]["tasks"][0][0] for curve in data["curves"]}) == 1  # one start for all
    for curve, name in zip(data["curves"], ("plain", "ivt", "oracle"), strict=True):
        last = runs.records[name]["classifiers"]["cnn"]["accuracy"][2]
        assert [values[-1] for values in curve["accuracy"]["tasks"]] == last
        assert curve["accuracy"]["old"] == curve["accuracy"]["tasks"][0]
        assert curve["barrier"]["accuracy"]["old"] == barrier(curve["accuracy"]["old"])
        a = load_snapshot(runs.oracle, 0, few, grow_to=2).model
        b = load_snapshot(getattr(runs, name), 2, few).model
        assert curve["length"] == pytest.approx(parameter_distance(a, b))
        assert curve["length_of_shared"] < curve["length"]
        assert curve["distance"] == pytest.approx([x * curve["length"] for x in (0, 0.25, 0.5, 0.75, 1)])


def parameter_distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return math.sqrt(sum(float((p - q).detach().double().square().sum()) for p, q in pairs))


def test_tasks_are_weighted_by_all_their_images(few: Dataset, tmp_path: Path) -> None:
    """A base task twice as large weighs twice as much, although the same number of its images is evaluated."""
    record = finish(make_run(few, tmp_path / "run", quick("finetune", base_classes=4, tasks=2)))
    sizes = record["test_counts"]
    assert sizes[0] > 1.5 * sizes[1]
    curve = run_paths([tmp_path / "run"], None, few, 1, 2, EvaluationOptions(points=2, images=4))["curves"][0]
    assert curve["counts"] == [4, 4, 4]
    for metric in ("accuracy", "loss"):
        first, second, _ = curve[metric]["tasks"]
        expected = [(sizes[0] * a + sizes[1] * b) / (sizes[0] + sizes[1]) for a, b in zip(first, second, strict=True)]
        assert curve[metric]["old"] == pytest.approx(expected)


def test_path_starts_at_the_oracle_or_at_the_run_itself(runs: FinishedRuns, few: Dataset) -> None:
    lengths = {}
    for start, folder in (("oracle", runs.oracle), ("own", runs.plain)):
        options = EvaluationOptions(points=2, start=start)  # type: ignore[arg-type]
        curve = run_paths([runs.plain], runs.oracle, few, 1, 2, options)["curves"][0]
        lengths[start] = curve["length"]
        assert curve["start_run"] == folder.name
        snapshot = load_snapshot(folder, 1, few, grow_to=2)
        with torch.no_grad():
            batch = snapshot.parts.test.fetch(snapshot.parts.test.rows_of(0, 4))
            correct = snapshot.model(batch.images).logits.argmax(1) == batch.labels
        assert curve["accuracy"]["old"][0] == pytest.approx(100 * float(correct.double().mean()))
    assert lengths["oracle"] != lengths["own"]
    assert run_paths([runs.ivt], None, few, 0, 1, EvaluationOptions(points=2))["start"] == "own"


def test_runs_of_several_seeds_need_their_own_starts(runs: FinishedRuns, few: Dataset, tmp_path: Path) -> None:
    other = tmp_path / "other"
    finish(make_run(few, other, quick("podnet", seed=4, podnet={"epochs": 1})))
    message = r"differ in their seeds \(3 and 4\).*--start own.*Run first:\n  incvec run --method podnet .*--seed 3"
    with pytest.raises(DataError, match=message):
        run_paths([runs.plain, other], runs.oracle, few, 0, 2, EvaluationOptions(points=2))
    own = EvaluationOptions(points=2, start="own")
    names = [curve["name"] for curve in run_paths([runs.plain, other], runs.oracle, few, 0, 2, own)["curves"]]
    assert names == ["PODNet, seed 3", "PODNet, seed 4", "PODNet oracle, seed 3"]
    copied = shutil.copytree(runs.plain, tmp_path / "copied")
    names = [curve["name"] for curve in run_paths([runs.plain, copied], None, few, 0, 2, own)["curves"]]
    assert names == ["PODNet (plain)", "PODNet (copied)"]


def test_errors_name_the_command_to_run_first(runs: FinishedRuns, few: Dataset, tmp_path: Path) -> None:
    none, unfinished = tmp_path / "none", shutil.copytree(runs.plain, tmp_path / "unfinished")
    (unfinished / "snapshots" / "task-02.safetensors").unlink()
    errors: list[tuple[list[Path], Path | None, int, int, str]] = [
        ([runs.plain], none, 0, 2, r"never trained. Run first:\n  incvec run --method podnet .*--oracle .*--out"),
        ([runs.plain], runs.ivt, 0, 2, r"not an oracle.*\n  incvec run .*--oracle"),
        ([none], None, 0, 2, r"no snapshot .*task-00.*\n  incvec run"),
        ([runs.plain], None, 0, 7, r"no task 8 in .*: it has 3"),
        ([unfinished], None, 0, 2, r"no snapshot .*task-02.*has 2 snapshot.*\n  incvec run --method podnet"),
        ([runs.plain], None, 2, 2, "no path from task 3 to task 3"),
        ([], None, 0, 1, "no run"),
    ]
    for given, oracle, first, last, message in errors:
        with pytest.raises((DataError, ConfigError), match=message):
            run_paths(given, oracle, few, first, last, EvaluationOptions(points=2))


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        (quick("finetune"), "method"),
        (quick("podnet", seed=3, podnet={"net": "small", "epochs": 1}), "network"),
        (quick("podnet", seed=3, order_seed=5, podnet={"epochs": 1}), "class order"),
        (quick("podnet", seed=3, base_classes=4, tasks=1, podnet={"epochs": 1}), "number of base classes"),
    ],
    ids=["method", "network", "order", "base"],
)
def test_runs_that_cannot_be_compared(
    given: dict[str, Any], difference: str, runs: FinishedRuns, few: Dataset, tmp_path: Path
) -> None:
    finish(make_run(few, tmp_path, given))
    with pytest.raises(DataError, match=rf"differ in their {difference}.*Run first:\n  incvec run --method podnet"):
        run_paths([runs.plain, tmp_path], None, few, 0, 1, EvaluationOptions(points=2))
