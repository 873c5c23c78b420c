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
        chrono: Of an LSTM or GRU the longest stretch of tokens that its gates hold a state over at
            first, from 2 on; 0 leaves torch's initial values, by which half is gone after one.

    Raises:
        ValueError: There is no layer, or no such stretch.
    """

    def __init__(
        self,
        kind: str,
        embedding: int,
        width: int,
        *,
        layers: int = 1,
        dropout: float = 0.0,
        chrono: int = 0,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers must be at least 1, got {layers}")
        if chrono and (kind == "rnn" or chrono < 2):
            raise ValueError(f"chrono must be 0, or at least 2 of an lstm or gru, got {chrono}")
        make = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[kind]
        dropout = dropout if layers > 1 else 0.0
        self.cells = make(embedding, width, layers, batch_first=True, dropout=dropout)
        if chrono:
            self._initialise_gates(kind, chrono)

    @torch.no_grad()
    def _initialise_gates(self, kind: str, longest: int) -> None:
        """Stretches of 2 to ``longest`` tokens (Tallec and Ollivier 2018, arXiv:1804.11188)."""
        width = self.cells.hidden_size
        for layer in range(self.cells.num_layers):
            of_inputs, of_states = (
                getattr(self.cells, f"bias_{x}h_l{layer}").unflatten(0, (-1, width)) for x in "ih"
            )
            keep = torch.empty_like(of_inputs[1]).uniform_(1, longest - 1).log()
            of_inputs[1], of_states[1] = keep, 0.0  # GRU: reset, update, new; LSTM: in, forget, ...
            if kind == "lstm":
                of_inputs[0], of_states[0] = -keep, 0.0

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, embedding)`` to the states ``(b, n, width)``, zero beyond the length."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.cells.weight_ih_l0.dtype)
            states, _ = self.cells(x)
        return padding.clear(states)
