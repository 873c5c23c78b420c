"""Image: both public layouts of CIFAR-10, and a pickle that may build arrays and nothing else."""

from __future__ import annotations

import gzip
import json
import os
import pickle

import numpy as np
import pytest
from PIL import Image as Pillow
from test_pictures import PICKLES

from fastattn.lra.data import collate
from fastattn.lra.protocols import PROTOCOLS
from fastattn.lra.tasks import stand_in_images
from fastattn.lra.tasks.image import IMAGE, grey

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def pictures(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072)).astype(np.uint8), np.arange(n) % 10


def write_pickles(root, write=pickle.dumps, n=20):
    root.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(NAMES):
        data, labels = pictures(n, i)
        batch = {b"batch_label": b"a batch", b"labels": labels.tolist(), b"data": data}
        batch[b"filenames"] = [b"x.png"] * n
        (root / name).write_bytes(write(batch))
    return root


def write_binary(root, n=20):
    root.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(NAMES):
        data, labels = pictures(n, i)
        rows = np.concatenate([labels[:, None].astype(np.uint8), data], 1)
        (root / f"{name}.bin").write_bytes(rows.tobytes())
    return root


def fingerprints(data):
    return {name: split.fingerprint() for name, split in data.items()}


@pytest.mark.parametrize("write", PICKLES.values(), ids=PICKLES)
def test_pickled_and_binary_batches_are_the_same_data(tmp_path, write):
    write_pickles(tmp_path / "py/cifar-10-batches-py", write)
    write_binary(tmp_path / "bin/cifar-10-batches-bin")
    one, other = IMAGE.load(tmp_path / "py"), IMAGE.load(tmp_path / "bin")
    assert fingerprints(one) == fingerprints(other)
    assert {name: len(split) for name, split in one.items()} == {
        "train": 90, "val": 10, "test": 20,
    }  # fmt: skip
    assert "train has 100, not 50000; test has 20, not 10000" in one.record["notes"][0]
    last = pictures(20, 4)[0][10:]
    assert one["val"].sample(0).tolist() == grey(last[:1])[0].tolist()


def test_an_id_is_a_grey_level_for_good():
    assert IMAGE.vocabulary.ids["grey 200"] == 200
    assert IMAGE.vocabulary.hash == "d39f98df658f3a36"


def test_a_grey_level_is_rounded_and_lra2020_says_that_its_source_cuts_off():
    faint = np.zeros((1, 3072), np.uint8)
    faint[0, 0] = 2  # of red: 0.598
    assert grey(faint)[0, 0] == 1
    assert "grey levels are rounded" in PROTOCOLS["lra2020"].differs


def test_grey_is_what_pillow_makes():
    data, _ = pictures(50, 0)
    planes = data.reshape(50, 3, 32, 32).transpose(0, 2, 3, 1)
    for picture, ours in zip(planes, grey(data), strict=True):
        want = np.asarray(Pillow.fromarray(np.ascontiguousarray(picture)).convert("L"))
        assert (want.ravel() == ours).all()


class Malice:
    def __reduce__(self):
        return os.mkdir, ("/tmp/fastattn-malice",)


@pytest.mark.parametrize("content", [Malice(), {b"data": Malice(), b"labels": [0]}])
def test_a_pickle_runs_nothing(tmp_path, content):
    write_pickles(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=r"data_batch_3 .*wants to run posix\.mkdir"):
        IMAGE.load(tmp_path)
    assert not os.path.exists("/tmp/fastattn-malice")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no pickled batch"),
        (b"<html>not found</html>", "no pickled batch"),
        (pickle.dumps([1, 2]), "data_batch_3"),
        (pickle.dumps({b"data": np.zeros((2, 9), np.uint8), b"labels": [0, 1]}), r"\(2, 9\)"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}), "0 to 9"),
        (pickle.dumps({b"labels": [0]}), "'data'"),
    ],
)
def test_a_damaged_batch_is_one_sentence(tmp_path, content, message):
    write_pickles(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        IMAGE.load(tmp_path)


def test_missing_and_cut_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"data_batch_1, .* test_batch"):
        IMAGE.load(tmp_path)
    write_binary(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: expected rows of 3073 bytes"):
        IMAGE.load(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks data_batch_2\.bin"):
        IMAGE.load(tmp_path)


def test_a_black_picture_is_1024_tokens(tmp_path):
    write_binary(tmp_path)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(bytes(3073) + path.read_bytes())
    batch = collate(IMAGE.load(tmp_path)["test"], np.array([0, 1]))
    assert batch.lengths.tolist() == [1024, 1024]
    assert not batch.tokens[0].any()


def test_a_stand_in_is_the_seed_and_says_what_it_is(tmp_path):
    sizes = {"num_train": 30, "num_val": 10, "num_test": 20}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        IMAGE.generate(tmp_path / name, seed=seed, **sizes)
    a, b, c = (IMAGE.load(tmp_path / name) for name in "abc")
    assert fingerprints(a) == fingerprints(b) != fingerprints(c)
    assert [len(a[name]) for name in ("train", "val", "test")] == [30, 10, 20]
    assert np.bincount(a["test"].labels).tolist() == [2] * 10
    assert "drawn shapes" in a.record["stand_in"]
    IMAGE.generate(tmp_path / "d", num_train=2000, num_val=10, num_test=20)
    assert IMAGE.load(tmp_path / "d")["test"].fingerprint() == a["test"].fingerprint()


def test_no_mean_grey_tells_what_a_drawn_picture_shows():
    drawn, labels = stand_in_images.draw(0, 4000, seed=0)
    mean = drawn.mean((1, 2))
    of_class = np.array([mean[labels == i].mean() for i in range(10)])
    guess = abs(mean[:, None] - of_class).argmin(1)
    assert (guess == labels).mean() < 0.2
    assert (drawn[10:20] == stand_in_images.draw(10, 10, seed=0)[0]).all()


def write_fashion(root, kind="u1", name="train", n=40):
    root.mkdir(exist_ok=True)
    rng = np.random.default_rng(len(name))
    images = rng.integers(0, 256, (n, 28, 28)).astype(np.uint8)
    head = bytes((0, 0, 8, 3)) + np.array([n, 28, 28], ">u4").tobytes()
    (root / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + images.tobytes()))
    labels = (np.arange(n) % 10).astype(np.uint8)
    head = bytes((0, 0, 8, 1)) + np.array([n], ">u4").tobytes()
    (root / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(head + labels.tobytes()))
    return images


def test_fashion_mnist_is_padded_with_black(tmp_path):
    train = write_fashion(tmp_path / "in")
    write_fashion(tmp_path / "in", name="t10k", n=20)
    IMAGE.generate(tmp_path / "out", source=tmp_path / "in")
    data = IMAGE.load(tmp_path / "out")
    assert [len(data[name]) for name in ("train", "val", "test")] == [36, 4, 20]
    picture = data["val"].sample(0).reshape(32, 32)
    assert (picture[2:30, 2:30] == train[36]).all()
    assert picture.sum() == train[36].sum()
    assert "Fashion-MNIST" in json.loads((tmp_path / "out/generated.json").read_text())["stand_in"]
    (tmp_path / "in/t10k-labels-idx1-ubyte.gz").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"t10k-labels.*is damaged"):
        IMAGE.generate(tmp_path / "more", source=tmp_path / "in")
    with pytest.raises(ValueError, match=r"holds no picture set: neither train-images"):
        IMAGE.generate(tmp_path / "more", source=tmp_path / "out")
