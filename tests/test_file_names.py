"""File names from names that other people chose."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from incvec.file_names import safe_name

HOSTILE = ["../../etc", "a/b", "podnet + ivt", "..", "", "-x", "ä", "x" * 1000, "a\0b", "a\nb", "C:\\x", "\ud800"]


@pytest.mark.parametrize("name", HOSTILE)
def test_unsafe_names_become_safe_and_stay_different(name: str) -> None:
    made = safe_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", made)
    assert safe_name(made) == made
    assert len({safe_name(other) for other in (name, name + "/", name + "?")}) == 3


def test_safe_names_stay() -> None:
    for safe in ("cifar100-5-podnet", "a.b_c-D", "lab-figures-path-1"):
        assert safe_name(safe) == safe


@given(st.text())
def test_any_name(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", safe_name(name))
