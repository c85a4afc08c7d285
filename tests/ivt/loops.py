"""Small loops that the tests share: a network, gradients drawn by seed, one step, one task."""

import torch
from torch import nn

from incvec import IVT

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def gradients_of(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, seed: int) -> dict[str, torch.Tensor]:
    gradients_of(model, seed)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for optimizer in optimizers:
        optimizer.step()
    return gradients


def base_task(model: nn.Module, ivt: IVT, *optimizers: torch.optim.Optimizer) -> None:
    ivt.begin_task(optimizer=optimizers)
    for seed in range(3):
        step(model, *optimizers, seed=seed)
    ivt.end_epoch()
    ivt.end_task()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def grow(linear: nn.Linear, rows: int) -> nn.Linear:
    grown = nn.Linear(linear.in_features, linear.out_features + rows).double()
    with torch.no_grad():
        grown.weight[: linear.out_features] = linear.weight
        grown.bias[: linear.out_features] = linear.bias
    return grown
