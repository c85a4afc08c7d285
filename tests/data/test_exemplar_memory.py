"""The exemplar memory as a tensor of row indices."""

from __future__ import annotations

import pytest
import torch

from incvec.data.memory import extend, indices, quota
from incvec.errors import ConfigError


def test_quota_per_class_or_in_total() -> None:
    assert quota(50, per_class=20) == 20
    assert quota(100, per_class=20) == 20
    assert quota(50, total=2000) == 40
    assert quota(60, total=2000) == 33
    assert quota(100, total=2000) == 20


@pytest.mark.parametrize(
    "wrong", [{}, {"per_class": 20, "total": 2000}, {"per_class": 0}, {"total": 49}, {"total": -1}]
)
def test_quotas_of_zero_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        quota(50, **wrong)


def test_a_fixed_total_keeps_the_best_exemplars_of_every_class() -> None:
    first = torch.tensor([[5, 3, 9, 1], [12, 10, 17, 11]])
    memory = extend(None, first, 4)
    assert torch.equal(memory, first)
    later = extend(memory, torch.tensor([[20, 25, 22], [31, 30, 38]]), 2)
    assert later.tolist() == [[5, 3], [12, 10], [20, 25], [31, 30]]
    assert indices(later).tolist() == [5, 3, 12, 10, 20, 25, 31, 30]
    assert indices(later, 1).tolist() == [5, 12, 20, 31]


def test_a_new_memory_is_a_copy_of_the_rows() -> None:
    rows = torch.tensor([[1, 2, 3]])
    memory = extend(torch.empty(0, 0, dtype=torch.int64), rows, 2)
    rows[0, 0] = 99
    assert memory.tolist() == [[1, 2]]
    assert memory.is_contiguous()


def test_a_memory_cannot_grow_columns() -> None:
    memory = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="has 2 exemplars"):
        extend(memory, torch.tensor([[3, 4, 5]]), 3)
    with pytest.raises(ValueError, match="3 or more"):
        extend(memory, torch.tensor([[3, 4]]), 3)
    with pytest.raises(ValueError, match="has 2 exemplars"):
        indices(memory, 3)
