"""FAVOR+: softmax attention estimated in O(n) by positive random features.

    exp(x·y) = E exp(w·x - ‖x‖²/2) exp(w·y - ‖y‖²/2),    w ~ N(0, 1)

with x, y = √scale·q, √scale·k. For m directions w, normalised attention is exactly two softmax
attentions: the features attend to the keys, then the queries to the features. Choromanski et al.
2021, "Rethinking Attention with Performers" (section 2); "oprf": Likhosherstov et al. 2022, "Chefs'
Random Tables" (section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import _check
from fastattn._backend import select
from fastattn.ops import favor_torch as torch_path
from fastattn.ops import favor_triton as triton_path
from fastattn.ops.favor_causal_triton import scan as triton_scan
from fastattn.ops.favor_directions import check_scale
from fastattn.ops.favor_directions import oprf_constant as best_constant
from fastattn.ops.favor_torch import Features
from fastattn.ops.linear_attention import (
    LinearState,
    candidates,
    check_state,
    in_full_precision,
    linear_attention_reference,
    linear_attention_scan_reference,
    under_autocast,
)

VARIANTS = ("positive", "hyperbolic", "oprf", "relu")
BACKENDS = {
    "favor_attention": ("triton", "torch", "reference"),
    "favor_attention_scan": ("triton", "torch", "reference"),
}


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    variant: str = "positive",
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    oprf_constant: Tensor | float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Estimate softmax attention by random features; time O(n·m), memory O(n).

    The estimate has no eps and no maximum over tokens: it is finite at every scale of the inputs,
    and every output is a weighted mean of the values, with positive weights that sum to one. How
    far it is from softmax attention, :func:`favor_error` predicts. The causal kernels are exact up
    to ‖k‖²·scale of about 100 and degrade beyond, still to such means; the rest is exact at every
    scale. Packed sequences cost O(m·(d + e)) memory each on the kernels, O(n·m) on the torch path.

    Args:
        q: Queries, ``(b, h, n, d)``, float64, float32, bfloat16 or float16; d from 1 to 256.
        k: Keys, ``(b, h_kv, s, d)``; h_kv divides h, and query head i reads head i // (h / h_kv).
        v: Values, ``(b, h_kv, s, e)``; e from 1 to 256.
        projection: Directions, ``(m, d)`` or one set per key head ``(h_kv, m, d)``, m from 1 to
            512: of :func:`draw_projection`, or learned. Has a gradient.
        variant: "positive"; "hyperbolic" (w and -w: 2·m features); "oprf" (a smaller variance);
            "relu" (not an estimate of softmax: linear attention on relu(w·x), a row without any
            weight gives zeros).
        causal: Row i sees keys 0 to i only; needs s = n.
        key_padding_mask: ``(b, s)`` bool, True = ignore. What k and v hold at ignored positions,
            NaN included, changes nothing. A row that may see no key gives zeros.
        scale: On the logits q·k, positive; None means d^-0.5, as in softmax attention.
        oprf_constant: A of variant "oprf", below 1/8: a number, or ``(h_kv,)``; None means that of
            :func:`oprf_constant` for normal inputs. Never taken from the batch.
        cu_seqlens: Boundaries of packed sequences, int32, ``(segments + 1,)``; needs b = 1 and
            s = n. A token sees only its own segment.
        backend: "triton" (CUDA, no float64, no second derivative),
            "torch", "reference" (quadratic), or None for the first that can run.

    Returns:
        ``(b, h, n, e)`` in the dtype of v, computed in float32, or float64 for float64 inputs.
        Under autocast q, k and v are first cast to its dtype, except float64, as for softmax
        attention.

    Raises:
        TypeError: A dtype is not floating or differs; a mask is not bool.
        ValueError: A shape, device, width, option or boundary does not fit.
    """
    q, k, v = under_autocast(q, k, v)
    features = _check_inputs(q, k, v, projection, variant, scale, oprf_constant, key_padding_mask)
    b, n, s = q.shape[0], q.shape[2], k.shape[2]
    if (causal or cu_seqlens is not None) and n != s:
        what = "causal=True" if causal else "cu_seqlens"
        raise ValueError(f"{what} needs as many keys as queries, got n = {n} and s = {s}")
    if cu_seqlens is not None:
        _check.check_cu_seqlens(cu_seqlens, b, n, q.device)
    run = select("favor_attention", backend, **candidates(q))
    paths: dict[str, Callable[..., Tensor]] = {
        "triton": triton_path.attend,
        "torch": torch_path.attend,
        "reference": _reference,
    }
    with in_full_precision(q.device.type):
        return paths[run](
            q,
            k,
            v,
            features,
            causal=causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
        )


