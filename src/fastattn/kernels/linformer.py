"""Linformer, forward: keys and values become slots, and queries attend to those.

    compress   a tile of slots and columns: the sum over a split of the tokens
    add        the splits of anything, in their order
    attend     a split of the queries, a tile at a time: softmax over all slots

Letters: H query heads, G query heads per head of keys or slots, N queries, S keys, D and E widths,
SLOTS slots; FULL, they fill their tiles. Columns are those of all heads of a sample side by side
where heads share a projection (OWN is false), else those of one head. Slots are laid out (B, heads,
SLOTS, width). Rows of a projection that is read begin at multiples of 8, and it has zeros, or
nothing, behind S up to the next. Logits are to base 2. A PAIR is two of a kind, alike in shape and
strides, in one launch: a short kernel costs less than to launch another.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import begin, behind_first, launched, put, tile


@triton.jit
def columns(x_ptr, b, head, first, x_b, x_h, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr,
            UNIT: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """Where columns from ``first`` on begin: ``[C]`` pointers, and each one's head and place."""
    c = first + tl.arange(0, BLOCK_C)
    if OWN:
        of, at = head + tl.zeros_like(c), c
    else:
        of, at = c // WIDTH, c % WIDTH
    ptr = x_ptr + b * (x_b // UNIT * UNIT)
    return ptr + of * (x_h // UNIT * UNIT) + at, of, at


@triton.jit
def seen_tokens(hidden_ptr, n, S, MASKED: tl.constexpr):
    """``[N]``: tokens that exist and are not hidden."""
    keep = n < S
    if MASKED:
        keep = keep & (tl.load(hidden_ptr + n, mask=keep, other=1) == 0)
    return keep


@triton.jit
def split_of(length, BLOCK: tl.constexpr):
    """From where to where this program goes, of what its grid's second axis splits into tiles."""
    size = tl.cdiv(tl.cdiv(length, BLOCK), tl.num_programs(1)) * BLOCK
    low = tl.program_id(1) * size
    return low, tl.minimum(low + size, length)


@launched
def compress_kernel(
    x_ptr, proj_ptr, share_ptr, other_x_ptr, other_proj_ptr, other_share_ptr, hidden_ptr,
    x_b, x_h, x_n, p_h, p_k,
    H, G, S, SLOTS, BATCH, TILES,
    PAIR: tl.constexpr,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """H heads come out: of queries if OWN, else of keys; TILES tiles of columns in a sample."""
    pid = tl.program_id(0)
    b, which = (pid // TILES).to(tl.int64), pid % TILES
    split, part, parts = tl.program_id(1), tl.program_id(2), tl.cdiv(SLOTS, BLOCK_K)
    if PAIR:
        if part >= parts:
            part -= parts
            x_ptr, proj_ptr, share_ptr = other_x_ptr, other_proj_ptr, other_share_ptr
    head = which if OWN else 0
    first = 0 if OWN else which * BLOCK_C
    x, of, at = columns(x_ptr, b, head // G, first, x_b, x_h, WIDTH, BLOCK_C, UNIT, OWN)
    there = at < WIDTH if OWN else of < H
    x_n = x_n // UNIT * UNIT
    slot = part * BLOCK_K + tl.arange(0, BLOCK_K)
    proj_ptr += head * (p_h // 8 * 8) + slot.to(tl.int64)[:, None] * (p_k // 8 * 8)
    low, high = split_of(S, BLOCK_N)
    columns_there = (S + 7) // 8 * 8
    if MASKED:
        hidden_ptr += b * S
    acc = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for start in range(low, behind_first(low, high), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keep = seen_tokens(hidden_ptr, n, S, MASKED)
        inside = (slot < SLOTS)[:, None] & (n < columns_there)[None, :]
        p = tl.load(proj_ptr + n[None, :], mask=inside, other=0.0).to(DOT)  # [K, N]
        at_x = x[None, :] + n.to(tl.int64)[:, None] * x_n
        tokens = tl.load(at_x, mask=keep[:, None] & there[None, :], other=0.0).to(DOT)  # [N, C]
        acc = tl.dot(p, tokens, acc, input_precision=PRECISION)
    heads = of if not OWN else head + tl.zeros_like(of)
    row = ((split * BATCH + b) * H + heads) * SLOTS
    to = share_ptr + row[None, :] * WIDTH + slot[:, None] * WIDTH + at[None, :]
    acc = acc.to(share_ptr.dtype.element_ty)
    tl.store(to, acc, mask=(slot < SLOTS)[:, None] & there[None, :])


@launched
def add_kernel(
    share_ptr, sum_ptr, other_share_ptr, other_sum_ptr, COUNT, SPLITS,
    PAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PAIR:
        if tl.program_id(1) == 1:
            share_ptr, sum_ptr = other_share_ptr, other_sum_ptr
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(0, SPLITS):
        total += tl.load(share_ptr + split * COUNT + i, mask=i < COUNT, other=0.0)
    tl.store(sum_ptr + i, total.to(sum_ptr.dtype.element_ty), mask=i < COUNT)


@triton.jit
def slots_of(
    ptr, first, SLOTS, FULL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """``[K, BLOCK]``, slots from ``first`` on."""
    here = first + tl.arange(0, BLOCK_K) < SLOTS
    return tile(ptr, first, tl.cast(WIDTH, tl.int64), here, WIDTH, BLOCK, FULL).to(DOT)


@triton.jit
def meet(
    q, k, v, off_ptr, first, SLOTS, scale, acc, mass, top,
    MASKED: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries ``[Q, D]`` attend to a tile of slots: the sums so far, scaled to the new top."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [Q, K]
    if MASKED or not FULL:
        slot = first + tl.arange(0, k.shape[0])
        seen = seen_tokens(off_ptr, slot, SLOTS, MASKED)
        logits += tl.where(seen, 0.0, -float("inf"))[None, :]
    larger = tl.maximum(top, tl.max(logits, 1))
    level = tl.where(larger == -float("inf"), 0.0, larger) if MASKED else larger
    weights = tl.exp2(logits - level[:, None])
    shrink = tl.exp2(top - level)
    mass = mass * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, mass, larger


@launched
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, off_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_n,
    H, G, N, SLOTS,
    scale,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, HOLD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """HOLD: all slots are one tile and stay on chip; else they are loaded for every tile of q."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    slots_of_head = row_id // G * SLOTS
    keys_ptr += slots_of_head * D
    values_ptr += slots_of_head * E
    q_ptr, q_n = begin(q_ptr, b, head, 0, q_b, q_h, q_n, UNIT, False)
    if MASKED:
        off_ptr += b * SLOTS
    out_n = H.to(tl.int64) * E
    out_ptr += b * N * out_n + head * E
    lse_ptr += row_id * N
    if HOLD:
        k = slots_of(keys_ptr, 0, SLOTS, FULL, D, BLOCK_K, BLOCK_D, DOT)
        v = slots_of(values_ptr, 0, SLOTS, FULL, E, BLOCK_K, BLOCK_E, DOT)
    low, high = split_of(N, BLOCK_Q)
    for start in range(low, behind_first(low, high), BLOCK_Q):
        i = start + tl.arange(0, BLOCK_Q)
        q = tile(q_ptr, start, q_n, i < high, D, BLOCK_D).to(DOT)  # [Q, D]
        acc = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
        mass = tl.zeros((BLOCK_Q,), tl.float32)
        top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
        if HOLD:
            acc, mass, top = meet(
                q, k, v, off_ptr, 0, SLOTS, scale, acc, mass, top, MASKED, FULL, PRECISION
            )
        else:
            for first in range(0, SLOTS, BLOCK_K):
                k = slots_of(keys_ptr, first, SLOTS, FULL, D, BLOCK_K, BLOCK_D, DOT)
                v = slots_of(values_ptr, first, SLOTS, FULL, E, BLOCK_K, BLOCK_E, DOT)
                acc, mass, top = meet(
                    q, k, v, off_ptr, first, SLOTS, scale, acc, mass, top, MASKED, FULL, PRECISION
                )
        whole = top + tl.log2(mass)
        if MASKED:  # a sample may see no slot
            whole = tl.where(mass == 0, float("inf"), whole)
            mass = tl.where(mass == 0, 1.0, mass)
        put(out_ptr, start, out_n, i < high, acc / mass[:, None], E, BLOCK_E)
        tl.store(lse_ptr + i, whole, mask=i < high)
