"""ops.favor_attention, its scan and its projections against the float64 definition."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fastattn import ops, testing
from fastattn.ops import draw_projection, favor_attention, favor_attention_scan
from fastattn.ops.favor import VARIANTS
from fastattn.ops.favor_directions import check_scale

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
torch_path = partial(favor_attention, backend="torch")
reference = ops.favor_attention_reference
forms = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
variants = pytest.mark.parametrize("variant", VARIANTS)


def inputs(case, variant="positive", dtype=torch.float32, m=24, heads=None):
    """q, k, v and the projection; for relu one that gives no row a tiny mass by chance."""
    projection = draw_projection(m, case.d, num_heads=heads)
    if variant == "relu":
        projection = projection + 1 / case.d
    return [*case.inputs(dtype), projection]


def accurate(case, variant="positive", heads=None, **options):
    for dtype in DTYPES:
        testing.assert_as_accurate_as(
            partial(torch_path, variant=variant, **options),
            partial(reference, variant=variant, **options),
            inputs(case, variant, dtype, heads=heads),
        )


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


# Values and gradients, that of the projection among them


@forms
@variants
@pytest.mark.parametrize(
    "case", [c for c in testing.LINEAR_ATTENTION if c.n < 1000], ids=lambda c: c.name
)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, variant, causal):
    accurate(case, variant, causal=causal)


@variants
@pytest.mark.parametrize("case", testing.CROSS_ATTENTION, ids=lambda c: c.name)
def test_cross_attention_is_as_accurate_as_the_definition(case, variant):
    for place in ("none", "interior", "all"):
        accurate(case, variant, key_padding_mask=testing.padding_masks(case.b, case.s)[place])


@forms
@variants
@pytest.mark.parametrize("place", ["right", "left", "interior", "all"])
def test_padding_anywhere_is_as_accurate_as_the_definition(variant, causal, place):
    case = testing.AttentionCase("", "", 3, 4, 2, 67, 67, 8, 12)
    accurate(case, variant, causal=causal, key_padding_mask=testing.padding_masks(3, 67)[place])


@forms
@variants
def test_each_head_can_have_a_projection_of_its_own(variant, causal):
    case = testing.AttentionCase("", "", 2, 4, 2, 33, 33, 8, 12)
    accurate(case, variant, heads=2, causal=causal)
    q, k, v, shared = inputs(case)
    own = shared.expand(2, -1, -1)
    assert torch.equal(
        torch_path(q, k, v, shared, causal=causal), torch_path(q, k, v, own, causal=causal)
    )


@forms
@variants
def test_packed_sequences_are_as_accurate_as_the_definition(variant, causal):
    case = testing.AttentionCase("", "", 1, 4, 2, 66, 66, 8, 12)
    ends = torch.tensor([0, 0, 3, 50, 66], dtype=torch.int32)
    mask = testing.padding_masks(1, 66)["interior"]
    accurate(case, variant, causal=causal, key_padding_mask=mask, cu_seqlens=ends)


@forms
def test_parts_of_the_sequence_add_up(causal, monkeypatch):
    case = testing.AttentionCase("", "", 2, 4, 2, 70, 70, 8, 12)
    mask = testing.padding_masks(2, 70)["left"]
    run = partial(torch_path, causal=causal, key_padding_mask=mask)
    whole = testing.value_and_grads(run, inputs(case))
    monkeypatch.setattr("fastattn._tuning.favor_part", lambda: 16)
    for a, b in zip(whole, testing.value_and_grads(run, inputs(case)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@forms
@pytest.mark.parametrize("place", ["none", "interior"])
def test_the_error_is_that_of_float32_at_every_scale_of_the_inputs(causal, place):
    """Every popular implementation fails one of these: collapse to the mean of v, NaN, zeros."""
    mask = testing.padding_masks(2, 200)[place]
    projection = draw_projection(256, 64)
    for std, allowed in ((0.1, 3e-6), (1, 3e-6), (4, 3e-6), (16, 1e-5)):
        q, k = (torch.randn(2, 2, 200, 64) * std for _ in range(2))
        v = torch.randn(2, 2, 200, 64)
        options = {"causal": causal, "key_padding_mask": mask}
        wide = [x.double() for x in (q, k, v, projection)]
        exact = reference(*wide, **options)
        assert relative_error(torch_path(q, k, v, projection, **options), exact) <= allowed
        if std >= 4 and not causal:  # far from the mean of v, and so is ours
            shown = v.double() if mask is None else v.double() * ~mask[:, None, :, None]
            count = 200 if mask is None else (~mask).sum(1)[:, None, None, None]
            assert relative_error(shown.sum(2, keepdim=True) / count, exact) > 0.5


@forms
@variants
def test_second_derivatives_are_right(variant, causal):
    case = testing.AttentionCase("", "", 1, 2, 1, 5, 5, 3, 2)
    leaves = [x.double().requires_grad_() for x in inputs(case, variant, m=4)]
    run = partial(torch_path, variant=variant, causal=causal)
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


# Causality, padding, bounds


@pytest.mark.parametrize("what", [1e4, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("at", [1, 40, 64])
@variants
def test_a_token_changes_no_earlier_output(variant, at, what):
    q, k, v, projection = inputs(testing.LINEAR_ATTENTION[4], variant)
    before = torch_path(q, k, v, projection, variant=variant, causal=True)
    for x in (q, k, v):
        x[:, :, at:] = what
    after = torch_path(q, k, v, projection, variant=variant, causal=True)
    assert torch.equal(before[:, :, :at], after[:, :, :at])


@forms
@variants
def test_what_stands_in_padding_changes_nothing(variant, causal):
    q, k, v, projection = inputs(testing.LINEAR_ATTENTION[4], variant)
    mask = testing.padding_masks(2, 65)["interior"]
    tried = partial(torch_path, variant=variant, causal=causal, key_padding_mask=mask)
    clean = testing.value_and_grads(tried, [q, k, v, projection])
    hidden = mask[:, None, :, None]
    dirty = [q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf), projection]
    for a, b in zip(clean, testing.value_and_grads(tried, dirty), strict=True):
        assert torch.equal(a, b)


@forms
@variants
def test_a_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients(variant, causal):
    leaves = inputs(testing.LINEAR_ATTENTION[3], variant)
    mask = testing.padding_masks(2, 64)["all"]
    run = partial(torch_path, variant=variant, causal=causal, key_padding_mask=mask)
    out, *grads = testing.value_and_grads(run, leaves)
    assert (out[0] == 0).all()
    assert out[1].abs().sum() > 0
    assert all(x.isfinite().all() for x in grads)


@forms
@pytest.mark.parametrize("std", [1, 100])
@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_every_output_is_a_mean_of_the_values_seen(variant, std, causal):
    q, k = (torch.randn(1, 2, 50, 16) * std for _ in range(2))
    v = torch.eye(50).expand(1, 2, 50, 50)
    weights = torch_path(q, k, v, draw_projection(32, 16), variant=variant, causal=causal)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 50))
    assert not causal or (weights.triu(1) == 0).all()


# The scan


@variants
def test_any_split_of_a_sequence_gives_the_same(variant):
    case = testing.AttentionCase("", "", 2, 4, 2, 70, 70, 8, 12)
    leaves = [x.requires_grad_() for x in inputs(case, variant)]
    *tokens, projection = leaves
    mask = testing.padding_masks(2, 70)["interior"]
    upstream = torch.randn(2, 4, 70, 12)

    def run(cuts):
        outs, state = [], None
        for a, b in itertools.pairwise(cuts):
            out, state = favor_attention_scan(
                *(x[:, :, a:b] for x in tokens),
                projection,
                state,
                variant=variant,
                key_padding_mask=mask[:, a:b],
            )
            outs.append(out)
        loss = (torch.cat(outs, 2) * upstream).sum() + state.kv.square().sum() + state.z.sum()
        return [*outs[:1], loss, *state[:2], *torch.autograd.grad(loss, leaves)][1:]

    want = run([0, 70])
    out = torch_path(*leaves, variant=variant, causal=True, key_padding_mask=mask)
    again, _ = favor_attention_scan(*leaves, variant=variant, key_padding_mask=mask)
    torch.testing.assert_close(out, again)
    for cuts in ([0, 2, 2, 33, 70], [0, 1, 2, 69, 70]):
        for got, expected in zip(run(cuts), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@variants
def test_the_scan_equals_the_recurrence(variant):
    case = testing.AttentionCase("", "", 2, 4, 2, 30, 30, 8, 12)
    leaves = [x.double() for x in inputs(case, variant)]
    mask = testing.padding_masks(2, 30)["left"]
    results = [
        favor_attention_scan(*leaves, variant=variant, key_padding_mask=mask, backend=backend)
        for backend in ("torch", "reference")
    ]
    (out, state), (want, after) = results
    torch.testing.assert_close(out, want)
    for got, expected in zip(state, after, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)


# The machinery


@variants
def test_func_grad_and_vmap_work(variant):
    q, k, v, projection = inputs(testing.LINEAR_ATTENTION[2], variant)
    loss = lambda q: torch_path(q, k, v, projection, variant=variant).square().sum()  # noqa: E731
    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), want)
    several = torch.stack((q, q + 1))
    run = lambda q: torch_path(q, k, v, projection, variant=variant)  # noqa: E731
    torch.testing.assert_close(
        torch.func.vmap(run)(several), torch.stack([run(x) for x in several])
    )


@forms
def test_it_compiles_whole_and_lengths_do_not_compile_again_and_again(causal):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(torch_path, fullgraph=True, dynamic=True, backend=counter)
    projection = draw_projection(24, 8)
    for n in range(130, 150):
        leaves = [torch.randn(1, 2, n, 8) for _ in range(3)]
        got = compiled(*leaves, projection, causal=causal)
        torch.testing.assert_close(got, torch_path(*leaves, projection, causal=causal))
    assert counter.frame_count <= 2


@forms
def test_no_tensor_of_features_of_all_tokens_is_kept_for_the_backward_pass(causal):
    q, k, v = (torch.randn(1, 1, 4096, 8).requires_grad_() for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        torch_path(q, k, v, draw_projection(64, 8), causal=causal)
    features = 4096 * 64
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // 4 for x in kept}
    assert sum(memory.values()) < features


def test_autocast_decides_the_dtype_but_not_the_sums():
    q, k, v, projection = inputs(testing.LINEAR_ATTENTION[2])
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_path(q, k, v, projection)
    want = torch_path(q.bfloat16(), k.bfloat16(), v.bfloat16(), projection)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)], ids=str)
@variants
def test_empty_batches_and_sequences_are_no_error(sizes, variant):
    b, h, n, s = sizes
    leaves = [torch.randn(b, h, n, 4), torch.randn(b, max(h, 1), s, 4)]
    leaves = [x.requires_grad_() for x in (*leaves, torch.randn(b, max(h, 1), s, 3))]
    out = torch_path(*leaves, draw_projection(8, 4), variant=variant)
    assert out.shape == (b, h, n, 3)
    assert (out == 0).all() or s > 0
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(x.isfinite().all() for x in grads)


# Projections and the estimate


def test_a_draw_is_named_by_its_arguments_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw_projection(20, 8, seed=3, layer=2, epoch=1)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        assert torch.equal(draw_projection(20, 8, seed=3, layer=2, epoch=1), first)
    others = [{"seed": 4}, {"layer": 3}, {"epoch": 2}, {"kind": "iid"}]
    for other in others:
        drawn = draw_projection(20, 8, **({"seed": 3, "layer": 2, "epoch": 1} | other))
        assert (drawn - first).abs().min() > 0
    heads = draw_projection(20, 8, num_heads=3)
    assert heads.shape == (3, 20, 8)
    assert (heads[0] - heads[1]).abs().min() > 0


@pytest.mark.parametrize(
    "m", [8, 16, 20]
)  # one block of rows comes from the factorisation as it is
def test_a_draw_is_contiguous(m):
    assert draw_projection(m, 16).is_contiguous()
    assert draw_projection(m, 16, num_heads=2).is_contiguous()


def test_orthogonal_rows_are_orthogonal_and_as_long_as_normal_ones():
    w = draw_projection(20, 8, num_heads=2000).double()
    for block in (w[:, :8], w[:, 8:16], w[:, 16:]):
        products = block @ block.mT
        off = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-5
    squares = w.square().sum(-1).flatten()  # chi squared: mean 8, variance 16
    assert abs(squares.mean() - 8) < 5 * math.sqrt(16 / len(squares))
    assert abs(squares.var() - 16) < 5 * math.sqrt(2 * 16**2 * 2.5 / len(squares))


@pytest.mark.parametrize("kind", ["orthogonal", "iid"])
def test_directions_have_no_mean_not_even_along_the_diagonal(kind):
    """QR without its signs fixed: along (1, ..., 1) the estimate is off by 28 % at d = 16."""
    w = draw_projection(16, 16, kind=kind, num_heads=4000).double()
    mean = w.mean(0)  # (m, d): each of standard deviation 1/sqrt(4000)
    assert mean.abs().max() < 5 / math.sqrt(4000)
    along = w.sum(-1) / 4  # N(0, 1) for each direction
    assert along.mean(0).abs().max() < 5 / math.sqrt(4000)
    assert (along.square().mean(0) - 1).abs().max() < 5 * math.sqrt(2 / 4000)


def kernel_values(x, y, variant, kind, m, draws, d):
    """exp(x·y) as estimated by each of several draws, (draws,)."""
    from fastattn.ops.favor import _features

    w = draw_projection(m, d, kind=kind, num_heads=draws).double()
    q, k = (x[None, None, None].double(), y[None, None, None].double())
    found = _features(q, k, w, variant, 1.0, -0.1 if variant == "oprf" else None)
    q, k = (t.expand(1, draws, 1, d) for t in (q, k))
    logits = (found.of_queries(q) + found.of_keys(k))[0, :, 0]  # (draws, features)
    logits = logits - x.double().square().sum() / 2  # the query's own, which cancels in attention
    if variant == "oprf":
        logits = logits + d / 2 * math.log(1 - 4 * -0.1)
    return logits.exp().mean(-1)


@pytest.mark.parametrize("kind", ["orthogonal", "iid"])
@pytest.mark.parametrize("variant", VARIANTS[:3])
@pytest.mark.parametrize("direction", ["plus", "minus", "random"])
def test_the_estimate_is_unbiased_within_its_standard_error(variant, kind, direction):
    d, m, draws = 16, 16, 20_000
    y = torch.full((d,), d**-0.5) if direction != "random" else torch.randn(d)
    y = y * 0.7 / y.norm()
    x = -y if direction == "minus" else y
    estimates = kernel_values(x, y, variant, kind, m, draws, d)
    true = (x.double() @ y.double()).exp()
    error = estimates.std() / math.sqrt(draws)
    assert abs(estimates.mean() - true) < 4 * error + 1e-12  # opposite ones have no variance
    if variant == "positive":
        square = (x + y).square().sum().item()
        predicted = math.sqrt(math.expm1(square) / m)
        measured = (estimates.std() / true).item()
        if kind == "iid":
            assert abs(measured - predicted) <= 0.1 * predicted + 1e-6
        else:
            assert measured <= predicted + 1e-6


def test_the_error_falls_as_the_root_of_the_number_of_features():
    x = torch.randn(16) * 0.15
    stds = [kernel_values(x, x, "positive", "iid", m, 4000, 16).std() for m in (16, 64, 256)]
    assert stds[0] / stds[1] == pytest.approx(2, rel=0.1)
    assert stds[1] / stds[2] == pytest.approx(2, rel=0.1)


def test_hyperbolic_and_oprf_features_vary_less():
    x = torch.randn(16) * 0.25
    positive, hyperbolic, oprf = (
        kernel_values(x, x, v, "iid", 16, 4000, 16).std() for v in VARIANTS[:3]
    )
    assert hyperbolic < positive
    assert oprf < positive


def test_favor_error_is_the_standard_deviation_measured():
    q, k = torch.randn(1, 2, 3, 8) * 0.6, torch.randn(1, 1, 4, 8) * 0.6
    predicted = ops.favor_error(q, k, 32, scale=0.5)
    assert predicted.shape == (1, 2, 3, 4)
    for i, j in ((0, 0), (2, 3)):
        x, y = q[0, 1, i] * 0.5**0.5, k[0, 0, j] * 0.5**0.5
        estimates = kernel_values(x, y, "positive", "iid", 32, 4000, 8)
        measured = estimates.std() / (x @ y).exp()
        assert predicted[0, 1, i, j].item() == pytest.approx(measured.item(), rel=0.15)
    assert ops.favor_error(100 * q, 100 * k, 32).isinf().any()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.favor_error(q, k, 32, scale=0.5), predicted)


def test_many_features_come_close_to_softmax_attention():
    q, k = (torch.randn(1, 2, 100, 16) * 0.5 for _ in range(2))
    v = torch.randn(1, 2, 100, 16)
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    mean = v.mean(2, keepdim=True)
    for variant in VARIANTS[:3]:
        out = torch_path(q, k, v, draw_projection(512, 16), variant=variant)
        assert relative_error(out, softmax.double()) < 0.5 * relative_error(mean, softmax.double())


def test_the_constant_of_oprf_is_the_best():
    """Of least variance at the mean it was made for; zero where there is nothing to gain."""
    assert ops.oprf_constant(0, 8) == 0
    best = ops.oprf_constant(4.0, 16)
    assert best < 0

    def variance(a):  # E exp(4A|w|² + 2√(1-4A) w·z)·(1-4A)^d / exp(|z|²), |z|² = 4
        return 16 * math.log(1 - 4 * a) - 8 * math.log(1 - 8 * a) + 8 * (1 - 4 * a) / (1 - 8 * a)

    for other in (best - 0.01, best + 0.01, 0.0):
        assert variance(best) < variance(other)


def test_a_scale_may_be_a_compilers_symbol():
    def scaled(x, scale):
        return x * check_scale(scale, 8)

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend="eager")
    for scale in (0.3, 0.7):
        assert torch.equal(compiled(torch.ones(2), scale), scaled(torch.ones(2), scale))


# Bad input

Q = torch.zeros(2, 4, 6, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 4, 6, 9)}, ValueError, "d is 9 here but 8 in q"),
        ({"projection": torch.zeros(16, 9)}, ValueError, r"projection must be .* d = 8"),
        ({"projection": torch.zeros(3, 16, 8)}, ValueError, "h_kv = 4, got"),
        ({"projection": torch.zeros(513, 8)}, ValueError, "from 1 to 512 directions, got 513"),
        ({"projection": torch.zeros(16, 8).long()}, TypeError, "projection must be floating-point"),
        ({"projection": torch.zeros(16, 8, device="meta")}, ValueError, "on cpu like q"),
        ({"variant": "trig"}, ValueError, "variant must be one of 'positive'"),
        ({"scale": 0.0}, ValueError, "scale must be positive, got 0.0"),
        ({"scale": float("nan")}, ValueError, "scale must be positive"),
        ({"scale": float("inf")}, ValueError, "scale must be positive"),
        ({"oprf_constant": -0.1}, ValueError, 'is for variant "oprf" only, got variant \'pos'),
        ({"variant": "oprf", "oprf_constant": 0.2}, ValueError, "below 1/8"),
        ({"variant": "oprf", "oprf_constant": torch.full((4,), 0.2)}, ValueError, "below 1/8"),
        ({"variant": "oprf", "oprf_constant": -math.inf}, ValueError, "finite and below 1/8"),
        ({"variant": "oprf", "oprf_constant": torch.zeros(3)}, ValueError, r"\(4,\), got shape"),
        ({"key_padding_mask": torch.zeros(2, 6)}, TypeError, "must be bool"),
        ({"causal": True, "q": torch.zeros(2, 4, 3, 8)}, ValueError, "n = 3 and s = 6"),
        ({"cu_seqlens": torch.tensor([0, 6], dtype=torch.int32)}, ValueError, "b = 1"),
        ({"backend": "cuda"}, ValueError, "has no backend 'cuda'"),
    ],
)
def test_bad_input_says_what_is_wrong(change, error, message):
    good = {"q": Q, "k": Q, "v": Q, "projection": draw_projection(16, 8)}
    with pytest.raises(error, match=message):
        favor_attention(**(good | change))


def test_a_foreign_state_says_what_is_wrong():
    projection = draw_projection(16, 8)
    _, state = favor_attention_scan(Q, Q, Q, projection)
    with pytest.raises(ValueError, match="belongs to another batch"):
        favor_attention_scan(Q[:1], Q[:1], Q[:1], projection, state)
    with pytest.raises(ValueError, match="not have a shift for variant 'relu'"):
        favor_attention_scan(Q, Q, Q, projection, state, variant="relu")
    with pytest.raises(ValueError, match=r"state\.kv must have shape \(2, 4, 32, 8\)"):
        favor_attention_scan(Q, Q, Q, projection, state, variant="hyperbolic")
    with pytest.raises(ValueError, match="as many keys as queries"):
        favor_attention_scan(Q[:, :, :2], Q, Q, projection)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_features": 0}, "num_features must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"kind": "givens"}, "kind must be one of 'orthogonal', 'iid'"),
    ],
)
def test_a_bad_draw_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_projection(**({"num_features": 4, "head_dim": 4} | arguments))


def test_a_bad_prediction_says_what_is_wrong():
    with pytest.raises(ValueError, match="num_features must be at least 1"):
        ops.favor_error(Q, Q, 0)
    with pytest.raises(ValueError, match="mean_square must not be negative"):
        ops.oprf_constant(-1.0, 8)