def favor_attention_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    state: LinearState | None = None,
    *,
    variant: str = "positive",
    scale: float | None = None,
    oprf_constant: Tensor | float | None = None,
    key_padding_mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, LinearState]:
    """Causal FAVOR+ that continues from a state; n = 1 is a decoding step, in O(m).

    A sequence given whole, in pieces of any length, or token by token gives the same outputs and
    the same sums, up to rounding.

    Args:
        q: Queries of the new tokens, ``(b, h, n, d)``.
        k: Their keys, ``(b, h_kv, n, d)``.
        v: Their values, ``(b, h_kv, n, e)``.
        projection: As in :func:`favor_attention`; must stay the same along a sequence.
        state: What the previous call returned; None starts a sequence. kv ``(b, h_kv, m, e)`` and
            z, shift ``(b, h_kv, m)``, where m counts features (of "hyperbolic" twice the
            directions); for "relu" shift is None.
        variant: As in :func:`favor_attention`, likewise the rest.
        backend: "triton" (CUDA, no float64, no second derivative; one kernel for one token
            without gradients), "torch", "reference" (token by token), or None for the first that
            can run.

    Returns:
        The outputs ``(b, h, n, e)`` in the dtype of v, and the state after the last token.

    Raises:
        TypeError: A dtype is not floating or differs; a mask is not bool.
        ValueError: A shape, device, width or option does not fit, or the state belongs to another
            batch, head count, width, projection or variant.
    """
    q, k, v = under_autocast(q, k, v)
    features = _check_inputs(q, k, v, projection, variant, scale, oprf_constant, key_padding_mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a scan needs as many keys as queries, got n = {q.shape[2]} and s = {k.shape[2]}"
        )
    if state is not None:
        count = features.directions.shape[1]
        check_state(state, k, v, count, shifted=variant != "relu", what=f"variant {variant!r}")
    run = select("favor_attention_scan", backend, **candidates(q))
    paths: dict[str, Callable[..., Any]] = {
        "triton": triton_scan,
        "torch": torch_path.scan,
        "reference": _scan_reference,
    }
    with in_full_precision(q.device.type):
        out, after = paths[run](q, k, v, state, features, key_padding_mask=key_padding_mask)
    return out, LinearState(*after)


def favor_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    variant: str = "positive",
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    oprf_constant: Tensor | float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The definition, in O(n·s·m): features of width m, and the weights of every pair."""
    features = _features(q, k, projection, variant, scale, oprf_constant)
    return _reference(
        q,
        k,
        v,
        features,
        causal=causal,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
    )


def _reference(
    q: Tensor, k: Tensor, v: Tensor, features: Features, *, key_padding_mask: Any, **options: Any
) -> Tensor:
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], 0)
    out = linear_attention_reference(
        features.of_queries(q),
        features.of_keys(k),
        v.to(features.directions.dtype),
        feature_map=features.feature_map,
        key_padding_mask=key_padding_mask,
        **options,
    )
    return out.to(v.dtype)


def _scan_reference(
    q: Tensor, k: Tensor, v: Tensor, state: Any, features: Features, *, key_padding_mask: Any
) -> tuple[Tensor, LinearState]:
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], 0)
    out, after = linear_attention_scan_reference(
        features.of_queries(q),
        features.of_keys(k),
        v.to(features.directions.dtype),
        state,
        feature_map=features.feature_map,
        key_padding_mask=key_padding_mask,
    )
    return out.to(v.dtype), after


def _features(
    q: Tensor,
    k: Tensor,
    projection: Tensor,
    variant: str,
    scale: float | None,
    constant: Tensor | float | None,
) -> Features:
    """Directions and offsets, from what the caller gives; small, and differentiable."""
    d = q.shape[3]
    scale = check_scale(scale, d)
    wide = torch.promote_types(q.dtype, torch.float32)
    directions = projection.to(wide)
    if directions.dim() == 2:
        directions = directions.unsqueeze(0)
    root = math.sqrt(scale)
    if variant == "relu":
        return Features(directions, root, None, None)
    if variant == "hyperbolic":
        return Features(torch.cat((directions, -directions), 1), root, None, scale)
    if variant == "positive":
        return Features(directions, root, None, scale)
    if constant is None:
        constant = best_constant(2 * d * scale, d)  # normal q and k
    if isinstance(constant, Tensor):
        constant = constant.to(wide).view(-1, 1)
        slope: Any = (1 - 4 * constant).sqrt().unsqueeze(-1)
    else:
        slope = math.sqrt(1 - 4 * constant)
    offsets = 2 * constant * directions.square().sum(-1)
    return Features(slope * directions, root, offsets, scale)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    variant: str,
    scale: float | None,
    constant: Tensor | float | None,
    key_padding_mask: Tensor | None,
) -> Features:
    """Check what the ops share; return what makes the features."""
    _check.check_qkv(q, k, v)
    _check.check_option("variant", variant, VARIANTS)
    h_kv, d = k.shape[1], q.shape[3]
    shape = tuple(projection.shape)
    if not projection.dtype.is_floating_point:
        raise TypeError(f"projection must be floating-point, got {projection.dtype}")
    if len(shape) not in (2, 3) or shape[-1] != d or (len(shape) == 3 and shape[0] != h_kv):
        raise ValueError(
            f"projection must be (m, d) or (h_kv, m, d) with d = {d} and h_kv = {h_kv}, got {shape}"
        )
    if not 1 <= shape[-2] <= 512:
        raise ValueError(f"projection must have from 1 to 512 directions, got {shape[-2]}")
    if projection.device != q.device:
        raise ValueError(f"projection must be on {q.device} like q, it is on {projection.device}")
    if constant is not None:
        _check_constant(constant, variant, h_kv, q.device)
    if key_padding_mask is not None:
        _check.check_key_padding_mask(key_padding_mask, q.shape[0], k.shape[2], q.device)
    return _features(q, k, projection, variant, scale, constant)


def _check_constant(
    constant: Tensor | float, variant: str, h_kv: int, device: torch.device
) -> None:
    if variant != "oprf":
        raise ValueError(f'oprf_constant is for variant "oprf" only, got variant {variant!r}')
    if isinstance(constant, Tensor):
        if tuple(constant.shape) != (h_kv,):
            raise ValueError(
                f"oprf_constant must be a number or (h_kv,) = ({h_kv},), got shape "
                f"{tuple(constant.shape)}"
            )
        if constant.device != device:
            raise ValueError(
                f"oprf_constant must be on {device} like q, it is on {constant.device}"
            )
        if device.type != "cpu" or torch.compiler.is_compiling():
            return  # reading the values would synchronise
        constant = constant.detach().max().item()
    if not -math.inf < constant < 1 / 8:
        raise ValueError(f"oprf_constant must be finite and below 1/8, got {constant}")
