"""Convolutions of 3x3 taps and few channels by kernels of our own, where they are switched on.

    kernels.enable()                      # or INCVEC_KERNELS=triton in the environment
    y = kernels.convolve(conv, x)         # conv(x), by our kernels where they suit

cuDNN's kernels are made for hundreds of channels; CIFAR's residual networks have 16, 32 and 64. `conv3x3` is an
operator of torch: it is differentiable once, torch.compile takes it as it is, and a CUDA graph can hold it.
It reads the float32 weights and rounds them to bfloat16 on the way into the product, and returns their gradient
in float32 from float32 sums, so that no kernel is spent on conversions. The same inputs give the same bits.

Triton is imported when a kernel is first launched. The switch is off unless someone turns it on.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CHANNELS = frozenset({16, 32, 64})
VARIABLE = "INCVEC_KERNELS"

Shape = tuple[int, int, int, int]  # channels in, channels out, height, width


class Tiles(NamedTuple):
    """How `correlate` is cut: pixels and channels a program, taps at once, pipeline depth (0: none), warps."""

    pixels: int
    channels: int
    group: int
    stages: int
    warps: int


class Sums(NamedTuple):
    """How `weigh` is cut: pixels a turn, channels, taps at once, such tiles, parts, pipeline depth, warps."""

    pixels: int
    channels: int
    group: int
    tiles: int
    parts: int
    stages: int
    warps: int


# What benchmarks/conv_kernels.py found best goes here; until it has run, these are reasoned, not measured.
FORWARD: dict[Shape, Tiles] = {
    (16, 16, 32, 32): Tiles(128, 16, 1, 0, 4),
    (32, 32, 16, 16): Tiles(64, 32, 1, 0, 4),
    (64, 64, 8, 8): Tiles(64, 32, 1, 0, 4),
}
TO_INPUT: dict[Shape, Tiles] = {
    (16, 16, 32, 32): Tiles(128, 16, 1, 0, 4),
    (32, 32, 16, 16): Tiles(64, 32, 1, 0, 4),
    (64, 64, 8, 8): Tiles(64, 32, 1, 0, 4),
}
TO_WEIGHT: dict[Shape, Sums] = {
    (16, 16, 32, 32): Sums(64, 16, 3, 3, 256, 2, 4),
    (32, 32, 16, 16): Sums(64, 32, 3, 1, 128, 3, 4),
    (64, 64, 8, 8): Sums(64, 64, 1, 1, 32, 3, 4),
}

_enabled = False


def enable(on: bool = True) -> None:
    """Turn our kernels on or off, for networks built before and after alike. Captured steps stay as they are."""
    global _enabled
    if on and importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "convolution kernels were asked for, but triton is not installed: install it, or turn them off"
        )
    _enabled = on


def asked(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for our kernels."""
    value = environment.get(VARIABLE, "")
    if value not in ("", "cudnn", "triton"):
        raise ValueError(f"{VARIABLE}={value!r} is not known: give triton, cudnn or nothing")
    return value == "triton"


def enabled() -> bool:
    """Whether our kernels are used where they suit."""
    return _enabled


def suits(conv: nn.Module, x: Tensor) -> bool:
    """Whether `conv3x3(x, conv.weight)` is what `conv(x)` computes, and nobody listens to the module's call."""
    return (
        type(conv) is nn.Conv2d
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and x.dim() == 4
        and 0 < x.numel() < 2**31 // 4
        and conv.in_channels in CHANNELS
        and conv.out_channels in CHANNELS
        and conv.kernel_size == (3, 3)
        and conv.stride == (1, 1)
        and conv.padding == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is None
        and conv.padding_mode == "zeros"
        and not (conv._forward_hooks or conv._forward_pre_hooks or conv._backward_hooks)
        # Neither vmap nor gradients of gradients: torch.func's users get torch's own convolution.
        and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())
    )


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """conv(x), by our kernels where they are on and suit."""
    if _enabled and isinstance(conv, nn.Conv2d) and suits(conv, x):
        y: Tensor = conv3x3(x, conv.weight)
    else:
        y = conv(x)
    return y


def tiles_for(shape: Shape, mirror: bool) -> Tiles:
    """The cut of a forward product, or with `mirror` of the one to x, whose input channels are our outputs."""
    found = (TO_INPUT if mirror else FORWARD).get(shape)
    if found is None:
        found = Tiles(64, min(shape[1], 32), 1, 0, 4)
    return found


def sums_for(shape: Shape) -> Sums:
    """The cut of the product to w."""
    found = TO_WEIGHT.get(shape)
    if found is None:
        found = Sums(64, min(shape[1], 64), 1, 1, 32, 3, 4) if shape[0] == 64 else Sums(64, shape[1], 3, 1, 128, 3, 4)
    return found


def steps(weight: Tensor) -> tuple[int, int, int] | None:
    """Steps in memory between output channels, input channels and taps, or None where taps are not one run."""
    out, into, down, right = weight.stride()
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    return (out, into, right) if dense and down == 3 * right else None


