"""Planes: Gram-Schmidt by hand in three dimensions, closed forms on a grid, and the models of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError, DataError
from incvec.study.figures.plane import describe_starts
from incvec.study.figures.tables import plane_table
from incvec.study.geometry import EvaluationOptions, Plane, load_snapshot, plane
from incvec.study.geometry.planes import run_plane
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import FinishedRuns
from tests.study.geometry.test_paths import parameter_distance


class Triple(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values or (0.0, 0.0, 0.0), dtype=torch.float64))


def triple(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def test_coordinates_projection_and_weights() -> None:
    origin, first, second = triple(1, 1, 1), triple(4, 1, 1), triple(3, 5, 1)
    through = Plane.through(origin, first, second, ["w"])
    assert through.corners == ((0.0, 0.0), (3.0, 0.0), (2.0, 4.0))
    assert through.project(triple(2, 3, 8)) == pytest.approx((1.0, 2.0, 7.0))
    for corner, weights in zip(through.corners, ((1, 0, 0), (0, 1, 0), (0, 0, 1)), strict=True):
        assert through.weights(*corner) == pytest.approx(weights)
    weights = through.weights(1.5, -2.0)
    assert sum(weights) == pytest.approx(1)
    at = sum(w * s["w"] for w, s in zip(weights, (origin, first, second), strict=True))
    assert at.tolist() == pytest.approx([2.5, -1.0, 1.0])  # type: ignore[union-attr]


def test_states_on_one_line_are_refused() -> None:
    with pytest.raises(ValueError, match="on one line"):
        Plane.through(triple(0, 0, 0), triple(1, 1, 0), triple(-2, -2, 0), ["w"])
    with pytest.raises(ValueError, match="three different"):
        Plane.through(triple(0, 0, 0), triple(0, 0, 0), triple(1, 0, 0), ["w"])


def test_plane_of_a_quadratic_has_its_closed_form() -> None:
    """L(w) = w1^2 + 4 w2^2 on the plane through three points of the first two axes: u, v are those axes."""

    def quadratic(model: nn.Module) -> float:
        w = model.get_parameter("w")
        return float(w[0] ** 2 + 4 * w[1] ** 2)

    model = Triple(9, 9, 9)
    columns, rows, values = plane(
        model, triple(0, 0, 0), triple(2, 0, 0), triple(1, 1, 0), quadratic, size=5, margin=0.5
    )
    assert columns == pytest.approx([-1, 0, 1, 2, 3])
    assert rows == pytest.approx([-1, -0.25, 0.5, 1.25, 2])
    for b, line in zip(rows, values, strict=True):
        assert line == pytest.approx([a * a + 4 * b * b for a in columns], abs=1e-12)
    assert model.w.tolist() == [9, 9, 9]


def test_plane_of_runs(runs: FinishedRuns, few: Dataset) -> None:
    data = run_plane(runs.plain, runs.ivt, runs.oracle, few, 1, 4, EvaluationOptions())
    marks = {mark["role"]: mark for mark in data["marks"]}
    assert [start["to_origin"] for start in data["starts"]] == [0, 0, 0]  # all start at the same model
    assert describe_starts(data) == ""
    counts = runs.records["plain"]["test_counts"]
    for role, name in (("second", "plain"), ("first", "ivt"), ("oracle", "oracle")):
        row = runs.records[name]["classifiers"]["cnn"]["accuracy"][1]
        expected = sum(n * a for n, a in zip(counts, row, strict=False)) / sum(counts[:2])
        assert marks[role]["accuracy"] == pytest.approx(expected, abs=1e-9)
    assert marks["first"]["b"] == marks["origin"]["a"] == marks["origin"]["b"] == 0
    assert marks["first"]["a"] == pytest.approx(marks["first"]["to_origin"])
    assert marks["second"]["a"] ** 2 + marks["second"]["b"] ** 2 == pytest.approx(marks["second"]["to_origin"] ** 2)
    squares = sum(marks["oracle"][key] ** 2 for key in ("a", "b", "off_plane"))
    assert squares == pytest.approx(marks["oracle"]["to_origin"] ** 2)
    assert len(data["loss"]) == len(data["loss"][0]) == 4


def test_runs_that_started_elsewhere_are_named(runs: FinishedRuns, few: Dataset) -> None:
    """From the third task on every run has started at its own model; the origin is that of the oracle."""
    data = run_plane(runs.plain, runs.ivt, runs.oracle, few, 2, 2, EvaluationOptions())
    models = [load_snapshot(run, 1, few, grow_to=2).model for run in runs[:3]]
    for model, start in zip(models, data["starts"], strict=True):
        assert start["to_origin"] == pytest.approx(parameter_distance(models[2], model))
    plain, ivt, _ = (f"{start['to_origin']:.2f}" for start in data["starts"])
    text = describe_starts(data)
    assert "the origin is the model of PODNet oracle after task 2" in text
    assert text.endswith(f": PODNet {plain}, PODNet + IVT {ivt}")
    assert plane_table(data).note == text


def test_planes_that_are_not_possible(runs: FinishedRuns, few: Dataset, tmp_path: Path) -> None:
    finish(make_run(few, tmp_path, quick("podnet", "ivt", seed=4, podnet={"epochs": 1})))
    for other, task, message in (
        (tmp_path, 1, r"differ in their seeds \(3 and 4\).*Run first:\n  incvec run .*--addon ivt .*--seed 3"),
        (runs.ivt, 0, "use 2 or more"),
        (runs.plain, 1, r"same add-ons.*Run first:\n  incvec run .*--addon ivt"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            run_plane(runs.plain, other, None, few, task, 4, EvaluationOptions())
