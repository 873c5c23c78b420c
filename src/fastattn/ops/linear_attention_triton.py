"""The Triton path of linear attention: two registered operators, forward and backward.

Importing this file imports no triton. Between forward and backward only the inputs, the output,
the denominators and the shares of S and z (one per split, not per token) are kept.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _tuning

HAS_TRITON = find_spec("triton") is not None  # looked up, not imported

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "linear_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor? start_kv, Tensor? start_z, str feature_map, bool causal, bool normalize) "
    "-> (Tensor out, Tensor den, Tensor shares, Tensor final_kv, Tensor final_z)"
)
_lib.define(
    "linear_attention_backward(Tensor dout, Tensor? dfinal_kv, Tensor? dfinal_z, Tensor q, "
    "Tensor k, Tensor v, Tensor out, Tensor den, Tensor shares, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor? start_kv, Tensor? start_z, str feature_map, bool causal, bool normalize) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dstart_kv, Tensor dstart_z)"
)


def refusal(q: Tensor, feature_map: str, causal: bool) -> str | None:
    """Why the kernels cannot run on these inputs, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    if q.device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "the inputs are on the CPU, it needs CUDA"
        if q.dtype != torch.float32:
            return f"Triton's interpreter computes {q.dtype} products wrongly, it needs float32"
    elif q.device.type != "cuda":
        return f"the inputs are on {q.device.type}, it needs CUDA"
    if q.dtype == torch.float64:
        return "it has no float64"
    if feature_map == "exp" and causal:
        return "it has no causal exp"
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
    options = (key_padding_mask, cu_seqlens, feature_map, causal, normalize)
    width = _tuning.linear_attention_values(q.shape[3], q.dtype)
    parts = [_LinearAttention.apply(q, k, x, None, None, *options)[0] for x in v.split(width, -1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor, Tensor | None] | None,
    *,
    feature_map: str,
    key_padding_mask: Tensor | None,
    normalize: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, None]]:
    """:func:`fastattn.ops.linear_attention_scan`, behind its door."""
    b, h_kv, _, d = k.shape
    if state is None:
        kv = k.new_zeros(b, h_kv, d, v.shape[-1], dtype=torch.float32)
        z = k.new_zeros(b, h_kv, d, dtype=torch.float32)
    else:
        kv, z = state[0], state[1]
    options = (key_padding_mask, None, feature_map, True, normalize)
    width = _tuning.linear_attention_values(d, q.dtype)
    outs, sums = [], []
    for values, columns in zip(v.split(width, -1), kv.split(width, -1), strict=True):
        out, columns, mass, *_ = _LinearAttention.apply(q, k, values, columns, z, *options)
        outs.append(out)
        sums.append(columns)
    return torch.cat(outs, -1), (torch.cat(sums, -1), mass, None)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor | None,
        z: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        feature_map: str,
        causal: bool,
        normalize: bool,
    ) -> Any:
        out, den, shares, final_kv, final_z = torch.ops.fastattn.linear_attention_forward(
            q, k, v, mask, cu_seqlens, kv, z, feature_map, causal, normalize
        )
        return out, final_kv, final_z, den, shares

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, kv, z, mask, cu_seqlens, *ctx.options = inputs
        out, _, _, den, shares = output
        ctx.save_for_backward(q, k, v, out, den, shares, mask, cu_seqlens, kv, z)
        ctx.mark_non_differentiable(den, shares)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dkv: Any, dz: Any, *unused: Any) -> Any:
        q, k, v, out, den, shares, mask, cu_seqlens, kv, z = ctx.saved_tensors
        if kv is not None:
            dkv = torch.zeros_like(kv) if dkv is None else dkv
            dz = torch.zeros_like(z) if dz is None else dz
        dout = torch.zeros_like(out) if dout is None else dout
        grads = torch.ops.fastattn.linear_attention_backward(
            dout, dkv, dz, q, k, v, out, den, shares, mask, cu_seqlens, kv, z, *ctx.options
        )
        dq, dk, dv, dkv, dz = grads
        return dq, dk, dv, *((None, None) if kv is None else (dkv, dz)), *(None,) * 5


def _heads_inside(x: Tensor, width: int) -> Tensor:
    """New memory for ``(b, h, n, width)``, laid out (b, n, h, width): merging heads is a view."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width).transpose(1, 2)


def _rows(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many sequences there are."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _forward_buffers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_kv: Tensor | None,
    start_z: Tensor | None,
    feature_map: str,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d, e, h_kv = k.shape[3], v.shape[3], k.shape[1]
    b = _rows(q, cu_seqlens)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    splits = _tuning.linear_attention_splits(b * h_kv, q.device)
    state: tuple[int, ...] = (q.shape[0], h_kv, d) if start_kv is not None else (0,)
    return (
        _heads_inside(q, e),
        torch.empty(q.shape[:3] if normalize else (0,), **wide),
        torch.empty(b * h_kv, splits, d * e + 2 * d, **wide),
        torch.empty((*state, e) if start_kv is not None else (0,), **wide),
        torch.empty(state, **wide),
    )


def _backward_buffers(q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None) -> tuple[Tensor, ...]:
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    state: tuple[int, ...] = (*k.shape[:2], k.shape[3]) if kv is not None else (0,)
    return (
        _heads_inside(q, q.shape[3]),
        _heads_inside(k, k.shape[3]),
        _heads_inside(v, v.shape[3]),
        torch.empty((*state, v.shape[3]) if kv is not None else (0,), **wide),
        torch.empty(state, **wide),
    )


@torch.library.register_fake("fastattn::linear_attention_forward", lib=_lib)
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _forward_buffers(*arguments)


@torch.library.register_fake("fastattn::linear_attention_backward", lib=_lib)
def _(dout: Any, dkv: Any, dz: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Tensor, ...]:
    return _backward_buffers(q, k, v, rest[5])


def _dense(x: Tensor) -> Tensor:
    """The kernels need a contiguous last dimension; every other stride is theirs to follow."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:3])


