"""Block layouts: the pattern itself, its plans, and how it is kept."""

import dataclasses
import pickle
import random
import time

import pytest
import torch

from fastattn.ops import BlockLayout
from fastattn.ops.block_sparse_lists import items_of
from fastattn.ops.block_sparse_plans import below, draw_uniform

CPU = torch.device("cpu")


def bigbird(n, size=16, **options):
    """A layout of n blocks."""
    return BlockLayout.bigbird(n * size, block_size=size, **options)


def others(dense):
    """Blocks that are neither global nor in the window, of rows that are not global."""
    n = dense.shape[-1]
    row = torch.arange(n)
    dense = dense.clone()
    dense[:, (row[:, None] - row).abs() <= 1] = False
    dense[:, :, [0, -1]] = False
    return dense[:, 1:-1]


# BigBird


@pytest.mark.parametrize("n", [*range(1, 25), 64, 200])
def test_bigbird_has_global_window_and_exactly_r_other_blocks(n):
    layout = bigbird(n, num_heads=3, seed=5)
    dense, row = layout.to_dense(), torch.arange(n)
    assert dense[:, [0, -1]].all()
    assert dense[:, :, [0, -1]].all()
    assert dense[:, (row[:, None] - row).abs() <= 1].all()
    seen = dense[:, 1:-1].sum(-1)
    edges = torch.stack([row - 1, row, row + 1, 0 * row, 0 * row + n - 1])[:, 1:-1]
    for i in range(n - 2):
        fixed = len({int(x) for x in edges[:, i]} & set(range(n)))
        assert torch.all(seen[:, i] == min(n, fixed + 3))
    assert layout.nnz == dense.sum()
    assert layout.density == pytest.approx(dense.double().mean().item())


