"""Ablations of S in IVT, as add-ons for the option `--plugin`.

    incvec sweep tools/ivt_ablation.yaml --plugin tools/ivt_ablation.py --data-root FOLDER --out RUNS

Each replaces F_t, at every teleport and at the end of every task:

- `ivt-uniform`: F_t = 1 for every weight and task. Then Fbar_t = t and S = t / (2t - 1): the increment is shortened by
  one number, 2/3 in the first increment and nearly 1/2 later.
- `ivt-shuffled`: F_t permuted within every tensor, anew each time. S keeps its values in every tensor but no longer
  depends on what a weight does.
- `ivt-constant`: F_t = Fbar_{t-1}. Then S = 2/3 in every increment.
- `ivt-normalized`: F_t scaled, tensor by tensor, to the mean of Fbar_{t-1}. S is about 2/3 on average in every
  increment, and differs between the weights of a tensor.

Everything else is the add-on `ivt` with its options. An add-on has presets of its own, so give the options that the
presets of `ivt` have for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.registry import register_addon


class AblatedIVT(IVTAddOn):
    def replaced(self, fisher: Tensor, past: Tensor | None, generator: torch.Generator) -> Tensor:
        """What stands for F_t of a tensor; `past` is its Fbar_{t-1}, if there is any."""
        raise NotImplementedError

    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        if self._collects(stage):
            core = self.plugin.core
            generator = torch.Generator().manual_seed(1000 * task.index + epoch)
            fisher, past = core.new_fisher(), core.past_fisher()
            core.set_fisher({n: self.replaced(fisher[n], past.get(n), generator) for n in sorted(fisher)})
        super().end_epoch(task, stage, epoch, optimizer)

    def end_task(self, task: Task) -> None:
        if task.index == 0 and self.world.base_fisher is not None:
            generator, base = torch.Generator().manual_seed(0), self.world.base_fisher
            self.world.base_fisher = {n: self.replaced(base[n], None, generator) for n in sorted(base)}
        super().end_task(task)


@register_addon
class UniformIVT(AblatedIVT):
    name = "ivt-uniform"
    summary = "ablation of ivt: F = 1 for every weight, so that S = t / (2t - 1)"

    def replaced(self, fisher: Tensor, past: Tensor | None, generator: torch.Generator) -> Tensor:
        return torch.ones_like(fisher)


@register_addon
class ShuffledIVT(AblatedIVT):
    name = "ivt-shuffled"
    summary = "ablation of ivt: F permuted within every tensor"

    def replaced(self, fisher: Tensor, past: Tensor | None, generator: torch.Generator) -> Tensor:
        order = torch.randperm(fisher.numel(), generator=generator).to(fisher.device)
        return fisher.flatten()[order].view_as(fisher)


@register_addon
class ConstantIVT(AblatedIVT):
    name = "ivt-constant"
    summary = "ablation of ivt: S = 2/3 for every weight, in every increment"

    def replaced(self, fisher: Tensor, past: Tensor | None, generator: torch.Generator) -> Tensor:
        return torch.ones_like(fisher) if past is None else past


@register_addon
class NormalizedIVT(AblatedIVT):
    name = "ivt-normalized"
    summary = "ablation of ivt: F scaled to the mean of the past F, tensor by tensor"

    def replaced(self, fisher: Tensor, past: Tensor | None, generator: torch.Generator) -> Tensor:
        if past is None:
            return fisher
        mean = fisher.mean()
        return torch.where(mean > 0, fisher * (past.mean() / mean), fisher)
