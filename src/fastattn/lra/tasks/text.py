"""Text: is a film review good or bad, byte by byte. Classes 0 neg, 1 pos.

Data: Maas et al. 2011, ACL P11-1015 (IMDB, 25,000 and 25,000 reviews). The task, by bytes: Long
Range Arena, Tay et al., arXiv:2011.04006. Its code reads 1000 bytes although the paper says up to
4000; the length is a matter of the protocol, 4096 by default, and recorded.

The public data has no validation set: a tenth of the training reviews is taken, those whose
content has the smallest hashes, so that it depends on nothing but the reviews. Reviews are kept in
the order of their hashes, which makes the splits, and their fingerprints, the same in every layout.
"""

from __future__ import annotations

import csv
import hashlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastattn.lra import files
from fastattn.lra.data import BYTES, Data, Split, Vocabulary
from fastattn.lra.protocols import DEFAULT, Protocol, protocol_of
from fastattn.lra.tasks import mails, stand_in_texts
from fastattn.lra.tasks.classes import Classes, differing, one_class

CLASSES = ("neg", "pos")
_PUBLIC = {"train": [12_500, 12_500], "test": [12_500, 12_500]}
_TABLES = [f"{stem}{kind}" for stem in ("{}", "imdb_{}") for kind in (".csv", ".tsv")]
_TEXT, _LABEL = ("text", "review", "sentence"), ("label", "sentiment")
_LABELS = {"0": 0, "neg": 0, "negative": 0, "1": 1, "pos": 1, "positive": 1}

Review = tuple[bytes, int]


def find(data_dir: str | os.PathLike[str]) -> Path:
    """The directory with ``{train,test}/{pos,neg}``, or with the tables ``{train,test}.csv``."""
    found = files.places(data_dir, "aclImdb")
    for place in found:
        if any(_table(place, name) for name in ("train", "test")):
            missing = [name for name in ("train", "test") if _table(place, name) is None]
        else:
            folders = [f"{name}/{c}" for name in ("train", "test") for c in CLASSES]
            missing = [folder for folder in folders if not (place / folder).is_dir()]
            if len(missing) == len(folders):
                continue
        if missing:
            raise ValueError(f"{place} holds reviews but lacks {', '.join(missing)}")
        return place
    for path in (path for place in found for path in sorted(place.glob("*.[ct]sv"))):
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            if None not in _columns(file.readline(1000).split(_delimiter(path))):
                raise ValueError(
                    f"{path} is one table of reviews, which does not say which are for the test: "
                    "fetch aclImdb, which does, or cut it into train.csv and test.csv, for scores "
                    "that compare with no others"
                )
    wanted = "train/pos, train/neg, test/pos, test/neg with .txt files, or train.csv and test.csv"
    raise files.not_found(data_dir, f"{wanted} (aclImdb)", found)


def load(data_dir: str | os.PathLike[str], protocol: str | None = None) -> Data:
    """Read the reviews, of the folder ``aclImdb`` or of two tables, one for train, one for test.

    A table has a header with the columns ``text`` (or ``review``) and ``label`` (or
    ``sentiment``): 0 or 1, neg or pos. A .csv is quoted as usual; in a .tsv a quote is a letter.

    Raises:
        ValueError: Files are missing or damaged, or a set has reviews of one class only.
    """
    folder, chosen = find(data_dir), protocol_of(protocol)
    record = files.generated(folder)
    splits, notes = _read(folder, chosen, record["samples"]["val"] if record else None)
    if chosen.validate_on_test:
        warnings.warn(
            f"protocol {chosen.name} validates Text on its test set: the checkpoint that is "
            "reported was selected on it",
            stacklevel=2,
        )
    return files.describe(
        splits,
        folder,
        chosen,
        max_length=chosen.text_length,
        validation="the test set" if chosen.validate_on_test else "part of train, by content",
        notes=[] if record else notes,
    )


