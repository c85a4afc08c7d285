"""Streams of data sets whose classes are known only from their folder."""

from __future__ import annotations

import pytest

from incvec.data.stream import split
from incvec.errors import DataError
from incvec.presets.streams import choose_stream


@pytest.mark.parametrize(
    ("classes", "expected"),
    [(2, (1, 1)), (3, (2, 1)), (4, (2, 1)), (7, (4, 1)), (10, (6, 2)), (20, (10, 5)), (100, (50, 5)), (1000, (500, 5))],
)
def test_half_of_the_classes_come_first(classes: int, expected: tuple[int, int]) -> None:
    """With 100 classes, the stream of the paper."""
    assert choose_stream(classes) == expected


@pytest.mark.parametrize("classes", range(2, 60))
def test_every_stream_can_be_cut(classes: int) -> None:
    for uniform in (False, True):
        base, tasks = choose_stream(classes, uniform=uniform)
        assert len(split(classes, base, tasks)) == tasks + (base > 0)
        for given in range(1, classes // 2 + 1):
            base, tasks = choose_stream(classes, base=given)
            assert base == given
            assert len(split(classes, base, tasks)) == tasks + 1
            base, tasks = choose_stream(classes, tasks=given)
            assert tasks == given
            assert len(split(classes, base, tasks)) == tasks + 1


def test_pretrained_models_get_equal_tasks_if_possible() -> None:
    assert choose_stream(100, uniform=True) == (0, 10)
    assert choose_stream(12, uniform=True) == (0, 6)
    assert choose_stream(6, base=0, uniform=True) == (0, 3)
    assert choose_stream(20, tasks=4, uniform=True) == (0, 4)
    base, tasks = choose_stream(7, uniform=True)  # 7 cannot be divided
    assert (base, tasks) == (4, 1)


def test_one_class_is_no_stream() -> None:
    with pytest.raises(DataError, match=r"has 1 class\(es\): a stream needs at least two"):
        choose_stream(1)
