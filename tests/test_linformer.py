"""Linformer: the op against its definition, and what the contract of every mechanism leaves out."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastattn import LinformerAttention, convert, ops, revert, testing
from fastattn.nn.linformer import _Keys
from fastattn.nn.linformer_sums import counts, resampled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, HEADS = 24, 4
CASES = (*testing.LINEAR_ATTENTION, *testing.CROSS_ATTENTION)


def projections(case, per_head=False, length=None, slots=16):
    shape = (case.h,) * per_head + (slots, length or case.s + 3)
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for _ in range(2)]


# The op


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, per_head, device):
    inputs = [*case.inputs(torch.float32, device), *projections(case, per_head)]
    inputs = [x.to(device) for x in inputs]
    for name, mask in testing.padding_masks(case.b, case.s).items():
        if name in ("left", "interior") and case.s > 100:
            continue
        mask = None if mask is None else mask.to(device)
        testing.assert_as_accurate_as(
            partial(ops.linformer_attention, key_padding_mask=mask),
            partial(ops.linformer_attention_reference, key_padding_mask=mask),
            inputs,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_within_their_rounding(dtype):
    case = CASES[5]
    inputs = [*case.inputs(dtype), *(x.to(dtype) for x in projections(case))]
    got = testing.value_and_grads(ops.linformer_attention, inputs)
    want = testing.value_and_grads(ops.linformer_attention_reference, [x.double() for x in inputs])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        # a handful of roundings one after the other
        assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm()


def test_one_projection_stands_for_both_and_fewer_keys_take_its_first_columns():
    case = CASES[4]
    q, k, v = case.inputs(torch.float64)
    e, f = (x.double() for x in projections(case))
    assert torch.equal(
        ops.linformer_attention(q, k, v, e), ops.linformer_attention(q, k, v, e, e.clone())
    )
    mask = torch.arange(case.s).expand(case.b, -1) >= 9
    for first in (e, e.expand(case.h, -1, -1)):
        cut = ops.linformer_attention(q, k[:, :, :9], v[:, :, :9], first, f)
        whole = ops.linformer_attention(q, k, v, first, f, key_padding_mask=mask)
        torch.testing.assert_close(cut, whole)


def test_padding_is_never_read_and_a_sample_without_keys_gives_zeros():
    case = CASES[6]
    inputs = [*case.inputs(torch.float64), *(x.double() for x in projections(case))]
    mask = testing.padding_masks(case.b, case.s)["all"]
    call = partial(ops.linformer_attention, key_padding_mask=mask)
    want = testing.value_and_grads(call, inputs)
    q, k, v, e, f = inputs
    hidden = mask[:, None, :, None]
    dirty = [q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf), e, f]
    got = testing.value_and_grads(call, dirty)
    assert torch.all(got[0][0] == 0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_and_func_grad_are_right():
    case = testing.AttentionCase("", "", 1, 2, 1, 3, 4, 2, 2)
    inputs = [*case.inputs(torch.float64), *(x.double() for x in projections(case, slots=3))]
    leaves = [x.requires_grad_() for x in inputs]
    mask = torch.tensor([[False, False, True, False]])
    call = partial(ops.linformer_attention, key_padding_mask=mask)
    assert torch.autograd.gradgradcheck(partial(call, backend="reference"), leaves)
    (want,) = torch.autograd.grad(call(*leaves).sum(), leaves[1])
    loss = lambda k: call(inputs[0], k, *inputs[2:]).sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss)(inputs[1].detach()), want)
    rows = torch.func.vmap(call, in_dims=(1, None, None, None, None))(
        inputs[0].unsqueeze(1), *inputs[1:]
    )
    torch.testing.assert_close(rows[0], call(*inputs))


def test_the_reference_does_not_round_in_between():
    case = CASES[4]
    inputs = [*case.inputs(torch.bfloat16), *(x.bfloat16() for x in projections(case))]
    named = ops.linformer_attention(*inputs, backend="reference")
    assert torch.equal(named, ops.linformer_attention_reference(*inputs))


def test_bad_input_says_what_is_wrong():
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    e = torch.randn(6, 9)
    with pytest.raises(ValueError, match=r"k has s = 9 keys, but proj_v has columns for L = 8"):
        ops.linformer_attention(q, k, v, e, e[:, :8])
    with pytest.raises(ValueError, match="proj_k has 6 slots and proj_v 5"):
        ops.linformer_attention(q, k, v, e, e[:5])
    with pytest.raises(ValueError, match=r"\(h, slots, L\) with h = 4, got \(3, 6, 9\)"):
        ops.linformer_attention(q, k, v, e.expand(3, -1, -1))
    with pytest.raises(TypeError, match="proj_k must be a floating-point tensor"):
        ops.linformer_attention(q, k, v, e.long())
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        ops.linformer_attention(q, k, v, e, key_padding_mask=torch.zeros(2, 9))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        ops.linformer_attention(q, k, v, e, backend="cuda")


# The module

FORMS = [
    ("learned", "none"), ("learned", "headwise"), ("learned", "key-value"),
    ("learned", "layerwise"), ("resampled", "none"), ("resampled", "headwise"),
    ("fixed", "none"), ("fixed", "headwise"), ("mean", "headwise"),
    ("max", "headwise"), ("conv", "none"), ("conv", "headwise"), ("dynamic", "none"),
    ("dynamic", "headwise"), ("dynamic", "key-value"),
]  # fmt: skip
forms = pytest.mark.parametrize(("kind", "sharing"), FORMS, ids=[" ".join(x) for x in FORMS])


def make(kind="learned", sharing="headwise", seq_len=20, slots=6, dtype=torch.float64, **options):
    if kind == "resampled":
        kind, options = "learned", options | {"interpolate": True}
    if sharing == "layerwise":
        options["projection"] = LinformerAttention.draw_projection(seq_len, slots, dtype=dtype)
    made = LinformerAttention(
        WIDTH, HEADS, batch_first=True, dtype=dtype, seq_len=seq_len, slots=slots,
        kind=kind, sharing=sharing, **options,
    )  # fmt: skip
    for x in (made.in_proj_bias, made.out_proj.bias):
        nn.init.normal_(x)
    if kind == "conv":
        nn.init.normal_(made.compress_key)
        nn.init.normal_(made.compress_value)
    return made


def tokens(b, n, dtype=torch.float64):
    return torch.randn(b, n, WIDTH, dtype=dtype)


def padding(b, n):
    return torch.arange(n).expand(b, -1) >= n - 1 - torch.arange(b)[:, None]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("inputs", ["self", "cross", "three"])
@forms
def test_compressed_before_it_is_projected_or_after_is_the_same(kind, sharing, inputs, padded):
    ours = make(kind, sharing)
    other = copy.deepcopy(ours)
    other._compress_first = False
    x, y, z = tokens(2, 17), tokens(2, 17), tokens(2, 17)
    query, key, value = {"self": (x, x, x), "cross": (x[:, :5], y, y), "three": (x, y, z)}[inputs]
    mask = padding(2, 17) if padded else None
    called = []
    original = LinformerAttention._project
    ours._project = lambda *args: called.append(1) or original(ours, *args)
    leaves = [q.clone().requires_grad_() for q in dict.fromkeys((query, key, value))]
    index = {id(q): i for i, q in enumerate(dict.fromkeys((query, key, value)))}
    results = []
    for module in (ours, other):
        out = module(*(leaves[index[id(q)]] for q in (query, key, value)), mask)[0]
        parameters = [p for p in module.parameters() if p.requires_grad]
        grads = torch.autograd.grad(out.square().sum(), [*leaves, *parameters])
        results.append([out, *grads])
    assert bool(called) == (kind == "max" or sharing == "none")
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@forms
def test_what_padding_holds_and_how_much_there_is_changes_nothing(kind, sharing, dtype):
    ours = make(kind, sharing, dtype=dtype)
    x, mask = tokens(2, 13, dtype), padding(2, 13)
    want = ours(x, x, x, mask)[0]
    dirty = x.masked_fill(mask.unsqueeze(-1), torch.nan)
    before = dirty.clone()
    got = ours(x, dirty, dirty, mask)[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(dirty, before, equal_nan=True)
    more, wider = (nn.functional.pad(t, p) for t, p in ((dirty, (0, 0, 0, 7)), (mask, (0, 7))))
    wider[:, 13:] = True
    torch.testing.assert_close(ours(x, more, more, wider)[0], want)
    alone = ours(x[1:], x[1:, :11], x[1:, :11])[0]
    torch.testing.assert_close(alone, want[1:])


@forms
def test_a_sample_that_is_all_padding_gives_zeros_and_finite_gradients(kind, sharing):
    ours = make(kind, sharing)
    x = tokens(2, 7).requires_grad_()
    mask = torch.tensor([[True] * 7, [False] * 7])
    out = ours(x, x, x, mask)[0]
    torch.testing.assert_close(out[0], ours.out_proj.bias.expand(7, -1))
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


@forms
def test_the_weights_are_the_implied_matrix(kind, sharing):
    ours = make(kind, sharing, add_zero_attn=True)
    x, mask = tokens(2, 9), padding(2, 9)
    if kind == "max":
        with pytest.raises(NotImplementedError, match="a maximum is no sum over tokens"):
            ours(x, x, x, mask, need_weights=True)
        return
    out, weights = ours(x, x, x, mask, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(out, ours(x, x, x, mask)[0])
    assert weights.shape == (2, HEADS, 9, 10)
    values = ours._project(x, x, x)[2]
    merged = (weights[..., :9] @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours.out_proj(merged), out)
    assert torch.all(weights[..., :9].masked_select(mask[:, None, None]) == 0)


def test_windows_are_means_maxima_and_taps_of_their_valid_tokens():
    v = torch.randn(1, 1, 5, 2, dtype=torch.float64)
    mask = torch.tensor([[False, False, True, False, True]])
    windows = [v[0, 0, :2], v[0, 0, 3:4]]  # of 3 tokens: 0 and 1, 3
    for kind, want in (
        ("mean", [w.mean(0) for w in windows]),
        ("max", [w.amax(0) for w in windows]),
    ):
        ours = make(kind, seq_len=9, slots=3)
        assert counts(3, 3, 5, mask, v.device).tolist() == [[2, 1, 0]]
        of = None if kind == "max" else ours._sum("", v[0], mask)
        got = ours._compress_heads(v, v, _Keys(mask, of, of, None, False))[1][0, 0]
        torch.testing.assert_close(got[:2], torch.stack(want))
        assert torch.all(got[2] == 0)
    ours = make("conv", seq_len=9, slots=3)
    taps = ours.compress_key
    of = ours._sum("compress_key", v[0], mask)
    got = ours._compress_heads(v, v, _Keys(mask, of, of, None, False))[1][0, 0]
    first = 3 / 2 * (taps[0] * v[0, 0, 0] + taps[1] * v[0, 0, 1])
    torch.testing.assert_close(got[0], first)
    torch.testing.assert_close(got[1], 3 * taps[0] * v[0, 0, 3])


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
@pytest.mark.parametrize("kind", ["learned", "fixed"])
def test_segments_are_causal_and_see_the_slots_of_the_past(kind, sharing, padded):
    assert make(seq_len=4096, slots=256, causal="segment")._segments == (16, 16, 256)
    assert make(seq_len=4096, slots=1024, causal="segment")._segments == (64, 16, 64)
    ours = make(kind, sharing, seq_len=20, slots=8, causal="segment")
    assert ours._segments == (4, 2, 5)
    x = tokens(1, 18)[0]
    mask = torch.zeros(18, dtype=torch.bool)
    if padded:
        mask[[2, 7, 8]] = True
    call = lambda x: ours(x, x, x, mask)[0].sum(1)  # noqa: E731
    slopes = torch.func.jacrev(call)(x).abs().sum(-1)  # (n, s)
    assert torch.equal(slopes > 0, torch.ones_like(slopes).tril() > 0) or padded
    assert torch.all(slopes.triu(1) == 0)
    assert torch.all(slopes.tril()[17, ~mask] > 0)
    out, weights = ours(x, x, x, mask, need_weights=True, average_attn_weights=False)
    values = ours._project(*(x.unsqueeze(0),) * 3)[2][0]
    by_weights = (weights @ values).transpose(0, 1).flatten(1)
    torch.testing.assert_close(out, ours.out_proj(by_weights))
    torch.testing.assert_close(ours(x[:9], x[:9], x[:9], mask[:9])[0], out[:9])
    # within the first segment it is softmax attention
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    stock.load_state_dict(
        {k: p for k, p in ours.state_dict().items() if not k.startswith("compress")}
    )
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    want = stock(x[:5], x[:5], x[:5], mask[:5], attn_mask=future)[0]
    torch.testing.assert_close(ours(x[:5], x[:5], x[:5], mask[:5])[0], want)


def test_causal_is_refused_with_the_way_out():
    x = tokens(1, 5)
    with pytest.raises(NotImplementedError, match="causal='segment' in the constructor"):
        make()(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="must be False or 'segment', got True"):
        make(causal=True)
    with pytest.raises(ValueError, match="needs a learned or fixed projection"):
        make("mean", causal="segment")


def test_layers_share_one_projection_that_is_tied():
    projection = LinformerAttention.draw_projection(20, 6)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    model = nn.Sequential(layer, nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True))
    convert(model, "linformer", seq_len=20, slots=6, sharing="layerwise", projection=projection)
    keys = [k for k in model.state_dict() if "compress" in k]
    assert keys == ["0.self_attn.compress_key", "1.self_attn.compress_key"]
    assert sum(p is projection for p in model.parameters()) == 1
    x = tokens(2, 9, torch.float32)
    model(x).sum().backward()
    assert projection.grad.abs().sum() > 0
    twin = copy.deepcopy(model)
    assert twin[0].self_attn.compress_key is twin[1].self_attn.compress_key
    before = projection.clone()
    model[0].self_attn._reset_parameters()
    assert torch.equal(projection, before)  # whose it is not
    with pytest.raises(ValueError, match="give every layer the same"):
        LinformerAttention(WIDTH, HEADS, seq_len=20, sharing="layerwise")
    with pytest.raises(ValueError, match=r"shape \(slots, seq_len\) = \(5, 20\), got .*\(6, 20\)"):
        LinformerAttention(
            WIDTH, HEADS, seq_len=20, slots=5, sharing="layerwise", projection=projection
        )


def test_initial_projections_keep_the_variance_and_differ():
    ours = make(seq_len=4096, slots=64)
    for x in (ours.compress_key, ours.compress_value):
        assert abs(4096 * x.var().item() - 1) < 0.02
    assert not torch.equal(ours.compress_key, ours.compress_value)
    fixed = make("fixed", seq_len=64)
    assert "compress_key" in fixed.state_dict()
    assert "compress_key" not in dict(fixed.named_parameters())
    loaded = make("fixed", seq_len=64)
    loaded.load_state_dict(fixed.state_dict())
    assert torch.equal(loaded.compress_key, fixed.compress_key)
    assert not torch.equal(make(seq_len=8).compress_key, make(seq_len=8).compress_key)


def test_lengths_beyond_the_projections_are_an_error_or_resampled():
    x = tokens(1, 21)
    with pytest.raises(ValueError, match="seq_len = 20 keys, got s = 21"):
        make()(x, x, x)
    ours = make(interpolate=True)
    other, short = make(), x[:, :20]
    other.load_state_dict(ours.state_dict())
    assert torch.equal(ours(short, short, short)[0], other(short, short, short)[0])
    for s in (1, 7, 20, 50):
        want = 20 / s * F.interpolate(ours.compress_key.unsqueeze(0), size=s, mode="linear")[0]
        torch.testing.assert_close(resampled(ours.compress_key, s, None), want)
        mask = torch.arange(60).expand(2, -1) >= s
        own = resampled(ours.compress_key, 60, mask)[..., :s]
        torch.testing.assert_close(own, want.expand(2, -1, -1))
    assert ours(x[:, :0], x[:, :0], x[:, :0])[0].shape == (1, 0, WIDTH)
    for n in (1, 19, 20):
        assert make()(x[:, :n], x[:, :n], x[:, :n])[0].isfinite().all()


def test_what_cannot_be_converted_is_left_whole():
    model = nn.Sequential(
        nn.MultiheadAttention(WIDTH, HEADS), nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    )
    with pytest.raises(ValueError, match="no add_bias_kv or add_zero_attn"):
        convert(model, "linformer", seq_len=20, slots=6, causal="segment")
    assert all(type(x) is nn.MultiheadAttention for x in model)


def test_loading_draws_only_what_is_missing():
    one = make(sharing="key-value")
    both = make()
    before = both.compress_value.clone()
    both.load_state_dict(one.state_dict())
    assert torch.equal(both.compress_key, one.compress_key)
    assert not torch.equal(both.compress_value, before)


@forms
def test_autocast_casts_slots_as_it_casts_queries(kind, sharing):
    ours = make(kind, sharing, dtype=torch.float32)
    x, mask = tokens(2, 13, torch.float32), padding(2, 13)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(x, x, x, mask)[0]
    assert out.dtype == torch.bfloat16
    want = ours(x, x, x, mask)[0]
    assert (out - want).norm() < 0.03 * want.norm()


def test_a_mean_in_float16_does_not_overflow():
    ours = make("mean", seq_len=4096, slots=2, dtype=torch.float16)
    x = torch.full((1, 4096, WIDTH), 60.0, dtype=torch.float16)
    assert ours(x, x, x)[0].isfinite().all()


def test_a_model_is_converted_and_given_back():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, dropout=0.0), 2
    ).eval()
    x = tokens(2, 9, torch.float32)
    want = model(x)
    convert(model, "linformer", seq_len=12, slots=4)
    assert not torch.allclose(model(x), want)
    first, second = (layer.self_attn.compress_key for layer in model.layers)
    assert not torch.equal(first, second)
    revert(model)
    assert torch.equal(model(x), want)
    assert not any("compress" in k for k in model.state_dict())
    with pytest.raises(TypeError, match="seq_len"):
        convert(model, "linformer")


def test_options_that_do_not_fit_say_so():
    for options, message in (
        ({"seq_len": 0}, "seq_len must be a whole number from 1 on, got 0"),
        ({"slots": "abc"}, "slots must be a whole number from 1 on, got 'abc'"),
        ({"kind": "pool"}, "kind must be one of 'learned', 'fixed'"),
        ({"sharing": "all"}, "sharing must be one of 'none'"),
        ({"kind": "mean", "interpolate": True}, "interpolate needs a learned or fixed"),
    ):
        with pytest.raises(ValueError, match=message):
            LinformerAttention(WIDTH, HEADS, **{"seq_len": 20} | options)
