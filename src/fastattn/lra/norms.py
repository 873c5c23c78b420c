"""Normalisation inside blocks: of each token alone, or of each channel over a batch."""

from __future__ import annotations

from torch import Tensor, nn


class BatchNorm(nn.Module):
    """Batch normalisation of ``(b, n, width)``: every channel over all tokens of the batch.

    In evaluation, by the running statistics of training (Ioffe and Szegedy 2015, arXiv:1502.03167).
    Padding would count, so that documents must be of one length.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.flatten(0, 1))
        return y.view_as(x)


NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "batch": BatchNorm}
