"""FAVOR+ where row i sees keys 0 to i: states between chunks, features made inside.

    lift_keys      per key what its features lose for its length, for the lifted numbers
    prepare        the table's directions, a shift c for each feature that no key decides, and the
                   lifted numbers of the features
    states         per split of the keys: S and z before every chunk, and the split's share
    carry          S and z before every split, where there are several
    attend         a chunk of queries meets its keys and the state before it
    lift_queries   per query δ = dout·out; and it and its log-sum, lifted
    grad_queries   like attend, from the same states
    dstates        per split of the queries: dS and t after every chunk, and the split's share
    grad_keys      a chunk of keys meets its queries and what is after it

A key's feature is 2^(w·k - curvature·|k|²/2 - c), a query's 2^(w·q + c - top), with logarithms to
base 2. A key's exponent never exceeds that of |w|²/2, so a shift by it, less 96, would keep
features in float32 without a maximum over keys, which depends on later ones. But they are rounded
where they are large, and short keys have those near 0: c is not below 0, and not above 40. What is
left is kept between -100 and 96, so that every row has a weight and sums have room: there outputs
are inexact, but means of values seen.

Numbers for tokens and numbers for features meet in a product of width 16, which costs less than an
addition an element: a float32 is three bfloat16 that sum to it (``thirds``). The lifted numbers of
a feature are -1 three times, -c and the offset in thirds each (``lifted``). z and t are stored in
thirds, (3, M) each.

States of a split begin at zero: what is before it is added where they are read. Letters and
tables: ``favor``.
"""

import triton
import triton.language as tl

from fastattn.kernels.favor import LOG2E, directions, half_square, put_sums, rounded, rows
from fastattn.kernels.linear_attention_parts import (
    begin,
    behind_first,
    launched,
    put,
    span,
    split_size,
    tile,
    visible,
)

LEAST = tl.constexpr(-100.0)
MOST = tl.constexpr(96.0)
FARTHEST = tl.constexpr(40.0)


@triton.jit
def shift_of(squares, curvature):
    """Of features, from the squared lengths of their directions, scaled."""
    return tl.clamp(squares / (2 * LOG2E * curvature) - MOST, 0.0, FARTHEST)


@triton.jit
def thirds(x):
    """Three numbers that bfloat16 holds and that sum to x."""
    x = tl.clamp(x, -3e38, 3e38, propagate_nan=tl.PropagateNan.ALL)  # infinity times 0 is NaN
    high = x.to(tl.bfloat16).to(tl.float32)
    middle = (x - high).to(tl.bfloat16).to(tl.float32)
    return high, middle, x - high - middle


@triton.jit
def columns(x):
    """x [N] as ``[N, 16]``: in thirds, then zeros."""
    j = tl.arange(0, 16)[None, :]
    high, middle, low = thirds(x)
    found = tl.where(j == 0, high[:, None], tl.where(j == 1, middle[:, None], low[:, None]))
    return tl.where(j < 3, found, 0.0)


@triton.jit
def of_keys(x, DOT: tl.constexpr):
    """``[N, 16]`` that, times the lifted numbers, is -x - c."""
    j = tl.arange(0, 16)[None, :]
    return (columns(x) + tl.where((j >= 3) & (j < 6), 1.0, 0.0)).to(DOT)


@triton.jit
def of_queries(x, DOT: tl.constexpr):
    """``[N, 16]`` that, times the lifted numbers, is -x + c + offset."""
    j = tl.arange(0, 16)[None, :]
    sign = tl.where((j >= 3) & (j < 6), -1.0, tl.where((j >= 6) & (j < 9), 1.0, 0.0))
    return (columns(x) + sign).to(DOT)


