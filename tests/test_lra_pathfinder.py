"""Pathfinder and Path-X: every layout in circulation, no row lost, no stale pixel."""

from __future__ import annotations

import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from fastattn import _native
from fastattn.lra import files as lra_files
from fastattn.lra.data import BatchStream
from fastattn.lra.protocols import PROTOCOLS
from fastattn.lra.tasks import pathfinder, pathfinder_files
from fastattn.lra.tasks.pathfinder import PATHFINDER, PATHX
from fastattn.lra.tasks.pathfinder_files import SETS

PER_FILE = 25
DRAWN = ["1.0", "6", "2", "2", "0.5", "1", "1"]


def write_set(folder, files=2, side=32, *, binary=False, seed=0):
    """Images of random grey, 25 to a file of metadata; the label is whether pixel 0 is odd."""
    rng = np.random.default_rng(seed)
    (folder / "metadata").mkdir(parents=True)
    for b in range(files):
        (folder / "imgs" / str(b)).mkdir(parents=True)
        rows = []
        for i in range(PER_FILE):
            pixels = rng.integers(0, 256, (side, side)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"imgs/{b}/sample_{i}.png")
            label = str(pixels[0, 0] % 2)
            rows.append(
                [
                    f"imgs/{b}",
                    f"sample_{i}.png",
                    str(i),
                    label,
                    *["1.0", "6", "2", "2", "0.5", "1", "1"],
                ]
            )
        path = folder / f"metadata/{b}.npy"
        if binary:
            np.save(path, np.array(rows))
        else:  # without a newline at the end
            path.write_text("\n".join(" ".join(row) for row in rows))
    return folder


def fingerprints(data):
    return {name: split.fingerprint() for name, split in data.items()}


@pytest.fixture
def hard(tmp_path):
    return write_set(tmp_path / "pathfinder32" / SETS["hard"])


def sizes(data):
    return [len(data[name]) for name in ("train", "val", "test")]


def test_every_row_is_a_sample_and_the_splits_are_slices(tmp_path, hard):
    data = PATHFINDER.load(tmp_path)
    assert sizes(data) == [40, 5, 5]
    assert data["train"].lengths.tolist() == [1024] * 40
    for split in data.values():
        assert all(split.sample(i)[0] % 2 == split.labels[i] for i in range(len(split)))
    first = np.asarray(Image.open(hard / "imgs/0/sample_0.png")).ravel()
    last = np.asarray(Image.open(hard / "imgs/1/sample_24.png")).ravel()
    assert (data["train"].sample(0) == first).all()
    assert (data["test"].sample(4) == last).all()
    assert data.record["difficulty"] == "hard"
    assert not data.record["generated"]
    assert f"{SETS['hard']} has 50, not 200000" in data.record["notes"][0]


def test_metadata_in_text_and_in_numpys_format_is_the_same(tmp_path, hard):
    write_set(tmp_path / "other/pathfinder32" / SETS["hard"], binary=True)
    one, other = PATHFINDER.load(tmp_path), PATHFINDER.load(tmp_path / "other")
    assert fingerprints(one) == fingerprints(other)


