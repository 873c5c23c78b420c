"""Picture sets as they are published: IDX (MNIST, Fashion-MNIST) and pickles (CIFAR)."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
       "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # fmt: skip
CIFAR = {
    "cifar-10-batches-py": ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "labels"),
    "cifar-100-python": (["train"], ["test"], "fine_labels"),
}
# where torchvision and the Debian package keep theirs
FOLDERS = (".", "MNIST/raw", "FashionMNIST/raw", "raw", "usr/share/datasets/fashion-mnist")
# All that a pickled batch needs: arrays of numbers, by the names of numpy 1 and 2, and bytes.
_HARMLESS = {
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class Pictures(NamedTuple):
    """``(N, side, side, colours)`` uint8, and labels ``(N,)`` int64."""

    pixels: Bytes
    labels: NDArray[np.int64]


def read_pictures(folder: str | os.PathLike[str]) -> dict[str, Pictures]:
    """The splits ``"train"`` and ``"test"`` of MNIST, Fashion-MNIST, CIFAR-10 or CIFAR-100.

    Args:
        folder: Where the four IDX files are (``.gz`` or not), or the directory of the batches, or
            the ``root`` that torchvision was given.

    Raises:
        ValueError: There is no such set, or a file is damaged.
    """
    root = Path(folder)
    for place in (root / name for name in FOLDERS):
        if _idx_path(place, IDX[0]) is not None:
            train, test = (
                Pictures(
                    read_idx(place, images, (28, 28))[..., None],
                    read_idx(place, labels, ()).astype(np.int64),
                )
                for images, labels in (IDX[:2], IDX[2:])
            )
            return _checked({"train": train, "test": test}, place)
    for name, (train_files, test_files, key) in CIFAR.items():
        for place in (root / name, root):
            if all((place / file).is_file() for file in (*train_files, *test_files)):
                splits = {"train": train_files, "test": test_files}
                found = {s: _batches(place, files, key) for s, files in splits.items()}
                return _checked(found, place)
    raise ValueError(
        f"{root} holds no picture set: neither {', '.join(IDX)} (.gz or not; looked in "
        f"{', '.join(FOLDERS)}) nor {' nor '.join(CIFAR)}"
    )


def _checked(splits: dict[str, Pictures], place: Path) -> dict[str, Pictures]:
    for name, (pixels, labels) in splits.items():
        if len(pixels) != len(labels) or not len(labels):
            raise ValueError(
                f"{place} has {len(pixels)} pictures and {len(labels)} labels of {name}: they do "
                "not belong together"
            )
    return splits


def read_idx(folder: Path, name: str, shape: tuple[int, ...]) -> Bytes:
    """An IDX file of bytes, ``(N, *shape)``: two zeros, 8, the number of axes, their sizes, bytes.

    Raises:
        ValueError: It is not there, damaged, or of another shape.
    """
    path = _idx_path(folder, name)
    if path is None:
        raise ValueError(f"{folder} lacks {name}, or {name}.gz")
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    axes = 1 + len(shape)
    begin = 4 + 4 * axes
    sizes = tuple(np.frombuffer(content[4:begin], ">u4").tolist()) if len(content) >= begin else ()
    if (
        content[:4] != bytes((0, 0, 8, axes))
        or sizes[1:] != shape
        or len(content) - begin != int(np.prod(sizes))
    ):
        raise ValueError(f"{path} is damaged: no IDX file of (N, {', '.join(map(str, shape))})")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(sizes)


def _idx_path(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)


def _batches(folder: Path, names: list[str], key: str) -> Pictures:
    found = [unpickle_batch(folder / name, key) for name in names]
    planes = np.concatenate([pixels for pixels, _ in found])
    pixels = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Pictures(pixels, np.concatenate([labels for _, labels in found]))


def unpickle_batch(path: Path, key: str = "labels") -> tuple[Bytes, NDArray[np.int64]]:
    """Pictures ``(N, 3072)``, planes of red, green and blue, and labels of a batch of CIFAR.

    Nothing that the file holds is run: only arrays, numbers and strings are built.

    Raises:
        ValueError: It is damaged, or no such batch.
    """
    try:
        batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in dict(batch).items()}
        pixels, labels = np.asarray(batch["data"]), np.asarray(batch[key], np.int64)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} is no pickled batch: {error}; fetch it again") from None
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3 * 32 * 32):
        raise ValueError(
            f"{path}: expected (N, 3072) uint8 for N = {len(labels)} labels, got {pixels.shape} "
            f"{pixels.dtype}"
        )
    return pixels, labels


class _Unpickler(pickle.Unpickler):
    """Builds arrays, numbers, strings and containers; anything else is refused before it exists."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}, which no batch needs")
        return super().find_class(module, name)
