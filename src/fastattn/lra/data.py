"""What every task shares: a vocabulary, ragged splits, length buckets, and the batch of a step.

Samples are kept ragged, one byte a token, and padded only inside a batch. A mask is made from the
true lengths, never from the pad id: a pixel may well be 0.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

Tokens: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
Augment: TypeAlias = Callable[[Tokens, Indices, np.random.Generator], Tokens]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a task, in the order of their ids; id 0 is the pad.

    A vocabulary is written down, never collected from data, so an id means the same in every run.
    """

    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.tokens) <= 256:
            raise ValueError(f"tokens must be 1 to 256 strings (ids are bytes), got {len(self)}")
        if len(set(self.tokens)) != len(self.tokens):
            raise ValueError("tokens must be distinct: an id must have one meaning")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def hash(self) -> str:
        """16 hex digits that a checkpoint stores: equal hashes, equal meaning of the ids."""
        return hashlib.sha256("\n".join(self.tokens).encode()).hexdigest()[:16]

    def encode(self, words: Iterable[str]) -> Tokens:
        """Ids of ``words``, ``(n,)`` uint8. An unknown word raises: none is mapped in silence."""
        try:
            return np.array([self.ids[word] for word in words], np.uint8)
        except KeyError as unknown:
            raise ValueError(
                f"unknown token {unknown}: the vocabulary has {' '.join(self.tokens[:40])}"
            ) from None


# UTF-8 as it is, so no text is unknown; and grey levels. An id is the byte itself.
BYTES = Vocabulary(("<pad>", *(f"byte {i}" for i in range(1, 256))))
GREYS = Vocabulary(tuple(f"grey {i}" for i in range(256)))


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a task, ragged: document j is ``tokens[offsets[j]:offsets[j + 1]]``.

    Args:
        tokens: Every document, one after another, ``(total,)`` uint8; may be memory-mapped.
        offsets: Where each begins, and at last the total, ``(N * parts + 1,)`` int64.
        labels: ``(N,)`` int64.
        parts: Documents a sample: sample i is documents ``i * parts ... i * parts + parts - 1``.
    """

    tokens: Tokens
    offsets: Indices
    labels: Indices
    parts: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be at least 1, got {self.parts}")
        if len(self.offsets) != len(self.labels) * self.parts + 1:
            wanted = "(N + 1,)" if self.parts == 1 else f"({self.parts} N + 1,)"
            raise ValueError(
                f"offsets must be {wanted} for N = {len(self.labels)} labels, "
                f"got shape {self.offsets.shape}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            raise ValueError(
                f"offsets must run from 0 to the {len(self.tokens)} tokens, "
                f"got {self.offsets[0]} to {self.offsets[-1]}"
            )

    @classmethod
    def of(cls, documents: Sequence[Tokens], labels: Sequence[int], parts: int = 1) -> Split:
        """The split of these documents, each ``(n,)`` uint8, ``parts`` to a sample."""
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(document) for document in documents], out=offsets[1:])
        tokens = np.concatenate([np.zeros(0, np.uint8), *documents])
        return cls(tokens, offsets, np.asarray(labels, np.int64), parts)

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Memory-mapped tokens travel to another process as their place in the file."""
        tokens, rest = self.tokens, (self.offsets, self.labels, self.parts)
        if not isinstance(tokens, np.memmap) or len(tokens) == 0:
            return Split, (np.asarray(tokens), *rest)
        whole = tokens
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        start = whole.offset + tokens.ctypes.data - whole.ctypes.data
        return _mapped, (str(tokens.filename), start, len(tokens), *rest)

    @property
    def document_lengths(self) -> Indices:
        """Tokens of each document, ``(N * parts,)``."""
        return np.diff(self.offsets)

    @property
    def lengths(self) -> Indices:
        """Tokens of each sample's longest document, ``(N,)``."""
        if self.parts == 1:
            return self.document_lengths
        return self.document_lengths.reshape(-1, self.parts).max(1)

    def sample(self, i: int) -> Tokens:
        """The tokens of sample i, its documents one after another, ``(n,)``, as a view."""
        i = range(len(self))[i] * self.parts
        return self.tokens[self.offsets[i] : self.offsets[i + self.parts]]

    def document(self, j: int) -> Tokens:
        """The tokens of document j, ``(n,)``, as a view."""
        j = range(len(self.offsets) - 1)[j]
        return self.tokens[self.offsets[j] : self.offsets[j + 1]]

    def slice(self, start: int, stop: int) -> Split:
        """Samples ``start`` to ``stop - 1``, as a view."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        offsets = self.offsets[start * self.parts : stop * self.parts + 1]
        tokens = self.tokens[offsets[0] : offsets[-1]]
        return Split(tokens, offsets - offsets[0], self.labels[start:stop], self.parts)

    def take(self, n: int) -> Split:
        """The first n samples, or all where there are fewer."""
        return self.slice(0, n)

    def fingerprint(self) -> str:
        """16 hex digits that name this content: lengths, tokens and labels, in this order."""
        digest = hashlib.sha256(self.document_lengths.astype("<i8").tobytes())
        digest.update(np.ascontiguousarray(self.tokens).data)
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def _mapped(path: str, start: int, size: int, *rest: Any) -> Split:
    return Split(np.memmap(path, np.uint8, "r", offset=start, shape=(size,)), *rest)


def gather(split: Split, index: Indices) -> tuple[Tokens, Indices]:
    """The documents of some samples, ``(total,)``, and their offsets, with no loop over tokens."""
    index = (np.asarray(index)[:, None] * split.parts + np.arange(split.parts)).ravel()
    starts = split.offsets[index]
    lengths = split.offsets[index + 1] - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    at = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return split.tokens[at], offsets


class Data(dict[str, Split]):
    """The splits ``"train"``, ``"val"`` and ``"test"`` of a task.

    ``record`` is what else is known of them, in JSON: their protocol, where they lie, whether they
    were generated or stand in for the public data, and ``"notes"``, sentences for the user.
    """

    def __init__(self, splits: Mapping[str, Split], record: Mapping[str, Any]) -> None:
        super().__init__(splits)
        self.record = dict(record)


@runtime_checkable
class Task(Protocol):
    """What the trainer and the command need to know of a task."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def parts(self) -> int:
        """Documents a sample: 2 where two texts are compared, else 1."""

    @property
    def generate(self) -> Callable[..., None]:
        """``generate(out, *, seed, num_train, num_val, num_test)``, and what a task adds.

        Writes the public file layout under ``out``, from the seed alone.
        """

    def find(self, data_dir: str | os.PathLike[str]) -> Path:
        """The directory with the public files, at or under ``data_dir``; a ValueError if none."""

    def load(self, data_dir: str | os.PathLike[str], protocol: str | None = None) -> Data:
        """Read the public files, cut and split as a protocol of ``fastattn.lra.protocols`` says."""

    def floors(self, split: Split) -> dict[str, float]:
        """Accuracies on this very split that need no understanding of the task."""

    def chance(self, split: Split) -> dict[str, float]:
        """Cross-entropies on this very split, in nats, of guesses from what the name says."""

    def breakdown(self, split: Split, predictions: Indices) -> dict[str, Any]:
        """What a test's result says beside the accuracy; JSON."""

    def augment(self, tokens: Tokens, offsets: Indices, rng: np.random.Generator) -> Tokens:
        """Samples that differ and keep their lengths and labels."""


