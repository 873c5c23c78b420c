"""The Triton kernels against the float64 definition: interpreted in float32 without a GPU."""

import itertools
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import testing
from fastattn.ops import linear_attention, linear_attention_reference, linear_attention_scan
from fastattn.ops.linear_attention import FEATURE_MAPS

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
kernels = partial(linear_attention, backend="triton")
scan = partial(linear_attention_scan, backend="triton")
EVERY_FORM = list(itertools.product(FEATURE_MAPS, (False, True)))
SOME_FORMS = [("elu", False), ("elu", True), ("exp", False), ("exp", True)]

CASES = (
    testing.AttentionCase("one-token", "empty splits", 1, 1, 1, 1, 1, 16, 16),
    testing.AttentionCase("ragged", "no size fits a tile", 2, 2, 2, 77, 77, 20, 12),
    testing.AttentionCase("grouped", "shares of several heads add up", 1, 4, 2, 66, 66, 16, 16),
    testing.AttentionCase("wide-value", "more values than one call takes", 1, 1, 1, 40, 40, 64, 80),
    testing.AttentionCase("narrow", "far less than a tile", 1, 2, 2, 35, 35, 1, 1),
    testing.AttentionCase("widest", "the largest widths", 1, 1, 1, 17, 17, 256, 24),
)


def inputs(case, feature_map, dtype=torch.float32):
    """Shifted for the relu maps, whose mass can be tiny by chance."""
    q, k, v = case.inputs(dtype, DEVICE)
    return [q + 1, k + 1, v] if feature_map in ("relu", "squared_relu") else [q, k, v]


def compare(case, feature_map, dtypes=DTYPES, **options):
    options["feature_map"] = feature_map
    for dtype in dtypes:
        testing.assert_as_accurate_as(
            partial(kernels, **options),
            partial(linear_attention_reference, **options),
            inputs(case, feature_map, dtype),
        )


@pytest.mark.parametrize(("feature_map", "causal"), EVERY_FORM)
@pytest.mark.parametrize("case", CASES[1:3], ids=lambda c: c.name)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, feature_map, causal):
    compare(case, feature_map, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_width_is_as_accurate_as_the_definition(case, causal):
    compare(case, "elu", causal=causal)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_cross_attention_is_as_accurate_as_the_definition(feature_map):
    for n, s in ((9, 70), (70, 9)):
        case = testing.AttentionCase("", "", 1, 2, 1, n, s, 16, 16)
        mask = testing.padding_masks(1, s)["interior"].to(DEVICE)
        compare(case, feature_map, key_padding_mask=mask)


@pytest.mark.parametrize(("feature_map", "causal"), SOME_FORMS)
@pytest.mark.parametrize("place", ["left", "interior", "all"])
def test_padding_is_as_accurate_as_the_definition(feature_map, causal, place):
    mask = testing.padding_masks(2, 77)[place].to(DEVICE)
    compare(CASES[1], feature_map, causal=causal, key_padding_mask=mask)


@pytest.mark.parametrize(("feature_map", "causal"), SOME_FORMS)
def test_packed_sequences_are_as_accurate_as_the_definition(feature_map, causal):
    ends = torch.tensor([0, 0, 3, 66], dtype=torch.int32, device=DEVICE)
    mask = testing.padding_masks(1, 66)["interior"].to(DEVICE)
    compare(CASES[2], feature_map, causal=causal, key_padding_mask=mask, cu_seqlens=ends)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("feature_map", "causal"), SOME_FORMS)
def test_normalize_can_be_set(feature_map, causal, normalize):
    compare(CASES[1], feature_map, causal=causal, normalize=normalize)


def test_exp_is_exact_where_exponentials_overflow():
    q, k, v = (torch.randn(1, 1, 50, 8, device=DEVICE) for _ in range(3))
    testing.assert_as_accurate_as(
        partial(kernels, feature_map="exp"),
        partial(linear_attention_reference, feature_map="exp"),
        [100 * q, 100 * k, v],
    )


