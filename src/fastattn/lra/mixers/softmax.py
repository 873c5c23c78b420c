"""Exact softmax attention, the yardstick, with rotary positions (Su et al. 2021)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.lra.padding import Padding
from fastattn.lra.positions import rotate


class SoftmaxAttention(nn.Module):
    """Multi-head ``scaled_dot_product_attention``; O(n²) time, O(n) memory.

    On a GPU in 16 bits tokens attend to the tokens of their row and padding to the padding, so that
    nothing is masked and padding costs little; elsewhere it is masked.

    Args:
        width: Of the tokens.
        heads: h; the head width d = width / h must be even with rotary positions.
        rotary: Rotate queries and keys by their position (base 10000).
        half: As in :func:`fastattn.lra.positions.rotate`.
    """

    def __init__(self, width: int, heads: int, *, rotary: bool, half: bool = False) -> None:
        super().__init__()
        if rotary and (width // heads) % 2:
            raise ValueError(f"rotary positions need an even head width, got {width // heads}")
        self.heads = heads
        self.rotary, self.half_turns = rotary, half
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to the same."""
        position = torch.arange(x.shape[1], device=x.device)
        q, k, v = self._heads(x, position)  # (b, n, h, d)
        if not x.is_cuda or not torch.is_autocast_enabled("cuda"):
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            seen = ~padding.mask[:, None, None, :]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            return self.out_proj(out.transpose(1, 2).flatten(2))

        from torch.nn.attention.varlen import varlen_attn

        ends, longest = padding.stretches, x.shape[1]
        queries, keys, values = (y.flatten(0, 1) for y in (q, k, v))
        heads = varlen_attn(queries, keys, values, ends, ends, longest, longest)
        assert isinstance(heads, Tensor)
        return self.out_proj(heads.view_as(q).flatten(2))

    def _heads(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(..., n, width)`` to q, k and v ``(..., n, h, d)``."""
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if self.rotary:
            q, k = (rotate(y, position, half=self.half_turns) for y in (q, k))
        return q, k, v