class Batch(NamedTuple):
    """Samples side by side, a row a document; row j's first ``lengths[j]`` tokens belong to it.

    The documents of a sample are neighbours: rows ``i * parts ... i * parts + parts - 1``.
    """

    tokens: Tensor  # (b * parts, n) int64, 0 beyond the length
    lengths: Tensor  # (b * parts,) int64
    labels: Tensor  # (b,) int64


def collate(
    split: Split,
    index: Indices,
    *,
    augment: Augment | None = None,
    rng: np.random.Generator | None = None,
) -> Batch:
    """Gather samples into one padded batch, in O(b·n) with no loop over tokens.

    Args:
        split: Where the samples are.
        index: Which samples, ``(b,)``.
        augment: Applied to the gathered tokens before they are padded.
        rng: The randomness of ``augment``; needed with it.
    """
    tokens, offsets = gather(split, index)
    lengths = np.diff(offsets)
    if augment is not None:
        if rng is None:
            raise ValueError("rng must be given with augment, got None: pass a numpy Generator")
        tokens = augment(tokens, offsets, rng)
    padded = np.zeros((len(lengths), lengths.max(initial=0)), np.int64)  # (b * parts, n)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = tokens
    return Batch(*(torch.from_numpy(x) for x in (padded, lengths, split.labels[index])))


def length_buckets(
    lengths: Indices, batch_size: int, rng: np.random.Generator, *, window: int = 64
) -> list[Indices]:
    """Deal samples into batches of like length, every sample exactly once, in O(N log N).

    The samples are shuffled, cut into windows of ``window`` batches, sorted by length inside each
    window and cut into batches, and the batches are shuffled. On ListOps (501 to 1999 tokens, 32 a
    batch) the padding is 1 % of all tokens, against 45 % for plain shuffled batches. The last
    batch may be smaller; it is kept.

    Args:
        lengths: ``(N,)``.
        batch_size: b.
        rng: Decides the windows and the order of the batches.
        window: Batches sorted together. More pad less, and mix the samples less.

    Returns:
        ceil(N / b) arrays of indices.
    """
    order = rng.permutation(len(lengths))
    for start in range(0, len(order), window * batch_size):
        part = order[start : start + window * batch_size]
        part[:] = part[np.argsort(lengths[part], kind="stable")]
    batches = _cut(order, batch_size)
    return [batches[i] for i in rng.permutation(len(batches))]


def evaluation_batches(split: Split, batch_size: int) -> list[Indices]:
    """Every sample exactly once, the shortest first: the least padding a batch size allows."""
    return _cut(np.argsort(split.lengths, kind="stable"), batch_size)


def _cut(order: Indices, batch_size: int) -> list[Indices]:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class BatchStream(Dataset[Batch]):
    """A map from the global training step to its batch.

    The batch of a step is a function of (split, batch_size, seed, step) and of nothing else, so
    it is the same for any number of loader workers, and a run resumed at a step goes on exactly:
    ``DataLoader(stream, batch_size=None, sampler=range(start, stop))``.

    Args:
        split: The samples; each is seen once an epoch.
        batch_size: b; the last batch of an epoch, dealt at a random place, may be smaller.
        seed: Decides the order (with the epoch) and the augmentation (with the step).
        augment: As in ``collate``.
    """

    def __init__(
        self, split: Split, batch_size: int, *, seed: int, augment: Augment | None = None
    ) -> None:
        if len(split) == 0:
            raise ValueError("split must have at least one sample, got none")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.augment = augment
        self.steps_per_epoch = -(-len(split) // batch_size)
        self._epoch: tuple[int, list[Indices]] | None = None

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step must be at least 0, got {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        index = self._order(epoch)[place]
        rng = np.random.default_rng([self.seed, 1, step])
        return collate(self.split, index, augment=self.augment, rng=rng)

    def _order(self, epoch: int) -> list[Indices]:
        if self._epoch is None or self._epoch[0] != epoch:
            rng = np.random.default_rng([self.seed, 0, epoch])
            self._epoch = epoch, length_buckets(self.split.lengths, self.batch_size, rng)
        return self._epoch[1]
