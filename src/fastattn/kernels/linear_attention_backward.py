"""Linear attention, backward: three kernels beside the forward ones.

    sum_queries    causal only, per split of the queries: this split's share of dS and dz
    grad_queries   per split of the queries: dq; where not causal, the share of dS and dz as well
    grad_keys      per split of the keys: dk and dv

With g the upstream gradient of a row, f its features and den its denominator, the gradient of its
numerator is g / den, and that of its denominator -g·out / den. All kernels therefore work with
f / den, written ``queries``, with tiles of g as they are, and with ``slope`` = -g·out, one number a
row. Where attention is not causal, g·out is (f / den)·(S g), and no output is read.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import (
    add_shares,
    begin,
    count_rows,
    key_features,
    launched,
    put,
    put_share,
    put_state,
    query_features,
    rows_after,
    span,
    starting_state,
    sums_before,
    tile,
    visible,
)


@triton.jit
def phi_slope(x, features, MAP: tl.constexpr):
    """The derivative of the feature map, from its argument and its value."""
    if MAP == "elu":
        y = tl.where(features > 1, 1.0, features)
    elif MAP == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif MAP == "squared_relu":
        y = tl.where(x <= 0, 0.0, 2 * x)
    elif MAP == "exp":
        y = features
    else:
        y = tl.full(x.shape, 1.0, tl.float32)
    return y


@triton.jit
def inverse(den_ptr, n, high, NORMALIZE: tl.constexpr):
    """``[N]``: 1 over the denominators, and 1 where they are 0 or not used."""
    if NORMALIZE:
        den = tl.load(den_ptr + n, mask=n < high, other=1.0)
        return 1.0 / tl.where(den == 0, 1.0, den)
    return tl.full(n.shape, 1.0, tl.float32)


@triton.jit
def add_rows(x, weight, sums, PRECISION: tl.constexpr):
    """Add the sum over the rows of x ``[N, D]``, each times its weight, to every row of ``sums``.

    In two products, of the weight and of what its rounding lost.
    """
    if x.dtype == tl.float32:
        return sums + tl.sum(x * weight[:, None], 0)[None, :]
    rounded = weight.to(x.dtype)
    lost = (weight - rounded.to(tl.float32)).to(x.dtype)
    zeros = tl.zeros((sums.shape[0], 1), x.dtype)
    sums = tl.dot(zeros + rounded[None, :], x, sums, input_precision=PRECISION)
    return tl.dot(zeros + lost[None, :], x, sums, input_precision=PRECISION)


@launched
def sum_queries_kernel(
    q_ptr, cu_ptr, out_ptr, share_ptr, dout_ptr, dshare_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    H, G, N, SHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MAP: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One split's share of dS and dz; behind all shares, the slopes (B, H, N)."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    first, low, high = span(cu_ptr, b, N, PACKED)
    out_n = H.to(tl.int64) * E
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    out_ptr, out_n = begin(out_ptr, b, head, first, N * out_n, E, out_n, 1, PACKED)
    shares, dshares = tl.num_programs(0) // G * SHARES, tl.num_programs(0) * tl.num_programs(1)
    den_ptr = rows_after(share_ptr, shares, row_id, head, first, N, D, E, PACKED)
    slope_ptr = rows_after(dshare_ptr, dshares, row_id, head, first, N, D, E, PACKED)

    shift = tl.zeros((BLOCK_D,), tl.float32)
    dtotal = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    dsums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(tl.float32)  # [N, D]
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E)  # [N, E]
        features, _ = query_features(q, shift, MAP, D, BLOCK_D)
        scaled = features * inverse(den_ptr, n, high, NORMALIZE)[:, None]
        dtotal = tl.dot(tl.trans(dout.to(DOT)), scaled.to(DOT), dtotal, input_precision=PRECISION)
        if NORMALIZE:
            out = tile(out_ptr, start, out_n, n < high, E, BLOCK_E)
            slope = -tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
            tl.store(slope_ptr + n, slope, mask=n < high)
            dsums += scaled * slope[:, None]

    dshare_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * (D * E + 2 * D)
    put_share(dshare_ptr, dtotal, tl.sum(dsums, 0), D, E, BLOCK_D, BLOCK_E)


@launched
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, dout_ptr,
    start_kv_ptr, start_z_ptr, dq_ptr, dshare_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    H, G, N, SHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """dq of one split of the queries of one head; where not causal, its share of dS and dz."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    kv_head, kv_row = head // G, b * (H // G) + head // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    dq_n = H.to(tl.int64) * D
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    dq_ptr, dq_n = begin(dq_ptr, b, head, first, N * dq_n, D, dq_n, 1, PACKED)
    shares, dshares = tl.num_programs(0) // G * SHARES, tl.num_programs(0) * tl.num_programs(1)
    den_ptr = rows_after(share_ptr, shares, row_id, head, first, N, D, E, PACKED)
    size = D * E + 2 * D

    count = tl.program_id(1) if CAUSAL else SHARES
    total, mass, shift = sums_before(
        share_ptr + kv_row * SHARES * size, count, start_kv_ptr, start_z_ptr, kv_row,
        STATE, MAP, D, E, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    i = tl.arange(0, BLOCK_N)
    if CAUSAL:
        if MASKED:
            mask_ptr += first if PACKED else b * N
        slope_ptr = rows_after(dshare_ptr, dshares, row_id, head, first, N, D, E, PACKED)
        k_ptr, k_n = begin(k_ptr, b, kv_head, first, k_b, k_h, k_n, UNIT, PACKED)
        v_ptr, v_n = begin(v_ptr, b, kv_head, first, v_b, v_h, v_n, UNIT, PACKED)
        sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32) + mass[None, :]  # z in every row
        past = i[:, None] >= i[None, :]
        for start in range(low, high, BLOCK_N):
            n = start + i
            keep = visible(mask_ptr, n, high, MASKED)
            k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(tl.float32)  # [N, D]
            v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
            dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E).to(DOT)  # [N, E]
            keys = key_features(k, shift, keep, MAP, D, BLOCK_D).to(DOT)
            dscores = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            dfeatures = tl.dot(dout, total.to(DOT), input_precision=PRECISION)
            if NORMALIZE:
                slope = tl.load(slope_ptr + n, mask=n < high, other=0.0)
                dscores += slope[:, None]
                dfeatures += slope[:, None] * sums
                sums = count_rows(keys, sums, PRECISION)
            dscores = tl.where(past, dscores, 0.0).to(DOT)
            dfeatures = tl.dot(dscores, keys, dfeatures, input_precision=PRECISION)
            total = tl.dot(tl.trans(v), keys, total, input_precision=PRECISION)
            q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(tl.float32)  # [N, D]
            features, _ = query_features(q, shift, MAP, D, BLOCK_D)
            scale = inverse(den_ptr, n, high, NORMALIZE)
            dq = dfeatures * scale[:, None] * phi_slope(q, features, MAP)
            put(dq_ptr, start, dq_n, n < high, dq, D, BLOCK_D)
    else:
        weights = total.to(DOT)
        dtotal = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
        dsums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(low, high, BLOCK_N):
            n = start + i
            q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(tl.float32)  # [N, D]
            dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E).to(DOT)  # [N, E]
            features, top = query_features(q, shift, MAP, D, BLOCK_D)
            scale = inverse(den_ptr, n, high, NORMALIZE)
            if MAP == "exp" and not NORMALIZE:  # twice the half, as forward
                scale = tl.exp(tl.minimum(top / 2, 88.0))
            scaled = features * scale[:, None]
            if MAP == "exp" and not NORMALIZE:
                scaled *= scale[:, None]
            dfeatures = tl.dot(dout, weights, input_precision=PRECISION)
            if NORMALIZE:
                slope = -tl.sum(scaled * dfeatures, 1)
                dfeatures += slope[:, None] * mass[None, :]
                dsums += scaled * slope[:, None]
            dtotal = tl.dot(tl.trans(dout), scaled.to(DOT), dtotal, input_precision=PRECISION)
            if MAP == "exp":
                dq = dfeatures * scaled
            else:
                dq = dfeatures * scale[:, None] * phi_slope(q, features, MAP)
            put(dq_ptr, start, dq_n, n < high, dq, D, BLOCK_D)
        dshare_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * size
        put_share(dshare_ptr, dtotal, tl.sum(dsums, 0), D, E, BLOCK_D, BLOCK_E)


