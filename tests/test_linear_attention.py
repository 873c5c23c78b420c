"""ops.linear_attention and its scan against the float64 definition."""

import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from fastattn import testing
from fastattn.ops import (
    LinearState,
    linear_attention,
    linear_attention_reference,
    linear_attention_scan,
)
from fastattn.ops.linear_attention import FEATURE_MAPS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
torch_path = partial(linear_attention, backend="torch")


def both(**options):
    """The op and its definition, with the same options."""
    return partial(torch_path, **options), partial(linear_attention_reference, **options)


def well_conditioned(feature_map, inputs):
    """Shift q and k for the relu maps, which else have rows of nearly no mass by chance: there
    the gradient is a difference of huge terms in any form that is linear in n."""
    q, k, v = inputs
    return [q + 1, k + 1, v] if feature_map in ("relu", "squared_relu") else inputs


def caught(mutant, reference, inputs):
    """Whether the comparison rejects the mutant, for its error."""
    try:
        testing.assert_as_accurate_as(mutant, reference, inputs)
    except AssertionError as error:
        return "allowed" in str(error)
    return False


def randn(*shape, scale=1.0, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).mul(scale).to(dtype)


# Values and gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("case", testing.LINEAR_ATTENTION, ids=lambda c: c.name)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, feature_map, causal, device):
    for dtype in DTYPES:
        if case.n == 1000 and dtype != torch.float32:
            continue  # (n, n, d) of the definition of exp, once
        tried, reference = both(feature_map=feature_map, causal=causal)
        inputs = well_conditioned(feature_map, case.inputs(dtype, device))
        testing.assert_as_accurate_as(tried, reference, inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("case", testing.CROSS_ATTENTION, ids=lambda c: c.name)
def test_cross_attention_is_as_accurate_as_the_definition(case, feature_map, device):
    for dtype, place in itertools.product(DTYPES, ("none", "interior", "all")):
        mask = testing.padding_masks(case.b, case.s)[place]
        mask = None if mask is None else mask.to(device)
        tried, reference = both(feature_map=feature_map, key_padding_mask=mask)
        inputs = well_conditioned(feature_map, case.inputs(dtype, device))
        testing.assert_as_accurate_as(tried, reference, inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", ["right", "left", "interior", "all"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_padding_anywhere_is_as_accurate_as_the_definition(feature_map, causal, place, device):
    case = testing.AttentionCase("", "", 3, 4, 2, 67, 67, 8, 12)
    mask = testing.padding_masks(3, 67)[place].to(device)
    tried, reference = both(feature_map=feature_map, causal=causal, key_padding_mask=mask)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = well_conditioned(feature_map, case.inputs(dtype, device))
        testing.assert_as_accurate_as(tried, reference, inputs)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("normalize", [False, True], ids=["sum", "mean"])
def test_normalize_can_be_set(feature_map, causal, normalize):
    inputs = well_conditioned(feature_map, testing.LINEAR_ATTENTION[4].inputs(torch.float32))
    if feature_map == "identity" and normalize:
        inputs = [x.abs() for x in inputs]
    tried, reference = both(feature_map=feature_map, causal=causal, normalize=normalize)
    testing.assert_as_accurate_as(tried, reference, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(  # n1000 is slow to define, and no other than n65
    "case", [c for c in testing.LINEAR_ATTENTION[2:] if c.n < 1000], ids=lambda c: c.name
)
def test_the_comparison_catches_mutated_results(case, causal, dtype):
    inputs = case.inputs(dtype)
    tried, reference = both(causal=causal)
    testing.assert_as_accurate_as(tried, reference, inputs)
    mutants = {
        "zeroed": lambda *x: tried(*x) * 0,
        "denominators dropped": partial(torch_path, causal=causal, normalize=False),
        "no gradient of v": lambda q, k, v: tried(q, k, v.detach() + 0 * v),
    }
    if case.d > 1 or causal:  # with one feature all rows that see the same keys are equal
        mutants["rows shifted"] = lambda *x: tried(*x).roll(1, -2)
    if case.d > 1:  # and no weight depends on its query
        mutants["no gradient of q"] = lambda q, k, v: tried(q.detach() + 0 * q, k, v)
        mutants["no gradient of k"] = lambda q, k, v: tried(q, k.detach() + 0 * k, v)
    for name, mutant in mutants.items():
        assert caught(mutant, reference, inputs), f"the mutant «{name}» was not caught"


def test_the_comparison_catches_a_wrong_gradient_behind_a_right_value():
    inputs = testing.LINEAR_ATTENTION[4].inputs(torch.float32)
    tried, reference = both()
    with pytest.raises(AssertionError, match="grad 1"):
        testing.assert_as_accurate_as(
            lambda q, k, v: tried(q, k.detach() + 0 * k, v), reference, inputs
        )


def test_rows_are_averages_of_the_values_seen():
    q, k, v = testing.LINEAR_ATTENTION[5].inputs(torch.float64)
    for feature_map in ("elu", "relu", "squared_relu", "exp"):
        ones = torch_path(q, k, torch.ones_like(v), feature_map=feature_map, causal=True)
        rows_with_mass = ones != 0
        torch.testing.assert_close(ones[rows_with_mass], ones.new_ones(rows_with_mass.sum()))
        assert rows_with_mass.double().mean() > 0.9


def test_default_normalisation_is_off_for_signed_weights_only():
    q, k, v = testing.LINEAR_ATTENTION[4].inputs(torch.float64)
    plain = (q @ k.mT) @ v
    torch.testing.assert_close(torch_path(q, k, v, feature_map="identity"), plain)
    assert (torch_path(q, k, v, feature_map="elu") - plain).abs().max() > 1


# exp never overflows, small features never vanish


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_exp_is_exact_where_exponentials_overflow(causal, scale):
    q, k = randn(1, 2, 100, 8, scale=scale), randn(1, 2, 100, 8, scale=scale)
    tried, reference = both(feature_map="exp", causal=causal)
    testing.assert_as_accurate_as(tried, reference, [q, k, randn(1, 2, 100, 4)])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_unnormalised_exp_is_right_as_far_as_the_dtype_reaches(causal):
    q, k, v = (randn(1, 1, 20, 4, dtype=torch.float64) for _ in range(3))
    options = {"feature_map": "exp", "normalize": False, "causal": causal}
    for shift, dtype in ((100.0, torch.float64), (300.0, torch.float64), (40.0, torch.float32)):
        inputs = [(x + shift).to(dtype) for x in (q, k)] + [v.to(dtype)]
        got = torch_path(*inputs, **options)
        want = linear_attention_reference(*(x.double() for x in inputs), **options)
        bound = 1e-11 if dtype == torch.float64 else 1e-4  # eps times the logits' size
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=0)


@pytest.mark.parametrize("ramp", [1.0, -1.0], ids=["rising", "falling"])
def test_causal_exp_survives_keys_that_rise_or_fall_by_hundreds(ramp):
    k = ramp * torch.linspace(-400, 400, 130)[:, None].expand(1, 1, 130, 4)
    inputs = [randn(1, 1, 130, 4), k + randn(1, 1, 130, 4), randn(1, 1, 130, 4)]
    tried, reference = both(feature_map="exp", causal=True)
    testing.assert_as_accurate_as(tried, reference, inputs)


def test_elu_keeps_features_that_elu_plus_one_would_round_to_zero():
    q = k = torch.full((1, 1, 8, 4), -20.0)
    v = randn(1, 1, 8, 4)
    torch.testing.assert_close(torch_path(q, k, v), v.mean(2, keepdim=True).expand_as(v))


def test_half_precision_sums_do_not_overflow():
    q = k = torch.full((1, 1, 70_000, 4), 3.0, dtype=torch.float16)
    v = torch.ones(1, 1, 70_000, 2, dtype=torch.float16)
    assert torch.equal(torch_path(q, k, v), v)
    assert torch.equal(torch_path(q, k, v, causal=True), v)


# Causality


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("at", [1, 40, 64, 129])
@pytest.mark.parametrize("what", [1000.0, float("inf"), float("nan")], ids=str)
def test_a_token_changes_no_earlier_output(feature_map, at, what):
    q, k, v = (randn(1, 2, 130, 8, dtype=torch.float64) for _ in range(3))
    before = torch_path(q, k, v, feature_map=feature_map, causal=True)
    for x in (q, k, v):
        x[:, :, at:] = what
    after = torch_path(q, k, v, feature_map=feature_map, causal=True)
    assert torch.equal(before[:, :, :at], after[:, :, :at])
    assert not torch.equal(before[:, :, at:], after[:, :, at:])


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_the_jacobian_of_causal_attention_is_triangular(feature_map):
    q, k, v = (randn(1, 1, 70, 3, dtype=torch.float64) for _ in range(3))
    for place in (1, 2):

        def rows(x, place=place):
            inputs = [q, k, v]
            inputs[place] = x
            return torch_path(*inputs, feature_map=feature_map, causal=True).sum((0, 1, 3))

        jacobian = torch.autograd.functional.jacobian(rows, (q, k, v)[place]).abs().sum((1, 2, 4))
        assert torch.equal(jacobian, jacobian.tril())
        assert (jacobian.diagonal() > 0).float().mean() > 0.4  # relu switches some off


# Padding


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_what_stands_in_padding_changes_nothing(feature_map, causal):
    case = testing.AttentionCase("", "", 2, 4, 2, 66, 66, 8, 8)
    q, k, v = case.inputs(torch.float64)
    for mask in testing.padding_masks(2, 66).values():
        if mask is None:
            continue
        tried = partial(torch_path, feature_map=feature_map, causal=causal, key_padding_mask=mask)
        clean = testing.value_and_grads(tried, [q, k, v])
        hidden = mask[:, None, :, None]
        for what in (float("nan"), float("inf"), 1e300):
            dirty = testing.value_and_grads(
                tried, [q, k.masked_fill(hidden, what), v.masked_fill(hidden, what)]
            )
            for a, b in zip(clean, dirty, strict=True):
                assert torch.equal(a, b)


def test_a_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients():
    for feature_map, causal in itertools.product(FEATURE_MAPS, (False, True)):
        inputs = testing.LINEAR_ATTENTION[4].inputs(torch.float32)
        mask = torch.zeros(2, 65, dtype=torch.bool)
        mask[0] = True
        mask[1, :3] = True
        out, *grads = testing.value_and_grads(
            partial(torch_path, feature_map=feature_map, causal=causal, key_padding_mask=mask),
            inputs,
        )
        assert torch.all(out[0] == 0)
        assert torch.all(out[1, :, 3:].abs().sum(-1) > 0)
        if causal:
            assert torch.all(out[1, :, :3] == 0)
        assert all(g.isfinite().all() for g in grads)


def test_relu_rows_without_an_active_feature_give_zeros():
    q = -torch.ones(1, 1, 5, 4)
    out, *grads = testing.value_and_grads(
        partial(torch_path, feature_map="relu"), [q, randn(1, 1, 5, 4), randn(1, 1, 5, 4)]
    )
    assert torch.all(out == 0)
    assert all(g.isfinite().all() for g in grads)


# Packed sequences


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_packed_sequences_equal_separate_calls(feature_map, causal):
    ends = [0, 0, 1, 2, 64, 65, 193, 193, 200]  # empty, tiny, across chunks, three chunks
    q, k, v = (randn(1, h, 200, 6, dtype=torch.float64, scale=3) for h in (4, 2, 2))
    tried = partial(torch_path, feature_map=feature_map, causal=causal)
    packed = tried(q, k, v, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    parts = [tried(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(ends)]
    torch.testing.assert_close(packed, torch.cat(parts, 2), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_packed_sequences_are_as_accurate_as_the_definition(feature_map, causal):
    ends = torch.tensor([0, 5, 70, 71, 140], dtype=torch.int32)
    case = testing.AttentionCase("", "", 1, 4, 2, 140, 140, 8, 12)
    tried, reference = both(feature_map=feature_map, causal=causal, cu_seqlens=ends)
    inputs = well_conditioned(feature_map, case.inputs(torch.float32))
    testing.assert_as_accurate_as(tried, reference, inputs)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_a_nan_stays_in_its_segment(causal):
    for feature_map in FEATURE_MAPS:
        q, k, v = (randn(1, 1, 90, 4) for _ in range(3))
        tried = partial(
            torch_path,
            feature_map=feature_map,
            causal=causal,
            cu_seqlens=torch.tensor([0, 30, 50, 90], dtype=torch.int32),
        )
        before = tried(q, k, v)
        for x in (q, k, v):
            x[:, :, 30:50] = torch.nan
        after = tried(q, k, v)
        assert torch.equal(before[:, :, :30], after[:, :, :30])
        assert torch.equal(before[:, :, 50:], after[:, :, 50:])


# The scan


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_any_split_of_a_sequence_gives_the_same(feature_map, scale):
    q, k, v = (randn(2, h, 140, 8, scale=scale, dtype=torch.float64) for h in (4, 2, 2))
    mask = torch.rand(2, 140) < 0.3
    whole = torch_path(q, k, v, feature_map=feature_map, causal=True, key_padding_mask=mask)
    final = linear_attention_scan(q, k, v, feature_map=feature_map, key_padding_mask=mask)[1]
    for cuts in ([0, 140], [0, 100, 140], [0, 0, 1, 64, 65, 128, 140], list(range(141))):
        state, outs = None, []
        for a, b in itertools.pairwise(cuts):
            out, state = linear_attention_scan(
                q[:, :, a:b],
                k[:, :, a:b],
                v[:, :, a:b],
                state,
                feature_map=feature_map,
                key_padding_mask=mask[:, a:b],
            )
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-9, atol=1e-10)
        for got, want in zip(state, final, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("normalize", [None, False])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_the_scan_equals_the_recurrence(feature_map, normalize):
    q, k, v = (randn(2, h, 30, 5, dtype=torch.float64) for h in (4, 2, 2))
    options = {"feature_map": feature_map, "normalize": normalize}
    masks = torch.rand(2, 30) < 0.4
    states = [None, None]
    for a, b in ((0, 13), (13, 14), (14, 30)):
        pieces = [x[:, :, a:b] for x in (q, k, v)]
        outs = []
        for i, backend in enumerate(("torch", "reference")):
            out, states[i] = linear_attention_scan(
                *pieces, states[i], key_padding_mask=masks[:, a:b], backend=backend, **options
            )
            outs.append(out)
        torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-11)
    for got, want in zip(*states, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_gradients_pass_through_the_state(feature_map):
    q, k, v = (randn(1, 2, 40, 6, dtype=torch.float64) for _ in range(3))

    def in_two_pieces(q, k, v):
        first, state = linear_attention_scan(
            q[:, :, :17], k[:, :, :17], v[:, :, :17], feature_map=feature_map
        )
        second, _ = linear_attention_scan(
            q[:, :, 17:], k[:, :, 17:], v[:, :, 17:], state, feature_map=feature_map
        )
        return torch.cat((first, second), 2)

    whole = partial(torch_path, feature_map=feature_map, causal=True)
    for got, want in zip(
        testing.value_and_grads(in_two_pieces, [q, k, v]),
        testing.value_and_grads(whole, [q, k, v]),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_the_state_is_float32_and_does_not_grow():
    q, k, v = (randn(1, 1, 10, 4, dtype=torch.bfloat16) for _ in range(3))
    _, state = linear_attention_scan(q, k, v)
    assert state.kv.dtype == state.z.dtype == torch.float32
    assert state.kv.shape == (1, 1, 4, 4)
    assert state.z.shape == (1, 1, 4)
    assert state.shift is None
    _, later = linear_attention_scan(q, k, v, state)
    assert later.kv.shape == state.kv.shape
    assert linear_attention_scan(q, k, v, feature_map="exp")[1].shift.shape == (1, 1, 4)


def test_a_long_sum_does_not_stall():
    k = torch.zeros(1, 1, 100_000, 1, dtype=torch.bfloat16)
    _, state = linear_attention_scan(k, k, k + 1)
    assert state.z.item() == 100_000


# Derivatives, compilers, contexts


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_second_derivatives_are_right(feature_map, causal):
    inputs = [randn(1, 2, 5, 3, dtype=torch.float64).requires_grad_() for _ in range(3)]
    tried = partial(torch_path, feature_map=feature_map, causal=causal)
    assert torch.autograd.gradcheck(tried, inputs)
    assert torch.autograd.gradgradcheck(tried, inputs)


def test_func_grad_and_vmap_work():
    q, k, v = (randn(3, 1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    loss = lambda q, k, v: torch_path(q, k, v, causal=True).square().sum()  # noqa: E731
    grads = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    for i in range(3):
        inputs = [x[i].clone().requires_grad_() for x in (q, k, v)]
        for got, want in zip(grads, torch.autograd.grad(loss(*inputs), inputs), strict=True):
            torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("feature_map", ["elu", "exp"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"packed": True}], ids=str)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_it_compiles_whole(feature_map, options, compiler):
    torch._dynamo.reset()
    q, k, v = (randn(1, 2, 70, 8) for _ in range(3))
    options = dict(options)
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.tensor([0, 30, 70], dtype=torch.int32)
    tried = partial(linear_attention, feature_map=feature_map, **options)
    compiled = torch.compile(tried, fullgraph=True, backend=compiler)
    for got, want in zip(
        testing.value_and_grads(compiled, [q, k, v]),
        testing.value_and_grads(tried, [q, k, v]),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_compiled_lengths_do_not_compile_again_and_again():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(linear_attention, fullgraph=True, dynamic=True, backend=counter)
    for n in range(70, 90):
        q, k, v = (randn(1, 2, n, 8) for _ in range(3))
        compiled(q, k, v, causal=True)
    assert counter.frame_count == 1


def test_autocast_decides_the_dtype_but_not_the_sums():
    q, k, v = (randn(1, 2, 300, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear_attention(q, k, v)
        mixed = linear_attention(q.bfloat16(), k, v)
    assert out.dtype == mixed.dtype == torch.bfloat16
    rounded = (x.bfloat16().double() for x in (q, k, v))
    exact = linear_attention_reference(*rounded)
    assert (out - exact).abs().max() <= 2**-8 * exact.abs().max()  # one rounding, of the result


def test_autocast_leaves_float64_alone():
    q = randn(1, 2, 10, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_attention(q, q, q), linear_attention(q, q, q, backend="torch"))
        assert linear_attention(q, q, q).dtype == torch.float64


def test_meta_tensors_have_the_right_shape():
    q, k, v = (torch.randn(2, h, 70, 8, device="meta") for h in (4, 2, 2))
    for options in ({}, {"causal": True}, {"causal": True, "feature_map": "exp"}):
        out = linear_attention(q, k, v, **options)
        assert out.shape == (2, 4, 70, 8)
        assert out.device.type == "meta"


def test_strides_do_not_matter():
    q, k, v = (randn(2, 70, 4, 24)[..., ::3].transpose(1, 2) for _ in range(3))
    plain = (x.contiguous() for x in (q, k, v))
    torch.testing.assert_close(linear_attention(q, k, v), linear_attention(*plain))


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)], ids=str)
def test_empty_batches_and_sequences_are_no_error(sizes):
    b, n, s = sizes
    q, k, v = randn(b, 2, n, 4), randn(b, 2, s, 4), randn(b, 2, s, 3)
    for feature_map in FEATURE_MAPS:
        out = linear_attention(q, k, v, feature_map=feature_map)
        assert out.shape == (b, 2, n, 3)
        assert torch.all(out == 0)
        if n == s == 0:
            assert (
                linear_attention(q, k, v, feature_map=feature_map, causal=True).shape == out.shape
            )


@pytest.mark.slow
@pytest.mark.parametrize("feature_map", ["elu", "exp"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_memory_is_linear_at_65536_tokens(feature_map, causal):
    """An (n, n) tensor would be 16 GiB; with gradients the process may grow by at most 1 GiB."""
    program = f"""
import resource, torch
from fastattn.ops import linear_attention
q, k, v = (torch.randn(1, 1, 65536, 64, requires_grad=True) for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = linear_attention(q, k, v, feature_map={feature_map!r}, causal={causal})
out.sum().backward()
assert out.isfinite().all() and k.grad.isfinite().all()
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
assert grown < 1, f"grew by {{grown:.2f}} GiB"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Any shapes at all


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_mask_and_split_equals_the_definition(data):
    draw = lambda *x: data.draw(st.integers(*x))  # noqa: E731
    b, h_kv, group, n = draw(1, 3), draw(1, 2), draw(1, 3), draw(1, 150)
    d, e = draw(1, 20), draw(1, 20)
    feature_map = data.draw(st.sampled_from(FEATURE_MAPS))
    torch.manual_seed(draw(0, 10_000))
    scale = data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    q = randn(b, h_kv * group, n, d, scale=scale, dtype=torch.float64)
    k = randn(b, h_kv, n, d, scale=scale, dtype=torch.float64)
    v = randn(b, h_kv, n, e, dtype=torch.float64)
    mask = torch.rand(b, n) < data.draw(st.sampled_from([0.0, 0.3, 0.95]))
    options = {"feature_map": feature_map, "key_padding_mask": mask}
    want = linear_attention_reference(q, k, v, causal=True, **options)
    cut = draw(0, n)
    first, state = linear_attention_scan(
        q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], **options | {"key_padding_mask": mask[:, :cut]}
    )
    second, _ = linear_attention_scan(
        q[:, :, cut:],
        k[:, :, cut:],
        v[:, :, cut:],
        state,
        **options | {"key_padding_mask": mask[:, cut:]},
    )
    bound = {"rtol": 1e-8, "atol": 1e-9 * max(1.0, want.abs().max().item())}
    torch.testing.assert_close(torch_path(q, k, v, causal=True, **options), want, **bound)
    torch.testing.assert_close(torch.cat((first, second), 2), want, **bound)
    if b == 1:
        cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
        ends = torch.tensor([0, *cuts, n], dtype=torch.int32)
        for causal in (False, True):
            packed = options | {"causal": causal, "cu_seqlens": ends}
            want = linear_attention_reference(q, k, v, **packed)
            bound["atol"] = 1e-9 * max(1.0, want.abs().max().item())
            torch.testing.assert_close(torch_path(q, k, v, **packed), want, **bound)


# Bad input


Q = torch.zeros(2, 4, 6, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 4, 6, 9)}, ValueError, "d is 9 here but 8 in q"),
        ({"v": torch.zeros(2, 4, 7, 8)}, ValueError, "s is 7 here but 6 in k"),
        ({"q": torch.zeros(2, 6, 8)}, ValueError, r"q must be \(b, h, n, d\)"),
        ({"k": torch.zeros(2, 3, 6, 8), "v": torch.zeros(2, 3, 6, 8)}, ValueError, "3 heads"),
        ({"v": Q.double()}, TypeError, "v must be torch.float32 like q"),
        ({"q": Q.long(), "k": Q.long(), "v": Q.long()}, TypeError, "floating-point"),
        ({"q": torch.zeros(2, 4, 6, 257), "k": torch.zeros(2, 4, 6, 257)}, ValueError, "256"),
        ({"feature_map": "softmax"}, ValueError, "feature_map must be one of 'elu'"),
        ({"key_padding_mask": torch.zeros(2, 6)}, TypeError, "must be bool"),
        ({"key_padding_mask": torch.zeros(6, 2, dtype=torch.bool)}, ValueError, r"\(2, 6\)"),
        ({"causal": True, "q": torch.zeros(2, 4, 3, 8)}, ValueError, "n = 3 and s = 6"),
        ({"cu_seqlens": torch.tensor([0, 6], dtype=torch.int32)}, ValueError, "b = 1"),
        ({"backend": "cuda"}, ValueError, "has no backend 'cuda'; it has torch, triton"),
    ],
)
def test_bad_input_says_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**{"q": Q, "k": Q, "v": Q} | change)


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        ([0, 3], ValueError, "rise from 0 to n = 6"),
        ([1, 6], ValueError, "rise from 0"),
        ([0, 4, 2, 6], ValueError, "rise from 0"),
        ([6], ValueError, r"\(segments \+ 1,\)"),
    ],
)
def test_bad_boundaries_say_what_is_wrong(ends, error, message):
    x = torch.zeros(1, 1, 6, 2)
    with pytest.raises(error, match=message):
        linear_attention(x, x, x, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    with pytest.raises(TypeError, match="int32"):
        linear_attention(x, x, x, cu_seqlens=torch.tensor(ends))


def test_a_foreign_state_says_what_is_wrong():
    _, state = linear_attention_scan(Q, Q, Q)
    with pytest.raises(ValueError, match="belongs to another batch"):
        linear_attention_scan(Q[:1], Q[:1], Q[:1], state)
    with pytest.raises(ValueError, match="made with another one"):
        linear_attention_scan(Q, Q, Q, state, feature_map="exp")
    with pytest.raises(ValueError, match="made with another one"):
        linear_attention_scan(Q, Q, Q, LinearState(*state[:2], state.z))
    with pytest.raises(ValueError, match="as many keys as queries"):
        linear_attention_scan(Q[:, :, :2], Q, Q)
    with pytest.raises(TypeError, match="LinearState or None, got tuple"):
        linear_attention_scan(Q, Q, Q, tuple(state))
    with pytest.raises(ValueError, match=r"state\.z must have shape"):
        linear_attention_scan(Q, Q, Q, LinearState(state.kv, state.z[..., :3]))
    with pytest.raises(ValueError, match=r"state\.kv must be torch\.float32 .* got torch\.float64"):
        linear_attention_scan(Q, Q, Q, LinearState(state.kv.double(), state.z))
