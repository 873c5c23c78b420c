"""Block-sparse attention, forward: one program for a part of the list of a block of queries.

    attend   a tile of queries meets the blocks of one part; a row in one part is finished here
    merge    adds the parts of a row that was cut, in their order

Letters: H query heads, G query heads per key head, N queries, S keys, D and E widths, SIZE tokens
in a block of the layout, BLOCK_Q and BLOCK_K tokens in a tile, divisors of it. Logits are to base
2. A program is a tile of an item of the tables of one sample and head.

Tables are (planes, p, h, items): which pattern a sample and a head have is the row TABLE_B·b +
TABLE_H·head. ``items`` has the planes row, first entry, number of entries, slot, and whether it
leads its row; ``merges`` row, first slot and number of parts. A row without a key has the log-sum
inf, so that its weights are 0 in the backward pass without a question. What does not exist has a
row behind the last, and stores nothing.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import begin, behind_first, launched, put, tile


@triton.jit
def program(ITEMS, SUBS: tl.constexpr):
    """Which sample and head, item and tile a program has: one head after the other, so that what
    its rows gather from all over the sequence is in the cache."""
    pid = tl.program_id(0)
    item = pid // SUBS
    return (item // ITEMS).to(tl.int64), item % ITEMS, pid % SUBS


@triton.jit
def pattern(b, head, TABLE_B, TABLE_H):
    """Which pattern of the tables this sample and head have."""
    return (b * TABLE_B + head * TABLE_H).to(tl.int64)


@triton.jit
def part_at(items_ptr, which, item, ITEMS, PLANE):
    """A part: its row, its first entry, how many entries, and the slot for its sums, or -1."""
    items_ptr += which * ITEMS + item
    return (
        tl.load(items_ptr),
        tl.load(items_ptr + PLANE),
        tl.load(items_ptr + 2 * tl.cast(PLANE, tl.int64)),
        tl.load(items_ptr + 3 * tl.cast(PLANE, tl.int64)),
    )


@triton.jit
def entry_at(blocks_ptr, weight_ptr, entry, count, WEIGHTED: tl.constexpr):
    """An entry's block, and what is added to its logits; anything behind the last."""
    there = entry < count
    block = tl.load(blocks_ptr + entry, mask=there, other=0)
    weight = 0.0
    if WEIGHTED:
        weight = tl.load(weight_ptr + entry, mask=there, other=0.0)
    return block, weight


