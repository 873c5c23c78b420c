"""Block-sparse attention, backward; letters, tables and the way of a part are in ``block_sparse``.

    grad_queries   as attend: dq of a part, and δ = dout·out of its rows
    grad_keys      a tile of keys meets the blocks of queries that see it: dk and dv of a part
    add            adds the parts of a row, or of a column, that was cut, in their order

With p the weights and dp = dout·v, a logit's gradient is p (dp - δ). Nothing is added atomically:
dk and dv are made from lists by column.
"""

import triton.language as tl

from fastattn.kernels.block_sparse import (
    add_keys,
    entry_at,
    get_part,
    part_at,
    pattern,
    program,
    put_part,
    seen_keys,
    stays,
    words_at,
)
from fastattn.kernels.linear_attention_parts import begin, behind_first, launched, put, tile


@launched
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, words_ptr, lens_ptr, seed_ptr, blocks_ptr, weight_ptr, items_ptr,
    out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, share_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    H, G, N, S, PADDED, WORDS, ITEMS, PLANE, ROOM, TABLE_B, TABLE_H, SHARES, THRESHOLD,
    scale, slope, keep_scale,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr,
    MASKED: tl.constexpr, LENGTHS: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPS: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = SIZE // BLOCK_Q
    SUBS_K: tl.constexpr = SIZE // BLOCK_K
    row_id, item, sub = program(ITEMS, SUBS)
    b, head = row_id // H, row_id % H
    which = pattern(b, head, TABLE_B, TABLE_H)
    row, first, count, slot = part_at(items_ptr, which, item, ITEMS, PLANE)
    blocks_ptr += which * ROOM + first
    if WEIGHTED:
        weight_ptr += which * ROOM + first
    if MASKED:
        words_ptr += b * WORDS
    q_ptr, q_n = begin(q_ptr, b, head, 0, q_b, q_h, q_n, UNIT, False)
    k_ptr, k_n = begin(k_ptr, b, head // G, 0, k_b, k_h, k_n, UNIT, False)
    v_ptr, v_n = begin(v_ptr, b, head // G, 0, v_b, v_h, v_n, UNIT, False)
    dout_ptr, dout_n = begin(dout_ptr, b, head, 0, dout_b, dout_h, dout_n, UNIT, False)
    out_n, dq_n = H.to(tl.int64) * E, H.to(tl.int64) * D
    out_ptr += b * N * out_n + head * E
    dq_ptr += b * N * dq_n + head * D
    start = row * SIZE + sub * BLOCK_Q
    i = start + tl.arange(0, BLOCK_Q)
    end = N
    if LENGTHS:
        end = tl.load(lens_ptr + b)
    inner = (i < N) & (i < end)
    q = tile(q_ptr, start, q_n, inner, D, BLOCK_D).to(DOT)  # [Q, D]
    dout = tile(dout_ptr, start, dout_n, inner, E, BLOCK_E)  # [Q, E]
    out = tile(out_ptr, start, out_n, inner, E, BLOCK_E)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    dout = dout.to(DOT)
    whole = tl.load(lse_ptr + row_id * PADDED + i, mask=i < PADDED, other=float("inf"))
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    total = count * SUBS_K
    block, weight = entry_at(blocks_ptr, weight_ptr, 0, count, WEIGHTED)
    low, high = words_at(words_ptr, block, 0, 0 < total, SIZE, BLOCK_K, MASKED)
    coming, its_weight = entry_at(blocks_ptr, weight_ptr, 1 // SUBS_K, count, WEIGHTED)
    for turn in range(0, behind_first(0, total)):
        start_j = block * SIZE + turn % SUBS_K * BLOCK_K
        j = start_j + tl.arange(0, BLOCK_K)
        keep = seen_keys(low, high, j, S, BLOCK_K, MASKED)
        k = tile(k_ptr, start_j, k_n, keep, D, BLOCK_D, FULL).to(DOT)  # [K, D]
        v = tile(v_ptr, start_j, v_n, keep, E, BLOCK_E, FULL).to(DOT)  # [K, E]
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [Q, K]
        logits = add_keys(logits, scale, weight, keep, i, j, FULL, MASKED, CAUSAL)
        if FULL and not CAUSAL:
            logits = logits * scale
        weights = tl.exp2(logits - whole[:, None])
        slopes = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if DROPS:
            stay = stays(seed_ptr, b, head, start, start_j, THRESHOLD, BLOCK_Q, BLOCK_K)
            slopes = tl.where(stay, slopes * keep_scale, 0.0)
        slopes = weights * (slopes - delta[:, None])
        dq = tl.dot(slopes.to(DOT), k, dq, input_precision=PRECISION)
        block, weight = tl.maximum(coming, 0), its_weight
        low, high = words_at(
            words_ptr, block, (turn + 1) % SUBS_K, turn + 1 < total, SIZE, BLOCK_K, MASKED
        )
        coming, its_weight = entry_at(blocks_ptr, weight_ptr, (turn + 2) // SUBS_K, count, WEIGHTED)
    dq = tl.where((whole == float("inf"))[:, None], 0.0, dq)  # what sees nothing, NaN or not
    if slot < 0:
        put(dq_ptr, start, dq_n, i < N, dq * slope, D, BLOCK_D)
    else:
        share_ptr += (row_id * SHARES + slot) * (SIZE * D)
        put_part(share_ptr, dq, 0, sub, BLOCK_Q, D, BLOCK_D, D)
    leads = tl.load(items_ptr + 4 * tl.cast(PLANE, tl.int64) + which * ITEMS + item) != 0
    tl.store(delta_ptr + row_id * PADDED + i, delta, mask=(i < PADDED) & leads)


@launched
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, words_ptr, lens_ptr, seed_ptr, blocks_ptr, weight_ptr, items_ptr,
    dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, share_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    H, G, N, S, PADDED, WORDS, ITEMS, PLANE, ROOM, TABLE_B, TABLE_H, SHARES, THRESHOLD,
    scale, slope, keep_scale,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr,
    MASKED: tl.constexpr, LENGTHS: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPS: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dk and dv of what one query head adds; tables are by column."""
    SUBS: tl.constexpr = SIZE // BLOCK_K
    SUBS_Q: tl.constexpr = SIZE // BLOCK_Q
    row_id, item, sub = program(ITEMS, SUBS)
    b, head = row_id // H, row_id % H
    which = pattern(b, head, TABLE_B, TABLE_H)
    column, first, count, slot = part_at(items_ptr, which, item, ITEMS, PLANE)
    blocks_ptr += which * ROOM + first
    if WEIGHTED:
        weight_ptr += which * ROOM + first
    if MASKED:
        words_ptr += b * WORDS
    q_ptr, q_n = begin(q_ptr, b, head, 0, q_b, q_h, q_n, UNIT, False)
    k_ptr, k_n = begin(k_ptr, b, head // G, 0, k_b, k_h, k_n, UNIT, False)
    v_ptr, v_n = begin(v_ptr, b, head // G, 0, v_b, v_h, v_n, UNIT, False)
    dout_ptr, dout_n = begin(dout_ptr, b, head, 0, dout_b, dout_h, dout_n, UNIT, False)
    dk_n, dv_n = H.to(tl.int64) * D, H.to(tl.int64) * E
    dk_ptr += b * S * dk_n + head * D
    dv_ptr += b * S * dv_n + head * E
    start = column * SIZE + sub * BLOCK_K
    j = start + tl.arange(0, BLOCK_K)
    low, high = words_at(words_ptr, column, sub, start < S, SIZE, BLOCK_K, MASKED)
    keep = seen_keys(low, high, j, S, BLOCK_K, MASKED)
    end = N
    if LENGTHS:
        end = tl.load(lens_ptr + b)
    k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(DOT)  # [K, D]
    v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [K, E]
    lse_ptr += row_id * PADDED
    delta_ptr += row_id * PADDED
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_E), tl.float32)
    block, weight = entry_at(blocks_ptr, weight_ptr, 0, count, WEIGHTED)
    for turn in range(0, behind_first(0, count * SUBS_Q)):
        start_i = block * SIZE + turn % SUBS_Q * BLOCK_Q
        i = start_i + tl.arange(0, BLOCK_Q)
        inner = i < tl.minimum(N, end)
        q = tile(q_ptr, start_i, q_n, inner, D, BLOCK_D, FULL).to(DOT)  # [Q, D]
        dout = tile(dout_ptr, start_i, dout_n, inner, E, BLOCK_E, FULL).to(DOT)  # [Q, E]
        whole, delta = tl.load(lse_ptr + i), tl.load(delta_ptr + i)
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [K, Q]
        logits = logits * scale
        if WEIGHTED:
            logits += weight
        if CAUSAL:
            logits = tl.where(i[None, :] >= j[:, None], logits, -float("inf"))
        weights = tl.exp2(logits - whole[None, :])
        slopes = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [K, Q]
        if DROPS:
            stay = stays(seed_ptr, b, head, start_i, start, THRESHOLD, BLOCK_Q, BLOCK_K)
            stay = tl.trans(stay)
            slopes = tl.where(stay, slopes * keep_scale, 0.0)
            left = tl.where(stay, weights * keep_scale, 0.0)
        else:
            left = weights
        dv = tl.dot(left.to(DOT), dout, dv, input_precision=PRECISION)
        slopes = weights * (slopes - delta[None, :])
        dk = tl.dot(slopes.to(DOT), q, dk, input_precision=PRECISION)
        block, weight = entry_at(blocks_ptr, weight_ptr, (turn + 1) // SUBS_Q, count, WEIGHTED)
    real = (keep & (count > 0))[:, None]  # what is in rows of keys that nobody sees is anything
    dk, dv = tl.where(real, dk, 0.0), tl.where(real, dv, 0.0)
    if slot < 0:
        put(dk_ptr, start, dk_n, j < S, dk * slope, D, BLOCK_D)
        put(dv_ptr, start, dv_n, j < S, dv, E, BLOCK_E)
    else:
        share_ptr += (row_id * SHARES + slot) * (SIZE * (D + E))
        put_part(share_ptr, dk, 0, sub, BLOCK_K, D, BLOCK_D, D + E)
        put_part(share_ptr, dv, D, sub, BLOCK_K, E, BLOCK_E, D + E)


@launched
def add_kernel(
    share_ptr, merges_ptr, one_ptr, two_ptr,
    H, N, ITEMS, PLANE, TABLE_B, TABLE_H, SHARES,
    slope,
    D: tl.constexpr, E: tl.constexpr, BOTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Of N rows, those that were cut: dq; or dk, and BOTH it and dv, which stand side by side."""
    SUBS: tl.constexpr = SIZE // BLOCK_Q
    EACH: tl.constexpr = D + E if BOTH else D
    row_id, item, sub = program(ITEMS, SUBS)
    b, head = row_id // H, row_id % H
    merges_ptr += pattern(b, head, TABLE_B, TABLE_H) * ITEMS + item
    row, first = tl.load(merges_ptr), tl.load(merges_ptr + PLANE)
    count = tl.load(merges_ptr + 2 * tl.cast(PLANE, tl.int64))
    share_ptr += (row_id * SHARES + first) * (SIZE * EACH)
    start = row * SIZE + sub * BLOCK_Q
    one = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    two = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    for part in tl.range(0, count, loop_unroll_factor=4):
        ptr = share_ptr + part * (SIZE * EACH)
        one += get_part(ptr, 0, sub, BLOCK_Q, D, BLOCK_D, EACH)
        if BOTH:
            two += get_part(ptr, D, sub, BLOCK_Q, E, BLOCK_E, EACH)
    here = start + tl.arange(0, BLOCK_Q) < N
    one_n, two_n = H.to(tl.int64) * D, H.to(tl.int64) * E
    put(one_ptr + b * N * one_n + head * D, start, one_n, here, one * slope, D, BLOCK_D)
    if BOTH:
        put(two_ptr + b * N * two_n + head * E, start, two_n, here, two, E, BLOCK_E)
