"""The Triton path of FAVOR+: one registered operator forward and one backward.

Importing this file imports no triton. Between forward and backward are kept the inputs, the output,
one table a key head (directions and mean values, (m, d + e)), one number a feature and one a row.
Where attention is causal, states of chunks are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd, _tuning
from fastattn._launch import dense, heads_inside, launch, whole
from fastattn.ops import linear_attention_triton as linear
from fastattn.ops.favor_torch import Features
from fastattn.ops.favor_variants import Options, blocks_of, constants, options_of, sizes

LOG2E = 1.4426950408889634

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "favor_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor directions, Tensor? offsets, float factor, float? curvature, bool causal) -> Tensor[]"
)  # out, table, kept
_lib.define(
    "favor_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor table, "
    "Tensor kept, Tensor? mask, Tensor? cu_seqlens, Tensor directions, Tensor? offsets, "
    "float? curvature, bool causal) -> Tensor[]"
)  # dq, dk, dv


def refusal(q: Tensor, features: Features, causal: bool) -> str | None:
    """Why the kernels cannot run on these inputs, or None."""
    if causal and features.directions.shape[1] > 256:
        return "where causal it takes up to 256 features"
    if causal and features.curvature is None:
        return 'where causal it has no variant "relu"'
    learned = features.directions.requires_grad
    if features.offsets is not None:
        learned = learned or features.offsets.requires_grad
    if learned and torch.is_grad_enabled():
        return "it has no gradient of the projection"
    return linear.refusal(q)


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
    about = (key_padding_mask, cu_seqlens, features.directions, features.offsets)
    numbers = (features.factor, features.curvature, causal)
    width = _tuning.favor_values(features.directions.shape[1], q.dtype) if causal else 256

    def run(v: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _autograd.apply(_Favor, q, k, v, *about, *numbers)[0]
        return _Favor.forward(q, k, v, *about, *numbers)[0]

    if v.shape[3] <= width:
        return run(v)
    return torch.cat([run(x) for x in v.split(width, -1)], -1)


class _Favor(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        operator = torch.ops.fastattn.favor_forward.default
        return tuple(_autograd.call(operator, _forward, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, cu_seqlens, directions, offsets, _, ctx.curvature, ctx.causal = inputs
        ctx.save_for_backward(q, k, v, *output, mask, cu_seqlens, directions, offsets)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # the check costs something, and is needed under create_graph only
        return (_backward_once if torch.is_grad_enabled() else _backward_pass)(ctx, *grads)


def _backward_pass(ctx: Any, dout: Tensor | None, *_: None) -> Any:
    if dout is None:
        return (None,) * 10
    operator = torch.ops.fastattn.favor_backward.default
    return (
        *_autograd.call(operator, _backward, dout, *ctx.saved_tensors, ctx.curvature, ctx.causal),
        *(None,) * 7,
    )


_backward_once = once_differentiable(_backward_pass)


def _chunks(q: Tensor, k: Tensor, e: int, cu_seqlens: Tensor | None) -> int:
    """How many chunks there may be, of all sequences and key heads."""
    b, n = q.shape[0], q.shape[2]
    chunk = _tuning.favor_chunk(q.shape[3], e, q.dtype)
    if cu_seqlens is None:
        return b * -(-n // chunk) * k.shape[1]
    return (n // chunk + cu_seqlens.shape[0]) * k.shape[1]


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
    causal: bool,
) -> list[Tensor]:
    return _forward_buffers(q, k, v, cu_seqlens, directions)


@torch.library.register_fake("fastattn::favor_backward", lib=_lib)
def _(dout: Any, q: Any, k: Any, v: Any, *rest: Any) -> list[Tensor]:
    return [heads_inside(x, x.shape[3]) for x in (q, k, v)]


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
    causal: bool,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    aligned, offsets = whole(directions), whole(offsets)
    assert aligned is not None
    directions = aligned
    buffers = _forward_buffers(q, k, v, cu_seqlens, directions)
    out, table, kept = buffers
    if out.numel() == 0:
        return buffers
    options = options_of(q, k, v, mask, cu_seqlens, directions, offsets, curvature)
    curvature = curvature or 0.0
    rows, kv_rows = sizes(q, k, cu_seqlens)
    h, n, h_kv, m = q.shape[1], q.shape[2], k.shape[1], options.m
    factor = factor * LOG2E
    keys = (*k.stride()[:3], *v.stride()[:3])
    if causal:
        launch(
            "favor_causal.prepare",
            (kv_rows, blocks_of("favor_causal.prepare", options), 1),
            (directions, table, kept, h_kv, factor, curvature),
            options,
            constants,
        )
        states = _states_before(q, k, v, mask, cu_seqlens, table, kept, options, curvature)
        launch(
            "favor_causal.attend",
            (rows, _tuning.linear_attention_splits(rows, q.device), 1),
            (q, k, v, mask, cu_seqlens, table, kept, offsets, *states, out,
             *q.stride()[:3], *keys, h, h // h_kv, n, kv_rows, curvature),
            options,
            constants,
        )  # fmt: skip
        return buffers
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


def _state_buffers(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, table: Tensor, options: Options
) -> tuple[Tensor, ...]:
    """S and z at every chunk; at every split; and the splits' shares."""
    rows, kv_rows = sizes(q, k, cu_seqlens)
    m, e = options.m, options.e
    chunks = _chunks(q, k, e, cu_seqlens)
    splits = kv_rows * _tuning.linear_attention_splits(rows, q.device)
    wide = torch.float32
    return (
        table.new_empty(chunks * m * e),
        table.new_empty(chunks * m, dtype=wide),
        table.new_empty(splits * m * e),
        table.new_empty(splits * m, dtype=wide),
        table.new_empty(splits * m * (e + 1), dtype=wide),
    )


