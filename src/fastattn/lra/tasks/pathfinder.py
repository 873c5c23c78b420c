"""Pathfinder and Path-X: do two discs end one dashed contour? Pixel by pixel; classes 0 no, 1 yes.

Task: Linsley et al., arXiv:1805.08315. Sizes, sets and files: Long Range Arena, Tay et al.,
arXiv:2011.04006: three sets of 200,000 images, by the length of the contours: easy (6 segments,
``curv_baseline``), intermediate (9) and hard (14). Pathfinder is the hard set of 32 x 32 pixels,
1024 tokens; Path-X that of 128 x 128, 16,384 tokens. A token is a grey level; 0 is black, and is
seen.

The public data has no splits: 8, 1 and 1 tenths are slices in the order of the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fastattn import _native
from fastattn.lra import files
from fastattn.lra.data import GREYS, Data, Split, Vocabulary
from fastattn.lra.protocols import DEFAULT, PROTOCOLS, Protocol, protocol_of
from fastattn.lra.tasks import pathfinder_files
from fastattn.lra.tasks.classes import Classes, differing
from fastattn.lra.tasks.pathfinder_files import PER_FILE, SETS, Images
from fastattn.lra.tasks.pathfinder_images import Settings, draw

_PUBLIC = 200_000  # images of each set, of which one of 32 pixels, easy, is empty


def generate(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    n: int | None = None,
    num_train: int | None = None,
    num_val: int | None = None,
    num_test: int | None = None,
    size: int = 32,
    difficulty: str = "hard",
    ease: float | None = None,
    workers: int | None = None,
) -> None:
    """Write a set in the public layout, ``out/pathfinder<size>/curv_*``, from the seed alone.

    The test images are the first of the seed, then validation, then train, so that they do not
    depend on the size of the training set; in the files train comes first.

    Args:
        out: A directory; may hold other sets, but not this one.
        seed: Decides every image.
        n: Images in all, split into 8, 1 and 1 tenths, instead of the next three.
        num_train, num_val, num_test: Images; None means 160,000, 20,000 and 20,000.
        size, difficulty, ease: As in ``pathfinder_images.Settings.of``.
        workers: Threads, or processes without the native part; None means one a core.
    """
    wanted = (num_train, num_val, num_test)
    if n is None:
        sizes = files.sizes(wanted, (160_000, 20_000, 20_000), seed=seed)
    elif any(number is not None for number in wanted):
        raise ValueError("n is the number of all images: give it, or num_train and the others")
    else:
        test = val = n // 10
        sizes = files.sizes((n - val - test, val, test), (8, 1, 1), seed=seed)
    settings = Settings.of(size, difficulty, ease)
    protocol = next(p for p in PROTOCOLS.values() if p.pathfinder_sets == (difficulty,))
    with files.staged(Path(out) / f"pathfinder{size}" / SETS[difficulty]) as part:
        drawn = _draw(settings, sizes, seed, workers)
        with files.progress("draw and write pathfinder", sum(sizes)) as advance:
            pathfinder_files.write(part, _counted(drawn, advance), workers)
        splits = _cut(pathfinder_files.read(part, size), sizes)
        record = {
            "task": "pathfinder",
            "size": size,
            "difficulty": difficulty,
            "ease": ease,
            "seed": seed,
            "vocabulary": GREYS.hash,
            "protocol": protocol.name,
        }
        files.write_record(part, record, splits)


def generate_pathx(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    n: int | None = None,
    num_train: int | None = None,
    num_val: int | None = None,
    num_test: int | None = None,
    ease: float | None = None,
    workers: int | None = None,
) -> None:
    """Write Path-X, the hard set of 128 x 128 pixels, by ``generate``."""
    generate(
        out,
        seed=seed,
        n=n,
        num_train=num_train,
        num_val=num_val,
        num_test=num_test,
        size=128,
        ease=ease,
        workers=workers,
    )


Block = tuple[NDArray[np.uint8], list[tuple[str, ...]]]


def _draw(
    settings: Settings, sizes: tuple[int, int, int], seed: int, workers: int | None
) -> Generator[Block, None, None]:
    """The images of each file of metadata, and their rows."""
    block = partial(_block, settings=settings, sizes=sizes, seed=seed, threads=workers)
    native = _native.load()[0] is not None  # NumPy has no threads: a process draws a file
    number = -(-sum(sizes) // PER_FILE)
    with closing(files.in_order(block, 1 if native else workers, number)) as blocks:
        yield from blocks


def _block(
    b: int, *, settings: Settings, sizes: tuple[int, int, int], seed: int, threads: int | None
) -> Block:
    """Those of file b; a split is one run of the seed."""
    train, val, test = sizes
    runs = [(0, train, val + test), (train, train + val, test), (train + val, sum(sizes), 0)]
    start, stop = b * PER_FILE, min((b + 1) * PER_FILE, sum(sizes))
    pieces = [
        draw(settings, max(start, low) - low + first, min(stop, high) - max(start, low),
             seed=seed, threads=threads)
        for low, high, first in runs
        if max(start, low) < min(stop, high)
    ]  # fmt: skip
    columns = [np.concatenate(x) for x in zip(*pieces, strict=True)]
    images, labels, margins = columns[:3]
    rows = [
        settings.row(f"imgs/{b}", f"sample_{i}.png", i, int(label), int(margin))
        for i, (label, margin) in enumerate(zip(labels, margins, strict=True))
    ]
    return images, rows


def _counted(blocks: Iterator[Block], advance: Any) -> Iterator[Block]:
    for block in blocks:
        yield block
        advance(len(block[1]))


def _cut(images: Images, sizes: tuple[int, int, int]) -> dict[str, Split]:
    """Slices of a set, as views."""
    number, pixels = images.pixels.shape
    whole = Split(images.pixels.reshape(-1), np.arange(number + 1) * pixels, images.labels)
    train, val, _ = sizes
    return {
        "train": whole.slice(0, train),
        "val": whole.slice(train, train + val),
        "test": whole.slice(train + val, number),
    }


@dataclass(frozen=True)
class Pathfinder(Classes):
    """Pathfinder as a ``Task``; which set is read is a matter of the protocol, hard by default.

    Of the ``sizes``, in pixels a side, the first is read that is there.
    """

    name: str = "pathfinder"
    sizes: tuple[int, ...] = (32, 64, 256)
    vocabulary: Vocabulary = GREYS
    classes: tuple[str, ...] = ("apart", "joined")

    generate: ClassVar[Callable[..., None]] = staticmethod(generate)

    def sets(self, protocol: Protocol) -> tuple[str, ...]:
        """The sets a protocol trains on; it is validated and tested on the last."""
        return protocol.pathfinder_sets

    def find(self, data_dir: str | os.PathLike[str]) -> Path:
        """The directory with any of the three sets, ``curv_*``, at or under ``data_dir``."""
        return self._copies(data_dir, ())[1][0]

    def _copies(
        self, data_dir: str | os.PathLike[str], sets: tuple[str, ...]
    ) -> tuple[int, list[Path]]:
        """The size, and the directories with most of ``sets``; of those, with most sets at all."""

        def has(place: Path) -> tuple[int, int]:
            there = [s for s in SETS if pathfinder_files.is_set(place / SETS[s])]
            return len(set(there) & set(sets)), len(there)

        for size in self.sizes:
            name = f"pathfinder{size}"
            found = files.places(data_dir, name)
            if found[0].name.startswith("pathfinder") and found[0].name != name:
                found = found[1:]  # another size
            rank = {place: has(place) for place in found}
            best = max(rank.values())
            if best != (0, 0):
                return size, [place for place in found if rank[place] == best]
            for folder in (place / name for place in found for name in SETS.values()):
                if (folder / "imgs").is_dir() or (folder / "metadata").is_dir():
                    raise ValueError(
                        f"{folder} has one of imgs and metadata, and lacks the other: it was "
                        "unpacked in part"
                    )
        name = f"pathfinder{self.sizes[0]}"
        raise files.not_found(
            data_dir, f"{name}/curv_*/imgs and metadata", files.places(data_dir, name)
        )

    def load(self, data_dir: str | os.PathLike[str], protocol: str | None = None) -> Data:
        """Read the set, or the sets, of a protocol.

        Empty images are skipped and counted. Pixels are memory-mapped from a cache beside the
        images where one can be written, so that Path-X does not fill the memory.

        Raises:
            ValueError: Images are missing or damaged, or the set of the protocol is not there.
        """
        chosen = protocol_of(protocol)
        sets = self.sets(chosen)
        size, copies = self._copies(data_dir, sets)
        folder, notes = copies[0], []
        missing = [s for s in sets if not pathfinder_files.is_set(folder / SETS[s])]
        if missing:
            there = [s for s in SETS if pathfinder_files.is_set(folder / SETS[s])]
            raise ValueError(
                f"{folder} lacks {', '.join(f'{SETS[s]} ({s})' for s in missing)}, which protocol "
                f"{chosen.name} reads; it has {', '.join(there)}: a protocol for one set is "
                "default (hard), intermediate or easy"
            )
        if len(copies) > 1:
            notes.append(f"{len(copies)} copies: {folder} was read, not {copies[1]}")
        images = [pathfinder_files.read(folder / SETS[s], size) for s in sets]
        for name, number in (("empty", "empty"), ("without metadata", "unnamed")):
            skipped = sum(getattr(x, number) for x in images)
            if skipped:
                notes.append(f"{skipped} {name} image{'s' * (skipped > 1)} skipped")
        last = folder / SETS[sets[-1]]
        record = files.generated(last)
        if record is None:
            counts = {SETS[s]: len(x.labels) + x.empty for s, x in zip(sets, images, strict=True)}
            notes += differing(counts, dict.fromkeys(counts, _PUBLIC))
        splits = self._split(images, chosen, record)
        wanted = len(images[-1].labels) - len(splits["val"]) - len(splits["test"])
        notes += [
            f"trained on all {len(x.labels)} images of {SETS[s]}, not on {wanted}: it has no more"
            for s, x in zip(sets, images, strict=True)
            if len(x.labels) < wanted
        ]
        return files.describe(
            splits,
            last,
            chosen,
            size=size,
            max_length=size**2,
            validation="slices in the order of the files",
            difficulty=" + ".join(sets),
            empty_images=sum(x.empty for x in images),
            notes=notes,
        )

    @staticmethod
    def _split(
        images: list[Images], protocol: Protocol, record: dict[str, Any] | None
    ) -> dict[str, Split]:
        number, shares = len(images[-1].labels), protocol.pathfinder_shares
        if record is not None and shares == DEFAULT.pathfinder_shares:
            train, val, test = (record["samples"][name] for name in ("train", "val", "test"))
        else:
            train, val = (round(number * share) for share in shares)
            test = number - train - val
        splits = _cut(images[-1], (train, val, test))
        if len(images) > 1:
            pixels = [x.pixels[:train] for x in images]
            labels = np.concatenate([x.labels[:train] for x in images])
            tokens = np.concatenate(pixels)
            offsets = np.arange(len(labels) + 1) * tokens.shape[1]
            splits["train"] = Split(tokens.ravel(), offsets, labels)
        return splits


@dataclass(frozen=True)
class PathX(Pathfinder):
    """Path-X as a ``Task``: 128 x 128 pixels, the hard set but under ``easy``, ``intermediate``."""

    name: str = "pathx"
    sizes: tuple[int, ...] = (128,)

    generate: ClassVar[Callable[..., None]] = staticmethod(generate_pathx)

    def sets(self, protocol: Protocol) -> tuple[str, ...]:
        return protocol.pathfinder_sets if protocol.name in SETS else ("hard",)


PATHFINDER = Pathfinder()
PATHX = PathX()
