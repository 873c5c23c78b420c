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
    "linear_attention": ("triton", "torch", "reference"),
    "linear_attention_scan": ("triton", "torch", "reference"),
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
        backend: "triton" (CUDA, no float64, no second derivative), "torch", "reference"
            (quadratic), or None for the first that can run.

    Returns:
        ``(b, h, n, e)`` in the dtype of v. Sums are in float32, or float64 for float64 inputs.
        Under autocast q, k and v are first cast to its dtype, except float64, as for softmax
        attention.

    Raises:
        TypeError: A dtype is not floating or differs; a mask is not bool.
        ValueError: A shape, device, width, option or boundary does not fit.
    """
    q, k, v = under_autocast(q, k, v)
    normalize = _check_inputs(q, k, v, feature_map, key_padding_mask, normalize)
    b, n, s = q.shape[0], q.shape[2], k.shape[2]
    if (causal or cu_seqlens is not None) and n != s:
        what = "causal=True" if causal else "cu_seqlens"
        raise ValueError(f"{what} needs as many keys as queries, got n = {n} and s = {s}")
    if cu_seqlens is not None:
        _check.check_cu_seqlens(cu_seqlens, b, n, q.device)

    run = select("linear_attention", backend, **candidates(q))
    paths: dict[str, Callable[..., Tensor]] = {
        "torch": torch_path.attend,
        "triton": triton_path.attend,
        "reference": linear_attention_reference,
    }
    with in_full_precision(q.device.type):
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
        backend: "triton" (CUDA; one kernel for one token without gradients), "torch",
            "reference" (token by token), or None for the first that can run.

    Returns:
        The outputs ``(b, h, n, e)`` in the dtype of v, and the state after the last token.

    Raises:
        TypeError: A dtype is not floating or differs; a mask is not bool.
        ValueError: A shape, device, width or option does not fit, or the state belongs to
            another batch, head count, width or feature map.
    """
    q, k, v = under_autocast(q, k, v)
    normalize = _check_inputs(q, k, v, feature_map, key_padding_mask, normalize)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a scan needs as many keys as queries, got n = {q.shape[2]} and s = {k.shape[2]}"
        )
    if state is not None:
        shifted = feature_map == "exp"
        check_state(state, k, v, k.shape[3], shifted=shifted, what=f"feature_map {feature_map!r}")
    run = select("linear_attention_scan", backend, **candidates(q))
    paths: dict[str, Callable[..., Any]] = {
        "torch": torch_path.scan,
        "triton": triton_path.scan,
        "reference": linear_attention_scan_reference,
    }
    with in_full_precision(q.device.type):
        out, after = paths[run](
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


def linear_attention_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | None = None,
    *,
    feature_map: str = "elu",
    key_padding_mask: Tensor | None = None,
    normalize: bool | None = None,
) -> tuple[Tensor, LinearState]:
    """The recurrence, a token at a time: S += φ(k) ⊗ v, z += φ(k), out = φ(q)·S / φ(q)·z."""
    exp, wide = feature_map == "exp", torch.promote_types(q.dtype, torch.float32)
    normalize = feature_map != "identity" if normalize is None else normalize
    b, h_kv, n, d = k.shape
    kv = k.new_zeros(b, h_kv, d, v.shape[-1], dtype=wide)
    start = torch.full_like(kv[..., 0], -torch.inf) if exp else None
    kv, z, shift = state or (kv, kv[..., 0], start)
    outs = []
    for i in range(n):
        key, value = k[:, :, i].to(wide), v[:, :, i].to(wide)
        if key_padding_mask is not None:
            hidden = key_padding_mask[:, None, i, None]
            key = key.masked_fill(hidden, -torch.inf if exp else 0)
            value = value.masked_fill(hidden, 0)
        if shift is not None:
            larger = torch.maximum(shift, key.detach())
            scale, shift = (shift - finite(larger)).exp(), larger
            kv, z = kv * scale.unsqueeze(-1), z * scale
            features = (key - finite(shift)).exp()
            query = q[:, :, i].to(wide) + shift.repeat_interleave(q.shape[1] // h_kv, 1)
            top = finite(query.detach().amax(-1, keepdim=True))
            query = (query - top).exp()
        else:
            features, query = phi(key, feature_map), phi(q[:, :, i].to(wide), feature_map)
            if key_padding_mask is not None:
                features = features.masked_fill(hidden, 0)
        kv = kv + features.unsqueeze(-1) * value.unsqueeze(-2)
        z = z + features
        query = query.unflatten(1, (h_kv, -1))  # (b, h_kv, g, d)
        out, mass = query @ kv, query @ z.unsqueeze(-1)
        if normalize:
            out = divide(out, mass)
        out = out.flatten(1, 2)
        outs.append(out * top.exp() if exp and not normalize else out)
    out = torch.stack(outs, 2) if outs else q.new_zeros(*q.shape[:3], v.shape[-1])
    return out.to(v.dtype), LinearState(kv, z, shift)


def candidates(q: Tensor) -> dict[str, str | None]:
    """Why each backend refuses, in the order of preference; on a CPU, Triton is interpreted."""
    refusal = triton_path.refusal(q)
    if q.device.type == "cpu":
        return {"torch": None, "triton": refusal, "reference": None}
    return {"triton": refusal, "torch": None, "reference": None}


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # asking for meta raises
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def in_full_precision(device: str) -> AbstractContextManager[None]:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: str,
    key_padding_mask: Tensor | None,
    normalize: bool | None,
) -> bool:
    """Check what the ops share; return whether to normalise."""
    _check.check_qkv(q, k, v)
    _check.check_option("feature_map", feature_map, FEATURE_MAPS)
    if key_padding_mask is not None:
        _check.check_key_padding_mask(key_padding_mask, q.shape[0], k.shape[2], q.device)
    return feature_map != "identity" if normalize is None else normalize


def check_state(
    state: LinearState, k: Tensor, v: Tensor, features: int, *, shifted: bool, what: str
) -> None:
    """Require a state of these keys and values, with so many features.

    Raises:
        TypeError: It is no LinearState.
        ValueError: It belongs to another batch, dtype, device, or to another option than ``what``.
    """
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be a LinearState or None, got {type(state).__name__}")
    b, h_kv = k.shape[:2]
    if (state.shift is not None) != shifted:
        raise ValueError(
            f"state must {'' if shifted else 'not '}have a shift for {what}: it was made with "
            "another one"
        )
    wide = torch.promote_types(k.dtype, torch.float32)
    shapes: dict[str, tuple[int, ...]] = {"kv": (b, h_kv, features, v.shape[-1])}
    shapes |= {"z": (b, h_kv, features), "shift": (b, h_kv, features)}
    for (name, shape), part in zip(shapes.items(), state, strict=True):
        if part is None:
            continue
        if tuple(part.shape) != shape:
            raise ValueError(
                f"state.{name} must have shape {shape}, got {tuple(part.shape)}: the state belongs "
                "to another batch"
            )
        if part.dtype != wide or part.device != k.device:
            raise ValueError(
                f"state.{name} must be {wide} on {k.device}, got {part.dtype} on {part.device}: "
                "the state belongs to inputs of another dtype or device"
            )