def _states_before(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    table: Tensor,
    kept: Tensor,
    options: Options,
    curvature: float,
) -> tuple[Tensor, ...]:
    """S and z before every chunk, of its split; and before every split."""
    *states, shares = _state_buffers(q, k, cu_seqlens, table, options)
    rows, kv_rows = sizes(q, k, cu_seqlens)
    splits = _tuning.linear_attention_splits(rows, q.device)
    launch(
        "favor_causal.states",
        (kv_rows, splits, blocks_of("favor_causal.states", options)),
        (k, v, mask, cu_seqlens, table, kept, shares, *states[:2],
         *k.stride()[:3], *v.stride()[:3], k.shape[1], k.shape[2], curvature),
        options,
        constants,
    )  # fmt: skip
    _carry(kv_rows, splits, shares, states, options)
    return tuple(states)


def _carry(
    kv_rows: int, splits: int, shares: Tensor, states: list[Tensor], options: Options
) -> None:
    launch(
        "favor_causal.carry",
        (kv_rows, blocks_of("favor_causal.carry", options), 1),
        (shares, *states[2:], splits),
        options,
        constants,
    )


def _backward_causal(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    table: Tensor,
    kept: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    offsets: Tensor | None,
    options: Options,
    curvature: float,
    buffers: list[Tensor],
) -> None:
    dq, dk, dv = buffers
    rows, kv_rows = sizes(q, k, cu_seqlens)
    (h, n), h_kv, m = q.shape[1:3], k.shape[1], options.m
    g = h // h_kv
    splits = _tuning.linear_attention_splits(rows, q.device)
    slopes = kept.new_empty(2 * kept.numel() - kv_rows * m)
    queries, keys, upstream = q.stride()[:3], (*k.stride()[:3], *v.stride()[:3]), dout.stride()[:3]
    states = _states_before(q, k, v, mask, cu_seqlens, table, kept, options, curvature)
    launch(
        "favor_causal_backward.grad_queries",
        (rows, splits, 1),
        (q, k, v, mask, cu_seqlens, table, kept, offsets, *states, out, dout, slopes, dq,
         *queries, *keys, *upstream, h, g, n, kv_rows, curvature),
        options,
        constants,
    )  # fmt: skip
    del states
    *dstates, shares = _state_buffers(q, k, cu_seqlens, table, options)
    launch(
        "favor_causal_backward.dstates",
        (kv_rows, splits, blocks_of("favor_causal_backward.dstates", options)),
        (q, cu_seqlens, table, kept, offsets, dout, slopes, shares, *dstates[:2],
         *queries, *upstream, h_kv, g, n, kv_rows),
        options,
        constants,
    )  # fmt: skip
    _carry(kv_rows, splits, shares, dstates, options._replace(backwards=True))
    launch(
        "favor_causal_backward.grad_keys",
        (kv_rows, splits, 1),
        (q, k, v, mask, cu_seqlens, table, kept, offsets, *dstates, dout, slopes, dk, dv,
         *queries, *keys, *upstream, h_kv, g, n, kv_rows, curvature),
        options,
        constants,
    )  # fmt: skip


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
    curvature: float | None,
    causal: bool,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    dout, offsets = dense(dout), whole(offsets)
    buffers = [heads_inside(x, x.shape[3]) for x in (q, k, v)]
    dq, dk, dv = buffers
    if out.numel() == 0:  # nothing looked at the keys
        return [x.zero_() for x in buffers]
    options = options_of(q, k, v, mask, cu_seqlens, directions, offsets, curvature)
    curvature = curvature or 0.0
    if any(s % 8 for s in dout.stride()[:3]):
        options = options._replace(unit=1)
    if causal:
        _backward_causal(
            dout, q, k, v, out, table, kept, mask, cu_seqlens, offsets, options, curvature, buffers
        )
        return buffers
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
    return buffers


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("favor_forward", _forward, _key)
    _lib.impl("favor_backward", _backward, _key)
