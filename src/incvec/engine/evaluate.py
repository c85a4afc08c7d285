"""Evaluation: predictions counted by class for every classifier of a method, read from the device once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from incvec.contracts import AddOn, Method, Source, Task, World
from incvec.data.gaussians import FeatureSource
from incvec.data.source import inference_batch_size
from incvec.engine.distributed import SINGLE_PROCESS, Distributed


@torch.no_grad()
def confusion_by_classifier(
    method: Method,
    world: World,
    test: Source,
    rows: Tensor,
    task: Task,
    distributed: Distributed = SINGLE_PROCESS,
    encoded: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    """How often test rows of each class seen (rows) were classified as each class (columns), by classifier, on the CPU.

    The diagonal has the correct ones.

    Every forward pass has the same shape (the last chunk is padded with rows of weight 0), so that a compiled network
    is compiled once. Each process evaluates its share of the rows, and the counts are summed.

    For a method with a frozen encoder, `encoded` is a cache of test features, empty at first. The next evaluation
    reuses it, so its rows have to begin with the same ones.
    """
    method.eval()
    share = rows[distributed.rank :: distributed.world_size]
    rows = share if len(share) else rows[:1]  # a process without rows evaluates one of weight 0
    score: Callable[[Tensor], dict[str, Tensor]] = method
    if encoded is not None:
        test, score = encode_rows(method, world, test, rows, encoded if len(share) else []), method.classify
        rows = torch.arange(len(rows), device=rows.device)
    size = inference_batch_size(test) if world.device.type == "cuda" else min(inference_batch_size(test), len(rows))
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
            cells = batch.labels * task.n_seen + values[:, : task.n_seen].argmax(1)
            total = counts.setdefault(name, torch.zeros(task.n_seen**2, device=rows.device))
            total.index_add_(0, cells, weight)
    sums = {name: distributed.sum_(total).cpu() for name, total in counts.items()}
    return {name: total.round().long().view(task.n_seen, task.n_seen) for name, total in sums.items()}


def encode_rows(method: Method, world: World, test: Source, rows: Tensor, encoded: list[Tensor]) -> FeatureSource:
    """The features of the rows; `encoded` holds those of the first rows and is extended."""
    size = inference_batch_size(test)
    for start in range(sum(map(len, encoded)), len(rows), size):
        part = rows[start : start + size]
        with world.autocast():
            encoded.append(method.encode(test.fetch(part, world.generator, ("test",)).images))
    return FeatureSource(torch.cat(encoded), test.labels.index_select(0, rows))


@contextmanager
def deployed_weights(method: Method, addons: Sequence[AddOn], task: Task) -> Iterator[dict[str, Tensor]]:
    """Within the context the model has the weights that the last add-on deploys, if any; yields the trained ones."""
    given = [weights for addon in addons if (weights := addon.deployed(task)) is not None]
    deployed = given[-1] if given else {}
    state = method.model.state_dict(keep_vars=False)
    trained = {name: state[name].clone() for name in deployed}
    with torch.no_grad():
        for name, weight in deployed.items():
            state[name].copy_(weight)
    yield trained
    with torch.no_grad():
        for name, weight in trained.items():
            state[name].copy_(weight)
