"""What a score means: the accuracy that needs no understanding, and where a model's comes from."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn.lra.data import Split
from fastattn.lra.tasks.listops import VOCABULARY


def listops_floors(split: Split) -> dict[str, float]:
    """Accuracies on this very split of two guesses that never look inside the list.

    Returns:
        ``"majority"``: the best constant label; ``"root_operator"``: the best label for each
        first token. A model that does not beat the second has not learnt to nest.
    """
    counts = _labels_by_root(split)
    return {
        "majority": float(counts.sum(0).max() / len(split)),
        "root_operator": float(counts.max(1).sum() / len(split)),
    }


def accuracy_by_root(split: Split, predictions: ArrayLike) -> dict[str, dict[str, float]]:
    """Accuracy for each root operator, beside the floor that the operator alone gives.

    Args:
        split: ListOps samples.
        predictions: Predicted labels in the order of the split, ``(N,)``.

    Returns:
        For each first token that occurs, such as ``"[MAX"``: samples, accuracy and floor.
    """
    predicted = np.asarray(predictions)
    if predicted.shape != split.labels.shape:
        raise ValueError(
            f"predictions must be (N,) with N = {len(split)} samples, got shape {predicted.shape}"
        )
    roots = split.tokens[split.offsets[:-1]]
    right = predicted == split.labels
    counts = _labels_by_root(split)
    return {
        VOCABULARY.tokens[root]: {
            "samples": int(counts[root].sum()),
            "accuracy": float(right[roots == root].mean()),
            "floor": float(counts[root].max() / counts[root].sum()),
        }
        for root in np.unique(roots)
    }


def _labels_by_root(split: Split) -> NDArray[np.int64]:
    """How often each label goes with each first token, ``(20, 10)``."""
    if len(split) == 0:
        raise ValueError("split must have at least one sample, got none")
    counts = np.zeros((len(VOCABULARY), 10), np.int64)
    np.add.at(counts, (split.tokens[split.offsets[:-1]], split.labels), 1)
    return counts
