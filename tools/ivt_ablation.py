"""Ablations of the Fisher information in IVT, as add-ons for the option `--plugin`.

    incvec sweep tools/ivt_ablation.yaml --plugin tools/ivt_ablation.py --data-root FOLDER --out RUNS

`ivt-uniform` sets F_t = 1 for every weight and task. Then Fbar_t = t and S = t / (2t - 1): the increment is shortened
by one number, 2/3 in the first increment and nearly 1/2 later. `ivt-shuffled` permutes F_t within every tensor, anew
for every teleport and task, so S keeps its values in every layer but no longer depends on what a weight does.

Everything else is the add-on `ivt`, with its options and, since an add-on has its own section, its own presets: give
the options that the presets of `ivt` have for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.registry import register_addon


class AblatedIVT(IVTAddOn):
    def replaced(self, fisher: Tensor, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def _replace(self, task: int, epoch: int) -> None:
        core = self.plugin.core
        generator = torch.Generator().manual_seed(1000 * task + epoch)
        fisher = core.new_fisher()
        core.set_fisher({name: self.replaced(fisher[name], generator) for name in sorted(fisher)})

    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        if self._collects(stage):
            self._replace(task.index, epoch)
        super().end_epoch(task, stage, epoch, optimizer)

    def end_task(self, task: Task) -> None:
        if task.index == 0 and self.world.base_fisher is not None:
            generator = torch.Generator().manual_seed(0)
            base = self.world.base_fisher
            self.world.base_fisher = {name: self.replaced(base[name], generator) for name in sorted(base)}
        super().end_task(task)


@register_addon
class UniformIVT(AblatedIVT):
    name = "ivt-uniform"
    summary = "ablation of ivt: F = 1 for every weight, so that S = t / (2t - 1)"

    def replaced(self, fisher: Tensor, generator: torch.Generator) -> Tensor:
        return torch.ones_like(fisher)


@register_addon
class ShuffledIVT(AblatedIVT):
    name = "ivt-shuffled"
    summary = "ablation of ivt: F permuted within every tensor"

    def replaced(self, fisher: Tensor, generator: torch.Generator) -> Tensor:
        order = torch.randperm(fisher.numel(), generator=generator).to(fisher.device)
        return fisher.flatten()[order].view_as(fisher)