def test_a_pickled_array_is_refused(tmp_path, hard):
    np.save(hard / "metadata/1.npy", np.array([["imgs/1", {}]], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"1\.npy: Object arrays cannot be loaded"):
        PATHFINDER.load(tmp_path)


def test_ten_files_come_in_the_order_of_their_numbers(tmp_path):
    folder = write_set(tmp_path / "pathfinder32" / SETS["hard"], files=11)
    names = [path.name for path in pathfinder_files._metadata(folder)]
    assert names == [f"{b}.npy" for b in range(11)]


@pytest.mark.parametrize("depth", ["", "lra_release/", "lra_release/lra_release/"])
def test_a_root_at_any_depth_is_found_and_named(tmp_path, depth):
    folder = write_set(tmp_path / f"{depth}pathfinder32" / SETS["hard"])
    for root in (tmp_path, folder.parent, folder.parent.parent):
        assert PATHFINDER.load(root).record["folder"] == str(folder)


def test_of_two_copies_one_is_read_and_said_which(tmp_path):
    for depth in ("lra_release", "lra_release/lra_release"):
        write_set(tmp_path / depth / "pathfinder128" / SETS["hard"], files=1, side=128)
    data = PATHX.load(tmp_path)
    notes = data.record["notes"]
    assert f"2 copies: {tmp_path}/lra_release/pathfinder128 was read" in notes[0]
    assert sizes(data) == [20, 2, 3]
    assert data["test"].lengths.tolist() == [16384] * 3


def test_an_empty_image_anywhere_is_skipped_and_counted(tmp_path, hard):
    (hard / "imgs/1/sample_3.png").write_bytes(b"")
    data = PATHFINDER.load(tmp_path)
    assert sizes(data) == [39, 5, 5]
    assert data.record["empty_images"] == 1
    assert "1 empty image skipped" in data.record["notes"]
    assert all(x.sample(i)[0] % 2 == x.labels[i] for x in data.values() for i in range(len(x)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("imgs/0/sample_7.png", None, "lacks imgs/0/sample_7.png, which 0.npy names"),
        ("imgs/0/sample_7.png", b"\x89PNG half", r"sample_7\.png is damaged"),
        (
            "imgs/0/sample_7.png",
            (8, 32),
            "32 x 32 pixels expected, got 32 x 8",
        ),
        ("metadata/0.npy", b"imgs/0 sample_0.png 0 2\n", "row 1 must be a folder, a file"),
        ("metadata/0.npy", b"../imgs/0 sample_0.png 0 1\n", "row 1 must be a folder, a file"),
        ("metadata/0.npy", b"imgs/7 sample_0.png 0 1\n", "lacks imgs/7"),
        ("metadata/0.npy", b"\x93NUMPY", r"0\.npy: "),
    ],
)
def test_damage_is_one_sentence_with_the_file(tmp_path, hard, name, content, message):
    path = hard / name
    if content is None:
        path.unlink()
    elif isinstance(content, tuple):
        Image.fromarray(np.zeros(content, np.uint8)).save(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PATHFINDER.load(tmp_path)


def test_a_set_that_is_not_there_is_named_with_those_that_are(tmp_path):
    write_set(tmp_path / "pathfinder32" / SETS["easy"])
    with pytest.raises(ValueError, match=r"curv_contour_length_14 \(hard\).*it has easy"):
        PATHFINDER.load(tmp_path)
    with pytest.raises(ValueError, match=r"pathfinder128/curv_\*"):
        PATHX.load(tmp_path)
    assert PATHFINDER.load(tmp_path, "easy").record["difficulty"] == "easy"


# Protocols


@pytest.mark.parametrize(("difficulty", "contour"), [("easy", "6"), ("intermediate", "9")])
def test_path_x_has_the_easier_sets_as_well(tmp_path, difficulty, contour):
    PATHFINDER.generate(tmp_path, n=20, size=128, difficulty=difficulty)
    with pytest.raises(ValueError, match=rf"it has {difficulty}: a protocol for one set is"):
        PATHX.load(tmp_path)
    data = PATHX.load(tmp_path, difficulty)
    assert sizes(data) == [16, 2, 2]
    assert data["test"].lengths.tolist() == [16384] * 2
    known = {"protocol": difficulty, "difficulty": difficulty, "size": 128, "generated": True}
    assert data.record.items() >= known.items()
    assert data.record["generator"]["difficulty"] == difficulty
    metadata = tmp_path / "pathfinder128" / SETS[difficulty] / "metadata/0.npy"
    assert metadata.read_text().split()[5] == contour


def test_path_x_of_the_dial_is_read_as_the_hard_set(tmp_path):
    PATHX.generate(tmp_path, n=10, ease=0.5)
    record = PATHX.load(tmp_path).record
    assert (record["difficulty"], record["generator"]["ease"]) == ("hard", 0.5)


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS.keys() - {"easy", "intermediate"}))
def test_path_x_is_the_hard_set_under_every_other_protocol(protocol):
    assert PATHX.sets(PROTOCOLS[protocol]) == ("hard",)


def test_slides_reads_the_easy_set_in_70_15_15(tmp_path):
    write_set(tmp_path / "pathfinder32" / SETS["easy"], files=4)
    data = PATHFINDER.load(tmp_path, "slides")
    assert sizes(data) == [70, 15, 15]
    assert data.record["difficulty"] == "easy"
    assert data.record["protocol"] == "slides"


