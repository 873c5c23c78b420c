"""What every task shares: batches that waste little, and a step that always means one batch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastattn.lra.data import (
    BatchStream,
    Split,
    Vocabulary,
    collate,
    evaluation_batches,
    length_buckets,
)
from fastattn.lra.files import in_order, write_files


def _split(n: int, low: int = 1, high: int = 40, seed: int = 0) -> Split:
    """Random samples with zeros in them; the label is the sample's own number."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high, n)
    samples = [rng.integers(0, 4, length).astype(np.uint8) for length in lengths]
    return Split.of(samples, range(n))


def speckle(tokens, offsets, rng):
    """An augmentation that shows which tokens it was given, and its randomness."""
    return np.where(rng.random(len(tokens)) < 0.5, tokens + 100, tokens).astype(np.uint8)


def _equal(a, b) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _padding(split: Split, batches) -> float:
    """Share of the batches' tokens that is padding."""
    size = sum(len(index) * int(split.lengths[index].max()) for index in batches)
    return 1 - len(split.tokens) / size


def test_a_vocabulary_is_its_order():
    vocabulary = Vocabulary(("<pad>", "a", "b"))
    assert len(vocabulary) == 3
    assert vocabulary.encode(["b", "a", "b"]).tolist() == [2, 1, 2]
    assert vocabulary.encode(["b"]).dtype == np.uint8
    assert vocabulary.hash == Vocabulary(("<pad>", "a", "b")).hash
    assert vocabulary.hash != Vocabulary(("<pad>", "b", "a")).hash


def test_an_unknown_or_ambiguous_token_raises():
    with pytest.raises(ValueError, match="unknown token 'c'"):
        Vocabulary(("<pad>", "a")).encode(["a", "c"])
    with pytest.raises(ValueError, match="distinct"):
        Vocabulary(("<pad>", "a", "a"))
    with pytest.raises(ValueError, match="1 to 256 strings"):
        Vocabulary(tuple(map(str, range(257))))


def test_a_split_gives_back_its_samples():
    split = Split.of([np.array(x, np.uint8) for x in ([1, 2], [3], [], [4, 0])], [7, 8, 9, 6])
    assert [split.sample(i).tolist() for i in range(4)] == [[1, 2], [3], [], [4, 0]]
    assert split.sample(-1).tolist() == [4, 0]
    assert split.lengths.tolist() == [2, 1, 0, 2]
    part = split.slice(1, 4)
    assert [part.sample(i).tolist() for i in range(3)] == [[3], [], [4, 0]]
    assert part.labels.tolist() == [8, 9, 6]
    assert len(split.take(2)) == 2
    assert len(split.take(99)) == 4
    with pytest.raises(IndexError):
        split.sample(4)


def test_a_sample_of_two_documents_keeps_them_together():
    documents = [np.array(x, np.uint8) for x in ([1], [2, 3, 4], [5, 6], [7], [8], [])]
    split = Split.of(documents, [7, 8, 9], parts=2)
    assert len(split) == 3
    assert split.lengths.tolist() == [3, 2, 1]
    assert split.document_lengths.tolist() == [1, 3, 2, 1, 1, 0]
    assert split.sample(1).tolist() == [5, 6, 7]
    assert split.document(3).tolist() == [7]
    part = split.slice(1, 3)
    assert [part.sample(i).tolist() for i in range(2)] == [[5, 6, 7], [8]]
    batch = collate(split, np.array([1, 0]))
    assert batch.tokens.tolist() == [[5, 6, 0], [7, 0, 0], [1, 0, 0], [2, 3, 4]]
    assert batch.lengths.tolist() == [2, 1, 1, 3]
    assert batch.labels.tolist() == [8, 7]
    assert BatchStream(split, 3, seed=0)[0].tokens.shape == (6, 3)


def test_a_split_that_does_not_add_up_raises():
    tokens, labels = np.zeros(5, np.uint8), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=r"\(2 N \+ 1,\) for N = 2 labels, got shape \(3,\)"):
        Split(tokens, np.array([0, 2, 5]), labels, parts=2)
    with pytest.raises(ValueError, match="parts must be at least 1, got 0"):
        Split(tokens, np.array([0, 2, 5]), labels, parts=0)
    with pytest.raises(ValueError, match=r"\(N \+ 1,\) for N = 2 labels, got shape \(2,\)"):
        Split(tokens, np.array([0, 5]), labels)
    with pytest.raises(ValueError, match="from 0 to the 5 tokens, got 0 to 4"):
        Split(tokens, np.array([0, 2, 4]), labels)


def test_a_fingerprint_sees_lengths_tokens_and_labels():
    split = _split(20)
    again = Split(split.tokens.copy(), split.offsets.copy(), split.labels.copy())
    assert split.fingerprint() == again.fingerprint()
    shifted = split.offsets.copy()
    shifted[1] += 1
    others = [
        Split(split.tokens, shifted, split.labels),
        Split(split.tokens ^ 1, split.offsets, split.labels),
        Split(split.tokens, split.offsets, split.labels[::-1]),
    ]
    assert len({split.fingerprint(), *(other.fingerprint() for other in others)}) == 4
    assert split.fingerprint() == "4bd09b561b18f2ad"  # published results hold such names


