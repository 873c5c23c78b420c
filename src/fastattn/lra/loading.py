"""From a split to what one device computes: shares of a batch, whole evaluations, waiting time.

A batch is defined by the step alone, and shared out among devices, and on each among turns of
accumulation. So a run gives the same losses on any number of them, to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fastattn.lra.data import Batch, Split, collate, evaluation_batches


class Share(NamedTuple):
    """A part of a batch.

    Args:
        batch: Its samples; one that does not count where the batch has fewer samples than shares,
            so that every device takes part in every step.
        counted: How many samples count: all, or none.
        weight: The mean over the shares of weight · (mean loss of the share) is the mean loss of
            the batch, even where they differ in size.
    """

    batch: Batch
    counted: int
    weight: float


def share_of(batch: Batch, share: int, shares: int) -> Share:
    """Every ``shares``-th sample from number ``share`` on, with the documents that belong to it."""
    if shares == 1:
        return Share(batch, len(batch.labels), 1.0)
    total = len(batch.labels)
    rows = torch.arange(total)[share::shares]
    counted = len(rows)
    rows = rows if counted else torch.zeros(1, dtype=torch.int64)
    parts = len(batch.lengths) // total
    documents = (rows[:, None] * parts + torch.arange(parts)).flatten()
    lengths = batch.lengths[documents]
    tokens = batch.tokens[documents, : int(lengths.max())]
    return Share(Batch(tokens, lengths, batch.labels[rows]), counted, counted * shares / total)


class Shares(Dataset[Share]):
    """The shares of one device, turn by turn: item ``step·turns + turn``.

    Args:
        batches: From a step to its batch.
        rank, ranks: Which device, of how many.
        turns: Shares of a batch that a device computes one after another.
    """

    def __init__(self, batches: Any, rank: int, ranks: int, turns: int = 1) -> None:
        self.batches, self.rank, self.ranks, self.turns = batches, rank, ranks, turns
        self._last: tuple[int, Batch] | None = None

    def __getitem__(self, i: int) -> Share:
        step, turn = divmod(i, self.turns)
        if self._last is None or self._last[0] != step:
            self._last = step, self.batches[step]
        return share_of(self._last[1], turn * self.ranks + self.rank, self.ranks * self.turns)


class EvaluationData(Dataset[Batch]):
    """Batches of a split, each sample exactly once."""

    def __init__(self, split: Split, batch_size: int) -> None:
        self.split = split
        self.batches = evaluation_batches(split, batch_size)

    def __getitem__(self, i: int) -> Batch:
        return collate(self.split, self.batches[i])


@dataclass(frozen=True)
class _Parcel:
    """A share between two processes, as bytes: a tensor costs an exchange of file handles. Tokens
    are of a small type, for the pipe and for the copy to a GPU."""

    arrays: tuple[np.ndarray, ...]
    counted: int
    weight: float

    @classmethod
    def of(cls, share: Any) -> _Parcel:
        tokens, lengths, labels = (x.numpy() for x in share.batch)
        signed = np.min_scalar_type(-1 - int(tokens.max(initial=0)))
        return cls((tokens.astype(signed), lengths, labels), share.counted, share.weight)

    def opened(self) -> Share:
        return Share(Batch(*map(torch.from_numpy, self.arrays)), self.counted, self.weight)

    def pin_memory(self) -> Share:
        """Called on the loader's own thread, so that neither this nor the copy is waited for."""
        share = self.opened()
        tokens, lengths, labels = share.batch
        return share._replace(batch=Batch(tokens.pin_memory(), lengths, labels.pin_memory()))


class Loader(DataLoader[Share]):
    """Yields shares whose tokens are of any integer type."""

    def __iter__(self) -> Iterator[Share]:  # type: ignore[override]
        for item in super().__iter__():
            yield item.opened() if isinstance(item, _Parcel) else item


def loader(data: Dataset[Share], items: Sequence[int], workers: int) -> Loader:
    """These items of ``data``, in this order, made by so many processes, or by this one."""
    return Loader(
        data,
        batch_size=None,
        sampler=items,
        num_workers=workers,
        collate_fn=_Parcel.of,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),  # leaves the global random state alone
    )


class Stretch:
    """The next items of an iterator, whose processes work on while these are used and after.

    Args:
        items: An iterator with at least ``length`` items left.
        length: How many to take.
        waited: Called with the seconds of each wait for an item.
    """

    def __init__(
        self, items: Iterator[Share], length: int, waited: Callable[[float], None]
    ) -> None:
        self.items, self.length, self.waited = items, length, waited

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Share]:
        for _ in range(self.length):
            began = time.perf_counter()
            item = next(self.items)
            self.waited(time.perf_counter() - began)
            yield item