@triton.jit
def weighted_queries(
    q_ptr, dout_ptr, den_ptr, start, high, q_n, dout_n,
    MAP: tl.constexpr, NORMALIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """φ(q) / den ``[N, D]`` and the upstream gradient ``[N, E]`` of one chunk."""
    n = start + tl.arange(0, BLOCK_N)
    q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(tl.float32)
    dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E).to(DOT)
    features, _ = query_features(q, tl.zeros((BLOCK_D,), tl.float32), MAP, D, BLOCK_D)
    return (features * inverse(den_ptr, n, high, NORMALIZE)[:, None]).to(DOT), dout


@triton.jit
def add_to_values(keys, queries, dout, dv, PRECISION: tl.constexpr):
    """Add what the queries of one chunk give to dv."""
    i = tl.arange(0, keys.shape[0])
    scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)  # [key, query]
    scores = tl.where(i[None, :] >= i[:, None], scores, 0.0).to(keys.dtype)
    return tl.dot(scores, dout, dv, input_precision=PRECISION)


@triton.jit
def add_to_keys(
    v, queries, dout, slope_ptr, start, high, dkeys, dtotal, dsums,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries of one chunk give to dφ(k), dS and dz."""
    i = tl.arange(0, v.shape[0])
    dscores = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [key, query]
    if NORMALIZE:
        slope = tl.load(slope_ptr + start + i, mask=start + i < high, other=0.0)
        dscores += slope[None, :]
        dsums = add_rows(queries, slope, dsums, PRECISION)
    dscores = tl.where(i[None, :] >= i[:, None], dscores, 0.0).to(v.dtype)
    dkeys = tl.dot(dscores, queries, dkeys, input_precision=PRECISION)
    dtotal = tl.dot(tl.trans(dout), queries, dtotal, input_precision=PRECISION)
    return dkeys, dtotal, dsums


@launched
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, dout_ptr, dshare_ptr,
    dfinal_kv_ptr, dfinal_z_ptr, dk_ptr, dv_ptr, dstart_kv_ptr, dstart_z_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    HKV, G, N, SHARES, DSHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    GROUPED: tl.constexpr, NORMALIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one split of the keys of one key head, walked backwards.

    N is the number of keys. The shares of dS have no shift.
    """
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    dk_n, dv_n = HKV.to(tl.int64) * D, HKV.to(tl.int64) * E
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)
    dk_ptr, dk_n = begin(dk_ptr, b, head, first, N * dk_n, D, dk_n, 1, PACKED)
    dv_ptr, dv_n = begin(dv_ptr, b, head, first, N * dv_n, E, dv_n, 1, PACKED)
    # of its first query head
    q_ptr, q_n = begin(q_ptr, b, head * G, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head * G, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    step_q, step_dout = q_h // UNIT * UNIT, dout_h // UNIT * UNIT
    q_row, q_head, length = row_id * G, head * G, N.to(tl.int64)
    den_ptr = rows_after(
        share_ptr, tl.num_programs(0) * SHARES, q_row, q_head, first, N, D, E, PACKED
    )
    slope_ptr = rows_after(
        dshare_ptr, tl.num_programs(0) * G * DSHARES, q_row, q_head, first, N, D, E, PACKED
    )
    size = D * E + 2 * D
    d = tl.arange(0, BLOCK_D)

    shift = tl.zeros((BLOCK_D,), tl.float32)
    if MAP == "exp":
        shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
        for s in range(0, SHARES):
            at = share_ptr + (row_id * SHARES + s) * size + D * E + D + d
            shift = tl.maximum(shift, tl.load(at, mask=d < D, other=-float("inf")))
        shift = tl.where(shift == -float("inf"), 0.0, shift)

    dtotal, dmass = starting_state(
        dfinal_kv_ptr, dfinal_z_ptr, row_id, STATE, D, E, BLOCK_D, BLOCK_E
    )
    skip = tl.program_id(1) + 1 if CAUSAL else 0
    for g in range(0, G):
        at = dshare_ptr + ((row_id * G + g) * DSHARES + skip) * size
        dtotal, dmass, _ = add_shares(
            at, DSHARES - skip, dtotal, dmass, dmass, "no shift", D, E, BLOCK_D, BLOCK_E
        )

    weights = dtotal.to(DOT)
    dsums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32) + dmass[None, :]  # dz in every row
    i = tl.arange(0, BLOCK_N)
    chunks = tl.cdiv(high - low, BLOCK_N)
    for c in range(0, chunks):
        start = low + (chunks - 1 - c) * BLOCK_N
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(tl.float32)  # [N, D]
        features = key_features(k, shift, keep, MAP, D, BLOCK_D)
        keys = features.to(DOT)
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        if CAUSAL:
            weights = dtotal.to(DOT)
        dv = tl.dot(keys, tl.trans(weights), input_precision=PRECISION)
        if CAUSAL:  # dv is finished before dk is begun: registers are scarce
            if GROUPED:
                for g in range(0, G):
                    queries, dout = weighted_queries(
                        q_ptr + g * step_q, dout_ptr + g * step_dout, den_ptr + g * length,
                        start, high, q_n, dout_n,
                        MAP, NORMALIZE, D, E, BLOCK_N, BLOCK_D, BLOCK_E, DOT,
                    )  # fmt: skip
                    dv = add_to_values(keys, queries, dout, dv, PRECISION)
            else:
                queries, dout = weighted_queries(
                    q_ptr, dout_ptr, den_ptr, start, high, q_n, dout_n,
                    MAP, NORMALIZE, D, E, BLOCK_N, BLOCK_D, BLOCK_E, DOT,
                )  # fmt: skip
                dv = add_to_values(keys, queries, dout, dv, PRECISION)
        put(dv_ptr, start, dv_n, n < high, tl.where(keep[:, None], dv, 0.0), E, BLOCK_E)
        dkeys = tl.dot(v, weights, dsums, input_precision=PRECISION)
        if CAUSAL:
            if GROUPED:
                for g in range(0, G):
                    queries, dout = weighted_queries(
                        q_ptr + g * step_q, dout_ptr + g * step_dout, den_ptr + g * length,
                        start, high, q_n, dout_n,
                        MAP, NORMALIZE, D, E, BLOCK_N, BLOCK_D, BLOCK_E, DOT,
                    )  # fmt: skip
                    dkeys, dtotal, dsums = add_to_keys(
                        v, queries, dout, slope_ptr + g * length, start, high,
                        dkeys, dtotal, dsums, NORMALIZE, PRECISION,
                    )  # fmt: skip
            else:
                dkeys, dtotal, dsums = add_to_keys(
                    v, queries, dout, slope_ptr, start, high,
                    dkeys, dtotal, dsums, NORMALIZE, PRECISION,
                )  # fmt: skip
        dk = tl.where(keep[:, None], dkeys * phi_slope(k, features, MAP), 0.0)
        put(dk_ptr, start, dk_n, n < high, dk, D, BLOCK_D)

    if STATE:
        if tl.program_id(1) == 0:
            put_state(
                dstart_kv_ptr, dstart_z_ptr, row_id, dtotal, tl.max(dsums, 0),
                D, E, BLOCK_D, BLOCK_E,
            )  # fmt: skip
