"""Figures: labels and layout, JSON files, and files of earlier versions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.offsetbox import AnchoredOffsetbox
from matplotlib.text import Text

from incvec.study.figures import find_figures, read_figure, redraw, write_figure
from incvec.study.figures.canvas import add_note, new_figure, save, style_axes
from incvec.study.figures.curvature import draw_curvature, network_order
from incvec.study.figures.files import DRAW
from incvec.study.figures.gap import describe_seeds, draw_gap
from incvec.study.figures.path import curve_styles, draw_path, draw_tradeoff, task_range
from incvec.study.figures.tables import tradeoff_table
from tests.study.test_oracle_gap import gaps, record

FORMAT_1 = Path(__file__).parent / "figures_format_1"  # written by version 0.1


@pytest.mark.parametrize("kind", DRAW)
def test_files_of_format_1_are_drawn(kind: str, tmp_path: Path) -> None:
    assert json.loads((FORMAT_1 / f"{kind}.json").read_text())["format"] == 1
    png, pdf = redraw(FORMAT_1 / f"{kind}.json", tmp_path / kind)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert pdf.read_bytes().startswith(b"%PDF")


def test_figure_is_drawn_again_from_its_json_byte_for_byte(tmp_path: Path) -> None:
    data = read_figure(FORMAT_1 / "gap.json")
    assert data is not None
    png, pdf, numbers = write_figure(data, tmp_path / "one" / "gap")
    assert read_figure(numbers) == data
    assert find_figures([tmp_path]) == [numbers]
    for first, again in zip((png, pdf), redraw(numbers, tmp_path / "two" / "gap"), strict=True):
        assert first.read_bytes() == again.read_bytes()


def path_data() -> dict[str, Any]:
    data = read_figure(FORMAT_1 / "path.json")
    assert data is not None
    return data


def test_slopes_have_minus_signs_and_names_keep_their_hyphens() -> None:
    data = path_data()
    data["curves"][1] |= {"name": "a-b", "fit": {"slope": -2.0, "intercept": 0.0, "r2": 1.0}}
    figure = draw_tradeoff({"panels": [data]})
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert texts[1] == "a-b: linear fit, slope −2.00, r² 1.00"


@pytest.mark.parametrize("r2", [0.49, 0.5, None])
def test_fit_that_explains_less_than_half_is_not_a_finding(r2: float | None) -> None:
    data = path_data()
    for curve in data["curves"]:
        curve["fit"] = {"slope": -2.0, "intercept": 0.0, "r2": r2}
    figure = draw_tradeoff({"panels": [data]})
    legend = " ".join(text.get_text() for text in figure.axes[0].get_legend().get_texts())  # type: ignore[union-attr]
    dashed = [line for line in figure.axes[0].lines if line.is_dashed()]
    table = tradeoff_table({"panels": [data]})
    found = r2 == 0.5
    assert ("slope" in legend) == found
    assert ("no linear relation" in legend) == (not found)
    assert len(dashed) == (len(data["curves"]) if found else 0)
    assert {row[4] for row in table.texts()} == {"-2.000" if found else "–"}


def test_path_names_its_axis() -> None:
    for axis, words in (("distance", "distance from the start"), ("share", "share of the way (0: start, 1: end)")):
        assert draw_path({**path_data(), "axis": axis}).axes[2].get_xlabel().startswith(words)


def test_dollar_signs_are_not_formulas(tmp_path: Path) -> None:
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.plot([1, 10], [1, 10], label="$a$ $$")
    axes.set_xscale("log")
    axes.legend()
    style_axes(axes, "in $ and $$, $x^$", "$")
    add_note(figure, "\\input $1$")
    assert len(save(figure, tmp_path / "figure")) == 2


@pytest.mark.parametrize("repeat", [1, 2])
def test_barriers_have_the_markers_of_their_runs(repeat: int) -> None:
    data = path_data()
    figure = draw_path({**data, "curves": data["curves"] * repeat})
    figure.draw_without_rendering()
    axes = figure.axes[1]
    row = next(child for child in axes.get_children() if isinstance(child, AnchoredOffsetbox))
    words = [text.get_text() for text in row.findobj(Text)]  # type: ignore[attr-defined]
    assert [word[0] for word in words[1:4]] == ["■", "●", "★"]
    assert all(word[1] == " " and float(word[2:]) >= 0 for word in words[1:])
    assert axes.get_title(loc="left").endswith("\n") == (repeat == 2)  # six barriers get a line of their own


def test_curves_of_several_seeds_differ_in_style() -> None:
    curve = {"method": "podnet", "addons": [], "oracle": False}
    curves: list[dict[str, Any]] = [{**curve, "name": f"PODNet, seed {seed}"} for seed in (3, 4)]
    styles = curve_styles([*curves, {**curve, "oracle": True, "name": "oracle"}])
    assert [run.label for run in styles] == ["PODNet, seed 3", "PODNet, seed 4", "oracle"]
    assert len({(run.color, run.marker) for run in styles}) == 3


def test_task_ranges() -> None:
    assert task_range(range(1)) == "task 1"
    assert task_range(range(1, 6)) == "tasks 2 to 6"


@pytest.mark.parametrize("count", [1, 2, 7, 25])
def test_curvature_of_many_tasks(count: int) -> None:
    """All layer groups are shown, although the first task trained the head only; panels do not overlap."""
    part = {"fisher_ratio": 2.0, "scale": 0.7, "distance": 1.0}
    line = {"x": [0.0, 1.0], "measured": [0.0, 2.0], "predicted": [0.0, 1.0], "predicted_per_sample": None}
    names = [["all", "head"]] * (count > 1)
    names += [["all", "stages.1", "stem", "head", "stages.0"]] * (count - len(names))
    tasks = [{"task": t, "parts": dict.fromkeys(each, part), **line} for t, each in enumerate(names, start=1)]
    data = {
        "dataset": "digits", "name": "SSRE + IVT", "method": "ssre", "addons": ["ivt"], "images_per_task": None,
        "batchnorm": "interpolate", "tasks": tasks,
    }  # fmt: skip
    figure: Any = draw_curvature(data)
    figure.draw_without_rendering()
    left, right, *panels = figure.axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["stem", "stage 1", "stage 2", "head"]
    assert figure.get_figwidth() <= 13
    shown = [axes.get_window_extent() for axes in panels if axes.get_visible()]
    assert len(shown) == count
    assert min(box.width for box in shown) > 150  # of 1950
    legends = [right.get_legend().get_window_extent(), figure.subfigs[1].legends[0].get_window_extent()]
    boxes = [left.get_window_extent(), right.get_window_extent(), *shown, *legends]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


def test_layer_groups_are_in_network_order() -> None:
    groups = ["head", "blocks.10", "blocks.2", "stem"]
    assert sorted(groups, key=network_order) == ["stem", "blocks.2", "blocks.10", "head"]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_labels_of_gap_bars_do_not_overlap(count: int) -> None:
    addons = ("ivt", "eopc", "cofima", "magmax", "imm", "fisher-merge")[:count]
    records = [record("podnet", 50.0), record("podnet", 60.0, oracle=True), record("joint", 70.0)]
    (data,) = gaps([*records, *(record("podnet", 52.0, name) for name in addons)])
    figure = draw_gap(data)
    figure.draw_without_rendering()
    for texts in (figure.axes[1].texts, figure.axes[1].get_xticklabels()):
        boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.x0)
        assert len(boxes) >= count
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_seeds_are_listed_by_run_if_they_differ() -> None:
    records = [record("podnet", 50.0), record("podnet", 60.0, oracle=True), record("podnet", 52.0, "ivt")]
    assert describe_seeds(gaps(records)[0]["runs"]) == "seed 0"
    (data,) = gaps([*records, record("podnet", 53.0, "ivt", seed=1)])
    assert describe_seeds(data["runs"]) == (
        "PODNet, PODNet oracle: seed 0; PODNet + IVT: seeds 0, 1 (gap closed: seed 0)"
    )
