"""The FAVOR+ kernels against the float64 definition: interpreted in float32 without a GPU."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fastattn import testing
from fastattn.ops import draw_projection, favor_attention, favor_attention_reference

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
VARIANTS = ("positive", "hyperbolic", "oprf", "relu")
kernels = partial(favor_attention, backend="triton")

CASES = (
    testing.AttentionCase("one-token", "empty splits", 1, 1, 1, 1, 1, 16, 16),
    testing.AttentionCase("ragged", "no size fits a tile", 2, 2, 2, 77, 77, 20, 12),
    testing.AttentionCase("grouped", "shares of several heads add up", 1, 4, 2, 150, 150, 16, 16),
    testing.AttentionCase("narrow", "far less than a tile", 1, 2, 2, 35, 35, 1, 1),
    testing.AttentionCase("widest", "the largest widths", 1, 1, 1, 17, 17, 256, 256),
    testing.AttentionCase("longer-keys", "s > n", 1, 2, 1, 9, 70, 16, 24),
    testing.AttentionCase("shorter-keys", "s < n", 1, 2, 1, 70, 9, 16, 8),
)


def bound(case, m=24, heads=None, **options):
    """The kernels and the definition, with a projection that has no gradient.

    For half precision it is, scaled, one that bfloat16 or tf32 holds: the kernels round it.
    """
    w = draw_projection(m, case.d, num_heads=heads)
    if options.get("variant") == "relu":  # so that no row has a tiny mass by chance
        w = w + 1 / case.d
    scale = case.d**-0.5
    options["scale"] = scale

    def rounded(dtype, wide):
        factor = scale**0.5 * (1 if options.get("variant") == "relu" else 1.4426950408889634)
        directions = w.to(DEVICE)
        if dtype != torch.float32 and options.get("variant", "positive") != "oprf":
            narrow = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16  # tf32's digits
            directions = (directions * factor).to(narrow).double() / factor
        return directions.to(wide)

    return (
        lambda q, k, v: kernels(q, k, v, rounded(q.dtype, torch.float32), **options),
        lambda dtype: (
            lambda q, k, v: favor_attention_reference(
                q, k, v, rounded(dtype, torch.promote_types(q.dtype, torch.float32)), **options
            )
        ),
    )


def compare(case, dtypes=DTYPES, **options):
    tried, reference = bound(case, **options)
    for dtype in dtypes:
        q, k, v = case.inputs(dtype, DEVICE)
        testing.assert_as_accurate_as(tried, reference(dtype), [q, k, v])


def compare_norms(case, allowed=2e-5, **options):
    """Value and gradients in float32, by relative error."""
    tried, reference = bound(case, **options)
    leaves = case.inputs(torch.float32, DEVICE)
    exact = testing.value_and_grads(reference(torch.float32), [x.double() for x in leaves])
    for got, want in zip(testing.value_and_grads(tried, leaves), exact, strict=True):
        assert (got - want).norm() <= allowed * want.norm()


forms = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


@forms
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, variant, causal):
    if causal and case.n != case.s:
        pytest.skip("causal attention has as many keys as queries")
    large = variant in ("oprf", "hyperbolic") or causal  # exponents of the order of d
    if case.name == "widest" and large:
        return compare_norms(case, variant=variant, causal=causal)
    compare(case, variant=variant, causal=causal, dtypes=[torch.float32])


@pytest.mark.parametrize(
    ("m", "causal"), [(1, False), (40, False), (300, False), (1, True), (40, True), (300, True)]
)
def test_any_number_of_features_will_do(m, causal):
    compare(CASES[1], m=m, causal=causal, dtypes=[torch.float32])


@forms
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_head_can_have_a_projection_of_its_own(variant, causal):
    compare(CASES[2], heads=2, variant=variant, causal=causal, dtypes=[torch.float32])


@pytest.mark.parametrize(
    ("variant", "causal"),
    [("positive", False), ("relu", False), ("positive", True), ("relu", True)],
)
@pytest.mark.parametrize("place", ["left", "interior", "all"])
def test_padding_is_as_accurate_as_the_definition(place, variant, causal):
    mask = testing.padding_masks(2, 77)[place].to(DEVICE)
    options = {"variant": variant, "causal": causal, "key_padding_mask": mask}
    if variant == "relu" and causal:
        # of a row that sees one key the gradient is zero: a difference over a sum without a bound
        return compare_norms(CASES[1], allowed=3e-6, **options)
    compare(CASES[1], dtypes=[torch.float32], **options)


def test_values_may_be_wider_than_queries():
    case = testing.AttentionCase("", "", 1, 1, 1, 40, 40, 8, 100)
    compare(case, m=100, causal=True, dtypes=[torch.float32])


@forms
def test_packed_sequences_are_as_accurate_as_the_definition(causal):
    ends = torch.tensor([0, 0, 3, 66, 150], dtype=torch.int32, device=DEVICE)
    mask = testing.padding_masks(1, 150)["interior"].to(DEVICE)
    options = {"key_padding_mask": mask, "cu_seqlens": ends, "causal": causal}
    compare(CASES[2], dtypes=[torch.float32], **options)


@pytest.mark.parametrize("place", ["none", "interior"])
def test_the_error_is_that_of_the_dtype_at_every_scale_of_the_inputs(place):
    case = testing.AttentionCase("", "", 2, 2, 2, 200, 200, 64, 64)
    mask = testing.padding_masks(2, 200)[place]
    mask = None if mask is None else mask.to(DEVICE)
    tried, reference = bound(case, m=64, key_padding_mask=mask)
    for dtype in DTYPES:
        for std, allowed in ((0.1, 3e-6), (1, 3e-6), (4, 3e-6), (16, 1e-5)):
            q, k, v = case.inputs(torch.float32, DEVICE)
            leaves = [(q * std).to(dtype), (k * std).to(dtype), v.to(dtype)]
            want = reference(dtype)(*(x.double() for x in leaves))
            error = (tried(*leaves) - want).norm() / want.norm()
            assert error <= (allowed if dtype == torch.float32 else 5e-3), (dtype, std)


@pytest.mark.parametrize(
    ("d", "std", "variant", "place"),
    [
        (64, 0.1, "positive", "none"),
        (64, 1, "positive", "interior"),
        (64, 2.5, "positive", "none"),
        (64, 1, "oprf", "none"),
        (256, 1, "positive", "none"),
        (256, 2, "positive", "none"),
        (256, 1, "oprf", "none"),
    ],
)
def test_the_causal_error_is_that_of_the_dtype_up_to_long_keys(d, std, variant, place):
    """|x|² is 100 at most for the longest; the shift of a feature is fixed beforehand."""
    case = testing.AttentionCase("", "", 1, 2, 2, 150, 150, d, 32)
    mask = testing.padding_masks(1, 150)[place]
    mask = None if mask is None else mask.to(DEVICE)
    tried, reference = bound(case, m=64, variant=variant, key_padding_mask=mask, causal=True)
    for dtype in DTYPES:
        q, k, v = case.inputs(torch.float32, DEVICE)
        leaves = [(q * std).to(dtype), (k * std).to(dtype), v.to(dtype)]
        assert leaves[1].float().square().sum(-1).max() * d**-0.5 < 100
        want = reference(dtype)(*(x.double() for x in leaves))
        error = (tried(*leaves) - want).norm() / want.norm()
        assert error <= (2e-5 if dtype == torch.float32 else 1e-2), dtype


def test_values_with_a_mean_cost_the_gradients_nothing_but_rounding():
    """A mean of 8 cancels in dout·S - δ: what is left, of the order of the spread of S, 0.3, has
    the errors of two numbers that bfloat16 rounds by up to 0.03 each."""
    case = testing.AttentionCase("", "", 1, 2, 2, 150, 150, 16, 16)
    tried, reference = bound(case)
    q, k, v = case.inputs(torch.float32, DEVICE)
    for dtype in DTYPES:
        leaves = [x.to(dtype) for x in (q, k, v + 8)]
        exact = testing.value_and_grads(reference(dtype), [x.double() for x in leaves])
        for got, want in zip(testing.value_and_grads(tried, leaves), exact, strict=True):
            assert (got - want).norm() <= (1e-4 if dtype == torch.float32 else 0.2) * want.norm()


def test_a_scale_that_is_an_integer_is_one_like_others():
    q, k, v = CASES[1].inputs(torch.float32, DEVICE)
    w = draw_projection(16, 20).to(DEVICE)
    for causal in (False, True):
        one, other = (kernels(q / 2, k / 2, v, w, scale=x, causal=causal) for x in (1, 1.0))
        assert torch.equal(one, other)


@pytest.mark.parametrize("heads", [None, 2])
def test_any_layout_and_alignment_gives_the_same(heads):
    case = testing.AttentionCase("", "", 2, 4, 2, 40, 40, 8, 8)
    w = draw_projection(16, 8, num_heads=heads).to(DEVICE)
    odd = torch.cat((w.new_zeros(1), w.flatten()))[1:].view_as(w)
    q, k, v = case.inputs(torch.float32, DEVICE)
    for causal in (False, True):
        want = kernels(q, k, v, w, causal=causal)
        apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(kernels(*apart, odd, causal=causal), want)


@pytest.mark.parametrize("std", [10, 100, 10_000])
def test_causal_outputs_stay_means_of_the_values_seen_at_any_scale(std):
    q, k = (std * torch.randn(1, 1, 70, 16, device=DEVICE) for _ in range(2))
    v = torch.eye(70, device=DEVICE).expand(1, 1, 70, 70)
    w = draw_projection(32, 16).to(DEVICE)
    weights = kernels(q, k, v, w, causal=True)
    assert (weights >= 0).all()
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 70, device=DEVICE))
    run = lambda q, k, v: kernels(q, k, v, w, causal=True)  # noqa: E731
    for grad in testing.value_and_grads(run, [q, k, v])[1:]:
        assert grad.abs().max() < 1e3


@pytest.mark.parametrize("what", [1e4, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("at", [1, 40, 64])
def test_a_token_changes_no_earlier_output(at, what):
    q, k, v = (torch.randn(1, 1, 70, 8, device=DEVICE) for _ in range(3))
    w = draw_projection(16, 8).to(DEVICE)
    before = kernels(q, k, v, w, causal=True)
    for x in (q, k, v):
        x[:, :, at:] = what
    after = kernels(q, k, v, w, causal=True)
    assert torch.equal(before[:, :, :at], after[:, :, :at])
    if what != what:
        assert after[:, :, at:].isnan().all()


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients_in_half_precision_have_its_error(case, dtype, causal):
    """Weights are rounded to the dtype before they meet the values."""
    if causal and case.n != case.s:
        pytest.skip("causal attention has as many keys as queries")
    for variant in (*VARIANTS[:2], "relu"):
        tried, reference = bound(case, m=64, variant=variant, causal=causal)
        leaves = case.inputs(dtype, DEVICE)
        exact = testing.value_and_grads(reference(dtype), [x.double() for x in leaves])
        got = testing.value_and_grads(tried, leaves)
        largest = max(x.norm() for x in exact)  # of one token's gradients some are zero
        for a, b in zip(got, exact, strict=True):
            # terms that cancel (one direction a token: dq is 0) are each rounded to the dtype
            rounding = max(2e-3, torch.finfo(dtype).eps / 2)
            assert (a - b).norm() <= 2e-2 * b.norm() + rounding * largest


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("m", [16, 32, 64, 256])
@pytest.mark.parametrize("e", [16, 32, 64])
@pytest.mark.parametrize("d", [16, 32, 64])
def test_bfloat16_has_its_error_in_tiles_of_every_width(d, e, m, causal):
    """With 32 columns Triton 3.6 multiplied what lies outside its shared memory."""
    case = testing.AttentionCase("", "", 1, 2, 2, 150, 150, d, e)
    tried, reference = bound(case, m=m, causal=causal)
    leaves = case.inputs(torch.bfloat16, DEVICE)
    exact = testing.value_and_grads(reference(torch.bfloat16), [x.double() for x in leaves])
    for got, want in zip(testing.value_and_grads(tried, leaves), exact, strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()


@forms
def test_a_nan_is_not_swallowed_and_stays_in_its_sequence(causal):
    for place in range(3):
        leaves = [torch.randn(2, 1, 40, 8, device=DEVICE) for _ in range(3)]
        leaves[place][0, 0, 5] = torch.nan
        out = kernels(*leaves, draw_projection(16, 8).to(DEVICE), causal=causal)
        assert out[0, 0, 5].isnan().all()
        assert not out[1].isnan().any()


@forms
def test_what_stands_in_padding_changes_nothing(causal):
    q, k, v = CASES[1].inputs(torch.float32, DEVICE)
    mask = testing.padding_masks(2, 77)["interior"].to(DEVICE)
    tried, _ = bound(CASES[1], key_padding_mask=mask, causal=causal)
    clean = testing.value_and_grads(tried, [q, k, v])
    hidden = mask[:, None, :, None]
    dirty = [q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)]
    for a, b in zip(clean, testing.value_and_grads(tried, dirty), strict=True):
        assert torch.equal(a, b)


@forms
def test_two_runs_are_bitwise_equal_and_a_sample_does_not_see_its_neighbours(causal):
    q, k, v = (torch.randn(2, 2, 150, 8, device=DEVICE) for _ in range(3))
    tried, _ = bound(testing.AttentionCase("", "", 2, 2, 2, 150, 150, 8, 8), causal=causal)
    one, two = (testing.value_and_grads(tried, [q, k, v]) for _ in range(2))
    other = testing.value_and_grads(
        tried, [torch.cat((x[:1], torch.randn_like(x[1:])), 0) for x in (q, k, v)]
    )
    for a, b, c in zip(one, two, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:1], c[:1])


@forms
def test_memory_around_the_buffers_is_neither_read_nor_left_in_the_results(causal):
    """Inputs and upstream gradient lie inside NaN, and so does the memory of every result."""

    def surrounded(x):
        b, h, n, d = x.shape
        inside = torch.full((b, h, n + 9, d + 16), torch.nan, device=DEVICE)[:, :, 4 : 4 + n, 8:-8]
        return inside.copy_(x)

    for case in (CASES[1], CASES[3]):
        leaves = case.inputs(torch.float32, DEVICE)
        upstream = torch.randn(*leaves[0].shape[:3], case.e, device=DEVICE)
        tried, _ = bound(case, causal=causal)
        results = []
        for around in (torch.clone, surrounded):
            xs = [around(x).requires_grad_() for x in leaves]
            torch.use_deterministic_algorithms(around is surrounded)  # fills new memory with NaN
            try:
                out = tried(*xs)
                results.append([out, *torch.autograd.grad(out, xs, around(upstream))])
            finally:
                torch.use_deterministic_algorithms(False)
        for clean, got in zip(*results, strict=True):
            assert torch.equal(clean, got)


def test_the_registered_operators_pass_opcheck():
    q, k, v = (torch.randn(1, 2, 20, 8, device=DEVICE) for _ in range(3))
    w = draw_projection(16, 8, num_heads=2).to(DEVICE).mT.contiguous().mT  # not contiguous
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.fastattn
    forward = (q, k, v, None, None, w, None, 0.5, 0.25)
    torch.library.opcheck(ops.favor_forward.default, forward, test_utils=tests)
    kept = ops.favor_forward(*forward)
    backward = (torch.randn_like(kept[0]), q, k, v, *kept, None, None, w, None, 0.5, 0.25, True)
    torch.library.opcheck(ops.favor_backward.default, backward, test_utils=tests)
    masked = torch.rand(1, 20, device=DEVICE) < 0.3
    state = (torch.rand(1, 2, 16, 8, device=DEVICE), *torch.rand(2, 1, 16, 2, device=DEVICE).mT)
    for start in ((None,) * 3, state):
        forward = (q, k, v, masked, None, w, w.sum(-1), *start, 0.5, 0.25)
        torch.library.opcheck(ops.favor_causal_forward.default, forward, test_utils=tests)
        out, *kept = ops.favor_causal_forward(*forward)
        upstream = (torch.randn_like(out), *start[:2])
        kept = (*kept[:3], kept[5] if len(kept) > 3 else None)
        backward = (*upstream, q, k, v, out, *kept, masked, None, w, *start, 0.5, 0.25, True)
        torch.library.opcheck(ops.favor_causal_backward.default, backward, test_utils=tests)
    token = (q[:, :, :1], k[:, :, :1], v[:, :, :1], masked[:, :1], w, None, *state, 0.5, 0.25)
    torch.library.opcheck(ops.favor_step.default, token, test_utils=tests)


@forms
def test_it_compiles_whole_and_once_for_twenty_lengths(causal):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    w = draw_projection(16, 8).to(DEVICE)
    run = lambda q, k, v: kernels(q, k, v, w, causal=causal)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for n in range(20, 40):
        leaves = [torch.randn(1, 1, n, 8, device=DEVICE) for _ in range(3)]
        if n in (20, 39):
            for got, want in zip(
                testing.value_and_grads(compiled, leaves),
                testing.value_and_grads(run, leaves),
                strict=True,
            ):
                torch.testing.assert_close(got, want)
        else:
            compiled(*(x.requires_grad_() for x in leaves))
    assert counter.frame_count == 1


def test_a_second_derivative_raises_and_func_grad_works():
    q, k, v = (torch.randn(1, 1, 9, 8, device=DEVICE).requires_grad_() for _ in range(3))
    w = draw_projection(16, 8).to(DEVICE)
    (dq,) = torch.autograd.grad(kernels(q, k, v, w).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()
    loss = lambda q: kernels(q, k, v, w).square().sum()  # noqa: E731
    (want,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), want)


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)], ids=str)
def test_empty_batches_and_sequences_are_no_error(sizes):
    b, h, n, s = sizes
    leaves = [torch.randn(b, h, n, 4), torch.randn(b, max(h, 1), s, 4)]
    leaves = [x.to(DEVICE).requires_grad_() for x in (*leaves, torch.randn(b, max(h, 1), s, 3))]
    out = kernels(*leaves, draw_projection(8, 4).to(DEVICE))
    assert (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), leaves))


@forms
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads", [None, 2])
def test_learned_directions_have_their_gradient(heads, variant, causal):
    case = testing.AttentionCase("", "", 2, 4, 2, 150, 150, 12, 20)
    w = draw_projection(24, 12, num_heads=heads).to(DEVICE) + 1 / 12
    mask = testing.padding_masks(2, 150)["interior"].to(DEVICE)
    options = {"variant": variant, "causal": causal, "key_padding_mask": mask}
    leaves = [*case.inputs(torch.float32, DEVICE), w]
    if variant == "oprf":
        leaves.append(torch.full((2,), -0.1, device=DEVICE))

    def run(op):
        return lambda q, k, v, w, a=None: op(q, k, v, w, oprf_constant=a, **options)

    tried = testing.value_and_grads(run(kernels), leaves)
    exact = [x.double() for x in leaves]
    for got, want in zip(
        tried, testing.value_and_grads(run(favor_attention_reference), exact), strict=True
    ):
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_sums_of_large_features_stay_means():
    """Of keys along a long direction, whose features are at their bound."""
    w = draw_projection(16, 256).to(DEVICE)
    k = (10 * w[0] / w[0].norm()).expand(1, 1, 200, 256)
    v = torch.ones(1, 1, 200, 8, device=DEVICE)
    out = kernels(torch.randn_like(k), k, v, w, causal=True, scale=1)
    torch.testing.assert_close(out, v)


def test_relu_features_may_be_tiny():
    case = testing.AttentionCase("", "", 1, 1, 1, 70, 70, 16, 16)
    tried, reference = bound(case, variant="relu", causal=True)
    q, k, v = case.inputs(torch.float32, DEVICE)
    leaves = [1e-16 * q, 1e-16 * k, v]
    exact = testing.value_and_grads(reference(torch.float32), [x.double() for x in leaves])
    for got, want in zip(testing.value_and_grads(tried, leaves), exact, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_empty_segments_may_have_several_splits(monkeypatch):
    from fastattn import _tuning

    monkeypatch.setattr(_tuning, "favor_causal_splits", lambda *_: 3)
    for ends in ([0, 0, 150], [0, 150, 150], [0, 70, 70, 150]):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        compare(CASES[2], dtypes=[torch.float32], cu_seqlens=cu_seqlens, causal=True)


@forms
def test_learned_directions_have_their_gradient_where_sequences_are_packed(causal):
    ends = torch.tensor([0, 0, 3, 66, 150], dtype=torch.int32, device=DEVICE)
    case = testing.AttentionCase("", "", 1, 4, 2, 150, 150, 12, 20)
    leaves = [*case.inputs(torch.float32, DEVICE), draw_projection(24, 12).to(DEVICE)]
    options = {"causal": causal, "cu_seqlens": ends}
    tried = testing.value_and_grads(partial(kernels, **options), leaves)
    reference = partial(favor_attention_reference, **options)
    exact = testing.value_and_grads(reference, [x.double() for x in leaves])
    for got, want in zip(tried, exact, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm()
