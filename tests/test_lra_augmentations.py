"""Augmented pictures: the eight positions are a group, a picture has few of them, labels hold."""

import time
from dataclasses import replace

import numpy as np
import pytest

from fastattn.lra.augmentations import GreyPolicy, SomeTurns, augmentation, squares, turned
from fastattn.lra.cli import main
from fastattn.lra.data import BatchStream, Split
from fastattn.lra.loading import Shares, loader
from fastattn.lra.recipes import SMOKE
from fastattn.lra.tasks import TASKS


def pictures(b=20, side=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (b, side, side)).astype(np.uint8)


def apply(augment, batch, step=0):
    offsets = np.arange(len(batch) + 1) * batch[0].size
    out = augment(batch.ravel(), offsets, np.random.default_rng(step))
    assert out.dtype == np.uint8
    return squares(out, offsets)


def test_the_eight_elements_are_all_flips_and_rotations():
    (picture,) = pictures(1, side=5)
    made = {turned(picture[None], np.array([e])).tobytes() for e in range(8)}
    want = {np.rot90(p, k).tobytes() for p in (picture, picture.T) for k in range(4)}
    assert made == want
    assert len(want) == 8


def test_every_picture_of_a_batch_has_its_own_element():
    batch = pictures(8)
    together = turned(batch, np.arange(8)[::-1])
    for i, picture in enumerate(batch):
        assert np.array_equal(together[i], turned(picture[None], np.array([7 - i]))[0])


@pytest.mark.parametrize("elements", [2, 4, 8])
def test_a_picture_has_so_many_positions_and_no_more(elements):
    (picture,) = pictures(1)
    augment = SomeTurns(elements, seed=3)
    seen = {apply(augment, picture[None], step).tobytes() for step in range(200)}
    assert len(seen) == elements
    assert picture.tobytes() in seen


def test_positions_follow_from_the_picture_and_the_seed_alone():
    batch = pictures(300)
    own = SomeTurns(4, seed=1).of(batch)
    assert np.array_equal(SomeTurns(4, seed=1).of(batch[::-1]), own[::-1])
    assert not np.array_equal(SomeTurns(4, seed=2).of(batch), own)
    assert all(len(set(row)) == 4 and row[0] == 0 for row in own)
    times = np.bincount(own.ravel(), minlength=8)[1:]  # each of 7, with 3 in 7 of the pictures
    assert abs(times - 300 * 3 / 7).max() < 5 * np.sqrt(300 * 3 / 7 * 4 / 7)


def test_the_grey_policy_without_its_chances_is_a_crop_or_its_mirror():
    batch = pictures(40)
    out = apply(GreyPolicy(contrast=0, brightness=0, patch=0), batch)
    found = set()
    for picture, got in zip(batch, out, strict=True):
        padded = [np.pad(p, 4) for p in (picture, picture[:, ::-1])]
        crops = {
            (m, r, c): padded[m][r : r + 32, c : c + 32]
            for m in range(2) for r in range(9) for c in range(9)
        }  # fmt: skip
        found.add(next(key for key, crop in crops.items() if np.array_equal(crop, got)))
    assert {m for m, _, _ in found} == {0, 1}
    assert len(found) > 30


def test_the_grey_policy_keeps_a_mean_grey_and_hides_one_patch():
    batch = np.full((400, 32, 32), 100, np.uint8)
    batch[:, ::2] = 140
    out = apply(GreyPolicy(reach=0, brightness=0, contrast=0), batch)
    hidden = (out == 120).sum((1, 2))
    assert hidden.max() == 64
    assert 120 < (hidden > 0).sum() < 280
    out = apply(GreyPolicy(reach=0, patch=0), np.full((400, 32, 32), 120, np.uint8)).astype(int)
    assert (out == out[:, :1, :1]).all()
    assert 51 >= abs(out[:, 0, 0] - 120).max() > 45
    assert 120 < (out[:, 0, 0] != 120).sum() < 280


def test_a_batch_is_augmented_in_milliseconds():
    batch = pictures(128)
    for augment in (SomeTurns(), GreyPolicy()):
        apply(augment, batch)
        began = time.perf_counter()
        apply(augment, batch)
        assert time.perf_counter() - began < 0.1


def test_a_step_is_augmented_alike_by_any_number_of_processes():
    x = pictures(12)
    split = Split.of(list(x.reshape(12, -1)), [0] * 12)
    augment = augmentation(TASKS["image"], replace(SMOKE, augment="d4 grey"))
    here, there = (
        [share.batch.tokens for share in loader(Shares(stream, 0, 1), range(6), workers)]
        for workers in (0, 2)
        for stream in [BatchStream(split, 4, seed=1, augment=augment)]
    )
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
    assert not np.array_equal(here[0], here[3])


def test_true_and_false_are_what_they_were():
    task = TASKS["listops"]
    assert augmentation(task, SMOKE) is task.augment
    assert augmentation(task, replace(SMOKE, augment=False)) is None


@pytest.mark.parametrize(
    ("task", "augment", "message"),
    [
        ("listops", "d4", "d4 is for pictures, and listops has none"),
        ("pathfinder", "grey", "grey would change what pathfinder asks for: take d4"),
        ("image", "d4:elements=9", "elements must be 2 to 8"),
        ("image", "d4:k=2", "options of d4 are elements, got 'k'"),
        ("image", "d4:elements=x", "options of d4 do not fit"),
        ("image", "rotate", "augment must be true, false, or names of d4, grey"),
        ("image", "", "augment must be true, false, or names of d4, grey"),
    ],
)
def test_what_does_not_fit_the_task_is_an_error(task, augment, message):
    with pytest.raises(ValueError, match=message):
        augmentation(TASKS[task], replace(SMOKE, augment=augment))


def test_other_than_squares_are_an_error():
    with pytest.raises(ValueError, match="squares of one size"):
        squares(np.zeros(8, np.uint8), np.array([0, 4, 7]))


def test_the_command_trains_with_it(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "run"
    TASKS["pathfinder"].generate(data, num_train=8, num_val=2, num_test=2)
    words = f"fit --task pathfinder --data-dir {data} --mixer conv --max-steps 1 --workers 0"
    assert main([*words.split(), "--out", str(out), "--augment", "d4"]) == 0
    assert '"augment": "d4"' in (out / "result.json").read_text()
    assert main([*words.split(), "--out", str(tmp_path / "b"), "--augment", "grey"]) == 2
    assert "take d4" in capsys.readouterr().err
