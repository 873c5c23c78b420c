"""What the linear attention kernels are built of.

Letters: B batch or packed segment, H query heads, G query heads per key head, N tokens, D width of
queries and keys, E width of values. Strides are multiples of UNIT, so that the compiler knows how
far loads are aligned; what the library allocates is laid out (B, N, H, width).

S is kept transposed, [E, D], so that tiles of v and of the upstream gradient go from shared memory
to the tensor cores as they are. A share is one row of floats: S (E, D), z (D), shift (D). A
reduction over the tokens of a tile crosses warps and costs barriers: within a loop such sums are
kept for each place of the tile, or are products with ones whose every row is the sum.
"""

import inspect

import triton
import triton.language as tl

SIZES = ("H", "HKV", "G", "N", "S", "SPLITS", "SHARES", "DSHARES", "KEYROWS")
SIZES += ("PADDED", "WORDS", "ITEMS", "PLANE", "ROOM", "TABLE_B", "TABLE_H")
SIZES += ("HEADS", "ROWS", "FIRST", "LAST", "LEFT", "RIGHT", "DRAWN", "LIMIT", "CUTS", "PARTS")
SIZES += ("SLOTS", "BATCH", "TILES", "COUNT")
SIZES += ("CHANNELS", "INPUTS", "OUTPUTS", "TAPS", "LOW", "START")
STRIDES = tuple(f"{x}_{i}" for x in ("q", "k", "v", "x", "dout") for i in "bhn")
STRIDES += tuple(f"{x}_{i}" for x in ("u", "dy", "pre", "post") for i in "bc")
WIDE = (*STRIDES, "p_h", "p_k", "THRESHOLD", "HASHED")


def launched(function):
    """A kernel whose sizes and strides have fixed types and values that nobody looks at.

    So there is one compiled variant for all of them.
    """
    names = [name for name in inspect.signature(function).parameters if name in SIZES + WIDE]
    for name in names:
        if name in function.__annotations__:
            raise TypeError(f"{function.__name__}: {name} is the name of a size, not of a constant")
        function.__annotations__[name] = tl.int64 if name in WIDE else tl.int32
    return triton.jit(function, do_not_specialize=names)


@triton.jit
def phi(x, MAP: tl.constexpr):
    """The feature map; comparisons are written so that a NaN stays one."""
    if MAP == "elu":  # exp2 is one instruction
        above = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = above + tl.exp2(tl.minimum(x, 0.0) * 1.4426950408889634)
    elif MAP == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif MAP == "squared_relu":
        y = tl.where(x <= 0, 0.0, x * x)
    else:
        y = x
    return y


@triton.jit
def span(cu_ptr, b, N, PACKED: tl.constexpr):
    """Where this program's sequence begins, and its split of the tokens: first, low, high.

    Splits are cut at multiples of 128, of which every BLOCK_N is a divisor: the kernels of one call
    have tiles of their own, but must agree on the splits.
    """
    first = 0
    length = N
    if PACKED:
        first = tl.load(cu_ptr + b)
        length = tl.load(cu_ptr + b + 1) - first
    size = split_size(length, tl.num_programs(1))
    low = tl.program_id(1) * size
    return first, low, tl.minimum(low + size, length)


@triton.jit
def split_size(length, splits):
    return tl.maximum(tl.cdiv(tl.cdiv(length, 128), splits), 1) * 128


@triton.jit
def behind_first(low, high):
    """Where a loop from low ends that turns at least once, over nothing if high is not above low.

    Sums that may come from before the loop as well as out of it are defined in two places, which
    makes the assembler wait for every single matrix product.
    """
    end = tl.maximum(high, low + 1)
    tl.assume(end > low)
    return end


