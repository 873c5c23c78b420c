"""FAVOR+, forward, as two softmax attentions: features over keys, then queries over features.

    sum_keys    per split of the keys: sum of exp(L) ⊗ v and of exp(L), L = w·k - curvature·|k|²/2;
                and the directions w, scaled and rounded
    merge       the splits of a head, in their order: means S (M, E) and log-sums of the features
    attend      out = mean of S, weighted by exp(w·q + log-sum + offset)

Letters as in ``linear_attention_parts``, and M features. Logarithms are to base 2: directions are
scaled by ``factor``, which holds log2(e), once, and rounded to DOT then. A feature relu(w·x) has
the logarithm of that, and no curvature; else all is the same. What stands between the kernels is
one table a head: w (M, D) and S (M, E), in DOT; and, kept for the backward pass, the log-sums of
the features (B, HKV, M) and, behind them, of the rows (B, H, N). Nothing has M numbers a token.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import (
    begin,
    behind_first,
    launched,
    put,
    span,
    tile,
    visible,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def directions(w_ptr, start, factor, M: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """``[M, D]`` rows of a contiguous (M, D) from ``start`` on, scaled and rounded."""
    m, d = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    exists = (m < M)[:, None] & (d < D)[None, :]
    w = tl.load(w_ptr + m[:, None] * D + d[None, :], mask=exists, other=0.0)
    return rounded(w * factor, PRECISION, DOT)


@triton.jit
def nearest(x, PRECISION: tl.constexpr, DOT: tl.constexpr):
    """An operand of a product: the tensor cores cut float32 off, always towards zero, which no sum
    averages out; half of the last bit that they keep makes it rounding. A NaN stays one."""
    if DOT == tl.float32 and PRECISION == "tf32":
        power = (x.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        x += power * 0.00048828125
    return x.to(DOT)


@triton.jit
def rounded(x, PRECISION: tl.constexpr, DOT: tl.constexpr):
    """As the products have it."""
    x = nearest(x, PRECISION, DOT)
    if DOT == tl.float32 and PRECISION == "tf32":
        x = (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def rows(ptr, start, COUNT: tl.constexpr, WIDTH: tl.constexpr,
         BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr):  # fmt: skip
    """``[BLOCK, WIDTH]`` rows of a contiguous (COUNT, WIDTH) from ``start`` on."""
    i, j = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_WIDTH)
    exists = (i < COUNT)[:, None] & (j < WIDTH)[None, :]
    return tl.load(ptr + i[:, None] * WIDTH + j[None, :], mask=exists, other=0.0)


@triton.jit
def half_square(k, curvature):
    """``[N]`` what a key's features lose for its length, to base 2; in float32."""
    wide = k.to(tl.float32)
    return tl.sum(wide * wide, 1) * (curvature * 0.5 * LOG2E)


@triton.jit
def logarithms(products, RELU: tl.constexpr):
    """Of the features, to base 2, from the products with the directions; a NaN stays one."""
    if RELU:
        products = tl.where(products <= 0, -float("inf"), tl.log2(products))
    return products


@triton.jit
def hold(ptr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
         BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, HOLD: tl.constexpr):  # fmt: skip
    """All blocks of rows, loaded before a loop that needs them in every turn; or nothing."""
    blocks = ()
    if HOLD:
        for start in tl.static_range(0, COUNT, BLOCK):
            blocks = blocks + (rows(ptr, start, COUNT, WIDTH, BLOCK, BLOCK_WIDTH),)  # noqa: RUF005
    return blocks


