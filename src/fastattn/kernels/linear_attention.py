"""Linear attention: four kernels for both forms, causal or not.

    sum_keys       per split of the keys: S = sum of φ(k) ⊗ v and z = sum of φ(k)
    attend         per split of the queries: out = φ(q)·S / φ(q)·z
    grad_queries   per split of the queries: dq, and this split's share of dS and dz
    grad_keys      per split of the keys: dk and dv

No atomics: a split writes its share, and who needs the sum adds the shares in their order. Where
attention is causal, a split sums the shares before it (in grad_keys: after it) and carries them
along its chunks. Features and denominators live in registers only.

Letters: B batch or packed segment, H query heads, G query heads per key head, N tokens, D width of
queries and keys, E width of values. A share is one row of floats: S (D, E), z (D), shift (D).
"""

import triton
import triton.language as tl


@triton.jit
def phi(x, MAP: tl.constexpr):
    """The feature map; comparisons are written so that a NaN stays one."""
    if MAP == "elu":
        y = tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif MAP == "squared_relu":
        y = tl.where(x <= 0, 0.0, x * x)
    else:
        y = x
    return y


@triton.jit
def span(cu_ptr, b, N, PACKED: tl.constexpr):
    """Where this program's sequence begins, and its split of the tokens: first, low, high.

    Splits are cut at multiples of 64, of which every BLOCK_N is a divisor: the kernels of one call
    have tiles of their own, but must agree on the splits.
    """
    first = 0
    length = N
    if PACKED:
        first = tl.load(cu_ptr + b)
        length = tl.load(cu_ptr + b + 1) - first
    per_split = tl.cdiv(tl.cdiv(length, 64), tl.num_programs(1)) * 64
    low = tl.program_id(1) * per_split
    return first, low, tl.minimum(low + per_split, length)


@triton.jit
def begin(ptr, b, head, first, stride_b, stride_h, stride_n, PACKED: tl.constexpr):
    """Where a head of a sequence begins: sample b, or token ``first`` of the packed sample."""
    ptr += head * stride_h
    if PACKED:
        ptr += first.to(tl.int64) * stride_n
    else:
        ptr += b * stride_b
    return ptr


