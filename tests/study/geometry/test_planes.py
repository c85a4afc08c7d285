"""Planes: Gram-Schmidt by hand in three dimensions, closed forms on a grid, and the points of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError, DataError
from incvec.study.geometry import Plane, plane, snapshot_model
from incvec.study.geometry.landscape import draw, landscape, told_starts
from incvec.study.geometry.lines import Setting
from incvec.study.geometry.tables import plane_table
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import Finished


class Triple(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values or (0.0, 0.0, 0.0), dtype=torch.float64))


def triple(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def test_coordinates_by_hand() -> None:
    origin, first, second = triple(1, 1, 1), triple(4, 1, 1), triple(3, 5, 1)
    found = Plane.through(origin, first, second, ["w"])
    assert found.corners == ((0.0, 0.0), (3.0, 0.0), (2.0, 4.0))
    a, b, off = found.project(triple(2, 3, 8))
    assert (a, b, off) == pytest.approx((1.0, 2.0, 7.0))
    for corner, weights in zip(found.corners, ((1, 0, 0), (0, 1, 0), (0, 0, 1)), strict=True):
        assert found.weights(*corner) == pytest.approx(weights)
    p = found.weights(1.5, -2.0)
    assert sum(p) == pytest.approx(1)
    at = sum(w * s["w"] for w, s in zip(p, (origin, first, second), strict=True))
    assert at.tolist() == pytest.approx([2.5, -1.0, 1.0])  # type: ignore[union-attr]


def test_states_on_a_line_span_nothing() -> None:
    with pytest.raises(ValueError, match="on one line"):
        Plane.through(triple(0, 0, 0), triple(1, 1, 0), triple(-2, -2, 0), ["w"])
    with pytest.raises(ValueError, match="three different"):
        Plane.through(triple(0, 0, 0), triple(0, 0, 0), triple(1, 0, 0), ["w"])


def test_a_quadratic_on_a_plane_is_its_closed_form() -> None:
    """L(w) = w1^2 + 4 w2^2 on the plane through three points of the first two axes: u, v are those axes."""

    def bowl(model: nn.Module) -> float:
        w = model.get_parameter("w")
        return float(w[0] ** 2 + 4 * w[1] ** 2)

    model = Triple(9, 9, 9)
    columns, rows, values = plane(model, triple(0, 0, 0), triple(2, 0, 0), triple(1, 1, 0), bowl, size=5, margin=0.5)
    assert columns == pytest.approx([-1, 0, 1, 2, 3])
    assert rows == pytest.approx([-1, -0.25, 0.5, 1.25, 2])
    for b, line in zip(rows, values, strict=True):
        assert line == pytest.approx([a * a + 4 * b * b for a in columns], abs=1e-12)
    assert model.w.tolist() == [9, 9, 9]


def test_the_landscape_of_runs(finished: Finished, few: Dataset, tmp_path: Path) -> None:
    found = landscape(finished.plain, finished.ivt, finished.oracle, few, 1, 4, Setting())
    marks = {mark["role"]: mark for mark in found["marks"]}
    assert [start["to_origin"] for start in found["starts"]] == [0, 0, 0]  # all begin at the same model
    assert told_starts(found) == ""
    counts = finished.records["plain"]["test_counts"]
    for role, name in (("second", "plain"), ("first", "ivt"), ("oracle", "oracle")):
        row = finished.records[name]["classifiers"]["cnn"]["accuracy"][1]
        expected = sum(n * a for n, a in zip(counts, row, strict=False)) / sum(counts[:2])
        assert marks[role]["accuracy"] == pytest.approx(expected, abs=1e-9)
    assert marks["first"]["b"] == marks["origin"]["a"] == marks["origin"]["b"] == 0
    assert marks["first"]["a"] == pytest.approx(marks["first"]["to_origin"])
    assert marks["second"]["a"] ** 2 + marks["second"]["b"] ** 2 == pytest.approx(marks["second"]["to_origin"] ** 2)
    whole = marks["oracle"]["a"] ** 2 + marks["oracle"]["b"] ** 2 + marks["oracle"]["off_plane"] ** 2
    assert whole == pytest.approx(marks["oracle"]["to_origin"] ** 2)
    assert len(found["loss"]) == len(found["loss"][0]) == 4
    assert all(file.stat().st_size > 1000 for file in draw(found, tmp_path / "plane"))


def test_each_runs_own_start_is_told(finished: Finished, few: Dataset, tmp_path: Path) -> None:
    """From the third task on every run has begun at a model of its own; the plane begins at the oracle's."""
    found = landscape(finished.plain, finished.ivt, finished.oracle, few, 2, 2, Setting())
    models = [snapshot_model(run, 1, few, grow_to=2).model for run in finished[:3]]
    for model, start in zip(models, found["starts"], strict=True):
        pairs = zip(models[2].parameters(), model.parameters(), strict=True)
        square = sum(float((p - q).detach().double().square().sum()) for p, q in pairs)
        assert start["to_origin"] == pytest.approx(square**0.5)
    plain, ivt, _ = (f"{start['to_origin']:.2f}" for start in found["starts"])
    told = told_starts(found)
    assert "begins at the model of PODNet oracle after task 2" in told
    assert told.endswith(f": PODNet {plain}, PODNet + IVT {ivt}")
    assert plane_table(found).caption == told
    draw(found, tmp_path / "plane")


def test_planes_that_are_none(finished: Finished, few: Dataset, tmp_path: Path) -> None:
    finish(make_run(few, tmp_path, quick("podnet", "ivt", seed=4, podnet={"epochs": 1})))
    told = r"differ in their seeds \(3 and 4\).*Run first:\n  incvec run .*--addon ivt .*--seed 3"
    with pytest.raises(DataError, match=told):
        landscape(finished.plain, tmp_path, None, few, 1, 4, Setting())
    with pytest.raises(ConfigError, match="take 2 or more"):
        landscape(finished.plain, finished.ivt, None, few, 0, 4, Setting())
    with pytest.raises(DataError, match=r"same add-ons.*Run first:\n  incvec run .*--addon ivt"):
        landscape(finished.plain, finished.plain, None, few, 1, 4, Setting())
