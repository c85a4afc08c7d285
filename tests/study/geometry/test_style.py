"""One look for each method and add-on, through all figures."""

from __future__ import annotations

import itertools

from incvec.addons import ADDONS
from incvec.methods import METHODS
from incvec.study import style


def test_everything_registered_has_a_look_of_its_own() -> None:
    assert set(METHODS) <= set(style.METHODS)
    assert set(ADDONS) <= set(style.ADDONS)
    plain = [style.look(name) for name in METHODS]
    pairs = [(look.color, look.marker) for look in plain]
    assert len(set(pairs)) == len(pairs)


def test_a_method_its_addons_and_its_oracle_differ_in_color_and_marker() -> None:
    for method in METHODS:
        if method == "joint":
            continue
        looks = [style.look(method), style.look(method, ["ivt"]), style.look(method, [], True)]
        for one, other in itertools.combinations(looks, 2):
            assert one.color != other.color
            assert one.marker != other.marker


def test_labels() -> None:
    assert style.label("podnet", ["ivt"]) == "PODNet + IVT"
    assert style.label("lucir", [], True) == "LUCIR oracle"
    assert style.look("podnet", [], True).marker == "*"
    assert style.look("podnet").marker == "s"
    assert style.look("something-new").label == "something-new"
