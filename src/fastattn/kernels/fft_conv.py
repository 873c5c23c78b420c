"""Convolutions with few taps as matrix products with the Toeplitz matrix of the taps.

    convolve    rows of a channel, with any lags, gated
    correlate   the taps' gradient, one number for every place in a chunk and every lag

Outputs are cut into chunks of S, which are the rows of a product, M of them at a time and of as
many samples as it takes. A chunk sees the inputs from START on, counted from its own first place:
tiles of J, each with a matrix whose element (j, s) is the tap of the lag from j to s. Products are
of 16 bits, sums in float32. A number of more bits is two, its high half and what that lost: so taps
keep 16 bits of bfloat16 or 22 of float16, where a power of two brings them into range, and an input
times its gate is exact in bfloat16. Both halves of taps stand side by side in one matrix.

Letters: G channels per row of taps, LOW the least lag, which if MIRRORED the last tap has. START
and, as UNIT says, strides and lengths are multiples of 8.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import behind_first, launched
from fastattn.kernels.linformer import split_of


@triton.jit
def halves(x, HALF: tl.constexpr):
    """What float32 is in 16 bits, and what that loses, in 16 bits."""
    high = x.to(HALF)
    return high, (x - high.to(tl.float32)).to(HALF)


@triton.jit
def range_of(taps_ptr, skip, TAPS, SCALED: tl.constexpr, MOST: tl.constexpr):
    """A power of two that brings the largest tap to between 2^14 and 2^15, and its inverse."""
    scale, inverse = 1.0, 1.0
    if SCALED:
        t = tl.arange(0, MOST)
        taps = tl.load(taps_ptr + t, mask=t < TAPS, other=0.0)
        largest = tl.max(tl.abs(taps), 0) + tl.abs(skip)
        exponent = largest.to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(268 - exponent, 253)  # with the bias 127 of float32
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def toeplitz(
    taps_ptr, skip, scale, first, TAPS, LOW,
    MIRRORED: tl.constexpr, SKIP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """``[J, 2 S]``: taps from inputs at ``first`` and on to the outputs of a chunk, high halves
    beside what they lost."""
    s, j = tl.arange(0, BLOCK_S), first + tl.arange(0, BLOCK_J)
    lag = s[None, :] - j[:, None]
    t = lag - LOW
    if MIRRORED:
        t = TAPS - 1 - t
    taps = tl.load(taps_ptr + t, mask=(t >= 0) & (t < TAPS), other=0.0)
    if SKIP:
        taps += tl.where(lag == 0, skip, 0.0)
    high, low = halves(taps * scale, HALF)
    return tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), (BLOCK_J, 2 * BLOCK_S))


@triton.jit
def both_added(x, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """``[M, S]``, of what stands side by side ``[M, 2 S]``: in registers of one thread."""
    high, low = tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, BLOCK_S)), (0, 2, 1)))
    return high + low


@triton.jit
def chunks_at(row, high, LENGTH, BLOCK_S: tl.constexpr):
    """Of rows ``[M]``: sample, first place, and whether there is one."""
    chunks = tl.cdiv(LENGTH, BLOCK_S)
    return (row // chunks).to(tl.int64), row % chunks * BLOCK_S, row < high


@triton.jit
def rows_of(b, channel, x_b, x_c, UNIT: tl.constexpr):
    """Where the rows of samples b ``[M]`` begin, ``[M, 1]``."""
    return (b * (x_b // UNIT * UNIT) + channel * (x_c // UNIT * UNIT))[:, None]


@triton.jit
def read(
    x_ptr, gate_ptr, b, channel, i, there, x_b, x_c, gate_b, gate_c,
    UNIT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Places i ``[M, J]`` of samples b ``[M]``, and if gated, what a product's rounding loses."""
    x = tl.load(x_ptr + rows_of(b, channel, x_b, x_c, UNIT) + i, mask=there, other=0.0)
    rest = x
    if gate_ptr is not None:
        at = rows_of(b, channel, gate_b, gate_c, UNIT) + i
        gate = tl.load(gate_ptr + at, mask=there, other=0.0)
        x, rest = halves(x.to(tl.float32) * gate.to(tl.float32), HALF)
    return x, rest


