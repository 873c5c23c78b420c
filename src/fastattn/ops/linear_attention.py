"""Linear attention in O(n): softmax's exp(q·k) replaced by φ(q)·φ(k), so that sums factorise.

    out[i] = φ(q[i]) · S / φ(q[i]) · z,    S = sum_j φ(k[j]) ⊗ v[j],    z = sum_j φ(k[j])

where j runs over the keys that row i may see. Katharopoulos et al. 2020, "Transformers are RNNs"
(elu + 1); squared relu: So et al. 2021; exp: Choromanski et al. 2021, the deterministic kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import _check
from fastattn._backend import select
from fastattn.ops import linear_attention_torch as torch_path
from fastattn.ops import linear_attention_triton as triton_path
from fastattn.ops.linear_attention_torch import divide, finite, phi, segment_ids

FEATURE_MAPS = ("elu", "relu", "squared_relu", "exp", "identity")
BACKENDS = {
    "linear_attention": ("torch", "triton", "reference"),
    "linear_attention_scan": ("torch", "triton"),
}


class LinearState(NamedTuple):
    """What a causal scan remembers of the past, in float32 (float64 for float64 inputs).

    kv ``(b, h_kv, d, e)`` and z ``(b, h_kv, d)`` are the sums S and z over the past. For "exp",
    both are scaled by exp(-shift), and shift ``(b, h_kv, d)`` is the running maximum of the keys,
    -inf before the first; for the other maps it is None.
    """

    kv: Tensor
    z: Tensor
    shift: Tensor | None = None


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "elu",
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    normalize: bool | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Average the values, each weighted by φ(query)·φ(key); time and memory O(n).

    Args:
        q: Queries, ``(b, h, n, d)``, float64, float32, bfloat16 or float16; d from 1 to 256.
        k: Keys, ``(b, h_kv, s, d)``; h_kv divides h, and query head i reads head i // (h / h_kv).
        v: Values, ``(b, h_kv, s, e)``; e from 1 to 256.
        feature_map: φ, applied to q and k: "elu" (elu + 1), "relu", "squared_relu", "exp"
            (stabilised by a maximum per feature, so it never overflows), "identity".
        causal: Row i sees keys 0 to i only; needs s = n.
        key_padding_mask: ``(b, s)`` bool, True = ignore. Applied after the feature map. What k
            and v hold at ignored positions, NaN included, changes nothing.
        normalize: Divide by the sum of the weights; None means yes, except for "identity", whose
            weights have signs. A row whose weights are all zero gives zeros.
        cu_seqlens: Boundaries of packed sequences, int32, ``(segments + 1,)``; needs b = 1 and
            s = n. A token sees only its own segment.
        backend: "torch", "triton" (no second derivative), "reference" (quadratic), or None for
            the first that can run; "triton" must be named for now.

    Returns:
        ``(b, h, n, e)`` in the dtype of v. Sums are in float32, or float64 for float64 inputs.
        Under autocast q, k and v are first cast to its dtype, as for softmax attention.

    Raises:
        TypeError: A dtype is not floating or differs; a mask is not bool.
        ValueError: A shape, device, width, option or boundary does not fit.
    """
    q, k, v = _autocast(q, k, v)
    normalize = _check_inputs(q, k, v, feature_map, key_padding_mask, normalize)
    b, n, s = q.shape[0], q.shape[2], k.shape[2]
    if (causal or cu_seqlens is not None) and n != s:
        what = "causal=True" if causal else "cu_seqlens"
        raise ValueError(f"{what} needs as many keys as queries, got n = {n} and s = {s}")
    if cu_seqlens is not None:
        _check.check_cu_seqlens(cu_seqlens, b, n, q.device)

    refusal = triton_path.refusal(q, feature_map, causal)
    run = select("linear_attention", backend, torch=None, triton=refusal, reference=None)
    paths: dict[str, Callable[..., Tensor]] = {
        "torch": torch_path.attend,
        "triton": triton_path.attend,
        "reference": linear_attention_reference,
    }
    with _in_full_precision(q.device.type):
        return paths[run](
            q,
            k,
            v,
            feature_map=feature_map,
            causal=causal,
            key_padding_mask=key_padding_mask,
            normalize=normalize,
            cu_seqlens=cu_seqlens,
        )


