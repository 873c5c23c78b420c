"""FAVOR+ where row i sees keys 0 to i, backward; the kernels are told of in ``favor_causal``."""

import triton
import triton.language as tl

from fastattn.kernels.favor import put_sums, rounded, rows
from fastattn.kernels.favor_backward import unit
from fastattn.kernels.favor_causal import (
    LEAST,
    MOST,
    factors,
    halves,
    key_features,
    of_queries,
    put_sixteen,
    put_thirds,
    query_logits,
    sixteen,
    split_at,
    state_at,
    thirds_of,
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

LEAST_FEATURE = tl.constexpr(2.0**LEAST.value)
MOST_FEATURE = tl.constexpr(2.0**MOST.value)


@triton.jit
def over(whole):
    """``[N]``: what a query's relu features are multiplied by, 1 over the sum of its weights."""
    j = tl.arange(0, 16)[None, :]
    return tl.sum(tl.where(j < 3, whole.to(tl.float32), 0.0), 1)


@triton.jit
def column(ptr, n, high):
    """``[N, 1]``: loaded once, where a vector is by every thread that needs it."""
    return tl.load(ptr + n[:, None], mask=(n < high)[:, None], other=0.0)


@launched
def lift_queries_kernel(
    out_ptr, dout_ptr, row_ptr, delta_ptr, whole_ptr, minus_ptr,
    dout_b, dout_h, dout_n,
    H, N,
    UNIT: tl.constexpr, E: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: δ = dout·out of BLOCK_N queries of one head; it and their log-sums, lifted."""
    blocks = tl.cdiv(N, BLOCK_N)
    row_id = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_N
    b, head = row_id // H, row_id % H
    dout_ptr, dout_n = begin(dout_ptr, b, head, 0, dout_b, dout_h, dout_n, UNIT, False)
    out_n = H.to(tl.int64) * E
    out_ptr += b * N * out_n + head * E
    n = start + tl.arange(0, BLOCK_N)
    dout = tile(dout_ptr, start, dout_n, n < N, E, BLOCK_E).to(tl.float32)
    out = tile(out_ptr, start, out_n, n < N, E, BLOCK_E).to(tl.float32)
    delta = tl.sum(dout * out, 1)
    behind = row_id * N
    whole = tl.load(row_ptr + behind + n, mask=n < N, other=float("inf"))
    tl.store(delta_ptr + behind + n, delta, mask=n < N)
    put_sixteen(whole_ptr + behind * 16, start, N, of_queries(whole, DOT))
    put_sixteen(minus_ptr + behind * 16, start, N, factors(-delta, DOT))


@launched
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, lifted_ptr, half_ptr,
    state_ptr, weight_ptr, before_ptr, weight_before_ptr, dout_ptr, delta_ptr, whole_ptr, minus_ptr,
    dq_ptr, share_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    H, G, N, SPLITS,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, RELU: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, BEFORE: tl.constexpr,
    LEARNED: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: dq of one split of the queries of one head.

    LEARNED, their share of the gradients of BLOCK_M directions and offsets.
    """
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
    dq_n = H.to(tl.int64) * D
    if not LEARNED:
        dq_ptr += (first if PACKED else b * N) * dq_n + head * D
    behind = head * N + first if PACKED else row_id * N
    delta_ptr += behind
    whole_ptr += 16 * behind
    minus_ptr += 16 * behind
    half_ptr += 16 * (key_head * N + first if PACKED else key_row * N)
    table_ptr += key_row * (M * D)
    lifted_ptr += key_row * (M * 16)

    i = tl.arange(0, CHUNK)
    past = i[:, None] >= i[None, :]
    first_m, last_m = 0, M
    if LEARNED:
        first_m = tl.program_id(2) * BLOCK_M
        last_m = first_m + BLOCK_M
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(low, behind_first(low, high), CHUNK):
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(DOT)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E).to(DOT)  # [N, E]
        half, whole = sixteen(half_ptr, start, high, CHUNK), sixteen(whole_ptr, start, high, CHUNK)
        minus = sixteen(minus_ptr, start, high, CHUNK)
        delta = tl.sum(column(delta_ptr, n, high), 1)
        dscores = tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None]
        dscores = tl.where(past, dscores, 0.0).to(DOT)  # [N, N]
        there = tl.where(start < high, start, 0)  # an empty split reads nothing out of bounds
        here = state_at(b, there, first, N, CHUNK, PACKED) * HKV + key_head
        if BEFORE:
            split = key_row * SPLITS + split_at(cu_ptr, b, there, N, SPLITS, PACKED)
        dq = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        for start_m in range(first_m, last_m, BLOCK_M):
            w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
            lifted = rows(lifted_ptr, start_m, M, 16, BLOCK_M, 16)  # [M, 16]
            state = rows(state_ptr + here * (M * E), start_m, M, E, BLOCK_M, BLOCK_E)  # [M, E]
            weight = thirds_of(weight_ptr + here * (3 * M), start_m, True, M, BLOCK_M)  # [16, M]
            slopes = tl.dot(dout, tl.trans(state), input_precision=PRECISION)  # [N, M]
            slopes = tl.dot(minus, weight, slopes, input_precision=PRECISION)
            if BEFORE:
                state = rows(before_ptr + split * (M * E), start_m, M, E, BLOCK_M, BLOCK_E)
                weight = thirds_of(weight_before_ptr + split * (3 * M), start_m, True, M, BLOCK_M)
                slopes = tl.dot(dout, tl.trans(state), slopes, input_precision=PRECISION)
                slopes = tl.dot(minus, weight, slopes, input_precision=PRECISION)
            keys = key_features(k, half, w, lifted, keep, RELU, MASKED, PRECISION)
            keys = rounded(keys, PRECISION, DOT)
            slopes = tl.dot(dscores, keys, slopes, input_precision=PRECISION)
            logits = query_logits(q, whole, w, lifted, start_m, RELU, M, BLOCK_M, PRECISION)
            if RELU:
                slopes = tl.where(logits <= 0, 0.0, slopes * over(whole)[:, None])
            else:
                slopes *= tl.exp2(logits)
            if LEARNED:  # behind the end there may be no state
                slopes = tl.where((n < high)[:, None], slopes, 0.0)
                mass += tl.sum(slopes, 0)
                slopes = tl.trans(slopes.to(DOT))
                total = tl.dot(slopes, q, total, input_precision=PRECISION)
            else:
                dq = tl.dot(slopes.to(DOT), w, dq, input_precision=PRECISION)
        if not LEARNED:
            put(dq_ptr, start, dq_n, n < high, dq * unit(RELU), D, BLOCK_D)
    if LEARNED:
        share = row_id * tl.num_programs(1) + tl.program_id(1)
        put_sums(share_ptr + share * (M * (D + 1)), first_m, total, mass, M, D, BLOCK_M, BLOCK_D)


