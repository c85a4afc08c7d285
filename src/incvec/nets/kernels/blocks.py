"""Residual blocks with few channels, computed by the Triton kernels of this package when they apply.

    y = kernels.block(residual, x)        # None if they do not apply: the module then uses torch's operators
    y = kernels.stem(stem, x)

cuDNN's kernels are tuned for hundreds of channels; CIFAR's residual networks have 16, 32 and 64. (Larger maps are left
to cuDNN: ResNet-18's first stage, 64 channels of 32 x 32, is faster there.) In training, a block's convolutions compute
the batch statistics of their results in the same kernel, and the backward convolutions fuse masking, sums and
additions; a frozen teacher's block is two kernels. Weights are read in float32 and rounded to bfloat16 inside the
kernel, and their gradients are float32 sums, so that no kernel is spent on conversions. Results are deterministic.
Only first derivatives are supported; torch's operators are used for anything else.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from incvec.errors import ConfigError
from incvec.nets.kernels import launch
from incvec.nets.kernels.launch import Masked, Normed

if TYPE_CHECKING:
    from incvec.nets.resnet import Residual, Stem

CHANNELS = frozenset({16, 32, 64})
MAX_VALUES = 16 * 32 * 32  # per image: the largest maps, all channels together, that the kernels were tuned for
VARIABLE = "INCVEC_KERNELS"

_enabled = os.environ.get(VARIABLE) != "off"  # the engine validates the value before it builds a run


def enable(on: bool = True) -> None:
    """Enable or disable the kernels for all networks of this process. Captured steps are not affected."""
    global _enabled
    _enabled = on


def allowed(environment: Mapping[str, str]) -> bool:
    """Whether the environment allows the kernels."""
    value = environment.get(VARIABLE, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"{VARIABLE}={value!r} is not valid: expected on or off, or unset the variable.")
    return value == "on"


def available() -> bool:
    """Whether the kernels are enabled and this machine can run them."""
    return _enabled and importlib.util.find_spec("triton") is not None and torch.cuda.is_available()


def block(module: Residual, x: Tensor) -> Tensor | None:
    """The residual block by Triton kernels, or None if they do not apply."""
    if not (_enabled and x.is_cuda and x.dtype == torch.bfloat16 and _no_transforms()):
        return None
    first, second = module.conv1, module.conv2
    if not _fits(x, first):
        return None
    if not (_is_supported(first, module.norm1) and _is_supported(second, module.norm2)):
        return None
    other = None if isinstance(module.shortcut, nn.Identity) else module.shortcut(x)
    if module.norm1.training and module.norm2.training:
        train: Any = BlockFunction.apply  # not typed in all versions of torch
        y: Tensor = train(
            module, x, other, first.weight, module.norm1.weight, module.norm1.bias,
            second.weight, module.norm2.weight, module.norm2.bias,
        )  # fmt: skip
        return y
    if module.norm1.training or module.norm2.training or _needs_gradient(module, x):
        return None
    return infer_block(module, x, x if other is None else other)


def stem(module: Stem, x: Tensor) -> Tensor | None:
    """The network's stem by Triton kernels, or None if they do not apply."""
    if not (_enabled and x.is_cuda and torch.is_autocast_enabled("cuda") and not x.requires_grad and _no_transforms()):
        return None
    if torch.get_autocast_dtype("cuda") != torch.bfloat16 or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    if module.pooled or x.shape[1] > 3 or not _fits(x, module.conv):
        return None
    if not _is_supported(module.conv, module.norm, {1, 2, 3}):
        return None
    if module.norm.training:
        train: Any = StemFunction.apply
        y: Tensor = train(module, x, module.conv.weight, module.norm.weight, module.norm.bias)
        return y
    if _needs_gradient(module, x):
        return None
    return launch.product(x, module.conv.weight, end=Normed(module.norm, None, True))[0]


def infer_block(module: Residual, x: Tensor, other: Tensor) -> Tensor:
    """The block with its running statistics, without gradients: two kernels."""
    stride = module.conv1.stride[0]
    inner = launch.product(x, module.conv1.weight, stride=stride, end=Normed(module.norm1, None, True))[0]
    return launch.product(inner, module.conv2.weight, end=Normed(module.norm2, other, module.relu))[0]


