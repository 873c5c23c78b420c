"""What a score means: the accuracy that needs no understanding, and where a model's comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn.lra.data import Split
from fastattn.lra.tasks.listops import VOCABULARY


def majority(split: Split) -> float:
    """The accuracy of the best constant label on this very split."""
    if len(split) == 0:
        raise ValueError("split must have at least one sample, got none")
    return float(np.bincount(split.labels).max() / len(split))


def accuracy_by_class(
    split: Split, predictions: ArrayLike, classes: Sequence[str]
) -> dict[str, dict[str, float]]:
    """How many samples of each class there are, and the share of them that is predicted right.

    Args:
        split: Samples whose labels number the classes.
        predictions: Predicted labels in the order of the split, ``(N,)``.
        classes: Their names; one without samples is left out.
    """
    right = _predicted(split, predictions) == split.labels
    return {
        name: {"samples": int(ours.sum()), "accuracy": float(right[ours].mean())}
        for name, ours in ((name, split.labels == i) for i, name in enumerate(classes))
        if ours.any()
    }


def shared(one: Split, other: Split) -> int:
    """How many samples of ``other`` have the content of a sample of ``one``, whatever its label."""

    def digests(split: Split) -> list[bytes]:
        samples = (split.sample(i) for i in range(len(split)))
        return [hashlib.blake2b(sample.data, digest_size=16).digest() for sample in samples]

    known = set(digests(one))
    return sum(digest in known for digest in digests(other))


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
    roots = split.tokens[split.offsets[:-1]]
    right = _predicted(split, predictions) == split.labels
    counts = _labels_by_root(split)
    return {
        VOCABULARY.tokens[root]: {
            "samples": int(counts[root].sum()),
            "accuracy": float(right[roots == root].mean()),
            "floor": float(counts[root].max() / counts[root].sum()),
        }
        for root in np.unique(roots)
    }


def _predicted(split: Split, predictions: ArrayLike) -> NDArray[np.int64]:
    predicted = np.asarray(predictions)
    if predicted.shape != split.labels.shape:
        raise ValueError(
            f"predictions must be (N,) with N = {len(split)} samples, got shape {predicted.shape}"
        )
    return predicted


def _labels_by_root(split: Split) -> NDArray[np.int64]:
    """How often each label goes with each first token, ``(20, 10)``."""
    if len(split) == 0:
        raise ValueError("split must have at least one sample, got none")
    counts = np.zeros((len(VOCABULARY), 10), np.int64)
    np.add.at(counts, (split.tokens[split.offsets[:-1]], split.labels), 1)
    return counts