@triton.jit
def begin(
    ptr, b, head, first, stride_b, stride_h, stride_n, UNIT: tl.constexpr, PACKED: tl.constexpr
):
    """Where a head of a sequence begins, and the stride of its rows: multiples of UNIT.

    A sequence is sample b, or begins at token ``first`` of the packed sample.
    """
    stride_n = stride_n // UNIT * UNIT
    if PACKED:
        offset = first * stride_n
    else:
        offset = b * (stride_b // UNIT * UNIT)
    return ptr + offset + head * (stride_h // UNIT * UNIT), stride_n


@triton.jit
def inside(keep, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``[N, BLOCK]``, or ``[N, 1]`` where the block is full: rows that are kept, columns there."""
    mask = keep[:, None]
    if WIDTH != BLOCK:
        mask = mask & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    return mask


@triton.jit
def places(ptr, start, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers ``[ROWS, BLOCK]`` from row ``start`` on: 64 bits to get there, 32 inside a tile."""
    at = tl.arange(0, ROWS)[:, None] * stride.to(tl.int32) + tl.arange(0, BLOCK)[None, :]
    return ptr + start * stride + at


@triton.jit
def tile(
    ptr, start, stride, keep, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr = False
):
    """Rows from ``start`` on, zero where not kept; ALL says that all are."""
    at = places(ptr, start, stride, keep.shape[0], BLOCK)
    if ALL and WIDTH == BLOCK:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside(keep, WIDTH, BLOCK), other=0.0)
    return x


@triton.jit
def put(ptr, start, stride, keep, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store what :func:`tile` would load."""
    at = places(ptr, start, stride, keep.shape[0], BLOCK)
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside(keep, WIDTH, BLOCK))


@triton.jit
def square(
    start, STEP_E: tl.constexpr, STEP_D: tl.constexpr,
    D, E, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Where the elements ``[E, D]`` of an S that begins at ``start`` are, and which exist."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    at = start + e[:, None] * STEP_E + d[None, :] * STEP_D
    return at, (e < E)[:, None] & (d < D)[None, :]


@triton.jit
def count_rows(x, sums, PRECISION: tl.constexpr):
    """Add the sum over the rows of x ``[N, D]`` to every row of ``sums`` ``[N, D]``."""
    if x.dtype == tl.float32:
        return sums + tl.sum(x, 0)[None, :]
    ones = tl.full((sums.shape[0], x.shape[0]), 1.0, x.dtype)
    return tl.dot(ones, x, sums, input_precision=PRECISION)


@triton.jit
def weigh(x, sums, PRECISION: tl.constexpr):
    """``[N]``: x ``[N, D]`` times z, which stands in every row of ``sums`` ``[M, D]``.

    Two rows are used, for z and for what its rounding lost: so z counts in float32.
    """
    row = tl.arange(0, sums.shape[0])[:, None]
    rounded = sums.to(x.dtype)
    lost = (sums - rounded.to(tl.float32)).to(x.dtype)
    pair = tl.where(row == 0, rounded, tl.where(row == 1, lost, tl.zeros_like(lost)))
    return tl.sum(tl.dot(x, tl.trans(pair), input_precision=PRECISION), 1)


@triton.jit
def visible(mask_ptr, row, high, MASKED: tl.constexpr):
    """``[N]``: inside the split and not padding."""
    keep = row < high
    if MASKED:
        keep = keep & (tl.load(mask_ptr + row, mask=keep, other=1) == 0)
    return keep


@triton.jit
def rescale(old, new):
    """exp(old - new), where -inf means nothing yet."""
    return tl.exp(tl.where(new == -float("inf"), 0.0, old - new))


@triton.jit
def key_features(k, shift, keep, MAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """φ(k) ``[N, D]``, zero where a key is not kept; "exp" is scaled by exp(-shift)."""
    real = inside(keep, D, BLOCK_D)
    if MAP == "exp":
        features = tl.exp(tl.where(real, k - shift[None, :], -float("inf")))
    elif MAP == "elu":
        features = tl.where(real, phi(k, MAP), 0.0)
    else:  # what is not kept was loaded as 0, and stays 0
        features = phi(k, MAP)
    return features


@triton.jit
def query_features(q, shift, MAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """φ(q) ``[N, D]``; for "exp" scaled by exp(-top) per row, and top ``[N]``."""
    in_d = (tl.arange(0, BLOCK_D) < D)[None, :]
    top = tl.zeros((q.shape[0],), tl.float32)
    if MAP == "exp":
        logits = tl.where(in_d, q + shift[None, :], -float("inf"))
        top = tl.max(logits, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        features = tl.exp(logits - top[:, None])
    elif MAP == "elu" and D != BLOCK_D:
        features = tl.where(in_d, phi(q, MAP), 0.0)
    else:
        features = phi(q, MAP)
    return features, top


@triton.jit
def add_shares(
    ptr, count, total, mass, shift,
    MAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add ``count`` shares, in their order, to S ``[E, D]``, z and the shift."""
    d = tl.arange(0, BLOCK_D)
    for _ in tl.range(0, count, num_stages=3):
        at, exists = square(ptr, D, 1, D, E, BLOCK_D, BLOCK_E)
        part = tl.load(at, mask=exists, other=0.0)
        part_mass = tl.load(ptr + D * E + d, mask=d < D, other=0.0)
        if MAP == "exp":
            part_shift = tl.load(ptr + D * E + D + d, mask=d < D, other=-float("inf"))
            new = tl.maximum(shift, part_shift)
            old_scale, part_scale = rescale(shift, new), rescale(part_shift, new)
            total = total * old_scale[None, :] + part * part_scale[None, :]
            mass = mass * old_scale + part_mass * part_scale
            shift = new
        else:
            total += part
            mass += part_mass
        ptr += D * E + 2 * D
    return total, mass, shift


@triton.jit
def starting_state(
    kv_ptr, z_ptr, row, STATE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """S ``[E, D]`` and z ``[D]`` that a scan continues from, or zeros."""
    if STATE:
        d = tl.arange(0, BLOCK_D)
        at, exists = square(kv_ptr + row * D * E, 1, E, D, E, BLOCK_D, BLOCK_E)
        total = tl.load(at, mask=exists, other=0.0)
        mass = tl.load(z_ptr + row * D + d, mask=d < D, other=0.0)
    else:
        total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
        mass = tl.zeros((BLOCK_D,), tl.float32)
    return total, mass


@triton.jit
def sums_before(
    share_ptr, count, kv_ptr, z_ptr, row, STATE: tl.constexpr, MAP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """S ``[E, D]``, z and shift over the starting state and the first ``count`` shares."""
    total, mass = starting_state(kv_ptr, z_ptr, row, STATE, D, E, BLOCK_D, BLOCK_E)
    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    return add_shares(share_ptr, count, total, mass, shift, MAP, D, E, BLOCK_D, BLOCK_E)


@triton.jit
def rows_after(
    share_ptr, shares, row_id, head, first, N,
    D: tl.constexpr, E: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr = 1,
):  # fmt: skip
    """Behind all shares stand EACH numbers a query, (B, H, N, EACH): where a head's begin."""
    share_ptr += shares.to(tl.int64) * (D * E + 2 * D)
    return share_ptr + EACH * ((head * N + first) if PACKED else row_id * N)


@triton.jit
def put_share(
    ptr, total, mass, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr
):
    d = tl.arange(0, BLOCK_D)
    at, exists = square(ptr, D, 1, D, E, BLOCK_D, BLOCK_E)
    tl.store(at, total, mask=exists)
    tl.store(ptr + D * E + d, mass, mask=d < D)


@triton.jit
def put_state(
    kv_ptr, z_ptr, row, total, mass,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    at, exists = square(kv_ptr + row * D * E, 1, E, D, E, BLOCK_D, BLOCK_E)
    tl.store(at, total, mask=exists)
    tl.store(z_ptr + row * D + d, mass, mask=d < D)
