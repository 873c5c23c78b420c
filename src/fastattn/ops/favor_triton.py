"""The Triton path of FAVOR+: one registered operator forward and one backward.

Importing this file imports no triton. Between forward and backward are kept the inputs, the output,
one table a key head (directions and mean values, (m, d + e)), one number a feature and one a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd, _tuning
from fastattn._launch import dense, heads_inside, launch, merged, whole
from fastattn.ops import favor_causal_triton
from fastattn.ops.favor_torch import Features
from fastattn.ops.favor_variants import (
    add_directions,
    backward_buffers,
    blocks_of,
    constants,
    gradients_of,
    options_of,
    shares_of_directions,
    sizes,
    to_base_2,
)

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "favor_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor directions, Tensor? offsets, float factor, float? curvature) -> Tensor[]"
)  # out, table, kept
_lib.define(
    "favor_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor table, "
    "Tensor kept, Tensor? mask, Tensor? cu_seqlens, Tensor directions, Tensor? offsets, "
    "float factor, float? curvature, bool learned) -> Tensor[]"
)  # dq, dk, dv; and if learned those of directions and offsets
_autograd.one_by_one(_lib, "favor_forward", "favor_backward")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """:func:`fastattn.ops.favor_attention`, behind its door."""
    if causal:
        return favor_causal_triton.attend(q, k, v, features, key_padding_mask, cu_seqlens)
    about = (key_padding_mask, cu_seqlens, features.directions, features.offsets)
    numbers = (features.factor, features.curvature)
    if _autograd.needs_gradient(q, k, v, *about):
        return _autograd.apply(_Favor, q, k, v, *about, *numbers)[0]
    return _Favor.forward(q, k, v, *about, *numbers)[0]


class _Favor(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        operator = torch.ops.fastattn.favor_forward.default
        return tuple(_autograd.call(operator, _forward, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, cu_seqlens, directions, offsets, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, *output, mask, cu_seqlens, directions, offsets)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # the check costs something, and is needed under create_graph only
        return (_backward_once if torch.is_grad_enabled() else _backward_pass)(ctx, *grads)


def _backward_pass(ctx: Any, dout: Tensor | None, *_: None) -> Any:
    if dout is None:
        return (None,) * 9
    operator = torch.ops.fastattn.favor_backward.default
    learned = ctx.needs_input_grad[5] or ctx.needs_input_grad[6]
    arguments = (dout, *ctx.saved_tensors, *ctx.numbers, learned)
    dq, dk, dv, *learnt = _autograd.call_once(operator, _backward, *arguments)
    dw, doffsets = learnt or (None, None)
    return dq, dk, dv, None, None, dw, doffsets if ctx.needs_input_grad[6] else None, None, None


_backward_once = once_differentiable(_backward_pass)


def _forward_buffers(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, directions: Tensor
) -> list[Tensor]:
    _, kv_rows = sizes(q, k, cu_seqlens)
    m, d = directions.shape[1:]
    b, h, n, _ = q.shape
    e = v.shape[3]
    dot = getattr(torch, _tuning.dot_type(q.dtype)[0])
    return [
        heads_inside(q, e),
        q.new_empty(kv_rows * m * (d + e), dtype=dot),
        q.new_empty(kv_rows * m + b * h * n, dtype=torch.float32),
    ]


@torch.library.register_fake("fastattn::favor_forward", lib=_lib)
def _(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    cu_seqlens: Any,
    directions: Any,
    offsets: Any,
    factor: Any,
    curvature: Any,
) -> list[Tensor]:
    return _forward_buffers(q, k, v, cu_seqlens, directions)


@torch.library.register_fake("fastattn::favor_backward", lib=_lib)
def _(dout: Any, q: Any, k: Any, v: Any, *rest: Any) -> list[Tensor]:
    return backward_buffers(q, k, v) + (gradients_of(rest[5]) if rest[-1] else [])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    directions: Tensor,
    offsets: Tensor | None,
    factor: float,
    curvature: float | None,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    directions, offsets = whole(directions), whole(offsets)
    buffers = _forward_buffers(q, k, v, cu_seqlens, directions)
    out, table, kept = buffers
    if out.numel() == 0:
        return buffers
    options = options_of(q, k, v, mask, cu_seqlens, directions, offsets, curvature)
    curvature = curvature or 0.0
    rows, kv_rows = sizes(q, k, cu_seqlens)
    h, n, h_kv, m = q.shape[1], q.shape[2], k.shape[1], options.m
    factor = to_base_2(factor, options.relu)
    keys = (*k.stride()[:3], *v.stride()[:3])
    blocks = blocks_of("favor.sum_keys", options)
    splits = _tuning.linear_attention_splits(kv_rows * blocks, q.device)
    shares = q.new_empty(kv_rows * splits * m * (options.e + 2), dtype=torch.float32)
    launch(
        "favor.sum_keys",
        (kv_rows, splits, blocks),
        (k, v, mask, cu_seqlens, directions, table, shares,
         *keys, h_kv, k.shape[2], factor, curvature),
        options,
        constants,
    )  # fmt: skip
    launch(
        "favor.merge",
        (kv_rows, blocks_of("favor.merge", options), 1),
        (shares, table, kept, splits),
        options,
        constants,
    )
    launch(
        "favor.attend",
        (rows, _tuning.linear_attention_splits(rows, q.device), 1),
        (q, cu_seqlens, table, kept, offsets, out, *q.stride()[:3], h, h // h_kv, n, kv_rows),
        options,
        constants,
    )
    return buffers


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    table: Tensor,
    kept: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    directions: Tensor,
    offsets: Tensor | None,
    factor: float,
    curvature: float | None,
    learned: bool,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    out, dout, offsets = merged(out), dense(dout), whole(offsets)
    buffers = backward_buffers(q, k, v)
    dq, dk, dv = buffers
    if out.numel() == 0:  # nothing looked at the keys
        buffers += gradients_of(directions) if learned else []
        return [x.zero_() for x in buffers]
    options = options_of(q, k, v, mask, cu_seqlens, directions, offsets, curvature)
    curvature = curvature or 0.0
    if any(s % 8 for s in dout.stride()[:3]):
        options = options._replace(unit=1)
    rows, kv_rows = sizes(q, k, cu_seqlens)
    (h, n), h_kv, m, e = q.shape[1:3], k.shape[1], options.m, options.e
    g = h // h_kv
    blocks = blocks_of("favor_backward.sum_queries", options)
    splits = _tuning.linear_attention_splits(rows * blocks, q.device)
    dshares = q.new_empty(rows * splits * m * (e + 1), dtype=torch.float32)
    slopes = kept.new_empty(2 * kept.numel() - kv_rows * m)
    queries, keys, upstream = q.stride()[:3], (*k.stride()[:3], *v.stride()[:3]), dout.stride()[:3]
    shape = (h, g, n, kv_rows)
    launch(
        "favor_backward.grad_queries",
        (rows, _tuning.linear_attention_splits(rows, q.device), 1),
        (q, cu_seqlens, table, kept, offsets, out, dout, dq, slopes, *queries, *upstream, *shape),
        options,
        constants,
    )
    launch(
        "favor_backward.sum_queries",
        (rows, splits, blocks),
        (q, cu_seqlens, table, kept, offsets, dout, slopes, dshares, *queries, *upstream, *shape),
        options,
        constants,
    )
    dtable = table.new_empty(kv_rows * m * e)
    launch(
        "favor_backward.add",
        (kv_rows, blocks_of("favor_backward.add", options), 1),
        (dshares, table, dtable, slopes, g * splits),
        options,
        constants,
    )
    launch(
        "favor_backward.grad_keys",
        (kv_rows, _tuning.linear_attention_splits(kv_rows, q.device), 1),
        (k, v, mask, cu_seqlens, table, kept, dtable, slopes, dk, dv,
         *keys, h_kv, k.shape[2], curvature),
        options,
        constants,
    )  # fmt: skip
    if not learned:
        return buffers
    learns = options._replace(learned=True)
    of_queries, grid = shares_of_directions(table, rows, "favor_backward.sum_queries", learns)
    launch(
        "favor_backward.sum_queries",
        grid,
        (q, cu_seqlens, table, kept, offsets, dout, slopes, of_queries,
         *queries, *upstream, *shape),
        learns,
        constants,
    )  # fmt: skip
    of_keys, grid = shares_of_directions(table, kv_rows, "favor_backward.grad_directions", learns)
    launch(
        "favor_backward.grad_directions",
        grid,
        (k, v, mask, cu_seqlens, table, kept, dtable, slopes, of_keys,
         *keys, h_kv, k.shape[2], curvature),
        options,
        constants,
    )  # fmt: skip
    return buffers + add_directions([of_queries, of_keys], kv_rows // h_kv, h_kv, factor, options)


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("favor_forward", _forward, _key)
    _lib.impl("favor_backward", _backward, _key)
