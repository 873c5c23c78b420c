"""Linformer: keys and values are compressed along the sequence to a few slots, then attended to.

Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", equation 7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import _check
from fastattn._backend import select
from fastattn.ops import linformer_torch as torch_path
from fastattn.ops import linformer_triton as triton_path
from fastattn.ops.linear_attention import candidates, in_full_precision, under_autocast

BACKENDS = ("triton", "torch", "reference")


class _Call(NamedTuple):
    """What the paths take behind q, k and v."""

    proj_k: Tensor
    proj_v: Tensor
    key_padding_mask: Tensor | None
    scale: float


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(q (E k)ᵀ) F v, in O((n + s)·slots) time, without a tensor of n or s times slots.

    Every query sees all slots, and a slot is a sum over all keys: there is no causal form.

    Args:
        q: Queries, ``(b, h, n, d)``, float64, float32, bfloat16 or float16; d from 1 to 256.
        k: Keys, ``(b, h_kv, s, d)``; h_kv divides h, and query head i reads head i // (h / h_kv).
        v: Values, ``(b, h_kv, s, e)``; e from 1 to 256.
        proj_k: E, ``(slots, L)``, or ``(h, slots, L)`` for each query head its own; of any floating
            dtype. Keys fewer than L take its first s columns.
        proj_v: F likewise, with as many slots; None means E.
        key_padding_mask: ``(b, s)`` bool, True = ignore. What k and v hold at ignored positions,
            NaN included, changes nothing. A sample without a key gives zeros.
        scale: On the logits; None means d^-0.5.
        backend: "triton" (CUDA, no float64), "torch", "reference" (in float32, or float64 for
            float64 inputs), or None for the first that can run. The first two have no second
            derivative.

    Returns:
        ``(b, h, n, e)`` in the dtype of v. Under autocast q, k and v are first cast to its dtype,
        except float64.

    Raises:
        TypeError: A dtype is not floating or differs; the mask is not bool.
        ValueError: A shape, device or option does not fit, or there are more keys than columns.
    """
    same = v is k
    q, k, v = under_autocast(q, k, v)
    v = k if same else v
    call = _check_inputs(q, k, v, proj_k, proj_v, key_padding_mask, scale)
    paths = {
        "torch": torch_path.whole_attention,
        "triton": triton_path.whole_attention,
        "reference": _reference,  # whose slots are not rounded
    }
    run = _select(q, backend)
    with in_full_precision(q.device.type):
        return paths[run](q, k, v, *call)


def linformer_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition: read this first, test against this."""
    return _reference(q, k, v, *_check_inputs(q, k, v, proj_k, proj_v, key_padding_mask, scale))


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = _compress(k.to(wide), proj_k, mask, q.shape[1])
    values = _compress(v.to(wide), proj_v, mask, q.shape[1])
    return _attend(q.to(wide), keys, values, None, scale).to(v.dtype)


def compress(x: Tensor, proj: Tensor, mask: Tensor | None, h: int, backend: str | None) -> Tensor:
    """The first half: sums over tokens ``(b, h_kv, s, d)``, of any width d, that are not masked.

    Args:
        proj: ``(slots, L)``, or ``(h, slots, L)`` for h query heads.

    Returns:
        ``(b, h_kv, slots, d)``, or of h heads; under autocast in its dtype.
    """
    (x,) = under_autocast(x)
    run = _select(x, backend)
    paths = {"torch": torch_path.compress, "triton": triton_path.compress, "reference": _compress}
    with in_full_precision(x.device.type):
        return paths[run](x, proj, mask, h)


def compress_both(
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor,
    mask: Tensor | None,
    h: int,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Keys by ``proj_k`` and values by ``proj_v``, at once where there is a kernel for it; if v is
    k, its gradient is made as one."""
    if _select(k, backend) != "triton":
        return compress(k, proj_k, mask, h, backend), compress(v, proj_v, mask, h, backend)
    k, v = under_autocast(k) * 2 if v is k else under_autocast(k, v)
    with in_full_precision(k.device.type):
        return triton_path.compress_both(k, v, proj_k, proj_v, mask, h)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    off: Tensor | None,
    scale: float,
    backend: str | None,
) -> Tensor:
    """The second half: softmax attention of q to slots ``(b, h_kv, slots, d)``.

    Slots that are ``off``, ``(b, slots)`` bool, are seen by nobody; a sample whose slots all are
    gives zeros.
    """
    paths = {"torch": torch_path.attend, "triton": triton_path.attend, "reference": _attend}
    run = _select(q, backend)
    with in_full_precision(q.device.type):
        return paths[run](q, keys, values, off, scale)


def _select(x: Tensor, backend: str | None) -> str:
    return select("linformer_attention", backend, **candidates(x))


def _compress(x: Tensor, proj: Tensor, mask: Tensor | None, h: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if mask is not None:
        x = x.masked_fill(mask[:, None, :, None], 0)
    heads = x.shape[1] if proj.dim() == 2 else h
    tokens = x.to(wide).repeat_interleave(heads // x.shape[1], 1)
    return (proj[..., : x.shape[2]].to(wide) @ tokens).to(x.dtype)  # (b, heads, slots, d)


def _attend(q: Tensor, keys: Tensor, values: Tensor, off: Tensor | None, scale: float) -> Tensor:
    wide, h = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    k, v = (x.to(wide).repeat_interleave(h // x.shape[1], 1) for x in (keys, values))
    logits = scale * (q.to(wide) @ k.mT)  # (b, h, n, slots)
    if off is None:
        return (logits.softmax(-1) @ v).to(values.dtype)
    seen, nothing = (x[:, None, None] for x in (~off, off.all(-1, keepdim=True)))
    weights = torch.where(nothing, 0, logits.masked_fill(~(seen | nothing), -torch.inf).softmax(-1))
    return (weights @ v).to(values.dtype)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor | None,
    key_padding_mask: Tensor | None,
    scale: float | None,
) -> _Call:
    _check.check_qkv(q, k, v)
    (b, h, _, d), s = q.shape, k.shape[2]
    proj_v = proj_k if proj_v is None else proj_v
    for name, x in (("proj_k", proj_k), ("proj_v", proj_v)):
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, it is on {x.device}")
        if x.dim() not in (2, 3) or (x.dim() == 3 and x.shape[0] != h) or not x.shape[-2]:
            raise ValueError(
                f"{name} must be (slots, L), or (h, slots, L) with h = {h}, got {tuple(x.shape)}"
            )
        if s > x.shape[-1]:
            raise ValueError(
                f"k has s = {s} keys, but {name} has columns for L = {x.shape[-1]}: cut the "
                "sequence, or make the projection for its length"
            )
    if proj_k.shape[-2] != proj_v.shape[-2]:
        raise ValueError(
            f"proj_k has {proj_k.shape[-2]} slots and proj_v {proj_v.shape[-2]}: they must agree"
        )
    if key_padding_mask is not None:
        _check.check_key_padding_mask(key_padding_mask, b, s, q.device)
    return _Call(proj_k, proj_v, key_padding_mask, d**-0.5 if scale is None else float(scale))
