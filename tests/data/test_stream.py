"""The order of classes and their division into tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from incvec.data.stream import class_order, relabel, split
from incvec.errors import ConfigError


def test_seed_1993_gives_the_published_order() -> None:
    order = class_order(100, seed=1993)
    assert order[:10] == [68, 56, 78, 8, 23, 84, 90, 65, 74, 76]
    assert order[-10:] == [51, 48, 73, 93, 39, 67, 29, 49, 57, 33]
    assert sorted(order) == list(range(100))
    assert all(type(c) is int for c in order)
    assert class_order(1000, seed=1993)[:6] == [54, 7, 894, 512, 126, 337]


def test_orders_do_not_use_numpys_global_generator() -> None:
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    class_order(100, seed=1993)
    assert np.array_equal(before, np.random.get_state()[1])


def test_explicit_order_and_identity() -> None:
    assert class_order(4) == [0, 1, 2, 3]
    assert class_order(4, order=[2, 0, 3, 1]) == [2, 0, 3, 1]
    assert class_order(4, seed=1993, order=[2, 0, 3, 1]) == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 1, 2], ["3 given", "lacks 3"]),
        ([0, 1, 2, 2], ["repeats 2", "lacks 3"]),
        ([0, 1, 2, 4], ["has 4", "lacks 3"]),
        ([0, 1, 2, -1], ["has -1"]),
        ([0, 1, 2, 3, 3], ["5 given", "repeats 3"]),
    ],
)
def test_an_order_that_is_not_a_permutation_is_refused(order: list[int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        class_order(4, order=order)
    assert all(word in str(caught.value) for word in words)


def test_an_impossible_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        class_order(4, seed=-1)


def test_the_papers_splits() -> None:
    five = split(100, 50, 5)
    assert [(t.first, t.last) for t in five] == [(0, 50), (50, 60), (60, 70), (70, 80), (80, 90), (90, 100)]
    assert [t.index for t in five] == [0, 1, 2, 3, 4, 5]
    assert [t.n_new for t in split(100, 50, 25)] == [50] + [2] * 25
    assert [t.n_new for t in split(10, 4, 3)] == [4, 2, 2, 2]
    assert [t.n_new for t in split(100, 0, 10)] == [10] * 10
    assert [t.n_new for t in split(100, 100, 0)] == [100]
    assert split(100, 0, 1) == split(100, 100, 0)


@given(st.integers(1, 60), st.integers(0, 70), st.integers(0, 70))
def test_a_split_covers_every_class_once_or_explains(n: int, base: int, increments: int) -> None:
    try:
        tasks = split(n, base, increments)
    except ConfigError:
        possible = (base == n and increments == 0) or (base < n and increments > 0 and (n - base) % increments == 0)
        assert not possible
        return
    assert [c for t in tasks for c in t.classes] == list(range(n))
    assert len(tasks) == increments + (base > 0)
    assert all(t.n_new > 0 for t in tasks)


def test_an_impossible_split_suggests_possible_ones() -> None:
    with pytest.raises(ConfigError, match=r"with this base: 1, 2, 5, 10, 25, 50; .*a base of 51 is possible"):
        split(100, 50, 7)
    with pytest.raises(ConfigError, match=r"only 10 classes: .*--set base_classes=N, for example 5"):
        split(10, 11, 1)
    with pytest.raises(ConfigError, match=r"--set base_classes=N, or .*--method joint"):
        split(10, 10, 2)
    with pytest.raises(ConfigError, match="negative"):
        split(10, -1, 2)
    with pytest.raises(ConfigError, match="without a base"):
        split(10, 0, 3)


def test_relabel_gives_positions_in_the_order() -> None:
    order = [2, 0, 3, 1]
    labels = torch.tensor([0, 1, 2, 3, 3, 2])
    assert relabel(labels, order).tolist() == [order.index(y) for y in labels.tolist()]
