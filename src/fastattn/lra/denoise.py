"""Denoising: some tokens of a document are hidden or replaced, and the model names the originals.

As a second task beside the classification: Miralles-González et al. 2025, arXiv:2501.14850. Alone,
before the classification, on the task's own inputs: Amos et al. 2023, "Never Train from Scratch",
arXiv:2310.02980.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PREDICTIONS = ("tokens", "grey")


@dataclass(frozen=True, kw_only=True)
class Denoise:
    """How documents are corrupted, and what the loss is.

    Args:
        share: Of a document's tokens that are selected, at least one; never padding.
        random: Of those, replaced by a random token of the same document; the others are hidden
            behind a mask, an id beyond the vocabulary.
        predict: "tokens", the ids, by cross-entropy; or "grey", grey levels from 0 to 1, by the
            absolute error.
        weight: Of the denoising loss, beside the classification's 1.
        alone: Nothing is classified: the run is a beginning for others.

    Raises:
        ValueError: A number or a name does not fit.
    """

    share: float = 0.3
    random: float = 1 / 3
    predict: str = "tokens"
    weight: float = 1.0
    alone: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 0 <= self.random <= 1 or not self.weight > 0:
            raise ValueError(
                f"share must be in (0, 1], random in [0, 1] and weight positive, got {self}"
            )
        if self.predict not in PREDICTIONS:
            raise ValueError(
                f"predict must be one of {', '.join(PREDICTIONS)}, got {self.predict!r}"
            )

    def corrupt(self, tokens: Tensor, lengths: Tensor, mask: int) -> tuple[Tensor, Tensor]:
        """Draw, from torch's random state, what is selected, and replace it.

        Args:
            tokens: ``(b, n)`` ids.
            lengths: ``(b,)``, on any device.
            mask: The id that hides a token.

        Returns:
            The corrupted ids and which are selected, both ``(b, n)``.
        """
        b, n = tokens.shape
        lengths = lengths.to(tokens.device)[:, None]
        padded = torch.arange(n, device=tokens.device) >= lengths
        drawn = torch.rand(b, n, device=tokens.device).masked_fill(padded, 2.0)
        place = drawn.argsort(1).argsort(1)  # padding stands last
        count = (self.share * lengths).round().clamp(min=1)
        selected = place < count
        of_the_document = (torch.rand(b, n, device=tokens.device) * lengths).long()
        other = tokens.gather(1, of_the_document.clamp(max=n - 1))
        replaced = place < (self.random * count).round()
        return torch.where(selected, torch.where(replaced, other, mask), tokens), selected

    def losses(self, predicted: Tensor, tokens: Tensor, selected: Tensor, size: int) -> Tensor:
        """The mean loss of each document over its selected tokens, ``(b,)`` float32.

        Args:
            predicted: Logits ``(m, size)``, or grey levels ``(m, 1)``, of the m selected tokens in
                their order.
            tokens: The original ids, ``(b, n)``.
            selected: ``(b, n)``.
            size: Of the vocabulary.
        """
        wanted, predicted = tokens[selected], predicted.float()
        if self.predict == "grey":
            each = (predicted[:, 0] - wanted / (size - 1)).abs()
        else:
            each = F.cross_entropy(predicted, wanted, reduction="none")
        documents = selected.nonzero()[:, 0]
        sums = each.new_zeros(len(tokens)).index_add(0, documents, each)
        return sums / selected.sum(1)


# Beside the classification as in the first source; alone, with a half of the pixels hidden, as in
# the second. Its numbers for text are not known: ours are the first's, all of them hidden.
DENOISE = {
    "multitask": Denoise(),
    "tokens": Denoise(random=0.0, alone=True),
    "grey": Denoise(share=0.5, random=0.0, predict="grey", alone=True),
}
