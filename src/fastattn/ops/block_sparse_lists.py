"""The non-zero blocks of a pattern as lists, one per row or one per column, on a device.

Nothing here reads a value back: how many entries there are is known on the device only, and lists
have room for the most that there can be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _tuning

LOG2E = 1.4426950408889634


class Lists(NamedTuple):
    """Entries ``starts[i]`` to ``starts[i + 1]`` are those of row i, ascending.

    Attributes:
        starts: ``(p, h, rows + 1)`` int32; p is 1, or the samples if each has its own pattern, h is
            1, or the heads.
        blocks: ``(p, h, room)`` int32; behind the last entry anything.
        log_weight: ``(p, h, room)`` float64, added to the logits of a block; or None.
        long: Of explicit lists, ``(p, h, rows)`` bool: rows that kernels cut into parts of
            ``limit`` entries. Of a head there are at most ``cuts``, and they have at most
            ``parts`` parts.
    """

    starts: Tensor
    blocks: Tensor
    log_weight: Tensor | None
    long: Tensor | None = None
    limit: int = 0
    cuts: int = 0
    parts: int = 0

    def to(self, device: torch.device) -> Lists:
        moved = (x.to(device) if isinstance(x, Tensor) else x for x in self)
        return Lists(*moved)  # type: ignore[arg-type]

    def rows(self) -> Tensor:
        """``(p, h, room)`` int64: of which row an entry is; of none, behind the last."""
        places = torch.arange(self.blocks.shape[2], device=self.blocks.device)
        places = places.expand(self.blocks.shape).contiguous()
        return torch.searchsorted(self.starts.long(), places, right=True) - 1


def from_entries(rows: Tensor, blocks: Tensor, absent: Tensor, count: int) -> Lists:
    """Lists of a square pattern from what stands in any order.

    Args:
        rows, blocks: ``(p, h, room)`` int64.
        absent: ``(p, h, room)`` bool: entries that do not exist.
        count: How many rows, and how many blocks.
    """
    key = torch.where(absent, count * count, rows * count + blocks).sort(-1)[0]
    ends = torch.arange(count + 1, device=key.device) * count
    starts = torch.searchsorted(key, ends.expand(*key.shape[:2], -1).contiguous())
    return Lists(starts.int(), (key % count).int(), None)


def from_mask(mask: Tensor, log_weight: Tensor | None) -> Lists:
    """Lists of ``(h, rows, columns)`` bool; reads it, and what is to be cut."""
    heads, count, _ = mask.shape
    per_row = mask.sum(-1)  # (h, rows)
    starts = torch.cat([per_row.new_zeros(heads, 1), per_row.cumsum(-1)], -1)
    room = int(starts[:, -1].max()) if count else 0
    absent = torch.arange(room, device=mask.device) >= starts[:, -1:]
    blocks = mask.new_zeros(heads, room, dtype=torch.int32)
    head, row, column = mask.nonzero(as_tuple=True)
    blocks[~absent] = column.int()
    weights = None
    if log_weight is not None:
        weights = torch.zeros(heads, room, dtype=torch.float64, device=mask.device)
        weights[~absent] = log_weight[head, row, column].double()
        weights = weights.unsqueeze(0)
    limit = max(_tuning.block_sparse_part(count), 2 * -(-room // max(count, 1)))
    long = per_row > limit
    parts = torch.where(long, (per_row + limit - 1) // limit, 0).sum(-1)
    cuts, most = (int(x.max()) if count else 0 for x in (long.sum(-1), parts))
    starts, blocks, long = (x.unsqueeze(0) for x in (starts.int(), blocks, long))
    return Lists(starts, blocks, weights, long, limit, cuts, most)


def to_mask(lists: Lists, columns: int) -> Tensor:
    """``(p, h, rows, columns)``: log-weights, 0 if there are none, and -inf where is no entry."""
    p, h, count = lists.starts.shape
    rows = lists.rows()
    shape = (p, h, count * columns + 1)
    dense = torch.full(shape, -torch.inf, dtype=torch.float64, device=rows.device)
    place = torch.where(rows < count - 1, rows * columns + lists.blocks, count * columns)
    weights = dense.new_zeros(place.shape)
    dense.scatter_(2, place, weights if lists.log_weight is None else lists.log_weight)
    return dense[..., : (count - 1) * columns].view(p, h, count - 1, columns)


class Items(NamedTuple):
    """Parts of lists, of so many entries at most, that a program takes one each.

    Attributes:
        row: ``(p, h, items)`` int32: of which row; ``rows`` for those that do not exist.
        start: ``(p, h, items)`` int32: its first entry.
        length: ``(p, h, items)`` int32: how many entries, 0 for an empty row.
    """

    row: Tensor
    start: Tensor
    length: Tensor


class Tables(NamedTuple):
    """What a kernel reads of lists; see ``kernels.block_sparse``.

    Attributes:
        blocks: ``(p, h, room)`` int32.
        weight: ``(p, h, room)`` float32, to base 2; or None.
        items: ``(5, p, h, items)`` int32.
        merges: ``(3, p, h, rows that may be cut)`` int32.
        parts: How many parts those may have in a head.
    """

    blocks: Tensor
    weight: Tensor | None
    items: Tensor
    merges: Tensor
    parts: int

    @property
    def cuts(self) -> int:
        """How many rows may be cut; none where each has one part."""
        most: int = self.merges.shape[3]
        return most if self.parts > most else 0

    @property
    def slots(self) -> int:
        """How many slots for sums a head needs."""
        return self.parts if self.cuts else 0


def tables_of(lists: Lists) -> Tables:
    """Of explicit lists: parts of long rows, of ``limit`` entries; every other row is one part."""
    assert lists.long is not None
    starts, rows = lists.starts.long(), lists.starts.shape[2] - 1
    lengths = starts.diff(dim=-1)
    each = torch.where(lists.long, (lengths + lists.limit - 1) // lists.limit, 1).clamp(min=1)
    cut = each > 1  # (p, h, rows)
    first = F.pad(each.cumsum(-1), (1, 0))  # the first item of every row
    slots = torch.where(cut, each, 0).cumsum(-1)
    room = rows + lists.parts
    place = torch.arange(room, device=starts.device).expand(*each.shape[:2], room).contiguous()
    row = torch.searchsorted(first, place, right=True) - 1
    real = row.clamp(max=max(rows - 1, 0))
    part = place - first.gather(-1, real)
    begin = starts.gather(-1, real) + part * lists.limit
    count = starts.gather(-1, real + 1) - begin
    is_cut = cut.gather(-1, real)
    count = torch.where(is_cut, count.clamp(max=lists.limit), count)
    slot = torch.where(is_cut, (slots - each).gather(-1, real) + part, -1)
    there = row < rows
    count, slot = torch.where(there, count, 0), torch.where(there, slot, -1)
    items = torch.stack([row, begin, count, slot, (part == 0).long()]).int()

    rank = torch.where(cut, cut.cumsum(-1) - 1, lists.cuts)
    merges = rank.new_zeros(3, *rank.shape[:2], lists.cuts + 1)
    merges[0] = rows  # behind the last
    about = (torch.arange(rows, device=rank.device).expand(rank.shape), slots - each, each)
    merges.scatter_(-1, rank.expand(3, -1, -1, -1), torch.stack(about))
    weight = None if lists.log_weight is None else (lists.log_weight * LOG2E).float()
    return Tables(lists.blocks, weight, items, merges[..., :-1].int().contiguous(), lists.parts)


def items_of(lists: Lists, most: int) -> Items:
    """Cut lists into parts of ``most`` entries; an empty row is one part."""
    starts = lists.starts.long()
    lengths = starts.diff(dim=-1)
    parts = ((lengths + most - 1) // most).clamp(min=1)  # (p, h, rows)
    rows = parts.shape[2]
    first = torch.cat([torch.zeros_like(parts[..., :1]), parts.cumsum(-1)], -1)
    room = rows + lists.blocks.shape[2] // most
    place = torch.arange(room, device=starts.device).expand(*parts.shape[:2], room).contiguous()
    row = torch.searchsorted(first, place, right=True) - 1
    real = row.clamp(max=max(rows - 1, 0))
    begin = starts.gather(-1, real) + (place - first.gather(-1, real)) * most
    count = (starts.gather(-1, real + 1) - begin).clamp(0, most)
    count = torch.where(row < rows, count, 0)
    return Items(row.int(), begin.int(), count.int())
