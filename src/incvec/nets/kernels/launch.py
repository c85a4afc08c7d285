"""Launches of the Triton kernels: shapes, layouts and tile sizes.

Maps are bfloat16 [N, C, H, W] in channels-last order, weights [O, I, 3, 3] in float32 or bfloat16 in any dense order,
moments and sums [2, C] in float32. Triton is imported when a kernel is first launched.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LAST = torch.channels_last

Shape = tuple[int, int, int, int]  # channels in, channels out, height, width


class Tiles(NamedTuple):
    """Tiling of `correlate`: pixels and channels per program, taps at once, pipeline depth (0: none), warps."""

    pixels: int
    channels: int
    group: int
    stages: int
    warps: int


class Sums(NamedTuple):
    """Tiling of `weigh`: pixels per iteration, channels, taps at once, such tiles, parts, pipeline depth, warps."""

    pixels: int
    channels: int
    group: int
    tiles: int
    parts: int
    stages: int
    warps: int


# The fastest on an H200 by benchmarks/conv_kernels.py.
FORWARD: dict[Shape, Tiles] = {
    (16, 16, 32, 32): Tiles(256, 16, 1, 0, 8),
    (32, 32, 16, 16): Tiles(128, 32, 1, 0, 8),
    (64, 64, 8, 8): Tiles(64, 64, 1, 0, 8),
}
TO_INPUT: dict[Shape, Tiles] = {
    (16, 16, 32, 32): Tiles(256, 16, 1, 0, 8),
    (32, 32, 16, 16): Tiles(128, 32, 1, 0, 8),
    (64, 64, 8, 8): Tiles(64, 32, 1, 0, 4),
}
TO_WEIGHT: dict[Shape, Sums] = {
    (16, 16, 32, 32): Sums(64, 16, 3, 3, 256, 3, 4),
    (32, 32, 16, 16): Sums(64, 32, 3, 1, 64, 3, 4),
    (64, 64, 8, 8): Sums(64, 32, 1, 3, 16, 4, 4),
}
ELEMENTS = 4096  # of a map per program of an elementwise kernel


def tiles_for(shape: Shape, mirror: bool) -> Tiles:
    """The tiling of a forward convolution, or with `mirror` of the gradient to x, whose inputs are our outputs."""
    if shape[0] < 16:
        return Tiles(128, min(shape[1], 64), 9, 0, 4)
    found = (TO_INPUT if mirror else FORWARD).get(shape)
    return found or Tiles(64, min(shape[1], 32), 1, 0, 4)


def sums_for(shape: Shape, stride: int) -> Sums:
    """The tiling of the gradient to the weights."""
    inputs, outputs, *_ = shape
    if inputs < 16:
        return Sums(128, min(outputs, 64), 9, 1, 256, 3, 4)
    found = TO_WEIGHT.get(shape)
    if found is None or stride > 1:
        found = Sums(64, min(outputs, 32), 1, 3, 32 if inputs == 64 else 64, 3, 4)
    return found


def weight_strides(weight: Tensor) -> tuple[int, int, int] | None:
    """Strides of output channels, input channels and taps, or None if the taps are not contiguous."""
    out, into, down, right = weight.stride()
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=LAST)
    return (out, into, right) if dense and down == 3 * right else None


def _kernels() -> Any:
    from incvec.nets.kernels import conv as triton_conv

    return triton_conv


def _on(x: Tensor) -> Any:
    """Triton launches on the current device; the interpreter's tensors are on the CPU."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _maps(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape = (like.shape[0], channels, height, width)
    return torch.empty(shape, dtype=torch.bfloat16, device=like.device, memory_format=LAST)


def _run(group: int, channels: int) -> int:
    """Columns of a tile of `group` taps: a power of two of at least 16, as Triton's dot requires."""
    return max(16, 1 << (group * channels - 1).bit_length())


class Normed(NamedTuple):
    """Epilogue of `product`: normalize by these moments, add `other`, apply the ReLU."""

    norm: nn.BatchNorm2d
    other: Tensor | None
    relu: bool


class Masked(NamedTuple):
    """Epilogue of `product`: mask by relu(norm(z)) > 0, and sum for the backward pass of `norm`."""

    z: Tensor
    moments: Tensor
    gamma: Tensor
    beta: Tensor


