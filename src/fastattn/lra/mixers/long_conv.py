"""Long convolution and gMLP's spatial gating as mixers (Fu et al. 2023; Liu et al. 2021)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.lra.padding import Padding
from fastattn.nn import LongConv, ToeplitzMix


class LongConvMixer(nn.Module):
    """A two-sided long convolution, GELU, and a gated linear layer; O(n log n).

    Args:
        width: Of the tokens.
        taps: How far a token sees, either way.
        squash: As in :class:`fastattn.LongConv`.
    """

    def __init__(self, width: int, taps: int, *, squash: float = 0.0) -> None:
        super().__init__()
        self.reach = (taps - 1, taps)
        self.conv = LongConv(width, taps, bidirectional=True, squash=squash)
        self.out_proj = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to the same."""
        return F.glu(self.out_proj(F.gelu(self.conv(x, padding.mask))), -1)


class GMLPMixer(nn.Module):
    """GELU(x U), one half of it gated by a Toeplitz matrix over the sequence times the other, V.

    Args:
        width: Of the tokens.
        seq_len: The longest sequence.
        hidden: Of each half; None means ``width``.
        independent: As in :class:`fastattn.ToeplitzMix`; 2 on most tasks, 4 on ListOps in the
            source.
    """

    def __init__(
        self, width: int, seq_len: int, *, independent: int = 4, hidden: int | None = None
    ) -> None:
        super().__init__()
        hidden = width if hidden is None else hidden
        self.in_proj = nn.Linear(width, 2 * hidden)
        self.mix = ToeplitzMix(hidden, seq_len, independent=independent)
        self.out_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to the same."""
        gate, x = F.gelu(self.in_proj(x)).chunk(2, -1)
        return self.out_proj(self.mix(x, gate, padding.mask))
