"""FAVOR+ where row i sees keys 0 to i, backward; the kernels are told of in ``favor_causal``."""

import triton
import triton.language as tl

from fastattn.kernels.favor import half_square, rows, sums
from fastattn.kernels.favor_backward import LN2, pairs
from fastattn.kernels.favor_causal import LEAST, MOST, key_logits, shifts, state_at
from fastattn.kernels.linear_attention_parts import (
    begin,
    behind_first,
    launched,
    put,
    span,
    tile,
    visible,
)


@launched
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, kept_ptr, offset_ptr,
    state_ptr, weight_ptr, before_ptr, weight_before_ptr, out_ptr, dout_ptr, slope_ptr, dq_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    H, G, N, KEYROWS, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    OFFSET: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: dq of one split of the queries of one head; per query its log-sum and δ."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row, key_head, HKV = row_id // G, head // G, H // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    k_ptr, k_n = begin(k_ptr, b, key_head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, key_head, first, v_b, v_h, v_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    out_n, dq_n = H * E, H * D
    sample = first if PACKED else b * N
    out_ptr += sample * out_n.to(tl.int64) + head * E
    dq_ptr += sample * dq_n.to(tl.int64) + head * D
    behind = KEYROWS.to(tl.int64) * M + (head * N + first if PACKED else row_id * N)
    row_ptr, pair_ptr = kept_ptr + behind, slope_ptr + 2 * behind - KEYROWS.to(tl.int64) * M
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
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E)  # [N, E]
        out = tile(out_ptr, start, out_n, n < high, E, BLOCK_E)  # [N, E]
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)  # [N]
        whole = tl.load(row_ptr + n, mask=n < high, other=float("inf"))
        pair = pair_ptr + n[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(pair, tl.join(whole, delta), mask=(n < high)[:, None])
        dout = dout.to(DOT)
        half = half_square(k, curvature)
        k = k.to(DOT)
        dscores = tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None]
        dscores = tl.where(past, dscores, 0.0).to(DOT)  # [N, N]
        there = tl.where(start < high, start, 0)  # an empty split reads nothing out of bounds
        here = (state_at(b, there, first, N, CHUNK, PACKED) * HKV + key_head) * M
        dq = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        for start_m in range(0, M, BLOCK_M):
            m = start_m + tl.arange(0, BLOCK_M)
            w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
            bias = sums(kept_ptr, start_m, offset_ptr, OFFSET, M, BLOCK_M)
            shift = shifts(kept_ptr, start_m, M, BLOCK_M)
            state = rows(state_ptr + here * E, start_m, M, E, BLOCK_M, BLOCK_E)  # [M, E]
            before = rows(before_ptr, start_m, M, E, BLOCK_M, BLOCK_E)
            weight = tl.load(weight_ptr + here + m, mask=m < M, other=0.0)
            weight += tl.load(weight_before_ptr + m, mask=m < M, other=0.0)
            keys = tl.exp2(key_logits(k, w, shift, half, keep, PRECISION)).to(DOT)  # [N, M]
            slopes = tl.dot(dout, tl.trans(state), input_precision=PRECISION)  # [N, M]
            slopes = tl.dot(dout, tl.trans(before), slopes, input_precision=PRECISION)
            slopes -= delta[:, None] * weight[None, :]
            slopes = tl.dot(dscores, keys, slopes, input_precision=PRECISION)
            logits = tl.dot(q, tl.trans(w), input_precision=PRECISION) + bias[None, :]
            slopes *= tl.exp2(logits - whole[:, None])
            dq = tl.dot(slopes.to(DOT), w, dq, input_precision=PRECISION)
        put(dq_ptr, start, dq_n, n < high, dq * LN2, D, BLOCK_D)