@pytest.mark.parametrize("numbers", [(1, 0, 0), (5, 0, 1), (1, 4, 3), (3, 2, 5)], ids=str)
def test_the_numbers_of_blocks_can_be_any(numbers):
    window, num_random, num_global = numbers
    for n in (1, 2, 5, 9, 40):
        dense = bigbird(
            n,
            num_window_blocks=window,
            num_random_blocks=num_random,
            num_global_blocks=num_global,
        ).to_dense()[0]
        row = torch.arange(n)
        first, last = -(-num_global // 2), num_global // 2
        is_global = (row < first) | (row >= n - last)
        assert dense[is_global].all()
        assert dense[:, is_global].all()
        fixed = is_global | ((row[:, None] - row).abs() <= window // 2)
        rest = (dense & ~fixed)[~is_global].sum(-1)
        assert torch.equal(rest, (~fixed)[~is_global].sum(-1).clamp(max=num_random))


def test_other_blocks_are_drawn_from_all_with_the_same_probability():
    n, draws = 128, 64
    dense = torch.cat([bigbird(n, num_heads=8, seed=s).to_dense() for s in range(draws)])
    counts = others(dense).sum((0, 1))[2:-2].double()  # near the edge fewer rows can draw
    expected = 8 * draws * 3 * torch.ones_like(counts)  # about one row in n - 5 draws each, n - 5
    chi = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts)
    assert abs(chi - freedom) < 6 * (2 * freedom) ** 0.5


def test_every_set_of_blocks_is_as_likely():
    """Two of five, from both sides of a hole: ten sets."""
    rows = 40_000
    bounds = [torch.full((1, rows), x) for x in (1, 3, 5, 8)]  # 1, 2 and 5, 6, 7
    found = draw_uniform(*bounds, num_random=2, num_heads=1, seed=3, layer=0)[0, 0]
    sets, counts = found.sort(-1)[0].unique(dim=0, return_counts=True)
    assert len(sets) == 10
    assert set(sets.flatten().tolist()) == {1, 2, 5, 6, 7}
    assert (counts - rows / 10).abs().max() < 6 * (rows / 10) ** 0.5


def test_the_counters_give_uniform_and_unrelated_numbers():
    row = torch.arange(100_000)
    drawn = below(torch.full_like(row, 10), 7, 0, 0, row, 0)
    again = below(torch.full_like(row, 10), 7, 0, 0, row, 1)
    for x in (drawn, again, (drawn + again) % 10, (drawn[1:] + drawn[:-1]) % 10):
        counts = x.bincount(minlength=10)
        assert (counts - len(x) / 10).abs().max() < 5 * (len(x) / 10) ** 0.5
    assert torch.all(below(torch.tensor([0, -3]), 1, 2) == 0)


def test_seed_layer_and_head_draw_differently_and_nothing_else_does():
    base = bigbird(40, num_heads=2)
    dense = base.to_dense()
    assert not torch.equal(dense[0], dense[1])
    for options in ({"seed": 1}, {"layer": 1}):
        assert not torch.equal(bigbird(40, num_heads=2, **options).to_dense(), dense)
    assert torch.equal(bigbird(40, num_heads=2).to_dense(), dense)
    assert torch.equal(bigbird(40, size=64, num_heads=2).to_dense(), dense)
    assert torch.equal(bigbird(40, num_heads=1).to_dense()[0], dense[0])


def test_no_global_random_state_is_touched():
    import numpy

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    for plan in ("uniform", "google", "hf-train", "hf-eval"):
        bigbird(40, plan=plan).to_dense()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.random.get_state()[1].tolist() == states[2]


def test_lengths_give_each_sample_the_pattern_that_it_has_alone():
    layout = bigbird(30, num_heads=2)
    lengths = torch.tensor([30, 1, 0, 11, 29, 99])
    rows = layout.lists(CPU, lengths)
    columns = layout.lists(CPU, lengths, columns=True)
    for i, n in enumerate(lengths.clamp(max=30).tolist()):
        alone = bigbird(n, num_heads=2).lists(CPU) if n else None
        for lists in (rows, columns):
            assert lists.starts[i, :, n:].unique(dim=-1).shape[-1] == 1  # nothing behind its end
        if alone is not None:
            entries = int(alone.starts[0, 0, -1])
            assert torch.equal(rows.starts[i, :, : n + 1], alone.starts[0])
            assert torch.equal(rows.blocks[i, 0, :entries], alone.blocks[0, 0, :entries])


def test_a_layout_for_131072_tokens_is_small_and_quick():
    start = time.perf_counter()
    layout = BlockLayout.bigbird(131072, num_heads=8)
    lists = [layout.lists(CPU, columns=columns) for columns in (False, True)]
    first = time.perf_counter() - start
    assert sum(x.starts.nbytes + x.blocks.nbytes for x in lists) < 50e6
    start = time.perf_counter()
    for _ in range(100):
        layout.lists(CPU)
    assert time.perf_counter() - start < 0.1  # once made, a thousandth of a second at most
    assert first < 10


# The published plans


def test_the_plan_of_the_paper_at_1024_tokens_repeats_blocks():
    """There block 15 is global and legal to draw, and both codes count it twice (issue 16566)."""
    weights = BlockLayout.bigbird(1024, num_heads=12, plan="google").to_log_weight()
    assert set(weights.exp().unique().tolist()) == {0.0, 1.0, 2.0}
    assert torch.all((weights.exp() > 1.5).nonzero()[:, 2] == 15)


def test_google_and_hugging_face_differ_at_2048_tokens_only():
    for n, same in ((1024, True), (2048, False), (3072, True), (1600, True)):
        google, hf = (BlockLayout.bigbird(n, plan=plan) for plan in ("google", "hf-train"))
        assert torch.equal(google.to_dense(), hf.to_dense()) == same


def test_hf_eval_sees_block_zero_four_times():
    weights = bigbird(40, plan="hf-eval").to_log_weight().exp()
    assert torch.all(weights[0, 1:-1, 0] == 4)
    assert weights[0, 1:-1, 1:].max() == 1
    assert others(bigbird(40, plan="hf-eval").to_dense()).sum() == 0


def test_short_sequences_are_dense_with_hugging_face_and_refused_with_google():
    assert bigbird(11, plan="hf-train").to_dense().all()
    assert not bigbird(12, plan="hf-train").to_dense().all()
    with pytest.raises(ValueError, match="plan='google' cannot draw 3 random blocks of 7"):
        bigbird(7, plan="google")
    with pytest.raises(ValueError, match="plan='google' cannot draw 5 random blocks of 8"):
        bigbird(8, size=128, plan="google", num_random_blocks=5)


# Other patterns


@pytest.mark.parametrize("causal", [False, True])
def test_a_sliding_window_has_its_window_and_globals_in_front(causal):
    n = 12
    layout = BlockLayout.sliding_window(n * 16, block_size=16, num_window_blocks=3, causal=causal)
    row = torch.arange(n)
    behind = row[:, None] - row
    near = (behind >= 0) & (behind < 3) if causal else behind.abs() <= 1
    want = near | (row == 0) | (row == 0)[:, None]
    want = want & (behind >= 0) if causal else want
    assert torch.equal(layout.to_dense()[0], want)
    assert layout.causal == causal


@pytest.mark.parametrize("weighted", [False, True])
def test_any_mask_comes_back(weighted):
    mask = torch.rand(3, 5, 9) < 0.4
    mask[1, 2] = False
    weight = torch.randn(3, 5, 9) if weighted else None
    layout = BlockLayout.from_dense(mask, 32, log_weight=weight)
    assert torch.equal(layout.to_dense(), mask)
    want = torch.zeros(3, 5, 9) if weight is None else weight
    want = torch.where(mask, want, -torch.inf).double()
    assert torch.equal(layout.to_log_weight(), want)
    assert layout.nnz == mask.sum()
    shared = BlockLayout.from_dense(mask[0], 32)
    assert (shared.num_heads, shared.shape) == (1, (5, 9))


def test_lists_by_column_are_the_transposed():
    for layout in (bigbird(23, num_heads=2), bigbird(23, num_heads=2, plan="hf-train")):
        columns = layout.lists(CPU, columns=True)
        dense = torch.zeros(2, 23, 23, dtype=torch.bool)
        for head in range(2):
            for j in range(23):
                low, high = columns.starts[0, head, j : j + 2].tolist()
                rows = columns.blocks[0, head, low:high]
                assert torch.equal(rows, rows.sort()[0])
                dense[head, rows.long(), j] = True
        assert torch.equal(dense, layout.to_dense())


@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_parts_of_lists_hold_every_entry_once(most):
    mask = torch.rand(2, 6, 17) < 0.5
    mask[0, 3] = False
    mask[1, 0] = True
    lists = BlockLayout.from_dense(mask, 16).lists(CPU)
    items = items_of(lists, most)
    for head in range(2):
        entries = []
        for row, start, length in zip(*(x[0, head].tolist() for x in items[:3]), strict=True):
            assert length <= most
            entries += [(row, start + i) for i in range(length)]
        low = lists.starts[0, head].tolist()
        assert sorted(entries) == [(i, x) for i in range(6) for x in range(low[i], low[i + 1])]
        there = items.row[0, head][items.row[0, head] < 6]
        assert set(there.tolist()) == set(range(6))  # an empty row, too, has its part


# The object


def test_equality_hash_pickle_and_repr():
    mask = torch.rand(4, 4) < 0.5
    make = (
        lambda: bigbird(9, num_heads=2, seed=4),
        lambda: bigbird(9, num_heads=2),
        lambda: bigbird(9, num_heads=2, plan="hf-eval"),
        lambda: BlockLayout.sliding_window(90, block_size=16, causal=True),
        lambda: BlockLayout.from_dense(mask, 16),
        lambda: BlockLayout.from_dense(~mask, 16),
        lambda: BlockLayout.from_dense(mask, 16, log_weight=torch.ones(4, 4)),
    )
    for i, one in enumerate(make):
        for j, other in enumerate(make):
            assert (one() == other()) == (i == j)
        layout = one()
        layout.to_dense()
        loaded = pickle.loads(pickle.dumps(layout))
        assert loaded == layout
        assert hash(loaded) == hash(layout) == hash(one())
        assert torch.equal(loaded.to_dense(), layout.to_dense())
    assert bigbird(9) != "bigbird"
    assert repr(make[0]()) == (
        "BlockLayout.bigbird(144, block_size=16, num_heads=2, num_window_blocks=3, "
        "num_random_blocks=3, num_global_blocks=2, plan='uniform', seed=4, layer=0)"
    )
    assert eval(repr(make[0]())) == make[0]()
    assert eval(repr(make[3]())) == make[3]()
    assert "blocks=(4, 4)" in repr(make[4]())
    with pytest.raises(AttributeError):
        layout.block_size = 32


@pytest.mark.parametrize("kind", ["bigbird", "hf-train", "explicit"])
def test_lists_are_kept_only_if_any_later_call_can_use_them(kind):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def make():
        if kind == "explicit":
            return BlockLayout.from_dense(torch.ones(2, 2, dtype=torch.bool), 16)
        return bigbird(20, plan="uniform" if kind == "bigbird" else kind)

    with torch.inference_mode():
        layout = make()
        layout.lists(CPU)
    assert not any(x.is_inference() for x in layout.lists(CPU)[:2])
    layout = make()
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout.lists(CPU)
    assert all(type(x) is torch.Tensor for x in layout.lists(CPU)[:2])
    other = dataclasses.replace(layout, causal=True)
    assert layout._found
    assert not other._found


def test_a_weight_that_needs_a_gradient_is_read_only():
    weight = torch.randn(2, 2, requires_grad=True)
    layout = BlockLayout.from_dense(torch.ones(2, 2, dtype=torch.bool), 16, log_weight=weight)
    assert not layout.to_log_weight().requires_grad


def test_a_picture_shows_the_pattern():
    import matplotlib

    matplotlib.use("Agg")
    figure = bigbird(12, num_heads=2).plot(head=1)
    (image,) = figure.axes[0].images
    assert torch.equal(torch.as_tensor(image.get_array()), bigbird(12, num_heads=2).to_dense()[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockLayout.bigbird(100, block_size=8), "block_size must be 16, 32, 64 or 128"),
        (lambda: BlockLayout.bigbird(0), "seq_len must be at least 1, got 0"),
        (lambda: BlockLayout.bigbird(9, num_heads=0), "num_heads must be at least 1"),
        (lambda: BlockLayout.bigbird(9, num_window_blocks=2), "must be odd and at least 1, got 2"),
        (lambda: BlockLayout.bigbird(9, num_random_blocks=-1), "num_random_blocks must not be"),
        (lambda: BlockLayout.bigbird(9, num_global_blocks=-1), "num_global_blocks must not be"),
        (lambda: BlockLayout.bigbird(9, plan="hf"), "plan must be one of 'uniform'"),
        (lambda: BlockLayout.bigbird(1000, plan="google"), "pad seq_len = 1000 to a multiple"),
        (
            lambda: BlockLayout.bigbird(1024, plan="google", num_window_blocks=5),
            "3 window blocks and 2 global ones, got 5 and 2",
        ),
        (lambda: BlockLayout.sliding_window(9, num_window_blocks=4), "odd and at least 1"),
        (lambda: BlockLayout.sliding_window(9, num_global_blocks=-1), "must not be negative"),
        (
            lambda: BlockLayout.from_dense(torch.ones(3, dtype=torch.bool), 16),
            r"mask must be \(blocks, blocks\) or",
        ),
        (
            lambda: BlockLayout.from_dense(torch.ones(3, 3).bool(), 16, log_weight=torch.ones(3)),
            r"log_weight must be \(3, 3\)",
        ),
        (
            lambda: BlockLayout.from_dense(
                torch.ones(2, 2).bool(), 16, log_weight=torch.full((2, 2), torch.nan)
            ),
            "log_weight must be finite",
        ),
        (
            lambda: BlockLayout.from_dense(torch.ones(3, 3).bool(), 16, causal=True),
            "blocks behind the diagonal",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mask_that_is_not_bool_is_refused():
    with pytest.raises(TypeError, match="mask must be bool, True = attend"):
        BlockLayout.from_dense(torch.ones(3, 3), 16)


def test_seeds_fit_into_64_bits():
    assert bigbird(20, seed=-(2**63)) != bigbird(20, seed=2**63 - 1)
    with pytest.raises(ValueError, match="seed must fit into 64 bits"):
        bigbird(20, seed=2**63)
