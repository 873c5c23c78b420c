"""The block-sparse kernels against the float64 definition: interpreted in float32 without a GPU."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastattn import testing
from fastattn.ops import BlockLayout, block_sparse_attention, block_sparse_attention_reference
from fastattn.ops.block_sparse_tables import bit_words, tables

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
kernels = partial(block_sparse_attention, backend="triton")

CASES = (
    testing.AttentionCase("one-token", "one key", 1, 1, 1, 1, 1, 16, 16),
    testing.AttentionCase("ragged", "no size fits a tile", 2, 2, 2, 37, 37, 20, 12),
    testing.AttentionCase("grouped", "gradients of several heads add up", 1, 2, 1, 34, 34, 16, 16),
    testing.AttentionCase("narrow", "far less than a tile", 1, 2, 2, 35, 35, 1, 1),
    testing.AttentionCase("widest", "the largest widths", 1, 1, 1, 33, 33, 256, 256),
)
LAYOUTS = {
    "bigbird": lambda n, h: BlockLayout.bigbird(
        n, block_size=16, num_heads=h, num_window_blocks=1, num_random_blocks=1, num_global_blocks=1
    ),
    "window": lambda n, h: BlockLayout.sliding_window(n, block_size=16),
    "causal": lambda n, h: BlockLayout.sliding_window(n, block_size=16, causal=True),
}
SIZES = (16, 32, 64, 128)


def explicit(n, s, h, size=16, share=0.5):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(h, -(-n // size), -(-s // size), generator=generator) < share
    weight = torch.randn(mask.shape, generator=generator)
    return BlockLayout.from_dense(mask, size, log_weight=weight)


def compare(case, layout, dtypes=DTYPES, **options):
    tried = partial(kernels, layout=layout, **options)
    reference = partial(block_sparse_attention_reference, layout=layout, **options)
    for dtype in dtypes:
        testing.assert_as_accurate_as(tried, reference, case.inputs(dtype, DEVICE))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, kind):
    compare(case, LAYOUTS[kind](case.n, case.h))


@pytest.mark.parametrize("size", SIZES)
def test_every_block_size_is_as_accurate_as_the_definition(size):
    n = size + 5
    case = testing.AttentionCase("", "", 1, 2, 2, n, n, 16, 16)
    compare(case, BlockLayout.bigbird(n, block_size=size))


@pytest.mark.parametrize("n", [40, 64, 161])
@pytest.mark.parametrize("size", SIZES)
def test_padding_at_every_block_size(size, n):
    """In blocks that are half empty, too: of another sample's words nothing may be read."""
    case = testing.AttentionCase("", "", 2, 1, 1, n, n, 16, 16)
    layout = BlockLayout.bigbird(n, block_size=size, num_global_blocks=1, num_random_blocks=1)
    mask = (torch.arange(n) % 5 == torch.tensor([[0], [1]])).to(DEVICE)
    compare(case, layout, key_padding_mask=mask)
    compare(case, layout, lengths=torch.tensor([n, n // 2], dtype=torch.int32, device=DEVICE))


@pytest.mark.gpu
def test_every_length_up_to_1100_runs_at_block_64():
    """In the interpreter it would take an hour; the torch path does it on any machine."""
    wide = torch.randn(3, 1, 2, 1100, 16, device="cuda")
    for n in range(1, 1101):
        layout = BlockLayout.bigbird(n, num_heads=2)
        inputs = [x.contiguous() for x in wide[:, :, :, :n].unbind()]
        got = testing.value_and_grads(partial(kernels, layout=layout), inputs)
        reference = partial(block_sparse_attention_reference, layout=layout)
        want = testing.value_and_grads(reference, [x.double() for x in inputs])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_lengths_compile_whole_export_and_have_func_grad():
    layout = BlockLayout.bigbird(40, block_size=16)
    lengths = torch.tensor([40, 17], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(2, 1, 40, 8, device=DEVICE) for _ in range(3))
    run = lambda q, lengths: kernels(q, k, v, layout, lengths=lengths)  # noqa: E731
    want = run(q, lengths)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, lengths), want)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(compiled(leaf, lengths), want)
    (slope,) = torch.autograd.grad(run(leaf, lengths).square().sum(), leaf)
    got = torch.func.grad(lambda q: run(q, lengths).square().sum())(q)
    torch.testing.assert_close(got, slope)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), device=DEVICE))

        def forward(self, q):
            return kernels(self.scale * q, q, q, BlockLayout.bigbird(q.shape[2], block_size=16))

    module = Module()
    tokens = torch.export.Dim("tokens", min=17, max=4096)
    program = torch.export.export(module, (q,), dynamic_shapes={"q": {2: tokens}}, strict=False)
    other = torch.randn(2, 1, 70, 8, device=DEVICE)
    torch.testing.assert_close(program.module()(other), module(other))


