"""Checkpoints: whole or not there, whenever the run is killed, in one file or in pieces."""

import os
import signal

import pytest
import torch

from fastattn.lra import checkpoints
from fastattn.lra.checkpoints import CheckpointFiles, read_checkpoint


def checkpoint(step, size=1000):
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(size, generator=generator)
    return {"fastattn": {}, "state_dict": {"w": weights}, "global_step": step}


def assert_is(path, step):
    got = read_checkpoint(path)
    assert got["global_step"] == step
    assert torch.equal(got["state_dict"]["w"], checkpoint(step)["state_dict"]["w"])


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(checkpoints, "PIECE", 1500)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_checkpoint_comes_back_and_leaves_nothing_of_the_last(tmp_path, pieces, small_pieces):
    files, path = CheckpointFiles(pieces=pieces), tmp_path / "c" / "last.ckpt"
    for step in range(3):
        files.save_checkpoint(checkpoint(step), path)
        assert_is(path, step)
        assert files.load_checkpoint(path)["global_step"] == step
    assert len(list(path.parent.iterdir())) == (5 if pieces else 1)
    files.save_checkpoint(checkpoint(3), path.with_name("best.ckpt"))
    files.remove_checkpoint(path)
    assert_is(path.with_name("best.ckpt"), 3)
    files.remove_checkpoint(path.with_name("best.ckpt"))
    assert not list(path.parent.iterdir())


def test_no_piece_is_larger_than_16_mb(tmp_path):
    path = tmp_path / "last.ckpt"
    CheckpointFiles(pieces=True).save_checkpoint(checkpoint(1, size=9_000_000), path)
    sizes = sorted(file.stat().st_size for file in tmp_path.iterdir())
    assert len(sizes) == 4
    assert sizes[-1] == 16_000_000
    assert read_checkpoint(path)["state_dict"]["w"].shape == (9_000_000,)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_kill_at_any_point_of_writing_leaves_a_checkpoint_that_loads(
    tmp_path, pieces, small_pieces, monkeypatch
):
    # the process is killed before the n-th call that touches the disk, for every n there is
    files, path = CheckpointFiles(pieces=pieces), tmp_path / "last.ckpt"
    files.save_checkpoint(checkpoint(1), path)
    steps = []
    for fatal in range(1, 100):
        child = os.fork()
        if child == 0:
            _die_at(fatal)
            files.save_checkpoint(checkpoint(2), path)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        steps.append(read_checkpoint(path)["global_step"])
        assert_is(path, steps[-1])
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        if steps[-1] == 2:
            files.save_checkpoint(checkpoint(1), path)
    assert len(steps) > (10 if pieces else 2)
    assert steps[0] == 1
    assert steps[-1] == 2
    files.save_checkpoint(checkpoint(3), path)  # and what a kill has left behind goes
    assert len(list(tmp_path.iterdir())) == (5 if pieces else 1)


def _die_at(fatal):
    calls = [0]

    def counted(call):
        def wrapped(*arguments, **options):
            calls[0] += 1
            if calls[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return wrapped

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def test_damage_is_one_sentence(tmp_path, small_pieces):
    path = tmp_path / "last.ckpt"
    CheckpointFiles(pieces=True).save_checkpoint(checkpoint(1), path)
    piece = sorted(tmp_path.glob("last.ckpt.*"))[1]
    whole = piece.read_bytes()
    for damage in (whole[:-1], bytes(len(whole)), None):
        piece.unlink()
        if damage is not None:
            piece.write_bytes(damage)
        with pytest.raises(ValueError, match=r"last.ckpt is damaged or no checkpoint of ours"):
            read_checkpoint(path)
        piece.touch()
    torch.save({"state_dict": {}}, path)
    with pytest.raises(ValueError, match="not written by fastattn"):
        read_checkpoint(path)