@launched
def convolve_kernel(
    u_ptr, taps_ptr, skip_ptr, pre_ptr, post_ptr, y_ptr,
    u_b, u_c, pre_b, pre_c, post_b, post_c,
    G, CHANNELS, INPUTS, OUTPUTS, TAPS, LOW, START, BATCH,
    UNIT: tl.constexpr, MIRRORED: tl.constexpr, SCALED: tl.constexpr, MOST: tl.constexpr,
    HALF: tl.constexpr, TILES_J: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A channel, and a split of its chunks; the matrices are made once and stay on chip.

    Tiles are loaded TOGETHER, so many at a time, since it is the memory that they wait for.
    """
    channel = tl.program_id(0).to(tl.int64)
    taps_ptr += channel // G * TAPS
    SKIP: tl.constexpr = skip_ptr is not None
    skip = tl.full((), 0.0, tl.float32)
    if SKIP:
        skip = tl.load(skip_ptr + channel)
    scale, inverse = range_of(taps_ptr, skip, TAPS, SCALED, MOST)
    start = START // 8 * 8
    taps = ()
    for tile in tl.static_range(TILES_J):
        matrix = toeplitz(
            taps_ptr, skip, scale, start + tile * BLOCK_J, TAPS, LOW,
            MIRRORED, SKIP, HALF, BLOCK_J, BLOCK_S,
        )  # fmt: skip
        taps += (matrix,)
    s, j = tl.arange(0, BLOCK_S), start + tl.arange(0, BLOCK_J)
    inputs, outputs = INPUTS // UNIT * UNIT, OUTPUTS // UNIT * UNIT
    begin, end = split_of(BATCH * tl.cdiv(OUTPUTS, BLOCK_S), BLOCK_M)
    for row in range(begin, behind_first(begin, end), BLOCK_M):
        b, first, real = chunks_at(row + tl.arange(0, BLOCK_M), end, OUTPUTS, BLOCK_S)
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_S), tl.float32)
        for tile in tl.static_range(0, TILES_J, TOGETHER):
            seen = ()
            for more in tl.static_range(TOGETHER):
                if tile + more < TILES_J:
                    i = first[:, None] + (j + (tile + more) * BLOCK_J)[None, :]
                    there = real[:, None] & (i >= 0) & (i < inputs)
                    seen += (
                        read(u_ptr, pre_ptr, b, channel, i, there, u_b, u_c, pre_b, pre_c,
                             UNIT, HALF),
                    )  # fmt: skip
            for more in tl.static_range(TOGETHER):
                if tile + more < TILES_J:
                    acc = tl.dot(seen[more][0], taps[tile + more], acc)
                    if pre_ptr is not None:
                        acc = tl.dot(seen[more][1], taps[tile + more], acc)
        y = both_added(acc, BLOCK_M, BLOCK_S)
        i = first[:, None] + s[None, :]
        there = real[:, None] & (i < outputs)
        if SCALED:
            y *= inverse
        if post_ptr is not None:
            at = rows_of(b, channel, post_b, post_c, UNIT) + i
            y *= tl.load(post_ptr + at, mask=there, other=0.0).to(tl.float32)
        at = ((b * CHANNELS + channel) * outputs)[:, None] + i
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=there)


@launched
def correlate_kernel(
    dy_ptr, post_ptr, u_ptr, pre_ptr, share_ptr,
    dy_b, dy_c, post_b, post_c, u_b, u_c, pre_b, pre_c,
    CHANNELS, INPUTS, OUTPUTS, TAPS, LOW, START, BATCH, TILES,
    UNIT: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """``share`` (splits, channels, S, taps): for every place in a chunk, the sum over a split of
    the chunks of the gradient there times the input that is the tap's lag before."""
    which = tl.program_id(0)
    channel, tile = (which // TILES).to(tl.int64), which % TILES
    split = tl.program_id(1)
    s, j = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_J)
    j += START // 8 * 8 + tile * BLOCK_J
    inputs, outputs = INPUTS // UNIT * UNIT, OUTPUTS // UNIT * UNIT
    begin, end = split_of(BATCH * tl.cdiv(OUTPUTS, BLOCK_S), BLOCK_M)
    acc = tl.zeros((BLOCK_S, BLOCK_J), tl.float32)
    for row in range(begin, behind_first(begin, end), BLOCK_M):
        b, first, real = chunks_at(row + tl.arange(0, BLOCK_M), end, OUTPUTS, BLOCK_S)
        i = first[:, None] + s[None, :]
        dy, dy_rest = read(
            dy_ptr, post_ptr, b, channel, i, real[:, None] & (i < outputs),
            dy_b, dy_c, post_b, post_c, UNIT, HALF,
        )  # fmt: skip
        i = first[:, None] + j[None, :]
        u, u_rest = read(
            u_ptr, pre_ptr, b, channel, i, real[:, None] & (i >= 0) & (i < inputs),
            u_b, u_c, pre_b, pre_c, UNIT, HALF,
        )  # fmt: skip
        acc = tl.dot(tl.trans(dy), u, acc)
        if pre_ptr is not None:
            acc = tl.dot(tl.trans(dy), u_rest, acc)
        if post_ptr is not None:
            acc = tl.dot(tl.trans(dy_rest), u, acc)
            if pre_ptr is not None:
                acc = tl.dot(tl.trans(dy_rest), u_rest, acc)
    t = s[:, None] - j[None, :] - LOW
    place = (split * CHANNELS + channel) * BLOCK_S + s
    tl.store(share_ptr + place[:, None] * TAPS + t, acc, mask=(t >= 0) & (t < TAPS))