@triton.jit
def tile(ptr, row, stride, column, WIDTH, keep):
    """Rows of a tensor whose last dimension is contiguous: ``[row, column]``."""
    at = (row.to(tl.int64) * stride)[:, None] + column[None, :]
    return tl.load(ptr + at, mask=keep[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def tile_t(ptr, row, stride, column, WIDTH, keep):
    """The same transposed: ``[column, row]``."""
    at = (row.to(tl.int64) * stride)[None, :] + column[:, None]
    return tl.load(ptr + at, mask=keep[None, :] & (column < WIDTH)[:, None], other=0.0)


@triton.jit
def put(ptr, row, stride, column, WIDTH, keep, value):
    at = (row.to(tl.int64) * stride)[:, None] + column[None, :]
    mask = keep[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def visible(mask_ptr, row, high, MASKED: tl.constexpr):
    """``[N]``: inside the split and not padding."""
    keep = row < high
    if MASKED:
        keep = keep & (tl.load(mask_ptr + row, mask=keep, other=1) == 0)
    return keep


@triton.jit
def rescale(old, new):
    """exp(old - new), where -inf means nothing yet."""
    return tl.exp(tl.where(new == -float("inf"), 0.0, old - new))


@triton.jit
def sum_keys_kernel(
    k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr,  # (B, HKV, N, D), (B, HKV, N, E), (B, N), ...
    k_b, k_h, k_n, v_b, v_h, v_n,
    HKV, N, D, E,
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
    k_ptr = begin(k_ptr, b, head, first, k_b, k_h, k_n, PACKED)
    v_ptr = begin(v_ptr, b, head, first, v_b, v_h, v_n, PACKED)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_d = d < D

    total = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)  # [D, E]
    mass = tl.zeros((BLOCK_D,), tl.float32)
    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keep = visible(mask_ptr, n, high, MASKED)
        k_t = tile_t(k_ptr, n, k_n, d, D, keep).to(tl.float32)  # [D, N]
        v = tile(v_ptr, n, v_n, e, E, keep)  # [N, E]
        real = in_d[:, None] & keep[None, :]
        if MAP == "exp":
            k_t = tl.where(real, k_t, -float("inf"))
            new = tl.maximum(shift, tl.max(k_t, 1))
            scale = rescale(shift, new)
            total *= scale[:, None]
            mass *= scale
            shift = new
            features = tl.exp(k_t - tl.where(new == -float("inf"), 0.0, new)[:, None])
        else:
            features = tl.where(real, phi(k_t, MAP), 0.0)
        total = tl.dot(features.to(DOT), v.to(DOT), total, input_precision=PRECISION)
        mass += tl.sum(features, 1)

    share_ptr += (row_id * tl.num_programs(1) + tl.program_id(1)) * (D * E + 2 * D)
    put(share_ptr, d, E, e, E, in_d, total)
    tl.store(share_ptr + D * E + d, mass, mask=in_d)
    tl.store(share_ptr + D * E + D + d, shift, mask=in_d)


@triton.jit
def add_share(
    ptr, total, mass, shift, D, E, d, e, MAP: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Add one share to S ``[D, E]``, or transposed ``[E, D]``, to z and to the shift."""
    every = d < D
    if TRANSPOSED:
        part = tile_t(ptr, d, E, e, E, every)  # [E, D]
    else:
        part = tile(ptr, d, E, e, E, every)  # [D, E]
    part_mass = tl.load(ptr + D * E + d, mask=every, other=0.0)
    if MAP == "exp":
        part_shift = tl.load(ptr + D * E + D + d, mask=every, other=-float("inf"))
        new = tl.maximum(shift, part_shift)
        old_scale, part_scale = rescale(shift, new), rescale(part_shift, new)
        if TRANSPOSED:
            total = total * old_scale[None, :] + part * part_scale[None, :]
        else:
            total = total * old_scale[:, None] + part * part_scale[:, None]
        mass = mass * old_scale + part_mass * part_scale
        shift = new
    else:
        total += part
        mass += part_mass
    return total, mass, shift


@triton.jit
def query_features(q, shift, in_d, MAP: tl.constexpr):
    """φ(q) ``[N, D]``; for "exp" scaled by exp(-top) per row, and top ``[N]``."""
    top = tl.zeros((q.shape[0],), tl.float32)
    if MAP == "exp":
        logits = tl.where(in_d[None, :], q + shift[None, :], -float("inf"))
        top = tl.max(logits, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        features = tl.exp(logits - top[:, None])
    else:
        features = tl.where(in_d[None, :], phi(q, MAP), 0.0)
    return features, top


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, share_ptr, out_ptr, den_ptr,
    start_kv_ptr, start_z_ptr, final_kv_ptr, final_z_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n,
    H, G, N, D, E, SHARES,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One program answers one split of the queries of one head.

    N is the number of queries; where attention is causal, of keys as well. The denominators go to
    den_ptr (B, H, N) for the backward pass.
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
    den_ptr += (head * N + first) if PACKED else row_id * N
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_d = d < D

    total = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)  # [D, E]
    mass = tl.zeros((BLOCK_D,), tl.float32)
    shift = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    if STATE:
        total = tile(start_kv_ptr + kv_row * D * E, d, E, e, E, in_d)
        mass = tl.load(start_z_ptr + kv_row * D + d, mask=in_d, other=0.0)
    size = D * E + 2 * D
    share_ptr += kv_row * SHARES * size
    for i in range(0, tl.program_id(1) if CAUSAL else SHARES):
        total, mass, shift = add_share(
            share_ptr + i * size, total, mass, shift, D, E, d, e, MAP, False
        )

    fixed = total.to(DOT)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < high
        q = tile(q_ptr, n, q_n, d, D, inside).to(tl.float32)  # [N, D]
        features, top = query_features(q, shift, in_d, MAP)
        den = tl.sum(features * mass[None, :], 1)  # of earlier chunks
        sharp = features.to(DOT)
        if CAUSAL:
            keep = visible(mask_ptr, n, high, MASKED)
            k_t = tile_t(k_ptr, n, k_n, d, D, keep).to(tl.float32)  # [D, N]
            wide = tl.where(in_d[:, None] & keep[None, :], phi(k_t, MAP), 0.0)
            mass += tl.sum(wide, 1)
            keys = wide.to(DOT)
            v = tile(v_ptr, n, v_n, e, E, keep)  # [N, E]
            probe = tl.sum(v.to(tl.float32) * 0.0)  # NaN if v holds a NaN or an infinity
            v = tl.where(v.to(tl.float32) * 0.0 == 0.0, v, 0.0).to(DOT)
            past = n[:, None] >= n[None, :]
            scores = tl.where(past, tl.dot(sharp, keys, input_precision=PRECISION), 0.0)
            den += tl.sum(scores, 1)
            num = tl.dot(sharp, total.to(DOT), input_precision=PRECISION)  # earlier chunks
            num = tl.dot(scores.to(DOT), v, num, input_precision=PRECISION)
            total = tl.dot(keys, v, total, input_precision=PRECISION)
            if probe != probe:  # in a product it would reach earlier rows: 0 · NaN is NaN
                raw = tile(v_ptr, n, v_n, e, E, keep).to(tl.float32)
                bad = tl.max(tl.where(raw * 0.0 == 0.0, 0, 1), 1)  # [N]
                reached = tl.max(tl.where(past, bad[None, :], 0), 1) > 0
                num = tl.where(reached[:, None], float("nan"), num)
                total = total * float("nan")
        else:
            num = tl.dot(sharp, fixed, input_precision=PRECISION)
        if NORMALIZE:
            num = num / tl.where(den == 0, 1.0, den)[:, None]
            tl.store(den_ptr + n, den, mask=inside)
        elif MAP == "exp":  # in two halves: exp(top) alone overflows before the product does
            half = tl.exp(tl.minimum(top / 2, 88.0))
            num = num * half[:, None] * half[:, None]
        put(out_ptr, n, out_n, e, E, inside, num)

    if STATE:  # the last split holds the final state; of a key head, its first query head
        if (tl.program_id(1) == tl.num_programs(1) - 1) & (head % G == 0):
            put(final_kv_ptr + kv_row * D * E, d, E, e, E, in_d, total)
            tl.store(final_z_ptr + kv_row * D + d, mass, mask=in_d)
