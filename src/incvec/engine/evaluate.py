"""Evaluation: correct counts by class for every classifier of a method, read from the device once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from incvec.contracts import AddOn, Method, Source, Task, World
from incvec.data.gaussians import FeatureSource
from incvec.data.source import chunk
from incvec.engine.distributed import SINGLE_PROCESS, Ranks


@torch.no_grad()
def correct_by_class(
    method: Method,
    world: World,
    test: Source,
    rows: Tensor,
    task: Task,
    ranks: Ranks = SINGLE_PROCESS,
    kept: list[Tensor] | None = None,
) -> dict[str, list[int]]:
    """How many test rows of each class seen are classified right, by classifier.

    Every launch has the same shape (the last chunk is padded with rows that count for nothing), so that a
    compiled network is compiled once. Each rank evaluates its share of the rows, and the counts are summed.

    A list `kept`, empty at first, is for methods that rest: it keeps what they have encoded until the next task's
    evaluation, whose rows have to begin with the same ones.
    """
    method.eval()
    share = rows[ranks.rank :: ranks.size]
    rows = share if len(share) else rows[:1]  # a rank without a row evaluates one that counts for nothing
    score: Callable[[Tensor], dict[str, Tensor]] = method
    if kept is not None:
        test, score = encoded(method, world, test, rows, kept if len(share) else []), method.classify
        rows = torch.arange(len(rows), device=rows.device)
    size = chunk(test) if world.device.type == "cuda" else min(chunk(test), len(rows))
    counts: dict[str, Tensor] = {}
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        weight = (torch.arange(start, start + size, device=rows.device) < len(share)).float()
        if len(part) < size:
            part = torch.cat([part, part[:1].expand(size - len(part))])
        with world.autocast():
            batch = test.fetch(part, world.generator, ("test",))
            scores = score(batch.images)
        for name, values in scores.items():
            right = (values[:, : task.n_seen].argmax(1) == batch.labels).float() * weight
            total = counts.setdefault(name, torch.zeros(task.n_seen, device=rows.device))
            total.index_add_(0, batch.labels, right)
    return {name: [int(value) for value in ranks.sum_(total).tolist()] for name, total in counts.items()}


def encoded(method: Method, world: World, test: Source, rows: Tensor, kept: list[Tensor]) -> FeatureSource:
    """The rows as the method encodes them; `kept` has the first ones already and gets the others."""
    size = chunk(test)
    for start in range(sum(map(len, kept)), len(rows), size):
        part = rows[start : start + size]
        with world.autocast():
            kept.append(method.encode(test.fetch(part, world.generator, ("test",)).images))
    return FeatureSource(torch.cat(kept), test.labels.index_select(0, rows))


@contextmanager
def deployed(method: Method, addons: Sequence[AddOn], task: Task) -> Iterator[dict[str, Tensor]]:
    """Within it the model has the weights to evaluate, where an add-on deploys others than it trains; yields these."""
    given = [weights for addon in addons if (weights := addon.deployed(task)) is not None]
    state = method.model.state_dict(keep_vars=False)
    kept = {name: state[name].clone() for name in given[-1]} if given else {}
    with torch.no_grad():
        for name, weight in given[-1].items() if given else ():
            state[name].copy_(weight)
    yield kept
    with torch.no_grad():
        for name, weight in kept.items():
            state[name].copy_(weight)