@launched
def prepare_kernel(
    w_ptr, offset_ptr, table_ptr, lifted_ptr, shift_ptr,
    HKV, factor, curvature,
    D: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr, RELU: tl.constexpr,
    OFFSET: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: directions in DOT and lifted numbers of BLOCK_M features of one key head; and
    for a state the shifts, as natural logarithms."""
    row_id = tl.program_id(0).to(tl.int64)
    start_m = tl.program_id(1) * BLOCK_M
    m, d = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    w_ptr += row_id % HKV * OWN * (M * D)
    w = directions(w_ptr, start_m, factor, M, D, BLOCK_M, BLOCK_D, PRECISION, DOT)
    exists = (m < M)[:, None] & (d < D)[None, :]
    tl.store(table_ptr + row_id * (M * D) + m[:, None] * D + d[None, :], w, mask=exists)
    if not RELU:
        w = w.to(tl.float32)
        shift = shift_of(tl.sum(w * w, 1), curvature)
        offset = tl.zeros((BLOCK_M,), tl.float32)
        if OFFSET:
            offset = tl.load(offset_ptr + row_id % HKV * OWN * M + m, mask=m < M, other=0.0) * LOG2E
        j = tl.arange(0, 16)[None, :]
        given = tl.where(j < 3, -1.0, tl.where(j < 6, -shift[:, None], offset[:, None]))
        high, middle, low = thirds(tl.where(j < 9, given, 0.0))
        third = tl.where(j % 3 == 0, high, tl.where(j % 3 == 1, middle, low))
        if STATE:
            tl.store(shift_ptr + row_id * M + m, shift / LOG2E, mask=m < M)
        at = lifted_ptr + (row_id * M + m)[:, None] * 16 + j
        tl.store(at, tl.where(j < 3, given, third).to(DOT), mask=(m < M)[:, None])


@launched
def lift_keys_kernel(
    k_ptr, half_ptr,
    k_b, k_h, k_n,
    HKV, N, curvature,
    UNIT: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: what BLOCK_N keys of one head lose for their length, for the lifted numbers."""
    blocks = tl.cdiv(N, BLOCK_N)
    row_id = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_N
    k_ptr, k_n = begin(k_ptr, row_id // HKV, row_id % HKV, 0, k_b, k_h, k_n, UNIT, False)
    n = start + tl.arange(0, BLOCK_N)
    k = tile(k_ptr, start, k_n, n < N, D, BLOCK_D).to(tl.float32)
    half = half_square(k, curvature) + tl.sum(k * 0.0, 1)  # NaN, not large, where k is infinite
    put_sixteen(half_ptr + row_id * N * 16, start, N, of_keys(half, DOT))


@triton.jit
def sixteen(ptr, start, high, ROWS: tl.constexpr):
    """``[N, 16]`` of contiguous rows from ``start`` on, zero behind the end."""
    i = tl.arange(0, ROWS)
    at = tl.cast(start, tl.int64) * 16 + (i[:, None] * 16 + tl.arange(0, 16)[None, :])
    return tl.load(ptr + at, mask=(start + i < high)[:, None], other=0.0)


@triton.jit
def put_sixteen(ptr, start, high, value):
    """Store what :func:`sixteen` would load."""
    i = tl.arange(0, value.shape[0])
    at = tl.cast(start, tl.int64) * 16 + (i[:, None] * 16 + tl.arange(0, 16)[None, :])
    tl.store(ptr + at, value, mask=(start + i < high)[:, None])


@triton.jit
def state_at(b, start, first, N, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Where among all states that before the chunk is which begins at ``start`` of a sequence."""
    if PACKED:  # a segment's chunks begin anywhere, and it has at most one more than full ones
        return (first + start) // CHUNK + b
    return b * tl.cdiv(N, CHUNK) + start // CHUNK


@triton.jit
def split_at(cu_ptr, b, start, N, SPLITS, PACKED: tl.constexpr):
    """In which split of the states' kernel that token is."""
    length = N
    if PACKED:
        length = tl.load(cu_ptr + b + 1) - tl.load(cu_ptr + b)
    return start // split_size(length, SPLITS)


@triton.jit
def bounded(logits):
    """Exponents of keys within what float32 holds, with room for sums; a NaN stays one."""
    return tl.clamp(logits, LEAST, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def put_thirds(ptr, start_m, x, keep, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Store x [M] in thirds."""
    high, middle, low = thirds(x)
    m = start_m + tl.arange(0, BLOCK_M)
    dtype = ptr.dtype.element_ty
    tl.store(ptr + m, high.to(dtype), mask=(m < M) & keep)
    tl.store(ptr + M + m, middle.to(dtype), mask=(m < M) & keep)
    tl.store(ptr + 2 * M + m, low.to(dtype), mask=(m < M) & keep)


@triton.jit
def halves(x):
    """``[M, 2 N]`` as two of ``[M, N]``."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@launched
def states_kernel(
    k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, lifted_ptr, half_ptr,
    share_ptr, state_ptr, weight_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n,
    HKV, N,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    RELU: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M features, one split of the keys of one key head: S and z before every
    chunk, of that split alone, and its share."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // HKV, row_id % HKV
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    k_ptr, k_n = begin(k_ptr, b, head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, head, first, v_b, v_h, v_n, UNIT, PACKED)
    half_ptr += 16 * (head * N + first if PACKED else row_id * N)
    start_m = tl.program_id(2) * BLOCK_M
    w = rows(table_ptr + row_id * (M * D), start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
    lifted = rows(lifted_ptr + row_id * (M * 16), start_m, M, 16, BLOCK_M, 16)  # [M, 16]
    m, e = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    at = m[:, None] * E + e[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(low, behind_first(low, high), 2 * CHUNK):
        keep = visible(mask_ptr, start + tl.arange(0, 2 * CHUNK), high, MASKED)
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(DOT)  # [2 N, D]
        features = tl.dot(w, tl.trans(k), input_precision=PRECISION)  # [M, 2 N]
        if RELU:
            features = tl.where(features <= 0, 0.0, features)
        else:
            half = tl.trans(sixteen(half_ptr, start, high, 2 * CHUNK))
            features = tl.exp2(bounded(tl.dot(lifted, half, features, input_precision=PRECISION)))
        if MASKED or STATE:  # else what is behind the end is in no state that is read
            features = tl.where(keep[None, :], features, 0.0)
        pair = halves(features)
        for i in tl.static_range(2):
            begins = start + i * CHUNK
            here = state_at(b, begins, first, N, CHUNK, PACKED) * HKV + head
            now = rounded(total, PRECISION, DOT)
            tl.store(state_ptr + here * (M * E) + at, now, mask=exists & (begins < high))
            put_thirds(weight_ptr + here * (3 * M), start_m, mass, begins < high, M, BLOCK_M)
            keep = visible(mask_ptr, begins + tl.arange(0, CHUNK), high, MASKED)
            v = tile(v_ptr, begins, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
            mass += tl.sum(pair[i], 1)
            narrow = rounded(pair[i], PRECISION, DOT)
            total = tl.dot(narrow, v, total, input_precision=PRECISION)

    share = row_id * tl.num_programs(1) + tl.program_id(1)
    put_sums(share_ptr + share * (M * (E + 1)), start_m, total, mass, M, E, BLOCK_M, BLOCK_E)


@launched
def carry_kernel(
    share_ptr, before_ptr, weight_before_ptr, start_ptr, start_weight_ptr, end_ptr, end_weight_ptr,
    SHARES,
    E: tl.constexpr, M: tl.constexpr, STATE: tl.constexpr, BACKWARDS: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: the sum of the shares before every split, of BLOCK_M features of one head; or
    after it. With a state, they are added to that which it starts with, and it ends with all."""
    row_id = tl.program_id(0).to(tl.int64)
    start_m = tl.program_id(1) * BLOCK_M
    m, e = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    exists = (m < M)[:, None] & (e < E)[None, :]
    at = m[:, None] * E + e[None, :]
    if STATE:
        total = tl.load(start_ptr + row_id * M * E + at, mask=exists, other=0.0)
        mass = tl.load(start_weight_ptr + row_id * M + m, mask=m < M, other=0.0)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        mass = tl.zeros((BLOCK_M,), tl.float32)
    for i in range(0, SHARES):
        one = row_id * SHARES + (SHARES - 1 - i if BACKWARDS else i)
        now = rounded(total, PRECISION, DOT)
        tl.store(before_ptr + one * M * E + at, now, mask=exists)
        put_thirds(weight_before_ptr + one * (3 * M), start_m, mass, True, M, BLOCK_M)
        share = share_ptr + one * (M * (E + 1))
        total += tl.load(share + at, mask=exists, other=0.0)
        mass += tl.load(share + M * E + m, mask=m < M, other=0.0)
    if STATE:
        tl.store(end_ptr + row_id * M * E + at, total, mask=exists)
        tl.store(end_weight_ptr + row_id * M + m, mass, mask=m < M)


@triton.jit
def key_features(
    k, half, w, lifted, keep,
    RELU: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[N, M]``, zero for padding; keys behind the end are seen only from behind it."""
    features = tl.dot(k, tl.trans(w), input_precision=PRECISION)
    if RELU:
        features = tl.where(features <= 0, 0.0, features)
    else:
        logits = tl.dot(half, tl.trans(lifted), features, input_precision=PRECISION)
        features = tl.exp2(bounded(logits))
    if MASKED:
        features = tl.where(keep[:, None], features, 0.0)
    return features


@triton.jit
def query_logits(
    q, whole, w, lifted, start_m,
    RELU: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[N, M]`` logarithms of the queries' features, less ``whole``; -inf where is no feature.

    Of relu, the products themselves.
    """
    logits = tl.dot(q, tl.trans(w), input_precision=PRECISION)
    if not RELU:
        logits = tl.dot(whole, tl.trans(lifted), logits, input_precision=PRECISION)
        if M % BLOCK_M != 0:
            exists = start_m + tl.arange(0, BLOCK_M) < M
            logits = tl.where(exists[None, :], logits, -float("inf"))
    return logits


@triton.jit
def thirds_of(ptr, start_m, TIMES: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """``[16, M]`` of (3, M): its rows; or, TIMES, those that :func:`factors` meets in a product."""
    j, m = tl.arange(0, 16), start_m + tl.arange(0, BLOCK_M)
    row = j
    COUNT: tl.constexpr = 6 if TIMES else 3
    if TIMES:  # high, middle, low; high, middle; high
        row = tl.where(j < 3, j, tl.where(j < 5, j - 3, 0))
    exists = (j < COUNT)[:, None] & (m < M)[None, :]
    return tl.load(ptr + row[:, None] * M + m[None, :], mask=exists, other=0.0)


@triton.jit
def factors(x, DOT: tl.constexpr):
    """x [N] as ``[N, 16]`` that, times :func:`thirds_of`, is a product of two numbers."""
    j = tl.arange(0, 16)[None, :]
    high, middle, low = thirds(x)
    found = tl.where(j < 3, high[:, None], tl.where(j < 5, middle[:, None], low[:, None]))
    return tl.where(j < 6, found, 0.0).to(DOT)


@triton.jit
def finite_rows(v, past):
    """v with what is not finite set to zero, and ``[N]`` whether a row may see such a value.

    In a product it would reach earlier rows of its chunk, even times zero.
    """
    wrong = tl.where(v.to(tl.float32) * 0.0 == 0.0, 0, 1)
    reached = tl.max(tl.where(past, tl.max(wrong, 1)[None, :], 0), 1)
    return tl.where(wrong == 0, v, 0.0), reached


@launched
def attend_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, cu_ptr, table_ptr, lifted_ptr, half_ptr,
    state_ptr, weight_ptr, before_ptr, weight_before_ptr, out_ptr, row_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    H, G, N, SPLITS,
    UNIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, RELU: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, BEFORE: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: one split of the tokens of one head."""
    row_id = tl.program_id(0).to(tl.int64)
    b, head = row_id // H, row_id % H
    key_row, key_head, HKV = row_id // G, head // G, H // G
    first, low, high = span(cu_ptr, b, N, PACKED)
    if MASKED:
        mask_ptr += first if PACKED else b * N
    q_ptr, q_n = begin(q_ptr, b, head, first, q_b, q_h, q_n, UNIT, PACKED)
    k_ptr, k_n = begin(k_ptr, b, key_head, first, k_b, k_h, k_n, UNIT, PACKED)
    v_ptr, v_n = begin(v_ptr, b, key_head, first, v_b, v_h, v_n, UNIT, PACKED)
    out_n = H.to(tl.int64) * E
    out_ptr += (first if PACKED else b * N) * out_n + head * E
    row_ptr += head * N + first if PACKED else row_id * N
    half_ptr += 16 * (key_head * N + first if PACKED else key_row * N)
    table_ptr += key_row * (M * D)
    lifted_ptr += key_row * (M * 16)

    i = tl.arange(0, CHUNK)
    past = i[:, None] >= i[None, :]
    zero = of_queries(tl.zeros((CHUNK,), tl.float32), DOT)
    for start in range(low, behind_first(low, high), CHUNK):
        n = start + i
        keep = visible(mask_ptr, n, high, MASKED)
        q = tile(q_ptr, start, q_n, n < high, D, BLOCK_D).to(DOT)  # [N, D]
        k = tile(k_ptr, start, k_n, keep, D, BLOCK_D).to(DOT)  # [N, D]
        v = tile(v_ptr, start, v_n, keep, E, BLOCK_E).to(DOT)  # [N, E]
        half = sixteen(half_ptr, start, high, CHUNK)
        there = tl.where(start < high, start, 0)  # an empty split reads nothing out of bounds
        here = state_at(b, there, first, N, CHUNK, PACKED) * HKV + key_head
        if BEFORE:
            split = key_row * SPLITS + split_at(cu_ptr, b, there, N, SPLITS, PACKED)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        num = tl.zeros((CHUNK, BLOCK_E), tl.float32)
        den = tl.zeros((CHUNK, 16), tl.float32)  # its columns' sum
        top = tl.full((CHUNK,), 0.0 if RELU else -float("inf"), tl.float32)
        for start_m in range(0, M, BLOCK_M):
            w = rows(table_ptr, start_m, M, D, BLOCK_M, BLOCK_D)  # [M, D]
            lifted = rows(lifted_ptr, start_m, M, 16, BLOCK_M, 16)  # [M, 16]
            state = rows(state_ptr + here * (M * E), start_m, M, E, BLOCK_M, BLOCK_E)  # [M, E]
            weight = thirds_of(weight_ptr + here * (3 * M), start_m, False, M, BLOCK_M)  # [16, M]
            logits = query_logits(q, zero, w, lifted, start_m, RELU, M, BLOCK_M, PRECISION)
            if RELU:
                queries = tl.where(logits <= 0, 0.0, logits)  # [N, M]
            else:
                larger = tl.maximum(top, tl.max(logits, 1))
                scale = tl.exp2(top - larger)[:, None]
                queries = tl.exp2(logits - larger[:, None])
                top = larger
                num, den, scores = num * scale, den * scale, scores * scale
            queries = rounded(queries, PRECISION, DOT)
            num = tl.dot(queries, state, num, input_precision=PRECISION)
            den = tl.dot(queries, tl.trans(weight), den, input_precision=PRECISION)
            if BEFORE:
                state = rows(before_ptr + split * (M * E), start_m, M, E, BLOCK_M, BLOCK_E)
                weight = thirds_of(weight_before_ptr + split * (3 * M), start_m, False, M, BLOCK_M)
                num = tl.dot(queries, state, num, input_precision=PRECISION)
                den = tl.dot(queries, tl.trans(weight), den, input_precision=PRECISION)
            keys = key_features(k, half, w, lifted, keep, RELU, MASKED, PRECISION)
            keys = rounded(keys, PRECISION, DOT)
            scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
        scores = tl.where(past, scores, 0.0)  # [N, N]
        whole = tl.sum(den, 1) + tl.sum(scores, 1)
        empty = whole == 0
        scores = scores.to(DOT)
        own = tl.dot(scores, v, input_precision=PRECISION)  # [N, E]
        if tl.sum(own * 0.0) != 0:
            v, reached = finite_rows(v, past)
            own = tl.dot(scores, v, input_precision=PRECISION)
            own = tl.where(reached[:, None] > 0, float("nan"), own)
        over = tl.div_rn(1.0, tl.where(empty, 1.0, whole))  # [N]
        if PRECISION == "ieee":
            num = tl.div_rn(num + own, tl.where(empty, 1.0, whole)[:, None])
        else:
            num = (num + own) * over[:, None]
        put(out_ptr, start, out_n, n < high, num, E, BLOCK_E)
        # a row without a key weighs nothing in the backward pass
        if RELU:
            whole = tl.where(empty, 0.0, over)
        else:
            whole = tl.where(empty, float("inf"), top + tl.log2(whole))
        tl.store(row_ptr + n, whole, mask=n < high)
