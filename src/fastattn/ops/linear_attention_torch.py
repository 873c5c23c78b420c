"""The torch path of linear attention: any device, O(n) memory, differentiable any number of times.

Everywhere here q is ``(b, h_kv, g, n, d)``, k and v are ``(b, h_kv, 1, s, ...)``, in float32 at
least. v carries a last column of ones, so that one sum yields both S and z. For "exp", features
stay in logarithms until they meet, and every partial sum carries its scale: the sum is that of
exp(logit - top), so nothing overflows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _tuning

Scaled = tuple[Tensor, Tensor | None]  # a sum, and None or the logarithm of its scale
State = tuple[Tensor, Tensor, Tensor | None]  # kv, z, shift


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
    grouped, keys, values = _prepare(q, k, v, feature_map, key_padding_mask)
    exp = feature_map == "exp"
    if cu_seqlens is not None:
        segment = segment_ids(cu_seqlens, q.shape[2])
        found, _ = _causal(grouped, keys, values, exp, segment=segment)
        if not causal:  # what lies after a token, itself excluded, is its past backwards
            back = (grouped.flip(-2), keys.flip(-2), values.flip(-2))
            (total, top), _ = _causal(*back, exp, segment=segment.flip(0), strict=True)
            found = merge(found, (total.flip(-2), None if top is None else top.flip(-2)))
    elif causal:
        found, _ = _causal(grouped, keys, values, exp)
    else:
        found = _everything(grouped, keys, values, exp)
    return finish(found, normalize, q, v)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    *,
    feature_map: str,
    key_padding_mask: Tensor | None,
    normalize: bool,
) -> tuple[Tensor, State]:
    """:func:`fastattn.ops.linear_attention_scan`, behind its door."""
    grouped, keys, values = _prepare(q, k, v, feature_map, key_padding_mask)
    before = None
    if state is not None:
        kv, z, shift = state
        kv = torch.cat((kv, z.unsqueeze(-1)), -1)[:, :, None, None]  # (b, h_kv, 1, 1, d, e + 1)
        before = kv, None if shift is None else shift[:, :, None, None, None]
    found, (kv, shift) = _causal(grouped, keys, values, feature_map == "exp", before)
    kv = kv[:, :, 0, 0]
    after = kv[..., :-1], kv[..., -1], None if shift is None else shift[:, :, 0, 0, 0]
    return finish(found, normalize, q, v), after


def phi(x: Tensor, feature_map: str) -> Tensor:
    if feature_map == "elu":  # elu(x) + 1 would round small features to zero
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if feature_map == "relu":
        return x.relu()
    if feature_map == "squared_relu":
        return x.relu() * x
    return x


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Upcast, group the heads, mask, map; "exp" stays in logarithms, with -inf for a hidden key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    v = torch.cat((v, v.new_ones(*v.shape[:-1], 1)), -1)  # (b, h_kv, s, e + 1)
    hidden = None if key_padding_mask is None else key_padding_mask[:, None, :, None]
    if hidden is not None:
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)  # pads may hold NaN
    q, k = phi(q, feature_map), phi(k, feature_map)
    if hidden is not None:
        k = k.masked_fill(hidden, -torch.inf if feature_map == "exp" else 0)
    q = q.unflatten(1, (k.shape[1], q.shape[1] // max(k.shape[1], 1)))
    return q, k.unsqueeze(2), v.unsqueeze(2)


def finish(found: Scaled, normalize: bool, q: Tensor, v: Tensor) -> Tensor:
    """Divide by the weights' sum or undo the scaling; back to (b, h, n, e) and the dtype of v."""
    total, top = found
    out, mass = total[..., :-1], total[..., -1:]
    if normalize:
        out = divide(out, mass)
    elif top is not None:  # in two halves: exp(top) alone overflows before the product does
        half = (top / 2).clamp(max=math.log(torch.finfo(top.dtype).max)).exp()
        out = out * half * half
    return out.reshape(*q.shape[:-1], v.shape[-1]).to(v.dtype)


def divide(out: Tensor, mass: Tensor) -> Tensor:
    """A row with nothing to attend to has zero out and zero mass: it gives zeros."""
    return out / mass.masked_fill(mass == 0, 1)


def finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0)


def _everything(q: Tensor, k: Tensor, v: Tensor, exp: bool) -> Scaled:
    """Every query meets every key: sum over keys first."""
    kv, shift = sum_keys(k, v, exp)
    return read(q, kv, shift)


