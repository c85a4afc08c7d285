"""An independent check of IVT inside a host: F, S and teleports recomputed in float64 from what the optimizers see.

The witness takes gradients from torch's global hook before optimizer steps, and the anchor from the weights before a
task's first step. Of the plug-in it uses only the moments at which tasks begin and end and epochs end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from incvec import IVT

SMALLEST = 2.0 ** -(64 + 149)  # IVT stores Fbar * 2^64 in float32: what is smaller is 0 there
Theta = dict[str, Tensor]
Rows = Mapping[str, Sequence[str]]  # the earlier tensors whose rows, one after the other, are a tensor's first rows


def own_name(task: int) -> Rows:
    return {}


class Witness:
    """Watches one IVT. `rows(task)` says which tensors continue others than their own name, for tasks 2, 3, ..."""

    def __init__(self, monkeypatch: Any, rows: Callable[[int], Rows] = own_name) -> None:
        self.rows = rows
        self.ivt: IVT | None = None
        self.anchor: Theta = {}
        self.sums: Theta = {}
        self.fisher: Theta = {}
        self.cumulative: Theta = {}
        self.endings: list[Theta] = []  # `cumulative` after each task
        self.before: Theta = {}
        self.steps: list[list[int]] = []  # per task and epoch
        self.teleports = 0
        self.distance = 0.0  # the farthest that a teleport moved a weight
        self.unseen_distance = 0.0  # the same for weights without a past
        self.differences = {"theta": 0.0, "fisher": 0.0, "scale": 0.0, "cumulative": 0.0}
        for name in ("begin_task", "end_epoch", "end_task"):
            monkeypatch.setattr(IVT, name, self._around(getattr(IVT, name), getattr(self, name)))
        register_optimizer_step_pre_hook(self._before_step)

    @staticmethod
    def _around(original: Any, watched: Any) -> Any:
        def call(ivt: IVT, *args: Any, **kwargs: Any) -> Any:
            return watched(ivt, lambda: original(ivt, *args, **kwargs))

        return call

    def _theta(self) -> Theta:
        assert self.ivt is not None
        return {name: p.detach().double() for name, p in self.ivt.core.model.named_parameters()}

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.ivt is None or not self.ivt.in_task:
            return
        names = {id(p): name for name, p in self.ivt.core.model.named_parameters()}
        found = [(names[id(p)], p.grad) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not found:
            return
        if not self.anchor:
            self.anchor = self._theta()
        self.steps[-1][-1] += 1
        for name, gradient in found:
            if gradient is not None:
                square = gradient.detach().double().square()
                self.sums[name] = self.sums[name] + square if name in self.sums else square

    def _differ(self, kind: str, got: Tensor, expected: Tensor) -> None:
        """Keep the largest difference: of a Fisher relative to the tensor's largest, of a weight above 1 to itself."""
        unit = expected.abs().clamp_min(1.0) if kind in ("theta", "scale") else expected.abs().max().clamp_min(1e-300)
        self.differences[kind] = max(self.differences[kind], float(((got.double() - expected).abs() / unit).max()))

    def begin_task(self, ivt: IVT, begin: Callable[[], None]) -> None:
        begin()
        self.ivt = ivt
        self.anchor, self.sums, self.fisher = {}, {}, {}
        self.steps.append([0])
        rows = self.rows(len(self.steps)) if self.cumulative else {}
        self.before = {}
        for name, value in self._theta().items():
            parts = [self.cumulative[part] for part in rows.get(name, [name] if name in self.cumulative else [])]
            self.before[name] = torch.zeros_like(value)
            if parts:
                past = torch.cat(parts) if parts[0].dim() else parts[0]
                self.before[name][tuple(slice(0, size) for size in past.shape)] = past

    def end_epoch(self, ivt: IVT, end: Callable[[], bool]) -> bool:
        count = self.steps[-1][-1]
        self.fisher = {name: value / count for name, value in self.sums.items()}
        theta = self._theta()
        moved = end()
        after, report = self._theta(), {row["name"]: row for row in ivt.report()} if moved else {}
        for name, value in self.fisher.items():
            self._differ("fisher", ivt.fisher[name], value)
        for name, value in theta.items():
            expected = value
            if name in report:
                past = torch.where(self.before[name] < SMALLEST, 0.0, self.before[name])
                scale = (past + self.fisher[name]) / (2 * past + self.fisher[name])
                scale[past == 0] = 1.0
                expected = self.anchor[name] + scale * (value - self.anchor[name])
                self._differ("scale", torch.tensor(report[name]["scale"]), scale.mean())
                distance = (after[name] - value).abs()
                self.distance = max(self.distance, float(distance.max()))
                if (past == 0).any():
                    self.unseen_distance = max(self.unseen_distance, float(distance[past == 0].max()))
            self._differ("theta", after[name], expected)
        self.teleports += moved
        self.sums = {}
        self.steps[-1].append(0)
        return moved

    def end_task(self, ivt: IVT, end: Callable[[], None]) -> None:
        end()
        self.cumulative = {name: self.before[name] + self.fisher[name] for name in self.fisher}
        assert set(ivt.cumulative) == set(self.cumulative)
        for name, value in self.cumulative.items():
            self._differ("cumulative", ivt.cumulative[name], value)
        self.endings.append(self.cumulative)
        assert self.steps[-1].pop() == 0

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "teleports": self.teleports,
            "distance": self.distance,
            "unseen_distance": self.unseen_distance,
            **self.differences,
        }
