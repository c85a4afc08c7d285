"""From a saved file back to a method with its values: going on with a run, beginning at a snapshot, and the lab.

A file holds flat tensors whose names begin with a room: `method/`, `store/`, `addon/NAME/`, and what only a run
under way needs. Structure comes first: the tasks are grown as the run grew them, then values are copied in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from incvec.contracts import Task
from incvec.engine.build import Parts
from incvec.engine.seeds import derive
from incvec.errors import CheckpointError

Namespaces = dict[str, dict[str, Tensor]]


def grow(parts: Parts, task: Task, seed: int) -> None:
    """Structure for one more task; new rows are drawn as in every run of that seed."""
    parts.world.generator.manual_seed(derive(seed, task.index, "grow"))
    parts.method.task = task
    parts.method.grow(task)


def restore(
    parts: Parts, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], seed: int, addons: bool = True
) -> Namespaces:
    """Grow the structure the file was written with, then fill in the values; returns all tensors by room."""
    for task in parts.tasks[: meta["grown"] + 1]:
        grow(parts, task, seed)
    rooms = by_namespace(tensors)
    method, device = parts.method, parts.world.device
    fill(method.name, method.state_dict(keep_vars=False), rooms.get("method", {}))
    method.store = {name: t.to(device, copy=True) for name, t in rooms.get("store", {}).items()}
    if addons:
        states = by_namespace(rooms.get("addon", {}))
        for addon in parts.addons:
            own = states.get(addon.name, {})
            addon.load_state({name: tensor.to(device, copy=True) for name, tensor in own.items()})
    method.restored()
    return rooms


def by_namespace(tensors: Mapping[str, Tensor]) -> Namespaces:
    """`room/rest` becomes `[room][rest]`."""
    rooms: Namespaces = {}
    for name, tensor in tensors.items():
        room, _, rest = name.partition("/")
        rooms.setdefault(room, {})[rest] = tensor
    return rooms


def fill(title: str, live: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy saved weights into those of a method of the same structure; a snapshot has no teacher, and needs none."""
    missing = [n for n in live if n not in given and not n.startswith("teacher.")]
    strange = [n for n in given if n not in live]
    if missing or strange:
        raise CheckpointError(
            f"the saved weights do not fit {title}: missing {missing[:3]}, unexpected {strange[:3]}. "
            "They were written by another version; move them away to start anew."
        )
    with torch.no_grad():
        for name, tensor in given.items():
            if live[name].shape != tensor.shape:
                raise CheckpointError(
                    f"saved tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(live[name].shape)}."
                )
            live[name].copy_(tensor)
