"""The Triton path of linear attention: registered operators for forward, backward and one token.

Importing this file imports no triton. Between forward and backward only the inputs, the output,
the denominators and the shares of S and z (one per split, not per token) are kept.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd, _tuning
from fastattn._launch import dense, heads_inside, launch, merged, whole

HAS_TRITON = find_spec("triton") is not None  # looked up, not imported

_lib = torch.library.Library("fastattn", "FRAGMENT")
# forward: out, kept; where there is a starting state, the final one as well: kv, z and, if the
# state has one, shift. What is kept for the backward pass is one row of floats: the shares of S and
# z, then the denominators (of causal "exp", with their scale).
_lib.define(
    "linear_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor? start_kv, Tensor? start_z, Tensor? start_shift, str feature_map, bool causal, "
    "bool normalize) -> Tensor[]"
)
# one token, without gradients: out, kv, z and, if the state has one, shift.
_lib.define(
    "linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor kv, Tensor z, "
    "Tensor? shift, str feature_map, bool normalize) -> Tensor[]"
)
# backward: dq, dk, dv; where there is a starting state, its gradients as well.
_lib.define(
    "linear_attention_backward(Tensor dout, Tensor? dfinal_kv, Tensor? dfinal_z, Tensor q, "
    "Tensor k, Tensor v, Tensor out, Tensor kept, Tensor? final_shift, Tensor? mask, "
    "Tensor? cu_seqlens, Tensor? start_kv, Tensor? start_z, Tensor? start_shift, "
    "str feature_map, bool causal, bool normalize) -> Tensor[]"
)
_autograd.one_by_one(
    _lib, "linear_attention_forward", "linear_attention_step", "linear_attention_backward"
)


def refusal(q: Tensor) -> str | None:
    """Why the kernels cannot run on these inputs, or None."""
    device = q.device.type
    if not HAS_TRITON:
        return "triton is not installed"
    if device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "the inputs are on the CPU, it needs CUDA"
        if q.dtype != torch.float32:
            return f"Triton's interpreter computes {q.dtype} products wrongly, it needs float32"
    elif device != "cuda":
        return f"the inputs are on {device}, it needs CUDA"
    if q.dtype == torch.float64:
        return "it has no float64"
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    causal: bool,
    key_padding_mask: Tensor | None,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """:func:`fastattn.ops.linear_attention`, behind its door."""
    options = (key_padding_mask, cu_seqlens, None, None, None, feature_map, causal, normalize)
    width = _tuning.linear_attention_values(q.shape[3], q.dtype)
    if v.shape[3] <= width:
        return _run(q, k, v, *options)[0]
    return torch.cat([_run(q, k, x, *options)[0] for x in v.split(width, -1)], -1)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor, Tensor | None] | None,
    *,
    feature_map: str,
    key_padding_mask: Tensor | None,
    normalize: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    """:func:`fastattn.ops.linear_attention_scan`, behind its door."""
    b, h_kv, _, d = k.shape
    if state is None:
        kv = k.new_zeros(b, h_kv, d, v.shape[-1], dtype=torch.float32)
        z = k.new_zeros(b, h_kv, d, dtype=torch.float32)
        shift = torch.full_like(z, -torch.inf) if feature_map == "exp" else None
    else:
        kv, z, shift = state
    if q.shape[2] == 1 and not _autograd.needs_gradient(q, k, v, kv, z):
        operator = torch.ops.fastattn.linear_attention_step.default
        arguments = (q, k, v, key_padding_mask, kv, z, shift, feature_map, normalize)
        out, kv, z, *shifts = _autograd.call(operator, _step, *arguments)
        return out, (kv, z, shifts[0] if shifts else None)
    options = (feature_map, True, normalize)
    width = _tuning.linear_attention_values(d, q.dtype)
    outs, sums = [], []
    for values, columns in zip(v.split(width, -1), kv.split(width, -1), strict=True):
        found = _run(q, k, values, key_padding_mask, None, columns, z, shift, *options)
        outs.append(found[0])
        sums.append(found[1])
    z, *shifts = found[2:-1]
    after = (sums[0] if len(sums) == 1 else torch.cat(sums, -1), z, shifts[0] if shifts else None)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, -1)), after


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    """The arguments of the operator; out, then the state where there is one, then kept."""
    if _autograd.needs_gradient(*arguments):
        return _autograd.apply(_LinearAttention, *arguments)
    return _LinearAttention.forward(*arguments)


class _LinearAttention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        operator = torch.ops.fastattn.linear_attention_forward.default
        out, kept, *state = _autograd.call(operator, _forward, *arguments)
        return out, *state, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, cu_seqlens, *start, ctx.feature_map, ctx.causal, ctx.normalize = inputs
        shift = output[3] if start[2] is not None else None
        kept = output[-1]
        ctx.save_for_backward(q, k, v, output[0], kept, shift, mask, cu_seqlens, *start)
        ctx.mark_non_differentiable(*((kept,) if shift is None else (kept, shift)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # the check costs something, and is needed under create_graph only
        return (_backward_once if torch.is_grad_enabled() else _backward_pass)(ctx, *grads)


def _backward_pass(ctx: Any, dout: Any, *dstate: Any) -> Any:
    q, k, v, out, *kept, kv, z, shift = ctx.saved_tensors
    dkv = dz = None
    if kv is not None:
        dkv = torch.zeros_like(kv) if dstate[0] is None else dstate[0]
        dz = torch.zeros_like(z) if dstate[1] is None else dstate[1]
    if dout is None:
        dout = torch.zeros_like(out)
    options = (ctx.feature_map, ctx.causal, ctx.normalize)
    operator = torch.ops.fastattn.linear_attention_backward.default
    arguments = (dout, dkv, dz, q, k, v, out, *kept, kv, z, shift, *options)
    dq, dk, dv, *dstart = _autograd.call_once(operator, _backward, *arguments)
    return dq, dk, dv, None, None, *(dstart or (None, None)), None, None, None, None


_backward_once = once_differentiable(_backward_pass)


class _Options(NamedTuple):
    """Everything that decides which variant of a kernel runs."""

    dtype: torch.dtype
    d: int
    e: int
    feature_map: str
    causal: bool
    normalize: bool
    masked: bool
    packed: bool
    grouped: bool
    state: bool
    unit: int


def _constants(kernel: str, options: _Options) -> dict[str, Any]:
    """All constants, by the names that the kernels have for them, and the tiles."""
    import triton.language as tl

    module, name = kernel.split(".")
    dot, precision = _tuning.dot_type(options.dtype)
    if module == "linear_attention_exp":
        tiles = _tuning.linear_attention_exp(name, options.d, options.e)
    else:
        tiles = _tuning.linear_attention(name, options.d, options.e, options.dtype, options.causal)
    return {
        "UNIT": options.unit,
        "D": options.d,
        "E": options.e,
        "MAP": options.feature_map,
        "CAUSAL": options.causal,
        "NORMALIZE": options.normalize,
        "MASKED": options.masked,
        "PACKED": options.packed,
        "GROUPED": options.grouped,
        "STATE": options.state,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **tiles,
    }


def _geometry(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, cu_seqlens: Tensor | None, kv: Any, options: Any
) -> tuple[int, int, int, _Options]:
    """How many heads and key heads of how many sequences, splits of keys; the kernels' options.

    Strides count as aligned if all are multiples of 8 elements.
    """
    b, h, _, d = q.shape
    h_kv, e = k.shape[1], v.shape[3]
    if cu_seqlens is not None:
        b = cu_seqlens.shape[0] - 1
    (q1, q2, q3, _), (k1, k2, k3, _), (v1, v2, v3, _) = q.stride(), k.stride(), v.stride()
    unit = 1 if (q1 | q2 | q3 | k1 | k2 | k3 | v1 | v2 | v3) % 8 else 8
    masked, packed, grouped = mask is not None, cu_seqlens is not None, h != h_kv
    feature_map, causal, normalize = options
    splits = _tuning.linear_attention_splits(b * h_kv, q.device)
    chosen = _Options(
        q.dtype, d, e, feature_map, causal, normalize, masked, packed, grouped, kv is not None, unit
    )
    return b * h, b * h_kv, splits, chosen


def _forward_buffers(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, kv: Any, shift: Any, forms: Any
) -> list[Tensor]:
    feature_map, causal, normalize = forms
    b, h, n, d = q.shape
    h_kv, e = k.shape[1], v.shape[3]
    rows = h_kv * (b if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    kept = rows * _tuning.linear_attention_splits(rows, q.device) * (d * e + 2 * d)
    if normalize:
        kept = kept + b * h * n * (2 if causal and feature_map == "exp" else 1)
    buffers = [heads_inside(q, e), q.new_empty(kept, dtype=torch.float32)]
    if kv is not None:
        buffers.append(q.new_empty((b, h_kv, d, e), dtype=torch.float32))
        buffers.append(q.new_empty((b, h_kv, d), dtype=torch.float32))
    if shift is not None:
        buffers.append(q.new_empty((b, h_kv, d), dtype=torch.float32))
    return buffers


def _backward_buffers(q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None) -> list[Tensor]:
    buffers = [heads_inside(x, x.shape[3]) for x in (q, k, v)]
    if kv is not None:
        buffers.append(q.new_empty(kv.shape, dtype=torch.float32))
        buffers.append(q.new_empty(kv.shape[:3], dtype=torch.float32))
    return buffers


@torch.library.register_fake("fastattn::linear_attention_forward", lib=_lib)
def _(
    q: Any, k: Any, v: Any, mask: Any, cu_seqlens: Any, kv: Any, z: Any, shift: Any, *options: Any
) -> list[Tensor]:
    return _forward_buffers(q, k, v, cu_seqlens, kv, shift, options)


@torch.library.register_fake("fastattn::linear_attention_backward", lib=_lib)
def _(dout: Any, dkv: Any, dz: Any, q: Any, k: Any, v: Any, *rest: Any) -> list[Tensor]:
    return _backward_buffers(q, k, v, rest[5])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_kv: Tensor | None,
    start_z: Tensor | None,
    start_shift: Tensor | None,
    *forms: Any,
) -> list[Tensor]:
    feature_map, causal, _ = forms
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    start = (whole(start_kv), whole(start_z), whole(start_shift))
    buffers = _forward_buffers(q, k, v, cu_seqlens, start_kv, start_shift, forms)
    out, kept, *final = buffers
    if out.numel() == 0 and not final:
        return buffers
    rows, kv_rows, splits, options = _geometry(q, k, v, mask, cu_seqlens, start_kv, forms)
    h, n, h_kv = q.shape[1], q.shape[2], k.shape[1]
    keys = (*k.stride()[:3], *v.stride()[:3])
    launch(
        "linear_attention.sum_keys",
        (kv_rows, splits, 1),
        (k, v, mask, cu_seqlens, kept, *keys, h_kv, k.shape[2]),
        options,
        _constants,
    )
    exp = causal and feature_map == "exp"
    states = 3 if exp else 2
    launch(
        "linear_attention_exp.attend" if exp else "linear_attention.attend",
        (rows, splits if causal else _tuning.linear_attention_splits(rows, q.device), 1),
        (q, k, v, mask, cu_seqlens, kept, out, *start[:states], *(final or (None,) * states),
         *q.stride()[:3], *keys, h, h // h_kv, n, splits),
        options,
        _constants,
    )  # fmt: skip
    return buffers


def _backward(
    dout: Tensor,
    dfinal_kv: Tensor | None,
    dfinal_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: Tensor,
    final_shift: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_kv: Tensor | None,
    start_z: Tensor | None,
    start_shift: Tensor | None,
    *forms: Any,
) -> list[Tensor]:
    feature_map, causal, normalize = forms
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    start = (whole(start_kv), whole(start_z), whole(start_shift))
    out, dout = merged(out), dense(dout)
    buffers = _backward_buffers(q, k, v, start_kv)
    dq, dk, dv, *dstart = buffers
    if dq.numel() + dk.numel() == 0 and not dstart:
        return buffers
    rows, kv_rows, splits, options = _geometry(q, k, v, mask, cu_seqlens, start_kv, forms)
    if any(s % 8 for s in dout.stride()[:3]):
        options = options._replace(unit=1)
    (b, h, n, d), h_kv = q.shape, k.shape[1]
    g = h // h_kv
    query_splits = splits if causal else _tuning.linear_attention_splits(rows, q.device)
    size = rows * query_splits * (d * v.shape[3] + 2 * d)  # shares, then slopes
    dshares = q.new_empty(size + b * h * n if causal and normalize else size, dtype=torch.float32)
    queries, upstream = q.stride()[:3], dout.stride()[:3]
    strides = (*queries, *k.stride()[:3], *v.stride()[:3], *upstream)
    exp = causal and feature_map == "exp"
    module = "linear_attention_exp" if exp else "linear_attention_backward"
    if causal:
        launch(
            f"{module}.sum_queries",
            (rows, query_splits, 1),
            (q, cu_seqlens, out, kept, dout, dshares, *queries, *upstream, h, g, n, splits),
            options,
            _constants,
        )
    launch(
        f"{module}.grad_queries",
        (rows, query_splits, 1),
        (q, k, v, mask, cu_seqlens, kept, dout, *start[: 3 if exp else 2], dq, dshares,
         *strides, h, g, n, splits),
        options,
        _constants,
    )  # fmt: skip
    launch(
        f"{module}.grad_keys",
        (kv_rows, splits, 1),
        (q, k, v, mask, cu_seqlens, kept, dout, dshares, whole(dfinal_kv), whole(dfinal_z),
         *((whole(final_shift), start[2]) if exp else ()), dk, dv, *(dstart or (None, None)),
         *strides, h_kv, g, k.shape[2], splits, query_splits),
        options,
        _constants,
    )  # fmt: skip
    return buffers


class _StepOptions(NamedTuple):
    dtype: torch.dtype
    d: int
    e: int
    feature_map: str
    normalize: bool
    masked: bool


def _step_constants(kernel: str, options: _StepOptions) -> dict[str, Any]:
    return {
        "D": options.d,
        "E": options.e,
        "MAP": options.feature_map,
        "MASKED": options.masked,
        "NORMALIZE": options.normalize,
        **_tuning.linear_attention_step(options.d, options.e),
    }


def _step_buffers(q: Tensor, v: Tensor, kv: Tensor, z: Tensor, shift: Any) -> list[Tensor]:
    buffers = [q.new_empty((*q.shape[:3], v.shape[3])), torch.empty_like(kv), torch.empty_like(z)]
    return buffers if shift is None else [*buffers, torch.empty_like(shift)]


@torch.library.register_fake("fastattn::linear_attention_step", lib=_lib)
def _(
    q: Any, k: Any, v: Any, mask: Any, kv: Any, z: Any, shift: Any, *options: Any
) -> list[Tensor]:
    return _step_buffers(q, v, kv.contiguous(), z.contiguous(), shift)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kv: Tensor,
    z: Tensor,
    shift: Tensor | None,
    feature_map: str,
    normalize: bool,
) -> list[Tensor]:
    q, k, v, mask = dense(q), dense(k), dense(v), whole(mask)
    kv, z, shift = kv.contiguous(), z.contiguous(), whole(shift)
    buffers = _step_buffers(q, v, kv, z, shift)
    b, h_kv, d = z.shape
    out, e, new_shift = buffers[0], v.shape[3], buffers[3] if shift is not None else None
    if kv.numel() == 0:
        return buffers
    options = _StepOptions(q.dtype, d, e, feature_map, normalize, mask is not None)
    launch(
        "linear_attention_step.step",
        (b * h_kv, -(-e // _tuning.linear_attention_step(d, e)["BLOCK_E"]), 1),
        (q, k, v, mask, out, kv, z, shift, *buffers[1:3], new_shift,
         *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], h_kv, q.shape[1] // h_kv),
        options,
        _step_constants,
    )  # fmt: skip
    return buffers


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("linear_attention_forward", _forward, _key)
    _lib.impl("linear_attention_backward", _backward, _key)
    _lib.impl("linear_attention_step", _step, _key)
