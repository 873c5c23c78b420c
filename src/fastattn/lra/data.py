"""What every task shares: a vocabulary, ragged splits, length buckets, and the batch of a step.

Samples are kept ragged, one byte a token, and padded only inside a batch. A mask is made from the
true lengths, never from the pad id: a pixel may well be 0.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

Tokens: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
T = TypeVar("T")
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


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a task, ragged: sample i is ``tokens[offsets[i]:offsets[i + 1]]``.

    Args:
        tokens: Every sample, one after another, ``(total,)`` uint8.
        offsets: Where each begins, and at last the total, ``(N + 1,)`` int64.
        labels: ``(N,)`` int64.
    """

    tokens: Tokens
    offsets: Indices
    labels: Indices

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.labels) + 1:
            raise ValueError(
                f"offsets must be (N + 1,) for N = {len(self.labels)} labels, "
                f"got shape {self.offsets.shape}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            raise ValueError(
                f"offsets must run from 0 to the {len(self.tokens)} tokens, "
                f"got {self.offsets[0]} to {self.offsets[-1]}"
            )

    @classmethod
    def of(cls, samples: Sequence[Tokens], labels: Sequence[int]) -> Split:
        """The split of these samples, each ``(n,)`` uint8."""
        offsets = np.zeros(len(samples) + 1, np.int64)
        np.cumsum([len(sample) for sample in samples], out=offsets[1:])
        tokens = np.concatenate([np.zeros(0, np.uint8), *samples])
        return cls(tokens, offsets, np.asarray(labels, np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Indices:
        return np.diff(self.offsets)

    def sample(self, i: int) -> Tokens:
        """The tokens of sample i, ``(n,)``, as a view."""
        i = range(len(self))[i]
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def slice(self, start: int, stop: int) -> Split:
        """Samples ``start`` to ``stop - 1``, as a view."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        first, last = self.offsets[start], self.offsets[stop]
        offsets = self.offsets[start : stop + 1] - first
        return Split(self.tokens[first:last], offsets, self.labels[start:stop])

    def take(self, n: int) -> Split:
        """The first n samples, or all where there are fewer."""
        return self.slice(0, n)

    def fingerprint(self) -> str:
        """16 hex digits that name this content: lengths, tokens and labels, in this order."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        digest.update(self.tokens.tobytes())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


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
    def generate(self) -> Callable[..., None]:
        """``generate(out, *, seed, num_train, num_val, num_test, workers)``, and what a task adds.

        Writes the public file layout under ``out``, from the seed alone.
        """

    def load(self, data_dir: str | os.PathLike[str]) -> dict[str, Split]:
        """Read the public files: splits ``"train"``, ``"val"`` and ``"test"``."""

    def floors(self, split: Split) -> dict[str, float]:
        """Accuracies on this very split that need no understanding of the task."""

    def breakdown(self, split: Split, predictions: Indices) -> dict[str, Any]:
        """What a test's result says beside the accuracy; JSON."""

    def augment(self, tokens: Tokens, offsets: Indices, rng: np.random.Generator) -> Tokens:
        """Samples that differ and keep their lengths and labels."""


class Batch(NamedTuple):
    """Samples side by side; only the first ``lengths[i]`` tokens of row i belong to it."""

    tokens: Tensor  # (b, n) int64, 0 beyond the length
    lengths: Tensor  # (b,) int64
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
    starts = split.offsets[index]
    lengths = split.offsets[np.asarray(index) + 1] - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    at = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    tokens = split.tokens[at]
    if augment is not None:
        if rng is None:
            raise ValueError("rng must be given with augment, got None: pass a numpy Generator")
        tokens = augment(tokens, offsets, rng)
    padded = np.zeros((len(lengths), lengths.max(initial=0)), np.int64)  # (b, n)
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


def locate(data_dir: str | os.PathLike[str], folder: str, names: Sequence[str]) -> Path:
    """The directory that holds all of ``names``: ``data_dir``, or ``folder`` at a public depth."""
    root = Path(data_dir)
    nested = [root / folder, root / "lra_release" / folder]
    places = [root, *nested, root / "lra_release" / "lra_release" / folder]
    present = {place: [name for name in names if (place / name).is_file()] for place in places}
    best = max(places, key=lambda place: len(present[place]))
    if len(present[best]) == len(names):
        return best
    if present[best]:
        missing = ", ".join(name for name in names if name not in present[best])
        raise ValueError(f"{best} has {', '.join(present[best])} but lacks {missing}")
    raise ValueError(
        f"data_dir must hold {', '.join(names)}; none is in any of "
        f"{', '.join(map(str, places))}: generate them, or name the directory that has them"
    )


def check_generated(folder: Path, splits: Mapping[str, Split]) -> None:
    """Compare what was read with ``generated.json``, where the data has one."""
    path = folder / "generated.json"
    if not path.is_file():
        return
    try:
        record = json.loads(path.read_text())
        samples, fingerprints = record["samples"], record["fingerprints"]
        for name, split in splits.items():
            if len(split) != samples[name]:
                raise ValueError(f"{name} had {samples[name]} samples, and has {len(split)}")
            if split.fingerprint() != fingerprints[name]:
                raise ValueError(f"the content of {name} is no longer what was generated")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not fit the files beside it: {error}. They were truncated or edited: "
            "generate them again, or remove generated.json if that was meant"
        ) from None


def read_table(
    path: Path, header: Sequence[str], parse: Callable[[list[str]], tuple[Tokens, int]]
) -> Split:
    """Read a tab-separated file whose rows are samples; any damage raises with file and line.

    Args:
        path: The file, in UTF-8, its lines ended by LF or CRLF.
        header: The names of the columns, which the first line must give.
        parse: From the columns of a row to its tokens and label; may raise a ValueError.
    """
    samples: list[Tokens] = []
    labels: list[int] = []
    line = 1
    try:
        with open(path, "rb") as file:
            for row in file:
                columns = row.rstrip(b"\r\n").decode().split("\t")
                if line == 1 and columns != list(header):
                    raise ValueError(f"expected the columns {list(header)}, got {columns}"[:300])
                if len(columns) != len(header):
                    raise ValueError(f"expected {len(header)} columns, got {len(columns)}")
                if line > 1:
                    tokens, label = parse(columns)
                    samples.append(tokens)
                    labels.append(label)
                line += 1
        if not samples:
            raise ValueError("the file ends before its first sample")
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {error}; fetch or generate it again") from None
    return Split.of(samples, labels)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr, by tqdm where it is installed and stderr is a terminal, else nothing."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
    else:
        with tqdm(desc=what, total=total, file=sys.stderr, delay=1, disable=None) as bar:
            yield bar.update


def in_order(function: Callable[[int], T], workers: int | None) -> Generator[T, None, None]:
    """``function(0), function(1), ...`` without end, computed by ``workers`` processes.

    None means one process a core. The first value is computed here, before any process starts:
    a small request needs no more. Close the iterator to end the processes.
    """
    yield function(0)
    numbers = itertools.count(1)
    workers = (os.cpu_count() or 1) if workers is None else workers
    if workers <= 1:
        yield from map(function, numbers)
    pool = ProcessPoolExecutor(workers)
    try:
        ahead = deque(pool.submit(function, next(numbers)) for _ in range(2 * workers))
        while True:
            yield ahead.popleft().result()
            ahead.append(pool.submit(function, next(numbers)))
    finally:
        pool.shutdown(cancel_futures=True)


def write_files(
    folder: Path, files: Mapping[str, Iterable[bytes]], record: Mapping[str, Any]
) -> None:
    """Write each file's pieces, and ``generated.json``, the record of what they were made from.

    A file gets its name when all of them are whole, so a killed run leaves none that looks whole.
    """
    try:
        version = metadata.version("fastattn")
    except metadata.PackageNotFoundError:  # run from a source tree
        version = None
    text = json.dumps({**record, "fastattn": version}, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    files = {**files, "generated.json": [text.encode()]}
    for name, pieces in files.items():
        with open(folder / f"{name}.part", "wb") as file:
            file.writelines(pieces)
    for name in files:
        os.replace(folder / f"{name}.part", folder / name)
