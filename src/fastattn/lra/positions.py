"""Positions: sines and cosines, and rotations (Vaswani et al. 2017; Su et al. 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

POSITIONS = ("rotary", "half-rotary", "sinusoidal", "learned", "none")


def sinusoids(n: int, width: int, device: torch.device) -> Tensor:
    """Positions as sines and cosines, ``(n, width)`` (Vaswani et al. 2017, section 3.5)."""
    position = torch.arange(n, device=device, dtype=torch.float32).unsqueeze(1)
    pairs = torch.arange((width + 1) // 2, device=device, dtype=torch.float32)
    angle = position * torch.exp(pairs * (-2 * math.log(10000.0) / width))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :width]


def rotate(x: Tensor, position: Tensor, *, half: bool = False) -> Tensor:
    """Turn feature pairs (i, i + d/2) of ``(..., n, h, d)`` by position · 10000**(-2i/d).

    Args:
        x: Queries or keys, ``(..., n, h, d)``.
        position: ``(n,)``.
        half: The slower half of the frequencies is zero: those pairs do not turn, and compare
            content wherever it stands.
    """
    pairs = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(pairs, device=x.device, dtype=torch.float32) / pairs)
    if half:
        frequency[(pairs + 1) // 2 :] = 0
    angle = position[:, None, None] * frequency  # (n, 1, d/2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)
