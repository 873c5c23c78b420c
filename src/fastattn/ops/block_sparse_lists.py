"""The non-zero blocks of a pattern as lists, one per row or one per column, on a device.

Nothing here reads a value back: how many entries there are is known on the device only, and lists
have room for the most that there can be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lists(NamedTuple):
    """Entries ``starts[i]`` to ``starts[i + 1]`` are those of row i, ascending.

    Attributes:
        starts: ``(p, h, rows + 1)`` int32; p is 1, or the samples if each has its own pattern, h is
            1, or the heads.
        blocks: ``(p, h, room)`` int32; behind the last entry anything.
        log_weight: ``(p, h, room)`` float64, added to the logits of a block; or None.
    """

    starts: Tensor
    blocks: Tensor
    log_weight: Tensor | None = None

    def to(self, device: torch.device) -> Lists:
        weights = None if self.log_weight is None else self.log_weight.to(device)
        return Lists(self.starts.to(device), self.blocks.to(device), weights)

    def rows(self) -> Tensor:
        """``(p, h, room)`` int64: of which row an entry is; of none, behind the last."""
        places = torch.arange(self.blocks.shape[2], device=self.blocks.device)
        places = places.expand(self.blocks.shape).contiguous()
        return torch.searchsorted(self.starts.long(), places, right=True) - 1

    def transposed(self, columns: int) -> Lists:
        """The same entries by column."""
        count = self.starts.shape[2] - 1
        rows = self.rows()
        return from_entries(
            self.blocks.long(), rows, rows >= count, columns, count, self.log_weight
        )


def from_entries(
    rows: Tensor,
    blocks: Tensor,
    absent: Tensor,
    count: int,
    columns: int,
    log_weight: Tensor | None = None,
) -> Lists:
    """Lists of what stands in any order: ``(p, h, room)`` int64 each, and which do not exist."""
    none = count * columns
    key = torch.where(absent, none, rows * columns + blocks)
    key, order = key.sort(-1)
    ends = torch.arange(count + 1, device=key.device) * columns
    starts = torch.searchsorted(key, ends.expand(*key.shape[:2], -1).contiguous())
    weights = None if log_weight is None else log_weight.gather(-1, order)
    return Lists(starts.int(), (key % max(columns, 1)).int(), weights)


def from_mask(mask: Tensor, log_weight: Tensor | None) -> Lists:
    """Lists of ``(h, rows, columns)`` bool; reads it once."""
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
    return Lists(starts.int().unsqueeze(0), blocks.unsqueeze(0), weights)


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
        first: ``(p, h, rows + 1)`` int32: the first item of every row.
    """

    row: Tensor
    start: Tensor
    length: Tensor
    first: Tensor


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
    return Items(row.int(), begin.int(), count.int(), first.int())
