"""From tokens to logits: one vector a document, and the head.

Structured self-attention: Lin et al. 2017, "A Structured Self-attentive Sentence Embedding".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.lra.padding import Padding

POOLS: dict[str, tuple[str, ...]] = {
    "mean": (),
    "cls": (),
    "last": (),
    "attention": ("hops", "hidden"),
}


class Mean(nn.Module):
    """The mean over the real tokens."""

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to ``(b, width)``."""
        return padding.clear(x).sum(1) / padding.counts.unsqueeze(-1)


class First(nn.Module):
    """The first token: a learned vector that the encoder has put in front."""

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to ``(b, width)``."""
        return x[:, 0]


class Last(nn.Module):
    """The last real token, as for a recurrent network."""

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to ``(b, width)``."""
        last = padding.counts - 1
        return x[torch.arange(len(x), device=x.device), last]


class StructuredAttention(nn.Module):
    """A·x, with A = softmax over the real tokens of W2·tanh(W1·xᵀ).

    ``penalty`` holds ‖A·Aᵀ - I‖² (Frobenius, squared), the mean over the last batch: added to the
    loss, it makes the hops look at different tokens.

    Args:
        width: Of the tokens.
        hops: Rows of A.
        hidden: Rows of W1.
    """

    def __init__(self, width: int, *, hops: int = 4, hidden: int = 256) -> None:
        super().__init__()
        self.hops = hops
        self.first = nn.Linear(width, hidden, bias=False)
        self.second = nn.Linear(hidden, hops, bias=False)
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to ``(b, hops·width)``."""
        x = padding.clear(x)  # 0 · NaN is NaN
        scores = self.second(self.first(x).tanh()).float()  # (b, n, hops)
        weights = scores.masked_fill(padding.mask.unsqueeze(-1), float("-inf")).softmax(1).mT
        # not a matrix product, which autocast would round to 16 bits
        overlap = (weights.unsqueeze(2) * weights.unsqueeze(1)).sum(-1)  # (b, hops, hops)
        overlap = overlap - torch.eye(weights.shape[1], device=x.device)
        self.penalty = overlap.square().sum((1, 2)).mean()
        return (weights.to(x.dtype) @ x).flatten(1)


def make_pool(name: str, options: dict[str, Any], width: int) -> nn.Module:
    """The module of a name in ``POOLS``."""
    if name == "attention":
        return StructuredAttention(width, **options)
    return {"mean": Mean, "cls": First, "last": Last}[name]()


class Head(nn.Sequential):
    """Linear, ReLU, linear, on one vector a sample, or on the vectors of its two documents.

    Two are seen as [a, b, a·b, a - b]. Exchanging the documents exchanges the first two parts,
    keeps the third and turns the sign of the fourth: a head whose weights are equal on a and b and
    zero on a - b is symmetric, and ours may learn to be, but is not made so, for documents may have
    an order.

    Args:
        width: Of a document's vector.
        hidden: Of the layer between.
        num_classes: Number of logits.
        parts: Documents a sample, 1 or 2; they are neighbours in the batch.
    """

    def __init__(self, width: int, hidden: int, num_classes: int, parts: int) -> None:
        seen = 4 * width if parts == 2 else width
        super().__init__(nn.Linear(seen, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """``(b·parts, width)`` to ``(b, classes)``."""
        if self.parts == 2:
            a, b = x.unflatten(0, (-1, 2)).unbind(1)
            x = torch.cat((a, b, a * b, a - b), -1)
        return super().forward(x)
