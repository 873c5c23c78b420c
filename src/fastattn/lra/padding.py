"""Which tokens of a batch are real."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """Which tokens of a batch are real, in the forms that mixers need; made without a sync.

    Args:
        mask: ``(b, n)`` bool, True = padding.
        counts: Real tokens of each row, ``(b,)`` int64.
        stretches: Boundaries in the flattened batch of each row's tokens and of its padding, in
            turns, ``(2 b + 1,)`` int32; a stretch may be empty.
        lengths: The counts, on the CPU; the others are where the tokens are.
    """

    mask: Tensor
    counts: Tensor
    stretches: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Tensor, n: int, device: torch.device) -> Padding:
        """From lengths ``(b,)`` on the CPU, as for ``pack_padded_sequence``."""
        if lengths.device.type != "cpu":
            raise ValueError(f"lengths must be on the CPU, they are on {lengths.device}")
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= n:
            raise ValueError(f"lengths must be from 1 to n = {n}, got {lengths.tolist()}")
        counts = lengths.to(device, non_blocking=True)
        mask = torch.arange(n, device=device) >= counts[:, None]
        starts = torch.arange(len(lengths), device=device) * n
        ends = torch.stack((starts, starts + counts), 1).flatten()
        stretches = F.pad(ends, (0, 1), value=len(lengths) * n).int()
        return cls(mask, counts, stretches, lengths)

    def clear(self, x: Tensor) -> Tensor:
        """``(b, n, width)``, zero where there is no token."""
        return x.masked_fill(self.mask.unsqueeze(-1), 0)