@triton.jit
def words_at(
    words_ptr, block, sub, there,
    SIZE: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Which keys of a tile are seen, a bit each: of the first 32 and of those behind."""
    low, high = 0, 0
    if MASKED:
        tl.static_assert(BLOCK_K <= 64)
        first = block * SIZE + sub * BLOCK_K
        low = tl.load(words_ptr + first // 32, mask=there, other=0)
        if BLOCK_K == 64:
            high = tl.load(words_ptr + first // 32 + 1, mask=there, other=0)
        elif BLOCK_K == 16:
            low = (low >> (first % 32)) & 0xFFFF
    return low, high


@triton.jit
def seen_keys(low, high, j, S, BLOCK_K: tl.constexpr, MASKED: tl.constexpr):
    """``[K]``: keys that exist and are not hidden."""
    if MASKED:
        place = tl.arange(0, BLOCK_K)
        return ((tl.where(place < 32, low, high) >> (place % 32)) & 1) != 0
    return j < S


@triton.jit
def add_keys(
    logits, scale, weight, keep, i, j,
    FULL: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """To base 2 (but if FULL and not CAUSAL), with what keys add; -inf for keys not seen.

    A query may be NaN that sees no key: where a part of its keys may be hidden from it, they are
    chosen, not added.
    """
    if not FULL:
        logits = logits * scale + tl.where(keep, weight, -float("inf"))[None, :]
    elif CAUSAL:
        logits = logits * scale
    if CAUSAL:
        later = i[:, None] < j[None, :]
        if MASKED:
            later = later | (keep == 0)[None, :]
        logits = tl.where(later, -float("inf"), logits)
    return logits


@triton.jit
def stays(
    seed_ptr, b, head, start_i, start_j, THRESHOLD, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """``[Q, K]``: the weights that dropout leaves: ``ops.philox.kept``."""
    seed = tl.load(seed_ptr)
    i = start_i + tl.arange(0, BLOCK_Q)[:, None]
    four = start_j // 4 + tl.arange(0, BLOCK_K // 4)[None, :]
    four = four + tl.zeros((BLOCK_Q, BLOCK_K // 4), tl.int32)
    zero = tl.zeros_like(four)
    head, b = tl.cast(head, tl.int32) + zero, tl.cast(b, tl.int32) + zero
    c0, c1, c2, c3 = tl.philox(seed, four, i + zero, head, b)
    words = tl.join(tl.join(c0, c1), tl.join(c2, c3))  # [Q, K / 4, within a pair, pair]
    words = tl.reshape(tl.permute(words, (0, 1, 3, 2)), (BLOCK_Q, BLOCK_K))
    return words.to(tl.uint32).to(tl.int64) >= THRESHOLD


@triton.jit
def put_part(
    ptr, sums, first, sub,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Store a tile ``[BLOCK, WIDTH]`` in a slot of rows of EACH floats, from ``first`` on."""
    i, x = sub * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    at = first + i[:, None] * EACH + x[None, :]
    tl.store(ptr + at, sums, mask=(x < WIDTH)[None, :])


@triton.jit
def get_part(
    ptr, first, sub,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    i, x = sub * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    at = first + i[:, None] * EACH + x[None, :]
    return tl.load(ptr + at, mask=(x < WIDTH)[None, :], other=0.0)


@triton.jit
def finish(
    out_ptr, lse_ptr, start, out_n, here, N, end, acc, top, mass, keep_scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store outputs and log-sums of rows; zeros and inf for those that see nothing."""
    i = start + tl.arange(0, acc.shape[0])
    empty = (mass == 0) | (i >= tl.minimum(N, end))
    acc = tl.where(empty[:, None], 0.0, acc * (keep_scale / tl.where(empty, 1.0, mass))[:, None])
    put(out_ptr, start, out_n, here & (i < N), acc, E, BLOCK_E)
    whole = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, mass)))
    tl.store(lse_ptr + i, whole, mask=here)


@launched
def attend_kernel(
    q_ptr, k_ptr, v_ptr, words_ptr, lens_ptr, seed_ptr, blocks_ptr, weight_ptr, items_ptr,
    out_ptr, lse_ptr, share_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, G, N, S, PADDED, WORDS, ITEMS, PLANE, ROOM, TABLE_B, TABLE_H, SHARES, THRESHOLD,
    scale, keep_scale,
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
    start = row * SIZE + sub * BLOCK_Q
    i = start + tl.arange(0, BLOCK_Q)
    end = N
    if LENGTHS:
        end = tl.load(lens_ptr + b)
    q = tile(q_ptr, start, q_n, (i < N) & (i < end), D, BLOCK_D).to(DOT)  # [Q, D]

    acc = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK_Q,), tl.float32)
    base: tl.constexpr = FULL and not CAUSAL  # where the scale is a part of the exponent's product
    total, some = count * SUBS_K, 0
    block, weight = entry_at(blocks_ptr, weight_ptr, 0, count, WEIGHTED)
    low, high = words_at(words_ptr, block, 0, 0 < total, SIZE, BLOCK_K, MASKED)
    coming, its_weight = entry_at(blocks_ptr, weight_ptr, 1 // SUBS_K, count, WEIGHTED)
    for turn in range(0, behind_first(0, total)):
        start_j = block * SIZE + turn % SUBS_K * BLOCK_K
        j = start_j + tl.arange(0, BLOCK_K)
        keep = seen_keys(low, high, j, S, BLOCK_K, MASKED)
        some = some | low | high
        k = tile(k_ptr, start_j, k_n, keep, D, BLOCK_D, FULL).to(DOT)  # [K, D]
        v = tile(v_ptr, start_j, v_n, keep, E, BLOCK_E, FULL).to(DOT)  # [K, E]
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [Q, K]
        logits = add_keys(logits, scale, weight, keep, i, j, FULL, MASKED, CAUSAL)
        larger = tl.maximum(top, tl.max(logits, 1) * (scale if base else 1.0))
        level = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(logits * (scale if base else 1.0) - level[:, None])
        shrink = tl.exp2(top - level)
        mass = mass * shrink + tl.sum(weights, 1)
        if DROPS:
            stay = stays(seed_ptr, b, head, start, start_j, THRESHOLD, BLOCK_Q, BLOCK_K)
            weights = tl.where(stay, weights, 0.0)
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision=PRECISION)
        top = larger
        # two turns and one ahead: where keys are must be known before they can be loaded early;
        # what passes through untouched, Triton takes as a reason not to
        block, weight = tl.maximum(coming, 0), its_weight
        low, high = words_at(
            words_ptr, block, (turn + 1) % SUBS_K, turn + 1 < total, SIZE, BLOCK_K, MASKED
        )
        coming, its_weight = entry_at(blocks_ptr, weight_ptr, (turn + 2) // SUBS_K, count, WEIGHTED)
    there = count > 0
    if MASKED:
        there = some != 0
    acc, mass = tl.where(there, acc, 0.0), tl.where(there, mass, 0.0)
    top = tl.where(there, top, -float("inf"))

    if slot < 0:
        out_n = H.to(tl.int64) * E
        out_ptr += b * N * out_n + head * E
        finish(out_ptr, lse_ptr + row_id * PADDED, start, out_n, start < PADDED, N, end,
               acc, top, mass, keep_scale, E, BLOCK_E)  # fmt: skip
    else:
        share_ptr += (row_id * SHARES + slot) * (SIZE * (E + 2))
        put_part(share_ptr, acc, 0, sub, BLOCK_Q, E, BLOCK_E, E + 2)
        put_part(share_ptr, top[:, None], E, sub, BLOCK_Q, 1, 1, E + 2)
        put_part(share_ptr, mass[:, None], E + 1, sub, BLOCK_Q, 1, 1, E + 2)


@launched
def merge_kernel(
    share_ptr, lens_ptr, merges_ptr, out_ptr, lse_ptr,
    H, N, PADDED, ITEMS, PLANE, TABLE_B, TABLE_H, SHARES,
    keep_scale,
    E: tl.constexpr, SIZE: tl.constexpr, LENGTHS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = SIZE // BLOCK_Q
    row_id, item, sub = program(ITEMS, SUBS)
    b, head = row_id // H, row_id % H
    merges_ptr += pattern(b, head, TABLE_B, TABLE_H) * ITEMS + item
    row, first = tl.load(merges_ptr), tl.load(merges_ptr + PLANE)
    count = tl.load(merges_ptr + 2 * tl.cast(PLANE, tl.int64))
    share_ptr += (row_id * SHARES + first) * (SIZE * (E + 2))
    start = row * SIZE + sub * BLOCK_Q
    end = N
    if LENGTHS:
        end = tl.load(lens_ptr + b)
    acc = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK_Q,), tl.float32)
    for part in tl.range(0, count, loop_unroll_factor=4):
        ptr = share_ptr + part * (SIZE * (E + 2))
        other = get_part(ptr, 0, sub, BLOCK_Q, E, BLOCK_E, E + 2)
        its_top = tl.sum(get_part(ptr, E, sub, BLOCK_Q, 1, 1, E + 2), 1)
        its_mass = tl.sum(get_part(ptr, E + 1, sub, BLOCK_Q, 1, 1, E + 2), 1)
        larger = tl.maximum(top, its_top)
        level = tl.where(larger == -float("inf"), 0.0, larger)
        shrink, its_shrink = tl.exp2(top - level), tl.exp2(its_top - level)
        acc = acc * shrink[:, None] + other * its_shrink[:, None]
        mass = mass * shrink + its_mass * its_shrink
        top = larger
    out_n = H.to(tl.int64) * E
    out_ptr += b * N * out_n + head * E
    finish(out_ptr, lse_ptr + row_id * PADDED, start, out_n, start < PADDED, N, end,
           acc, top, mass, keep_scale, E, BLOCK_E)  # fmt: skip
