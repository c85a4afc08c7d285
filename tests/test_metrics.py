"""Metrics of matrices that are small enough to compute by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from incvec.contracts import Task
from incvec.metrics import (
    counts_by_task,
    gap_closed,
    inclearn_forgetting,
    matrix_from_counts,
    summarize,
)


def stream(*ends: int) -> list[Task]:
    """Tasks that end before these labels."""
    return [Task(t, first, last) for t, (first, last) in enumerate(pairwise((0, *ends)))]


def test_metrics_of_three_equal_tasks() -> None:
    got = summarize([[90.0], [60.0, 80.0], [70.0, 50.0, 40.0]], [10, 10, 10])
    assert got["a"] == pytest.approx([90, 70, 160 / 3])
    assert got["AA"] == pytest.approx((90 + 70 + 160 / 3) / 3)
    assert got["LA"] == pytest.approx(160 / 3)
    assert got["FM"] == pytest.approx((20 + 30) / 2)
    assert got["fm_first_last"] == pytest.approx((20 + 30) / 2)
    assert got["fm_spu"] == pytest.approx((20 + 30 - 40) / 3)
    assert got["plasticity"] == pytest.approx((90 + 80 + 40) / 3)
    assert got["fm_inclearn"] is None


def test_accuracy_is_weighted_by_images_and_forgetting_by_tasks() -> None:
    got = summarize([[80.0], [70.0, 90.0], [60.0, 75.0, 100.0]], [50, 10, 20])
    assert got["a"] == pytest.approx([80, (3500 + 900) / 60, (3000 + 750 + 2000) / 80])
    assert got["LA"] == pytest.approx(71.875)
    assert got["AA"] == pytest.approx((80 + 220 / 3 + 71.875) / 3)
    assert got["FM"] == pytest.approx((20 + 15) / 2)


def test_forgetting_is_relative_to_the_best_accuracy_not_the_first() -> None:
    got = summarize([[50.0], [80.0, 70.0], [60.0, 75.0, 90.0]], [1, 1, 1])
    assert got["FM"] == pytest.approx((20 - 5) / 2)  # the maximum excludes the last row
    assert got["fm_clipped"] == pytest.approx((20 + 0) / 2)  # includes it: a gain counts as 0
    assert got["fm_first_last"] == pytest.approx((-10 - 5) / 2)


def test_single_task_has_no_forgetting() -> None:
    got = summarize([[77.0]], [100])
    assert got["AA"] == got["LA"] == got["plasticity"] == 77
    assert [got["FM"], got["fm_spu"], got["fm_first_last"], got["fm_clipped"], got["fm_inclearn"]] == [None] * 5
    assert inclearn_forgetting([[3, 4]], [5, 5]) is None


def test_entries_above_the_diagonal_are_ignored() -> None:
    full = [[90.0, math.nan], [60.0, 80.0]]
    assert summarize(full, [3, 1]) == summarize([[90.0], [60.0, 80.0]], [3, 1])


@st.composite
def triangles(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    size = draw(st.integers(2, 6))
    rows = [draw(st.lists(st.floats(0, 100), min_size=t + 1, max_size=t + 1)) for t in range(size)]
    return rows, draw(st.lists(st.integers(1, 1000), min_size=size, max_size=size))


@given(triangles())
def test_identities_between_forgetting_measures(drawn: tuple[list[list[float]], list[int]]) -> None:
    rows, counts = drawn
    size, newest = len(rows), rows[-1][-1]
    got = summarize(rows, counts)
    assert got["FM"] is not None
    assert got["fm_spu"] is not None
    assert got["fm_first_last"] is not None
    assert got["fm_spu"] == pytest.approx(((size - 1) * got["FM"] - newest) / size, abs=1e-9)
    assert got["FM"] == pytest.approx((size * got["fm_spu"] + newest) / (size - 1), abs=1e-9)
    assert got["fm_clipped"] is not None
    assert got["fm_first_last"] <= got["FM"] + 1e-9
    assert got["FM"] <= got["fm_clipped"] + 1e-9
    drops = [max(row[i] for row in rows[i:]) - rows[-1][i] for i in range(size - 1)]
    assert got["fm_clipped"] == pytest.approx(sum(drops) / (size - 1), abs=1e-9)
    assert min(rows[-1]) - 1e-9 <= got["LA"] <= max(rows[-1]) + 1e-9
    equal = summarize(rows, [7] * size)
    best = [max(row[i] for row in rows[i:-1]) for i in range(size - 1)]
    assert equal["fm_spu"] == pytest.approx(sum(best) / size - equal["LA"], abs=1e-9)


def test_fm_spu_equals_spus_code_on_a_matrix_padded_with_zeros() -> None:
    rows = [[90.0], [60.0, 80.0], [70.0, 50.0, 40.0]]
    table = [row + [0.0] * (3 - len(row)) for row in rows]
    expected = sum(max(table[t][i] for t in range(2)) - table[2][i] for i in range(3)) / 3
    assert summarize(rows, [1, 1, 1])["fm_spu"] == pytest.approx(expected)


def test_fm_inclearn_groups_classes_by_ten_and_divides_by_groups_plus_one() -> None:
    counts = [10] * 25
    rows = [[9] * 15, [6] * 15 + [8] * 5, [5] * 20 + [7] * 5]
    # Groups 0-9, 10-19, 20-24 after the tasks: (90, 90), (60, 70), (50, 50, 70); the last one is new.
    assert inclearn_forgetting(rows, counts) == pytest.approx((40 + 40 - 70) / 4)
    matrix = matrix_from_counts(rows, counts, stream(15, 20, 25))
    assert matrix == [[90], [60, 80], [50, 50, 70]]
    got = summarize(matrix, [150, 50, 50], correct_by_class=rows, class_counts=counts)
    assert got["fm_inclearn"] == pytest.approx(2.5)
    assert got["FM"] == pytest.approx((40 + 30) / 2)


def test_fm_inclearn_is_proportional_to_fm_spu_if_groups_are_tasks() -> None:
    counts = [4] * 30
    rows = [[4] * 10, [2] * 10 + [3] * 10, [1] * 10 + [3] * 10 + [4] * 10]
    tasks = stream(10, 20, 30)
    got = summarize(
        matrix_from_counts(rows, counts, tasks),
        counts_by_task(counts, tasks),
        correct_by_class=rows,
        class_counts=counts,
    )
    assert got["fm_spu"] is not None
    assert got["fm_inclearn"] == pytest.approx(got["fm_spu"] * 3 / 4)


def test_matrix_from_counts_with_unequal_classes() -> None:
    tasks = stream(2, 3)
    assert matrix_from_counts([[3, 1], [2, 0, 5]], [4, 1, 10], tasks) == [[80], [40, 50]]
    assert counts_by_task([4, 1, 10], tasks) == [5, 10]


def test_matrix_of_an_unfinished_run_has_fewer_rows_than_tasks() -> None:
    assert matrix_from_counts([[3, 1]], [4, 4, 10], stream(2, 3)) == [[50]]


def test_gap_closed_is_none_without_a_gap() -> None:
    assert gap_closed(56.0, 54.0, 64.0) == pytest.approx(0.2)
    assert gap_closed(53.0, 54.0, 64.0) == pytest.approx(-0.1)
    assert gap_closed(56.0, 60.0, 60.0) is None
    assert gap_closed(56.0, 60.0, 59.0) is None


@pytest.mark.parametrize(
    ("matrix", "counts", "message"),
    [
        ([], [], "empty"),
        ([[1.0], [1.0, 2.0]], [1], "2 rows.*has 1"),
        ([[1.0], [1.0]], [1, 1], r"row 1.*1 entries.*expected 2"),
        ([[1.0], [1.0, 2.0, 3.0]], [1, 1], r"row 1.*3 entries"),
        ([[1.0]], [0], r"test_counts\[0\] is 0"),
        ([[101.0]], [1], r"A\[0\]\[0\] is 101"),
        ([[1.0], [math.nan, 1.0]], [1, 1], r"A\[1\]\[0\] is nan"),
    ],
)
def test_invalid_matrix_is_refused(matrix: list[list[float]], counts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarize(matrix, counts)


def test_invalid_counts_are_refused() -> None:
    tasks = stream(2, 3)
    with pytest.raises(ValueError, match="one of them is missing"):
        summarize([[1.0]], [1], class_counts=[1])
    with pytest.raises(ValueError, match=r"2 rows.*has 1"):
        summarize([[1.0]], [1], correct_by_class=[[1], [1, 1]], class_counts=[1, 1])
    with pytest.raises(ValueError, match="3 correct of 2"):
        matrix_from_counts([[3, 1]], [2, 2, 2], tasks)
    with pytest.raises(ValueError, match=r"row 0.*1 classes.*2 have been seen"):
        matrix_from_counts([[1]], [2, 2, 2], tasks)
    with pytest.raises(ValueError, match=r"class_counts\[1\] is 0"):
        matrix_from_counts([[1, 0]], [2, 0, 2], tasks)
    with pytest.raises(ValueError, match="expected more than 2"):
        matrix_from_counts([[1, 1], [1, 1]], [2, 2, 2], tasks)
    with pytest.raises(ValueError, match=r"3 rows.*2 tasks"):
        matrix_from_counts([[1], [1, 1], [1, 1, 1]], [2, 2, 2], tasks)
    with pytest.raises(ValueError, match="expected 2 as the first one"):
        matrix_from_counts([[1, 1]], [2, 2, 2], [Task(0, 0, 2), Task(1, 1, 3)])
    with pytest.raises(ValueError, match="empty"):
        matrix_from_counts([], [2, 2, 2], tasks)
    with pytest.raises(ValueError, match=r"3 classes.*has 2"):
        counts_by_task([2, 2], tasks)
