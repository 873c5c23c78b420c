"""Linear attention, forward: two kernels for both forms, causal or not.

    sum_keys       per split of the keys: S = sum of φ(k) ⊗ v and z = sum of φ(k)
    attend         per split of the queries: out = φ(q)·S / φ(q)·z

No atomics: a split writes its share, and who needs the sum adds the shares in their order. Where
attention is causal, a split sums the shares before it and carries them along its chunks. Features
and denominators live in registers only.

Letters and layouts: see ``linear_attention_parts``.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import (
    begin,
    count_rows,
    inside,
    key_features,
    launched,
    put,
    put_share,
    put_state,
    query_features,
    rescale,
    rows_after,
    span,
    sums_before,
    tile,
    visible,
    weigh,
)


@launched
def sum_keys_kernel(
    k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr,  # (B, HKV, N, D), (B, HKV, N, E), (B, N), ...
    k_b, k_h, k_n, v_b, v_h, v_n,
    HKV, N,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MAP: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One program sums one split of the keys of one key head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)

    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    for start in range(low, high, BLOCK_N):
        keep = visible(mask_ptr, start + tl.arange(0, BLOCK_N), high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(tl.float32)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        if MAP == "exp":
            largest = tl.max(tl.where(inside(keep, D, BLOCK_D), k, -float("inf")), 0)
            new = tl.maximum(shift, largest)
            scale = rescale(shift, new)
            total *= scale[None, :]
            sums *= scale[None, :]
            shift = new
        finite = tl.where(shift == -float("inf"), 0.0, shift)
        features = key_features(k, finite, keep, MAP, D, BLOCK_D)
        total = tl.dot(tl.trans(v), features.to(DOT), total, input_precision=PRECISION)
        sums += features

    share_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * (D * E + 2 * D)
    put_share(share_ptr, total, tl.sum(sums, 0), D, E, BLOCK_D, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    tl.store(share_ptr + D * E + D + d, shift, mask=d < D)


@triton.jit
def causal_chunks(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, den_ptr, q_n, k_n, v_n, out_n, low, high, total, mass,
    CLEAN: tl.constexpr, MAP: tl.constexpr, MASKED: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Walk the chunks of a split, from S and z before it; return S and z after it.

    In a product a NaN or an infinity of v would reach earlier rows of its chunk (0 · NaN is NaN).
    CLEAN keeps it out of the products and sets the rows that may see it to NaN.
    """
    shift = tl.zeros((BLOCK_D,), tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32) + mass[None, :]
    i = tl.arange(0, BLOCK_N)
    past = i[:, None] >= i[None, :]
    for start in range(low, high, BLOCK_N):
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(tl.float32)  # [N, D]
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(tl.float32)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E)  # [N, E]
        if CLEAN:
            wrong = tl.where(v.to(tl.float32) * 0.0 == 0.0, 0, 1)
            v = tl.where(wrong == 0, v, 0.0)
            reached = tl.max(tl.where(past, tl.max(wrong, 1)[None, :], 0), 1)
        v = v.to(DOT)
        features, _ = query_features(q, shift, MAP, D, BLOCK_D)
        queries = features.to(DOT)
        keys = key_features(k, shift, keep, MAP, D, BLOCK_D).to(DOT)
        if NORMALIZE:
            den = weigh(queries, sums, PRECISION)
        sums = count_rows(keys, sums, PRECISION)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(past, scores, 0.0)
        num = tl.dot(queries, tl.trans(total.to(DOT)), input_precision=PRECISION)  # earlier chunks
        num = tl.dot(scores.to(DOT), v, num, input_precision=PRECISION)
        if NORMALIZE:
            den += tl.sum(scores, 1)
            num = num / tl.where(den == 0, 1.0, den)[:, None]
            tl.store(den_ptr + n, den, mask=n < high)
        if CLEAN:
            num = tl.where(reached[:, None] > 0, float("nan"), num)
        put(out_ptr, start, out_n, n < high, num, E, BLOCK_E)
        total = tl.dot(tl.trans(v), keys, total, input_precision=PRECISION)
        if CLEAN:
            total = tl.where(tl.max(reached, 0) > 0, float("nan"), total)
    return total, tl.max(sums, 0)


@launched
def attend_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, out_ptr,
    start_kv_ptr, start_z_ptr, final_kv_ptr, final_z_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, G, N, SHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One program answers one split of the queries of one head.

    N is the number of queries; where attention is causal, of keys as well. The denominators go
    behind the shares, (B, H, N), for the backward pass.
    """
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    kv_head, kv_row = head // G, b * (H // G) + head // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    out_n = H.to(tl.int64) * E
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    out_ptr, out_n = begin(out_ptr, b, head, first, N * out_n, E, out_n, 1, PACKED)
    den_ptr = rows_after(
        share_ptr, tl.num_programs(0) // G * SHARES, row_id, head, first, N, D, E, PACKED
    )
    share_ptr += kv_row * SHARES * (D * E + 2 * D)
    count = tl.program_id(1) if CAUSAL else SHARES
    total, mass, shift = sums_before(
        share_ptr, count, start_kv_ptr, start_z_ptr, kv_row, STATE, MAP, D, E, BLOCK_D, BLOCK_E
    )

    if CAUSAL:
        if MASKED:
            mask_ptr += first if PACKED else b * N
        k_ptr, k_n = begin(k_ptr, b, kv_head, first, k_b, k_h, k_n, UNIT, PACKED)
        v_ptr, v_n = begin(v_ptr, b, kv_head, first, v_b, v_h, v_n, UNIT, PACKED)
        total, mass = causal_chunks(
            q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, den_ptr, q_n, k_n, v_n, out_n, low, high,
            total, mass, False, MAP, MASKED, NORMALIZE, PRECISION, D, E,
            BLOCK_N, BLOCK_D, BLOCK_E, DOT,
        )  # fmt: skip
        damage = tl.sum(total * 0.0)  # NaN if a NaN or an infinity came in
        if damage != damage:
            total, mass, _ = sums_before(
                share_ptr, count, start_kv_ptr, start_z_ptr, kv_row,
                STATE, MAP, D, E, BLOCK_D, BLOCK_E,
            )  # fmt: skip
            total, mass = causal_chunks(
                q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, den_ptr, q_n, k_n, v_n, out_n, low, high,
                total, mass, True, MAP, MASKED, NORMALIZE, PRECISION, D, E,
                BLOCK_N, BLOCK_D, BLOCK_E, DOT,
            )  # fmt: skip
        if STATE:  # the last split holds the final state; of a key head, its first query head
            if (tl.program_id(1) == tl.num_programs(1) - 1) & (head % G == 0):
                put_state(final_kv_ptr, final_z_ptr, kv_row, total, mass, D, E, BLOCK_D, BLOCK_E)
    else:
        weights = tl.trans(total.to(DOT))
        sums = tl.zeros((16, BLOCK_D), tl.float32) + mass[None, :]
        for start in range(low, high, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(tl.float32)  # [N, D]
            features, top = query_features(q, shift, MAP, D, BLOCK_D)
            queries = features.to(DOT)
            num = tl.dot(queries, weights, input_precision=PRECISION)
            if NORMALIZE:
                den = weigh(queries, sums, PRECISION)
                num = num / tl.where(den == 0, 1.0, den)[:, None]
                tl.store(den_ptr + n, den, mask=n < high)
            elif MAP == "exp":  # in two halves: exp(top) alone overflows before the product does
                half = tl.exp(tl.minimum(top / 2, 88.0))
                num = num * half[:, None] * half[:, None]
            put(out_ptr, start, out_n, n < high, num, E, BLOCK_E)
