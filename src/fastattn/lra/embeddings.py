"""Ids as numbers, for grey levels; else they are looked up in torch's table."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EMBEDDINGS = ("table", "numbers")


class AsNumbers(nn.Module):
    """Ids 0 to vocabulary_size - 1 as one number each, from 0 to 1: ``(b, n)`` to ``(b, n, 1)``."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.largest = vocabulary_size - 1

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens / self.largest).unsqueeze(-1)


class Numbers(AsNumbers):
    """The same times a vector, plus a vector: ``(b, n)`` to ``(b, n, width)``, in their dtype."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__(vocabulary_size)
        self.weight = nn.Parameter(torch.randn(width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.addcmul(self.bias, super().forward(tokens).to(self.bias.dtype), self.weight)