def product(
    x: Tensor,
    weight: Tensor,
    *,
    stride: int = 1,
    mirror: bool = False,
    moments: bool = False,
    end: Normed | Masked | Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, int]:
    """y = conv(x, weight); with `mirror`, the gradient to the input from the output's gradient x.

    Also returns partial results: moments of y in parts of so many pixels (the last number), or the sums of `Masked`,
    and an empty tensor otherwise. A tensor as `end` is added.
    """
    k = _kernels()
    if x.shape[1] >= 16:
        x = x.contiguous(memory_format=LAST)
    found = weight_strides(weight)
    if found is None:
        weight = weight.contiguous()
        found = weight_strides(weight)
    assert found is not None
    out, into, tap = found
    batch, n_in, height, width = x.shape
    n_out = weight.shape[1] if mirror else weight.shape[0]
    if mirror:
        out, into = into, out
        height, width = height * stride, width * stride
    else:
        height, width = height // stride, width // stride
    y = _maps(x, n_out, height, width)
    cut = tiles or tiles_for((n_in, n_out, height, width), mirror)
    pixels = batch * height * width
    count = -(-pixels // cut.pixels)
    mode, other, relu = k.PLAIN, None, False
    mean = spread = gamma = beta = weight  # placeholders, read only in the modes that use them
    eps = 0.0
    parts = torch.empty((count, 2, n_out) if moments or isinstance(end, Masked) else 0, device=x.device)
    if moments:
        mode = k.MOMENTS
    elif isinstance(end, Normed):
        mode, other, relu, eps = k.NORMED, end.other, end.relu, end.norm.eps
        assert end.norm.running_mean is not None
        assert end.norm.running_var is not None
        mean, spread, gamma, beta = end.norm.running_mean, end.norm.running_var, end.norm.weight, end.norm.bias
    elif isinstance(end, Masked):
        mode, other, gamma, beta = k.MASKED, end.z, end.gamma, end.beta
        mean, spread = end.moments[0], end.moments[1]
    elif end is not None:
        mode, other = k.ADDED, end
    if other is not None:
        other = other.contiguous(memory_format=LAST)
    sn, sc, sh, sw = x.stride()
    with _on(x):
        k.correlate[(count, n_out // cut.channels)](
            x, weight, y, y if other is None else other, parts, mean, spread, gamma, beta, pixels, eps,
            H=height, W=width, CI=n_in, CO=n_out, STRIDE=stride, IN=into, OUT=out, TAP=tap, MIRROR=mirror,
            SN=sn, SH=sh, SW=sw, SC=sc, GROUP=cut.group, RUN=_run(cut.group, n_in),
            BLOCK_M=cut.pixels, BLOCK_N=cut.channels, STAGES=cut.stages, EVEN=pixels % cut.pixels == 0,
            END=mode, OTHER=other is not None, RELU=relu, KIND=k.KIND, num_warps=cut.warps,
        )  # fmt: skip
    return y, parts, cut.pixels


def to_weight(x: Tensor, grad: Tensor, weight: Tensor, *, stride: int = 1, sums: Sums | None = None) -> Tensor:
    """The gradient to the weights, in their layout and dtype; their values are not read."""
    k = _kernels()
    if x.shape[1] >= 16:
        x = x.contiguous(memory_format=LAST)
    grad = grad.contiguous(memory_format=LAST)
    total = torch.empty_like(weight, dtype=torch.float32)
    found = weight_strides(total)
    if found is None:
        total = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        found = weight_strides(total)
    assert found is not None
    out, into, tap = found
    n_in = x.shape[1]
    batch, n_out, height, width = grad.shape
    cut = sums or sums_for((n_in, n_out, height, width), stride)
    pixels = batch * height * width
    turns = -(-pixels // (cut.pixels * cut.parts))
    chunk = turns * cut.pixels
    count = -(-pixels // chunk)
    parts = torch.empty((count, 9 * n_in * n_out), device=x.device)
    sn, sc, sh, sw = x.stride()
    with _on(x):
        k.weigh[(count, 9 // (cut.group * cut.tiles), n_out // cut.channels)](
            x, grad, parts, pixels,
            H=height, W=width, CI=n_in, CO=n_out, STRIDE=stride, IN=into, OUT=out, TAP=tap,
            SN=sn, SH=sh, SW=sw, SC=sc, GROUP=cut.group, RUN=_run(cut.group, n_in), TILES=cut.tiles,
            BLOCK_P=cut.pixels, BLOCK_N=cut.channels, STAGES=cut.stages, TURNS=turns, EVEN=pixels % chunk == 0,
            KIND=k.KIND, num_warps=cut.warps,
        )  # fmt: skip
    _add_up(parts, total)
    return total if weight.dtype == torch.float32 else total.to(weight.dtype)


def _add_up(parts: Tensor, total: Tensor) -> None:
    """The sum of the parts in a fixed order, with about one program per multiprocessor."""
    count, size = len(parts), total.numel()
    block = min(256, max(8, 1 << (math.ceil(size / 144) - 1).bit_length()))
    with _on(parts):
        _kernels().add_up[(-(-size // block),)](
            parts, total, COUNT=count, SIZE=size, BLOCK_E=block, BLOCK_S=max(4, min(128, 4096 // block)), num_warps=4
        )  # fmt: skip


def _rows(channels: int) -> int:
    return ELEMENTS // channels


def _grid(z: Tensor) -> tuple[int, int, int]:
    """Pixels, channels, and programs of an elementwise kernel."""
    channels = z.shape[1]
    pixels = z.numel() // channels
    return pixels, channels, -(-pixels // _rows(channels))


def merge_moments(parts: Tensor, rows: int, z: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Mean and 1 / deviation of z from the moments of its parts; updates the running statistics of `norm`."""
    pixels, channels, _ = _grid(z)
    moments = torch.empty(2, channels, device=z.device)
    with _on(z):
        _kernels().merge_moments[(channels // 8,)](
            parts, moments, norm.running_mean, norm.running_var, pixels, norm.momentum, norm.eps,
            COUNT=len(parts), C=channels, ROWS=rows, BLOCK_C=8, BLOCK_S=256, num_warps=8,
        )  # fmt: skip
    return moments


def normalize(z: Tensor, moments: Tensor, norm: nn.BatchNorm2d, other: Tensor | None, relu: bool) -> Tensor:
    """relu(norm(z) + other), by the given moments."""
    pixels, channels, programs = _grid(z)
    y = torch.empty_like(z)
    if other is not None:
        other = other.contiguous(memory_format=LAST)
    with _on(z):
        _kernels().normalize[(programs,)](
            z, y if other is None else other, y, moments, norm.weight, norm.bias, pixels,
            C=channels, ROWS=_rows(channels), OTHER=other is not None, RELU=relu, num_warps=8,
        )  # fmt: skip
    return y


def sum_back(grad: Tensor, y: Tensor | None, z: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient after the ReLU (y None: no ReLU), and its sums for the normalization of z."""
    pixels, channels, programs = _grid(z)
    grad = grad.contiguous(memory_format=LAST)
    passed = grad if y is None else torch.empty_like(grad)
    parts = torch.empty(programs, 2, channels, device=z.device)
    with _on(z):
        _kernels().sum_back[(programs,)](
            grad, grad if y is None else y, z, passed, parts, moments, pixels,
            C=channels, ROWS=_rows(channels), RELU=y is not None, num_warps=8,
        )  # fmt: skip
    return passed, add_parts(parts)


def add_parts(parts: Tensor) -> Tensor:
    """[2, C]: the gradients to a normalization's bias and weight, from their parts."""
    total = torch.empty(parts.shape[1:], device=parts.device)
    _add_up(parts, total)
    return total


def normalize_back(grad: Tensor, z: Tensor, moments: Tensor, gamma: Tensor, sums: Tensor) -> Tensor:
    """The gradient to z from the one to its normalized values."""
    pixels, channels, programs = _grid(z)
    to_z = torch.empty_like(z)
    with _on(z):
        _kernels().normalize_back[(programs,)](
            grad, z, to_z, moments, gamma, sums, pixels, C=channels, ROWS=_rows(channels), num_warps=8
        )  # fmt: skip
    return to_z
