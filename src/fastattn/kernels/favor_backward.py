"""FAVOR+, backward, from the table, the log-sums of features and rows, and nothing of width M.

    grad_queries   dq, and per query a pair: its log-sum, and δ = dout·out
    sum_queries    per split of the queries: shares of dS = sum of p ⊗ dout and of t = sum of p·δ
    add            the shares of a key head, in their order
    grad_keys      dk and dv
    grad_directions   of learned directions, what the keys add; what the queries add is of
                   ``sum_queries``

With p the weights of the second attention and p' those of the first: dlogit = p (dout·S - δ) of a
query, and p' (dS·v - t) of a key, since the gradient of a log-sum is dS·S - t. The slopes are t
(B, HKV, M) and, behind them, the pairs (B, H, N, 2). Letters: ``favor``.
"""

import triton
import triton.language as tl

from fastattn.kernels.favor import (
    half_square,
    hold,
    hold_sums,
    logarithms,
    nearest,
    plus,
    put_sums,
    rounded,
    rows,
    sums,
)
from fastattn.kernels.linear_attention_parts import (
    begin,
    behind_first,
    launched,
    put,
    span,
    tile,
    visible,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def chain(slopes, products, RELU: tl.constexpr):
    """From the gradient of a logarithm to that of the product, but for the factor of ``unit``."""
    if RELU:
        slopes = tl.where(products <= 0, 0.0, slopes / products)
    return slopes


@triton.jit
def unit(RELU: tl.constexpr):
    """Directions hold log2(e), since logarithms are to base 2; but for relu."""
    return 1.0 if RELU else LN2


@triton.jit
def turn_query(
    q, dout, delta, whole, w, means, bias, dq,
    RELU: tl.constexpr, PRECISION: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """dq of a block of features."""
    products = tl.dot(q, tl.trans(w), input_precision=PRECISION)  # [N, M]
    logits = plus(logarithms(products, RELU), bias, q.dtype, LIFT)
    weights = tl.exp2(logits - whole[:, None])
    slopes = tl.dot(dout, tl.trans(means), input_precision=PRECISION)  # [N, M]
    slopes = chain(weights * (slopes - delta[:, None]), products, RELU)
    return tl.dot(nearest(slopes, PRECISION, w.dtype), w, dq, input_precision=PRECISION)


@triton.jit
def turn_key(
    k, v, half, w, dmeans, kept_ptr, slope_ptr, m, dk, dv, along,
    M: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of features, and the sum of a key's slopes."""
    whole = tl.load(kept_ptr + m, mask=m < M, other=float("inf"))
    whole = tl.where(whole == -float("inf"), float("inf"), whole)
    slope = tl.load(slope_ptr + m, mask=m < M, other=0.0)
    products = tl.dot(k, tl.trans(w), input_precision=PRECISION)
    weights = tl.exp2(logarithms(products, RELU) - half[:, None] - whole[None, :])  # [N, M]
    narrow = nearest(weights, PRECISION, w.dtype)
    dv = tl.dot(narrow, dmeans, dv, input_precision=PRECISION)
    slopes = tl.dot(v, tl.trans(dmeans), input_precision=PRECISION)
    slopes = weights * (slopes - slope[None, :])
    along += tl.sum(slopes, 1)
    slopes = nearest(chain(slopes, products, RELU), PRECISION, w.dtype)
    dk = tl.dot(slopes, w, dk, input_precision=PRECISION)
    return dk, dv, along


@launched
def grad_queries_kernel(
    q_ptr, cu_ptr, table_ptr, kept_ptr, offset_ptr, out_ptr, dout_ptr, dq_ptr, slope_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    H, G, N, KEYROWS,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    RELU: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    HOLD: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """One program: one split of the queries of one head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row = row_id // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    out_n, dq_n = H.to(tl.int64) * E, H.to(tl.int64) * D
    sample = first if PACKED else b * N
    out_ptr += sample * out_n + head * E
    dq_ptr += sample * dq_n + head * D
    behind = KEYROWS.to(tl.int64) * M + (head * N + first if PACKED else row_id * N)
    row_ptr = kept_ptr + behind
    delta_ptr = slope_ptr + 2 * behind - KEYROWS.to(tl.int64) * M
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
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E)  # [N, E]
        out = tile(out_ptr, start, out_n, n < high, E, BLOCK_E)  # [N, E]
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)  # [N]
        whole = tl.load(row_ptr + n, mask=n < high, other=0.0)
        pair = delta_ptr + n[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(pair, tl.join(whole, delta), mask=(n < high)[:, None])
        dout = dout.to(DOT)
        dq = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        if HOLD:
            for i in tl.static_range(0, (M + BLOCK_M - 1) // BLOCK_M):
                if LIFT:
                    bias = held_bias[i]
                else:
                    bias = sums(kept_ptr, i * BLOCK_M, offset_ptr, OFFSET, M, BLOCK_M)
                dq = turn_query(
                    q, dout, delta, whole, held_w[i], held_means[i], bias, dq, RELU, PRECISION, LIFT
                )
        else:
            for start_m in range(0, M, BLOCK_M):
                w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)
                means = rows(table_ptr + M * D, start_m, M, E, BLOCK_M, BLOCK_E)
                bias = sums(kept_ptr, start_m, offset_ptr, OFFSET, M, BLOCK_M)
                dq = turn_query(q, dout, delta, whole, w, means, bias, dq, RELU, PRECISION, False)
        put(dq_ptr, start, dq_n, n < high, dq * unit(RELU), D, BLOCK_D)


@triton.jit
def pairs(ptr, n, high):
    """``[N]`` twice, log-sums and δ: loaded once as a matrix, where vectors are by every thread."""
    at = ptr + n[:, None] * 2 + tl.arange(0, 2)[None, :]
    whole, delta = tl.split(tl.load(at, mask=(n < high)[:, None], other=float("inf")))
    return whole, tl.where(n < high, delta, 0.0)


@launched
def sum_queries_kernel(
    q_ptr, cu_ptr, table_ptr, kept_ptr, offset_ptr, dout_ptr, slope_ptr, dshare_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    H, G, N, KEYROWS,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    RELU: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, LEARNED: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M features, one split of the queries of one head.

    LEARNED, the sums are those of slopes ⊗ q and of slopes: gradients of directions and offsets.
    """
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row = row_id // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    behind = KEYROWS.to(tl.int64) * M + (head * N + first if PACKED else row_id * N)
    slope_ptr += 2 * behind - KEYROWS.to(tl.int64) * M
    if OFFSET:
        offset_ptr += head // G * OWN * M
    start_m = tl.program_id(2) * BLOCK_M
    w = rows(table_ptr + key_row * (M * (D + E)), start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
    bias = sums(kept_ptr + key_row * M, start_m, offset_ptr, OFFSET, M, BLOCK_M)

    if LEARNED:
        means = rows(
            table_ptr + key_row * (M * (D + E)) + M * D, start_m, M, E, BLOCK_M, BLOCK_E
        )  # [M, E]
    WIDTH: tl.constexpr = D if LEARNED else E
    BLOCK: tl.constexpr = BLOCK_D if LEARNED else BLOCK_E
    total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(low, behind_first(low, high), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E).to(DOT)  # [N, E]
        whole, delta = pairs(slope_ptr, n, high)
        products = tl.dot(w, tl.trans(q), input_precision=PRECISION)  # [M, N]
        weights = tl.exp2(logarithms(products, RELU) + bias[:, None] - whole[None, :])
        if LEARNED:
            slopes = tl.dot(means, tl.trans(dout), input_precision=PRECISION) - delta[None, :]
            slopes *= weights
            mass += tl.sum(slopes, 1)
            slopes = nearest(chain(slopes, products, RELU), PRECISION, DOT)
            total = tl.dot(slopes, q, total, input_precision=PRECISION)
        else:
            mass += tl.sum(weights * delta[None, :], 1)
            weights = nearest(weights, PRECISION, DOT)
            total = tl.dot(weights, dout, total, input_precision=PRECISION)

    share = row_id * tl.num_programs(1) + tl.program_id(1)
    put_sums(dshare_ptr + share * (M * (WIDTH + 1)), start_m, total, mass, M, WIDTH, BLOCK_M, BLOCK)


@launched
def add_kernel(
    dshare_ptr, table_ptr, dtable_ptr, slope_ptr,
    DSHARES,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: dS and t of BLOCK_M features of one key head, from all its heads' shares."""
    row_id = tl.program_id(0).to(tl.int64)
    m, e = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    dshare_ptr += row_id * DSHARES * (M * (E + 1))
    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for _ in tl.range(0, DSHARES, num_stages=3):
        total += tl.load(dshare_ptr + m[:, None] * E + e[None, :], mask=exists, other=0.0)
        mass += tl.load(dshare_ptr + M * E + m, mask=m < M, other=0.0)
        dshare_ptr += M * (E + 1)
    dtable_ptr += row_id * (M * E)
    narrow = rounded(total, PRECISION, DOT)
    tl.store(dtable_ptr + m[:, None] * E + e[None, :], narrow, mask=exists)
    # dS·v and t nearly cancel where values have a mean: t makes up for the rounding of dS
    table_ptr += row_id * (M * (D + E)) + M * D
    means = tl.load(table_ptr + m[:, None] * E + e[None, :], mask=exists, other=0.0)
    mass += tl.sum((narrow.to(tl.float32) - total) * means.to(tl.float32), 1)
    tl.store(slope_ptr + row_id * M + m, mass, mask=m < M)


@launched
def grad_keys_kernel(
    k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, kept_ptr, dtable_ptr, slope_ptr, dk_ptr, dv_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n,
    HKV, N, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
    RELU: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    """One program: one split of the keys of one key head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)
    dk_n, dv_n = HKV.to(tl.int64) * D, HKV.to(tl.int64) * E
    sample = first if PACKED else b * N
    dk_ptr += sample * dk_n + head * D
    dv_ptr += sample * dv_n + head * E
    table_ptr += row_id * (M * (D + E))
    kept_ptr += row_id * M
    dtable_ptr += row_id * (M * E)
    slope_ptr += row_id * M
    held_w = hold(table_ptr, M, D, BLOCK_M, BLOCK_D, HOLD)
    held_dmeans = hold(dtable_ptr, M, E, BLOCK_M, BLOCK_E, HOLD)

    for start in range(low, behind_first(low, high), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keep = visible(mask_ptr, n, high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        half = half_square(k, curvature)
        half = tl.where(keep, half, float("inf"))  # a key that is not kept has no weight
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
        along = tl.zeros((BLOCK_N,), tl.float32)
        m = tl.arange(0, BLOCK_M)
        narrow = k.to(DOT)
        if HOLD:
            for i in tl.static_range(0, (M + BLOCK_M - 1) // BLOCK_M):
                dk, dv, along = turn_key(
                    narrow, v, half, held_w[i], held_dmeans[i], kept_ptr, slope_ptr,
                    i * BLOCK_M + m, dk, dv, along, M, RELU, PRECISION,
                )  # fmt: skip
        else:
            for start_m in range(0, M, BLOCK_M):
                w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)
                dmeans = rows(dtable_ptr, start_m, M, E, BLOCK_M, BLOCK_E)
                dk, dv, along = turn_key(
                    narrow, v, half, w, dmeans, kept_ptr, slope_ptr,
                    start_m + m, dk, dv, along, M, RELU, PRECISION,
                )  # fmt: skip
        dk = dk * unit(RELU) - k.to(tl.float32) * (curvature * along)[:, None]
        put(dk_ptr, start, dk_n, n < high, dk, D, BLOCK_D)
        put(dv_ptr, start, dv_n, n < high, dv, E, BLOCK_E)


@launched
def grad_directions_kernel(
    k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, kept_ptr, dtable_ptr, slope_ptr, share_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n,
    HKV, N, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
    RELU: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: what one split of the keys of one key head adds to the gradient of BLOCK_M
    directions."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)
    start_m = tl.program_id(2) * BLOCK_M
    m = start_m + tl.arange(0, BLOCK_M)
    w = rows(table_ptr + row_id * (M * (D + E)), start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
    dmeans = rows(dtable_ptr + row_id * (M * E), start_m, M, E, BLOCK_M, BLOCK_E)  # [M, E]
    whole = tl.load(kept_ptr + row_id * M + m, mask=m < M, other=float("inf"))
    whole = tl.where(whole == -float("inf"), float("inf"), whole)
    slope = tl.load(slope_ptr + row_id * M + m, mask=m < M, other=0.0)

    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)  # offsets are of queries only
    for start in range(low, behind_first(low, high), BLOCK_N):
        keep = visible(mask_ptr, start + tl.arange(0, BLOCK_N), high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        half = half_square(k, curvature)
        half = tl.where(keep, half, float("inf"))  # a key that is not kept has no weight
        k = k.to(DOT)
        products = tl.dot(w, tl.trans(k), input_precision=PRECISION)  # [M, N]
        weights = tl.exp2(logarithms(products, RELU) - half[None, :] - whole[:, None])
        slopes = tl.dot(dmeans, tl.trans(v), input_precision=PRECISION) - slope[:, None]
        slopes = nearest(chain(weights * slopes, products, RELU), PRECISION, DOT)
        total = tl.dot(slopes, k, total, input_precision=PRECISION)
    share = row_id * tl.num_programs(1) + tl.program_id(1)
    put_sums(share_ptr + share * (M * (D + 1)), start_m, total, mass, M, D, BLOCK_M, BLOCK_D)
