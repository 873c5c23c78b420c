"""Recurrent networks: a tanh RNN, LSTM and GRU, by torch (cuDNN on a GPU)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.lra.padding import Padding


class RecurrentBody(nn.Module):
    """Read a document from its first token to its last; O(n), one step after another.

    The state begins at zero for every document. What stands behind one is read, since a packed
    sequence costs a CPU quadratic time, and left out. Computed in float32 under autocast too:
    rounding would add up over thousands of steps, whose time is not that of the arithmetic.

    Args:
        kind: "rnn", "lstm" or "gru".
        embedding: Width of what comes in.
        width: Of the state.
        layers: One on top of another.
        dropout: Between layers.

    Raises:
        ValueError: There is no layer.
    """

    def __init__(
        self, kind: str, embedding: int, width: int, *, layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers must be at least 1, got {layers}")
        make = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[kind]
        dropout = dropout if layers > 1 else 0.0
        self.cells = make(embedding, width, layers, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, embedding)`` to the states ``(b, n, width)``, zero beyond the length."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.cells.weight_ih_l0.dtype)
            states, _ = self.cells(x)
        return padding.clear(states)