def _options(
    kernel: str, q: Tensor, v: Tensor, feature_map: str, causal: bool, mask: Any, cu_seqlens: Any
) -> dict[str, Any]:
    """The constants that all kernels have, and the tiles of this one."""
    import triton.language as tl

    dot, precision = _tuning.dot_type(q.dtype, feature_map)
    return {
        "MAP": feature_map,
        "MASKED": mask is not None,
        "PACKED": cu_seqlens is not None,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **_tuning.linear_attention(kernel, q.shape[3], v.shape[3], q.dtype, causal),
    }


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_kv: Tensor | None,
    start_z: Tensor | None,
    feature_map: str,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, ...]:
    from fastattn.kernels.linear_attention import attend_kernel, sum_keys_kernel

    q, k, v = _dense(q), _dense(k), _dense(v)
    buffers = _forward_buffers(
        q, k, v, mask, cu_seqlens, start_kv, start_z, feature_map, causal, normalize
    )
    out, den, shares, final_kv, final_z = buffers
    h, n, d = q.shape[1:]
    h_kv, s = k.shape[1:3]
    e, b, splits = v.shape[3], _rows(q, cu_seqlens), shares.shape[1]
    if out.numel() == 0 and final_kv.numel() == 0:
        return buffers
    about = (q, v, feature_map, causal, mask, cu_seqlens)
    sum_keys_kernel[(b * h_kv, splits)](
        k, v, mask, cu_seqlens, shares, *_strides(k, v), h_kv, s, d, e,
        **_options("sum_keys", *about),
    )  # fmt: skip
    state = start_kv is not None
    start_kv, start_z = (None, None) if not state else (_c(start_kv), _c(start_z))
    query_splits = splits if causal else _tuning.linear_attention_splits(b * h, q.device)
    attend_kernel[(b * h, query_splits)](
        q, k, v, mask, cu_seqlens, shares, out, den, start_kv, start_z, final_kv, final_z,
        *_strides(q, k, v, out), h, h // h_kv, n, d, e, splits,
        CAUSAL=causal, NORMALIZE=normalize, STATE=state, **_options("attend", *about),
    )  # fmt: skip
    return buffers


def _c(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _backward(
    dout: Tensor,
    dfinal_kv: Tensor | None,
    dfinal_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    den: Tensor,
    shares: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_kv: Tensor | None,
    start_z: Tensor | None,
    feature_map: str,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, ...]:
    from fastattn.kernels.linear_attention_backward import grad_keys_kernel, grad_queries_kernel

    q, k, v, dout = _dense(q), _dense(k), _dense(v), _dense(dout)
    buffers = _backward_buffers(q, k, v, start_kv)
    dq, dk, dv, dstart_kv, dstart_z = buffers
    h, n, d = q.shape[1:]
    h_kv, s = k.shape[1:3]
    e, b, splits = v.shape[3], _rows(q, cu_seqlens), shares.shape[1]
    about = (q, v, feature_map, causal, mask, cu_seqlens)
    state = start_kv is not None
    query_splits = splits if causal else _tuning.linear_attention_splits(b * h, q.device)
    dden = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    dshares = torch.empty(b * h, query_splits, d * e + 2 * d, dtype=torch.float32, device=q.device)
    forms = {"CAUSAL": causal, "NORMALIZE": normalize, "STATE": state}
    grad_queries_kernel[(b * h, query_splits)](
        q, k, v, mask, cu_seqlens, shares, out, den, dout, _c(start_kv), _c(start_z),
        dq, dden, dshares, *_strides(q, k, v, out, dout, dq),
        h, h // h_kv, n, d, e, splits, **forms, **_options("grad_queries", *about),
    )  # fmt: skip
    grad_keys_kernel[(b * h_kv, splits)](
        q, k, v, mask, cu_seqlens, shares, den, dden, dout, dshares, _c(dfinal_kv), _c(dfinal_z),
        dk, dv, dstart_kv, dstart_z, *_strides(q, k, v, dout, dk, dv),
        h_kv, h // h_kv, s, d, e, splits, query_splits, **forms, **_options("grad_keys", *about),
    )  # fmt: skip
    return buffers


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("linear_attention_forward", _forward, _key)
    _lib.impl("linear_attention_backward", _backward, _key)
