"""Which tokens of a batch are real."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """Which tokens of a batch are real, in the forms that mixers need; made without a sync.

    Args:
        mask: ``(b, n)`` bool, True = padding.
        cu_seqlens: Boundaries of the packed sequences, ``(b + 1,)`` int32.
        lengths: ``(b,)`` int64, on the CPU; the others are where the tokens are.
    """

    mask: Tensor
    cu_seqlens: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Tensor, n: int, device: torch.device) -> Padding:
        """From lengths ``(b,)`` on the CPU, as for ``pack_padded_sequence``."""
        if lengths.device.type != "cpu":
            raise ValueError(f"lengths must be on the CPU, they are on {lengths.device}")
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= n:
            raise ValueError(f"lengths must be from 1 to n = {n}, got {lengths.tolist()}")
        there = lengths.to(device, non_blocking=True)
        mask = torch.arange(n, device=device) >= there[:, None]
        return cls(mask, F.pad(there.cumsum(0), (1, 0)).int(), lengths)

    @cached_property
    def packed(self) -> Tensor:
        """Places of the real tokens in the flattened batch, ``(tokens,)`` int64."""
        rows, n = self.mask.shape
        total, device = int(self.lengths.sum()), self.mask.device
        before = torch.arange(rows, device=device) * n - self.cu_seqlens[:-1]  # of padding
        sizes = self.cu_seqlens.diff()
        before = before.repeat_interleave(sizes, output_size=total)
        return before + torch.arange(total, device=device)

    @property
    def longest(self) -> int:
        """The largest length."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def clear(self, x: Tensor) -> Tensor:
        """``(b, n, width)``, zero where there is no token."""
        return x.masked_fill(self.mask.unsqueeze(-1), 0)
