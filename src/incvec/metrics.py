"""Metrics of an accuracy matrix: AA, LA, FM, the forgetting measures of other code bases, and the gap closed.

A[t][i] is the accuracy, in percent, on the test images of task i after training task t, with a classifier over all
classes seen up to t. A matrix is a list of rows; row t has the entries A[t][0] to A[t][t]. Rows with T entries are
accepted, too; those above the diagonal are ignored. With n_i test images in task i, and tasks counted from 1 to T:

    a_t = sum_{i<=t} n_i A[t][i] / sum_{i<=t} n_i       accuracy over all test images seen so far
    AA  = mean of a_t over all tasks, the base included
    LA  = a_T
    FM  = 1/(T-1) sum_{i<T} ( max_{i<=t<T} A[t][i] - A[T][i] )

FM weights all old tasks equally, whatever their number of classes. Other code bases compute forgetting in other ways:

    fm_first_last   A[i][i] in place of the maximum: the negative backward transfer
    fm_spu          SPU's code: includes the newest task, with 0 as its earlier accuracy, and divides by T
    fm_clipped      as PyCIL, by task: the maximum includes the last task, so that no term is negative
    fm_inclearn     the code of PODNet's authors: see `inclearn_forgetting`

For a single task every forgetting measure is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypedDict

Matrix = Sequence[Sequence[float]]
Counts = Sequence[Sequence[int]]


class Span(Protocol):
    """The part of a task that this module uses: its labels are first, ..., last - 1."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


class Summary(TypedDict):
    """All metrics, in percent."""

    AA: float
    LA: float
    FM: float | None
    fm_spu: float | None
    fm_first_last: float | None
    fm_clipped: float | None
    fm_inclearn: float | None
    plasticity: float
    a: list[float]


def summarize(
    matrix: Matrix,
    test_counts: Sequence[int],
    *,
    correct_by_class: Counts | None = None,
    class_counts: Sequence[int] | None = None,
) -> Summary:
    """All metrics of an accuracy matrix.

    `test_counts[i]` is the number of test images of task i. `fm_inclearn` needs the number of correct predictions by
    class after every task, and of test images by class; it is None without them.
    """
    rows = checked(matrix, test_counts)
    if (correct_by_class is None) != (class_counts is None):
        raise ValueError("correct_by_class and class_counts have to be given together: one of them is missing")
    inclearn = None
    if correct_by_class is not None and class_counts is not None:
        if len(correct_by_class) != len(rows):
            raise ValueError(
                f"correct_by_class has {len(correct_by_class)} rows, but the matrix has {len(rows)}: "
                "one row per task is needed"
            )
        inclearn = inclearn_forgetting(correct_by_class, class_counts)
    a = [weighted_mean(row, test_counts) for row in rows]
    old = range(len(rows) - 1)
    last = rows[-1]
    best = [max(rows[t][i] for t in range(i, len(rows) - 1)) for i in old]
    forgotten = math.fsum(best[i] - last[i] for i in old)
    return Summary(
        AA=mean(a),
        LA=a[-1],
        FM=forgotten / len(old) if old else None,
        fm_spu=(forgotten - last[-1]) / len(rows) if old else None,
        fm_first_last=mean([rows[i][i] - last[i] for i in old]) if old else None,
        fm_clipped=clipped_forgetting(rows),
        fm_inclearn=inclearn,
        plasticity=mean([row[-1] for row in rows]),
        a=a,
    )


def clipped_forgetting(matrix: Matrix) -> float | None:
    """`fm_clipped`: FM with the last task in the maximum; None for a single task."""
    size = len(matrix)
    drops = [max(matrix[t][i] for t in range(i, size)) - matrix[-1][i] for i in range(size - 1)]
    return mean(drops) if drops else None


def gap_closed(la: float, la_plain: float, la_oracle: float) -> float | None:
    """The fraction of the gap between a method and its oracle that an add-on closes.

        (LA - LA_plain) / (LA_oracle - LA_plain)

    0 is the method without add-ons, 1 its oracle. None unless LA_oracle > LA_plain: then there is no gap to close.
    """
    gap = la_oracle - la_plain
    return (la - la_plain) / gap if gap > 0 else None


