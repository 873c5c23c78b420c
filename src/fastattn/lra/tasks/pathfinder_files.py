"""One set of Pathfinder on disk: ``imgs/<b>/sample_<n>.png`` and ``metadata/<b>.npy``.

A row of metadata is: folder, file, index, label, and what the image was drawn with. The public
files are plain text in spite of their names, those of the generator's own are numpy's; both are
read, and told apart by their first bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastattn.lra import files
from fastattn.lra.data import Indices

SETS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
_LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
PER_FILE = 1000


class Images(NamedTuple):
    """The images of a set that are not empty, in the order of the metadata."""

    pixels: NDArray[np.uint8]  # (N, side * side), memory-mapped where a cache could be written
    labels: Indices  # (N,)
    empty: int  # files of no bytes, which were skipped
    unnamed: int  # images of which the metadata says nothing


def is_set(folder: Path) -> bool:
    return (folder / "imgs").is_dir() and (folder / "metadata").is_dir()


def read(folder: Path, side: int) -> Images:
    """Read a set whose images have ``side`` pixels a side.

    Decoded pixels are kept in ``folder``, in a file whose name is a hash of the names, sizes and
    times of all images: a second reading maps it, and after any change it is made anew. Where it
    cannot be written, the pixels are held in memory.

    Raises:
        ValueError: An image is missing, damaged or of another size, or so is a row of metadata.
    """
    metadata = _metadata(folder)
    rows = [(path.name, *row) for path in metadata for row in _rows(path)]
    known: dict[str, os.stat_result] = {}
    for directory in {row[1] for row in rows}:
        try:
            with os.scandir(folder / directory) as entries:
                known.update((f"{directory}/{entry.name}", entry.stat()) for entry in entries)
        except FileNotFoundError:
            raise ValueError(
                f"{folder} lacks {directory}, which its metadata names: it was unpacked in part"
            ) from None
    key = hashlib.sha256(f"{side}".encode())
    labels, empty = [], 0
    for source, directory, name, label in rows:
        stat = known.get(f"{directory}/{name}")
        if stat is None:
            raise ValueError(
                f"{folder} lacks {directory}/{name}, which {source} names: it was unpacked in part"
            )
        times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        key.update(f"{directory}/{name} {stat.st_size} {times}\n".encode())
        empty += stat.st_size == 0
        if stat.st_size:
            labels.append(label)
    if not labels:
        raise ValueError(f"{folder} has no image that is not empty; fetch or generate it again")
    pixels = _cached(folder, key.hexdigest()[:24], metadata, len(labels), side)
    unnamed = len(known) - len(labels) - empty
    return Images(pixels, np.array(labels, np.int64), empty, unnamed)


def _metadata(folder: Path) -> list[Path]:
    """The files of metadata, 0, 1, 2 and so on."""
    paths = [path for path in (folder / "metadata").iterdir() if path.suffix == ".npy"]
    return sorted(paths, key=lambda path: (not path.stem.isdigit(), len(path.stem), path.stem))


def _rows(path: Path) -> list[tuple[str, str, int]]:
    """Folder, file and label of each row; none is a header."""
    content = path.read_bytes()
    try:
        if content[:6] == b"\x93NUMPY":
            table = np.load(path, allow_pickle=False)
            if table.ndim != 2 or table.dtype.kind not in "US":
                raise ValueError(f"expected rows of text, got {table.shape} {table.dtype}")
            rows = table.astype(str).tolist()
        else:
            rows = [line.split() for line in content.decode().splitlines() if line.strip()]
        found = []
        for i, row in enumerate(rows, 1):
            if len(row) < 4 or row[3] not in _LABELS or ".." in row[0] or "/" in row[1]:
                raise ValueError(
                    f"row {i} must be a folder, a file, an index and the label 0 or 1, got {row}"[
                        :300
                    ]
                )
            found.append((row[0].strip("/"), row[1], _LABELS[row[3]]))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: {error}; fetch or generate it again") from None
    return found


def _cached(
    folder: Path, key: str, metadata: list[Path], number: int, side: int
) -> NDArray[np.uint8]:
    cache = folder / f".fastattn-{key}.npy"
    shape = (number, side * side)
    try:
        pixels = np.load(cache, mmap_mode="r", allow_pickle=False)
        if pixels.shape == shape and pixels.dtype == np.uint8:
            return pixels
    except (OSError, ValueError, EOFError):
        pass  # there is none yet, or not a whole one
    part = cache.with_suffix(f".{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for block in _blocks(folder, metadata, number, side):
                _write(file, block)
        for old in folder.glob(".fastattn-*.npy"):
            if old != cache:
                old.unlink(missing_ok=True)
        part.replace(cache)
        return np.load(cache, mmap_mode="r", allow_pickle=False)
    except OSError:  # a folder that is read only, a disk that is full
        return np.concatenate(list(_blocks(folder, metadata, number, side)))
    finally:
        part.unlink(missing_ok=True)


def _write(file: BinaryIO, block: NDArray[np.uint8]) -> None:
    file.write(block.data)


def _blocks(
    folder: Path, metadata: list[Path], number: int, side: int
) -> Iterator[NDArray[np.uint8]]:
    """The pixels of the images of each file of metadata, ``(n, side * side)``, by processes."""
    names = [path.name for path in metadata]
    decode = partial(_decode, folder=folder, names=names, side=side)
    with (
        closing(files.in_order(decode, None, len(names))) as blocks,
        files.progress(f"decode {folder.parent.name}/{folder.name}", number) as advance,
    ):
        for block in blocks:
            yield block
            advance(len(block))


def _decode(number: int, *, folder: Path, names: list[str], side: int) -> NDArray[np.uint8]:
    images = []
    for directory, name, _ in _rows(folder / "metadata" / names[number]):
        path = folder / directory / name
        content = path.read_bytes()
        if not content:
            continue
        try:
            with Image.open(path) as image:
                if image.size != (side, side):
                    width, height = image.size
                    raise ValueError(f"{side} x {side} pixels expected, got {width} x {height}")
                pixels = np.asarray(image.convert("L"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} is damaged: {error}; fetch or generate it again") from None
        images.append(pixels.ravel())
    return np.stack(images) if images else np.zeros((0, side * side), np.uint8)


def write(
    folder: Path,
    blocks: Iterator[tuple[NDArray[np.uint8], list[tuple[str, ...]]]],
    workers: int | None,
) -> None:
    """Write images and metadata, as plain text, ``PER_FILE`` to a file of metadata.

    Args:
        folder: Where ``imgs`` and ``metadata`` go.
        blocks: Images ``(n, side, side)`` with the columns of each.
        workers: Threads; None means one a core.
    """
    (folder / "metadata").mkdir()
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for b, (images, rows) in zip(count(), blocks, strict=False):
            (folder / "imgs" / str(b)).mkdir(parents=True)
            paths = [folder / row[0] / row[1] for row in rows]
            list(pool.map(_save, paths, images))
            text = "".join(" ".join(row) + "\n" for row in rows)
            (folder / "metadata" / f"{b}.npy").write_text(text)


def _save(path: Path, pixels: NDArray[np.uint8]) -> None:
    Image.fromarray(pixels).save(path, compress_level=1)
