"""The Triton path of FAVOR+, where every query sees every key: registered forward and backward.

Importing this file imports no triton. Between forward and backward are kept the inputs, the output,
one table a key head (directions and mean values, (m, d + e)) and log-sums: one number a feature and
one a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd, _tuning
from fastattn._launch import dense, heads_inside, launch, whole
from fastattn.ops import linear_attention_triton as linear
from fastattn.ops.favor_torch import Features

LOG2E = 1.4426950408889634

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "favor_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor directions, Tensor? offsets, float factor, float curvature) -> Tensor[]"
)  # out, table, kept
_lib.define(
    "favor_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor table, "
    "Tensor kept, Tensor? mask, Tensor? cu_seqlens, Tensor directions, Tensor? offsets, "
    "float curvature) -> Tensor[]"
)  # dq, dk, dv


def refusal(q: Tensor, features: Features, causal: bool) -> str | None:
    """Why the kernels cannot run on these inputs, or None."""
    if causal:
        return "it is not causal"
    if features.curvature is None:
        return 'it has no variant "relu"'
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
    assert features.curvature is not None
    assert not causal
    arguments = (q, k, v, key_padding_mask, cu_seqlens, features.directions, features.offsets)
    numbers = (features.factor, features.curvature)
    if torch.is_grad_enabled():
        return _autograd.apply(_Favor, *arguments, *numbers)[0]
    return _Favor.forward(*arguments, *numbers)[0]


class _Favor(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        operator = torch.ops.fastattn.favor_forward.default
        return tuple(_autograd.call(operator, _forward, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, cu_seqlens, directions, offsets, _, ctx.curvature = inputs
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
    return (
        *_autograd.call(operator, _backward, dout, *ctx.saved_tensors, ctx.curvature),
        *(None,) * 6,
    )


_backward_once = once_differentiable(_backward_pass)


class _Options(NamedTuple):
    """Everything that decides which variant of a kernel runs."""

    dtype: torch.dtype
    d: int
    e: int
    m: int
    own: bool
    offset: bool
    masked: bool
    packed: bool
    unit: int


def _constants(kernel: str, options: _Options) -> dict[str, Any]:
    """All constants, by the names that the kernels have for them, and the tiles."""
    import triton.language as tl

    name = kernel.split(".")[1]
    dot, precision = _tuning.dot_type(options.dtype)
    return {
        "UNIT": options.unit,
        "D": options.d,
        "E": options.e,
        "M": options.m,
        "OWN": int(options.own),
        "OFFSET": options.offset,
        "MASKED": options.masked,
        "PACKED": options.packed,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **_tuning.favor(name, options.d, options.e, options.m, options.dtype),
    }


def _sizes(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """How many heads and key heads of how many sequences."""
    b = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return b * q.shape[1], b * k.shape[1]


def _options(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, cu_seqlens: Any, directions: Tensor, offsets: Any
) -> _Options:
    """Strides count as aligned if all are multiples of 8 elements."""
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    unit = 1 if any(s % 8 for s in strides) else 8
    heads, m, d = directions.shape
    given = (offsets is not None, mask is not None, cu_seqlens is not None)
    return _Options(q.dtype, d, v.shape[3], m, heads > 1, *given, unit)


def _tiles(kernel: str, options: _Options) -> int:
    block = _tuning.favor(kernel, options.d, options.e, options.m, options.dtype)["BLOCK_M"]
    return -(-options.m // block)


def _forward_buffers(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, directions: Tensor
) -> list[Tensor]:
    kv_rows = _sizes(q, k, cu_seqlens)[1]
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
    q: Any, k: Any, v: Any, mask: Any, cu_seqlens: Any, directions: Any, *rest: Any
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
    curvature: float,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    directions = directions if directions.is_contiguous() else directions.contiguous()
    offsets = whole(offsets)
    buffers = _forward_buffers(q, k, v, cu_seqlens, directions)
    out, table, kept = buffers
    if out.numel() == 0:
        return buffers
    options = _options(q, k, v, mask, cu_seqlens, directions, offsets)
    rows, kv_rows = _sizes(q, k, cu_seqlens)
    h, n, h_kv, m = q.shape[1], q.shape[2], k.shape[1], options.m
    tiles = _tiles("sum_keys", options)
    splits = _tuning.linear_attention_splits(kv_rows * tiles, q.device)
    shares = q.new_empty(kv_rows * splits * m * (options.e + 2), dtype=torch.float32)
    factor = factor * LOG2E
    launch(
        "favor.sum_keys",
        (kv_rows, splits, tiles),
        (k, v, mask, cu_seqlens, directions, shares, *k.stride()[:3], *v.stride()[:3],
         h_kv, k.shape[2], factor, curvature),
        options,
        _constants,
    )  # fmt: skip
    launch(
        "favor.merge",
        (kv_rows, _tiles("merge", options), 1),
        (shares, directions, table, kept, h_kv, n, splits, factor),
        options,
        _constants,
    )
    launch(
        "favor.attend",
        (rows, _tuning.linear_attention_splits(rows, q.device), 1),
        (q, cu_seqlens, table, kept, offsets, out, *q.stride()[:3], h, h // h_kv, n, kv_rows),
        options,
        _constants,
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
    curvature: float,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    dout, offsets = dense(dout), whole(offsets)
    buffers = [heads_inside(x, x.shape[3]) for x in (q, k, v)]
    dq, dk, dv = buffers
    if out.numel() == 0:  # nothing looked at the keys
        return [x.zero_() for x in buffers]
    options = _options(q, k, v, mask, cu_seqlens, directions, offsets)
    if any(s % 8 for s in dout.stride()[:3]):
        options = options._replace(unit=1)
    rows, kv_rows = _sizes(q, k, cu_seqlens)
    (h, n), h_kv, m, e = q.shape[1:3], k.shape[1], options.m, options.e
    g = h // h_kv
    tiles = _tiles("sum_queries", options)
    splits = _tuning.linear_attention_splits(rows * tiles, q.device)
    dshares = q.new_empty(rows * splits * m * (e + 1), dtype=torch.float32)
    dtable, slopes = table.new_empty(kv_rows * m * e), torch.empty_like(kept)
    strides = (*q.stride()[:3], *dout.stride()[:3])
    launch(
        "favor_backward.grad_queries",
        (rows, _tuning.linear_attention_splits(rows, q.device), 1),
        (q, cu_seqlens, table, kept, offsets, out, dout, dq, slopes, *strides, h, g, n, kv_rows),
        options,
        _constants,
    )
    launch(
        "favor_backward.sum_queries",
        (rows, splits, tiles),
        (q, cu_seqlens, table, kept, offsets, dout, slopes, dshares, *strides, h, g, n, kv_rows),
        options,
        _constants,
    )
    launch(
        "favor_backward.add",
        (kv_rows, _tiles("add", options), 1),
        (dshares, dtable, slopes, n, g * splits),
        options,
        _constants,
    )
    launch(
        "favor_backward.grad_keys",
        (kv_rows, _tuning.linear_attention_splits(kv_rows, q.device), 1),
        (k, v, mask, cu_seqlens, table, kept, dtable, slopes, dk, dv,
         *k.stride()[:3], *v.stride()[:3], h_kv, k.shape[2], curvature),
        options,
        _constants,
    )  # fmt: skip
    return buffers


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("favor_forward", _forward, _key)
    _lib.impl("favor_backward", _backward, _key)
