"""What tasks with plain classes share: the majority floor, and accuracy for each class."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fastattn.lra.data import Indices, Split, Tokens


class Classes:
    """The part of a ``Task`` that follows from the names of its classes."""

    classes: tuple[str, ...]
    parts: int = 1

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def floors(self, split: Split) -> dict[str, float]:
        """Accuracy of the best constant label on this very split."""
        from fastattn.lra.analysis import majority  # analysis knows the tasks

        return {"majority": majority(split)}

    def chance(self, split: Split) -> dict[str, float]:
        """Cross-entropies, in nats, that need no input."""
        from fastattn.lra.analysis import chance_losses

        return chance_losses(split, self.num_classes)

    def breakdown(self, split: Split, predictions: ArrayLike) -> dict[str, Any]:
        """Samples and accuracy of each class, for the result of a test."""
        from fastattn.lra.analysis import accuracy_by_class

        return {"by_class": accuracy_by_class(split, predictions, self.classes)}

    def augment(self, tokens: Tokens, offsets: Indices, rng: np.random.Generator) -> Tokens:
        """The samples as they are."""
        return tokens


def one_class(split: Split, where: str) -> None:
    """Refuse a set that has one class only: part of it was not read, or not written."""
    found = np.unique(split.labels)
    if len(found) == 1:
        raise ValueError(
            f"{where} has {len(split)} samples of class {found[0]} and none of another: it was "
            "cut off, or only part of it was unpacked"
        )


def differing(found: dict[str, Any], public: dict[str, Any]) -> list[str]:
    """A note where the counts of files that claim to be the public data are not the public ones."""
    wrong = [f"{name} has {found[name]}, not {public[name]}" for name in public
             if found[name] != public[name]]  # fmt: skip
    return [f"not the whole public data: {'; '.join(wrong)}"] if wrong else []
