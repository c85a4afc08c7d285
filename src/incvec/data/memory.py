"""The exemplar memory: one tensor [seen classes, exemplars] of row indices into the source, in herding order.

It shrinks by dropping columns, which leaves the best exemplars of each class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from incvec.errors import ConfigError


def quota(n_seen: int, per_class: int | None = None, total: int | None = None) -> int:
    """Exemplars per class: `per_class`, or `total // n_seen`; exactly one of the two is given."""
    if n_seen < 1:
        raise ValueError(f"n_seen is {n_seen}: expected the number of seen classes, 1 or more")
    if (per_class is None) == (total is None):
        raise ConfigError(
            f"{per_class} exemplars per class and {total} in total: expected exactly one of the two to be set"
        )
    m = per_class if per_class is not None else (total or 0) // n_seen
    if m < 1:
        size = f"{total} in total for {n_seen} classes" if per_class is None else f"{per_class} per class"
        raise ConfigError(f"an exemplar memory of {size} keeps none: expected at least one exemplar per class")
    return m


def extend(memory: Tensor | None, rows: Tensor, m: int) -> Tensor:
    """Append `rows` [new classes, >= m] to the memory and cut all rows to `m` columns."""
    if rows.dim() != 2 or rows.shape[1] < m:
        raise ValueError(f"rows are {list(rows.shape)}: expected [new classes, {m} or more]")
    if memory is None or len(memory) == 0:
        return rows[:, :m].clone(memory_format=torch.contiguous_format)
    if memory.shape[1] < m:
        raise ValueError(f"the memory has {memory.shape[1]} exemplars per class, expected {m} or more")
    return torch.cat([memory[:, :m], rows[:, :m]])


def indices(memory: Tensor, m: int | None = None) -> Tensor:
    """The first `m` exemplars of every class (by default all) as one index tensor, class by class."""
    if m is not None and memory.shape[1] < m:
        raise ValueError(f"the memory has {memory.shape[1]} exemplars per class, expected {m} or more")
    return memory[:, :m].reshape(-1)