def test_a_recipe_larger_than_the_sequence_costs_what_the_sequence_does():
    for layout in (
        BlockLayout.sliding_window(64, block_size=16, num_window_blocks=100001),
        BlockLayout.bigbird(64, block_size=16, num_random_blocks=5000, num_global_blocks=6000),
    ):
        rows, columns = tables(layout, torch.device(DEVICE))
        assert max(rows.blocks.numel(), columns.blocks.numel()) < 200
        assert rows.cuts == columns.cuts == rows.slots == 0
        case = testing.AttentionCase("", "", 1, 1, 1, 64, 64, 8, 8)
        compare(case, layout)


def test_logits_that_underflow_stay_causal():
    layout = BlockLayout.sliding_window(32, block_size=16, causal=True)
    q, k, v = (torch.randn(1, 1, 32, 8, device=DEVICE) for _ in range(3))
    got = kernels(q, k, v, layout, scale=1e-50)
    torch.testing.assert_close(got, block_sparse_attention_reference(q, k, v, layout, scale=1e-50))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("d", [8, 16, 32, 64, 96, 128, 192, 256])
def test_every_width_at_every_block_size(d, size):
    case = testing.AttentionCase("", "", 1, 2, 2, 1000, 1000, d, d)
    compare(case, BlockLayout.bigbird(1000, block_size=size, num_heads=2))


@pytest.mark.parametrize(("n", "s"), [(9, 40), (40, 9), (40, 40)])
def test_explicit_layouts_take_other_keys_and_weights(n, s):
    compare(testing.AttentionCase("", "", 2, 2, 1, n, s, 16, 24), explicit(n, s, 2))


@pytest.mark.parametrize(
    ("kind", "place"),
    [("bigbird", "interior"), ("bigbird", "all"), ("window", "left"), ("causal", "right")],
)
def test_padding_and_lengths_are_as_accurate_as_the_definition(kind, place):
    case = CASES[1]
    mask = testing.padding_masks(case.b, case.s)[place].to(DEVICE)
    lengths = torch.tensor([37, 20], dtype=torch.int32, device=DEVICE)
    compare(case, LAYOUTS[kind](case.n, case.h), key_padding_mask=mask, lengths=lengths)


def test_long_rows_and_columns_are_cut_and_added():
    """Some of a head only, and of another length than the parts."""
    mask = torch.zeros(2, 20, 20, dtype=torch.bool)
    mask[0, 3] = mask[0, :, 7] = True
    mask[1, 5, :18] = True
    layout = BlockLayout.from_dense(mask, 16)
    lists = layout.lists(torch.device("cpu"))
    assert (lists.limit, lists.cuts, lists.parts) == (16, 1, 2)
    compare(testing.AttentionCase("", "", 1, 2, 2, 320, 320, 8, 8), layout)


def test_global_rows_are_cut_for_each_samples_length():
    case = testing.AttentionCase("", "", 2, 1, 1, 280, 280, 8, 8)
    layout = BlockLayout.sliding_window(280, block_size=16, num_window_blocks=1)
    assert tables(layout, torch.device(DEVICE))[0].merges.shape[3] == 1
    lengths = torch.tensor([270, 40], dtype=torch.int32, device=DEVICE)
    compare(case, layout, lengths=lengths)


