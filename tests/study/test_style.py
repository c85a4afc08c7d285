"""Styles of runs: distinct within a figure, the same in all of them."""

from __future__ import annotations

import itertools

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