def launch_product(x: Tensor, weight: Tensor, mirror: bool, tiles: Tiles | None = None) -> Tensor:
    """y = conv(x, weight); with `mirror`, the gradient to the input from the output's gradient x."""
    from incvec.nets import triton_conv

    x = x.contiguous(memory_format=torch.channels_last)
    found = steps(weight)
    if found is None:
        weight = weight.contiguous()
        found = steps(weight)
    assert found is not None
    out, into, tap = found
    batch, n_in, height, width = x.shape
    n_out = weight.shape[1] if mirror else weight.shape[0]
    if mirror:
        out, into = into, out
    y = torch.empty(
        (batch, n_out, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )  # fmt: skip
    cut = tiles or tiles_for((n_in, n_out, height, width), mirror)
    pixels = batch * height * width
    grid = (-(-pixels // cut.pixels), n_out // cut.channels)
    with _on(x):
        triton_conv.correlate[grid](
            x, weight, y, pixels,
            H=height, W=width, CI=n_in, CO=n_out, IN=into, OUT=out, TAP=tap, MIRROR=mirror,
            GROUP=cut.group, BLOCK_M=cut.pixels, BLOCK_N=cut.channels, STAGES=cut.stages,
            EVEN=pixels % cut.pixels == 0, KIND=triton_conv.KIND, num_warps=cut.warps,
        )  # fmt: skip
    return y


def launch_sums(x: Tensor, grad: Tensor, weight: Tensor, sums: Sums | None = None) -> Tensor:
    """The gradient to the weights, in their layout and format; only their layout and format are read."""
    from incvec.nets import triton_conv

    x = x.contiguous(memory_format=torch.channels_last)
    grad = grad.contiguous(memory_format=torch.channels_last)
    total = torch.empty_like(weight, dtype=torch.float32)
    found = steps(total)
    if found is None:
        total = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        found = steps(total)
    assert found is not None
    out, into, tap = found
    batch, n_in, height, width = x.shape
    n_out = grad.shape[1]
    cut = sums or sums_for((n_in, n_out, height, width))
    pixels = batch * height * width
    turns = -(-pixels // (cut.pixels * cut.parts))
    chunk = turns * cut.pixels
    count = -(-pixels // chunk)
    size = 9 * n_in * n_out
    parts = torch.empty((count, size), dtype=torch.float32, device=x.device)
    block = size // 144  # a power of two, since channels are; 144 programs, about one a multiprocessor
    with _on(x):
        triton_conv.weigh[(count, 9 // (cut.group * cut.tiles), n_out // cut.channels)](
            x, grad, parts, pixels,
            H=height, W=width, CI=n_in, CO=n_out, IN=into, OUT=out, TAP=tap,
            GROUP=cut.group, TILES=cut.tiles, BLOCK_P=cut.pixels, BLOCK_N=cut.channels, STAGES=cut.stages,
            TURNS=turns, EVEN=pixels % chunk == 0, KIND=triton_conv.KIND, num_warps=cut.warps,
        )  # fmt: skip
        triton_conv.add_up[(144,)](
            parts, total, COUNT=count, SIZE=size, BLOCK_E=block, BLOCK_S=max(4, 4096 // block), num_warps=4
        )  # fmt: skip
    return total if weight.dtype == torch.float32 else total.to(weight.dtype)


def _on(x: Tensor) -> Any:
    """Triton launches on the current device; the interpreter's tensors have none."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@torch.library.custom_op("incvec::conv3x3", mutates_args=())
def conv3x3(x: Tensor, weight: Tensor) -> Tensor:
    """The 3x3 convolution, stride 1 and padding 1, of bfloat16 maps; weights in float32 (or bfloat16)."""
    for name, number in (("in", weight.shape[1]), ("out", weight.shape[0])):
        if number not in CHANNELS:
            raise ValueError(f"conv3x3 knows {sorted(CHANNELS)} channels, not {number} channels {name}")
    if x.dtype != torch.bfloat16 or weight.shape[2:] != (3, 3) or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"conv3x3 takes bfloat16 maps [N, C, H, W] and weights [O, C, 3, 3], "
            f"not {x.dtype} {list(x.shape)} and {list(weight.shape)}; use torch's conv2d for these"
        )
    return launch_product(x, weight, mirror=False)


@torch.library.custom_op("incvec::conv3x3_to_input", mutates_args=())
def conv3x3_to_input(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `conv3x3` to its maps."""
    return launch_product(grad, weight, mirror=True)


@torch.library.custom_op("incvec::conv3x3_to_weight", mutates_args=())
def conv3x3_to_weight(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `conv3x3` to its weights; their values are not read."""
    return launch_sums(x, grad, weight)


def _maps_like(x: Tensor, channels: int) -> Tensor:
    shape = (x.shape[0], channels, x.shape[2], x.shape[3])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@conv3x3.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _maps_like(x, weight.shape[0])


@conv3x3_to_input.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return _maps_like(grad, weight.shape[1])


@conv3x3_to_weight.register_fake
def _(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight) if steps(weight) else weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    to_x = conv3x3_to_input(grad, weight) if ctx.needs_input_grad[0] else None
    to_weight = conv3x3_to_weight(x, grad, weight) if ctx.needs_input_grad[1] else None
    return to_x, to_weight


conv3x3.register_autograd(_backward, setup_context=_save)

if asked(os.environ):
    enable()
