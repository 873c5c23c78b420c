"""How Linformer's slots are sums over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops.linformer import compress, compress_both


class Sum(NamedTuple):
    """``rows * (matrix @ x)``, over tokens x that are zero where they are ignored.

    Attributes:
        matrix: ``([h,] slots, s)``, or behind b if each sample has its own.
        rows: ``(b or 1, slots)``, or None for ones.
        of_samples: Whether each sample has its own matrix.
    """

    matrix: Tensor
    rows: Tensor | None
    of_samples: bool = False

    def of(self, x: Tensor, backend: str | None) -> Tensor:
        """``(b, s, width)`` to ``(b, slots, width)``."""
        return self.of_heads(x.unsqueeze(1), backend).squeeze(1)

    def of_heads(self, x: Tensor, backend: str | None) -> Tensor:
        """``(b, h, s, width)`` to ``(b, h, slots, width)``."""
        if not self.of_samples:
            return self.scale(compress(x, self.matrix, None, x.shape[1], backend))
        matrix = self.matrix if self.matrix.dim() == 4 else self.matrix.unsqueeze(1)
        return self.scale(matrix @ x)

    def scale(self, x: Tensor) -> Tensor:
        """``rows`` times what ``matrix`` made: ``(b, [h,] slots, width)``."""
        if self.rows is None:
            return x
        return self.rows.view(-1, *(1,) * (x.dim() - 3), self.rows.shape[1], 1) * x

    def mass(self, ignored: Tensor | None) -> Tensor:
        """``(b or 1, slots)``: the sum of ones, where no head has a matrix of its own."""
        if ignored is None:
            mass = self.matrix.sum(-1)
        else:
            mass = (self.matrix @ (~ignored).to(self.matrix.dtype).unsqueeze(-1)).squeeze(-1)
        return mass if self.rows is None else self.rows * mass


def of_both(
    k: Tensor, v: Tensor, of_key: Sum, of_value: Sum, backend: str | None
) -> tuple[Tensor, Tensor]:
    """``of`` of keys and of values."""
    key = k.unsqueeze(1)
    value = key if v is k else v.unsqueeze(1)
    keys, values = of_both_heads(key, value, of_key, of_value, backend)
    return keys.squeeze(1), values.squeeze(1)


def of_both_heads(
    k: Tensor, v: Tensor, of_key: Sum, of_value: Sum, backend: str | None
) -> tuple[Tensor, Tensor]:
    """``of_heads`` of keys and of values."""
    if of_key.of_samples or of_value.of_samples:
        return of_key.of_heads(k, backend), of_value.of_heads(v, backend)
    matrices = of_key.matrix, of_value.matrix
    keys, values = compress_both(k, v, *matrices, None, k.shape[1], backend)
    return of_key.scale(keys), of_value.scale(values)


def counts(slots: int, window: int, s: int, ignored: Tensor | None, device: torch.device) -> Tensor:
    """``(b or 1, slots)``: how many of s tokens are valid in every window."""
    valid = torch.ones(1, s, device=device) if ignored is None else (~ignored).float()
    return F.pad(valid, (0, slots * window - s)).unflatten(1, (slots, window)).sum(-1)


def of_windows(valid: Tensor, window: int, s: int, taps: Tensor | None, dtype: torch.dtype) -> Sum:
    """Means of valid tokens, or with ``taps`` ``([h,] window)`` sums times window over valid.

    Args:
        valid: How many tokens are, of every window, ``(b or 1, slots)``.
    """
    place = torch.arange(s, device=valid.device)
    first = torch.arange(valid.shape[1], device=valid.device)[:, None] * window
    inside = (place >= first) & (place < first + window)
    rows = window / valid.clamp(min=1).to(dtype)
    if taps is None:
        return Sum(inside.to(dtype) / window, rows)
    return Sum(torch.where(inside, taps[..., place % window].unsqueeze(-2), 0), rows)


def of_softmax(weight: Tensor, x: Tensor, ignored: Tensor | None) -> Sum:
    """A softmax over tokens of x W: x ``(b, s, width)``, weight ``([h,] slots, width)``."""
    logits = weight @ (x.mT if weight.dim() == 2 else x.mT.unsqueeze(1))
    if ignored is None:
        return Sum(logits.softmax(-1), None, True)
    hidden = ignored[:, None] if weight.dim() == 2 else ignored[:, None, None]
    logits = logits.masked_fill(hidden & ~hidden.all(-1, keepdim=True), -torch.inf)
    return Sum(logits.softmax(-1).masked_fill(hidden, 0), None, True)


def resampled(matrix: Tensor, s: int, ignored: Tensor | None) -> Tensor:
    """``([b,] ..., s)`` of ``(..., L)``: linear in between, for each sample's length, and scaled so
    that what is constant sums up to the same."""
    length, device = matrix.shape[-1], matrix.device
    place = torch.arange(s, device=device)
    ends = torch.full((1,), s, device=device)
    if ignored is not None:
        ends = torch.where(ignored, 0, place + 1).amax(-1) if s else ends[:0]
    wide = torch.promote_types(matrix.dtype, torch.float32)
    ratio = (length / ends.clamp(min=1).to(wide)).unsqueeze(-1)  # (b or 1, 1)
    at = ((place + 0.5) * ratio - 0.5).clamp(0, length - 1)  # (b or 1, s)
    low = at.long()
    high = (low + 1).clamp(max=length - 1)
    share = at - low
    found = ratio * (matrix[..., low] * (1 - share) + matrix[..., high] * share)  # (..., b or 1, s)
    found = found.to(matrix.dtype)
    return found.squeeze(-2) if ignored is None else found.movedim(-2, 0)
