"""IVT's state as a flat mapping of tensors, which can be saved as a safetensors file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .names import fisher_shape

_PARTS = ("anchor", "cumulative", "fisher")
_COUNTERS = ("task", "epoch", "in_task", "epoch_finalized")
_RENAMED = {"epoch_finalised": "epoch_finalized"}  # keys of states saved by earlier versions


@dataclass
class State:
    """`steps[i]` is the number of steps in the sum of the i-th name of `fisher`, in sorted order."""

    task: int = 0
    epoch: int = 0
    in_task: bool = False
    epoch_finalized: bool = False
    anchor: Mapping[str, Tensor] = field(default_factory=dict)
    cumulative: Mapping[str, Tensor] = field(default_factory=dict)
    fisher: Mapping[str, Tensor] = field(default_factory=dict)
    steps: Tensor = field(default_factory=lambda: torch.zeros(0))


def pack(state: State) -> dict[str, Tensor]:
    """`anchor/NAME`, `cumulative/NAME`, `fisher/NAME`, `steps` and the counters, as contiguous copies."""
    packed = {
        f"{part}/{name}": value.detach().clone(memory_format=torch.contiguous_format)
        for part in _PARTS
        for name, value in sorted(getattr(state, part).items())
    }
    packed["steps"] = state.steps.detach().clone()
    for counter in _COUNTERS:
        packed[counter] = torch.tensor(int(getattr(state, counter)), dtype=torch.int64)
    return packed


def unpack(packed: Mapping[str, Tensor]) -> State:
    """The inverse of `pack`; raises KeyError or ValueError for any other mapping."""
    packed = {_RENAMED.get(key, key): value for key, value in packed.items()}
    missing = [key for key in ("steps", *_COUNTERS) if key not in packed]
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    unknown = []
    for key, value in packed.items():
        part, slash, name = key.partition("/")
        if slash and part in parts:
            parts[part][name] = value
        elif key != "steps" and key not in _COUNTERS:
            unknown.append(key)
    if missing or unknown:
        raise KeyError(f"this is not a state of IVT: missing {missing}, unknown {unknown[:5]}")
    steps = packed["steps"]
    if len(steps) != len(parts["fisher"]):
        raise ValueError(f"the state has step counts for {len(steps)} tensors, but {len(parts['fisher'])} sums")
    return State(
        task=int(packed["task"]),
        epoch=int(packed["epoch"]),
        in_task=bool(packed["in_task"]),
        epoch_finalized=bool(packed["epoch_finalized"]),
        anchor=parts["anchor"],
        cumulative=parts["cumulative"],
        fisher=dict(sorted(parts["fisher"].items())),
        steps=steps,
    )


def check_fits(state: State, parameters: Mapping[str, Tensor], kernels: Collection[str]) -> None:
    """Refuse a mid-task state of a different model; between tasks, the next begin_task() checks that."""
    if not state.in_task:
        return
    for part in _PARTS:
        for name, value in getattr(state, part).items():
            if name not in parameters:
                raise KeyError(
                    f"the state holds {part}/{name}, but the model has no such parameter: "
                    f"grow the model to task {state.task} before loading"
                )
            shape = fisher_shape(parameters[name], part != "anchor" and name in kernels)
            if value.shape != shape:
                raise ValueError(
                    f"{part}/{name} was saved with shape {tuple(value.shape)}, but this model and structure need "
                    f"{tuple(shape)}: load into the same structure, with the model grown to task {state.task}"
                )
