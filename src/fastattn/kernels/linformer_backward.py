"""Linformer, backward; letters are in ``linformer``.

    grad_slots        a split of the queries meets a tile of slots: their gradients, and dq
    grad_tokens       a tile of tokens: dk, or dv, from the gradients of slots
    grad_projection   a tile of a projection: complete, over all samples, and heads that share it

The gradients of slots, and dq where slots are more than a tile, are sums of parts, which
``linformer.add`` adds in their order.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import begin, behind_first, launched, put, tile
from fastattn.kernels.linformer import columns, seen_tokens, slots_of, split_of


@launched
def grad_slots_kernel(
    q_ptr, keys_ptr, values_ptr, off_ptr, out_ptr, dout_ptr, lse_ptr,
    dkeys_ptr, dvalues_ptr, dq_ptr,
    q_b, q_h, q_n, dout_b, dout_h, dout_n,
    H, G, N, SLOTS, BATCH,
    scale, slope,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dkeys (splits, B, H, SLOTS, D), dvalues; dq (programs of slots, B, N, H, D).

    dq is summed transposed: a product has 64 rows, D are enough of them, and then a tile may be of
    32 queries.
    """
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    split, part = tl.program_id(1), tl.program_id(2)
    slots_of_head = row_id // G * SLOTS
    q_ptr, q_n = begin(q_ptr, b, head, 0, q_b, q_h, q_n, UNIT, False)
    dout_ptr, dout_n = begin(dout_ptr, b, head, 0, dout_b, dout_h, dout_n, UNIT, False)
    out_n, dq_n = H.to(tl.int64) * E, H.to(tl.int64) * D
    out_ptr += b * N * out_n + head * E
    dq_ptr += (part * BATCH + b) * N * dq_n + head * D
    lse_ptr += row_id * N
    if MASKED:
        off_ptr += b * SLOTS
    first = part * BLOCK_K
    slot = first + tl.arange(0, BLOCK_K)
    k = slots_of(keys_ptr + slots_of_head * D, first, SLOTS, FULL, D, BLOCK_K, BLOCK_D, DOT)
    v = slots_of(values_ptr + slots_of_head * E, first, SLOTS, FULL, E, BLOCK_K, BLOCK_E, DOT)
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_E), tl.float32)
    low, high = split_of(N, BLOCK_Q)
    for start in range(low, behind_first(low, high), BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        q = tile(q_ptr, start, q_n, i < high, D, BLOCK_D).to(DOT)  # [Q, D]
        dout = tile(dout_ptr, start, dout_n, i < high, E, BLOCK_E)  # [Q, E]
        out = tile(out_ptr, start, out_n, i < high, E, BLOCK_E)
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
        dout = dout.to(DOT)
        whole = tl.load(lse_ptr + i, mask=i < high, other=float("inf"))
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [K, Q]
        weights = tl.exp2(logits * scale - whole[None, :])
        if MASKED or not FULL:
            seen = seen_tokens(off_ptr, slot, SLOTS, MASKED)
            weights = tl.where(seen[:, None], weights, 0.0)
        dv = tl.dot(weights.to(DOT), dout, dv, input_precision=PRECISION)
        slopes = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [K, Q]
        slopes = (weights * (slopes - delta[None, :])).to(DOT)
        dk = tl.dot(slopes, q, dk, input_precision=PRECISION)
        dq = tl.dot(tl.trans(k), slopes, input_precision=PRECISION)  # [D, Q]
        put(dq_ptr, start, dq_n, i < high, tl.trans(dq) * slope, D, BLOCK_D)
    here = (slot < SLOTS)[:, None]
    row = ((split * BATCH * H + row_id) * SLOTS + slot)[:, None]
    x, y = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    dk = (dk * slope).to(dkeys_ptr.dtype.element_ty)
    tl.store(dkeys_ptr + row * D + x, dk, mask=here & (x < D))
    tl.store(dvalues_ptr + row * E + y, dv.to(dvalues_ptr.dtype.element_ty), mask=here & (y < E))


@triton.jit
def from_slots(
    acc, dslots_ptr, proj_ptr, p_h, p_k, first_head, row, at, there, n, G, S, SLOTS,
    WIDTH: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds ``[N, C]``, what all slots hand to a tile of tokens: of G heads if OWN.

    ``row`` is where the slots of each column begin, of the first head.
    """
    columns_there = (S + 7) // 8 * 8
    p_h, p_k = p_h // 8 * 8, p_k // 8 * 8
    turns = tl.cdiv(SLOTS, BLOCK_K)
    for turn in range(0, behind_first(0, turns * G if OWN else turns)):
        more = turn // turns if OWN else 0  # heads behind the first
        slot = turn % turns * BLOCK_K + tl.arange(0, BLOCK_K)
        here = slot < SLOTS
        at_p = proj_ptr + (first_head + more) * p_h + slot.to(tl.int64)[:, None] * p_k + n[None, :]
        p = tl.load(at_p, mask=here[:, None] & (n < columns_there)[None, :], other=0.0)
        p = p.to(DOT)  # [K, N]
        at_d = dslots_ptr + (row + more * SLOTS)[None, :] * WIDTH + at[None, :]
        inside = here[:, None] & there[None, :]
        d = tl.load(at_d + slot[:, None] * WIDTH, mask=inside, other=0.0).to(DOT)  # [K, C]
        acc = tl.dot(tl.trans(p), d, acc, input_precision=PRECISION)
    return acc


@launched
def grad_tokens_kernel(
    dslots_ptr, proj_ptr, dx_ptr, other_dslots_ptr, other_proj_ptr, other_dx_ptr, hidden_ptr,
    p_h, p_k,
    HKV, G, S, SLOTS, TILES,
    PAIR: tl.constexpr, SAME: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx (B, S, HKV, WIDTH) of dslots (B, heads, SLOTS, WIDTH): if OWN of G heads to each.

    If SAME, the other's are the same tokens, and dx is the sum.
    """
    if PAIR and not SAME:
        if tl.program_id(1) == 1:
            dslots_ptr, proj_ptr, dx_ptr = other_dslots_ptr, other_proj_ptr, other_dx_ptr
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
    head = which * G if OWN else 0
    row = ((b * HKV + of) * G if OWN else b * HKV + of) * SLOTS
    acc = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    acc = from_slots(acc, dslots_ptr, proj_ptr, p_h, p_k, head, row, at, there, n, G, S, SLOTS,
                     WIDTH, OWN, PRECISION, DOT, BLOCK_K)  # fmt: skip
    if SAME:
        acc = from_slots(acc, other_dslots_ptr, other_proj_ptr, p_h, p_k, head, row, at, there, n,
                         G, S, SLOTS, WIDTH, OWN, PRECISION, DOT, BLOCK_K)  # fmt: skip
    if MASKED:
        acc = tl.where(seen_tokens(hidden_ptr + b * S, n, S, MASKED)[:, None], acc, 0.0)
    to = dx_ptr + ((b * S + n)[:, None] * HKV + of[None, :]) * WIDTH + at[None, :]
    inside = (n < S)[:, None] & there[None, :]
    tl.store(to, acc.to(dx_ptr.dtype.element_ty), mask=inside)


@launched
def grad_projection_kernel(
    x_ptr, dslots_ptr, dproj_ptr, other_x_ptr, other_dslots_ptr, other_dproj_ptr, hidden_ptr,
    x_b, x_h, x_n, p_h, p_k,
    H, G, S, SLOTS, BATCH,
    PAIR: tl.constexpr,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dslots is (BATCH, H, SLOTS, WIDTH): one head each if OWN, else all heads add to one sum."""
    head = tl.program_id(2)
    if PAIR:
        heads = H if OWN else 1
        if head >= heads:
            head -= heads
            x_ptr, dslots_ptr, dproj_ptr = other_x_ptr, other_dslots_ptr, other_dproj_ptr
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    all_columns = WIDTH if OWN else H * WIDTH
    turns = tl.cdiv(all_columns, BLOCK_C)
    x_n = x_n // UNIT * UNIT
    for turn in range(0, behind_first(0, turns * BATCH)):
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
