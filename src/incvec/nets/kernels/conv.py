# mypy: ignore-errors
"""3x3 convolutions of few channels and their batch normalization as Triton kernels.

Maps are NHWC in bfloat16, that is rows of C numbers, one for each pixel p = (n, h, w); sums are in float32. With a
shift s(t) of tap t = (dh, dw), the three products of a layer are

    forward    y[p, o]     = sum_t sum_i x[p + s(t), i] w[t, i, o]
    to x       gx[p, i]    = sum_t sum_o g[p + s(t), o] w[8 - t, i, o]        (the same kernel: taps mirrored)
    to w       gw[t, i, o] = sum_p x[p + s(t), i] g[p, o]

each a matrix product whose left side is read shifted, straight from the image: nothing is unfolded in memory.
A pixel's three neighbors in an image row lie one after the other, so `GROUP = 3` reads a whole row of taps as
one run of 3C numbers (padded to 4C, which is a power of two) and takes three products instead of nine. `GROUP = 9`
gathers all taps of an image, which has few channels, as one run.

`END` selects what follows a product (normalization, masking, an addition). It is applied to the tile in registers,
which saves a pass over the map.

Only `incvec.nets.kernels.launch` imports this module, when a kernel is first launched: it needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The format of the products' factors. Triton's interpreter keeps bfloat16 as bits, which it cannot multiply; what
# it multiplies in float32 are the same numbers.
KIND = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16

# What `correlate` does to its tile before it stores it.
PLAIN = tl.constexpr(0)
MOMENTS = tl.constexpr(1)  # also its mean and its sum of squared deviations, into `parts`
NORMED = tl.constexpr(2)  # normalizes by given moments, adds `other`, applies the ReLU
MASKED = tl.constexpr(3)  # passes where the normalized `other` is positive; sums for its backward, into `parts`
ADDED = tl.constexpr(4)  # adds `other`


@triton.jit
def _shifted(
    x, pixel, inside, run, tap, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr,
    UP: tl.constexpr, GROUP: tl.constexpr, SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr,
):  # fmt: skip
    """Rows of x at `pixel` moved by `tap` (and the GROUP - 1 taps after it); zeros off the image.

    `run` counts 0, 1, ... through the tile's columns: GROUP taps of C channels each. H and W are the size of the
    maps that `pixel` counts through; x's are STRIDE times larger or, with UP, STRIDE times smaller. SN, SH, SW
    and SC are x's steps in memory, needed for GROUP = 9 alone: otherwise x is NHWC.
    """
    if GROUP == 9:
        which = run // C
        row = ((pixel // W) % H)[:, None] + (which // 3 - 1)[None, :]
        column = (pixel % W)[:, None] + (which % 3 - 1)[None, :]
        seen = inside[:, None] & (row >= 0) & (row < H) & (column >= 0) & (column < W) & (run < 9 * C)[None, :]
        places = (pixel // (H * W) * SN)[:, None] + row * SH + column * SW + (run % C * SC)[None, :]
        return tl.load(x + places, mask=seen, other=0.0)
    down = tap // 3 - 1
    right = tap % 3 - 1
    if STRIDE == 1:
        row = (pixel // W) % H + down
        column = pixel % W + right
        first = (pixel + down * W + right) * C
        if GROUP == 1:
            seen = (inside & (row >= 0) & (row < H) & (column >= 0) & (column < W))[:, None]
        else:
            beside = column[:, None] + (run // C)[None, :]
            seen = (inside & (row >= 0) & (row < H))[:, None] & (beside >= 0) & (beside < W)
            seen &= (run < GROUP * C)[None, :]
    elif UP:
        row = (pixel // W) % H + down
        column = pixel % W + right
        seen = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        seen = (seen & (row % STRIDE == 0) & (column % STRIDE == 0))[:, None]
        first = ((pixel // (H * W) * (H // STRIDE) + row // STRIDE) * (W // STRIDE) + column // STRIDE) * C
    else:
        row = (pixel // W) % H * STRIDE + down
        column = pixel % W * STRIDE + right
        seen = (inside & (row >= 0) & (row < H * STRIDE) & (column >= 0) & (column < W * STRIDE))[:, None]
        first = ((pixel // (H * W) * (H * STRIDE) + row) * (W * STRIDE) + column) * C
    return tl.load(x + (first[:, None] + run[None, :]), mask=seen, other=0.0)


@triton.jit
def _taps(
    w, run, n, tap, CI: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TAP: tl.constexpr,
    GROUP: tl.constexpr, MIRROR: tl.constexpr,
):  # fmt: skip
    """The weights of GROUP taps from `tap` on, [GROUP * CI (padded), outputs], in bfloat16.

    IN, OUT and TAP are the steps in memory from one input channel, output channel and tap to the next.
    """
    which = tap + run // CI
    if MIRROR:
        which = 8 - which
    where = which * TAP + (run % CI) * IN
    places = w + (where[:, None] + (n * OUT)[None, :])
    if GROUP == 1:
        return tl.load(places).to(tl.bfloat16)
    return tl.load(places, mask=(run < GROUP * CI)[:, None], other=0.0).to(tl.bfloat16)


@triton.jit
def correlate(
    x, w, y, other, parts, mean, spread, gamma, beta, pixels, eps,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TAP: tl.constexpr, MIRROR: tl.constexpr,
    SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr,
    GROUP: tl.constexpr, RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, END: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M pixels and BLOCK_N output channels: the forward product, and with MIRROR that to x.

    STAGES = 0 issues every load before the first product, which suits the few registers that 16 channels
    need; otherwise the taps are a loop of asynchronous copies, STAGES deep. `spread` is the variance for NORMED
    and one over the deviation for MASKED.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    run = tl.arange(0, RUN)
    # Without a remainder the comparison folds away.
    inside = m >= 0 if EVEN else m < pixels
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if STAGES == 0:
        tiles = ()  # grown by addition: Triton has no unpacking
        weights = ()
        for step in tl.static_range(9 // GROUP):
            tile = _shifted(x, m, inside, run, step * GROUP, CI, H, W, STRIDE, MIRROR, GROUP, SN, SH, SW, SC)
            tiles = tiles + (tile,)  # noqa: RUF005
            weights = weights + (_taps(w, run, n, step * GROUP, CI, IN, OUT, TAP, GROUP, MIRROR),)  # noqa: RUF005
        for step in tl.static_range(9 // GROUP):
            total = tl.dot(tiles[step].to(tl.bfloat16).to(KIND), weights[step].to(KIND), total)
    else:
        for step in tl.range(0, 9 // GROUP, num_stages=STAGES):
            tile = _shifted(x, m, inside, run, step * GROUP, CI, H, W, STRIDE, MIRROR, GROUP, SN, SH, SW, SC)
            taps = _taps(w, run, n, step * GROUP, CI, IN, OUT, TAP, GROUP, MIRROR)
            total = tl.dot(tile.to(tl.bfloat16).to(KIND), taps.to(KIND), total)
    where = m[:, None] * CO + n[None, :]
    part = parts + tl.program_id(0) * (2 * CO) + n
    if END == MOMENTS:
        total = total.to(tl.bfloat16).to(tl.float32)  # the moments of what is stored
        count = BLOCK_M * 1.0 if EVEN else tl.minimum(pixels - tl.program_id(0) * BLOCK_M, BLOCK_M).to(tl.float32)
        middle = tl.sum(total, 0) / count  # rows off the map are zeros
        away = tl.where(inside[:, None], total - middle[None, :], 0.0)
        tl.store(part, middle)
        tl.store(part + CO, tl.sum(away * away, 0))
    if END == NORMED:
        scale = tl.load(gamma + n) / tl.sqrt(tl.load(spread + n) + eps)
        total = (total - tl.load(mean + n)[None, :]) * scale[None, :] + tl.load(beta + n)[None, :]
        if OTHER:
            total += tl.load(other + where, mask=inside[:, None], other=0.0).to(tl.float32)
        if RELU:
            total = tl.maximum(total, 0.0)
    if END == MASKED:
        z = tl.load(other + where, mask=inside[:, None], other=0.0).to(tl.float32)
        hat = (z - tl.load(mean + n)[None, :]) * tl.load(spread + n)[None, :]
        passes = hat * tl.load(gamma + n)[None, :] + tl.load(beta + n)[None, :] > 0
        total = tl.where(passes & inside[:, None], total, 0.0).to(tl.bfloat16).to(tl.float32)
        tl.store(part, tl.sum(total, 0))
        tl.store(part + CO, tl.sum(total * hat, 0))
    if END == ADDED:
        total += tl.load(other + where, mask=inside[:, None], other=0.0).to(tl.float32)
    if EVEN:
        tl.store(y + where, total.to(tl.bfloat16))
    else:
        tl.store(y + where, total.to(tl.bfloat16), mask=inside[:, None])


@triton.jit
def _put(
    part, total, run, n, tap, CI: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TAP: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    where = (tap + run // CI) * TAP + (run % CI) * IN
    tl.store(part + (where[:, None] + (n * OUT)[None, :]), total, mask=(run < GROUP * CI)[:, None])


@triton.jit
def weigh(
    x, g, parts, pixels,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TAP: tl.constexpr,
    SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr,
    GROUP: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, TURNS: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The product to w over TURNS times BLOCK_P pixels, for TILES (1 or 3) times GROUP taps and BLOCK_N channels.

    EVEN: every program has that many pixels. Each program writes its own part, in the layout of the weights; `add_up`
    sums the parts in a fixed order, so that the result does not depend on which program finished first.
    """
    tap = tl.program_id(1) * (GROUP * TILES)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    run = tl.arange(0, RUN)
    lane = tl.program_id(0) * (TURNS * BLOCK_P) + tl.arange(0, BLOCK_P)
    first_sum = tl.zeros((RUN, BLOCK_N), tl.float32)
    if TILES == 3:
        second_sum = tl.zeros((RUN, BLOCK_N), tl.float32)
        third_sum = tl.zeros((RUN, BLOCK_N), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        p = lane + turn * BLOCK_P
        inside = p >= 0 if EVEN else p < pixels
        places = g + (p[:, None] * CO + n[None, :])
        gradient = tl.load(places) if EVEN else tl.load(places, mask=inside[:, None], other=0.0)
        gradient = gradient.to(KIND)
        tile = _shifted(x, p, inside, run, tap, CI, H, W, STRIDE, False, GROUP, SN, SH, SW, SC)
        first_sum = tl.dot(tl.trans(tile.to(tl.bfloat16).to(KIND)), gradient, first_sum)
        if TILES == 3:
            tile = _shifted(x, p, inside, run, tap + GROUP, CI, H, W, STRIDE, False, GROUP, SN, SH, SW, SC)
            second_sum = tl.dot(tl.trans(tile.to(tl.bfloat16).to(KIND)), gradient, second_sum)
            tile = _shifted(x, p, inside, run, tap + 2 * GROUP, CI, H, W, STRIDE, False, GROUP, SN, SH, SW, SC)
            third_sum = tl.dot(tl.trans(tile.to(tl.bfloat16).to(KIND)), gradient, third_sum)
    part = parts + tl.program_id(0) * (9 * CI * CO)
    _put(part, first_sum, run, n, tap, CI, IN, OUT, TAP, GROUP)
    if TILES == 3:
        _put(part, second_sum, run, n, tap + GROUP, CI, IN, OUT, TAP, GROUP)
        _put(part, third_sum, run, n, tap + 2 * GROUP, CI, IN, OUT, TAP, GROUP)


@triton.jit
def add_up(parts, total, COUNT: tl.constexpr, SIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr):
    """total[e] = sum over s of parts[s, e], SIZE numbers in COUNT parts."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    s = tl.arange(0, BLOCK_S)
    sums = tl.zeros((BLOCK_S, BLOCK_E), tl.float32)
    for start in range(0, COUNT, BLOCK_S):
        some = start + s
        seen = (some < COUNT)[:, None] & (e < SIZE)[None, :]
        sums += tl.load(parts + (some[:, None] * SIZE + e[None, :]), mask=seen, other=0.0)
    tl.store(total + e, tl.sum(sums, 0), mask=e < SIZE)


@triton.jit
def merge_moments(
    parts, moments, running_mean, running_var, pixels, momentum, eps,
    COUNT: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation from the moments of parts of ROWS pixels (the last may have fewer); running ones too.

    With n_s pixels, mean m_s and squared deviations v_s in part s of n pixels in all, m = sum n_s m_s / n and
    the variance is sum (v_s + n_s (m_s - m)^2) / n, or over n - 1 for the running one.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_S)
    sums = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in range(0, COUNT, BLOCK_S):
        some = start + s
        size = tl.minimum(tl.maximum(pixels - some * ROWS, 0), ROWS).to(tl.float32)[:, None]
        seen = (some < COUNT)[:, None]
        sums += size * tl.load(parts + (some[:, None] * (2 * C) + c[None, :]), mask=seen, other=0.0)
    n = pixels * 1.0
    mean = tl.sum(sums, 0) / n
    sums = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in range(0, COUNT, BLOCK_S):
        some = start + s
        size = tl.minimum(tl.maximum(pixels - some * ROWS, 0), ROWS).to(tl.float32)[:, None]
        seen = (some < COUNT)[:, None]
        places = parts + (some[:, None] * (2 * C) + c[None, :])
        away = tl.load(places, mask=seen, other=0.0) - mean[None, :]
        sums += tl.load(places + C, mask=seen, other=0.0) + size * away * away
    squares = tl.sum(sums, 0)
    tl.store(moments + c, mean)
    tl.store(moments + C + c, 1.0 / tl.sqrt(squares / n + eps))
    before = tl.load(running_mean + c)
    tl.store(running_mean + c, before + momentum * (mean - before))
    before = tl.load(running_var + c)
    tl.store(running_var + c, before + momentum * (squares / tl.maximum(n - 1, 1.0) - before))


@triton.jit
def normalize(
    z, other, y, moments, gamma, beta, pixels,
    C: tl.constexpr, ROWS: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = relu(gamma (z - mean) / deviation + beta + other), ROWS pixels per program."""
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C)
    inside = (p < pixels)[:, None]
    where = p[:, None] * C + c[None, :]
    scale = tl.load(gamma + c) * tl.load(moments + C + c)
    value = tl.load(z + where, mask=inside, other=0.0).to(tl.float32) - tl.load(moments + c)[None, :]
    value = value * scale[None, :] + tl.load(beta + c)[None, :]
    if OTHER:
        value += tl.load(other + where, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + where, value.to(tl.bfloat16), mask=inside)


