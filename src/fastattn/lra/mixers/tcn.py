"""Temporal convolutional network (Bai et al. 2018, arXiv:1803.01271).

Its circular, symmetric form is that of Cheng et al. 2022, "Classification of long sequential data
using circular dilated convolutional neural networks", arXiv:2201.02143.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fastattn.lra.mixers.conv import check_kernel
from fastattn.lra.padding import Padding

KINDS = ("causal", "symmetric", "circular")


class TCN(nn.Module):
    """Blocks of two weight-normed convolutions whose dilation doubles from block to block.

    An output sees 1 + 2·(kernel - 1)·(2**blocks - 1) inputs: the formula that counts one
    convolution a block, 1 + (kernel - 1)·(2**blocks - 1), is half of it (1023 instead of 2045
    for 9 blocks of kernel 3).

    Args:
        embedding: Width of what comes in.
        width: Channels.
        kind: "causal" sees the past, "symmetric" as far either way, with zeros beyond the
            document; "circular" too, but the document is a ring.
        kernel: Taps, an odd number.
        blocks: Their dilations are 1, 2, 4, ...
        project: A 1×1 convolution on every residual path; else only where widths differ.
        dropout: After each convolution.

    Raises:
        ValueError: An unknown kind, or a number does not fit.
    """

    def __init__(
        self,
        embedding: int,
        width: int,
        *,
        kind: str = "causal",
        kernel: int = 3,
        blocks: int = 9,
        project: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        check_kernel(kernel)
        seen = 2 * (kernel - 1) * (2**blocks - 1)
        self.reach = (seen, 0) if kind == "causal" else (seen // 2, seen // 2)
        self.blocks = nn.ModuleList(
            _Block(embedding if i == 0 else width, width, kind, kernel, 2**i, project, dropout)
            for i in range(blocks)
        )

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, embedding)`` to ``(b, n, width)``."""
        x = x.mT
        for block in self.blocks:
            x = block(x, padding)
        return x.mT


class _Block(nn.Module):
    """relu(x + two convolutions), over ``(b, c, n)``."""

    def __init__(
        self,
        inputs: int,
        width: int,
        kind: str,
        kernel: int,
        dilation: int,
        project: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.kind, self.span = kind, (kernel - 1) * dilation
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv1d(i, width, kernel, dilation=dilation)) for i in (inputs, width)
        )
        self.residual = nn.Conv1d(inputs, width, 1) if project or inputs != width else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        y = x
        for conv in self.convs:
            y = self.dropout(conv(self._surrounded(y, padding)).relu())
        return (y + (x if self.residual is None else self.residual(x))).relu()

    def _surrounded(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, c, n)`` to ``(b, c, n + span)``, so that n outputs remain."""
        if self.kind == "causal":
            return F.pad(x, (self.span, 0))
        half = self.span // 2
        if self.kind == "symmetric":
            return F.pad(x.masked_fill(padding.mask.unsqueeze(1), 0), (half, half))
        place = torch.arange(-half, x.shape[2] + half, device=x.device)
        place = place % padding.counts.unsqueeze(1)  # (b, n + span)
        return x.gather(2, place.unsqueeze(1).expand(-1, x.shape[1], -1))
