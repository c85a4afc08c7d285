"""An observer of teleports, and S restated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.ivt import IVT
from incvec.ivt.batchnorm import STATISTICS
from tests.addons.tools import Tensors, state_of, watch


class Teleports:
    """Every teleport of a run: weights before and after, anchor, Fbar ("past"), F, and the epoch it followed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[dict[str, Any]] = []
        self.epochs: list[tuple[int, str, int]] = []
        self.current: tuple[int, str, int] = (0, "", 0)

        def epoch(addon: IVTAddOn, task: Task, stage: Stage, number: int, optimizer: Any) -> None:
            self.addon, self.current = addon, (task.index, stage.name, number)

        def before(plugin: IVT) -> None:
            tensors = {"anchor": plugin.anchor, "past": plugin.cumulative, "fisher": plugin.fisher}
            copies = {key: {n: t.clone() for n, t in group.items()} for key, group in tensors.items()}
            self.rows.append({"before": state_of(self.addon.method.model), **copies})
            self.epochs.append(self.current)

        def after(plugin: IVT) -> None:
            self.rows[-1]["after"] = state_of(self.addon.method.model)

        watch(patch, IVTAddOn, "end_epoch", before=epoch)
        watch(patch, IVT, "teleport", before=before, after=after)

    def moved(self, row: int) -> set[str]:
        """Names of the tensors that the teleport changed."""
        first, last = self.rows[row]["before"], self.rows[row]["after"]
        return {name for name in first if not torch.equal(first[name], last[name])}


@pytest.fixture
def teleports(monkeypatch: pytest.MonkeyPatch) -> Teleports:
    return Teleports(monkeypatch)


def scale_of(row: dict[str, Any], name: str) -> Tensor:
    """S = (A + F) / (2 A + F), and 1 where A = 0."""
    a, f = row["past"][name].double(), row["fisher"][name].double()
    return torch.where(a > 0, (a + f) / (2 * a + f), torch.ones_like(a))


def teleported(row: dict[str, Any], name: str) -> Tensor:
    """anchor + S (theta - anchor)."""
    anchor: Tensor = row["anchor"][name].double()
    expected: Tensor = anchor + scale_of(row, name) * (row["before"][name].double() - anchor)
    return expected


def split_state(state: Tensors) -> tuple[Tensors, Tensors]:
    """Parameters, and running statistics."""
    statistics = {name: tensor for name, tensor in state.items() if name.endswith(STATISTICS)}
    return {name: tensor for name, tensor in state.items() if name not in statistics}, statistics
