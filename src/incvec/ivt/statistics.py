"""Statistics of teleports and tasks: S, and the distance from the anchor.

A teleport leaves its statistics on the device as small tensors; the functions that return Python numbers read them, and
so synchronize with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from .fisher import EXPONENT
from .transform import pull


def overall(rows: Sequence[Tensor]) -> Tensor:
    """The first three statistics of a teleport over all of its tensors: sum of the pull, distances before and after."""
    values = torch.stack([row[:3].to(rows[0].device, torch.float32) for row in rows])
    return torch.cat([values[:, :1].sum(0), torch.linalg.vector_norm(values[:, 1:], dim=0)])


class TeleportRow(TypedDict):
    """One teleport, over all of its tensors."""

    epoch: int  # of the task, from 1
    scale: float  # mean of S
    distance_before: float  # 2-norm of theta - anchor
    distance_after: float


def teleport_rows(measured: Iterable[tuple[int, int, Tensor]]) -> list[TeleportRow]:
    """The rows of `Core.teleports`. Synchronizes with the device."""
    rows: list[TeleportRow] = []
    for epoch, elements, statistics in measured:
        pulled, before, after = statistics.tolist()
        scale = 1 - pulled / max(elements, 1)
        rows.append({"epoch": epoch, "scale": scale, "distance_before": before, "distance_after": after})
    return rows


class ReportRow(TypedDict):
    """One tensor at a teleport."""

    name: str
    elements: int
    scale: float  # mean of S
    distance_before: float  # 2-norm of theta - anchor
    distance_after: float
    fisher_new: float  # mean of F_t
    fisher_prev: float  # mean of Fbar_{t-1}
    ratio: float | None  # fisher_new / fisher_prev; None if the latter is 0


def report_rows(measured: Iterable[tuple[str, int, Tensor]]) -> list[ReportRow]:
    """Statistics of teleports by Fishers times 2^64, with names and numbers of elements, as rows. Synchronizes."""
    rows: list[ReportRow] = []
    for name, elements, statistics in measured:
        pulled, before, after, new, prev = statistics.tolist()
        new, prev = (value / max(elements, 1) * 2.0**-EXPONENT for value in (new, prev))
        rows.append(
            {
                "name": name,
                "elements": elements,
                "scale": 1 - pulled / max(elements, 1),
                "distance_before": before,
                "distance_after": after,
                "fisher_new": new,
                "fisher_prev": prev,
                "ratio": new / prev if prev else None,
            }
        )
    return rows


@torch.no_grad()
def part_statistics(
    parameters: Mapping[str, Tensor],
    anchor: Mapping[str, Tensor],
    fisher_prev: Mapping[str, Tensor],
    fisher_new: Mapping[str, Tensor],
) -> dict[str, dict[str, Any]]:
    """Mean S, F_t / Fbar_{t-1} and the distance from the anchor, by part of the network and over "all" of it.

    A part is what the first three components of a name have in common. Only weights with a diagonal Fisher of earlier
    tasks count. Synchronizes with the device.
    """
    parts: dict[str, list[tuple[Tensor, ...]]] = {}
    for name, new in fisher_new.items():
        old = fisher_prev.get(name)
        if old is None or old.shape != parameters[name].shape:
            continue
        old, start = (tensor.to(new.device) for tensor in (old, anchor[name]))
        moved = (parameters[name] - start).square().sum()
        row = ((1 - pull(old, new)).sum(), new.sum(), old.sum(), moved, torch.tensor(float(old.numel())))
        for part in ("all", ".".join(name.split(".")[:3])):
            parts.setdefault(part, []).append(tuple(value.double().cpu() for value in row))
    statistics = {}
    for part, rows in parts.items():
        s_sum, f_new, f_old, moved_square, count = (
            float(torch.stack(column).sum()) for column in zip(*rows, strict=True)
        )
        statistics[part] = {
            "scale": round(s_sum / count, 5),
            "fisher_ratio": float(f"{f_new / f_old:.5g}") if f_old > 0 else None,
            "distance": float(f"{moved_square**0.5:.5g}"),
        }
    return statistics


def by_column(rows: Sequence[TeleportRow], epochs: int | None) -> dict[str, Any]:
    """Rows of teleports for a record: one list per column with four digits, and `of`, the task's number of epochs."""
    numbers = {
        "scale": [row["scale"] for row in rows],
        "distance_before": [row["distance_before"] for row in rows],
        "distance_after": [row["distance_after"] for row in rows],
    }
    columns = {name: [float(f"{value:.4g}") for value in values] for name, values in numbers.items()}
    return {"of": epochs, "epoch": [row["epoch"] for row in rows], **columns}
