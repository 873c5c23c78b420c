"""The torch path of block-sparse attention: gathers the blocks that are seen.

Lists are cut into parts of about the same number of entries, so that a row that sees all does not
set the room of the others; the parts of a row are then added, each with its own maximum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops.block_sparse_layout import BlockLayout
from fastattn.ops.block_sparse_lists import Lists, items_of
from fastattn.ops.philox import kept


def visible_keys(
    s: int, mask: Tensor | None, lengths: Tensor | None, device: torch.device
) -> Tensor | None:
    """``(b, s)`` bool, or None if all are."""
    seen = None if mask is None else ~mask
    if lengths is not None:
        inside = torch.arange(s, device=device) < lengths[:, None]
        seen = inside if seen is None else seen & inside
    return seen


def in_blocks(lengths: Tensor | None, size: int) -> Tensor | None:
    return None if lengths is None else lengths // size + (lengths % size > 0).int()


def attend(
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
    """:func:`fastattn.ops.block_sparse_attention`, behind its door."""
    (b, h, n, _), s, size = q.shape, k.shape[2], layout.block_size
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = visible_keys(s, key_padding_mask, lengths, q.device)
    if seen is not None:
        k, v = (x.masked_fill(~seen[:, None, :, None], 0) for x in (k, v))
    if lengths is not None:
        behind = torch.arange(n, device=q.device) >= lengths[:, None]
        q = q.masked_fill(behind[:, None, :, None], 0)
    lists = layout.lists(q.device, in_blocks(lengths, size))
    if 0 in (b, h, n, s):
        return v.new_zeros(b, h, n, v.shape[3]) + 0 * (q.sum() + k.sum() + v.sum())

    rows, columns = layout.shape
    if seen is None:
        seen = torch.ones(1, s, dtype=torch.bool, device=q.device)
    seen = F.pad(seen, (0, columns * size - s)).unflatten(1, (columns, size)).expand(b, -1, -1)
    part = _Parts(lists, rows, b, h)
    qs = part.of_rows(_blocks(q.to(wide), rows, size))  # (b, h, t, i, d)
    ks = part.of_columns(_blocks(k.to(wide), columns, size))  # (b, h, t, c, j, d)
    vs = part.of_columns(_blocks(v.to(wide), columns, size))
    there = part.of_columns(seen.unsqueeze(1)) & part.there[..., None]  # (b, h, t, c, j)
    visible = there.unsqueeze(3)  # (b, h, t, i, c, j)
    i = part.row[..., None] * size + torch.arange(size, device=q.device)  # (b, h, t, i)
    j = part.column[..., None] * size + torch.arange(size, device=q.device)  # (b, h, t, c, j)
    i, j = i[..., None, None], j.unsqueeze(3)
    if layout.causal:
        visible = visible & (j <= i)
    logits = scale * torch.einsum("bhtid,bhtcjd->bhticj", qs, ks)
    if part.log_weight is not None:
        logits = logits + part.log_weight[:, :, :, None, :, None].to(wide)
    logits = logits.masked_fill(~visible, -torch.inf)
    top = logits.detach().amax((-2, -1))  # (b, h, t, i)
    weights = (logits - torch.where(top == -torch.inf, 0, top)[..., None, None]).exp()
    mass = weights.sum((-2, -1))
    if seed is not None:
        samples, heads = (torch.arange(x, device=q.device) for x in (b, h))
        samples, heads = samples.view(-1, *(1,) * 5), heads.view(-1, *(1,) * 4)
        weights = torch.where(kept(seed, dropout_p, samples, heads, i, j), weights, 0)
    values = torch.einsum("bhticj,bhtcje->bhtie", weights, vs)

    best = part.largest(top)  # (b, h, rows + 1, i)
    best = torch.where(best == -torch.inf, 0, best)
    factor = (top - part.back(best)).exp()
    total = part.add(values * factor[..., None])  # (b, h, rows + 1, i, e)
    mass = part.add(mass * factor)
    empty = mass == 0
    share = (1 - dropout_p) * torch.where(empty, 1, mass)
    out = torch.where(empty, 0, 1 / share)[..., None] * total
    out = out[:, :, :rows].flatten(2, 3)[:, :, :n]
    if lengths is not None:
        out = out.masked_fill(behind[:, None, :, None], 0)
    return out.to(v.dtype)


def _blocks(x: Tensor, count: int, size: int) -> Tensor:
    """``(b, h, n, d)`` to ``(b, h, count, size, d)``, with zeros behind the end."""
    x = F.pad(x, (0, 0, 0, count * size - x.shape[2]))
    return x.unflatten(2, (count, size))


class _Parts:
    """Parts t of the lists, of c entries, for every sample and head."""

    def __init__(self, lists: Lists, rows: int, b: int, h: int) -> None:
        self.rows = rows
        room = lists.blocks.shape[2]
        most = max(1, -(-room // rows))  # of a recipe no function of a symbolic length
        items = items_of(lists, most)
        entry = torch.arange(most, device=lists.blocks.device)
        there = entry < items.length[..., None]  # (p, h', t, c)
        place = torch.where(there, items.start[..., None] + entry, 0).long()

        def of_entries(x: Tensor) -> Tensor:
            if not room:
                return x.new_zeros(place.shape)
            return torch.where(there, x.gather(-1, place.flatten(2)).view(place.shape), 0)

        weights = None if lists.log_weight is None else of_entries(lists.log_weight)
        self.row = items.row.long().expand(b, h, -1)
        self.column = of_entries(lists.blocks).long().expand(b, h, -1, -1)
        self.there = there.expand(b, h, -1, -1)
        self.log_weight = None if weights is None else weights.expand(b, h, -1, -1)

    def of_rows(self, x: Tensor) -> Tensor:
        """``(b, h, rows, ...)`` to ``(b, h, t, ...)``; what does not exist reads the last row."""
        return _take(x, self.row.clamp(max=self.rows - 1))

    def of_columns(self, x: Tensor) -> Tensor:
        """``(b, h_kv or 1, columns, ...)`` to ``(b, h, t, c, ...)``."""
        return _take(x, self.column)

    def add(self, x: Tensor) -> Tensor:
        """``(b, h, t, ...)`` to ``(b, h, rows + 1, ...)``: the sums of the parts of every row."""
        total = x.new_zeros(*x.shape[:2], self.rows + 1, *x.shape[3:])
        return total.scatter_add(2, self._index(x), x)

    def largest(self, x: Tensor) -> Tensor:
        found = x.new_full((*x.shape[:2], self.rows + 1, *x.shape[3:]), -torch.inf)
        return found.scatter_reduce(2, self._index(x), x, "amax")

    def back(self, x: Tensor) -> Tensor:
        """``(b, h, rows + 1, ...)`` to ``(b, h, t, ...)``."""
        return _take(x, self.row)

    def _index(self, x: Tensor) -> Tensor:
        return self.row.view(*self.row.shape, *(1,) * (x.dim() - 3)).expand(x.shape)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x ``(b, heads, count, ...)`` at ``index`` ``(b, h, ...)`` of its third dimension."""
    b, heads, count = x.shape[:3]
    h = index.shape[1]
    first = torch.arange(b, device=x.device)[:, None] * heads
    first = first + torch.arange(h, device=x.device) // (h // heads)  # (b, h)
    index = first.view(b, h, *(1,) * (index.dim() - 2)) * count + index
    return x.flatten(0, 2)[index]
