"""The torch path of Linformer: one product along the sequence, then softmax attention to slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Both halves."""
    keys, values = (compress(x, p, mask, q.shape[1]) for x, p in ((k, proj_k), (v, proj_v)))
    return attend(q, keys, values, None, scale)


def compress(x: Tensor, proj: Tensor, mask: Tensor | None, h: int) -> Tensor:
    """``(b, h_kv, s, d)`` by ``(slots, L)`` or ``(h, slots, L)``: ``(b, h_kv or h, slots, d)``.

    A projection that the heads share is one product a sample, over all heads side by side.
    """
    if mask is not None:
        x = x.masked_fill(mask[:, None, :, None], 0)
    proj = proj.narrow(-1, 0, x.shape[2]).to(x.dtype)
    if not torch.is_grad_enabled():  # else a product rounds as if the projection had a gradient
        proj = proj.detach()
    if proj.dim() == 2:
        heads = x.shape[1]
        both = proj @ x.transpose(1, 2).flatten(2)  # (b, slots, h_kv·d)
        return both.unflatten(2, (heads, -1)).transpose(1, 2)
    return proj @ x.repeat_interleave(h // x.shape[1], 1)


def attend(q: Tensor, keys: Tensor, values: Tensor, off: Tensor | None, scale: float) -> Tensor:
    """Softmax attention to slots ``(b, h_kv, slots, d)``.

    Args:
        off: ``(b, slots)`` bool: slots that no query sees. Where all are, all are seen, and their
            values are zero.
    """
    seen = None if off is None else (~off | off.all(-1, keepdim=True))[:, None, None]
    if seen is not None:
        values = values.masked_fill(off.unsqueeze(1).unsqueeze(-1), 0)  # type: ignore[union-attr]
    h = q.shape[1]
    keys, values = (
        x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], 1) for x in (keys, values)
    )
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)


def attend_to_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor,
    mask: Tensor | None,
    each: int,
    tokens: int,
    scale: float,
) -> Tensor:
    """One softmax over the own segment up to the token, and the slots of all segments before it.

    Args:
        proj_k, proj_v: ``(all slots, tokens)``, or ``(h, all slots, tokens)``: ``each`` rows for
            each segment of so many tokens.
    """
    n = q.shape[2]
    count = max(-(-n // tokens), 1)
    proj_k, proj_v = (
        x.unflatten(-2, (-1, each))[..., :count, :, :] for x in (proj_k, proj_v)
    )  # ([h,] segments, each, tokens)
    hidden = torch.arange(count * tokens, device=q.device) >= n
    if mask is not None:
        hidden = hidden | F.pad(mask, (0, count * tokens - n))
    hidden = hidden.view(-1, 1, count, 1, tokens)  # (b or 1, 1, segments, 1, tokens)

    q, k, v = (
        F.pad(x, (0, 0, 0, count * tokens - n)).unflatten(2, (count, tokens)) for x in (q, k, v)
    )
    k, v = (x.masked_fill(hidden.mT, 0) for x in (k, v))
    keys, values = proj_k @ k, proj_v @ v  # (b, h, segments, each, d)
    index, place = (torch.arange(x, device=q.device) for x in (count, tokens))
    nothing = hidden.all(-1).view(-1, 1, 1, 1, count)  # segments without a token
    unseen = (index >= index[:, None]).view(1, 1, count, 1, count) | nothing
    far = scale * torch.einsum("bhgid,bhfrd->bhgifr", q, keys)
    far = far.masked_fill(unseen.unsqueeze(-1), -torch.inf).flatten(-2)
    near = scale * (q @ k.mT)
    near = near.masked_fill(hidden | (place > place[:, None]), -torch.inf)
    logits = torch.cat([far, near], -1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(empty, 0, logits.masked_fill(empty, 0).softmax(-1))
    for_far, for_near = weights.split([far.shape[-1], tokens], -1)
    out = for_near @ v + for_far @ values.flatten(2, 3).unsqueeze(2)
    return out.flatten(2, 3)[:, :, :n]