def _no_transforms() -> bool:
    """Whether no functorch transform and no compiler is active: those need torch's operators."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _fits(x: Tensor, conv: nn.Conv2d) -> bool:
    """Whether the input and output maps have a size the kernels were tuned for."""
    (channels, height, width), stride = x.shape[1:], conv.stride[0]
    if height % stride or width % stride:
        return False
    return height * width * max(channels, conv.out_channels // stride**2) <= MAX_VALUES


def _needs_gradient(module: nn.Module, x: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters()))


def _is_supported(conv: nn.Module, norm: nn.Module, inputs: frozenset[int] | set[int] = CHANNELS) -> bool:
    """Whether these are plain modules of supported shapes without hooks."""
    from incvec.nets.resnet import Norm

    return (
        type(conv) is nn.Conv2d
        and type(norm) is Norm
        and conv.in_channels in inputs
        and conv.out_channels in CHANNELS
        and conv.kernel_size == (3, 3)
        and conv.stride in ((1, 1), (2, 2))
        and conv.padding == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is None
        and conv.padding_mode == "zeros"
        and norm.affine
        and norm.running_mean is not None
        and norm.momentum is not None
        and not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (conv, norm))
    )


class BlockFunction(torch.autograd.Function):
    """A residual block in training: y = relu(other + norm2(conv2(relu(norm1(conv1(x)))))), `other` None: x."""

    @staticmethod
    def forward(
        ctx: Any, module: Residual, x: Tensor, other: Tensor | None, weight1: Tensor, gamma1: Tensor, beta1: Tensor,
        weight2: Tensor, gamma2: Tensor, beta2: Tensor,
    ) -> Tensor:  # fmt: skip
        norm1, norm2 = module.norm1, module.norm2
        ctx.stride = module.conv1.stride[0]
        ctx.plain = other is None
        x = x.contiguous(memory_format=launch.LAST)
        z1, parts, rows = launch.product(x, weight1, stride=ctx.stride, moments=True)
        moments1 = launch.merge_moments(parts, rows, z1, norm1)
        inner = launch.normalize(z1, moments1, norm1, None, True)
        z2, parts, rows = launch.product(inner, weight2, moments=True)
        moments2 = launch.merge_moments(parts, rows, z2, norm2)
        y = launch.normalize(z2, moments2, norm2, x if other is None else other, module.relu)
        ctx.save_for_backward(
            x, z1, moments1, inner, z2, moments2, y if module.relu else None, weight1, gamma1, beta1, weight2, gamma2
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z1, moments1, inner, z2, moments2, y, weight1, gamma1, beta1, weight2, gamma2 = ctx.saved_tensors
        needs = ctx.needs_input_grad
        passed, sums2 = launch.sum_back(grad, y, z2, moments2)
        to_z2 = launch.normalize_back(passed, z2, moments2, gamma2, sums2)
        to_weight2 = launch.to_weight(inner, to_z2, weight2) if needs[6] else None
        to_inner, parts, _ = launch.product(to_z2, weight2, mirror=True, end=Masked(z1, moments1, gamma1, beta1))
        sums1 = launch.add_parts(parts)
        to_z1 = launch.normalize_back(to_inner, z1, moments1, gamma1, sums1)
        to_weight1 = launch.to_weight(x, to_z1, weight1, stride=ctx.stride) if needs[3] else None
        to_x = None
        if needs[1]:
            end = passed if ctx.plain else None
            to_x = launch.product(to_z1, weight1, stride=ctx.stride, mirror=True, end=end)[0]
        to_other = None if ctx.plain else passed
        return None, to_x, to_other, to_weight1, sums1[1], sums1[0], to_weight2, sums2[1], sums2[0]


class StemFunction(torch.autograd.Function):
    """A stem in training: y = relu(norm(conv(x))), for images, which need no gradient."""

    @staticmethod
    def forward(ctx: Any, module: Stem, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        z, parts, rows = launch.product(x, weight, moments=True)
        moments = launch.merge_moments(parts, rows, z, module.norm)
        y = launch.normalize(z, moments, module.norm, None, True)
        ctx.save_for_backward(x, z, moments, y, weight, gamma)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z, moments, y, weight, gamma = ctx.saved_tensors
        passed, sums = launch.sum_back(grad, y, z, moments)
        to_z = launch.normalize_back(passed, z, moments, gamma, sums)
        to_weight = launch.to_weight(x, to_z, weight) if ctx.needs_input_grad[2] else None
        return None, None, to_weight, sums[1], sums[0]