def sum_keys(k: Tensor, v: Tensor, exp: bool) -> Scaled:
    """``(..., d, e + 1)``: the keys' outer products with the values, and the shift they carry.

    The shift is the keys' maximum per feature, ``(..., 1, d)``: a constant for the gradient,
    exactly, since it cancels.
    """
    if not exp:
        return k.mT @ v, None
    shift = largest(k)
    return (k - finite(shift)).exp().mT @ v, shift


def largest(k: Tensor) -> Tensor:
    if k.shape[-2] == 0:
        return k.new_full((*k.shape[:-2], 1, k.shape[-1]), -torch.inf)
    return k.detach().amax(-2, keepdim=True)


def read(q: Tensor, kv: Tensor, shift: Tensor | None) -> Scaled:
    """Queries meet a sum over keys: ``(..., n, e + 1)``."""
    if shift is None:
        return q @ kv, None
    features, top = _lift(q, shift)
    return features @ kv, top


def _lift(q: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """exp(q + shift - top), and top, its maximum per row, ``(..., n, 1)``."""
    logits = q + shift
    top = logits.detach().amax(-1, keepdim=True)
    return (logits - finite(top)).exp(), top


def merge(one: Scaled, two: Scaled) -> Scaled:
    """Add two sums."""
    (sum_one, top_one), (sum_two, top_two) = one, two
    if top_one is None or top_two is None:
        return sum_one + sum_two, None
    top = torch.maximum(top_one, top_two)
    safe = finite(top)
    return sum_one * (top_one - safe).exp() + sum_two * (top_two - safe).exp(), top


def _drop(found: Scaled, rows: Tensor) -> Scaled:
    """Forget the sums of some rows; what they held, NaN included, is gone."""
    total, top = found
    return total.masked_fill(rows, 0), None if top is None else top.masked_fill(rows, -torch.inf)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exp: bool,
    state: Scaled | None = None,
    *,
    segment: Tensor | None = None,
    strict: bool = False,
) -> tuple[Scaled, Scaled]:
    """Chunks of c tokens: a token meets its own chunk by halves, earlier ones through their sum.

    ``strict`` leaves the token itself out. Returns the sums, and the final state.
    """
    n, chunk = q.shape[-2], _tuning.causal_chunk(k.shape[-1])
    known = _is_known(n)
    while known and chunk > 1 and chunk // 2 >= n:
        chunk //= 2
    count = (n + chunk - 1) // chunk
    if not known:  # one to spare, so that there are two at least and the last is never full
        count = count + 1
    tail = count * chunk - n
    q, v = F.pad(q, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail))
    k = F.pad(k, (0, 0, 0, tail), value=-torch.inf if exp else 0)
    q, k, v = (x.unflatten(-2, (count, chunk)) for x in (q, k, v))  # (b, h_kv, g, chunks, c, .)
    if segment is not None:
        segment = F.pad(segment, (0, tail), value=-1).view(count, chunk)

    here = _within(q, k, v, exp, segment, strict)
    past, final = _past(k, v, exp, state, segment, known and count == 1)
    before = read(q, *past)
    if segment is not None:  # a token of a later segment must not see that state
        last = F.pad(segment[:-1, -1:], (0, 0, 1, 0), value=-1)  # (chunks, 1)
        before = _drop(before, (segment != last).unsqueeze(-1))
    total, top = merge(here, before)
    total = total.flatten(-3, -2)[..., :n, :]
    return (total, None if top is None else top.flatten(-3, -2)[..., :n, :]), final