RECIPES = {
    "bigbird": partial(BlockLayout.bigbird, num_heads=2),
    "many": partial(BlockLayout.bigbird, num_heads=2, num_random_blocks=9, num_global_blocks=5),
    "none": partial(BlockLayout.bigbird, num_random_blocks=0, num_global_blocks=0),
    "other": partial(BlockLayout.bigbird, num_window_blocks=1, seed=2**40, layer=3),
    "window": partial(BlockLayout.sliding_window, num_window_blocks=5, num_global_blocks=2),
    "causal": partial(BlockLayout.sliding_window, causal=True, num_global_blocks=3),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_tables_of_a_recipe_are_its_lists(kind):
    """Every row and column once, with the entries of the lists, in parts if there are many."""
    longest = 40
    layout = RECIPES[kind](longest * 16, block_size=16)
    lengths = torch.tensor([longest, 33, 18, 7, 3, 1, 0], device=DEVICE)
    made = tables(layout, torch.device(DEVICE), lengths)
    for columns, found in enumerate(made):
        lists = layout.lists(torch.device("cpu"), lengths.cpu(), columns=bool(columns))
        blocks, items, merges = (x.cpu() for x in (found.blocks, found.items, found.merges))
        for p in range(len(lengths)):
            for head in range(layout.num_heads):
                seen, slots = {}, {}
                for row, start, count, slot, leads in items[:, p, head].T.tolist():
                    entries = blocks[p, head, start : start + count].tolist()
                    if row == longest:
                        assert count == 0
                        continue
                    assert bool(leads) == (row not in seen)
                    assert slot < 0 or count <= 16
                    slots.setdefault(row, []).append(slot)
                    seen.setdefault(row, []).extend(entries)
                starts = lists.starts[p, head].tolist()
                assert sorted(seen) == list(range(longest))
                for row in range(longest):
                    want = lists.blocks[p, head, starts[row] : starts[row + 1]].tolist()
                    assert sorted(seen[row]) == want
                cut = {row: x for row, x in slots.items() if x != [-1]}
                merged = [x for x in merges[:, p, head].T.tolist() if x[0] < longest]
                assert {row: list(range(a, a + n)) for row, a, n in merged} == cut


@pytest.mark.parametrize("kind", ["bigbird", "causal"])
def test_dropout_is_that_of_the_definition(kind):
    case = CASES[2]
    compare(case, LAYOUTS[kind](case.n, case.h), dropout_p=0.3, seed=2**40 + 7)


def test_a_full_layout_is_softmax_attention():
    n = 40
    mask = torch.ones(3, 3, dtype=torch.bool)
    for causal in (False, True):
        layout = BlockLayout.from_dense(mask.tril() if causal else mask, 16, causal=causal)
        inputs = [torch.randn(1, 2, n, 16, device=DEVICE) for _ in range(3)]
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)
        testing.assert_as_accurate_as(partial(kernels, layout=layout), sdpa, inputs)


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_what_stands_in_padding_changes_nothing(what):
    inputs = [torch.randn(2, 1, 45, 8, device=DEVICE) for _ in range(3)]
    mask = testing.padding_masks(2, 45)["interior"].to(DEVICE)
    lengths = torch.tensor([45, 20], dtype=torch.int32, device=DEVICE)
    layout = LAYOUTS["bigbird"](45, 1)
    call = partial(kernels, layout=layout, key_padding_mask=mask, lengths=lengths)
    want = testing.value_and_grads(call, inputs)
    behind = torch.arange(45, device=DEVICE) >= lengths[:, None]
    q, k, v = inputs
    q = q.masked_fill(behind[:, None, :, None], what)
    k, v = (x.masked_fill((mask | behind)[:, None, :, None], what) for x in (k, v))
    for got, expected in zip(testing.value_and_grads(call, [q, k, v]), want, strict=True):
        assert torch.equal(got, expected)
    assert torch.all(want[0][1, :, 20:] == 0)


def test_a_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients():
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[0, 1] = mask[2] = True
    pad = torch.zeros(2, 40, dtype=torch.bool, device=DEVICE)
    pad[0, 16:32] = True
    inputs = [torch.randn(2, 2, 40, 8, device=DEVICE) for _ in range(3)]
    layout = BlockLayout.from_dense(mask, 16)
    out, *grads = testing.value_and_grads(
        partial(kernels, layout=layout, key_padding_mask=pad), inputs
    )
    assert torch.all(out[:, :, 16:32] == 0)
    assert torch.all(out[0, :, :16] == 0)
    assert all(x.isfinite().all() for x in grads)


def test_a_nan_is_not_swallowed_and_stays_where_it_is_seen():
    layout = BlockLayout.sliding_window(90, block_size=16, num_global_blocks=0)
    q, k, v = (torch.randn(2, 1, 90, 8, device=DEVICE) for _ in range(3))
    v[0, 0, 85] = torch.nan
    out = kernels(q, k, v, layout)
    assert out[0, 0, 64:].isnan().all()
    assert out[0, 0, :64].isfinite().all()
    assert out[1].isfinite().all()


