"""The mean of figures over seeds, from small numbers written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from incvec.errors import DataError
from incvec.study.charts import Lines
from incvec.study.figures import mean_figure, read_figure, redraw, write_figure
from incvec.study.figures.curvature import draw_curvature
from incvec.study.figures.path import draw_path, draw_tradeoff
from incvec.study.figures.tables import TABLES
from incvec.study.page_figures import StudyFigure

SETTINGS = {"format": 1, "dataset": "digits", "points": 3, "images_per_task": None, "batchnorm": "interpolate"}
SQRT_2 = 2**0.5


def curve(seed: int, lowest: float, length: float, addons: Sequence[str] = ()) -> dict[str, Any]:
    """From 80 down to `lowest` and up to 60 on the old tasks, from 0 to 50 on the new ones."""
    values = {"tasks": [[80.0, lowest, 60.0], [0.0, 20.0, 50.0]], "old": [80.0, lowest, 60.0], "new": [0.0, 20.0, 50.0]}
    heights = {"tasks": [70 - lowest, 5.0], "old": 70 - lowest, "new": 5.0}
    return {
        "name": " + ".join(["PODNet", *addons]), "method": "podnet", "addons": list(addons), "oracle": False,
        "seed": seed, "run": f"podnet-s{seed}", "device": "cpu", "x": [0.0, 0.5, 1.0], "length": length,
        "distance": [0.0, length / 2, length], "counts": [10, 10], "accuracy": values, "loss": values,
        "barrier": {"accuracy": heights, "loss": heights},
        "fit": {"slope": -1.0 - seed, "intercept": 90.0, "r2": 0.9},
    }  # fmt: skip


def path_of(seed: int, lowest: float, length: float, **changes: Any) -> dict[str, Any]:
    return {
        **SETTINGS, "kind": "path", "task_from": 0, "task_to": 1, "start": "oracle", "axis": "distance",
        "commit": f"commit {seed}", "curves": [curve(seed, lowest, length), curve(seed, 70.0, 3.0, ["ivt"])], **changes,
    }  # fmt: skip


def tradeoff_of(seed: int, lowest: float, tasks: int = 2) -> dict[str, Any]:
    panels = [path_of(seed, lowest, 4.0, task_to=last) for last in range(1, tasks)]
    return {"format": 1, "kind": "tradeoff", "panels": panels}


def curvature_of(seed: int, measured: float, groups: Sequence[str] = ("all", "stem", "head")) -> dict[str, Any]:
    part = {"fisher_ratio": 2.0 + seed, "scale": 0.6 + 0.2 * seed, "distance": 1.0}
    task = {
        "task": 1, "parts": dict.fromkeys(groups, part), "x": [0.0, 1.0], "length": 3.0, "measured": [0.0, measured],
        "predicted": [0.0, 1.0], "predicted_per_sample": None if seed else [0.0, 2.0], "counts": [10],
    }  # fmt: skip
    return {
        **SETTINGS, "kind": "curvature", "run": f"podnet+ivt-s{seed}", "name": "PODNet + IVT", "method": "podnet",
        "addons": ["ivt"], "structure": "diagonal", "batch_size": 64, "commit": None, "tasks": [task],
    }  # fmt: skip


@pytest.fixture
def mean_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def mean(*figures: dict[str, Any]) -> dict[str, Any]:
        files = [tmp_path / f"{number}.json" for number in range(len(figures))]
        for file, data in zip(files, figures, strict=True):
            file.write_text(json.dumps(data))
        return mean_figure(files)

    return mean


def test_path_is_averaged_at_equal_shares_of_the_way(mean_of: Callable[..., dict[str, Any]]) -> None:
    data = mean_of(path_of(0, 10.0, 4.0), path_of(1, 20.0, 5.0), path_of(2, 60.0, 9.0))
    plain, ivt = data["curves"]
    assert plain["x"] == [0.0, 0.5, 1.0]
    assert plain["distance"] == [0.0, 3.0, 6.0]  # (4 + 5 + 9) / 3 at the end
    assert plain["accuracy"]["old"] == plain["accuracy"]["tasks"][0] == [80.0, 30.0, 60.0]
    assert plain["std"]["accuracy"]["old"] == pytest.approx([0.0, ((20**2 + 10**2 + 30**2) / 2) ** 0.5, 0.0])
    assert plain["barrier"]["loss"]["old"] == 40.0  # of 60, 50 and 10
    assert plain["fit"] == {"slope": -2.0, "intercept": 90.0, "r2": pytest.approx(0.9)}
    assert plain["std"]["fit"]["slope"] == 1.0
    assert ivt["accuracy"]["old"] == [80.0, 70.0, 60.0]
    assert data["sources"][2] == {"seed": 2, "runs": ["podnet-s2", "podnet-s2"], "commit": "commit 2"}
    assert not {"seed", "run", "commit"} & {*data, *plain}


def test_barrier_is_the_mean_of_the_barriers_and_not_that_of_the_mean_curve(
    mean_of: Callable[..., dict[str, Any]],
) -> None:
    one, other = path_of(0, 10.0, 4.0), path_of(1, 20.0, 4.0)
    other["curves"][0]["barrier"]["accuracy"]["old"] = 0.0
    assert mean_of(one, other)["curves"][0]["barrier"]["accuracy"]["old"] == 30.0


def test_path_is_drawn_with_bands_and_says_so(mean_of: Callable[..., dict[str, Any]]) -> None:
    data = mean_of(path_of(0, 10.0, 4.0), path_of(1, 20.0, 6.0))
    figure: Any = draw_path(data)
    axes = figure.axes[0]
    line, band = axes.lines[0], axes.collections[0]
    assert [*line.get_xdata()] == [0.0, 2.5, 5.0]
    assert [*line.get_ydata()] == [80.0, 15.0, 60.0]
    edges = band.get_paths()[0].vertices
    middle = sorted(edges[edges[:, 0] == 2.5][:, 1])
    assert middle == pytest.approx([15 - 5 * SQRT_2, 15 + 5 * SQRT_2])
    (legend,) = figure.legends
    assert "± one standard deviation over 2 seeds" in [text.get_text() for text in legend.get_texts()]
    assert "mean of 2 seeds" in figure.get_suptitle()
    assert "Means of 2 seeds" in TABLES["path"](data).note


def test_single_seed_has_no_bands() -> None:
    figure: Any = draw_path(path_of(0, 10.0, 4.0))
    assert not figure.axes[0].collections
    assert "seeds" not in figure.get_suptitle() + "".join(text.get_text() for text in figure.legends[0].get_texts())


def test_tradeoff_is_averaged_by_panel(mean_of: Callable[..., dict[str, Any]]) -> None:
    data = mean_of(tradeoff_of(0, 10.0, tasks=3), tradeoff_of(1, 20.0, tasks=3))
    assert [panel["task_to"] for panel in data["panels"]] == [1, 2]
    assert [panel["curves"][0]["accuracy"]["old"][1] for panel in data["panels"]] == [15.0, 15.0]
    figure: Any = draw_tradeoff(data)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[0] == "PODNet: linear fit, slope −1.50 ± 0.71, r² 0.90"


def test_fit_is_missing_if_one_seed_has_none(mean_of: Callable[..., dict[str, Any]]) -> None:
    one, other = tradeoff_of(0, 10.0), tradeoff_of(1, 20.0)
    one["panels"][0]["curves"][0]["fit"]["slope"] = None
    assert mean_of(one, other)["panels"][0]["curves"][0]["fit"]["slope"] is None


def test_curvature(mean_of: Callable[..., dict[str, Any]]) -> None:
    data = mean_of(curvature_of(0, 1.0), curvature_of(1, 2.0))
    (task,) = data["tasks"]
    assert task["parts"]["stem"] == {"fisher_ratio": 2.5, "scale": pytest.approx(0.7), "distance": 1.0}
    assert task["std"]["parts"]["stem"]["scale"] == pytest.approx(0.1 * SQRT_2)
    assert (task["measured"], task["std"]["measured"]) == ([0.0, 1.5], pytest.approx([0.0, SQRT_2 / 2]))
    assert task["predicted_per_sample"] is None  # one seed has none
    figure: Any = draw_curvature(data)
    assert [len(axes.collections) for axes in figure.axes[:2]] == [1, 1]
    (legend,) = figure.subfigs[1].legends
    assert "± one standard deviation over 2 seeds" in [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ([path_of(0, 1.0, 4.0)], "needs the JSON files of two or more seeds"),
        ([path_of(0, 1.0, 4.0), tradeoff_of(1, 1.0)], "0.json and .*1.json differ in kind: path and tradeoff"),
        ([path_of(0, 1.0, 4.0), path_of(1, 1.0, 4.0, task_to=3)], r"differ in tasks: \['1 to 2'\] and \['1 to 4'\]"),
        ([tradeoff_of(0, 1.0), tradeoff_of(1, 1.0, tasks=3)], r"differ in tasks: .* and \['1 to 2', '1 to 3'\]"),
        ([path_of(0, 1.0, 4.0), path_of(1, 1.0, 4.0, points=5)], "differ in points: 3 and 5"),
        ([path_of(0, 1.0, 4.0), path_of(1, 1.0, 4.0, batchnorm="recalibrate")], "differ in batchnorm"),
        (
            [path_of(0, 1.0, 4.0), path_of(1, 1.0, 4.0, curves=[curve(1, 1.0, 4.0, ["eopc"])])],
            r"differ in runs: \['PODNet', 'PODNet \+ ivt'\] and \['PODNet \+ eopc'\]",
        ),
        ([curvature_of(0, 1.0), curvature_of(1, 1.0, ("all", "head"))], "differ in layer groups"),
        ([path_of(0, 1.0, 4.0), path_of(1, 1.0, 4.0), path_of(0, 2.0, 4.0)], "0.json and .*2.json are both of seed"),
        ([curvature_of(1, 1.0), curvature_of(1, 1.0)], r"both of seed or run podnet\+ivt-s1"),
        ([{"format": 1, "kind": "plane"}] * 2, "cannot be averaged: the axes of a plane"),
        ([{"format": 1, "kind": "gap"}] * 2, "cannot be averaged: `incvec study gap` averages all seeds"),
        ([path_of(0, 1.0, 4.0), path_of(1, 1.0, 4.0, sources=[])], "1.json is a mean already"),
        ([path_of(0, 1.0, 4.0), {"format": 1, "kind": "path"}], "make all of them again with `incvec study path`"),
        ([{"format": 1}] * 2, "is not the data of a figure"),
    ],
)
def test_other_inputs_are_refused(
    figures: list[dict[str, Any]], message: str, mean_of: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(DataError, match=message):
        mean_of(*figures)


def test_mean_is_drawn_again_from_its_own_file(mean_of: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    data = mean_of(path_of(0, 10.0, 4.0), path_of(1, 20.0, 6.0))
    png, _, numbers = write_figure(data, tmp_path / "one" / "mean")
    assert redraw(numbers, tmp_path / "two" / "mean")[0].read_bytes() == png.read_bytes()


def test_report_has_the_bands(mean_of: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = mean_of(path_of(0, 10.0, 4.0), path_of(1, 20.0, 6.0))
    first = StudyFigure(tmp_path / "path.json", path).charts[0]
    assert isinstance(first, Lines)
    assert first.lines[0].errors == pytest.approx((0.0, 5 * SQRT_2, 0.0))
    assert first.lines[0].seeds == 2
    assert "mean of 2 seeds" in first.note
    scale, forgetting = StudyFigure(tmp_path / "c.json", mean_of(curvature_of(0, 1.0), curvature_of(1, 2.0))).charts
    assert isinstance(scale, Lines)
    assert isinstance(forgetting, Lines)
    assert scale.lines[0].errors == pytest.approx((0.1 * SQRT_2,) * 2)
    assert forgetting.lines[0].errors == pytest.approx((SQRT_2 / 2,))


def test_committed_means_are_those_of_the_committed_seeds() -> None:
    folder = Path(__file__).parents[2] / "results" / "figures"
    for kind in ("path", "recalibrated-path", "tradeoff", "curvature"):
        seeds = [folder / f"podnet-5-{kind}.json", *sorted(folder.glob(f"seed-*/{kind}.json"))]
        assert read_figure(folder / f"podnet-5-{kind}-3-seeds.json") == {"format": 1, **mean_figure(seeds)}
