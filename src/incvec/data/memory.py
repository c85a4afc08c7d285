"""The exemplar memory: one tensor [classes seen, exemplars], row indices into the source, in herding order.

Being in herding order, a memory shrinks by dropping columns: a fixed total keeps the best of each class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from incvec.errors import ConfigError


def quota(n_seen: int, per_class: int | None = None, total: int | None = None) -> int:
    """Exemplars of each class: `per_class`, or `total // n_seen`; exactly one of the two is given."""
    if n_seen < 1:
        raise ValueError(f"n_seen is {n_seen}: expected the number of classes seen, 1 or more")
    if (per_class is None) == (total is None):
        raise ConfigError(
            f"exemplars per class are {per_class} and in total {total}: expected exactly one of them to be set"
        )
    m = per_class if per_class is not None else (total or 0) // n_seen
    if m < 1:
        size = f"{total} in total for {n_seen} classes" if per_class is None else f"{per_class} per class"
        raise ConfigError(f"an exemplar memory of {size} keeps none: expected at least one a class")
    return m


def extend(memory: Tensor | None, rows: Tensor, m: int) -> Tensor:
    """The memory grown: `rows` [new classes, >= m] below the old ones, `m` columns kept of each."""
    if rows.dim() != 2 or rows.shape[1] < m:
        raise ValueError(f"rows are {list(rows.shape)}: expected [new classes, {m} or more]")
    kept = rows[:, :m]
    if memory is None or len(memory) == 0:
        return kept.clone(memory_format=torch.contiguous_format)
    if memory.shape[1] < m:
        raise ValueError(f"the memory holds {memory.shape[1]} exemplars of each class, {m} are asked for")
    return torch.cat([memory[:, :m], kept])


def indices(memory: Tensor, m: int | None = None) -> Tensor:
    """The first `m` exemplars of every class (all of them by default) as one index tensor, class by class."""
    if m is not None and memory.shape[1] < m:
        raise ValueError(f"the memory holds {memory.shape[1]} exemplars of each class, {m} are asked for")
    return memory[:, :m].reshape(-1)