def test_causal_exp_is_exact_to_the_rounding_of_its_exponents_where_they_overflow():
    """A running maximum forward and another backward: their rounding does not cancel."""
    q, k, v = (torch.randn(1, 1, 50, 8, device=DEVICE) for _ in range(3))
    leaves = [100 * q, 100 * k, v]
    largest = (leaves[0].abs().amax() + leaves[1].abs().amax()).item()
    options = {"feature_map": "exp", "causal": True}
    exact = testing.value_and_grads(
        partial(linear_attention_reference, **options), [x.double() for x in leaves]
    )
    tried = testing.value_and_grads(partial(kernels, **options), leaves)
    for got, want in zip(tried, exact, strict=True):
        error = (got - want).norm() / want.norm()
        assert error <= torch.finfo(torch.float32).eps * largest


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_float16_has_room_for_long_sums(causal):
    """S and z over 70000 keys exceed float16, the average of the values does not."""
    q, k = (torch.randn(1, 1, 70_000, 8, device=DEVICE).half().requires_grad_() for _ in range(2))
    v = torch.full_like(q, 3).requires_grad_()
    out = kernels(q, k, v, causal=causal)
    torch.testing.assert_close(out, v, rtol=2e-3, atol=0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), (q, k, v)))


# The scan


@pytest.mark.parametrize(
    ("feature_map", "normalize"),
    [("elu", True), ("elu", False), ("identity", False), ("exp", True), ("exp", False)],
)
def test_any_split_gives_the_same_values_gradients_and_state(feature_map, normalize):
    leaves = [torch.randn(1, h, 70, 8, device=DEVICE).requires_grad_() for h in (2, 1, 1)]
    mask = torch.rand(1, 70, device=DEVICE) < 0.3
    mask[:, :3] = True  # a state that has seen nothing
    upstream = torch.randn(1, 2, 70, 8, device=DEVICE)

    def run(function, cuts):
        state, outs = None, []
        for a, b in itertools.pairwise(cuts):
            pieces = (x[:, :, a:b] for x in leaves)
            out, state = function(
                *pieces,
                state,
                feature_map=feature_map,
                normalize=normalize,
                key_padding_mask=mask[:, a:b],
            )
            outs.append(out)
        loss = (torch.cat(outs, 2) * upstream).sum() + state.kv.square().sum() + state.z.sum()
        return [loss, *(x for x in state if x is not None), *torch.autograd.grad(loss, leaves)]

    want = run(partial(linear_attention_scan, backend="torch"), [0, 70])
    for cuts in ([0, 70], [0, 2, 2, 33, 70], [0, 1, 2, 69, 70]):
        for got, expected in zip(run(scan, cuts), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("feature_map", "normalize"), [(x, None) for x in FEATURE_MAPS] + [("exp", False)]
)
@pytest.mark.parametrize("widths", [(8, 8), (20, 12), (1, 3), (128, 80)], ids=str)
def test_a_step_without_gradients_equals_the_recurrence(feature_map, normalize, widths):
    d, e = widths
    for dtype in DTYPES:
        shapes = (2, 4, d), (2, 2, d), (2, 2, e)
        q, k, v = (torch.rand(b, 9, h, x, device=DEVICE).to(dtype) for b, h, x in shapes)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = testing.padding_masks(2, 9)["interior"].to(DEVICE)
        options = {"feature_map": feature_map, "normalize": normalize}
        outs, state = [], None
        with torch.no_grad():
            for i in range(9):
                token = (x[:, :, i : i + 1] for x in (q, k, v))
                out, state = scan(*token, state, key_padding_mask=mask[:, i : i + 1], **options)
                outs.append(out)
            want, after = linear_attention_scan(
                q, k, v, key_padding_mask=mask, backend="reference", **options
            )
        rounding = max(2e-5, 2 * torch.finfo(dtype).eps)  # each of the two rounds once
        torch.testing.assert_close(torch.cat(outs, 2), want, rtol=rounding, atol=1e-5)
        for got, expected in zip(state, after, strict=True):
            if expected is not None:
                torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-5)


# Causality and padding