def test_a_batch_holds_each_sample_and_zeros_after_it():
    split = _split(30)
    index = np.array([7, 0, 29, 7])
    batch = collate(split, index)
    assert [x.dtype for x in batch] == [torch.int64] * 3
    assert batch.labels.tolist() == index.tolist()
    assert batch.tokens.shape == (4, split.lengths[index].max())
    for row, i in enumerate(index):
        n = batch.lengths[row]
        assert n == len(split.sample(i))
        assert batch.tokens[row, :n].tolist() == split.sample(i).tolist()
        assert not batch.tokens[row, n:].any()


def test_the_pad_id_inside_a_sample_counts():
    split = Split.of([np.zeros(3, np.uint8), np.ones(5, np.uint8)], [0, 1])
    assert collate(split, np.array([0, 1])).lengths.tolist() == [3, 5]


def test_augmentation_sees_the_batch_without_padding():
    split = _split(30)
    batch = collate(split, np.array([1, 2]), augment=lambda t, o, rng: t + np.uint8(9), rng=_rng())
    for row, i in enumerate((1, 2)):
        n = batch.lengths[row]
        assert batch.tokens[row, :n].tolist() == (split.sample(i) + 9).tolist()
        assert not batch.tokens[row, n:].any()
    with pytest.raises(ValueError, match="rng must be given with augment"):
        collate(split, np.array([1]), augment=speckle)


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 5000])
def test_buckets_hold_every_sample_once(n):
    split = _split(n)
    batches = length_buckets(split.lengths, 32, _rng())
    assert sorted(np.concatenate(batches).tolist()) == list(range(n))
    assert len(batches) == -(-n // 32)
    assert sum(len(index) < 32 for index in batches) == (n % 32 > 0)


def test_buckets_pad_little_and_still_mix():
    split = _split(8000, 500, 2000)
    batches = length_buckets(split.lengths, 32, _rng())
    shuffled = np.array_split(_rng().permutation(8000), 250)
    assert _padding(split, shuffled) > 0.3
    assert _padding(split, batches) < 0.02
    assert _padding(split, evaluation_batches(split, 32)) < _padding(split, batches)
    # The batches come in no order of length, and another seed puts a sample among others.
    means = [split.lengths[index].mean() for index in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 4 / np.sqrt(len(means))
    other = length_buckets(split.lengths, 32, _rng(1))
    together = {frozenset(index.tolist()) for index in batches}
    assert not together & {frozenset(index.tolist()) for index in other}


def test_evaluation_counts_every_sample_once():
    split = _split(1001)
    batches = evaluation_batches(split, 64)
    assert sorted(np.concatenate(batches).tolist()) == list(range(1001))
    lengths = np.concatenate([split.lengths[index] for index in batches])
    assert (np.diff(lengths) >= 0).all()
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        evaluation_batches(split, 0)


def test_an_epoch_sees_every_sample_once_and_the_next_in_another_order():
    stream = BatchStream(_split(100), 16, seed=0)
    assert stream.steps_per_epoch == 7
    epochs = [
        np.concatenate([stream[step].labels for step in range(7 * epoch, 7 * epoch + 7)])
        for epoch in range(3)
    ]
    assert all(sorted(epoch.tolist()) == list(range(100)) for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 3


def test_a_step_means_the_same_batch_in_any_order_of_asking():
    split = _split(100)
    stream = BatchStream(split, 16, seed=5, augment=speckle)
    forward = [stream[step] for step in range(20)]
    backward = [BatchStream(split, 16, seed=5, augment=speckle)[step] for step in range(19, -1, -1)]
    assert all(_equal(a, b) for a, b in zip(forward, backward[::-1], strict=True))
    assert not _equal(BatchStream(split, 16, seed=6, augment=speckle)[0], forward[0])


def test_augmentation_differs_from_step_to_step():
    split = Split.of([np.zeros(64, np.uint8)], [0])
    stream = BatchStream(split, 1, seed=0, augment=speckle)
    assert len({stream[step].tokens.numpy().tobytes() for step in range(10)}) == 10


def test_a_resumed_run_with_other_workers_gets_the_same_batches():
    stream = BatchStream(_split(100), 16, seed=5, augment=speckle)
    whole = list(DataLoader(stream, batch_size=None, sampler=range(18)))
    resumed = DataLoader(stream, batch_size=None, sampler=range(9, 18), num_workers=2)
    assert len(whole) == 18
    assert all(_equal(a, b) for a, b in zip(whole[9:], resumed, strict=True))
    assert type(whole[0]).__name__ == "Batch"


def test_a_stream_survives_pickling_as_spawned_workers_need():
    stream = BatchStream(_split(100), 16, seed=5, augment=speckle)
    assert _equal(pickle.loads(pickle.dumps(stream))[11], stream[11])


def test_a_stream_without_samples_or_a_step_before_the_first_raises():
    with pytest.raises(ValueError, match="at least one sample"):
        BatchStream(Split.of([], []), 4, seed=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        BatchStream(_split(3), 0, seed=0)
    with pytest.raises(IndexError, match="got -1"):
        BatchStream(_split(3), 4, seed=0)[-1]


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_from_any_number_of_workers(workers):
    squares = in_order(square, workers)
    assert [next(squares) for _ in range(40)] == [i * i for i in range(40)]
    squares.close()


def test_files_appear_together_or_not_at_all(tmp_path):
    def breaks():
        yield b"half"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_files(tmp_path, {"a": [b"whole"], "b": breaks()}, {})
    assert not (tmp_path / "a").exists()
    write_files(tmp_path, {"a": [b"wh", b"ole"]}, {"seed": 3})
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert '"seed": 3' in (tmp_path / "generated.json").read_text()
