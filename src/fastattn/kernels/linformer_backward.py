"""Linformer, backward; letters are in ``linformer``.

    grad_slots        a split of the queries meets a tile of slots: their gradients, and dq
    grad_tokens       a tile of tokens: dk, or dv, from the gradients of slots
    grad_projection   a tile of a projection: complete, over all samples, and heads that share it

The gradients of slots, and dq where slots are more than a tile, are sums of parts, which
``linformer.add`` adds in their order.
"""

import triton.language as tl

from fastattn.kernels.linear_attention_parts import begin, launched, tile
from fastattn.kernels.linformer import columns, seen_tokens


@launched
def grad_slots_kernel(
    q_ptr, keys_ptr, values_ptr, off_ptr, out_ptr, dout_ptr, lse_ptr,
    dkeys_ptr, dvalues_ptr, dq_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    H, G, N, SLOTS, SPLITS, BATCH,
    scale, slope,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dkeys (SPLITS, B, H, SLOTS, D), dvalues; dq (tiles of slots, B, N, H, D)."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    split, tile_k = tl.program_id(1), tl.program_id(2)
    slots_of = row_id // G
    q_ptr, q_n = begin(q_ptr, b, head, 0, q_b, q_h, q_n, UNIT, False)
    dout_ptr, dout_n = begin(dout_ptr, b, head, 0, dout_b, dout_h, dout_n, UNIT, False)
    out_n, dq_n = H.to(tl.int64) * E, H.to(tl.int64) * D
    out_ptr += b * N * out_n + head * E
    dq_ptr += (tile_k * BATCH + b) * N * dq_n + head * D
    lse_ptr += row_id * N
    first = tile_k * BLOCK_K
    slot = first + tl.arange(0, BLOCK_K)
    here = slot < SLOTS
    k = tile(keys_ptr + slots_of * SLOTS * D, first, tl.cast(D, tl.int64), here, D, BLOCK_D)
    v = tile(values_ptr + slots_of * SLOTS * E, first, tl.cast(E, tl.int64), here, E, BLOCK_E)
    k, v = k.to(DOT), v.to(DOT)
    seen = seen_tokens(off_ptr + b * SLOTS if MASKED else off_ptr, slot, SLOTS, MASKED)
    none = tl.where(seen, 0.0, -float("inf"))
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_E), tl.float32)
    size = tl.cdiv(tl.cdiv(N, BLOCK_Q), SPLITS) * BLOCK_Q
    low = split * size
    for start in range(low, tl.minimum(low + size, N), BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        inside = i < N
        q = tile(q_ptr, start, q_n, inside, D, BLOCK_D).to(DOT)  # [Q, D]
        dout = tile(dout_ptr, start, dout_n, inside, E, BLOCK_E)  # [Q, E]
        out = tile(out_ptr, start, out_n, inside, E, BLOCK_E)
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
        dout = dout.to(DOT)
        whole = tl.load(lse_ptr + i, mask=inside, other=float("inf"))
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [K, Q]
        logits = logits * scale + none[:, None]
        weights = tl.exp2(logits - whole[None, :])
        dv = tl.dot(weights.to(DOT), dout, dv, input_precision=PRECISION)
        slopes = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [K, Q]
        slopes = (weights * (slopes - delta[None, :])).to(DOT)
        dk = tl.dot(slopes, q, dk, input_precision=PRECISION)
        dq = tl.dot(tl.trans(slopes), k, input_precision=PRECISION)  # [Q, D]
        x = tl.arange(0, BLOCK_D)
        to = dq_ptr + i.to(tl.int64)[:, None] * dq_n + x[None, :]
        value = (dq * slope).to(dq_ptr.dtype.element_ty)
        tl.store(to, value, mask=inside[:, None] & (x < D)[None, :])
    row = ((split * BATCH * H + row_id) * SLOTS + slot)[:, None]
    x, y = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    tl.store(dkeys_ptr + row * D + x, dk * slope, mask=here[:, None] & (x < D))
    tl.store(dvalues_ptr + row * E + y, dv, mask=here[:, None] & (y < E))


@launched
def grad_tokens_kernel(
    dslots_ptr, proj_ptr, hidden_ptr, dx_ptr,
    p_h, p_k,
    HKV, G, S, SLOTS, TILES,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx (B, S, HKV, WIDTH) of dslots (B, heads, SLOTS, WIDTH): if OWN of G heads to each."""
    parts = tl.cdiv(S, BLOCK_N)
    pid = tl.program_id(0) // parts
    b, which = (pid // TILES).to(tl.int64), pid % TILES
    c = tl.arange(0, BLOCK_C)
    if OWN:
        of, at = which + tl.zeros_like(c), c
        there = c < WIDTH
    else:
        of, at = (which * BLOCK_C + c) // WIDTH, (which * BLOCK_C + c) % WIDTH
        there = of < HKV
    n = tl.program_id(0) % parts * BLOCK_N + tl.arange(0, BLOCK_N)
    if MASKED:
        hidden_ptr += b * S
    keep = seen_tokens(hidden_ptr, n, S, MASKED)
    acc = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    turns = tl.cdiv(SLOTS, BLOCK_K)
    for turn in range(0, turns * G if OWN else turns):
        head = which * G + turn // turns if OWN else 0
        slot = turn % turns * BLOCK_K + tl.arange(0, BLOCK_K)
        here = slot < SLOTS
        at_p = proj_ptr + head * p_h + slot.to(tl.int64)[:, None] * p_k + n[None, :]
        p = tl.load(at_p, mask=here[:, None] & (n < S)[None, :], other=0.0).to(DOT)  # [K, N]
        row = (b * HKV * G + head if OWN else b * HKV + of) * SLOTS
        at_d = dslots_ptr + (row + tl.zeros_like(of))[None, :] * WIDTH + at[None, :]
        inside = here[:, None] & there[None, :]
        d = tl.load(at_d + slot[:, None] * WIDTH, mask=inside, other=0.0).to(DOT)  # [K, C]
        acc = tl.dot(tl.trans(p), d, acc, input_precision=PRECISION)
    acc = tl.where(keep[:, None], acc, 0.0)
    to = dx_ptr + ((b * S + n)[:, None] * HKV + of[None, :]) * WIDTH + at[None, :]
    inside = (n < S)[:, None] & there[None, :]
    tl.store(to, acc.to(dx_ptr.dtype.element_ty), mask=inside)


@launched
def grad_projection_kernel(
    x_ptr, dslots_ptr, hidden_ptr, dproj_ptr,
    x_b, x_h, x_n, p_h, p_k,
    H, G, S, SLOTS, BATCH,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dslots is (BATCH, H, SLOTS, WIDTH): one head each if OWN, else all heads add to one sum."""
    head = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    all_columns = WIDTH if OWN else H * WIDTH
    turns = tl.cdiv(all_columns, BLOCK_C)
    x_n = x_n // UNIT * UNIT
    for turn in range(0, turns * BATCH):
        b, first = (turn // turns).to(tl.int64), turn % turns * BLOCK_C
        x, of, at = columns(x_ptr, b, head // G, first, x_b, x_h, WIDTH, BLOCK_C, UNIT, OWN)
        there = at < WIDTH if OWN else of < H
        keep = seen_tokens(hidden_ptr + b * S if MASKED else hidden_ptr, n, S, MASKED)
        at_x = x[None, :] + n.to(tl.int64)[:, None] * x_n
        tokens = tl.load(at_x, mask=keep[:, None] & there[None, :], other=0.0).to(DOT)  # [N, C]
        row = (b * H + (head + tl.zeros_like(of) if OWN else of)) * SLOTS
        at_d = dslots_ptr + row[None, :] * WIDTH + slot[:, None] * WIDTH + at[None, :]
        inside = (slot < SLOTS)[:, None] & there[None, :]
        d = tl.load(at_d, mask=inside, other=0.0).to(DOT)  # [K, C]
        acc = tl.dot(d, tl.trans(tokens), acc, input_precision=PRECISION)
    to = dproj_ptr + head * p_h + slot.to(tl.int64)[:, None] * p_k + n[None, :]
    inside = (slot < SLOTS)[:, None] & (n < S)[None, :]
    tl.store(to, acc.to(dproj_ptr.dtype.element_ty), mask=inside)