def linear_attention_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | None = None,
    *,
    feature_map: str = "elu",
    key_padding_mask: Tensor | None = None,
    normalize: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, LinearState]:
    """Causal linear attention that continues from a state; n = 1 is a decoding step, in O(1).

    A sequence given whole, in pieces of any length, or token by token gives the same outputs and
    the same final state, up to rounding.

    Args:
        q: Queries of the new tokens, ``(b, h, n, d)``.
        k: Their keys, ``(b, h_kv, n, d)``.
        v: Their values, ``(b, h_kv, n, e)``.
        state: What the previous call returned; None starts a sequence.
        feature_map: As in :func:`linear_attention`; must stay the same along a sequence.
        key_padding_mask: ``(b, n)`` bool, True = ignore.
        normalize: As in :func:`linear_attention`.
        backend: "torch", "triton", or None for the first that can run.

    Returns:
        The outputs ``(b, h, n, e)`` in the dtype of v, and the state after the last token.

    Raises:
        TypeError: A dtype is not floating or differs; a mask is not bool.
        ValueError: A shape, device, width or option does not fit, or the state belongs to
            another batch, head count, width or feature map.
    """
    q, k, v = _autocast(q, k, v)
    normalize = _check_inputs(q, k, v, feature_map, key_padding_mask, normalize)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a scan needs as many keys as queries, got n = {q.shape[2]} and s = {k.shape[2]}"
        )
    if state is not None:
        _check_state(state, k, v, feature_map)
    refusal = triton_path.refusal(q, feature_map, causal=True)
    run = select("linear_attention_scan", backend, torch=None, triton=refusal)
    function: Callable[..., Any] = torch_path.scan if run == "torch" else triton_path.scan
    with _in_full_precision(q.device.type):
        out, after = function(
            q,
            k,
            v,
            state,
            feature_map=feature_map,
            key_padding_mask=key_padding_mask,
            normalize=normalize,
        )
    return out, LinearState(*after)


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "elu",
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    normalize: bool | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The definition, in O(n·s) (for "exp", O(n·s·d)): read this first, test against this."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    hidden = torch.zeros(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if causal:
        hidden = hidden | hidden.new_ones(hidden.shape[-2:]).triu(1)
    if cu_seqlens is not None:
        segment = segment_ids(cu_seqlens, q.shape[2])
        hidden = hidden | (segment[:, None] != segment[None, :])
    if key_padding_mask is not None:
        hidden = hidden | key_padding_mask[:, None, None, :]
        k, v = (x.masked_fill(key_padding_mask[:, None, :, None], 0) for x in (k, v))

    normalize = feature_map != "identity" if normalize is None else normalize
    if feature_map == "exp":  # in logarithms: the sum of exp(q + k) over d overflows otherwise
        logits = (q.unsqueeze(-2) + k.unsqueeze(-3)).logsumexp(-1)  # (b, h, n, s)
        logits = logits.masked_fill(hidden, -torch.inf)
        if normalize and k.shape[2]:
            logits = logits - finite(logits.detach().amax(-1, keepdim=True))
        weights = logits.exp()
    else:
        weights = phi(q, feature_map) @ phi(k, feature_map).mT  # (b, h, n, s)
        weights = weights.masked_fill(hidden, 0)
    return divide(weights @ v, weights.sum(-1, keepdim=True)) if normalize else weights @ v


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # asking for meta raises
        dtype = torch.get_autocast_dtype(device)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _in_full_precision(device: str) -> AbstractContextManager[None]:
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: str,
    key_padding_mask: Tensor | None,
    normalize: bool | None,
) -> bool:
    """Check what the ops share; return whether to normalise."""
    size = _check.check_shapes(q=(q, "b h n d"), k=(k, "b h_kv s d"), v=(v, "b h_kv s e"))
    _check.check_same(q=q, k=k, v=v)
    _check.check_grouped_heads(size["h"], size["h_kv"])
    _check.check_width("q", size["d"])
    _check.check_width("v", size["e"])
    _check.check_option("feature_map", feature_map, FEATURE_MAPS)
    if key_padding_mask is not None:
        _check.check_key_padding_mask(key_padding_mask, size["b"], size["s"], q.device)
    return feature_map != "identity" if normalize is None else normalize


def _check_state(state: LinearState, k: Tensor, v: Tensor, feature_map: str) -> None:
    b, h_kv, _, d = k.shape
    if tuple(state.kv.shape) != (b, h_kv, d, v.shape[-1]) or state.z.shape != state.kv.shape[:-1]:
        raise ValueError(
            f"state must hold kv (b, h_kv, d, e) = {(b, h_kv, d, v.shape[-1])} and "
            f"z {(b, h_kv, d)}, got {tuple(state.kv.shape)} and {tuple(state.z.shape)}: "
            "it belongs to another batch"
        )
    if (state.shift is not None) != (feature_map == "exp"):
        has = "none" if state.shift is None else "one"
        raise ValueError(
            f"state must {'' if feature_map == 'exp' else 'not '}have a shift for feature_map "
            f"{feature_map!r}, it has {has}: it was made with another feature map"
        )