def test_locality_trains_on_three_sets_and_tests_on_the_hard_one(tmp_path):
    for seed, name in enumerate(SETS.values()):
        write_set(tmp_path / "pathfinder32" / name, seed=seed)
    data, hard = PATHFINDER.load(tmp_path, "locality"), PATHFINDER.load(tmp_path)
    assert sizes(data) == [120, 5, 5]
    assert data["test"].fingerprint() == hard["test"].fingerprint()
    assert data["train"].slice(80, 120).fingerprint() == hard["train"].fingerprint()
    assert data.record["difficulty"] == "easy + intermediate + hard"
    assert not [note for note in data.record["notes"] if note.startswith("trained on")]


def test_locality_says_where_an_easier_set_has_too_few_images(tmp_path):
    for name, files in zip(SETS.values(), (1, 2, 2), strict=True):
        write_set(tmp_path / "pathfinder32" / name, files=files)
    data = PATHFINDER.load(tmp_path, "locality")
    assert sizes(data) == [25 + 40 + 40, 5, 5]
    (note,) = [note for note in data.record["notes"] if note.startswith("trained on")]
    assert note == "trained on all 25 images of curv_baseline, not on 40: it has no more"


# The cache


def test_a_second_load_decodes_nothing_and_maps_the_file(tmp_path, hard, monkeypatch):
    first = PATHFINDER.load(tmp_path)
    monkeypatch.setattr(pathfinder_files, "_decode", None)
    second = PATHFINDER.load(tmp_path)
    assert fingerprints(first) == fingerprints(second)
    assert isinstance(second["train"].tokens, np.memmap)
    (cache,) = hard.glob(".fastattn-*")
    assert cache.suffix == ".npy"


def test_no_change_of_an_image_goes_unseen(tmp_path, hard):
    before = PATHFINDER.load(tmp_path)
    path = hard / "imgs/0/sample_0.png"
    stat = path.stat()
    pixels = np.asarray(Image.open(path)).copy()
    content = path.read_bytes()
    pixels[5, 5] ^= 1
    Image.fromarray(pixels).save(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = PATHFINDER.load(tmp_path)
    assert changed["train"].sample(0)[5 * 32 + 5] == pixels[5, 5]
    assert changed["train"].fingerprint() != before["train"].fingerprint()
    path.write_bytes(content)
    assert fingerprints(PATHFINDER.load(tmp_path)) == fingerprints(before)
    assert len(list(hard.glob(".fastattn-*"))) == 1


def test_a_damaged_cache_is_made_anew(tmp_path, hard):
    before = fingerprints(PATHFINDER.load(tmp_path))
    (cache,) = hard.glob(".fastattn-*")
    for content in (cache.read_bytes()[:300], b""):
        cache.write_bytes(content)
        assert fingerprints(PATHFINDER.load(tmp_path)) == before


def test_a_folder_that_cannot_be_written_is_read_without_a_cache(tmp_path, hard, monkeypatch):
    before = PATHFINDER.load(tmp_path)
    for cache in hard.glob(".fastattn-*"):
        cache.unlink()

    def full(file, block):
        raise OSError("No space left on device")

    monkeypatch.setattr(pathfinder_files, "_write", full)
    assert fingerprints(PATHFINDER.load(tmp_path)) == fingerprints(before)
    assert not list(hard.glob(".fastattn-*"))


def test_a_mapped_split_travels_as_its_place_in_the_file(tmp_path):
    write_set(tmp_path / "pathfinder32" / SETS["hard"], files=8)
    for split in PATHFINDER.load(tmp_path).values():
        packed = pickle.dumps(BatchStream(split, 4, seed=0))
        assert len(packed) < split.tokens.nbytes / 4
        assert pickle.loads(packed).split.fingerprint() == split.fingerprint()


# The generator


def tree(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".fastattn")
    }


