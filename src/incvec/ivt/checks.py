"""What a plug-in notices about a user's loop: schedules that do nothing, and parameters that are not what they were."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .batchnorm import batchnorm_layers
from .core import Core
from .names import float_parameters

_SKIPPED = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))


class Warner:
    """Warns once about each matter, naming the line of the user's loop."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def __call__(self, matter: str, text: str) -> None:
        if matter in self.known:
            return
        self.known.add(matter)
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
            level, frame = level + 1, frame.f_back
        warnings.warn(text, stacklevel=level)


def warn_about_batchnorm(model: nn.Module, warn: Warner) -> None:
    if batchnorm_layers(model):
        warn(
            "batchnorm",
            "the model has BatchNorm layers, and batchnorm= was not given: their weights and biases are teleported "
            'like all others ("keep"). That suits methods which replay old samples; for methods that train on new '
            'classes only use batchnorm="layer"',
        )


def warn_about_gone(gone: Sequence[str], warn: Warner) -> None:
    """Parameters of earlier tasks that the model no longer has."""
    if gone:
        warn(
            f"gone {gone}",
            f"the model no longer has {len(gone)} of the parameters of earlier tasks, such as {gone[0]!r}; their "
            "Fisher is dropped. If they were renamed or merged, name them: begin_task(past={new name: old name})",
        )


def warn_about_left_out(core: Core, optimizers: Sequence[Optimizer], task: int, warn: Warner) -> None:
    """An optimizer with parameters that the model no longer has, and without some that it has."""
    grouped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in core.parameters.items() if p.requires_grad and id(p) not in grouped]
    if left_out and not grouped <= {id(p) for p in core.model.parameters()}:
        warn(
            f"left out {task}",
            f"{left_out[0]!r} requires gradients but is in no group of the optimizer, which has parameters that the "
            "model does not have. Was it made before the model grew? Make it afterwards",
        )


class Endings:
    """The parameters with which a task ended: to notice a new one under a known name that does not continue them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, int, Tensor]] = {}  # the parameter, its rows, a fingerprint of its values

    def record(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._known = {
            name: (weakref.ref(p), len(p) if p.dim() else 0, fingerprint(p.detach())) for name, p in parameters.items()
        }

    def warn_about_new(self, core: Core, named: Collection[str], warn: Warner) -> None:
        """A new Parameter whose old rows were not copied would be pulled to its random start by their Fisher.

        named: those whose past is given, or makes no difference.
        """
        for name, (known, rows, expected) in self._known.items():
            parameter = core.parameters.get(name)
            if parameter is None or parameter is known() or name in named or name not in core.cumulative:
                continue
            value = parameter.detach()
            if not torch.allclose(fingerprint(value[:rows] if rows else value), expected.to(value.device), 1e-9, 0):
                warn(
                    f"replaced {name}",
                    f"{name!r} is a new Parameter without the values that the last task ended with, but it continues "
                    f"that task's Fisher. Say whose rows it holds: begin_task(past={{{name!r}: None}}) for those of a "
                    "new tensor, or their earlier names",
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Endings, ()  # copies have other parameters


def fingerprint(value: Tensor) -> Tensor:
    """Two numbers that tell a tensor's values apart from others."""
    value = value.double()
    return torch.stack([value.sum(), value.square().sum()])


def check_parameters(core: Core, task: int, warn: Warner) -> None:
    """The parameters of the task are still those that it began with."""
    current = float_parameters(core.model)
    replaced = [name for name in core.anchor if current.get(name) is not core.parameters[name]]
    if replaced:
        raise RuntimeError(
            f"parameter {replaced[0]!r} was replaced within task {task}: grow the model first, then make the optimizer "
            "and call begin_task()"
        )
    added = [name for name, p in current.items() if name not in core.parameters and p.requires_grad]
    if added:
        warn(
            f"added {task}",
            f"parameter {added[0]!r} was added within task {task}, which collects no Fisher for it: grow the model "
            "before begin_task()",
        )
