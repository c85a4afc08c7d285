"""Streams of data sets whose classes are known only from their folder, and streams refused before data is read."""

from __future__ import annotations

from typing import Any

import pytest

from incvec.data.stream import split
from incvec.errors import ConfigError, DataError
from incvec.presets.streams import choose_stream, resolve_seeds


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tasks": 100}, "50 classes after a base of 50 cannot be cut into 100 equal tasks"),
        ({"task_sizes": [50, 51]}, "numbers of 1 or more that add up to 100"),
        ({"stop_after": 7}, "stop_after=7: the stream has 6 tasks"),
        ({"method": "joint", "stop_after": 2}, "stop_after=2: the stream has 1 tasks"),
        ({"class_order": list(range(99))}, "it lacks 99"),
        ({"class_order": [3, 3]}, "setting class_order = .* is not possible: expected every class once; it repeats 3"),
        ({"dataset": "folder", "class_order": [3, 3]}, "it repeats 3"),
    ],
)
def test_impossible_streams_are_refused_without_data(given: dict[str, Any], expected: str) -> None:
    given = {"method": "finetune", "dataset": "cifar100", "base_classes": 50, "tasks": 5} | given
    with pytest.raises(ConfigError, match=expected):
        resolve_seeds(given, None, None)


def test_streams_of_unknown_numbers_of_classes_are_left_to_the_run() -> None:
    given = {"method": "finetune", "dataset": "imagenet-subset", "base_classes": 50, "tasks": 7}
    with pytest.raises(ConfigError, match="cannot be cut into 7 equal tasks"):
        resolve_seeds(given, None, None)
    resolve_seeds({**given, "class_list": "cmc"}, None, None)
    resolve_seeds({**given, "dataset": "aircraft"}, None, None)
