"""Styles of runs: distinct within a figure, the same in all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from incvec.addons import ADDONS
from incvec.methods import METHODS
from incvec.study import style


def test_registered_methods_and_addons_have_a_style() -> None:
    assert set(METHODS) <= set(style.METHODS)
    assert set(ADDONS) <= set(style.ADDONS)
    pairs = [(run.color, run.marker) for run in map(style.run_style, METHODS)]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "joint"])
def test_method_addon_and_oracle_differ_in_color_and_marker(method: str) -> None:
    runs = [style.run_style(title) for title in (method, f"{method} + ivt", f"{method} oracle")]
    for one, other in itertools.combinations(runs, 2):
        assert one.color != other.color
        assert one.marker != other.marker
    assert [run.hollow for run in runs] == [True, False, False]


def test_labels() -> None:
    assert style.label("podnet + ivt") == "PODNet + IVT"
    assert style.run_style("lucir oracle").label == "LUCIR oracle"
    assert style.run_style("podnet oracle").marker == "*"
    assert style.run_style("podnet").marker == "s"
    assert style.run_style("something-new").label == "something-new"
    assert style.dataset("cifar100") == "CIFAR-100"


def lab(color: str) -> list[float]:
    """CIE L*a*b* of an sRGB color."""
    linear = [
        v / 12.92 if (v := value / 255) <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for value in style.channels(color)
    ]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    whites = (0.9505, 1.0, 1.089)
    xyz = [
        sum(a * b for a, b in zip(row, linear, strict=True)) / white for row, white in zip(rows, whites, strict=True)
    ]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("theme", [str, style.light, style.dark], ids=["print", "light", "dark"])
def test_ten_runs_of_one_chart_have_colors_that_can_be_told_apart(theme: Callable[[str], str]) -> None:
    for titles in (["podnet + ivt"] * 10, ["podnet", *["podnet + ivt"] * 8, "podnet oracle"]):
        styles = style.distinct(titles)
        assert styles[0] == style.run_style(titles[0])
        assert len({run.marker for run in styles}) == 10
        colors = [lab(theme(run.color)) for run in styles]
        assert min(math.dist(*pair) for pair in itertools.combinations(colors, 2)) > 15  # 2 is just noticeable


def test_runs_keep_their_own_style_if_it_is_free() -> None:
    titles = ["podnet", "podnet + ivt", "podnet oracle", "joint"]
    assert style.distinct(titles) == [style.run_style(title) for title in titles]
    first, second, third = style.distinct(["podnet", "podnet", "podnet + ivt"])
    assert (first, third) == (style.run_style("podnet"), style.run_style("podnet + ivt"))
    assert second.color not in (first.color, third.color)
    assert len(style.distinct(["podnet"] * 40)) == 40


def test_colors_of_lines_have_contrast_on_both_themes() -> None:
    for color in style.palette():
        for shown, background, ratio in (
            (style.light(color), style.LIGHT_BACKGROUND, style.GRAPHIC_CONTRAST),
            (style.dark(color), style.DARK_BACKGROUND, style.CONTRAST),
        ):
            assert style.contrast(style.channels(shown), style.channels(background)) >= ratio
    assert style.contrast([255, 255, 255], [0, 0, 0]) == pytest.approx(21)
    assert (style.light("#000000"), style.dark("#FFFFFF")) == ("#000000", "#FFFFFF")


def test_names_of_others_are_shortened_to_one_printable_line() -> None:
    assert style.dataset("a\nb\0\ud800c") == "a b  c"
    assert style.dataset("x" * 500) == "x" * 59 + "…"
    assert style.label("podnet + " + "y" * 500).startswith("PODNet + yyy")
