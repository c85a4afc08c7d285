"""Evaluation: correct counts by class for every classifier of a method, read from the device once."""

from __future__ import annotations

import torch
from torch import Tensor

from incvec.contracts import Method, Source, Task, World

CHUNK = 500


@torch.no_grad()
def correct_by_class(method: Method, world: World, test: Source, rows: Tensor, task: Task) -> dict[str, list[int]]:
    """How many test rows of each class seen are classified right, by classifier.

    Every launch has the same shape (the last chunk is padded with rows that count for nothing), so that a
    compiled network is compiled once.
    """
    method.eval()
    size = CHUNK if world.device.type == "cuda" else min(CHUNK, len(rows))
    counts: dict[str, Tensor] = {}
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        weight = torch.ones(size, device=rows.device)
        if len(part) < size:
            weight[len(part) :] = 0
            part = torch.cat([part, part[:1].expand(size - len(part))])
        with world.autocast():
            batch = test.fetch(part, world.generator, ("test",))
            scores = method(batch.images)
        for name, values in scores.items():
            right = (values[:, : task.n_seen].argmax(1) == batch.labels).float() * weight
            total = counts.setdefault(name, torch.zeros(task.n_seen, device=rows.device))
            total.index_add_(0, batch.labels, right)
    return {name: [int(value) for value in total.tolist()] for name, total in counts.items()}