@launched
def dstates_kernel(
    q_ptr, cu_ptr, table_ptr, lifted_ptr, dout_ptr, delta_ptr, whole_ptr,
    share_ptr, state_ptr, weight_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    H, G, N,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, RELU: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M features, one split of the queries of one head: dS and t after every
    chunk, of that split alone, and its share."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row = row_id // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    behind = head * N + first if PACKED else row_id * N
    delta_ptr += behind
    whole_ptr += 16 * behind
    start_m = tl.program_id(2) * BLOCK_M
    w = rows(table_ptr + key_row * (M * D), start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
    lifted = rows(lifted_ptr + key_row * (M * 16), start_m, M, 16, BLOCK_M, 16)  # [M, 16]
    m, e = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    at = m[:, None] * E + e[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    i = tl.arange(0, 2 * CHUNK)
    last = tl.cdiv(high - low, 2 * CHUNK) - 1
    ahead = column(delta_ptr, low + tl.maximum(last, 0) * 2 * CHUNK + i, high)
    for turn in range(0, behind_first(0, last + 1)):
        start = low + tl.maximum(last - turn, 0) * 2 * CHUNK
        q = tile(q_ptr, start, q_n, start + i < high, D, BLOCK_D).to(DOT)  # [2 N, D]
        whole = sixteen(whole_ptr, start, high, 2 * CHUNK)
        delta = tl.sum(ahead, 1)
        # for the next turn, and here: its latency is longer than what follows the last product
        ahead = column(delta_ptr, low + tl.maximum(last - turn - 1, 0) * 2 * CHUNK + i, high)
        logits = tl.dot(w, tl.trans(q), input_precision=PRECISION)  # [M, 2 N]
        if RELU:
            weights = tl.where(logits <= 0, 0.0, logits * over(whole)[None, :])
        else:
            logits = tl.dot(lifted, tl.trans(whole), logits, input_precision=PRECISION)
            weights = tl.exp2(logits)
        pair, deltas = halves(weights), halves(weights * delta[None, :])
        for back in tl.static_range(2):
            begins = start + (1 - back) * CHUNK
            here = state_at(b, begins, first, N, CHUNK, PACKED) * H + head
            now = rounded(total, PRECISION, DOT)
            tl.store(state_ptr + here * (M * E) + at, now, mask=exists & (begins < high))
            put_thirds(weight_ptr + here * (3 * M), start_m, mass, begins < high, M, BLOCK_M)
            n = begins + tl.arange(0, CHUNK)
            dout = tile(dout_ptr, begins, dout_n, n < high, E, BLOCK_E).to(DOT)  # [N, E]
            mass += tl.sum(deltas[1 - back], 1)
            narrow = rounded(pair[1 - back], PRECISION, DOT)
            total = tl.dot(narrow, dout, total, input_precision=PRECISION)

    share = row_id * tl.num_programs(1) + tl.program_id(1)
    put_sums(share_ptr + share * (M * (E + 1)), start_m, total, mass, M, E, BLOCK_M, BLOCK_E)


@launched
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, lifted_ptr, half_ptr,
    state_ptr, weight_ptr, after_ptr, weight_after_ptr, dout_ptr, delta_ptr, whole_ptr,
    dk_ptr, dv_ptr, share_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    H, G, N, SPLITS, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, RELU: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, BEFORE: tl.constexpr,
    LEARNED: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: what one head adds to dk and dv of one split of its keys.

    LEARNED, its share of the gradient of BLOCK_M directions.
    """
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row, key_head = row_id // G, head // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    k_ptr, k_n = begin(k_ptr, b, key_head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, key_head, first, v_b, v_h, v_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    dk_n, dv_n = H.to(tl.int64) * D, H.to(tl.int64) * E
    if not LEARNED:
        sample = first if PACKED else b * N
        dk_ptr += sample * dk_n + head * D
        dv_ptr += sample * dv_n + head * E
    behind = head * N + first if PACKED else row_id * N
    delta_ptr += behind
    whole_ptr += 16 * behind
    half_ptr += 16 * (key_head * N + first if PACKED else key_row * N)
    table_ptr += key_row * (M * D)
    lifted_ptr += key_row * (M * 16)

    i = tl.arange(0, CHUNK)
    future = i[None, :] >= i[:, None]  # [key, query]
    minus = tl.arange(0, 16)[None, :] + tl.zeros((CHUNK, 1), tl.int32)
    minus = tl.where(minus < 3, -1.0, 0.0).to(DOT)  # times thirds, what is in thirds, negative
    first_m, last_m = 0, M
    if LEARNED:
        first_m = tl.program_id(2) * BLOCK_M
        last_m = first_m + BLOCK_M
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(low, behind_first(low, high), CHUNK):
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E).to(DOT)  # [N, E]
        half, whole = sixteen(half_ptr, start, high, CHUNK), sixteen(whole_ptr, start, high, CHUNK)
        delta = tl.sum(column(delta_ptr, n, high), 1)
        narrow = k.to(DOT)
        dscores = tl.dot(v, tl.trans(dout), input_precision=PRECISION) - delta[None, :]
        dscores = tl.where(future, dscores, 0.0).to(DOT)  # [N, N]
        there = tl.where(start < high, start, 0)  # an empty split reads nothing out of bounds
        here = state_at(b, there, first, N, CHUNK, PACKED) * H + head
        if BEFORE:
            split = row_id * SPLITS + split_at(cu_ptr, b, there, N, SPLITS, PACKED)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        dv = tl.zeros((CHUNK, BLOCK_E), tl.float32)
        dk = tl.zeros((CHUNK, BLOCK_D), tl.float32)
        along = tl.zeros((CHUNK,), tl.float32)
        for start_m in range(first_m, last_m, BLOCK_M):
            w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
            lifted = rows(lifted_ptr, start_m, M, 16, BLOCK_M, 16)  # [M, 16]
            state = rows(state_ptr + here * (M * E), start_m, M, E, BLOCK_M, BLOCK_E)  # dS [M, E]
            weight = thirds_of(weight_ptr + here * (3 * M), start_m, False, M, BLOCK_M)  # [16, M]
            weights = query_logits(q, whole, w, lifted, start_m, RELU, M, BLOCK_M, PRECISION)
            if RELU:
                weights = tl.where(weights <= 0, 0.0, weights * over(whole)[:, None])
            else:
                weights = tl.exp2(weights)
            weights = rounded(weights, PRECISION, DOT)  # [N, M]
            slopes = tl.dot(v, tl.trans(state), input_precision=PRECISION)  # [N, M]
            slopes = tl.dot(minus, weight, slopes, input_precision=PRECISION)
            slopes = tl.dot(dscores, weights, slopes, input_precision=PRECISION)
            keys = key_features(narrow, half, w, lifted, keep, RELU, MASKED, PRECISION)  # [N, M]
            narrow_keys = rounded(keys, PRECISION, DOT)
            dv = tl.dot(narrow_keys, state, dv, input_precision=PRECISION)
            if BEFORE:
                state = rows(after_ptr + split * (M * E), start_m, M, E, BLOCK_M, BLOCK_E)
                weight = thirds_of(weight_after_ptr + split * (3 * M), start_m, False, M, BLOCK_M)
                slopes = tl.dot(v, tl.trans(state), slopes, input_precision=PRECISION)
                slopes = tl.dot(minus, weight, slopes, input_precision=PRECISION)
                dv = tl.dot(narrow_keys, state, dv, input_precision=PRECISION)
            scores = tl.dot(narrow_keys, tl.trans(weights), scores, input_precision=PRECISION)
            if RELU:
                slopes = tl.where(keys <= 0, 0.0, slopes)
            else:
                moves = (keys > LEAST_FEATURE) & (keys < MOST_FEATURE)  # no slope at its bounds
                slopes = tl.where(moves, slopes * keys, 0.0)
                along += tl.sum(slopes, 1)
            if LEARNED:  # behind the end there may be no state
                slopes = tl.trans(tl.where((n < high)[:, None], slopes, 0.0).to(DOT))
                total = tl.dot(slopes, narrow, total, input_precision=PRECISION)
            else:
                dk = tl.dot(slopes.to(DOT), w, dk, input_precision=PRECISION)
        if not LEARNED:
            scores = tl.where(future, scores, 0.0).to(DOT)  # [N, N]
            dv = tl.dot(scores, dout, dv, input_precision=PRECISION)
            dk = dk * unit(RELU) - k.to(tl.float32) * (curvature * along)[:, None]
            put(dk_ptr, start, dk_n, n < high, tl.where(keep[:, None], dk, 0.0), D, BLOCK_D)
            put(dv_ptr, start, dv_n, n < high, tl.where(keep[:, None], dv, 0.0), E, BLOCK_E)
    if LEARNED:
        share = row_id * tl.num_programs(1) + tl.program_id(1)
        put_sums(share_ptr + share * (M * (D + 1)), first_m, total, mass, M, D, BLOCK_M, BLOCK_D)
