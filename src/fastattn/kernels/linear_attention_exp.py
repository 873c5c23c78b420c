"""Causal linear attention with φ = exp: attend, and the backward pass, each feature with a shift.

The weight of key j for query i is the sum over the features d of exp(q[i, d] + k[j, d]). No product
of exponentials is safe, and no maximum over a whole chunk is allowed, since later keys must not
enter. So earlier chunks count by their S, scaled by exp(-shift) with a running maximum of the keys
for a shift, and the keys of a row's own chunk count one by one, in logarithms. Two numbers are kept
of a row: top, the largest of its sums q + k, and its denominator, scaled by exp(-top). Backward,
the gradient of S runs the other way, scaled by a running maximum of q - top. So no argument of an
exponential is above zero.

``sum_keys`` is that of the other feature maps; letters and layouts: ``linear_attention_parts``.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import (
    add_shares,
    begin,
    inside,
    launched,
    put,
    put_share,
    put_state,
    rescale,
    rows_after,
    span,
    starting_state,
    tile,
    visible,
)


@triton.jit
def lowest(x, keep, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """x ``[N, D]`` in float32, -inf where it is not real."""
    return tl.where(inside(keep, D, BLOCK_D), x.to(tl.float32), -float("inf"))


@triton.jit
def row(ptr, n, stride, keep, other, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``[1, BLOCK]``: one row in float32, ``other`` where not kept."""
    i = tl.arange(0, BLOCK)
    x = tl.load(ptr + n * stride + i, mask=(i < WIDTH) & keep, other=other)
    return x.to(tl.float32)[None, :]


@triton.jit
def shown(mask_ptr, n, MASKED: tl.constexpr):
    """Whether key n is no padding."""
    return (tl.load(mask_ptr + n) == 0) if MASKED else n >= 0


