"""FAVOR+ where row i sees keys 0 to i: chunks within splits, features made inside.

    prepare        the table's directions, and for each feature a shift c that no key decides
    states         per split of the keys: S and z before every chunk, and the split's share
    carry          S and z before every split
    attend         a chunk of queries meets its keys, the state before it and that before its split
    grad_queries   like attend, from the same states; per query a pair: its log-sum, and δ
    dstates        per split of the queries: dS and t after every chunk, and the split's share
    grad_keys      a chunk of keys meets its queries, and what is after it and its split

A key's feature is 2^(w·k - curvature·|k|²/2 - c), a query's 2^(w·q + c - top), with logarithms to
base 2. A key's exponent never exceeds that of |w|²/2, so a shift by it, less 96, would keep
features in float32 without a maximum over keys, which depends on later ones. But they are rounded
where they are large, and short keys have those near 0: c is not below 0, and not above 40. What is
left is kept between -120 and 96, so that every row has a weight and sums have room: there outputs
are inexact, but means of values seen.

States of a split begin at zero: what is before it is added where they are read. Letters and
tables: ``favor``.
"""

import triton
import triton.language as tl

from fastattn.kernels.favor import (
    LOG2E,
    directions,
    half_square,
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

LEAST = tl.constexpr(-120.0)
MOST = tl.constexpr(96.0)
FARTHEST = tl.constexpr(40.0)


@launched
def prepare_kernel(
    w_ptr, table_ptr, kept_ptr,
    HKV, factor, curvature,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: directions in DOT and shifts of BLOCK_M features of one key head."""
    row_id = tl.program_id(0).to(tl.int64)
    start_m = tl.program_id(1) * BLOCK_M
    m, d = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    w_ptr += row_id % HKV * OWN * (M * D)
    w = directions(w_ptr, start_m, factor, M, D, BLOCK_M, BLOCK_D, PRECISION, DOT)
    exists = (m < M)[:, None] & (d < D)[None, :]
    tl.store(table_ptr + row_id * (M * (D + E)) + m[:, None] * D + d[None, :], w, mask=exists)
    w = w.to(tl.float32)
    bound = tl.sum(w * w, 1) / (2 * LOG2E * curvature)
    shift = tl.clamp(bound - MOST, 0.0, FARTHEST)
    tl.store(kept_ptr + row_id * M + m, shift, mask=m < M)


@triton.jit
def state_at(b, start, first, N, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Where among all states that before the chunk is which begins at ``start`` of a sequence."""
    if PACKED:  # a segment's chunks begin anywhere, and it has at most one more than full ones
        return (first + start) // CHUNK + b
    return b * tl.cdiv(N, CHUNK) + start // CHUNK


@launched
def states_kernel(
    k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, kept_ptr, share_ptr, state_ptr, weight_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n,
    HKV, N, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M features, one split of the keys of one key head: S and z before every
    chunk, of that split alone, and its share."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)
    start_m = tl.program_id(2) * BLOCK_M
    w = rows(table_ptr + row_id * (M * (D + E)), start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
    shift = shifts(kept_ptr + row_id * M, start_m, M, BLOCK_M)
    m, e = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    at = m[:, None] * E + e[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(low, behind_first(low, high), CHUNK):
        here = (state_at(b, start, first, N, CHUNK, PACKED) * HKV + head) * M
        there = start < high
        tl.store(state_ptr + here * E + at, total.to(DOT), mask=exists & there)
        tl.store(weight_ptr + here + m, mass, mask=(m < M) & there)
        keep = visible(mask_ptr, start + tl.arange(0, CHUNK), high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        half = half_square(k, curvature)
        logits = tl.dot(w, tl.trans(k.to(DOT)), input_precision=PRECISION)  # [M, N]
        logits = bounded(logits - half[None, :] - shift[:, None])
        features = tl.where(keep[None, :], tl.exp2(logits), 0.0)
        mass += tl.sum(features, 1)
        total = tl.dot(features.to(DOT), v, total, input_precision=PRECISION)

    share_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * (M * (E + 1))
    tl.store(share_ptr + at, total, mask=exists)
    tl.store(share_ptr + M * E + m, mass, mask=m < M)


@triton.jit
def bounded(logits):
    """Exponents of keys within what float32 holds, with room for sums; a NaN stays one."""
    return tl.clamp(logits, LEAST, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def key_logits(k, w, shift, half, keep, PRECISION: tl.constexpr):
    """``[N, M]`` logarithms of the keys' features; -inf for a key that is not kept."""
    logits = tl.dot(k, tl.trans(w), input_precision=PRECISION) - half[:, None] - shift[None, :]
    return tl.where(keep[:, None], bounded(logits), -float("inf"))


@triton.jit
def shifts(kept_ptr, start_m, M: tl.constexpr, BLOCK_M: tl.constexpr):
    m = start_m + tl.arange(0, BLOCK_M)
    return tl.load(kept_ptr + m, mask=m < M, other=0.0)


@triton.jit
def finite_rows(v, past):
    """v with what is not finite set to zero, and ``[N]`` whether a row may see such a value.

    In a product it would reach earlier rows of its chunk, even times zero.
    """
    wrong = tl.where(v.to(tl.float32) * 0.0 == 0.0, 0, 1)
    reached = tl.max(tl.where(past, tl.max(wrong, 1)[None, :], 0), 1)
    return tl.where(wrong == 0, v, 0.0), reached


@launched
def carry_kernel(
    share_ptr, before_ptr, weight_before_ptr,
    SHARES,
    E: tl.constexpr, M: tl.constexpr, BACKWARDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: the sum of the shares before every split, of BLOCK_M features of one key head;
    or after it."""
    row_id = tl.program_id(0).to(tl.int64)
    m, e = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    at = m[:, None] * E + e[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for i in range(0, SHARES):
        one = row_id * SHARES + (SHARES - 1 - i if BACKWARDS else i)
        tl.store(before_ptr + one * M * E + at, total.to(before_ptr.dtype.element_ty), mask=exists)
        tl.store(weight_before_ptr + one * M + m, mass, mask=m < M)
        share = share_ptr + one * (M * (E + 1))
        total += tl.load(share + at, mask=exists, other=0.0)
        mass += tl.load(share + M * E + m, mask=m < M, other=0.0)


@launched
def attend_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, kept_ptr, offset_ptr,
    state_ptr, weight_ptr, before_ptr, weight_before_ptr, out_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, G, N, KEYROWS, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    OFFSET: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: one split of the tokens of one head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row, key_head, HKV = row_id // G, head // G, H // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    k_ptr, k_n = begin(k_ptr, b, key_head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, key_head, first, v_b, v_h, v_n, UNIT, PACKED)
    out_n = H * E
    out_ptr += (first if PACKED else b * N) * out_n.to(tl.int64) + head * E
    row_ptr = kept_ptr + KEYROWS.to(tl.int64) * M + (head * N + first if PACKED else row_id * N)
    if OFFSET:
        offset_ptr += key_head * OWN * M
    kept_ptr += key_row * M
    table_ptr += key_row * (M * (D + E))
    split = key_row * tl.num_programs(1) + tl.program_id(1)
    before_ptr += split * M * E
    weight_before_ptr += split * M

    i = tl.arange(0, CHUNK)
    past = i[:, None] >= i[None, :]
    for start in range(low, behind_first(low, high), CHUNK):
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        half = half_square(k, curvature)
        k = k.to(DOT)
        top = tl.full((CHUNK,), -float("inf"), tl.float32)
        for start_m in range(0, M, BLOCK_M):
            w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
            bias = sums(kept_ptr, start_m, offset_ptr, OFFSET, M, BLOCK_M)
            logits = tl.dot(q, tl.trans(w), input_precision=PRECISION) + bias[None, :]  # [N, M]
            top = tl.maximum(top, tl.max(logits, 1))
        there = tl.where(start < high, start, 0)  # an empty split reads nothing out of bounds
        here = (state_at(b, there, first, N, CHUNK, PACKED) * HKV + key_head) * M
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        num = tl.zeros((CHUNK, BLOCK_E), tl.float32)
        den = tl.zeros((CHUNK,), tl.float32)
        for start_m in range(0, M, BLOCK_M):
            m = start_m + tl.arange(0, BLOCK_M)
            w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
            bias = sums(kept_ptr, start_m, offset_ptr, OFFSET, M, BLOCK_M)
            shift = shifts(kept_ptr, start_m, M, BLOCK_M)
            state = rows(state_ptr + here * E, start_m, M, E, BLOCK_M, BLOCK_E)  # [M, E]
            before = rows(before_ptr, start_m, M, E, BLOCK_M, BLOCK_E)
            weight = tl.load(weight_ptr + here + m, mask=m < M, other=0.0)
            weight += tl.load(weight_before_ptr + m, mask=m < M, other=0.0)
            logits = tl.dot(q, tl.trans(w), input_precision=PRECISION) + bias[None, :]
            queries = tl.exp2(logits - top[:, None])  # [N, M]
            den += tl.sum(queries * weight[None, :], 1)
            queries = queries.to(DOT)
            num = tl.dot(queries, state, num, input_precision=PRECISION)
            num = tl.dot(queries, before, num, input_precision=PRECISION)
            keys = tl.exp2(key_logits(k, w, shift, half, keep, PRECISION)).to(DOT)  # [N, M]
            scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E)  # [N, E]
        v, reached = finite_rows(v, past)
        scores = tl.where(past, scores, 0.0)  # [N, N]
        den += tl.sum(scores, 1)
        num = tl.dot(scores.to(DOT), v.to(DOT), num, input_precision=PRECISION)
        empty = den == 0
        num = num / tl.where(empty, 1.0, den)[:, None]
        num = tl.where(reached[:, None] > 0, float("nan"), num)
        put(out_ptr, start, out_n, n < high, num, E, BLOCK_E)
        # a row without a key weighs nothing in the backward pass
        tl.store(row_ptr + n, tl.where(empty, float("inf"), top + tl.log2(den)), mask=n < high)
