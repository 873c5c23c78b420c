"""Block-sparse attention: softmax over the blocks of keys that a layout lists for each block of
queries; its cost is that of the blocks that are seen (Zaheer et al. 2020, appendix D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import _check
from fastattn._backend import select
from fastattn.ops import block_sparse_torch as torch_path
from fastattn.ops import block_sparse_triton as triton_path
from fastattn.ops.block_sparse_layout import BlockLayout
from fastattn.ops.block_sparse_lists import to_mask
from fastattn.ops.favor_directions import check_scale
from fastattn.ops.linear_attention import candidates, in_full_precision, under_autocast
from fastattn.ops.philox import kept, seed_of

BACKENDS = ("triton", "torch", "reference")


class _Call(NamedTuple):
    """What the paths share beside q, k and v."""

    layout: BlockLayout
    key_padding_mask: Tensor | None
    lengths: Tensor | None
    scale: float
    dropout_p: float
    seed: Tensor | None


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    key_padding_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention within the blocks of a layout; time and memory O(non-zero blocks).

    Args:
        q: Queries, ``(b, h, n, d)``, float64, float32, bfloat16 or float16; d from 1 to 256.
        k: Keys, ``(b, h_kv, s, d)``; h_kv divides h, and query head i reads head i // (h / h_kv).
        v: Values, ``(b, h_kv, s, e)``; e from 1 to 256.
        layout: For n queries and s keys: as many blocks, the last of them may be cut short. A
            pattern of each head's own, or one for all.
        key_padding_mask: ``(b, s)`` bool, True = ignore. What k and v hold at ignored positions,
            NaN included, changes nothing. A row that may see no key gives zeros.
        lengths: ``(b,)`` int32 on the device of q; needs s = n. A recipe ("bigbird" with plan
            "uniform", "sliding_window") is evaluated for each sample's own length, without a
            synchronisation, so that a sample does not depend on its batch; an explicit layout is
            cut off at the length. Rows behind it give zeros.
        dropout_p: The probability that a weight is dropped; the others grow by 1 / (1 - p).
        seed: Of dropout, an int or one int64 on the device of q: with the same seed the same
            weights are dropped, forward and backward, on every backend. None draws it from
            PyTorch's generator.
        scale: On the logits q·k, positive; None means d^-0.5.
        backend: "triton" (CUDA, no float64, no second derivative), "torch", "reference"
            (quadratic), or None for the first that can run.

    Returns:
        ``(b, h, n, e)`` in the dtype of v, computed in float32, or float64 for float64 inputs.
        Under autocast q, k and v are first cast to its dtype, except float64.

    Raises:
        TypeError: A dtype is not floating or differs; a mask is not bool; lengths are not int32.
        ValueError: A shape, device, option, or the layout's blocks or heads do not fit.
    """
    q, k, v = under_autocast(q, k, v)
    call = _check_inputs(q, k, v, layout, key_padding_mask, lengths, scale, dropout_p, seed)
    run = select("block_sparse_attention", backend, **candidates(q))
    paths: dict[str, Callable[..., Tensor]] = {
        "triton": triton_path.attend,
        "torch": torch_path.attend,
        "reference": _reference,
    }
    with in_full_precision(q.device.type):
        return paths[run](q, k, v, *call)


def block_sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    key_padding_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition, by the dense weights: read this first, test against this."""
    return _reference(
        q, k, v, *_check_inputs(q, k, v, layout, key_padding_mask, lengths, scale, dropout_p, seed)
    )


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    key_padding_mask: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    (b, h, n, _), s = q.shape, k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = torch_path.visible_keys(s, key_padding_mask, lengths, q.device)
    q, k, out_dtype = q.to(wide), k.to(wide), v.dtype
    if seen is not None:
        k, v = (x.masked_fill(~seen[:, None, :, None], 0) for x in (k, v))
    k, v = (x.to(wide).repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    lists = layout.lists(q.device, torch_path.in_blocks(lengths, layout.block_size))
    blocks = to_mask(lists, layout.shape[1]).to(wide)  # (p, h', blocks, blocks)
    size = layout.block_size
    added = blocks.repeat_interleave(size, 2)[:, :, :n].repeat_interleave(size, 3)[..., :s]
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(s, device=q.device)
    if layout.causal:
        added = added.masked_fill(j > i, -torch.inf)
    if seen is not None:
        added = added.masked_fill(~seen[:, None, None, :], -torch.inf)
    if lengths is not None:
        behind = i >= lengths.view(-1, 1, 1, 1)
        q, added = q.masked_fill(behind, 0), added.masked_fill(behind, -torch.inf)
    empty = (added == -torch.inf).all(-1, keepdim=True)
    logits = scale * (q @ k.mT) + added.masked_fill(empty, 0)  # (b, h, n, s)
    weights = torch.where(empty, 0, logits.softmax(-1))
    if seed is not None:
        samples, heads = (torch.arange(x, device=q.device) for x in (b, h))
        stay = kept(seed, dropout_p, samples.view(-1, 1, 1, 1), heads.view(-1, 1, 1), i, j)
        weights = torch.where(stay, weights / (1 - dropout_p), 0)
    return (weights @ v).to(out_dtype)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    key_padding_mask: Tensor | None,
    lengths: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
) -> _Call:
    _check.check_qkv(q, k, v)
    b, h, n, d = q.shape
    s = k.shape[2]
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"layout must be a BlockLayout, got {type(layout).__name__}")
    size = layout.block_size
    if layout.shape != ((n + size - 1) // size, (s + size - 1) // size):
        made = f" (made for {layout.seq_len} tokens)" if layout.seq_len is not None else ""
        raise ValueError(
            f"layout has {layout.shape[0]} blocks of queries and {layout.shape[1]} of keys{made}, "
            f"but q has n = {n} and k s = {s} tokens, in blocks of {size}"
        )
    if layout.num_heads != 1 and layout.num_heads != h:
        raise ValueError(f"layout has {layout.num_heads} heads, q has {h}: make it for 1 or {h}")
    if layout.causal and n != s:
        raise ValueError(f"a causal layout needs as many keys as queries, got n = {n}, s = {s}")
    if key_padding_mask is not None:
        _check.check_key_padding_mask(key_padding_mask, b, s, q.device)
    if lengths is not None:
        _check_lengths(lengths, layout, b, n, s, q.device)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    chosen = seed_of(seed, q.device) if dropout_p > 0 else None
    return _Call(layout, key_padding_mask, lengths, check_scale(scale, d), dropout_p, chosen)


def _check_lengths(
    lengths: Tensor, layout: BlockLayout, b: int, n: int, s: int, device: torch.device
) -> None:
    if lengths.dtype != torch.int32:
        raise TypeError(f"lengths must be int32, got {lengths.dtype}")
    if tuple(lengths.shape) != (b,) or lengths.device != device:
        raise ValueError(
            f"lengths must be (b,) = ({b},) on {device} like q, got {tuple(lengths.shape)} on "
            f"{lengths.device}"
        )
    if n != s:
        raise ValueError(f"lengths need as many keys as queries, got n = {n} and s = {s}")
    if layout.recipe is not None and layout.recipe.plan != "uniform":
        raise ValueError(
            f"plan {layout.recipe.plan!r} is made for one length, as the code that it follows: "
            "leave lengths out, and mask padding by key_padding_mask"
        )
