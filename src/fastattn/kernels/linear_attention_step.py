"""Linear attention, one token: map, update the state, answer, in one kernel."""

import triton.language as tl

from fastattn.kernels.linear_attention_parts import launched, phi, rescale, square


@launched
def step_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr,  # (B, H, 1, D), (B, HKV, 1, D), (B, HKV, 1, E), (B, 1)
    kv_ptr, z_ptr, shift_ptr, new_kv_ptr, new_z_ptr, new_shift_ptr,  # (B, HKV, D, E), (B, HKV, D)
    q_b, q_h, k_b, k_h, v_b, v_h,
    HKV, G,
    D: tl.constexpr, E: tl.constexpr, MAP: tl.constexpr, MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program moves some columns of the state of one key head, and answers its queries."""
    row = tl.program_id(0).to(tl.int64)
    b, head = row // HKV, row % HKV
    offset = tl.program_id(1) * BLOCK_E
    d, e = tl.arange(0, BLOCK_D), offset + tl.arange(0, BLOCK_E)
    keep = d < D
    if MASKED:
        keep = keep & (tl.load(mask_ptr + b) == 0)
    k = tl.load(k_ptr + b * k_b + head * k_h + d, mask=keep, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + b * v_b + head * v_h + e, mask=e < E, other=0.0).to(tl.float32)
    at, exists = square(row * D * E + offset, 1, E, D, E - offset, BLOCK_D, BLOCK_E)  # [E, D]
    total = tl.load(kv_ptr + at, mask=exists, other=0.0)
    mass = tl.load(z_ptr + row * D + d, mask=d < D, other=0.0)
    shift = tl.zeros((BLOCK_D,), tl.float32)
    if MAP == "exp":
        old = tl.load(shift_ptr + row * D + d, mask=d < D, other=-float("inf"))
        shift = tl.maximum(old, tl.where(keep, k, -float("inf")))
        scale = rescale(old, shift)
        total *= scale[None, :]
        mass *= scale
        features = tl.exp(tl.where(keep, k - shift, -float("inf")))
    else:
        features = tl.where(keep, phi(k, MAP), 0.0)
    # where a key is padding, v may hold anything
    total += tl.where(keep[None, :], features[None, :] * v[:, None], 0.0)
    mass += features
    tl.store(new_kv_ptr + at, total, mask=exists)
    if tl.program_id(1) == 0:
        tl.store(new_z_ptr + row * D + d, mass, mask=d < D)
        if MAP == "exp":
            tl.store(new_shift_ptr + row * D + d, shift, mask=d < D)

    for g in range(0, G):
        q_head = head * G + g
        q = tl.load(q_ptr + b * q_b + q_head * q_h + d, mask=d < D, other=0.0).to(tl.float32)
        top = 0.0
        if MAP == "exp":
            logits = tl.where(d < D, q + shift, -float("inf"))
            top = tl.max(logits, 0)
            top = tl.where(top == -float("inf"), 0.0, top)
            queries = tl.exp(logits - top)
        else:
            queries = tl.where(d < D, phi(q, MAP), 0.0)
        num = tl.sum(total * queries[None, :], 1)
        if NORMALIZE:
            den = tl.sum(mass * queries, 0)
            num = num / tl.where(den == 0, 1.0, den)
        elif MAP == "exp":  # in two halves: exp(top) alone overflows before the product does
            half = tl.exp(tl.minimum(top / 2, 88.0))
            num = num * half * half
        to = out_ptr + (b * HKV * G + q_head) * E + e
        tl.store(to, num.to(out_ptr.dtype.element_ty), mask=e < E)
