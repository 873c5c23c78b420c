"""Linear attention, backward: ``grad_queries`` and ``grad_keys``, beside the forward kernels."""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention import (
    add_share,
    begin,
    phi,
    put,
    query_features,
    span,
    tile,
    tile_t,
    visible,
)


@triton.jit
def phi_slope(x, MAP: tl.constexpr):
    """The derivative of the feature map."""
    if MAP == "elu":
        y = tl.where(x > 0, 1.0, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif MAP == "squared_relu":
        y = tl.where(x <= 0, 0.0, 2 * x)
    else:
        y = tl.full(x.shape, 1.0, tl.float32)
    return y


@triton.jit
def key_features(k, shift, real, MAP: tl.constexpr):
    """φ(k) ``[N, D]``, zero where a key is not real."""
    if MAP == "exp":
        features = tl.exp(tl.where(real, k - shift[None, :], -float("inf")))
    else:
        features = tl.where(real, phi(k, MAP), 0.0)
    return features


@triton.jit
def upstream(dout, out, den, top, MAP: tl.constexpr, NORMALIZE: tl.constexpr):
    """Gradients of numerator ``[N, E]`` and denominator ``[N]``."""
    dden = tl.zeros((dout.shape[0],), tl.float32)
    dnum = dout
    if NORMALIZE:
        safe = tl.where(den == 0, 1.0, den)
        dnum = dout / safe[:, None]
        dden = tl.where(den == 0, 0.0, -tl.sum(dnum * out, 1))
    elif MAP == "exp":
        half = tl.exp(tl.minimum(top / 2, 88.0))
        dnum = dout * half[:, None] * half[:, None]
    return dnum, dden


@triton.jit
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, out_ptr, den_ptr, dout_ptr,
    start_kv_ptr, start_z_ptr, dq_ptr, dden_ptr, dshare_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n, dout_b, dout_h, dout_n,
    dq_b, dq_h, dq_n,
    H, G, N, D, E, SHARES,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """dq of one split of the queries of one head, and the split's share of dS and dz.

    S is kept transposed, [E, D]. The gradient of the denominators goes to dden_ptr (B, H, N).
    """
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    kv_head, kv_row = head // G, b * (H // G) + head // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    q_ptr = begin(q_ptr, b, head, first, q_b, q_h, q_n, PACKED)
    k_ptr = begin(k_ptr, b, kv_head, first, k_b, k_h, k_n, PACKED)
    v_ptr = begin(v_ptr, b, kv_head, first, v_b, v_h, v_n, PACKED)
    out_ptr = begin(out_ptr, b, head, first, out_b, out_h, out_n, PACKED)
    dout_ptr = begin(dout_ptr, b, head, first, dout_b, dout_h, dout_n, PACKED)
    dq_ptr = begin(dq_ptr, b, head, first, dq_b, dq_h, dq_n, PACKED)
    den_ptr += (head * N + first) if PACKED else row_id * N
    dden_ptr += (head * N + first) if PACKED else row_id * N
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_d = d < D

    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)  # [E, D]
    mass = tl.zeros((BLOCK_D,), tl.float32)
    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    if STATE:
        total = tile_t(start_kv_ptr + kv_row * D * E, d, E, e, E, in_d)
        mass = tl.load(start_z_ptr + kv_row * D + d, mask=in_d, other=0.0)
    size = D * E + 2 * D
    share_ptr += kv_row * SHARES * size
    for i in range(0, tl.program_id(1) if CAUSAL else SHARES):
        total, mass, shift = add_share(
            share_ptr + i * size, total, mass, shift, D, E, d, e, MAP, True
        )

    dtotal = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)  # [D, E]
    dmass = tl.zeros((BLOCK_D,), tl.float32)
    fixed = total.to(DOT)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < high
        q = tile(q_ptr, n, q_n, d, D, inside).to(tl.float32)  # [N, D]
        features, top = query_features(q, shift, in_d, MAP)
        out = tile(out_ptr, n, out_n, e, E, inside).to(tl.float32)  # [N, E]
        dout = tile(dout_ptr, n, dout_n, e, E, inside).to(tl.float32)
        den = tl.zeros((BLOCK_N,), tl.float32)
        if NORMALIZE:
            den = tl.load(den_ptr + n, mask=inside, other=0.0)
        dnum, dden = upstream(dout, out, den, top, MAP, NORMALIZE)
        tl.store(dden_ptr + n, dden, mask=inside)
        dmass += tl.sum(features * dden[:, None], 0)
        sharp, sharp_dnum = features.to(DOT), dnum.to(DOT)
        dtotal = tl.dot(tl.trans(sharp), sharp_dnum, dtotal, input_precision=PRECISION)
        if CAUSAL:
            dfeatures = tl.dot(sharp_dnum, total.to(DOT), input_precision=PRECISION)
            dfeatures += dden[:, None] * mass[None, :]  # of earlier chunks
            keep = visible(mask_ptr, n, high, MASKED)
            k = tile(k_ptr, n, k_n, d, D, keep).to(tl.float32)  # [N, D]
            wide = tl.where(keep[:, None] & in_d[None, :], phi(k, MAP), 0.0)
            mass += tl.sum(wide, 0)
            keys = wide.to(DOT)
            v_t = tile_t(v_ptr, n, v_n, e, E, keep).to(DOT)  # [E, N]
            dscores = tl.dot(sharp_dnum, v_t, input_precision=PRECISION) + dden[:, None]
            dscores = tl.where(n[:, None] >= n[None, :], dscores, 0.0).to(DOT)
            dfeatures = tl.dot(dscores, keys, dfeatures, input_precision=PRECISION)
            total = tl.dot(v_t, keys, total, input_precision=PRECISION)
        else:
            dfeatures = tl.dot(sharp_dnum, fixed, input_precision=PRECISION)
            dfeatures += dden[:, None] * mass[None, :]
        # read again rather than kept: registers are scarcer than the first-level cache
        q = tile(q_ptr, n, q_n, d, D, inside).to(tl.float32)
        if MAP == "exp":
            dq = dfeatures * query_features(q, shift, in_d, MAP)[0]
        else:
            dq = dfeatures * phi_slope(q, MAP)
        put(dq_ptr, n, dq_n, d, D, inside, dq)

    dshare_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * size
    put(dshare_ptr, d, E, e, E, in_d, dtotal)
    tl.store(dshare_ptr + D * E + d, dmass, mask=in_d)