@triton.jit
def sum_back(gy, y, z, g, parts, moments, pixels, C: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr):
    """g = gy where y > 0 (all of gy without RELU, then nothing is stored), and its sums: g, and g times the
    normalized z."""
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C)
    inside = (p < pixels)[:, None]
    where = p[:, None] * C + c[None, :]
    value = tl.load(gy + where, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(tl.load(y + where, mask=inside, other=0.0).to(tl.float32) > 0, value, 0.0)
        tl.store(g + where, value.to(tl.bfloat16), mask=inside)
    hat = tl.load(z + where, mask=inside, other=0.0).to(tl.float32) - tl.load(moments + c)[None, :]
    hat *= tl.load(moments + C + c)[None, :]
    part = parts + tl.program_id(0) * (2 * C) + c
    tl.store(part, tl.sum(value, 0))
    tl.store(part + C, tl.sum(value * hat, 0))


@triton.jit
def normalize_back(g, z, gz, moments, gamma, sums, pixels, C: tl.constexpr, ROWS: tl.constexpr):
    """gz = gamma / deviation (g - sum g / n - hat sum(g hat) / n), with hat the normalized z."""
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C)
    inside = (p < pixels)[:, None]
    where = p[:, None] * C + c[None, :]
    n = pixels * 1.0
    one_over = tl.load(moments + C + c)
    hat = (tl.load(z + where, mask=inside, other=0.0).to(tl.float32) - tl.load(moments + c)[None, :]) * one_over[
        None, :
    ]
    value = tl.load(g + where, mask=inside, other=0.0).to(tl.float32) - (tl.load(sums + c) / n)[None, :]
    value -= hat * (tl.load(sums + C + c) / n)[None, :]
    value *= (tl.load(gamma + c) * one_over)[None, :]
    tl.store(gz + where, value.to(tl.bfloat16), mask=inside)