def inclearn_forgetting(correct_by_class: Counts, class_counts: Sequence[int]) -> float | None:
    """Forgetting as the code of PODNet's authors computes it, in percent; None for a single task.

    It divides the classes into groups of ten, independent of the tasks. For each group seen it takes the best earlier
    accuracy minus the last one; the best is 0 for a group first seen in the last task. It divides the sum by the
    number of groups plus one, since the total has an entry among them. (It also rounds each accuracy to 0.1 points;
    we do not.)
    """
    check_counts(correct_by_class, class_counts)
    if len(correct_by_class) == 1:
        return None
    group = 10
    by_group = [
        [
            100 * sum(row[start : start + group]) / sum(class_counts[start : min(start + group, len(row))])
            for start in range(0, len(row), group)
        ]
        for row in correct_by_class
    ]
    last = by_group[-1]
    best = [max((row[g] for row in by_group[:-1] if g < len(row)), default=0.0) for g in range(len(last))]
    return (sum(best) - sum(last)) / (len(last) + 1)


def matrix_from_counts(
    correct_by_class: Counts, class_counts: Sequence[int], tasks: Sequence[Span]
) -> list[list[float]]:
    """The accuracy matrix, in percent, from counts by class.

    `correct_by_class[t]` has the number of correctly classified test images of each class seen after task t,
    `class_counts` the number of test images of each class of the stream.
    """
    check_tasks(tasks)
    check_counts(correct_by_class, class_counts)
    if len(correct_by_class) > len(tasks):
        raise ValueError(f"correct_by_class has {len(correct_by_class)} rows, but there are {len(tasks)} tasks")
    for t, row in enumerate(correct_by_class):
        if len(row) != tasks[t].last:
            raise ValueError(f"row {t} of correct_by_class has {len(row)} classes, but {tasks[t].last} have been seen")
    counts = counts_by_task(class_counts, tasks)
    return [
        [100 * sum(row[task.first : task.last]) / counts[i] for i, task in enumerate(tasks[: t + 1])]
        for t, row in enumerate(correct_by_class)
    ]


def counts_by_task(class_counts: Sequence[int], tasks: Sequence[Span]) -> list[int]:
    """The number of test images of each task, from those of each class."""
    check_tasks(tasks)
    if tasks and tasks[-1].last > len(class_counts):
        raise ValueError(f"the tasks have {tasks[-1].last} classes, but class_counts has {len(class_counts)}")
    return [sum(class_counts[task.first : task.last]) for task in tasks]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Mean of the values with the first len(values) weights."""
    total = sum(weights[: len(values)])
    return math.fsum(w * v for v, w in zip(values, weights, strict=False)) / total


def checked(matrix: Matrix, test_counts: Sequence[int]) -> list[list[float]]:
    """The lower triangle as lists of floats; ValueError if the matrix is invalid."""
    size = len(matrix)
    if size == 0:
        raise ValueError("the accuracy matrix is empty: expected one row per task")
    if len(test_counts) != size:
        raise ValueError(f"the matrix has {size} rows, but test_counts has {len(test_counts)}: one per task is needed")
    for i, count in enumerate(test_counts):
        if count < 1:
            raise ValueError(f"test_counts[{i}] is {count}: every task needs test images")
    rows = []
    for t, row in enumerate(matrix):
        if len(row) not in (t + 1, size):
            raise ValueError(f"row {t} of the matrix has {len(row)} entries; expected {t + 1}, one for each task seen")
        rows.append([float(value) for value in row[: t + 1]])
        for i, value in enumerate(rows[t]):
            if not 0 <= value <= 100:
                raise ValueError(f"A[{t}][{i}] is {value}; expected a percentage from 0 to 100")
    return rows


def check_counts(correct_by_class: Counts, class_counts: Sequence[int]) -> None:
    if not correct_by_class:
        raise ValueError("correct_by_class is empty: expected one row per task")
    for c, count in enumerate(class_counts):
        if count < 1:
            raise ValueError(f"class_counts[{c}] is {count}: every class needs test images")
    seen = 0
    for t, row in enumerate(correct_by_class):
        if not seen < len(row) <= len(class_counts):
            raise ValueError(
                f"row {t} of correct_by_class has {len(row)} classes; expected more than {seen}, as in the row "
                f"before, and at most {len(class_counts)}"
            )
        seen = len(row)
        for c, (correct, count) in enumerate(zip(row, class_counts, strict=False)):
            if not 0 <= correct <= count:
                raise ValueError(f"after task {t}, class {c} has {correct} correct of {count} test images")


def check_tasks(tasks: Sequence[Span]) -> None:
    seen = 0
    for t, task in enumerate(tasks):
        if task.first != seen or task.last <= task.first:
            raise ValueError(
                f"task {t} has classes {task.first} to {task.last - 1}; expected {seen} as the first one "
                "and at least one class"
            )
        seen = task.last