def _is_known(n: int) -> bool:
    """Whether a size is a number. A compiler has symbols for those that differ from call to call:
    what is asked of one becomes a condition of the graph, which should serve them all."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # takes its time

    return has_static_value(n)


def _within(
    q: Tensor, k: Tensor, v: Tensor, exp: bool, segment: Tensor | None, strict: bool
) -> Scaled:
    """By halves: the later half of a block meets the earlier half, all of which it may see.

    So nothing of the future enters a product, not even times zero, where a NaN would pass; and
    the maximum of the keys met is a legal shift. Half the products of a masked square, too.
    """
    found: Scaled
    if exp:
        features, top = _lift(q, k)
        found = features.sum(-1, keepdim=True) * v, top
    else:
        found = (q * k).sum(-1, keepdim=True) * v, None
    if strict:
        found = _drop(found, torch.ones_like(found[0][..., :1], dtype=torch.bool))
    half, chunk = 1, q.shape[-2]
    while half < chunk:
        keys, values, queries = _halves(k, half)[0], _halves(v, half)[0], _halves(q, half)[1]
        if segment is not None:  # only the last segment of the earlier half can reach the later
            early_ids, late_ids = _halves(segment.unsqueeze(-1), half)
            border = early_ids[..., -1:, :]
            keys = keys.masked_fill(early_ids != border, -torch.inf if exp else 0)
            values = values.masked_fill(early_ids != border, 0)
        if exp:
            shift = largest(keys)
            features, top = _lift(queries, shift)
            met: Scaled = features @ (keys - finite(shift)).exp().mT @ values, top
        else:
            met = queries @ keys.mT @ values, None
        if segment is not None:
            met = _drop(met, late_ids != border)
        found = _add_to_late(found, met, half)
        half *= 2
    return found


def _add_to_late(found: Scaled, met: Scaled, half: int) -> Scaled:
    """Add sums to the later halves of all blocks."""
    total, top = found
    early, late = _halves(total, half)
    early_top, late_top = (None, None) if top is None else _halves(top, half)
    late, late_top = merge((late, late_top), met)
    total = torch.stack((early, late), -3).flatten(-4, -2)
    if early_top is None or late_top is None:
        return total, None
    return total, torch.stack((early_top, late_top), -3).flatten(-4, -2)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """``(..., c, .)`` to the earlier and the later halves of its blocks of 2·half tokens."""
    early, late = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return early, late


def _past(
    k: Tensor, v: Tensor, exp: bool, state: Scaled | None, segment: Tensor | None, alone: bool
) -> tuple[Scaled, Scaled]:
    """The state before every chunk, ``(..., chunks, d, e + 1)``, and the one after the last.

    ``alone`` says that there is one chunk, where that is known.
    """
    if segment is not None:  # only the last segment of a chunk lives on after it
        leaves = (segment != segment[:, -1:]).unsqueeze(-1)
        k, v = k.masked_fill(leaves, -torch.inf if exp else 0), v.masked_fill(leaves, 0)
    kv, shift = sum_keys(k, v, exp)
    if state is None:
        empty = k.new_full((*k.shape[:-3], 1, 1, k.shape[-1]), -torch.inf)
        state = kv.new_zeros(*kv.shape[:-3], 1, *kv.shape[-2:]), empty
    if alone and segment is None:  # a decoding step, among others
        start = state[0], None if shift is None or state[1] is None else state[1].mT
        total, top = merge(start, (kv, None if shift is None else shift.mT))
        return (state[0], None if shift is None else state[1]), (
            total,
            None if top is None else top.mT,
        )
    kv = torch.cat((state[0], kv), -3)
    if shift is not None and state[1] is not None:
        shift = torch.cat((state[1], shift), -3)
    kv, shift = (
        (kv.cumsum(-3), None) if shift is None and segment is None else _running(kv, shift, segment)
    )
    before = kv[..., :-1, :, :], None if shift is None else shift[..., :-1, :, :]
    after = kv[..., -1:, :, :], None if shift is None else shift[..., -1:, :, :]
    return before, after


def _running(kv: Tensor, shift: Tensor | None, segment: Tensor | None) -> Scaled:
    """Inclusive running sums over the chunks in log2(chunks) steps (Hillis and Steele 1986).

    Two neighbours combine by rescaling to the larger shift; one that begins a segment ignores
    what is before it.
    """
    begins = None
    if segment is not None:
        last = F.pad(segment[:, -1], (1, 0), value=-1)  # the segment that ends each; state first
        begins = torch.cat((torch.ones_like(last[:1], dtype=torch.bool), last[1:] != last[:-1]))
    step, count = 1, kv.shape[-3]
    while step < count:
        earlier = kv[..., :-step, :, :]
        earlier_shift = None if shift is None else shift[..., :-step, :, :]
        if begins is not None:
            cut = begins[step:, None, None]
            earlier = earlier.masked_fill(cut, 0)
            if earlier_shift is not None:
                earlier_shift = earlier_shift.masked_fill(cut, -torch.inf)
            begins = torch.cat((begins[:step], begins[step:] | begins[:-step]))
        # a shift is (..., 1, d) and scales the rows of kv: transposed it is a top per row
        later = kv[..., step:, :, :], None if shift is None else shift[..., step:, :, :].mT
        kept, top = merge((earlier, None if earlier_shift is None else earlier_shift.mT), later)
        kv = torch.cat((kv[..., :step, :, :], kept), -3)
        if shift is not None and top is not None:
            shift = torch.cat((shift[..., :step, :, :], top.mT), -3)
        step *= 2
    return kv, shift


def segment_ids(cu_seqlens: Tensor, n: int) -> Tensor:
    """The number of the segment each token is in, ``(n,)``."""
    token = torch.arange(n, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], token, right=True)