@triton.jit
def sums(ptr, start, offset_ptr, OFFSET: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """``[M]`` log-sums of the features over the keys, and the offsets; -inf where is no feature."""
    m = start + tl.arange(0, BLOCK_M)
    found = tl.load(ptr + m, mask=m < M, other=-float("inf"))
    if OFFSET:
        found += tl.load(offset_ptr + m, mask=m < M, other=0.0) * LOG2E
    return found


@triton.jit
def put_sums(
    ptr, start_m, total, mass,
    M: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A share: sums (M, WIDTH) and, behind them, (M)."""
    m, x = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK)
    exists = (m < M)[:, None] & (x < WIDTH)[None, :]
    tl.store(ptr + m[:, None] * WIDTH + x[None, :], total, mask=exists)
    tl.store(ptr + M * WIDTH + m, mass, mask=m < M)


@triton.jit
def lift(x, DOT: tl.constexpr):
    """x [M] as ``[M, 16]``, three numbers a row that sum to it: a product with ones adds it."""
    x = tl.maximum(x, -1e30)  # -inf times 0 is NaN
    high = x.to(tl.bfloat16).to(tl.float32)
    middle = (x - high).to(tl.bfloat16).to(tl.float32)
    low = x - high - middle
    j = tl.arange(0, 16)[None, :]
    parts = tl.where(j == 0, high[:, None], tl.where(j == 1, middle[:, None], low[:, None]))
    return tl.where(j < 3, parts, 0.0).to(DOT)


@triton.jit
def plus(logits, x, DOT: tl.constexpr, LIFT: tl.constexpr):
    """Add x to the rows of ``[N, M]``; lifted, within the tensor cores."""
    if LIFT:
        j = tl.arange(0, 16)[None, :] + tl.zeros((logits.shape[0], 1), tl.int32)
        logits = tl.dot(tl.where(j < 3, 1.0, 0.0).to(DOT), tl.trans(x), logits)
    else:
        logits += x[None, :]
    return logits


@triton.jit
def hold_sums(ptr, offset_ptr, OFFSET: tl.constexpr, M: tl.constexpr,
              BLOCK_M: tl.constexpr, DOT: tl.constexpr, LIFT: tl.constexpr):  # fmt: skip
    """All blocks of :func:`sums`, lifted; or nothing."""
    blocks = ()
    if LIFT:
        for start in tl.static_range(0, M, BLOCK_M):
            blocks = blocks + (  # noqa: RUF005
                lift(sums(ptr, start, offset_ptr, OFFSET, M, BLOCK_M), DOT),
            )
    return blocks


@launched
def sum_keys_kernel(
    k_ptr, v_ptr, mask_ptr, cu_ptr, w_ptr, table_ptr, share_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n,
    HKV, N, factor, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    RELU: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M features of one key head attend to one split of the keys."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)
    start_m = tl.program_id(2) * BLOCK_M
    w_ptr += head * OWN * (M * D)
    w = directions(w_ptr, start_m, factor, M, D, BLOCK_M, BLOCK_D, PRECISION, DOT)  # [M, D]
    # Only what was loaded is multiplied from shared memory, what was computed from registers, which
    # takes the products one after the other. All splits write the same.
    table_ptr += row_id * (M * (D + E))
    m, d = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tl.store(table_ptr + m[:, None] * D + d[None, :], w, mask=(m < M)[:, None] & (d < D)[None, :])
    tl.debug_barrier()
    w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)

    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for start in range(low, behind_first(low, high), BLOCK_N):
        keep = visible(mask_ptr, start + tl.arange(0, BLOCK_N), high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        half = half_square(k, curvature)
        half = tl.where(keep, half, float("inf"))  # a key that is not kept has no weight
        logits = tl.dot(w, tl.trans(k.to(DOT)), input_precision=PRECISION)  # [M, N]
        logits = logarithms(logits, RELU) - half[None, :]
        larger = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        scale = tl.exp2(top - finite)
        features = tl.exp2(logits - finite[:, None])
        mass = mass * scale + tl.sum(features, 1)
        features = nearest(features, PRECISION, DOT)
        total = tl.dot(features, v, total * scale[:, None], input_precision=PRECISION)
        top = larger

    m, e = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    share_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * (M * (E + 2))
    exists = (m < M)[:, None] & (e < E)[None, :]
    tl.store(share_ptr + m[:, None] * E + e[None, :], total, mask=exists)
    tl.store(share_ptr + M * E + m, mass, mask=m < M)
    tl.store(share_ptr + M * E + M + m, top, mask=m < M)


@launched
def merge_kernel(
    share_ptr, table_ptr, kept_ptr,
    SHARES,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: the table and the log-sums of BLOCK_M features of one key head."""
    row_id = tl.program_id(0).to(tl.int64)
    start_m = tl.program_id(1) * BLOCK_M
    m, e = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    share_ptr += row_id * SHARES * (M * (E + 2))
    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for _ in tl.range(0, SHARES, num_stages=3):
        part = tl.load(share_ptr + m[:, None] * E + e[None, :], mask=exists, other=0.0)
        part_mass = tl.load(share_ptr + M * E + m, mask=m < M, other=0.0)
        part_top = tl.load(share_ptr + M * E + M + m, mask=m < M, other=-float("inf"))
        larger = tl.maximum(top, part_top)
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        scale, part_scale = tl.exp2(top - finite), tl.exp2(part_top - finite)
        total = total * scale[:, None] + part * part_scale[:, None]
        mass = mass * scale + part_mass * part_scale
        top = larger
        share_ptr += M * (E + 2)

    table_ptr += row_id * (M * (D + E))
    mean = total / tl.where(mass == 0, 1.0, mass)[:, None]
    mean = rounded(mean, PRECISION, DOT)
    tl.store(table_ptr + M * D + m[:, None] * E + e[None, :], mean, mask=exists)
    tl.store(kept_ptr + row_id * M + m, top + tl.log2(mass), mask=m < M)  # -inf without a key


@triton.jit
def meet(q, w, means, bias, total, mass, top,
         RELU: tl.constexpr, PRECISION: tl.constexpr, LIFT: tl.constexpr):  # fmt: skip
    """Queries ``[N, D]`` attend to a block of features: the sums so far, scaled to the new top."""
    logits = tl.dot(q, tl.trans(w), input_precision=PRECISION)  # [N, M]
    logits = plus(logarithms(logits, RELU), bias, q.dtype, LIFT)
    larger = tl.maximum(top, tl.max(logits, 1))
    finite = tl.where(larger == -float("inf"), 0.0, larger)
    scale = tl.exp2(top - finite)
    features = tl.exp2(logits - finite[:, None])
    mass = mass * scale + tl.sum(features, 1)
    total *= scale[:, None]
    features = nearest(features, PRECISION, means.dtype)
    total = tl.dot(features, means, total, input_precision=PRECISION)
    return total, mass, larger


@launched
def attend_kernel(
    q_ptr, cu_ptr, table_ptr, kept_ptr, offset_ptr, out_ptr,
    q_b, q_h, q_n,
    H, G, N, KEYROWS,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    RELU: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    HOLD: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """One program: one split of the queries of one head attends to the features."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row = row_id // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    out_n = H.to(tl.int64) * E
    out_ptr += (first if PACKED else b * N) * out_n + head * E
    behind = KEYROWS.to(tl.int64) * M + (head * N + first if PACKED else row_id * N)
    row_ptr = kept_ptr + behind
    kept_ptr += key_row * M
    table_ptr += key_row * (M * (D + E))
    if OFFSET:
        offset_ptr += head // G * OWN * M

    held_w = hold(table_ptr, M, D, BLOCK_M, BLOCK_D, HOLD)
    held_means = hold(table_ptr + M * D, M, E, BLOCK_M, BLOCK_E, HOLD)
    held_bias = hold_sums(kept_ptr, offset_ptr, OFFSET, M, BLOCK_M, DOT, LIFT)
    for start in range(low, behind_first(low, high), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
        total = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
        mass = tl.zeros((BLOCK_N,), tl.float32)
        top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
        if HOLD:
            for i in tl.static_range(0, (M + BLOCK_M - 1) // BLOCK_M):
                if LIFT:
                    bias = held_bias[i]
                else:
                    bias = sums(kept_ptr, i * BLOCK_M, offset_ptr, OFFSET, M, BLOCK_M)
                total, mass, top = meet(
                    q, held_w[i], held_means[i], bias, total, mass, top, RELU, PRECISION, LIFT
                )
        else:
            for start_m in range(0, M, BLOCK_M):
                w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)
                means = rows(table_ptr + M * D, start_m, M, E, BLOCK_M, BLOCK_E)
                bias = sums(kept_ptr, start_m, offset_ptr, OFFSET, M, BLOCK_M)
                total, mass, top = meet(q, w, means, bias, total, mass, top, RELU, PRECISION, False)
        empty = mass == 0
        total = total / tl.where(empty, 1.0, mass)[:, None]
        put(out_ptr, start, out_n, n < high, total, E, BLOCK_E)
        tl.store(row_ptr + n, tl.where(empty, 0.0, top + tl.log2(mass)), mask=n < high)