def test_what_nobody_sees_and_what_sees_nobody_may_be_nan():
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[0, 0] = mask[1, 0] = True
    layout = BlockLayout.from_dense(mask, 16)
    hidden = torch.zeros(1, 45, dtype=torch.bool, device=DEVICE)
    q, k, v = (torch.randn(1, 1, 45, 8, device=DEVICE) for _ in range(3))
    q[:, :, 40], k[:, :, 20], v[:, :, 40] = torch.nan, torch.nan, torch.inf
    for options in ({}, {"key_padding_mask": hidden}):
        call = partial(kernels, layout=layout, **options)
        out, *grads = testing.value_and_grads(call, [q, k, v])
        assert torch.all(out[:, :, 32:] == 0)
        assert all(x.isfinite().all() for x in (out, *grads))
        assert torch.all(grads[1][:, :, 16:] == 0)


def test_two_runs_are_bitwise_equal_and_a_sample_does_not_see_its_neighbours():
    layout = BlockLayout.sliding_window(280, block_size=16, num_window_blocks=1)
    inputs = [torch.randn(2, 1, 280, 8, device=DEVICE) for _ in range(3)]
    call = partial(kernels, layout=layout)
    other = [torch.cat([x[:1], torch.randn_like(x[1:])]) for x in inputs]
    first, second = (testing.value_and_grads(call, xs) for xs in (inputs, other))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[0], b[0])
        assert not torch.equal(a[1], b[1])


def test_any_layout_in_memory_gives_the_same():
    heads, layout = 3, LAYOUTS["bigbird"](40, 3)
    wide = [torch.randn(1, 40, 3 * heads * 8, device=DEVICE) for _ in range(3)]
    views = [x[..., 3 : 3 + heads * 8].unflatten(-1, (heads, 8)).transpose(1, 2) for x in wide]
    want = testing.value_and_grads(partial(kernels, layout=layout), [x.clone() for x in views])
    got = testing.value_and_grads(partial(kernels, layout=layout), views)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    out = kernels(*views, layout)
    assert out.transpose(1, 2).is_contiguous()


def test_the_registered_operators_pass_opcheck():
    layout = LAYOUTS["bigbird"](40, 2)
    q, k, v = (torch.randn(1, 2, 40, 8, device=DEVICE) for _ in range(3))
    rows, columns = tables(layout, q.device)
    words = bit_words(torch.rand(1, 40, device=DEVICE) < 0.7)
    lengths = torch.tensor([33], dtype=torch.int32, device=DEVICE)
    tests, ops = ("test_schema", "test_faketensor"), torch.ops.fastattn
    numbers = (16, False, 0.5, 0.1)
    for about in ((None, None, None), (words, lengths, torch.tensor(5, device=DEVICE))):
        forward = (q, k, v, *about, *rows, *numbers)
        torch.library.opcheck(ops.block_sparse_forward.default, forward, test_utils=tests)
        out, lse = ops.block_sparse_forward(*forward)
        backward = (torch.randn_like(out), q, k, v, out, lse, *about, *rows, *columns, *numbers)
        torch.library.opcheck(ops.block_sparse_backward.default, backward, test_utils=tests)


def test_it_compiles_whole_and_not_for_every_length():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(q, k, v):
        return kernels(q, k, v, BlockLayout.bigbird(q.shape[2], block_size=16))

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for n in range(17, 37, 2):
        leaves = [torch.randn(1, 1, n, 8, device=DEVICE) for _ in range(3)]
        if n in (17, 35):
            for got, want in zip(
                testing.value_and_grads(compiled, leaves),
                testing.value_and_grads(run, leaves),
                strict=True,
            ):
                torch.testing.assert_close(got, want)
        else:
            compiled(*(x.requires_grad_() for x in leaves))
    assert counter.frame_count <= 2  # more blocks than are global, or not


def test_a_second_derivative_raises_and_func_grad_works():
    layout = LAYOUTS["bigbird"](20, 1)
    q, k, v = (torch.randn(1, 1, 20, 8, device=DEVICE).requires_grad_() for _ in range(3))
    (dq,) = torch.autograd.grad(kernels(q, k, v, layout).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()
    loss = lambda q: kernels(q, k, v, layout).square().sum()  # noqa: E731
    (want,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), want)


@pytest.mark.parametrize(("b", "h", "n"), [(0, 2, 20), (2, 0, 20)])
def test_empty_batches_are_no_error(b, h, n):
    q, k, v = (torch.randn(b, max(h, 1), n, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    out = kernels(q[:, :h], k, v, LAYOUTS["window"](n, 1))
    assert out.shape == (b, h, n, 8)
    torch.autograd.grad(out.sum(), (q, k, v))
