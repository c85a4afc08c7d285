"""S and the teleport: pure functions of tensors.

IVT moves the parameters of task t towards the anchor, the parameters task t began with (eq. 12):

    theta <- anchor + S (theta - anchor),    S = (Fbar_{t-1} + Fbar_t)^{-1} Fbar_t,    Fbar_t = Fbar_{t-1} + F_t

With A = Fbar_{t-1} and F = F_t, the diagonal case is S = (A + F) / (2A + F), always in [1/2, 1]. The code works
with the complement, the pull towards the anchor,

    P = 1 - S = A / (2A + F) = 1 / (2 + F / A),    theta <- theta - P (theta - anchor)

because it makes "S = 1" exact: if A = 0, then P = 0 and the parameter keeps every bit. The last form needs no
epsilon and neither over- nor underflows: F / A may become infinite (P = 0) or zero (P = 1/2), both the correct
limits. Only A = 0 is a special case, and there P = 0: a weight without Fisher from earlier tasks is never moved.
An F that is not finite is unknown (a gradient overflowed or was not a number): then P = 0 as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

RIDGE = 1e-6
"""Added to a kernel block's diagonal, as a fraction of its trace: above the rounding of float32 sums."""

_CHUNK_ELEMENTS = 1 << 24  # transient memory of a teleport: a few tensors of this many elements
_CHUNK_BLOCKS = 1 << 16


def _check_shapes(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"the tensors must have one shape, but they have {shapes}")


def pull(fisher_prev: Tensor, fisher_new: Tensor) -> Tensor:
    """P = A / (2A + F), elementwise: the fraction of the increment that is removed, in [0, 1/2]."""
    known = (fisher_prev > 0) & (fisher_new < math.inf)  # False if F is not a number
    return torch.where(known, 1 / (2 + fisher_new / fisher_prev), 0.0)


def scale(fisher_prev: Tensor, fisher_new: Tensor) -> Tensor:
    """S = Fbar_t / (Fbar_{t-1} + Fbar_t) from Fbar_{t-1} and F_t, as a new tensor.

    In [1/2, 1]: 1 if Fbar_{t-1} = 0 (also at 0/0), 1/2 if F_t = 0. Negative numbers and those that are not finite are
    refused, which synchronizes with the device.
    """
    _check_shapes(fisher_prev=fisher_prev, fisher_new=fisher_new)
    for name, value in (("fisher_prev", fisher_prev), ("fisher_new", fisher_new)):
        if not bool(((value >= 0) & (value < math.inf)).all()):
            raise ValueError(f"{name}: expected finite numbers from 0 up, since it is a mean of squares")
    return 1 - pull(fisher_prev, fisher_new)


@torch.no_grad()
def teleport(parameter: Tensor, anchor: Tensor, fisher_prev: Tensor, fisher_new: Tensor) -> Tensor:
    """anchor + S (parameter - anchor) as a new tensor of the parameter's dtype; nothing is changed in place."""
    _check_shapes(parameter=parameter, anchor=anchor, fisher_prev=fisher_prev, fisher_new=fisher_new)
    moved = parameter - pull(fisher_prev, fisher_new) * (parameter - anchor)
    return moved.to(parameter.dtype)