@launched
def dstates_kernel(
    q_ptr, cu_ptr, table_ptr, kept_ptr, offset_ptr, dout_ptr, slope_ptr, share_ptr,
    state_ptr, weight_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    HKV, G, N, KEYROWS,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    OFFSET: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M features, one split of the queries of one key head's heads: dS and t
    after every chunk, of that split alone, and its share."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    q_ptr, q_n = begin(q_ptr, b, head * G, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head * G, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    step_q, step_dout = q_h // UNIT * UNIT, dout_h // UNIT * UNIT
    length = N.to(tl.int64)
    slope_ptr += KEYROWS.to(tl.int64) * M
    slope_ptr += 2 * (head * G * length + first if PACKED else row_id * G * length)
    if OFFSET:
        offset_ptr += head * OWN * M
    start_m = tl.program_id(2) * BLOCK_M
    w = rows(table_ptr + row_id * (M * (D + E)), start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
    bias = sums(kept_ptr + row_id * M, start_m, offset_ptr, OFFSET, M, BLOCK_M)
    m, e = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    at = m[:, None] * E + e[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    chunks = tl.maximum(tl.cdiv(high - low, CHUNK), 1)
    tl.assume(chunks > 0)
    for c in range(0, chunks):
        start = low + (chunks - 1 - c) * CHUNK
        n = start + tl.arange(0, CHUNK)
        here = (state_at(b, start, first, N, CHUNK, PACKED) * HKV + head) * M
        there = start < high
        tl.store(state_ptr + here * E + at, total.to(DOT), mask=exists & there)
        tl.store(weight_ptr + here + m, mass, mask=(m < M) & there)
        for g in range(0, G):
            q = tile(q_ptr + g * step_q, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
            dout = tile(dout_ptr + g * step_dout, start, dout_n, n < high, E, BLOCK_E).to(DOT)
            whole, delta = pairs(slope_ptr + 2 * g * length, n, high)
            logits = tl.dot(w, tl.trans(q), input_precision=PRECISION) + bias[:, None]  # [M, N]
            weights = tl.exp2(logits - whole[None, :])
            mass += tl.sum(weights * delta[None, :], 1)
            total = tl.dot(weights.to(DOT), dout, total, input_precision=PRECISION)

    share_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * (M * (E + 1))
    tl.store(share_ptr + at, total, mask=exists)
    tl.store(share_ptr + M * E + m, mass, mask=m < M)


@triton.jit
def query_weights(q, w, bias, whole, PRECISION: tl.constexpr):
    """``[N, M]`` features of queries over their denominators."""
    logits = tl.dot(q, tl.trans(w), input_precision=PRECISION) + bias[None, :]
    return tl.exp2(logits - whole[:, None]).to(q.dtype)


@launched
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, kept_ptr, offset_ptr,
    state_ptr, weight_ptr, after_ptr, weight_after_ptr, dout_ptr, slope_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    HKV, G, N, KEYROWS, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr,
    OFFSET: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of one split of the keys of one key head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)
    # of its first query head
    q_ptr, q_n = begin(q_ptr, b, head * G, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head * G, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    step_q, step_dout = q_h // UNIT * UNIT, dout_h // UNIT * UNIT
    dk_n, dv_n = HKV * D, HKV * E
    sample = first if PACKED else b * N
    dk_ptr += sample * dk_n.to(tl.int64) + head * D
    dv_ptr += sample * dv_n.to(tl.int64) + head * E
    length = N.to(tl.int64)
    slope_ptr += KEYROWS.to(tl.int64) * M
    slope_ptr += 2 * (head * G * length + first if PACKED else row_id * G * length)
    if OFFSET:
        offset_ptr += head * OWN * M
    kept_ptr += row_id * M
    table_ptr += row_id * (M * (D + E))
    split = row_id * tl.num_programs(1) + tl.program_id(1)
    after_ptr += split * M * E
    weight_after_ptr += split * M

    i = tl.arange(0, CHUNK)
    future = i[None, :] >= i[:, None]  # [key, query]
    for start in range(low, behind_first(low, high), CHUNK):
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        half = half_square(k, curvature)
        narrow = k.to(DOT)
        there = tl.where(start < high, start, 0)  # an empty split reads nothing out of bounds
        here = (state_at(b, there, first, N, CHUNK, PACKED) * HKV + head) * M

        dv = tl.zeros((CHUNK, BLOCK_E), tl.float32)
        for g in range(0, G):
            q = tile(q_ptr + g * step_q, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
            whole, _ = pairs(slope_ptr + 2 * g * length, n, high)
            scores = tl.zeros((CHUNK, CHUNK), tl.float32)
            for start_m in range(0, M, BLOCK_M):
                w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
                bias = sums(kept_ptr, start_m, offset_ptr, OFFSET, M, BLOCK_M)
                shift = shifts(kept_ptr, start_m, M, BLOCK_M)
                keys = tl.exp2(key_logits(narrow, w, shift, half, keep, PRECISION)).to(DOT)
                weights = query_weights(q, w, bias, whole, PRECISION)
                scores = tl.dot(keys, tl.trans(weights), scores, input_precision=PRECISION)
            dout = tile(dout_ptr + g * step_dout, start, dout_n, n < high, E, BLOCK_E).to(DOT)
            scores = tl.where(future, scores, 0.0).to(DOT)  # [N, N]
            dv = tl.dot(scores, dout, dv, input_precision=PRECISION)

        dk = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        along = tl.zeros((CHUNK,), tl.float32)
        for start_m in range(0, M, BLOCK_M):
            m = start_m + tl.arange(0, BLOCK_M)
            w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
            bias = sums(kept_ptr, start_m, offset_ptr, OFFSET, M, BLOCK_M)
            shift = shifts(kept_ptr, start_m, M, BLOCK_M)
            state = rows(state_ptr + here * E, start_m, M, E, BLOCK_M, BLOCK_E)  # [M, E] = dS
            after = rows(after_ptr, start_m, M, E, BLOCK_M, BLOCK_E)
            weight = tl.load(weight_ptr + here + m, mask=m < M, other=0.0)
            weight += tl.load(weight_after_ptr + m, mask=m < M, other=0.0)
            logits = key_logits(narrow, w, shift, half, keep, PRECISION)
            moves = (logits > LEAST) & (logits < MOST)  # at its bounds a feature has no slope
            keys = tl.exp2(logits)  # [N, M]
            dv = tl.dot(keys.to(DOT), state, dv, input_precision=PRECISION)
            dv = tl.dot(keys.to(DOT), after, dv, input_precision=PRECISION)
            slopes = tl.dot(v, tl.trans(state), input_precision=PRECISION) - weight[None, :]
            slopes = tl.dot(v, tl.trans(after), slopes, input_precision=PRECISION)  # [N, M]
            for g in range(0, G):
                q = tile(q_ptr + g * step_q, start, q_n, n < high, D, BLOCK_D).to(DOT)
                dout = tile(dout_ptr + g * step_dout, start, dout_n, n < high, E, BLOCK_E).to(DOT)
                whole, delta = pairs(slope_ptr + 2 * g * length, n, high)
                weights = query_weights(q, w, bias, whole, PRECISION)
                dscores = tl.dot(v, tl.trans(dout), input_precision=PRECISION) - delta[None, :]
                dscores = tl.where(future, dscores, 0.0).to(DOT)
                slopes = tl.dot(dscores, weights, slopes, input_precision=PRECISION)
            slopes = tl.where(moves, slopes * keys, 0.0)
            along += tl.sum(slopes, 1)
            dk = tl.dot(slopes.to(DOT), w, dk, input_precision=PRECISION)
        dk = dk * LN2 - k.to(tl.float32) * (curvature * along)[:, None]
        put(dk_ptr, start, dk_n, n < high, tl.where(keep[:, None], dk, 0.0), D, BLOCK_D)
        put(dv_ptr, start, dv_n, n < high, tl.where(keep[:, None], dv, 0.0), E, BLOCK_E)
