"""Predicted against measured forgetting: a quadratic loss by hand, and the Fisher of a real run."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.atomic_files import read_tensors
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import DataError
from incvec.study import style
from incvec.study.geometry.curvature import by_part, curvature, draw, part_of, place, quadratic
from incvec.study.geometry.lines import Setting
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import LONGER, Finished


def test_quadratic_forms_by_hand() -> None:
    d = torch.tensor([1.0, -2.0])
    assert quadratic(torch.tensor([3.0, 0.5]), d) == 3 + 2
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    assert quadratic(matrix[None, None], d.reshape(1, 1, 1, 2)) == 2 - 4 + 12


def test_parts_by_hand() -> None:
    past = {"backbone.stages.0.conv.weight": torch.tensor([1.0, 3.0]), "head.scale": torch.tensor([0.0])}
    now = {"backbone.stages.0.conv.weight": torch.tensor([2.0, 3.0]), "head.scale": torch.tensor([5.0])}
    start = {name: torch.zeros_like(t) for name, t in past.items()}
    end = {"backbone.stages.0.conv.weight": torch.tensor([3.0, 4.0]), "head.scale": torch.tensor([12.0])}
    found = by_part(past, now, start, end)
    # S = (A + F) / (2A + F): 2/3 and 1/2; where there is no past S = 1
    assert found["stages.0"] == {
        "fisher_ratio": pytest.approx(0.25), "scale": pytest.approx((2 / 3 + 1 / 2) / 2), "distance": 5.0,
    }  # fmt: skip
    assert found["head"] == {"fisher_ratio": None, "scale": 1.0, "distance": 12.0}
    assert found["all"]["distance"] == 13.0
    assert part_of("backbone.stem.conv.weight") == "stem"
    assert sorted(["head", "blocks.10", "blocks.2", "stem"], key=place) == ["stem", "blocks.2", "blocks.10", "head"]


def test_weights_that_were_not_trained_have_no_part(finished: Finished, few: Dataset) -> None:
    """As in the record: S is not applied to PODNet's older proxies, so the mean of S is that of the others."""
    same = torch.ones(3)
    found = by_part({"head.old": same, "head.scale": same}, {"head.old": same, "head.scale": 2 * same},
                    *({"head.old": x * same, "head.scale": x * same} for x in (0, 1)))  # fmt: skip
    assert found["head"]["scale"] == pytest.approx(2 / 3)
    told = [facts["ivt"] for facts in finished.records["ivt"]["statistics"][1:]]
    parts = [row["parts"]["all"] for row in curvature(finished.ivt, few, Setting(points=2))["tasks"]]
    assert [part["scale"] for part in parts] == pytest.approx([facts["all"]["scale"] for facts in told], rel=1e-3)


def test_a_run_with_ivt(finished: Finished, few: Dataset, tmp_path: Path) -> None:
    found = curvature(finished.ivt, few, Setting(points=3))
    assert [row["task"] for row in found["tasks"]] == [1, 2]
    # restated from the files for the last task
    old, new = (read_tensors(finished.ivt / "snapshots" / f"task-0{t}.safetensors")[0] for t in (1, 2))
    prefix, half, ratio = "addon/ivt/cumulative/", 0.0, [0.0, 0.0]
    for key, fisher in old.items():
        if key.startswith(prefix):
            name = "method/model." + key.removeprefix(prefix)
            half += 0.5 * float((fisher.double() * (new[name].double() - old[name].double()) ** 2).sum())
            if not torch.equal(new[key], fisher):  # PODNet's older proxies are not trained
                ratio[0] += float((new[key].double() - fisher.double()).sum())
                ratio[1] += float(fisher.double().sum())
    row = found["tasks"][1]
    assert row["predicted"] == pytest.approx([0.0, half / 4, half], rel=1e-5)
    assert row["predicted_per_sample"][-1] == pytest.approx(16 * half, rel=1e-5)
    assert row["parts"]["all"]["fisher_ratio"] == pytest.approx(ratio[0] / ratio[1], rel=1e-3)
    assert row["measured"][0] == 0.0
    assert row["counts"] == finished.records["ivt"]["test_counts"][:2]
    assert all(file.stat().st_size > 1000 for file in draw(found, tmp_path / "curvature"))


@pytest.mark.parametrize("count", [1, 2, 7, 25])
def test_a_figure_of_many_tasks(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of all tasks are there, though the first trained the head alone; panels go into rows, side by side."""
    figures: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, stem: figures.append(figure))
    part = {"fisher_ratio": 2.0, "scale": 0.7, "distance": 1.0}
    line = {"x": [0.0, 1.0], "measured": [0.0, 2.0], "predicted": [0.0, 1.0], "predicted_per_sample": None}
    names = [["all", "head"]] * (count > 1)
    names += [["all", "stages.1", "stem", "head", "stages.0"]] * (count - len(names))
    tasks = [{"task": t, "parts": dict.fromkeys(each, part), **line} for t, each in enumerate(names, start=1)]
    found = {
        "dataset": "digits", "name": "SSRE + IVT", "method": "ssre", "addons": ["ivt"], "images_per_task": None,
        "batchnorm": "interpolate", "tasks": tasks,
    }  # fmt: skip
    draw(found, tmp_path / "curvature")
    figure = figures[0]
    figure.draw_without_rendering()
    left, right, *panels = figure.axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["stem", "stage 1", "stage 2", "head"]
    assert figure.get_figwidth() <= 13
    shown = [axes.get_window_extent() for axes in panels if axes.get_visible()]
    assert len(shown) == count
    assert min(box.width for box in shown) > 150  # of 1950
    keys = [right.get_legend().get_window_extent(), figure.subfigs[1].legends[0].get_window_extent()]
    boxes = [left.get_window_extent(), right.get_window_extent(), *shown, *keys]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


def test_kernel_blocks(few: Dataset, tmp_path: Path) -> None:
    given = quick("finetune", "ivt", ivt={"structure": "kernel"})
    finish(make_run(few, tmp_path, given))
    found = curvature(tmp_path, few, Setting(points=2))
    assert all(0.5 <= row["parts"]["all"]["scale"] <= 1 for row in found["tasks"])
    assert all(row["predicted"][-1] > 0 for row in found["tasks"])


def test_a_run_without_ivt_is_told_what_to_run(finished: Finished, few: Dataset) -> None:
    with pytest.raises(DataError, match=r"without the add-on ivt.*\n  incvec run --method podnet --addon ivt"):
        curvature(finished.plain, few, Setting(points=2))
    assert LONGER["batch_size"] == 16  # what the factor above is
