"""Retrieval: does one paper cite the other, byte by byte. Classes 0 unrelated, 1 related.

Data: Radev et al. 2013, the ACL anthology network; pairs and files: Long Range Arena, Tay et al.,
arXiv:2011.04006. Of each paper the source reads 10,000 characters and then 4000 bytes of them,
which is the first 4000 bytes: no character is less than one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastattn.lra import files
from fastattn.lra.data import BYTES, Data, Split, Vocabulary
from fastattn.lra.protocols import DEFAULT, Protocol, protocol_of
from fastattn.lra.tasks import mails, stand_in_texts
from fastattn.lra.tasks.classes import Classes, differing, one_class

FILES = {name: f"new_aan_pairs.{kind}.tsv"
         for name, kind in (("train", "train"), ("val", "eval"), ("test", "test"))}  # fmt: skip
_PUBLIC = {"train": 147_086, "val": 18_090, "test": 17_437}
_LABELS = {b"0.0": 0, b"1.0": 1, b"0": 0, b"1": 1}
_COLUMNS = "label, id, id, text and text"

Pair = tuple[bytes, bytes, int]


def find(data_dir: str | os.PathLike[str]) -> Path:
    """The directory with ``new_aan_pairs.{train,eval,test}.tsv``, at or under ``data_dir``."""
    return files.locate(data_dir, "tsv_data", list(FILES.values()))


def load(data_dir: str | os.PathLike[str], protocol: str | None = None) -> Data:
    """Read the pairs: a row is five columns without a header, and a quote in it is a letter.

    Raises:
        ValueError: A file is missing, or a row of it is damaged; the message has its number.
    """
    folder, chosen = find(data_dir), protocol_of(protocol)
    splits = _read(folder, chosen)
    counts = {name: len(split) for name, split in splits.items()}
    notes = [] if files.generated(folder) else differing(counts, _PUBLIC)
    return files.describe(
        splits, folder, chosen, max_length=chosen.retrieval_length, validation="public", notes=notes
    )


def _read(folder: Path, protocol: Protocol) -> dict[str, Split]:
    splits = {}
    for name, file in FILES.items():
        splits[name] = _split(_rows(folder / file), protocol.retrieval_length)
        if name != "val":
            one_class(splits[name], str(folder / file))
    return splits


def _split(pairs: Iterable[Pair], length: int) -> Split:
    """The pairs as one buffer, which grows in place: the public files are ten gigabytes."""
    tokens, ends, labels = bytearray(), [0], []
    for *documents, label in pairs:
        for document in documents:
            tokens += document[:length] or b" "
            ends.append(len(tokens))
        labels.append(label)
    return Split(
        np.frombuffer(tokens, np.uint8), np.array(ends), np.array(labels, np.int64), parts=2
    )


def _rows(path: Path) -> Iterator[Pair]:
    with open(path, "rb") as file, files.progress(f"read {path.name}", path.stat().st_size) as done:
        number = 0
        for number, line in enumerate(file, 1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            damage = None
            if len(columns) != 5:
                damage = f"expected 5 columns ({_COLUMNS}), got {len(columns)}"
            elif columns[0] not in _LABELS:
                damage = f"the label must be 0.0 or 1.0, got {columns[0][:60]!r}"
            if damage is not None:
                raise ValueError(f"{path}, line {number}: {damage}; fetch or generate it again")
            yield columns[3], columns[4], _LABELS[columns[0]]
            done(len(line))
        if number == 0:
            raise ValueError(f"{path} is empty; fetch or generate it again")


def generate(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    num_train: int | None = None,
    num_val: int | None = None,
    num_test: int | None = None,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Write a stand-in for the pairs of papers, ``new_aan_pairs.{train,eval,test}.tsv``.

    Args:
        out: A directory that is new or empty.
        seed: Decides every synthetic text; mails are what they are.
        num_train, num_val, num_test: Pairs; None means 20,000, 2,000 and 2,000, or all of a source.
        source: None for synthetic pairs (``stand_in_texts.pair``), or a folder of SpamAssassin's
            mails: are two of one thread? 7, 1 and 2 tenths of the threads go to the splits.
    """
    sizes = (num_train, num_val, num_test)
    if source is None:
        total = files.sizes(sizes, (20_000, 2_000, 2_000), seed=seed, least=2)
        sets = {
            name: [stand_in_texts.pair(seed, name, i) for i in range(size)]
            for name, size in zip(("train", "val", "test"), total, strict=True)
        }
        kind = "pairs of synthetic texts: are they of one topic"
    else:
        threads = mails.threads(Path(source))
        test, val = len(threads) * 2 // 10, len(threads) * 3 // 10
        if val - test < 2:
            raise ValueError(f"source has {len(threads)} threads of two mails, 20 are needed")
        cuts = {"test": threads[:test], "val": threads[test:val], "train": threads[val:]}
        sets = {name: mails.pairs(cut) for name, cut in cuts.items()}
        for name, size in zip(("train", "val", "test"), sizes, strict=True):
            most = len(sets[name])
            if size is not None and not 2 <= size <= most:
                raise ValueError(f"num_{name} must be 2 to {most} with this source, got {size}")
            sets[name] = sets[name][:size]
        kind = "pairs of SpamAssassin's mails: are they of one thread"
    with files.staged(Path(out)) as part:
        for name, file in FILES.items():
            with open(part / file, "wb") as opened:
                opened.writelines(_lines(sets[name], name))
        record = {"task": "retrieval", "stand_in": kind, "seed": seed, "vocabulary": BYTES.hash}
        files.write_record(part, record, _read(part, DEFAULT))


def _lines(pairs: Iterable[Pair], name: str) -> Iterator[bytes]:
    """Rows of the public layout; a text is one line of one column there."""
    for i, (one, other, label) in enumerate(pairs):
        ids = f"{name}-{2 * i}\t{name}-{2 * i + 1}".encode()
        texts = (b" ".join(text.split()) for text in (one, other))
        yield b"\t".join((f"{label}.0".encode(), ids, *texts)) + b"\n"


@dataclass(frozen=True)
class Retrieval(Classes):
    """Retrieval as a ``Task`` of two documents a sample."""

    name: str = "retrieval"
    vocabulary: Vocabulary = BYTES
    classes: tuple[str, ...] = ("unrelated", "related")
    parts: int = 2

    generate = staticmethod(generate)
    find = staticmethod(find)
    load = staticmethod(load)


RETRIEVAL = Retrieval()