@triton.jit
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, den_ptr, dden_ptr, dout_ptr, dshare_ptr,
    dfinal_kv_ptr, dfinal_z_ptr, dk_ptr, dv_ptr, dstart_kv_ptr, dstart_z_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    HKV, G, N, D, E, SHARES, DSHARES,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one split of the keys of one key head, walked backwards.

    N is the number of keys. dS is kept both ways, [D, E] and [E, D]: each is an operand.
    """
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr = begin(k_ptr, b, head, first, k_b, k_h, k_n, PACKED)
    v_ptr = begin(v_ptr, b, head, first, v_b, v_h, v_n, PACKED)
    dk_ptr = begin(dk_ptr, b, head, first, dk_b, dk_h, dk_n, PACKED)
    dv_ptr = begin(dv_ptr, b, head, first, dv_b, dv_h, dv_n, PACKED)
    q_ptr = begin(q_ptr, b, 0, first, q_b, q_h, q_n, PACKED)  # of the first head
    dout_ptr = begin(dout_ptr, b, 0, first, dout_b, dout_h, dout_n, PACKED)  # of the first head
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_d = d < D
    size = D * E + 2 * D

    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    if MAP == "exp":
        for i in range(0, SHARES):
            at = share_ptr + (row_id * SHARES + i) * size + D * E + D + d
            shift = tl.maximum(shift, tl.load(at, mask=in_d, other=-float("inf")))
        shift = tl.where(shift == -float("inf"), 0.0, shift)

    dtotal = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)  # [D, E]
    dtotal_t = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)  # [E, D]
    dmass = tl.zeros((BLOCK_D,), tl.float32)
    if STATE:
        dtotal = tile(dfinal_kv_ptr + row_id * D * E, d, E, e, E, in_d)
        dtotal_t = tile_t(dfinal_kv_ptr + row_id * D * E, d, E, e, E, in_d)
        dmass = tl.load(dfinal_z_ptr + row_id * D + d, mask=in_d, other=0.0)
    for g in range(0, G):
        heads = b * HKV * G + head * G + g
        for i in range(tl.program_id(1) + 1 if CAUSAL else 0, DSHARES):
            at = dshare_ptr + (heads * DSHARES + i) * size
            dtotal += tile(at, d, E, e, E, in_d)
            dtotal_t += tile_t(at, d, E, e, E, in_d)
            dmass += tl.load(at + D * E + d, mask=in_d, other=0.0)

    fixed, fixed_t = dtotal.to(DOT), dtotal_t.to(DOT)
    chunks = tl.cdiv(high - low, BLOCK_N)
    for c in range(0, chunks):
        n = low + (chunks - 1 - c) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < high
        keep = visible(mask_ptr, n, high, MASKED)
        real = keep[:, None] & in_d[None, :]
        k = tile(k_ptr, n, k_n, d, D, keep).to(tl.float32)  # [N, D]
        keys = key_features(k, shift, real, MAP).to(DOT)
        v = tile(v_ptr, n, v_n, e, E, keep).to(DOT)  # [N, E]
        if CAUSAL:
            dkeys = tl.dot(v, dtotal_t.to(DOT), input_precision=PRECISION) + dmass[None, :]
            dv = tl.dot(keys, dtotal.to(DOT), input_precision=PRECISION)
            later = n[None, :] >= n[:, None]  # [key, query]
            for g in range(0, G):
                q_head = head * G + g
                q_at, dout_at = q_ptr + q_head * q_h, dout_ptr + q_head * dout_h
                den_at = (q_head * N + first) if PACKED else (b * HKV * G + q_head) * N
                q = tile(q_at, n, q_n, d, D, inside).to(tl.float32)  # [N, D]
                queries = tl.where(inside[:, None] & in_d[None, :], phi(q, MAP), 0.0)
                dden = tl.load(dden_ptr + den_at + n, mask=inside, other=0.0)
                dmass += tl.sum(queries * dden[:, None], 0)
                sharp = queries.to(DOT)
                dnum = tile(dout_at, n, dout_n, e, E, inside).to(tl.float32)  # [N, E]
                if NORMALIZE:
                    den = tl.load(den_ptr + den_at + n, mask=inside, other=0.0)
                    dnum = dnum / tl.where(den == 0, 1.0, den)[:, None]
                sharp_dnum = dnum.to(DOT)
                scores = tl.dot(keys, tl.trans(sharp), input_precision=PRECISION)
                scores = tl.where(later, scores, 0.0).to(DOT)  # [key, query]
                dv = tl.dot(scores, sharp_dnum, dv, input_precision=PRECISION)
                dscores = tl.dot(v, tl.trans(sharp_dnum), input_precision=PRECISION)
                dscores = tl.where(later, dscores + dden[None, :], 0.0).to(DOT)
                dkeys = tl.dot(dscores, sharp, dkeys, input_precision=PRECISION)
                dtotal = tl.dot(tl.trans(sharp), sharp_dnum, dtotal, input_precision=PRECISION)
                dtotal_t = tl.dot(tl.trans(sharp_dnum), sharp, dtotal_t, input_precision=PRECISION)
        else:
            dkeys = tl.dot(v, fixed_t, input_precision=PRECISION) + dmass[None, :]
            dv = tl.dot(keys, fixed, input_precision=PRECISION)
        put(dv_ptr, n, dv_n, e, E, inside, tl.where(keep[:, None], dv, 0.0))
        # read again rather than kept: registers are scarcer than the first-level cache
        k = tile(k_ptr, n, k_n, d, D, keep).to(tl.float32)
        if MAP == "exp":
            dk = dkeys * key_features(k, shift, real, MAP)
        else:
            dk = tl.where(real, dkeys * phi_slope(k, MAP), 0.0)
        put(dk_ptr, n, dk_n, d, D, inside, dk)

    if STATE:
        if tl.program_id(1) == 0:
            put(dstart_kv_ptr + row_id * D * E, d, E, e, E, in_d, dtotal)
            tl.store(dstart_z_ptr + row_id * D + d, dmass, mask=in_d)
