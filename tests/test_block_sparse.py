"""ops.block_sparse_attention against the float64 definition, and against softmax attention."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from fastattn import testing
from fastattn.ops import BlockLayout, block_sparse_attention, block_sparse_attention_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
torch_path = partial(block_sparse_attention, backend="torch")
LAYOUTS = {
    "bigbird": lambda n, h, size: BlockLayout.bigbird(n, block_size=size, num_heads=h),
    "window": lambda n, h, size: BlockLayout.sliding_window(n, block_size=size),
    "causal": lambda n, h, size: BlockLayout.sliding_window(n, block_size=size, causal=True),
    "hf-eval": lambda n, h, size: BlockLayout.bigbird(
        -(-n // size) * size, block_size=size, num_heads=h, num_random_blocks=1, plan="hf-eval"
    ),
}
CASES = testing.LINEAR_ATTENTION
GROUPED = next(c for c in CASES if c.name == "grouped")  # 70 tokens


def explicit(n, s, h, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(h, -(-n // size), -(-s // size), generator=generator) < 0.5
    weight = torch.randn(mask.shape, generator=generator)
    return BlockLayout.from_dense(mask, size, log_weight=weight)


def both(layout, **options):
    """The op and its definition, with the same options."""
    return (
        partial(torch_path, layout=layout, **options),
        partial(block_sparse_attention_reference, layout=layout, **options),
    )


# Values and gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, kind, device):
    layout = LAYOUTS[kind](case.n, case.h, 16)
    for dtype in DTYPES:
        testing.assert_as_accurate_as(*both(layout), case.inputs(dtype, device))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("case", testing.CROSS_ATTENTION, ids=lambda c: c.name)
def test_explicit_layouts_take_other_keys_and_weights(case, size):
    layout = explicit(case.n, case.s, case.h, size)
    for dtype in DTYPES:
        testing.assert_as_accurate_as(*both(layout), case.inputs(dtype))


@pytest.mark.parametrize("place", ["right", "left", "interior", "all"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_padding_anywhere_is_as_accurate_as_the_definition(kind, place):
    case = GROUPED
    mask = testing.padding_masks(case.b, case.s)[place]
    options = {"key_padding_mask": mask}
    if kind != "hf-eval":
        options["lengths"] = torch.tensor([70, 41], dtype=torch.int32)
    layout = LAYOUTS[kind](case.n, case.h, 16)
    testing.assert_as_accurate_as(*both(layout, **options), case.inputs(torch.float32))


def test_every_length_up_to_1100_runs_at_block_64():
    for n in range(1, 1101):
        q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for _ in range(3))
        layout = BlockLayout.bigbird(n)
        out, want = (f(q, k, v) for f in both(layout))
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("size", [16, 64])
def test_a_full_layout_is_softmax_attention(size, causal):
    """Gradients of a dense layout were wrong elsewhere (triton 419, flash-attention 2623)."""
    n = 150
    blocks = -(-n // size)
    mask = torch.ones(blocks, blocks, dtype=torch.bool)
    layout = BlockLayout.from_dense(mask.tril() if causal else mask, size, causal=causal)
    inputs = [torch.randn(2, 3, n, 16, dtype=torch.float64) for _ in range(3)]
    got = testing.value_and_grads(partial(torch_path, layout=layout), inputs)
    want = testing.value_and_grads(
        partial(F.scaled_dot_product_attention, is_causal=causal), inputs
    )
    torch.testing.assert_close(got, want)


def test_up_to_its_number_of_blocks_bigbird_is_softmax_attention():
    q, k, v = (torch.randn(1, 2, 8 * 16, 8, dtype=torch.float64) for _ in range(3))
    layout = BlockLayout.bigbird(7 * 16, block_size=16, num_heads=2)
    q, k, v = (x[:, :, : 7 * 16] for x in (q, k, v))
    assert layout.to_dense().all()
    want = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(torch_path(q, k, v, layout), want)


def test_the_comparison_catches_a_block_too_many():
    case = CASES[5]
    mask = BlockLayout.bigbird(case.n, block_size=16).to_dense()[0]
    wrong = mask.clone()
    i, j = (~mask).nonzero()[7].tolist()
    wrong[i, j] = True
    tried = partial(torch_path, layout=BlockLayout.from_dense(wrong, 16))
    _, reference = both(BlockLayout.from_dense(mask, 16))
    with pytest.raises(AssertionError, match="allowed"):
        testing.assert_as_accurate_as(tried, reference, case.inputs(torch.float32))


def test_the_scale_is_on_the_logits():
    q, k, v = (torch.randn(1, 1, 40, 8, dtype=torch.float64) for _ in range(3))
    layout = BlockLayout.bigbird(40, block_size=16)
    torch.testing.assert_close(
        torch_path(q, k, v, layout, scale=1.0), torch_path(q * 8**0.5, k, v, layout)
    )


def test_large_logits_do_not_overflow():
    layout = BlockLayout.bigbird(200, block_size=16)
    q, k, v = (torch.randn(1, 1, 200, 8, dtype=torch.float64) for _ in range(3))
    tried, reference = (testing.value_and_grads(f, [300 * q, 300 * k, v]) for f in both(layout))
    torch.testing.assert_close(tried, reference)


# Padding and lengths


@pytest.mark.parametrize("what", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_stands_in_padding_changes_nothing(kind, what):
    inputs = [torch.randn(2, 2, 90, 8) for _ in range(3)]
    mask = testing.padding_masks(2, 90)["interior"]
    layout = LAYOUTS[kind](90, 2, 16)
    call = partial(torch_path, layout=layout, key_padding_mask=mask)
    want = testing.value_and_grads(call, inputs)
    q, k, v = inputs
    k, v = (x.masked_fill(mask[:, None, :, None], what) for x in (k, v))
    for got, expected in zip(testing.value_and_grads(call, [q, k, v]), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_rows_behind_the_length_give_zeros_whatever_stands_there():
    lengths = torch.tensor([90, 33], dtype=torch.int32)
    inputs = [torch.randn(2, 2, 90, 8) for _ in range(3)]
    inputs = [
        x.masked_fill((torch.arange(90) >= lengths[:, None])[:, None, :, None], torch.nan)
        for x in inputs
    ]
    for layout in (LAYOUTS["bigbird"](90, 2, 16), explicit(90, 90, 2, 16)):
        out, *grads = testing.value_and_grads(
            partial(torch_path, layout=layout, lengths=lengths), inputs
        )
        assert torch.all(out[1, :, 33:] == 0)
        assert out.isfinite().all()
        assert all(x.isfinite().all() and torch.all(x[1, :, 33:] == 0) for x in grads)


@pytest.mark.parametrize("kind", ["bigbird", "window", "causal"])
def test_a_sample_alone_equals_the_same_sample_padded(kind):
    """The last block of the batch is not that of the sample (transformers 12483)."""
    lengths = torch.tensor([1, 15, 16, 17, 100, 333], dtype=torch.int32)
    inputs = [torch.randn(6, 2, 333, 8, dtype=torch.float64) for _ in range(3)]
    out = torch_path(*inputs, LAYOUTS[kind](333, 2, 16), lengths=lengths)
    for i, n in enumerate(lengths.tolist()):
        alone = torch_path(*(x[i : i + 1, :, :n] for x in inputs), LAYOUTS[kind](n, 2, 16))
        torch.testing.assert_close(out[i : i + 1, :, :n], alone, rtol=1e-12, atol=1e-14)


def test_a_length_may_be_larger_than_the_sequence():
    inputs = [torch.randn(2, 1, 40, 8) for _ in range(3)]
    lengths = torch.tensor([2**31 - 1, 41], dtype=torch.int32)
    layout = LAYOUTS["bigbird"](40, 1, 16)
    assert torch.equal(torch_path(*inputs, layout, lengths=lengths), torch_path(*inputs, layout))


def test_an_explicit_layout_is_cut_off_at_the_length():
    layout = explicit(90, 90, 2, 16)
    inputs = [torch.randn(1, 2, 90, 8, dtype=torch.float64) for _ in range(3)]
    out = torch_path(*inputs, layout, lengths=torch.tensor([50], dtype=torch.int32))
    cut = BlockLayout.from_dense(
        layout.to_dense()[:, :4, :4], 16, log_weight=layout.to_log_weight()[:, :4, :4]
    )
    torch.testing.assert_close(out[:, :, :50], torch_path(*(x[:, :, :50] for x in inputs), cut))


def test_a_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients():
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[0, 1] = mask[2] = True
    layout = BlockLayout.from_dense(mask, 16)
    pad = torch.zeros(2, 40, dtype=torch.bool)
    pad[0, 16:32] = True  # all that the first row sees
    inputs = [torch.randn(2, 2, 40, 8) for _ in range(3)]
    out, *grads = testing.value_and_grads(
        partial(torch_path, layout=layout, key_padding_mask=pad), inputs
    )
    assert torch.all(out[:, :, 16:32] == 0)
    assert torch.all(out[0, :, :16] == 0)
    assert torch.all(out[1, :, :16] != 0)
    assert all(x.isfinite().all() for x in grads)


# Dropout


def test_dropout_is_that_of_the_definition_and_of_its_seed():
    case = GROUPED
    inputs = case.inputs(torch.float32)
    for kind in LAYOUTS:
        layout = LAYOUTS[kind](case.n, case.h, 16)
        options = {"dropout_p": 0.3, "seed": 2**40 + 7}
        testing.assert_as_accurate_as(*both(layout, **options), inputs)
    call = partial(torch_path, *inputs, layout, dropout_p=0.3)
    assert torch.equal(call(seed=1), call(seed=1))
    assert torch.equal(call(seed=1), call(seed=torch.tensor(1)))
    assert not torch.equal(call(seed=1), call(seed=2))
    torch.manual_seed(5)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(call(), first)


def test_dropout_keeps_the_mean_and_drops_its_share():
    n = 48
    layout = BlockLayout.bigbird(n, block_size=16)
    q = torch.zeros(4, 4, n, 8)
    weights = torch_path(q, q, torch.eye(n).expand(4, 4, n, n), layout, dropout_p=0.25, seed=3)
    dropped = weights == 0
    count = dropped.numel()
    assert abs(dropped.sum() - count / 4) < 5 * (count * 3 / 16) ** 0.5
    torch.testing.assert_close(weights[~dropped], torch.full((count - dropped.sum(),), 4 / 3 / n))
    for other in (dropped[0, 1], dropped[1, 0], dropped[0, 0].T, dropped[0, 0].roll(1, 1)):
        share = (dropped[0, 0] == other).float().mean()
        assert abs(share - 0.625) < 5 * (0.625 * 0.375) ** 0.5 / n  # of independent ones


# PyTorch's machinery


def test_second_derivatives_are_right():
    layout = BlockLayout.bigbird(20, block_size=16)
    inputs = [torch.randn(1, 1, 20, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    torch.autograd.gradcheck(partial(torch_path, layout=layout), inputs)
    torch.autograd.gradgradcheck(partial(torch_path, layout=layout), inputs)


def test_func_grad_and_vmap_work():
    layout = BlockLayout.bigbird(40, block_size=16)
    x = torch.randn(3, 1, 2, 40, 8)
    loss = lambda x: torch_path(x, x, x, layout).square().sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(loss))(x)
    for i in range(3):
        leaf = x[i].clone().requires_grad_()
        torch.testing.assert_close(got[i], torch.autograd.grad(loss(leaf), leaf)[0])


def test_compiled_lengths_do_not_compile_again_and_again():
    torch._dynamo.reset()
    counter = CompileCounter()

    def run(x):
        layout = BlockLayout.bigbird(x.shape[2], block_size=16, num_heads=2)
        return torch_path(x, x, x, layout)

    compiled = torch.compile(run, backend=counter, dynamic=True, fullgraph=True)
    for n in (100, 200, 210, 340, 500):
        x = torch.randn(1, 2, n, 8)
        torch.testing.assert_close(compiled(x), run(x))
    assert counter.frame_count <= 2


def test_autocast_decides_the_dtype_but_not_the_sums():
    q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
    layout = BlockLayout.bigbird(100, block_size=16, num_heads=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_path(q, k, v, layout)
        assert torch_path(q.double(), k.double(), v.double(), layout).dtype == torch.float64
    half = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, torch_path(*half, layout))


def test_strides_do_not_matter():
    layout = BlockLayout.bigbird(70, block_size=16, num_heads=2)
    q, k, v = (torch.randn(2, 70, 2, 8).transpose(1, 2) for _ in range(3))
    want = torch_path(*(x.contiguous() for x in (q, k, v)), layout)
    torch.testing.assert_close(torch_path(q, k, v, layout), want)


@pytest.mark.parametrize(("b", "h"), [(0, 2), (2, 0)])
def test_empty_batches_are_no_error(b, h):
    q, k, v = (torch.randn(b, max(h, 1), 40, 8, requires_grad=True) for _ in range(3))
    out = torch_path(q[:, :h], k, v, BlockLayout.bigbird(40, block_size=16))
    assert out.shape == (b, h, 40, 8)
    torch.autograd.grad(out.sum(), (q, k, v))


def test_memory_is_linear_in_the_blocks_that_are_seen():
    def saved(n):
        total = 0

        def pack(x):
            nonlocal total
            total += x.numel()
            return x

        q, k, v = (torch.randn(1, 1, n, 4, requires_grad=True) for _ in range(3))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            torch_path(q, k, v, BlockLayout.bigbird(n, block_size=16))
        return total

    assert saved(8192) < 4.2 * saved(2048)


# Any shape, and what is no shape


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_mask_and_layout_equals_the_definition(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size = data.draw(st.sampled_from([16, 32]))
    b, h_kv, g, n, s = draw(1, 3), draw(1, 2), draw(1, 2), draw(1, 120), draw(1, 120)
    seed = draw(0, 99)
    kind = data.draw(st.sampled_from(["explicit", *LAYOUTS]))
    options = {}
    if kind == "explicit":
        layout = explicit(n, s, h_kv * g, size, seed)
    else:
        s = n = -(-n // size) * size if kind == "hf-eval" else n
        layout = LAYOUTS[kind](n, h_kv * g, size)
        if kind != "hf-eval" and data.draw(st.booleans()):
            options["lengths"] = torch.randint(0, n + 1, (b,), dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    if data.draw(st.booleans()):
        options["key_padding_mask"] = torch.rand(b, s, generator=generator) < 0.3
    if data.draw(st.booleans()):
        options |= {"dropout_p": 0.4, "seed": seed}
    case = testing.AttentionCase("", "", b, h_kv * g, h_kv, n, s, draw(1, 9), draw(1, 9))
    inputs = case.inputs(torch.float64, seed=seed)
    tried, reference = both(layout, **options)
    torch.testing.assert_close(
        testing.value_and_grads(tried, inputs), testing.value_and_grads(reference, inputs)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layout": BlockLayout.bigbird(33, block_size=16)}, ValueError, r"made for 33 tokens\)"),
        ({"layout": explicit(32, 64, 2, 16)}, ValueError, "2 blocks of queries and 4 of keys, but"),
        ({"layout": "bigbird"}, TypeError, "layout must be a BlockLayout, got str"),
        ({"layout": explicit(32, 32, 3, 16)}, ValueError, "layout has 3 heads, q has 2"),
        ({"key_padding_mask": torch.zeros(2, 32)}, TypeError, "must be bool"),
        ({"key_padding_mask": torch.zeros(2, 9).bool()}, ValueError, r"must be \(b, s\)"),
        ({"lengths": torch.tensor([3, 4])}, TypeError, "lengths must be int32, got torch.int64"),
        ({"lengths": torch.tensor([3]).int()}, ValueError, r"lengths must be \(b,\) = \(2,\)"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1"),
        ({"dropout_p": 0.1, "seed": torch.tensor(1.0)}, ValueError, "seed must be an int, or one"),
        ({"scale": 0.0}, ValueError, "scale must be positive"),
        ({"backend": "cuda"}, ValueError, "has no backend 'cuda'"),
        ({"v": torch.randn(2, 2, 31, 4)}, ValueError, "s is 31 here but 32 in k"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_bad_input_says_what_is_wrong(change, error, message):
    arguments = {name: torch.randn(2, 2, 32, 4) for name in "qkv"}
    arguments |= {"layout": BlockLayout.bigbird(32, block_size=16)}
    block_sparse_attention(**arguments)
    with pytest.raises(error, match=message):
        block_sparse_attention(**arguments | change)


def test_a_published_plan_has_no_lengths():
    q = torch.randn(1, 1, 1024, 4)
    layout = BlockLayout.bigbird(1024, plan="hf-train")
    with pytest.raises(ValueError, match="made for one length"):
        block_sparse_attention(q, q, q, layout, lengths=torch.tensor([9], dtype=torch.int32))


def test_random_bits_are_those_of_the_published_generator():
    """Known answers of the Random123 distribution for Philox-4x32-10."""
    from fastattn.ops.philox import philox

    for counter, seed, want in (
        (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (0xFFFFFFFF, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ):
        words = philox(torch.tensor(seed), *(torch.tensor(counter) for _ in range(4)))
        assert " ".join(f"{int(x):08x}" for x in words) == want