def _read(
    folder: Path, protocol: Protocol, num_val: int | None
) -> tuple[dict[str, Split], list[str]]:
    """The splits, and what there is to say of the counts."""
    read: dict[str, list[tuple[bytes, int, bytes]]] = {}
    for name in ("train", "test"):
        table = _table(folder, name)
        reviews = _rows(table) if table else _texts(folder / name)
        read[name] = sorted((_digest(text), label, text or b" ") for text, label in reviews)
    sets = {
        name: Split.of(
            [np.frombuffer(text[: protocol.text_length], np.uint8) for _, _, text in found],
            [label for _, label, _ in found],
        )
        for name, found in read.items()
    }
    for name, split in sets.items():
        one_class(split, f"{folder}: {name}")
    train, test = sets["train"], sets["test"]
    if protocol.validate_on_test:
        splits = {"train": train, "val": test, "test": test}
    else:
        cut = max(1, len(train) // 10) if num_val is None else num_val
        digests = [digest for digest, _, _ in read["train"]]
        while cut < len(train) - 1 and digests[cut] == digests[cut - 1]:
            cut += 1  # equal reviews stay on one side
        splits = {"train": train.slice(cut, len(train)), "val": train.slice(0, cut), "test": test}
    counts = {name: np.bincount(x.labels, minlength=2).tolist() for name, x in sets.items()}
    return splits, differing(counts, _PUBLIC)


def _texts(folder: Path) -> Iterator[Review]:
    """The reviews of ``folder/{neg,pos}/*.txt``; an empty one would be cut off, and raises."""
    paths = [(path, i) for i, c in enumerate(CLASSES) for path in (folder / c).glob("*.txt")]
    with files.progress(f"read {folder.name}", len(paths)) as advance:
        for path, label in sorted(paths):
            text = path.read_bytes()
            if not text:
                raise ValueError(f"{path} is empty: fetch or generate it again")
            yield text, label
            advance(1)


def _table(folder: Path, name: str) -> Path | None:
    paths = [folder / pattern.format(name) for pattern in _TABLES]
    return next((path for path in paths if path.is_file()), None)


def _delimiter(path: Path) -> str:
    return "," if path.suffix == ".csv" else "\t"


def _columns(header: list[str]) -> tuple[int | None, int | None]:
    """Where the text is, and the label."""
    names = [name.strip().strip('"').lower() for name in header]
    text, label = (
        next((names.index(name) for name in wanted if name in names), None)
        for wanted in (_TEXT, _LABEL)
    )
    return text, label


def _rows(path: Path) -> Iterator[Review]:
    quoting = csv.QUOTE_MINIMAL if path.suffix == ".csv" else csv.QUOTE_NONE
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=_delimiter(path), quoting=quoting, strict=True)  # type: ignore[arg-type]
        try:
            header = next(rows, [])
            text, label = _columns(header)
            if text is None or label is None:
                raise ValueError(f"expected the columns text and label, got {header}"[:300])
            for row in rows:
                if len(row) != len(header):
                    raise ValueError(f"expected {len(header)} columns, got {len(row)}")
                word = row[label].strip().lower()
                if word not in _LABELS:
                    raise ValueError(f"the label must be 0 or 1, neg or pos, got {word[:60]!r}")
                yield row[text].encode(), _LABELS[word]
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{path}, line {rows.line_num}: {error}; fetch or generate it again"
            ) from None


def generate(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    num_train: int | None = None,
    num_val: int | None = None,
    num_test: int | None = None,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Write a stand-in for IMDB in its layout, ``{train,test}/{neg,pos}/*.txt``.

    Args:
        out: A directory that is new or empty.
        seed: Decides every synthetic text; mails are what they are.
        num_train, num_val, num_test: Texts; None means 22,500, 2,500 and 25,000, or of a source 7,
            1 and 2 tenths. Of a source, the texts with the smallest hashes are taken.
        source: None for synthetic texts (``stand_in_texts.review``), or a folder of SpamAssassin's
            mails, the classes spam (neg) and ham (pos).
    """
    sizes = (num_train, num_val, num_test)
    if source is None:
        total = files.sizes(sizes, (22_500, 2_500, 25_000), seed=seed, least=2)
        reviews = [stand_in_texts.review(seed, i) for i in range(sum(total))]
        kind = "synthetic texts: which of two kinds of planted words is in the majority"
    else:
        unlike = {
            text[: DEFAULT.text_length]: (text, c) for text, c in mails.classified(Path(source))
        }
        reviews = sorted(unlike.values(), key=lambda review: _digest(review[0]))
        total = files.sizes(sizes, (7, 1, 2), seed=seed, least=2, available=len(reviews))
        kind = "mails of SpamAssassin: spam (neg) or ham (pos)"
    num_train, num_val, num_test = total
    sets = {"test": reviews[:num_test], "train": reviews[num_test : sum(total)]}
    with files.staged(Path(out)) as part:
        for name, texts in sets.items():
            for c in CLASSES:
                (part / name / c).mkdir(parents=True)
            for i, (text, label) in enumerate(texts):
                (part / name / CLASSES[label] / f"{i}_{(1, 10)[label]}.txt").write_bytes(text)
        splits, _ = _read(part, DEFAULT, num_val)
        record = {"task": "text", "stand_in": kind, "seed": seed, "vocabulary": BYTES.hash}
        files.write_record(part, record, splits)


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


@dataclass(frozen=True)
class Text(Classes):
    """Text as a ``Task``."""

    name: str = "text"
    vocabulary: Vocabulary = BYTES
    classes: tuple[str, ...] = CLASSES

    generate = staticmethod(generate)
    find = staticmethod(find)
    load = staticmethod(load)


TEXT = Text()