@pytest.mark.parametrize("what", [1e4, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("at", [1, 40, 64])
@pytest.mark.parametrize("feature_map", ["elu", "exp"])
def test_a_token_changes_no_earlier_output(feature_map, at, what):
    q, k, v = (torch.randn(1, 1, 70, 8, device=DEVICE) for _ in range(3))
    before = kernels(q, k, v, causal=True, feature_map=feature_map)
    for x in (q, k, v):
        x[:, :, at:] = what
    after = kernels(q, k, v, causal=True, feature_map=feature_map)
    assert torch.equal(before[:, :, :at], after[:, :, :at])
    if what != what:
        assert after[:, :, at:].isnan().all()


@pytest.mark.parametrize("feature_map", ["elu", "relu", "squared_relu", "identity"])
def test_a_nan_is_not_swallowed(feature_map):
    for place in range(3):
        leaves = [torch.randn(1, 1, 40, 8, device=DEVICE) for _ in range(3)]
        leaves[place][0, 0, 5] = torch.nan
        assert kernels(*leaves, feature_map=feature_map)[0, 0, 5].isnan().all()


@pytest.mark.parametrize(("feature_map", "causal"), SOME_FORMS)
def test_what_stands_in_padding_changes_nothing(feature_map, causal):
    case = CASES[1]
    q, k, v = inputs(case, feature_map)
    mask = testing.padding_masks(2, 77)["interior"].to(DEVICE)
    tried = partial(kernels, feature_map=feature_map, causal=causal, key_padding_mask=mask)
    clean = testing.value_and_grads(tried, [q, k, v])
    hidden = mask[:, None, :, None]
    dirty = [q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)]
    for a, b in zip(clean, testing.value_and_grads(tried, dirty), strict=True):
        assert torch.equal(a, b)


# The machinery


def test_two_runs_are_bitwise_equal_and_a_sample_does_not_see_its_neighbours():
    q, k, v = (torch.randn(2, 2, 70, 8, device=DEVICE) for _ in range(3))
    one, two = (testing.value_and_grads(kernels, [q, k, v]) for _ in range(2))
    other = testing.value_and_grads(
        kernels, [torch.cat((x[:1], torch.randn_like(x[1:])), 0) for x in (q, k, v)]
    )
    for a, b, c in zip(one, two, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:1], c[:1])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_strides_are_followed(causal):
    q, k, v = (
        torch.randn(2, 40, 3, 2, 8, device=DEVICE).unbind(2)[i].transpose(1, 2) for i in range(3)
    )
    upstream = torch.randn(2, 40, 2, 8, device=DEVICE).transpose(1, 2)
    results = []
    for leaves in ((q, k, v), [x.contiguous() for x in (q, k, v)]):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = kernels(*leaves, causal=causal)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    odd = [torch.randn(2, 2, 40, 16, device=DEVICE)[..., ::2] for _ in range(3)]
    results[0].append(kernels(*odd, causal=causal))
    results[1].append(kernels(*(x.contiguous() for x in odd), causal=causal))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_registered_operators_pass_opcheck():
    from fastattn.ops import linear_attention_triton  # noqa: F401

    q, k, v = (torch.randn(1, 2, 20, 8, device=DEVICE) for _ in range(3))
    state = *(torch.rand(1, 2, *x, device=DEVICE) for x in ((8, 8), (8,))), None
    tests = ("test_schema", "test_faketensor")
    for mask, start in ((None, (None,) * 3), (torch.rand(1, 20, device=DEVICE) < 0.3, state)):
        forward = (q, k, v, mask, None, *start, "elu", True, True)
        torch.library.opcheck(
            torch.ops.fastattn.linear_attention_forward.default, forward, test_utils=tests
        )
        out, kept, *_ = torch.ops.fastattn.linear_attention_forward(*forward)
        upstream = (torch.randn_like(out), *start[:2])
        torch.library.opcheck(
            torch.ops.fastattn.linear_attention_backward.default,
            (*upstream, q, k, v, out, kept, None, mask, None, *start, "elu", True, True),
            test_utils=tests,
        )


def test_a_dispatch_mode_sees_the_registered_operators():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    leaves = [torch.randn(1, 1, 9, 8, device=DEVICE).requires_grad_() for _ in range(3)]
    with Watch():
        torch.autograd.grad(kernels(*leaves).sum(), leaves)
    names = [x for x in seen if x.startswith("fastattn::")]
    assert names == ["fastattn::linear_attention_forward", "fastattn::linear_attention_backward"]


