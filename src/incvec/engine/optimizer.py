"""From a stage's parameter groups to a torch optimizer that a CUDA graph can contain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from incvec.contracts import AddOn, Method, Stage
from incvec.errors import ConfigError


def select_parameters(stage: Stage, method: Method, addons: Sequence[AddOn]) -> list[dict[str, nn.Parameter]]:
    """The parameters of each group, by name. A parameter belongs to the first group that matches it.

    Parameters of no group are frozen (`requires_grad` False) until the next stage selects its own.
    """
    named = dict(method.named_parameters())
    for addon in addons:
        named |= {f"addons.{addon.name}.{name}": parameter for name, parameter in addon.parameters()}
    named = {name: p for name, p in named.items() if not name.startswith("teacher.")}
    selected: set[str] = set()
    groups = []
    for group in stage.groups:
        matching = {name: p for name, p in named.items() if name not in selected and group.owns(name)}
        selected |= set(matching)
        groups.append(matching)
    if stage.groups and not selected:
        prefixes = [prefix for group in stage.groups for prefix in group.prefixes]
        raise ConfigError(
            f"stage {stage.name!r} of {method.name} trains nothing: no parameter name starts with one of {prefixes}."
        )
    for name, parameter in named.items():
        parameter.requires_grad_(name in selected)
    return groups


def check_learning_rates(stages: Iterable[Stage], method: str) -> None:
    """Refuse rates with which nothing can be trained, before anything is.

    They are float32 tensors on the device. A step multiplies the weights by 1 - lr weight_decay (with SGD and AdamW):
    below -1 they grow without bound.
    """
    for stage in stages:
        for group in stage.groups:
            if group.lr > torch.finfo(torch.float32).max:
                raise ConfigError(
                    f"the learning rate {group.lr:g} (stage {stage.name!r} of {method}) exceeds the largest float32; "
                    "choose a smaller one."
                )
            if group.lr * group.weight_decay > 2 and stage.optimizer is not None and stage.optimizer.kind != "adam":
                raise ConfigError(
                    f"with lr={group.lr:g} and weight_decay={group.weight_decay:g} (stage {stage.name!r} of {method}) "
                    "each step makes the weights larger, up to infinity; choose a smaller weight_decay, below 1/lr."
                )


def make_optimizer(stage: Stage, groups: list[dict[str, nn.Parameter]], device: torch.device) -> torch.optim.Optimizer:
    """A fused torch optimizer. Its state exists from the start and its learning rates are tensors, so that a captured
    step can use both."""
    settings = stage.optimizer
    assert settings is not None
    param_groups = [
        {
            "params": list(parameters.values()),
            "lr": torch.tensor(group.lr, device=device),
            "weight_decay": group.weight_decay,
        }
        for group, parameters in zip(stage.groups, groups, strict=True)
        if parameters
    ]
    lr = torch.tensor(0.0, device=device)  # every group has its own
    optimizer: torch.optim.Optimizer
    if settings.kind == "sgd":
        optimizer = torch.optim.SGD(
            param_groups, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=True
        )
    else:
        kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
        capturable = device.type == "cuda"
        optimizer = kind(param_groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=True, capturable=capturable)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if settings.kind == "sgd":
                if settings.momentum:
                    state["momentum_buffer"] = zeros
            else:
                state["step"] = torch.zeros((), device=device)
                state["exp_avg"], state["exp_avg_sq"] = zeros, zeros.clone()
    return optimizer