@triton.jit
def move(
    total, mass, shift, a, scale, weight, values,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """With f = scale·exp(a), both ``[N, D]``: add f ⊗ values to S and weight·f to z.

    Both are scaled by exp(-shift), and so are the results, by the new shift.
    """
    new = tl.maximum(shift, tl.max(a, 0))
    old = rescale(shift, new)
    features = tl.exp(a - tl.where(new == -float("inf"), 0.0, new)[None, :]) * scale
    total = tl.dot(
        tl.trans(values), features.to(DOT), total * old[None, :], input_precision=PRECISION
    )
    return total, mass * old + tl.sum(features * weight[:, None], 0), new


@triton.jit
def state_before(
    share_ptr, count, kv_ptr, z_ptr, shift_ptr, kv_row, SIGN: tl.constexpr, STATE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """S, z and shift over a state, whose shift counts with SIGN, and ``count`` shares."""
    total, mass = starting_state(kv_ptr, z_ptr, kv_row, STATE, D, E, BLOCK_D, BLOCK_E)
    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    if STATE:
        d = tl.arange(0, BLOCK_D)
        shift = tl.load(shift_ptr + kv_row * D + d, mask=d < D, other=-float("inf"))
        # a state that saw nothing has shift -inf and S = 0, and the gradient of such an S is lost
        shift = tl.where(shift == -float("inf"), shift, SIGN * shift)
    return add_shares(share_ptr, count, total, mass, shift, "exp", D, E, BLOCK_D, BLOCK_E)


@launched
def attend_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, out_ptr,
    start_kv_ptr, start_z_ptr, start_shift_ptr, final_kv_ptr, final_z_ptr, final_shift_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, G, N, SHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program answers one split of the queries of one head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    kv_head, kv_row = head // G, b * (H // G) + head // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    out_n = H.to(tl.int64) * E
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    k_ptr, k_n = begin(k_ptr, b, kv_head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, kv_head, first, v_b, v_h, v_n, UNIT, PACKED)
    out_ptr, out_n = begin(out_ptr, b, head, first, N * out_n, E, out_n, 1, PACKED)
    shares = tl.num_programs(0) // G * SHARES
    den_ptr = rows_after(share_ptr, shares, row_id, head, first, N, D, E, PACKED, 2)

    total, mass, shift = state_before(
        share_ptr + kv_row * SHARES * (D * E + 2 * D), tl.program_id(1),
        start_kv_ptr, start_z_ptr, start_shift_ptr, kv_row, 1, STATE, D, E, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    i = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        n = start + i
        q = lowest(tile(q_ptr, start, q_n, n < high, D, BLOCK_D), n < high, D, BLOCK_D)
        top = tl.max(q + shift[None, :], 1)
        chunk = tl.minimum(high - start, BLOCK_N)
        for j in range(0, chunk):
            keep = shown(mask_ptr, start + j, MASKED)
            k = row(k_ptr, start + j, k_n, keep, -float("inf"), D, BLOCK_D)
            top = tl.where(i >= j, tl.maximum(top, tl.max(q + k, 1)), top)
        top = tl.where(top == -float("inf"), 0.0, top)
        features = tl.exp(q + shift[None, :] - top[:, None])
        den = tl.sum(features * mass[None, :], 1)
        weights = tl.trans(total.to(DOT))
        num = tl.dot(features.to(DOT), weights, input_precision=PRECISION)
        for j in range(0, chunk):
            keep = shown(mask_ptr, start + j, MASKED)
            k = row(k_ptr, start + j, k_n, keep, -float("inf"), D, BLOCK_D)
            v = row(v_ptr, start + j, v_n, keep, 0.0, E, BLOCK_E)
            weight = tl.where(i >= j, tl.sum(tl.exp(q + k - top[:, None]), 1), 0.0)
            den += weight
            num += tl.where(i[:, None] >= j, weight[:, None] * v, 0.0)
        if NORMALIZE:
            num = num / tl.where(den == 0, 1.0, den)[:, None]
            tl.store(den_ptr + 2 * n, tl.where(den == 0, float("inf"), top), mask=n < high)
            tl.store(den_ptr + 2 * n + 1, tl.where(den == 0, 1.0, den), mask=n < high)
        else:  # in two halves: exp(top) alone overflows before the product does
            half = tl.exp(tl.minimum(top / 2, 88.0))
            num = num * half[:, None] * half[:, None]
        put(out_ptr, start, out_n, n < high, num, E, BLOCK_E)

        keep = visible(mask_ptr, n, high, MASKED)
        keys = lowest(tile(k_ptr, start, k_n, keep, D, BLOCK_D), keep, D, BLOCK_D)
        values = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)
        ones = tl.full((BLOCK_N,), 1.0, tl.float32)
        total, mass, shift = move(total, mass, shift, keys, 1.0, ones, values, PRECISION, DOT)

    if STATE:  # the last split holds the final state; of a key head, its first query head
        if (tl.program_id(1) == tl.num_programs(1) - 1) & (head % G == 0):
            d = tl.arange(0, BLOCK_D)
            put_state(final_kv_ptr, final_z_ptr, kv_row, total, mass, D, E, BLOCK_D, BLOCK_E)
            tl.store(final_shift_ptr + kv_row * D + d, shift, mask=d < D)


@triton.jit
def denominators(den_ptr, n, keep, NORMALIZE: tl.constexpr):
    """``[N]``: the scale of a row's weights in logarithms, +inf where it sees nothing; 1 / den."""
    if NORMALIZE:
        top = tl.load(den_ptr + 2 * n, mask=keep, other=float("inf"))
        scale = 1.0 / tl.load(den_ptr + 2 * n + 1, mask=keep, other=1.0)
    else:
        top = tl.where(keep, 0.0, float("inf"))
        scale = tl.full(n.shape, 1.0, tl.float32)
    return top, scale


@launched
def sum_queries_kernel(
    q_ptr, cu_ptr, out_ptr, share_ptr, dout_ptr, dshare_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    H, G, N, SHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PACKED: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One split's share of dS and dz, with a shift; behind all shares, the slopes (B, H, N)."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    first, low, high = span(cu_ptr, b, N, PACKED)
    out_n = H.to(tl.int64) * E
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    out_ptr, out_n = begin(out_ptr, b, head, first, N * out_n, E, out_n, 1, PACKED)
    shares, dshares = tl.num_programs(0) // G * SHARES, tl.num_programs(0) * tl.num_programs(1)
    den_ptr = rows_after(share_ptr, shares, row_id, head, first, N, D, E, PACKED, 2)
    slope_ptr = rows_after(dshare_ptr, dshares, row_id, head, first, N, D, E, PACKED)

    dtotal = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    dmass = tl.zeros((BLOCK_D,), tl.float32)
    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        q = lowest(tile(q_ptr, start, q_n, n < high, D, BLOCK_D), n < high, D, BLOCK_D)
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E)  # [N, E]
        slope = tl.zeros((BLOCK_N,), tl.float32)
        if NORMALIZE:
            out = tile(out_ptr, start, out_n, n < high, E, BLOCK_E)
            slope = -tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
            tl.store(slope_ptr + n, slope, mask=n < high)
        top, scale = denominators(den_ptr, n, n < high, NORMALIZE)
        a = q - top[:, None]
        dtotal, dmass, shift = move(
            dtotal, dmass, shift, a, scale[:, None], slope, dout.to(DOT), PRECISION, DOT
        )

    dshare_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * (D * E + 2 * D)
    d = tl.arange(0, BLOCK_D)
    put_share(dshare_ptr, dtotal, dmass, D, E, BLOCK_D, BLOCK_E)
    tl.store(dshare_ptr + D * E + D + d, shift, mask=d < D)


@launched
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, dout_ptr,
    start_kv_ptr, start_z_ptr, start_shift_ptr, dq_ptr, dshare_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    H, G, N, SHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dq of one split of the queries of one head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    kv_head, kv_row = head // G, b * (H // G) + head // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    dq_n = H.to(tl.int64) * D
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    k_ptr, k_n = begin(k_ptr, b, kv_head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, kv_head, first, v_b, v_h, v_n, UNIT, PACKED)
    dout_ptr, dout_n = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, UNIT, PACKED)
    dq_ptr, dq_n = begin(dq_ptr, b, head, first, N * dq_n, D, dq_n, 1, PACKED)
    shares, dshares = tl.num_programs(0) // G * SHARES, tl.num_programs(0) * tl.num_programs(1)
    den_ptr = rows_after(share_ptr, shares, row_id, head, first, N, D, E, PACKED, 2)
    slope_ptr = rows_after(dshare_ptr, dshares, row_id, head, first, N, D, E, PACKED)

    total, mass, shift = state_before(
        share_ptr + kv_row * SHARES * (D * E + 2 * D), tl.program_id(1),
        start_kv_ptr, start_z_ptr, start_shift_ptr, kv_row, 1, STATE, D, E, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    i = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        n = start + i
        q = lowest(tile(q_ptr, start, q_n, n < high, D, BLOCK_D), n < high, D, BLOCK_D)
        top, scale = denominators(den_ptr, n, n < high, NORMALIZE)
        dout = tile(dout_ptr, start, dout_n, n < high, E, BLOCK_E)  # [N, E]
        wide = dout.to(tl.float32)
        slope = tl.zeros((BLOCK_N,), tl.float32)
        if NORMALIZE:
            slope = tl.load(slope_ptr + n, mask=n < high, other=0.0)
        dfeatures = tl.dot(dout.to(DOT), total.to(DOT), input_precision=PRECISION)
        dfeatures += slope[:, None] * mass[None, :]
        dq = dfeatures * tl.exp(q + shift[None, :] - top[:, None])
        for j in range(0, tl.minimum(high - start, BLOCK_N)):
            keep = shown(mask_ptr, start + j, MASKED)
            k = row(k_ptr, start + j, k_n, keep, -float("inf"), D, BLOCK_D)
            v = row(v_ptr, start + j, v_n, keep, 0.0, E, BLOCK_E)
            dweight = tl.sum(wide * v, 1) + slope
            each = tl.exp(q + k - top[:, None])
            dq += tl.where(i[:, None] >= j, dweight[:, None] * each, 0.0)
        put(dq_ptr, start, dq_n, n < high, dq * scale[:, None], D, BLOCK_D)

        keep = visible(mask_ptr, n, high, MASKED)
        keys = lowest(tile(k_ptr, start, k_n, keep, D, BLOCK_D), keep, D, BLOCK_D)
        values = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)
        ones = tl.full((BLOCK_N,), 1.0, tl.float32)
        total, mass, shift = move(total, mass, shift, keys, 1.0, ones, values, PRECISION, DOT)


@launched
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, dout_ptr, dshare_ptr,
    dfinal_kv_ptr, dfinal_z_ptr, final_shift_ptr, start_shift_ptr,
    dk_ptr, dv_ptr, dstart_kv_ptr, dstart_z_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    HKV, G, N, SHARES, DSHARES,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one split of the keys of one key head, walked backwards."""
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
        share_ptr, tl.num_programs(0) * SHARES, q_row, q_head, first, N, D, E, PACKED, 2
    )
    slope_ptr = rows_after(
        dshare_ptr, tl.num_programs(0) * G * DSHARES, q_row, q_head, first, N, D, E, PACKED
    )

    # a final state scaled by exp(-shift): its gradient is one of S scaled by exp(shift)
    dtotal, dmass, shift = state_before(
        dshare_ptr, 0, dfinal_kv_ptr, dfinal_z_ptr, final_shift_ptr, row_id, -1, STATE,
        D, E, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    skip = tl.program_id(1) + 1
    for g in range(0, G):
        at = dshare_ptr + ((row_id * G + g) * DSHARES + skip) * (D * E + 2 * D)
        dtotal, dmass, shift = add_shares(
            at, DSHARES - skip, dtotal, dmass, shift, "exp", D, E, BLOCK_D, BLOCK_E
        )

    i = tl.arange(0, BLOCK_N)
    chunks = tl.cdiv(high - low, BLOCK_N)
    for c in range(0, chunks):
        start = low + (chunks - 1 - c) * BLOCK_N
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        k = lowest(tile(k_ptr, start, k_n, keep, D, BLOCK_D), keep, D, BLOCK_D)
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E)  # [N, E]
        wide = v.to(tl.float32)
        features = tl.exp(k + shift[None, :])
        dkeys = tl.dot(v.to(DOT), dtotal.to(DOT), input_precision=PRECISION) + dmass[None, :]
        dk = dkeys * features
        weights = tl.trans(dtotal.to(DOT))
        dv = tl.dot(features.to(DOT), weights, input_precision=PRECISION)
        for g in range(0, G):
            q_at, dout_at = q_ptr + g * step_q, dout_ptr + g * step_dout
            for j in range(0, tl.minimum(high - start, BLOCK_N)):
                q = row(q_at, start + j, q_n, True, -float("inf"), D, BLOCK_D)
                dout = row(dout_at, start + j, dout_n, True, 0.0, E, BLOCK_E)
                if NORMALIZE:
                    at = den_ptr + 2 * (g * length + start + j)
                    top = tl.load(at)
                    dout = dout / tl.load(at + 1)
                    dweight = tl.sum(wide * dout, 1)
                    dweight += tl.load(slope_ptr + g * length + start + j) / tl.load(at + 1)
                    weight = tl.exp(k + q - top)  # [N, D]
                else:
                    dweight = tl.sum(wide * dout, 1)
                    weight = tl.exp(k + q)
                dk += tl.where(i[:, None] <= j, dweight[:, None] * weight, 0.0)
                dv += tl.where(i[:, None] <= j, tl.sum(weight, 1)[:, None] * dout, 0.0)
            q = lowest(tile(q_at, start, q_n, n < high, D, BLOCK_D), n < high, D, BLOCK_D)
            dout = tile(dout_at, start, dout_n, n < high, E, BLOCK_E).to(DOT)
            top, scale = denominators(den_ptr + 2 * g * length, n, n < high, NORMALIZE)
            slope = tl.zeros((BLOCK_N,), tl.float32)
            if NORMALIZE:
                slope = tl.load(slope_ptr + g * length + n, mask=n < high, other=0.0)
            a = q - top[:, None]
            dtotal, dmass, shift = move(
                dtotal, dmass, shift, a, scale[:, None], slope, dout, PRECISION, DOT
            )
        put(dv_ptr, start, dv_n, n < high, tl.where(keep[:, None], dv, 0.0), E, BLOCK_E)
        put(dk_ptr, start, dk_n, n < high, tl.where(keep[:, None], dk, 0.0), D, BLOCK_D)

    if STATE:
        if tl.program_id(1) == 0:
            d = tl.arange(0, BLOCK_D)
            start_shift = tl.load(start_shift_ptr + row_id * D + d, mask=d < D, other=0.0)
            scale = tl.exp(shift + start_shift)
            put_state(
                dstart_kv_ptr, dstart_z_ptr, row_id, dtotal * scale[None, :], dmass * scale,
                D, E, BLOCK_D, BLOCK_E,
            )  # fmt: skip
