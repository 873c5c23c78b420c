"""The files of a task: where they are found, how they are read, how they are written whole."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from fastattn.lra.data import Data, Split, Tokens
from fastattn.lra.protocols import DEFAULT, Protocol

T = TypeVar("T")
RECORD = "generated.json"
# Of that record, what says what the files hold; the rest says what they were made from.
_CONTENT = ("task", "samples", "fingerprints", "vocabulary", "protocol", "stand_in")
_ARCHIVES = (".gz", ".tgz", ".zip", ".tar", ".bz2", ".xz")


class NotHereError(ValueError):
    """Of a task's files there are none; where some are there, the error is another."""


def places(data_dir: str | os.PathLike[str], folder: str) -> list[Path]:
    """Where ``folder`` may be: it is ``data_dir``, or lies in it at a depth of the public release.

    Raises:
        ValueError: ``data_dir`` is no directory.
    """
    root = Path(data_dir)
    if root.is_file():
        raise ValueError(f"data_dir must be a directory, got the file {root}{_unpack(root)}")
    if not root.is_dir():
        raise ValueError(f"data_dir must be a directory, and {root} does not exist")
    release = root / "lra_release"
    return [root, root / folder, release / folder, release / "lra_release" / folder]


def locate(data_dir: str | os.PathLike[str], folder: str, names: Sequence[str]) -> Path:
    """The directory that holds all of ``names``: ``data_dir``, or ``folder`` at a public depth.

    Raises:
        ValueError: There is none, or it lacks some of the names.
    """
    found = places(data_dir, folder)
    present = {place: [name for name in names if (place / name).is_file()] for place in found}
    best = max(found, key=lambda place: len(present[place]))
    if len(present[best]) == len(names):
        return best
    if present[best]:
        missing = ", ".join(name for name in names if name not in present[best])
        raise ValueError(f"{best} has {', '.join(present[best])} but lacks {missing}")
    raise not_found(data_dir, ", ".join(names), found)


def not_found(
    data_dir: str | os.PathLike[str], wanted: str, found: Sequence[Path] = ()
) -> NotHereError:
    """The error of a directory without ``wanted``; names the archives that lie in it."""
    root = Path(data_dir)
    archives = [path for path in sorted(root.iterdir()) if path.suffix in _ARCHIVES]
    return NotHereError(
        f"data_dir must hold {wanted}; none is in any of {', '.join(map(str, found or [root]))}: "
        "generate them, or name the directory that has them"
        + "".join(_unpack(path) for path in archives[:3] if path.is_file())
    )


def _unpack(path: Path) -> str:
    if path.suffix not in _ARCHIVES:
        return ""
    return f"; unpack an archive first: fastattn-lra unpack {path} --out DIR"


def generated(folder: Path) -> dict[str, Any] | None:
    """What ``generated.json`` says of the files beside it, or None where there is none."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        samples = record["samples"]
        if any(not isinstance(samples[name], int) for name in ("train", "val", "test")):
            raise ValueError("samples must be numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): generate the data again, or remove it if that was "
            "meant"
        ) from None
    return record


def check_generated(path: Path, record: Mapping[str, Any], splits: Mapping[str, Split]) -> None:
    """Compare what was read with the record of what was generated, which lies at ``path``."""
    try:
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


def describe(
    splits: Mapping[str, Split],
    folder: Path,
    protocol: Protocol,
    *,
    notes: Sequence[str] = (),
    **known: Any,
) -> Data:
    """The splits with all that is known of them; generated ones are compared with their record.

    Args:
        splits: What a reader made.
        folder: Where it read them.
        protocol: How it cut and split them. A record of what was generated has the fingerprints
            under one protocol, the default if it names none; under another it gives the origin.
        notes: Sentences for who looks at the data.
        known: More of the record.
    """
    record = generated(folder)
    if record is not None and protocol.name == record.get("protocol", DEFAULT.name):
        check_generated(folder / RECORD, record, splits)
    return Data(
        splits,
        {
            "protocol": protocol.name,
            "protocol_source": protocol.source,
            "protocol_differs": protocol.differs,
            "folder": str(folder),
            "generated": record is not None,
            "generator": {k: x for k, x in (record or {}).items() if k not in _CONTENT},
            "stand_in": record.get("stand_in") if record else None,
            **known,
            "notes": list(notes),
        },
    )


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


def in_order(
    function: Callable[[int], T], workers: int | None, stop: int | None = None
) -> Generator[T, None, None]:
    """``function(0), function(1), ...`` up to ``stop`` or without end, by ``workers`` processes.

    None means one process a core. The first value is computed here, before any process starts:
    a small request needs no more. Close the iterator to end the processes.
    """
    if stop == 0:
        return
    yield function(0)
    numbers = iter(itertools.count(1) if stop is None else range(1, stop))
    workers = (os.cpu_count() or 1) if workers is None else workers
    if workers <= 1:
        yield from map(function, numbers)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        ahead = deque(pool.submit(function, n) for n in itertools.islice(numbers, 2 * workers))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(function, n) for n in itertools.islice(numbers, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def check_empty(out: Path) -> None:
    """Refuse a directory that holds something: what is there is not written over."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: name another directory")


def sizes(
    wanted: Sequence[int | None],
    default: Sequence[int],
    *,
    seed: int,
    least: int = 1,
    available: int | None = None,
) -> tuple[int, int, int]:
    """How many samples train, val and test get, or a ValueError that says what is wrong.

    Args:
        wanted: What was asked for, None for the default.
        default: The defaults; of a source, with ``available`` samples, the shares of them.
        seed: Must not be negative.
        least: The smallest number for train and test; 1 for val.
        available: How many samples there are, if it is not any number.
    """
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if available is not None:
        default = [available * share // sum(default) for share in default]
    found = tuple(n if n is not None else d for n, d in zip(wanted, default, strict=True))
    for name, size in zip(("train", "val", "test"), found, strict=True):
        smallest = 1 if name == "val" else least
        if size < smallest:
            raise ValueError(f"num_{name} must be at least {smallest}, got {size}")
    if available is not None and sum(found) > available:
        raise ValueError(f"source has {available} samples, {sum(found)} were asked for")
    train, val, test = found
    return train, val, test


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A directory to write into, whose content moves to ``out`` when all of it is whole."""
    check_empty(out)
    is_new = not out.exists()
    part = out / ".part"
    part.mkdir(parents=True)
    try:
        yield part
        for path in sorted(part.iterdir()):
            path.rename(out / path.name)
    finally:
        shutil.rmtree(part)
        if is_new and not any(out.iterdir()):
            out.rmdir()


def write_record(
    folder: Path, record: Mapping[str, Any], splits: Mapping[str, Split] | None = None
) -> None:
    """Write ``generated.json``: what the files beside it were made from, and what they hold."""
    record = dict(record)
    if splits is not None:
        record["samples"] = {name: len(split) for name, split in splits.items()}
        record["fingerprints"] = {name: split.fingerprint() for name, split in splits.items()}
    try:
        record["fastattn"] = metadata.version("fastattn")
    except metadata.PackageNotFoundError:  # run from a source tree
        record["fastattn"] = None
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def write_files(
    folder: Path, files: Mapping[str, Iterable[bytes]], record: Mapping[str, Any]
) -> None:
    """Write each file's pieces, and ``generated.json``, the record of what they were made from.

    A file gets its name when all of them are whole, so a killed run leaves none that looks whole.
    """
    with staged(folder) as part:
        for name, pieces in files.items():
            with open(part / name, "wb") as file:
                file.writelines(pieces)
        write_record(part, record)
