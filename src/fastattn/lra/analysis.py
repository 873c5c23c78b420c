"""What a score means: the accuracy that needs no understanding, and where a model's comes from."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn.lra.data import Split
from fastattn.lra.recipe import with_defaults
from fastattn.lra.tasks.listops import VOCABULARY

KEEPS_VALUE = ("[MAX", "[MIN", "[MED")  # operators whose value over copies of x is x


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


def chance_losses(split: Split, num_classes: int) -> dict[str, float]:
    """Cross-entropies on this very split, in nats, of guesses that need no input."""
    counts = np.bincount(split.labels, minlength=num_classes)
    return {
        "nothing": float(np.log(num_classes)),
        "how often each label occurs": _conditional_entropy(counts[None]),
    }


def root_loss(split: Split) -> float:
    """The cross-entropy of how often each label goes with a ListOps sample's first token."""
    return _conditional_entropy(_labels_by_root(split))


def _conditional_entropy(counts: NDArray[np.int64]) -> float:
    """Of the column, where the row is known; in nats."""
    sums = np.broadcast_to(counts.sum(1, keepdims=True), counts.shape)
    seen = counts > 0
    return float((counts[seen] * np.log(sums[seen] / counts[seen])).sum() / counts.sum())


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


def at_floor(accuracy: float, floor: float, samples: int) -> bool:
    """Whether an accuracy is not more than two standard errors above a floor."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    return accuracy <= floor + 2 * math.sqrt(floor * (1 - floor) / samples)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; of a single value there is no spread."""
    if not values:
        raise ValueError("values must have at least one number, got none")
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def step_seconds(history: Sequence[Mapping[str, float]], begin: int = 0) -> float | None:
    """Seconds of a training step: the median over the stretches between validations.

    Args:
        history: Entries with "step" and "seconds", both counted from the start of the run.
        begin: Leave out the stretches that start before this step, as another phase.

    Returns:
        None where there is no stretch. The first of a run is left out: it has its compilations.
    """
    ends = [(0.0, 0.0), *((entry["step"], entry["seconds"]) for entry in history)]
    stretches = [
        (later[1] - former[1]) / (later[0] - former[0])
        for former, later in itertools.pairwise(ends)
        if former[0] >= begin and later[0] > former[0]
    ]
    if begin == 0:
        del stretches[:1]
    return statistics.median(stretches) if stretches else None


def configuration(content: Mapping[str, Any], *more: Any) -> str:
    """A text that is equal for results of runs that differ by their seed alone."""
    recipe = {k: x for k, x in with_defaults(content["recipe"]).items() if k != "seed"}
    same = [content.get(key) for key in ("task", "mixer", "positions", "pool")]
    return json.dumps([*same, recipe, *more], sort_keys=True)


def repeated(split: Split, operator: str, copies: int) -> Split:
    """Every list S as ``[OPERATOR S S ... S ]``, which keeps its value: max(x, x) = x.

    Test models with it on lists that are longer by their own content alone.

    Args:
        split: ListOps samples of L tokens.
        operator: "[MAX", "[MIN" or "[MED"; the sum of copies is another value.
        copies: k, at least 1.

    Returns:
        Samples of k·L + 2 tokens with the same labels.

    Raises:
        ValueError: The operator does not keep the value, or k is too small.
    """
    if operator not in KEEPS_VALUE:
        raise ValueError(f"operator must be one of {', '.join(KEEPS_VALUE)}, got {operator!r}")
    if copies < 1:
        raise ValueError(f"copies must be at least 1, got {copies}")
    first, last = VOCABULARY.encode([operator]), VOCABULARY.encode(["]"])
    lists = [np.concatenate([first, *[split.sample(i)] * copies, last]) for i in range(len(split))]
    return Split.of(lists, split.labels.tolist())


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
