"""IVT's state as a flat mapping of tensors, which can be saved as a safetensors file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .fisher import EXPONENT, check_fisher
from .names import fisher_shape, grown

_PARTS = ("anchor", "cumulative", "fisher", "buffers", "grown")
_COUNTERS = ("task", "epoch", "in_task", "epoch_finalized")
_ADDED = {"epochs": -1, "exponent": 0}  # counters that states of earlier versions lack
_TELEPORTS = {"teleports": torch.zeros(0, 3), "teleport_epochs": torch.zeros(0, 2, dtype=torch.int64)}
"""Statistics that states of earlier versions lack; the values are those of no teleport."""

_RENAMED = {"epoch_finalised": "epoch_finalized"}  # keys of states saved by earlier versions


@dataclass
class State:
    """`steps[i]` is the number of steps in the sum of the i-th name of `fisher`, in sorted order.

    `cumulative` and `fisher` are multiplied by 2^exponent. `buffers` are BatchNorm's statistics at the anchor. `grown`
    has the names of tensors that have grown since an earlier task; its values mean nothing.
    """

    task: int = 0
    epoch: int = 0
    in_task: bool = False
    epoch_finalized: bool = False
    epochs: int = -1  # of the task, as given to begin_task(); -1: not given
    exponent: int = EXPONENT
    anchor: Mapping[str, Tensor] = field(default_factory=dict)
    cumulative: Mapping[str, Tensor] = field(default_factory=dict)
    fisher: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    grown: Mapping[str, Tensor] = field(default_factory=dict)
    steps: Tensor = field(default_factory=lambda: torch.zeros(0))
    teleports: Tensor = _TELEPORTS["teleports"]  # of the task; see `Core.teleports`
    teleport_epochs: Tensor = _TELEPORTS["teleport_epochs"]


def pack(state: State) -> dict[str, Tensor]:
    """`anchor/NAME`, `cumulative/NAME`, `fisher/NAME`, ..., `steps` and the counters, as copies."""
    packed = {
        f"{part}/{name}": value.detach().clone(memory_format=torch.contiguous_format)
        for part in _PARTS
        for name, value in sorted(getattr(state, part).items())
    }
    for key in ("steps", *(_TELEPORTS if len(state.teleports) else ())):
        packed[key] = getattr(state, key).detach().clone()
    for counter in (*_COUNTERS, *_ADDED):
        packed[counter] = torch.tensor(int(getattr(state, counter)), dtype=torch.int64)
    return packed


def unpack(packed: Mapping[str, Tensor]) -> State:
    """The inverse of `pack`, with F and Fbar times 2^EXPONENT; raises KeyError or ValueError for any other mapping."""
    packed = {_RENAMED.get(key, key): value for key, value in packed.items()}
    missing = [key for key in ("steps", *_COUNTERS) if key not in packed]
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    unknown = []
    for key, value in packed.items():
        part, slash, name = key.partition("/")
        if slash and part in parts:
            parts[part][name] = value
        elif key not in ("steps", *_TELEPORTS, *_COUNTERS, *_ADDED):
            unknown.append(key)
    if missing or unknown:
        raise KeyError(f"this is not a state of IVT: missing {missing}, unknown {unknown[:5]}")
    steps = packed["steps"]
    if steps.dim() != 1 or len(steps) != len(parts["fisher"]):
        raise ValueError(
            f"the state has step counts of shape {tuple(steps.shape)}, but {len(parts['fisher'])} sums of squares"
        )
    teleports, teleport_epochs = (packed.get(key, default) for key, default in _TELEPORTS.items())
    shapes = [list(teleports.shape), list(teleport_epochs.shape)]
    if shapes != [[shapes[0][0] if shapes[0] else 0, columns] for columns in (3, 2)]:
        raise ValueError(f"the statistics of the teleports were saved with shapes {shapes}, expected (n, 3) and (n, 2)")
    numbers = {key: int(packed[key]) if key in packed else default for key, default in _ADDED.items()}
    factor = 2.0 ** (EXPONENT - numbers["exponent"])
    for part in ("cumulative", "fisher"):
        if factor != 1:
            parts[part] = {name: value * factor for name, value in parts[part].items()}
    return State(
        task=int(packed["task"]),
        epoch=int(packed["epoch"]),
        in_task=bool(packed["in_task"]),
        epoch_finalized=bool(packed["epoch_finalized"]),
        epochs=numbers["epochs"],
        anchor=parts["anchor"],
        cumulative=parts["cumulative"],
        fisher=dict(sorted(parts["fisher"].items())),
        buffers=parts["buffers"],
        grown=parts["grown"],
        steps=steps,
        teleports=teleports,
        teleport_epochs=teleport_epochs,
    )


def check_fits(state: State, parameters: Mapping[str, Tensor], kernels: Collection[str]) -> None:
    """Refuse a state of a different model, and numbers that no Fisher has."""
    for part in ("anchor", "cumulative", "fisher"):
        for name, value in getattr(state, part).items():
            if not value.is_floating_point():
                raise ValueError(f"{part}/{name} was saved as {value.dtype}; expected floating-point numbers")
    for name, value in state.cumulative.items():
        check_fisher(name, value, name in kernels)
    if not state.in_task:
        known = [name for name in state.cumulative if name in parameters]
        if state.cumulative and not known:
            raise KeyError(
                f"the state is of a model with parameters {list(state.cumulative)[:3]}, ...; this one has "
                f"{list(parameters)[:3]}, ..."
            )
        for name in known:  # the model may still have the size of the saved task, or that of the next one
            grown(name, state.cumulative[name], parameters[name], name in kernels)
        return
    for part in ("anchor", "cumulative", "fisher"):
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
