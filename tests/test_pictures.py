"""Picture sets in the files they are published in, whole or damaged."""

import gzip
import io
import os
import pickle
import re
import struct
from typing import ClassVar

import numpy as np
import pytest

from fastattn.lra.pictures import IDX, read_pictures

RNG = np.random.default_rng(0)


def idx(pixels):
    return (
        bytes((0, 0, 8, pixels.ndim)) + np.array(pixels.shape, ">u4").tobytes() + pixels.tobytes()
    )


def write_idx(folder, end=".gz"):
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, n in zip(IDX, (7, 7, 3, 3), strict=True):
        shape = (n, 28, 28) if "images" in name else (n,)
        written.append(RNG.integers(0, 10, shape, np.uint8))
        content = idx(written[-1])
        (folder / f"{name}{end}").write_bytes(gzip.compress(content) if end else content)
    return written


@pytest.mark.parametrize("place", [".", "FashionMNIST/raw", "usr/share/datasets/fashion-mnist"])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files_are_read_where_packages_put_them(tmp_path, place, end):
    images, labels, test_images, test_labels = write_idx(tmp_path / place, end)
    found = read_pictures(tmp_path)
    assert found["train"].pixels.shape == (7, 28, 28, 1)
    assert (found["train"].pixels[..., 0] == images).all()
    assert (found["train"].labels == labels).all()
    assert (found["test"].pixels[..., 0] == test_images).all()
    assert (found["test"].labels == test_labels).all()


def pickled(batch, protocol, core):
    """A pickle of protocol 0, 1 or 2 whose arrays have the names of numpy 1, core, or 2, _core."""
    name = f"numpy.{core}".encode()
    content, replaced = re.subn(rb"numpy\._?core", name, pickle.dumps(batch, protocol))
    assert replaced
    return content


class _OfPython2(pickle._Pickler):
    """Writes every string as Python 2 did, which has written the public files."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text):
        text = text.encode() if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(text)) + text)

    dispatch[bytes] = dispatch[str] = save_string


def of_python_2(batch):
    file = io.BytesIO()
    _OfPython2(file, 2).dump(batch)
    return file.getvalue().replace(b"numpy._core", b"numpy.core")


PICKLES = {
    **{
        f"numpy.{core}, protocol {protocol}": lambda batch, p=protocol, c=core: pickled(batch, p, c)
        for core in ("core", "_core")
        for protocol in (0, 1, 2)
    },
    "Python 2": of_python_2,
    **{f"protocol {p}": lambda batch, p=p: pickle.dumps(batch, p) for p in (3, 4, 5)},
}


@pytest.mark.parametrize("write", PICKLES.values(), ids=PICKLES)
@pytest.mark.parametrize(
    ("folder", "train", "key"),
    [
        ("cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], b"labels"),
        ("cifar-100-python", ["train"], b"fine_labels"),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_pickled_batches_are_read_pixel_by_pixel(tmp_path, folder, train, key, write, inside):
    (tmp_path / folder).mkdir()
    test = "test_batch" if "10-" in folder else "test"
    pixels = []
    for name in (*train, test):
        planes = RNG.integers(0, 256, (4, 3072), np.uint8)
        batch = {b"data": planes, key: [1, 2, 3, 4], b"filenames": [b"x.png"] * 4}
        (tmp_path / folder / name).write_bytes(write(batch))
        pixels.append(planes)
    found = read_pictures(tmp_path / folder if inside else tmp_path)
    assert found["train"].pixels.shape == (4 * len(train), 32, 32, 3)
    assert found["train"].labels.tolist() == [1, 2, 3, 4] * len(train)
    last = pixels[-1].reshape(4, 3, 32, 32)
    assert (found["test"].pixels[2, 5, 7] == last[2, :, 5, 7]).all()


class Evil:
    def __reduce__(self):
        return os.system, ("touch broken-in",)


def test_what_a_pickle_wants_to_run_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps({b"data": Evil(), b"fine_labels": [1]}))
    with pytest.raises(ValueError, match=r"wants to run (posix|nt)\.system, which no batch needs"):
        read_pictures(tmp_path)
    assert not (tmp_path / "broken-in").exists()


def test_damage_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no picture set: neither train-images.* nor cifar"):
        read_pictures(tmp_path)
    write_idx(tmp_path)
    path = tmp_path / f"{IDX[0]}.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        read_pictures(tmp_path)
    for content in (
        b"",
        b"\0\0\x08",
        idx(np.zeros((7, 28, 27), np.uint8)),
        gzip.decompress(whole)[:-1],
    ):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=r"is damaged: no IDX file of \(N, 28, 28\)"):
            read_pictures(tmp_path)
    path.write_bytes(gzip.compress(idx(np.zeros((6, 28, 28), np.uint8))))
    with pytest.raises(ValueError, match="6 pictures and 7 labels of train"):
        read_pictures(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="holds no picture set"):
        read_pictures(tmp_path)
    path.write_bytes(whole)
    (tmp_path / f"{IDX[3]}.gz").unlink()
    with pytest.raises(ValueError, match="lacks t10k-labels-idx1-ubyte"):
        read_pictures(tmp_path)