@pytest.mark.gpu
def test_a_profilers_hook_sees_every_launch():
    from triton.knobs import runtime

    q, k, v = (torch.randn(1, 1, 9, 8, device=DEVICE) for _ in range(3))
    want = kernels(q, k, v)
    seen = []
    hook = lambda launched: seen.append(launched.get()["name"])  # noqa: E731
    runtime.launch_enter_hook.add(hook)
    try:
        assert torch.equal(kernels(q, k, v), want)
    finally:
        runtime.launch_enter_hook.remove(hook)
    assert seen == ["sum_keys_kernel", "attend_kernel"]


def test_it_compiles_whole_and_once_for_twenty_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kernels, fullgraph=True, dynamic=True, backend=counter)
    for n in range(20, 40):
        leaves = [torch.randn(1, 1, n, 8, device=DEVICE) for _ in range(3)]
        if n in (20, 39):
            for got, want in zip(
                testing.value_and_grads(compiled, leaves),
                testing.value_and_grads(kernels, leaves),
                strict=True,
            ):
                torch.testing.assert_close(got, want)
        else:
            compiled(*(x.requires_grad_() for x in leaves))
    assert counter.frame_count == 1


def test_a_second_derivative_raises_and_func_grad_works():
    q, k, v = (torch.randn(1, 1, 9, 8, device=DEVICE).requires_grad_() for _ in range(3))
    (dq,) = torch.autograd.grad(kernels(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()
    loss = lambda q: kernels(q, k, v).square().sum()  # noqa: E731
    (want,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), want)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("feature_map", ["elu", "exp"])
def test_memory_around_the_buffers_is_neither_read_nor_left_in_the_results(feature_map, causal):
    """Inputs and upstream gradient lie inside NaN, and so does the memory of every result."""

    def surrounded(x):
        b, h, n, d = x.shape
        inside = torch.full((b, h, n + 9, d + 16), torch.nan, device=DEVICE)[:, :, 4 : 4 + n, 8:-8]
        return inside.copy_(x)

    for case in (CASES[1], CASES[4]):
        leaves = inputs(case, feature_map)
        upstream = torch.randn(*leaves[0].shape[:3], case.e, device=DEVICE)
        results = []
        for around in (torch.clone, surrounded):
            xs = [around(x).requires_grad_() for x in leaves]
            torch.use_deterministic_algorithms(around is surrounded)  # fills new memory with NaN
            try:
                out = kernels(*xs, feature_map=feature_map, causal=causal)
                results.append([out, *torch.autograd.grad(out, xs, around(upstream))])
            finally:
                torch.use_deterministic_algorithms(False)
        for clean, got in zip(*results, strict=True):
            assert torch.equal(clean, got)


def relative_error(got, want):
    """Of order 1 where a wrapped offset reads other rows; two roundings are under 2^-6."""
    return (got.double() - want.double()).norm() / want.double().norm()


@pytest.mark.gpu
def test_one_sequence_of_more_than_two_to_the_31_elements():
    n, d = 2**25 + 77, 64
    q, k, v = (torch.randn(1, 1, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    kv, z = 0, 0
    for keys, values in zip(k.split(2**20, 2), v.split(2**20, 2), strict=True):
        features = torch.nn.functional.elu(keys.float()) + 1
        kv = kv + (features.mT @ values.float()).double()
        z = z + features.sum(2, dtype=torch.float64)
    queries = torch.nn.functional.elu(q[:, :, -200:].double()) + 1
    want = (queries @ kv) / (queries @ z.unsqueeze(-1))
    for causal in (False, True):
        assert relative_error(kernels(q, k, v, causal=causal)[:, :, -200:], want) < 2**-6


@pytest.mark.gpu
def test_float16_has_room_for_large_values():
    q, k, v = (torch.randn(1, 1, 500, 64, device=DEVICE) for _ in range(3))
    for causal in (False, True):
        testing.assert_as_accurate_as(
            partial(kernels, causal=causal),
            partial(linear_attention_reference, causal=causal),
            [q.half(), k.half(), (1000 * v).half()],
        )


@pytest.mark.skipif(ON_GPU, reason="about machines without a GPU")
def test_what_the_kernels_cannot_do_says_why(monkeypatch):
    q = torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match="needs float32"):
        kernels(*(q.bfloat16(),) * 3)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="inputs are on the CPU, it needs CUDA"):
        kernels(q, q, q)