def finite_or_zero(values: Tensor) -> Tensor:
    """Zero in place of infinities and NaN: what cannot be computed is not moved."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def block_pull(fisher_prev: Tensor, fisher_new: Tensor, ridge: float = RIDGE) -> Tensor:
    """P = I - S for stacks of matrices of shape (..., n, n), in float64.

    S = (A + Fbar_t + r I)^{-1} (Fbar_t + r I), the ridge r in numerator and denominator alike, so that
    P = (2A + F + r I)^{-1} A: directions that no task has seen are kept (S = 1) instead of depending on
    rounding errors. r is `ridge` times the trace of A + Fbar_t. A block of zeros has S = I.
    """
    prev, both = fisher_prev.double(), 2 * fisher_prev.double() + fisher_new.double()
    trace = both.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    some = trace > 0
    unit = torch.where(some, trace, 1.0)  # both sides are divided by it, so that tiny squares do not underflow
    prev, both = prev / unit, both / unit
    both.diagonal(dim1=-2, dim2=-1).add_(torch.where(some, ridge, 1.0)[..., 0])
    # solve_ex leaves its error flag on the device; solve would synchronize.
    solution: Tensor = torch.linalg.solve_ex(both, prev).result
    return torch.where(trace < math.inf, solution, 0.0)  # an unknown F: see above


def block_scale(fisher_prev: Tensor, fisher_new: Tensor, ridge: float = RIDGE) -> Tensor:
    """S for stacks of matrices of shape (..., n, n), in float64; see `block_pull`."""
    _check_shapes(fisher_prev=fisher_prev, fisher_new=fisher_new)
    complement = block_pull(fisher_prev, fisher_new, ridge)
    return torch.eye(complement.shape[-1], dtype=torch.float64, device=complement.device) - complement


def _chunks(parameters: Sequence[Tensor], anchors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors to process together: one device and dtype of the sums, a bounded number of elements."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (parameter, anchor) in enumerate(zip(parameters, anchors, strict=True)):
        groups.setdefault((parameter.device, anchor.dtype), []).append(index)
    for group in groups.values():
        chunk: list[int] = []
        elements = 0
        for index in group:
            if chunk and elements + parameters[index].numel() > _CHUNK_ELEMENTS:
                yield chunk
                chunk, elements = [], 0
            chunk.append(index)
            elements += parameters[index].numel()
        yield chunk


@torch.no_grad()
def teleport_(
    parameters: Sequence[Tensor],
    anchors: Sequence[Tensor],
    fisher_prev: Sequence[Tensor],
    fisher_new: Sequence[Tensor],
) -> list[Tensor]:
    """The diagonal teleport of many tensors in place. Returns statistics of each, left on the device.

    They are, in this order: the sum of the pull, the distances to the anchor before and after (2-norms), and the sums
    of the new and the previous Fisher.

    Tensors are concatenated in flat chunks, so that a network of a hundred small tensors needs few kernels. Anchors and
    Fishers in host memory are copied to the parameters' device chunk by chunk.
    """
    statistics = [torch.empty(0)] * len(parameters)
    for chunk in _chunks(parameters, anchors):
        sizes = [parameters[i].numel() for i in chunk]

        def flat(tensors: Sequence[Tensor], chunk: list[int] = chunk) -> Tensor:
            near = (tensors[i].to(parameters[i].device, non_blocking=True) for i in chunk)
            return torch.cat([tensor.reshape(-1) for tensor in near])

        anchor, prev, new = flat(anchors), flat(fisher_prev), flat(fisher_new)
        increment = flat(parameters).to(anchor.dtype) - anchor
        share = pull(prev, new)
        back = finite_or_zero(share * increment)
        pieces = zip(chunk, back.split(sizes), strict=True)
        torch._foreach_sub_([parameters[i] for i in chunk], [piece.view(parameters[i].shape) for i, piece in pieces])
        values = torch.stack([share, increment.square(), (increment - back).square(), new, prev])
        measured = torch.stack([piece.sum(1) for piece in values.split(sizes, 1)])
        measured[:, 1:3].sqrt_()
        for i, row in zip(chunk, measured, strict=True):
            statistics[i] = row
    return statistics


@torch.no_grad()
def block_teleport_(parameter: Tensor, anchor: Tensor, fisher_prev: Tensor, fisher_new: Tensor) -> Tensor:
    """The teleport of one convolution's weight with one block per kernel slice, in place.

    parameter and anchor are (out, in, k, k), the Fishers (out, in, k*k, k*k). It returns the statistics of `teleport_`;
    the Fishers' sums are those of the diagonals.
    """
    anchor, fisher_prev = (tensor.to(parameter.device, non_blocking=True) for tensor in (anchor, fisher_prev))
    side = fisher_prev.shape[-1]
    increment = (parameter.to(anchor.dtype) - anchor).reshape(-1, side, 1)
    prev, new = fisher_prev.reshape(-1, side, side), fisher_new.reshape(-1, side, side)
    back = torch.empty_like(increment)
    pulled = torch.zeros((), dtype=torch.float64, device=anchor.device)
    for start in range(0, len(increment), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        complement = block_pull(prev[part], new[part])
        back[part] = finite_or_zero(complement @ increment[part].double()).to(back.dtype)
        pulled += complement.diagonal(dim1=-2, dim2=-1).sum()
    parameter.sub_(back.view(parameter.shape))
    return torch.stack(
        [
            pulled.to(anchor.dtype),
            increment.norm(),
            (increment - back).norm(),
            new.diagonal(dim1=-2, dim2=-1).sum(),
            prev.diagonal(dim1=-2, dim2=-1).sum(),
        ]
    )
