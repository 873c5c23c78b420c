"""Image: which of ten things a grey picture of 32 x 32 shows, pixel by pixel.

Data: Krizhevsky 2009 (CIFAR-10, 50,000 and 10,000 pictures). The task: Long Range Arena, Tay et
al., arXiv:2011.04006. A picture is 1024 tokens in raster order, each its grey level: an id is a
brightness, and 0 is black and no padding. Grey is ITU-R 601, rounded as Pillow's ``convert("L")``.

The public data has no validation set: the last tenth of the training pictures is taken, as LRA
does; the classes are in no order there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastattn.lra import files
from fastattn.lra.data import GREYS, Data, Split, Tokens, Vocabulary
from fastattn.lra.pictures import unpickle_batch
from fastattn.lra.protocols import protocol_of
from fastattn.lra.tasks import stand_in_images
from fastattn.lra.tasks.classes import Classes, differing, one_class

CLASSES = ("airplane", "automobile", "bird", "cat", "deer",
           "dog", "frog", "horse", "ship", "truck")  # fmt: skip
_TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
_PUBLIC = {"train": 50_000, "test": 10_000}
_PIXELS = 32 * 32
_ROW = 1 + 3 * _PIXELS  # of the binary layout: a label, then red, green and blue planes


def find(data_dir: str | os.PathLike[str]) -> Path:
    """The directory with ``data_batch_1`` to 5 and ``test_batch``, pickled or with the end .bin."""
    errors = []
    for folder, end in (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin")):
        names = [name + end for name in (*_TRAIN, "test_batch")]
        try:
            return files.locate(data_dir, folder, names)
        except ValueError as error:
            errors.append(error)
    raise next((error for error in errors if not isinstance(error, files.NotHereError)), errors[0])


def load(data_dir: str | os.PathLike[str], protocol: str | None = None) -> Data:
    """Read CIFAR-10's python or binary batches as grey tokens.

    Nothing that a pickled batch holds is run: only arrays, numbers and strings are built.

    Raises:
        ValueError: Files are missing, damaged, or no batches of CIFAR-10.
    """
    folder, chosen = find(data_dir), protocol_of(protocol)
    record = files.generated(folder)
    splits = _read(folder, record["samples"]["val"] if record else None)
    counts = {"train": len(splits["train"]) + len(splits["val"]), "test": len(splits["test"])}
    return files.describe(
        splits,
        folder,
        chosen,
        max_length=_PIXELS,
        validation="the last of train",
        notes=[] if record else differing(counts, _PUBLIC),
    )


def _read(folder: Path, num_val: int | None) -> dict[str, Split]:
    train = _split(_batch(folder, name) for name in _TRAIN)
    test = _split([_batch(folder, "test_batch")])
    for name, split in (("train", train), ("test", test)):
        one_class(split, f"{folder}: {name}")
    cut = len(train) - (max(1, len(train) // 10) if num_val is None else num_val)
    return {"train": train.slice(0, cut), "val": train.slice(cut, len(train)), "test": test}


def _split(batches: Iterable[tuple[NDArray[np.uint8], NDArray[np.int64]]]) -> Split:
    pictures, labels = zip(*batches, strict=True)
    tokens = np.concatenate([grey(picture) for picture in pictures])
    offsets = np.arange(0, tokens.size + 1, _PIXELS)
    return Split(tokens.ravel(), offsets, np.concatenate(labels))


def grey(pictures: NDArray[np.uint8]) -> Tokens:
    """Grey levels, ``(N, 1024)``, of planes of red, green and blue, ``(N, 3 * 1024)`` uint8."""
    red, green, blue = pictures.reshape(-1, 3, _PIXELS).astype(np.uint32).transpose(1, 0, 2)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)


def _batch(folder: Path, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The pictures, ``(N, 3072)``, and labels, ``(N,)``, of one file."""
    path = folder / name
    if path.is_file():
        pictures, labels = unpickle_batch(path)
    else:
        path = folder / f"{name}.bin"
        rows = np.fromfile(path, np.uint8)
        if rows.size == 0 or rows.size % _ROW:
            raise ValueError(
                f"{path}: expected rows of {_ROW} bytes, got {rows.size} bytes; fetch or generate "
                "it again"
            )
        pictures, labels = rows.reshape(-1, _ROW)[:, 1:], rows[::_ROW].astype(np.int64)
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(CLASSES):
        raise ValueError(
            f"{path}: labels must be 0 to 9, got {labels.min()} to {labels.max()}; fetch or "
            "generate it again"
        )
    return pictures, labels


def generate(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    num_train: int | None = None,
    num_val: int | None = None,
    num_test: int | None = None,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Write a stand-in for CIFAR-10 in its binary layout, ``data_batch_1.bin`` and so on.

    Args:
        out: A directory that is new or empty.
        seed: Decides every drawn picture; those of a source are what they are.
        num_train, num_val, num_test: Pictures; None means 45,000, 5,000 and 10,000, or with a
            source nine tenths and one tenth of its training pictures, and all its test pictures.
        source: None for drawn pictures (``stand_in_images.draw``), or a folder with Fashion-MNIST's
            four IDX files, .gz or not: 28 x 28, padded with black to 32 x 32.
    """
    sizes = (num_train, num_val, num_test)
    if source is None:
        total = files.sizes(sizes, (45_000, 5_000, 10_000), seed=seed, least=10)
        test = stand_in_images.draw(0, total[2], seed=seed)
        train = stand_in_images.draw(total[2], total[0] + total[1], seed=seed)
        kind = "drawn shapes and textures of ten kinds"
        names = stand_in_images.KINDS
    else:
        found = stand_in_images.fashion(Path(source))
        train, test = found["train"], found["test"]
        most = len(train[1])
        total = files.sizes(sizes, (most - most // 10, most // 10, len(test[1])), seed=seed)
        if total[0] + total[1] > most or total[2] > len(test[1]):
            raise ValueError(
                f"source has {most} pictures for train and val and {len(test[1])} for test, got "
                f"num_train {total[0]}, num_val {total[1]} and num_test {total[2]}"
            )
        kind = "Fashion-MNIST, padded to 32 x 32"
        names = stand_in_images.FASHION
    pictures, labels = (x[: total[0] + total[1]] for x in train)
    with files.staged(Path(out)) as part:
        cuts = np.linspace(0, len(labels), len(_TRAIN) + 1).astype(int)
        for name, start, stop in zip(_TRAIN, cuts, cuts[1:], strict=False):
            _write(part / f"{name}.bin", pictures[start:stop], labels[start:stop])
        _write(part / "test_batch.bin", test[0][: total[2]], test[1][: total[2]])
        (part / "batches.meta.txt").write_text("\n".join(names) + "\n")
        record = {"task": "image", "stand_in": kind, "seed": seed, "vocabulary": GREYS.hash}
        files.write_record(part, record, _read(part, total[1]))


def _write(path: Path, pictures: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
    """Rows of the binary layout: the grey plane three times, which is that grey again."""
    planes = np.tile(pictures.reshape(-1, _PIXELS), 3)
    path.write_bytes(np.concatenate([labels[:, None], planes], 1).tobytes())


@dataclass(frozen=True)
class Image(Classes):
    """Image as a ``Task``."""

    name: str = "image"
    vocabulary: Vocabulary = GREYS
    classes: tuple[str, ...] = CLASSES

    generate = staticmethod(generate)
    find = staticmethod(find)
    load = staticmethod(load)


IMAGE = Image()