def test_the_public_layout_is_written_byte_for_byte_from_the_seed(tmp_path):
    for name in "ab":
        PATHFINDER.generate(tmp_path / name, n=20, difficulty="easy")
    folder = tmp_path / "a/pathfinder32/curv_baseline"
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    row = (folder / "metadata/0.npy").read_text().splitlines()[3].split()
    assert row[:3] == ["imgs/0", "sample_3.png", "3"]
    assert row[4:] == DRAWN
    data = PATHFINDER.load(tmp_path / "a", "easy")
    assert sizes(data) == [16, 2, 2]
    assert data.record["generated"]
    made = {"size": 32, "difficulty": "easy", "ease": None, "seed": 0}
    assert data.record["generator"].items() >= made.items()
    assert all(split.tokens.max() == 255 for split in data.values())
    PATHFINDER.generate(tmp_path / "a", n=10, difficulty="hard")  # beside the other set
    with pytest.raises(ValueError, match="is not empty"):
        PATHFINDER.generate(tmp_path / "a", n=10, difficulty="hard")


def test_another_size_is_read_where_there_is_no_32(tmp_path):
    PATHFINDER.generate(tmp_path, n=10, size=64)
    for root in (tmp_path, tmp_path / "pathfinder64"):
        data = PATHFINDER.load(root)
        assert data["test"].lengths.tolist() == [4096]
        assert data.record["size"] == 64
    PATHFINDER.generate(tmp_path, n=10, size=32)
    assert PATHFINDER.load(tmp_path).record["size"] == 32
    PATHFINDER.generate(tmp_path / "x", n=10, size=128)
    with pytest.raises(ValueError, match=r"pathfinder32/curv_\*"):
        PATHFINDER.load(tmp_path / "x")
    assert PATHX.load(tmp_path / "x").record["size"] == 128


def test_the_test_set_does_not_depend_on_the_size_of_the_training_set(tmp_path, monkeypatch):
    monkeypatch.setattr("fastattn.lra.tasks.pathfinder.PER_FILE", 7)
    counts = {"num_val": 3, "num_test": 5}
    PATHFINDER.generate(tmp_path / "a", num_train=11, **counts, difficulty="easy")
    PATHFINDER.generate(tmp_path / "b", num_train=20, **counts, difficulty="easy")
    a, b = (PATHFINDER.load(tmp_path / name, "easy") for name in "ab")
    assert sizes(a) == [11, 3, 5]
    assert a["test"].fingerprint() == b["test"].fingerprint()
    assert a["val"].fingerprint() == b["val"].fingerprint()
    assert a["train"].fingerprint() == b["train"].take(11).fingerprint()


def test_without_the_native_part_processes_draw_the_same_files(tmp_path, monkeypatch):
    pools, pool, several = [], lra_files.ProcessPoolExecutor, os.cpu_count() + 1
    monkeypatch.setattr(lra_files, "ProcessPoolExecutor", lambda n: pools.append(n) or pool(n))
    monkeypatch.setattr(pathfinder, "PER_FILE", 8)
    whole = []
    for name, workers in (("native", several), ("one", 1), ("several", several)):
        PATHFINDER.generate(tmp_path / name, n=40, workers=workers, difficulty="easy")
        monkeypatch.setattr(_native, "load", lambda: (None, "it was not built"))
        paths = [
            p for end in ("imgs/*/*.png", "metadata/*.npy") for p in (tmp_path / name).rglob(end)
        ]
        assert len(paths) == 5 + 40
        whole.append({p.relative_to(tmp_path / name): p.read_bytes() for p in paths})
    assert whole[0] == whole[1] == whole[2]
    assert pools.count(several) == 1  # what was written is read by a process a core


def test_what_was_generated_and_then_changed_is_noticed(tmp_path):
    PATHFINDER.generate(tmp_path, n=20, difficulty="easy")
    folder = tmp_path / "pathfinder32/curv_baseline"
    shutil.copy(folder / "imgs/0/sample_1.png", folder / "imgs/0/sample_0.png")
    with pytest.raises(ValueError, match="content of train is no longer what was generated"):
        PATHFINDER.load(tmp_path, "easy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 9}, "num_val must be at least 1, got 0"),
        ({"n": 100, "num_test": 3}, "n is the number of all images"),
        ({"n": 100, "size": 31}, "size must be 32, 64, 128 or 256, got 31"),
        ({"n": 100, "difficulty": "mild"}, "difficulty must be one of"),
        ({"n": 100, "ease": 1.0}, "ease is a dial of 128 pixels"),
        ({"n": 100, "seed": -1}, "seed must not be negative"),
    ],
)
def test_bad_numbers_raise_and_leave_nothing(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        PATHFINDER.generate(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
