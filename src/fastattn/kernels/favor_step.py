"""FAVOR+, one token: make its features, update the state, answer, in one kernel."""

import triton
import triton.language as tl

from fastattn.kernels.favor import LOG2E, rounded
from fastattn.kernels.favor_causal import LEAST, MOST, bounded, shift_of
from fastattn.kernels.linear_attention_parts import launched


@triton.jit
def products(
    w_ptr, x_ptr, keep, factor,
    D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """``[M]`` the directions times one token, rounded as where there are many, and their squares;
    and the token's."""
    m = tl.arange(0, BLOCK_M)
    found, squares = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    square = 0.0
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        exists = (m < M)[:, None] & (d < D)[None, :]
        w = tl.load(w_ptr + m[:, None] * D + d[None, :], mask=exists, other=0.0)
        w = rounded(w * factor, PRECISION, DOT).to(tl.float32)
        x = tl.load(x_ptr + d, mask=(d < D) & keep, other=0.0).to(tl.float32)
        found += tl.sum(w * x.to(DOT).to(tl.float32)[None, :], 1)
        squares += tl.sum(w * w, 1)
        square += tl.sum(x * x, 0)
    return found, squares, square


@launched
def step_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr,  # (B, H, 1, D), (B, HKV, 1, D), (B, HKV, 1, E), (B, 1)
    w_ptr, offset_ptr, out_ptr,
    kv_ptr, z_ptr, shift_ptr, new_kv_ptr, new_z_ptr, new_shift_ptr,  # (B, HKV, M, E), (B, HKV, M)
    q_b, q_h, k_b, k_h, v_b, v_h,
    HKV, G, factor, curvature,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr, RELU: tl.constexpr,
    OFFSET: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program moves some columns of the state of one key head, and answers its queries."""
    row = tl.program_id(0).to(tl.int64)
    b, head = row // HKV, row % HKV
    m = tl.arange(0, BLOCK_M)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    keep = True
    if MASKED:
        keep = tl.load(mask_ptr + b) == 0
    w_ptr += head * OWN * (M * D)
    features, squares, square = products(
        w_ptr, k_ptr + b * k_b + head * k_h, keep, factor,
        D, M, BLOCK_D, BLOCK_M, PRECISION, DOT,
    )  # fmt: skip
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if RELU:
        features = tl.where(features <= 0, 0.0, features)
    else:
        shift = shift_of(squares, curvature)
        half = square * (curvature * 0.5 * LOG2E)
        features = tl.exp2(bounded(features - half - shift))
    features = tl.where((m < M) & keep, features, 0.0)
    v = tl.load(v_ptr + b * v_b + head * v_h + e, mask=(e < E) & keep, other=0.0).to(tl.float32)
    at = row * (M * E) + m[:, None] * E + e[None, :]
    exists = (m < M)[:, None] & (e < E)[None, :]
    total = tl.load(kv_ptr + at, mask=exists, other=0.0)
    mass = tl.load(z_ptr + row * M + m, mask=m < M, other=0.0)
    if not RELU:
        old = tl.load(shift_ptr + row * M + m, mask=m < M, other=0.0)
        # of numbers as they are stored: exactly 1 from token to token
        change = tl.clamp((old - shift / LOG2E) * LOG2E, LEAST, MOST)
        scale = tl.where(old == -float("inf"), 0.0, tl.exp2(change))
        total *= scale[:, None]
        mass *= scale
    total += features[:, None] * v[None, :]
    mass += features
    tl.store(new_kv_ptr + at, total, mask=exists)
    if tl.program_id(1) == 0:
        tl.store(new_z_ptr + row * M + m, mass, mask=m < M)
        if not RELU:
            tl.store(new_shift_ptr + row * M + m, shift / LOG2E, mask=m < M)

    if OFFSET:
        shift += tl.load(offset_ptr + head * OWN * M + m, mask=m < M, other=0.0) * LOG2E
    for g in range(0, G):
        q_head = head * G + g
        queries, _, _ = products(
            w_ptr, q_ptr + b * q_b + q_head * q_h, True, factor,
            D, M, BLOCK_D, BLOCK_M, PRECISION, DOT,
        )  # fmt: skip
        if RELU:
            queries = tl.where(queries <= 0, 0.0, queries)
        else:
            queries = tl.where(m < M, queries + shift, -float("inf"))
            queries = tl.exp2(queries - tl.max(queries, 0))
        den = tl.sum(queries * mass, 0)
        num = tl.sum(total * queries[:, None], 0) / tl.where(den == 0, 1.0, den)
        to = out_ptr + (b * HKV * G + q_head) * E + e
        tl.store(to, num.to(out_ptr.dtype.element_ty), mask=e < E)
