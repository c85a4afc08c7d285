# mypy: ignore-errors
"""3x3 convolutions of few channels as Triton kernels: NHWC, bfloat16 in and out, sums in float32.

With pixels p = (n, h, w) as rows and a shift s(t) of tap t = (dh, dw), the three products of a layer are

    forward    y[p, o]     = sum_t sum_i x[p + s(t), i] w[t, i, o]
    to x       gx[p, i]    = sum_t sum_o g[p + s(t), o] w[8 - t, i, o]        (the same kernel: taps mirrored)
    to w       gw[t, i, o] = sum_p x[p + s(t), i] g[p, o]

each a matrix product whose left side is read shifted, straight from the image: nothing is unfolded in memory.
A pixel's three neighbours in an image row lie one after the other, so `GROUP = 3` reads a whole row of taps as
one run of 3C numbers (padded to 4C, which is a power of two) and takes three products instead of nine.

Only `incvec.nets.kernels` imports this module, when it first needs it: it needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The format of the products' factors. Triton's interpreter keeps bfloat16 as bits, which it cannot multiply; what
# it multiplies in float32 are the same numbers.
KIND = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16


@triton.jit
def _shifted(x, pixel, inside, run, tap, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr):
    """Rows of x at `pixel` moved by `tap` and, with GROUP = 3, by the two taps after it; zeros off the image.

    `run` counts 0, 1, ... through the tile's columns: GROUP taps of C channels each.
    """
    down = tap // 3 - 1
    right = tap % 3 - 1
    row = (pixel // W) % H + down
    column = pixel % W + right
    first = (pixel + down * W + right) * C
    if GROUP == 1:
        seen = (inside & (row >= 0) & (row < H) & (column >= 0) & (column < W))[:, None]
    else:
        beside = column[:, None] + (run // C)[None, :]
        seen = (inside & (row >= 0) & (row < H))[:, None] & (beside >= 0) & (beside < W)
        seen &= (run < GROUP * C)[None, :]
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
    x, w, y, pixels,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TAP: tl.constexpr, MIRROR: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M pixels and BLOCK_N output channels: the forward product, and with MIRROR that to x.

    STAGES = 0 issues every load before the first product, which suits the few registers that 16 channels
    need; otherwise the taps are a loop of asynchronous copies, STAGES deep.
    """
    RUN: tl.constexpr = CI if GROUP == 1 else 4 * CI
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    run = tl.arange(0, RUN)
    # Without a remainder the comparison folds away.
    inside = m >= 0 if EVEN else m < pixels
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if STAGES == 0:
        tiles = ()  # grown by addition: Triton's language knows no unpacking
        weights = ()
        for step in tl.static_range(9 // GROUP):
            tiles = tiles + (_shifted(x, m, inside, run, step * GROUP, CI, H, W, GROUP),)  # noqa: RUF005
            weights = weights + (_taps(w, run, n, step * GROUP, CI, IN, OUT, TAP, GROUP, MIRROR),)  # noqa: RUF005
        for step in tl.static_range(9 // GROUP):
            total = tl.dot(tiles[step].to(KIND), weights[step].to(KIND), total)
    else:
        for step in tl.range(0, 9 // GROUP, num_stages=STAGES):
            tile = _shifted(x, m, inside, run, step * GROUP, CI, H, W, GROUP)
            taps = _taps(w, run, n, step * GROUP, CI, IN, OUT, TAP, GROUP, MIRROR)
            total = tl.dot(tile.to(KIND), taps.to(KIND), total)
    places = y + (m[:, None] * CO + n[None, :])
    if EVEN:
        tl.store(places, total.to(tl.bfloat16))
    else:
        tl.store(places, total.to(tl.bfloat16), mask=inside[:, None])


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
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TAP: tl.constexpr,
    GROUP: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    TURNS: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The product to w over TURNS times BLOCK_P pixels, for TILES (1 or 3) times GROUP taps and BLOCK_N channels.

    EVEN says that every program has that many pixels.
    Each program writes its own part, laid out as the weights are; `add_up` sums the parts in a fixed order, so
    that the result does not depend on who finished first.
    """
    RUN: tl.constexpr = CI if GROUP == 1 else 4 * CI
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
        tile = _shifted(x, p, inside, run, tap, CI, H, W, GROUP)
        first_sum = tl.dot(tl.trans(tile.to(KIND)), gradient, first_sum)
        if TILES == 3:
            tile = _shifted(x, p, inside, run, tap + GROUP, CI, H, W, GROUP)
            second_sum = tl.dot(tl.trans(tile.to(KIND)), gradient, second_sum)
            tile = _shifted(x, p, inside, run, tap + 2 * GROUP, CI, H, W, GROUP)
            third_sum = tl.dot(tl.trans(tile.to(KIND)), gradient, third_sum)
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
        sums += tl.load(parts + (some[:, None] * SIZE + e[None, :]), mask=(some < COUNT)[:, None], other=0.0)
    tl.store(total + e, tl.sum(sums, 0))
