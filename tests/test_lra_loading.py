"""Shares of a batch: nothing twice, nothing lost, the loss and the gradient of the whole."""

import time

import pytest
import torch
import torch.nn.functional as F

from fastattn.lra.data import Batch
from fastattn.lra.encoder import Encoder
from fastattn.lra.loading import Share, Shares, Stretch, loader, share_of


def batch(size, parts=1, n=12):
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(1, n + 1, (size * parts,), generator=generator)
    tokens = torch.randint(1, 9, (size * parts, n), generator=generator)
    tokens[torch.arange(n) >= lengths[:, None]] = 0
    return Batch(tokens, lengths, torch.arange(size) % 3)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_shares_are_the_batch_and_no_sample_counts_twice(size, parts):
    whole = batch(size, parts)
    shares = [share_of(whole, i, 3) for i in range(3)]
    assert sum(share.counted for share in shares) == size
    assert sum(share.weight for share in shares) == pytest.approx(3)
    for i, share in enumerate(shares):
        assert len(share.batch.labels) >= 1  # every device takes part
        for j in range(share.counted):
            assert share.batch.labels[j] == whole.labels[i + 3 * j]
            for part in range(parts):
                mine, its = j * parts + part, (i + 3 * j) * parts + part
                n = int(whole.lengths[its])
                assert share.batch.lengths[mine] == n
                assert torch.equal(share.batch.tokens[mine, :n], whole.tokens[its, :n])


def test_a_single_share_is_the_batch_itself():
    whole = batch(4)
    share = share_of(whole, 0, 1)
    assert share.batch is whole
    assert share.weight == 1.0


@pytest.mark.parametrize(("size", "shares"), [(32, 4), (30, 4), (3, 4)])
def test_the_gradient_of_the_shares_is_that_of_the_batch(size, shares):
    torch.manual_seed(0)
    model = Encoder(
        9, 3, mixer="linear", positions="sinusoidal", max_length=12, width=16, depth=1, heads=2
    ).double()
    whole = batch(size)
    F.cross_entropy(model(*whole[:2]), whole.labels).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for i in range(shares):
        (tokens, lengths, labels), _, weight = share_of(whole, i, shares)
        (weight * F.cross_entropy(model(tokens, lengths), labels) / shares).backward()
    for p, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-6)


def test_turns_and_ranks_share_a_batch_in_all():
    batches = [batch(10), batch(7)]
    seen = [
        share.batch.labels[: share.counted]
        for rank in range(2)
        for turn in range(3)
        for share in [Shares(batches, rank, 2, 3)[3 * 1 + turn]]
    ]
    assert torch.cat(seen).sort().values.equal(batches[1].labels.sort().values)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_for_data_is_measured(workers):
    class Slow(torch.utils.data.Dataset):
        def __getitem__(self, i):
            time.sleep(0.03)
            x = torch.tensor([i])
            return Share(Batch(x[:, None], x, x), 1, 1.0)

    waits, got = [], []
    items = iter(loader(Slow(), range(5), workers))
    for _ in range(2):  # the second stretch goes on where the first has ended
        for item in Stretch(items, 2, waits.append):
            got.append(int(item.batch.labels))
            time.sleep(0.1)
    assert got == [0, 1, 2, 3]
    assert len(waits) == 4
    assert waits[0] > 0.03
    # a process works ahead, between stretches too; without one every item is waited for
    assert waits[2] < waits[0] if workers else waits[2] > 0.03


@pytest.mark.parametrize("largest", [5, 127, 128, 255, 40000])
def test_a_share_passes_between_processes_whole_and_small(largest, monkeypatch):
    tokens = torch.tensor([[0, largest], [1, 0]])
    share = Share(Batch(tokens, torch.tensor([2, 1]), torch.tensor([3, 4])), 2, 0.5)
    (parcel,) = loader([share], [0], 1)._get_iterator()
    size = 1 if largest < 128 else 2 if largest < 2**15 else 4
    assert parcel.arrays[0].itemsize == size
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    for found in (parcel.opened(), torch.utils.data._utils.pin_memory.pin_memory(parcel)):
        for a, b in zip(found.batch, share.batch, strict=True):
            assert torch.equal(a, b)
        assert found[1:] == share[1:]
