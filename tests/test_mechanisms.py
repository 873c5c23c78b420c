"""The contract of nn.MultiheadAttention, held by every mechanism."""

import copy
import inspect
import io
import pickle
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.checkpoint import checkpoint

from fastattn import MECHANISMS

WIDTH, HEADS = 24, 4
# What a mechanism's constructor needs beside nn.MultiheadAttention's arguments.
OPTIONS: dict[str, dict] = {
    "linear": {},
    "performer": {"num_features": 16},
    "bigbird": {"block_size": 16},
    "linformer": {"seq_len": 16, "slots": 4},
}
# What a mechanism refuses, loudly: its own tests say how.
REFUSES = {
    "bigbird": ("causal", "cross attention", "extra keys"),
    "linformer": ("causal",),
}


def takes(name, what):
    return what not in REFUSES.get(name, ())


@pytest.fixture(params=MECHANISMS)
def name(request):
    for mark in request.node.iter_markers("needs"):
        if not takes(request.param, mark.args[0]):
            pytest.skip(f"{request.param} refuses {mark.args[0]}")
    return request.param


@pytest.fixture
def make(name):
    def make(*args, **kwargs):
        args = args or (WIDTH, HEADS)
        return MECHANISMS[name](*args, **OPTIONS[name], **kwargs)

    return make


def tokens(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, WIDTH, device=device).to(dtype)


def exact(device):
    """float64, which no kernel has: on a GPU float32, so that they run."""
    return torch.float32 if device == "cuda" else torch.float64


class Counter:
    """Counts the calls of modules without a hook: a hook alone closes the fast path of eval."""

    def __init__(self, monkeypatch, kind):
        self.calls = 0
        forward = kind.forward

        def counted(module, *args, **kwargs):
            self.calls += 1
            return forward(module, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", counted)


@pytest.fixture
def counter(monkeypatch, name):
    return Counter(monkeypatch, MECHANISMS[name])


needs_causal, needs_cross, needs_extra_keys = (
    pytest.mark.needs(x) for x in ("causal", "cross attention", "extra keys")
)
constructions = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"bias": False}, id="no bias"),
        pytest.param({"kdim": 10, "vdim": 14}, id="widths"),
        pytest.param({"kdim": 10}, id="kdim"),
        pytest.param({"vdim": 14}, id="vdim"),
        pytest.param({"add_bias_kv": True}, id="bias_kv", marks=needs_extra_keys),
        pytest.param({"add_zero_attn": True}, id="zero", marks=needs_extra_keys),
        pytest.param(
            {"bias": False, "kdim": 10, "add_bias_kv": True, "add_zero_attn": True},
            id="no bias, kdim, bias_kv and zero",
            marks=needs_extra_keys,
        ),
    ],
)
causal_or_not = pytest.mark.parametrize(
    "causal", [pytest.param(False, id="all"), pytest.param(True, id="causal", marks=needs_causal)]
)


# Parameters


@constructions
def test_parameters_and_initial_values_are_those_of_stock(make, options):
    torch.manual_seed(3)
    stock = nn.MultiheadAttention(WIDTH, HEADS, **options)
    torch.manual_seed(3)
    ours = make(WIDTH, HEADS, **options)

    def of_stock():
        own = type(ours)._own_state
        return {k: x for k, x in ours.named_parameters() if k not in own}

    assert of_stock().keys() == dict(stock.named_parameters()).keys()
    for label, x in stock.named_parameters():
        assert torch.equal(of_stock()[label], x), label
    torch.manual_seed(4)
    ours._reset_parameters()
    torch.manual_seed(4)
    stock._reset_parameters()
    for label, x in stock.named_parameters():
        assert torch.equal(of_stock()[label], x), label


@constructions
def test_a_stock_state_dict_loads_strictly_and_goes_back(make, options):
    stock, ours = nn.MultiheadAttention(WIDTH, HEADS, **options), make(WIDTH, HEADS, **options)
    ours.load_state_dict(stock.state_dict(), strict=True)
    back = nn.MultiheadAttention(WIDTH, HEADS, **options)
    state = {k: v for k, v in ours.state_dict().items() if k in stock.state_dict()}
    back.load_state_dict(state, strict=True)
    for a, b in zip(back.parameters(), stock.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_constructor_argument_works_by_position(name):
    extra = takes(name, "extra keys")
    positional = MECHANISMS[name](
        WIDTH, HEADS, 0.1, False, extra, extra, 10, 14, True, "cpu", torch.float64, **OPTIONS[name]
    )
    assert positional.dropout == 0.1
    assert positional.in_proj_bias is None
    assert positional.q_proj_weight.dtype == torch.float64
    assert (positional.bias_k is not None) == positional.add_zero_attn == extra
    assert (positional.kdim, positional.vdim) == (10, 14)
    assert positional.batch_first


def test_what_others_read_of_stock_is_there_and_the_same(make):
    stock, ours = nn.MultiheadAttention(WIDTH, HEADS, 0.1), make(WIDTH, HEADS, 0.1)
    plain = "embed_dim num_heads head_dim kdim vdim dropout batch_first add_zero_attn bias_k bias_v"
    for attribute in plain.split():
        assert getattr(ours, attribute) == getattr(stock, attribute), attribute
    for attribute in ("in_proj_weight", "in_proj_bias"):
        assert getattr(ours, attribute).shape == getattr(stock, attribute).shape
    assert ours._qkv_same_embed_dim is False
    assert type(ours.out_proj) is type(stock.out_proj) is NonDynamicallyQuantizableLinear
    mask, pad = torch.zeros(5, 5).bool(), torch.zeros(2, 5).bool()
    for found, want in zip(
        ours.merge_masks(mask, pad, tokens(2, 5)),
        stock.merge_masks(mask, pad, tokens(2, 5)),
        strict=True,
    ):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(want))


def test_every_argument_of_a_call_works_by_position(make, name):
    signature = inspect.signature(MECHANISMS[name].forward)
    assert [*signature.parameters] == [*inspect.signature(nn.MultiheadAttention.forward).parameters]
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 7)
    assert ours(x, x, x, None, True, None, False, False)[1].dim() == 4


def test_a_keyword_that_no_one_reads_raises(make):
    with pytest.raises(TypeError, match="feature_maps"):
        make(WIDTH, HEADS, feature_maps="elu")


def test_an_unknown_backend_raises_where_it_is_given_and_options_show(make):
    with pytest.raises(ValueError, match="backend must be one of"):
        make(WIDTH, HEADS, backend="cuda")
    assert f"{WIDTH}, {HEADS}, " in repr(make(WIDTH, HEADS))
    assert "backend='reference'" in repr(make(WIDTH, HEADS, backend="reference"))


def test_sizes_that_do_not_fit_raise(make):
    with pytest.raises(AssertionError, match="multiple of num_heads, got 24 and 5"):
        make(WIDTH, 5)
    with pytest.raises(ValueError, match="greater than 0"):
        make(0, 4)


# Values


@causal_or_not
@constructions
def test_the_weights_are_those_that_made_the_output(make, options, causal, device):
    about = {"device": device, "dtype": exact(device)}
    ours = make(WIDTH, HEADS, batch_first=True, **about, **options)
    q, k, v = (torch.randn(2, 7, width, **about) for width in (WIDTH, ours.kdim, ours.vdim))
    pad = torch.zeros(2, 7, dtype=torch.bool, device=device)
    pad[1, 4:] = True
    out, weights = ours(q, k, v, pad, True, average_attn_weights=False, is_causal=causal)
    extra = ours._extra_keys
    assert weights.shape == (2, HEADS, 7, 7 + extra)
    _, _, values = ours._project(q, k, v)
    added = [] if ours.bias_v is None else [ours.bias_v.view(1, HEADS, 1, -1).expand(2, -1, -1, -1)]
    added += [values.new_zeros(2, HEADS, 1, WIDTH // HEADS)] * ours.add_zero_attn
    assert len(added) == extra
    values = torch.cat((values, *added), 2)
    by_weights = (weights @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, ours.out_proj(by_weights))
    assert torch.all(weights[1, :, :, 4:7] == 0)
    if causal:
        assert torch.equal(weights[..., :7], weights[..., :7].tril())
    averaged = ours(q, k, v, pad, True, is_causal=causal)[1]
    torch.testing.assert_close(averaged, weights.mean(1))


@pytest.mark.parametrize("n", [9, pytest.param(5, marks=needs_cross)])
def test_layouts_agree(make, n, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    other = make(WIDTH, HEADS, device=device)
    other.load_state_dict(ours.state_dict())
    q, kv = tokens(2, n, device=device), tokens(2, 9, device=device)
    pad = torch.zeros(2, 9, dtype=torch.bool, device=device)
    pad[0, 6:] = True
    out, weights = ours(q, kv, kv, pad, True)
    out_other, weights_other = other(
        *(x.transpose(0, 1).contiguous() for x in (q, kv, kv)), pad, True
    )
    torch.testing.assert_close(out_other.transpose(0, 1), out)
    torch.testing.assert_close(weights_other, weights)
    single, single_weights = ours(q[0], kv[0], kv[0], pad[0], True)
    torch.testing.assert_close(single, out[0])
    torch.testing.assert_close(single_weights, weights[0])
    one_head = ours(q[0], kv[0], kv[0], pad[0], True, average_attn_weights=False)[1]
    assert one_head.shape == (HEADS, n, 9)


def test_the_fused_projections_equal_the_separate_ones(make):
    ours = make(WIDTH, HEADS, batch_first=True)
    nn.init.normal_(ours.in_proj_bias)
    x, y = tokens(2, 5), tokens(2, 5)
    for query, key, value in ((x, x, x), (x, y, y)):
        separate = ours(query.clone(), key.clone(), value.clone())[0]
        torch.testing.assert_close(ours(query, key, value)[0], separate)


@pytest.mark.parametrize("extra", [False, pytest.param(True, marks=needs_extra_keys)])
def test_gradients_reach_every_parameter(make, device, extra):
    ours = make(WIDTH, HEADS, batch_first=True, add_bias_kv=extra, device=device)
    x = tokens(2, 6, device=device).requires_grad_()
    ours(x, x, x)[0].square().sum().backward()
    for label, parameter in ours.named_parameters():
        assert parameter.grad.abs().sum() > 0, label
    assert x.grad.abs().amin(-1).min() > 0


# Padding


def test_padding_bool_or_float_equals_a_shorter_sequence(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device).eval()
    x = tokens(2, 9, device=device)
    pad = torch.zeros(2, 9, dtype=torch.bool, device=device)
    pad[:, 6:] = True
    short = ours(x[:, :6], x[:, :6], x[:, :6])[0]
    torch.testing.assert_close(ours(x, x, x, pad)[0][:, :6], short)
    as_float = x.new_zeros(2, 9).masked_fill(pad, -torch.inf)
    assert torch.equal(ours(x, x, x, as_float)[0], ours(x, x, x, pad)[0])
    dirty = x.masked_fill(pad.unsqueeze(-1), torch.nan)
    torch.testing.assert_close(ours(dirty, dirty, dirty, pad)[0][:, :6], short)


def test_a_sample_that_is_all_padding_gives_the_bias_and_finite_gradients(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    nn.init.normal_(ours.out_proj.bias)
    x = tokens(2, 5, device=device).requires_grad_()
    pad = torch.tensor([[True] * 5, [False] * 5], device=device)
    for need_weights in (False, True):
        out, weights = ours(x, x, x, pad, need_weights)
        assert (weights is None) == (not need_weights)
        torch.testing.assert_close(out[0], ours.out_proj.bias.expand(5, -1))
        out.sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in ours.parameters())


def test_the_least_number_of_a_padding_masks_dtype_is_minus_infinity(make, device):
    """As the masks of Hugging Face and timm have it; whatever the dtype of the inputs."""
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    x = tokens(2, 9, device=device)
    pad = (torch.arange(9) >= torch.tensor([[9], [6]])).to(device)
    want = ours(x, x, x, pad)[0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        mask = torch.zeros(2, 9, dtype=dtype, device=device)
        mask.masked_fill_(pad, torch.finfo(dtype).min)
        assert torch.equal(ours(x, x, x, mask)[0], want), dtype
        mask[1, 8] = -torch.inf
        assert torch.equal(ours(x, x, x, mask)[0], want), dtype


def finite_bias():
    pad = torch.zeros(2, 5)
    pad[0, 2:] = -torch.inf
    pad[1, 1:3] = torch.tensor([3.0, -1e9])
    return pad


BIAS = (
    r"0 \(attend\), or -inf .* a bool mask, True = ignore, or keep nn\.MultiheadAttention in this "
    "layer"
)


def test_a_finite_bias_on_the_keys_is_refused_with_its_value_and_the_way_out(make):
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 5)
    message = rf"{type(ours).__name__}: .*{BIAS}\. The largest is -1e\+09"
    with pytest.raises(ValueError, match=message):
        ours(x, x, x, finite_bias())


def test_a_compiled_module_refuses_a_finite_bias_too(make):
    """On a CPU at once; on a GPU the assertion is asynchronous, and ends the process's context."""
    torch._dynamo.reset()
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 5)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    legal = torch.zeros(2, 5).masked_fill(torch.arange(5) > 3, -torch.inf)
    torch.testing.assert_close(compiled(x, x, x, legal)[0], ours(x, x, x, legal)[0])
    with pytest.raises(RuntimeError, match=f"{type(ours).__name__}: .*{BIAS}"):
        compiled(x, x, x, finite_bias())


# Causality


@needs_causal
def test_every_way_to_say_causal_is_the_same(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    x = tokens(2, 7, device=device)
    hidden = torch.ones(7, 7, dtype=torch.bool, device=device).triu(1)
    as_float = x.new_zeros(7, 7).masked_fill(hidden, -torch.inf)
    want = ours(x, x, x, is_causal=True)[0]
    assert not torch.allclose(want, ours(x, x, x)[0])
    for mask, hint in ((hidden, False), (as_float, False), (hidden, True), (as_float, True)):
        assert torch.equal(ours(x, x, x, attn_mask=mask, is_causal=hint)[0], want)
    always = copy.deepcopy(ours)
    always.causal = True
    assert torch.equal(always(x, x, x)[0], want)
    nothing = torch.zeros_like(hidden)
    assert torch.equal(ours(x, x, x, attn_mask=nothing)[0], ours(x, x, x)[0])
    assert torch.equal(ours(x, x, x, attn_mask=nothing, is_causal=True)[0], want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("n", [7, pytest.param(3, marks=needs_cross)])
def test_a_mask_that_hides_nothing_is_none(make, n, dtype):
    ours = make(WIDTH, HEADS, batch_first=True)
    q, x = tokens(2, n), tokens(2, 7)
    nothing = torch.zeros(n, 7, dtype=dtype)
    assert torch.equal(ours(q, x, x, attn_mask=nothing)[0], ours(q, x, x)[0])


@causal_or_not
def test_masks_of_different_dtypes_agree_in_one_call(make, causal):
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 7)
    pad = torch.arange(7) >= torch.tensor([[7], [4]])
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) & causal

    def as_float(mask):
        return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)

    want = ours(x, x, x, pad, is_causal=causal)[0]
    for padding in (pad, as_float(pad)):
        for mask in (hidden, as_float(hidden)):
            assert torch.equal(ours(x, x, x, padding, attn_mask=mask)[0], want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_what_cannot_be_causal_refuses_the_hint_whatever_the_mask_hides(make, name, dtype):
    """The hint is trusted, also beside a mask that hides nothing."""
    if takes(name, "causal"):
        pytest.skip(f"{name} can be causal")
    ours = make(WIDTH, HEADS, batch_first=True)
    x, nothing = tokens(2, 7), torch.zeros(7, 7, dtype=dtype)
    for mask in (nothing, None):
        with pytest.raises(NotImplementedError, match=f"{type(ours).__name__}.*causal"):
            ours(x, x, x, attn_mask=mask, is_causal=True)
    assert torch.equal(ours(x, x, x, attn_mask=nothing)[0], ours(x, x, x)[0])


@needs_causal
def test_causal_with_padding_equals_a_shorter_sequence(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    x = tokens(2, 9, device=device)
    pad = torch.zeros(2, 9, dtype=torch.bool, device=device)
    pad[:, 6:] = True
    short = ours(x[:, :6], x[:, :6], x[:, :6], is_causal=True)[0]
    torch.testing.assert_close(ours(x, x, x, pad, is_causal=True)[0][:, :6], short)


@needs_causal
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_causal_with_padding_in_front_leaves_rows_without_keys(make, device, dtype):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    nn.init.normal_(ours.out_proj.bias)
    x = tokens(2, 9, device=device).requires_grad_()
    pad = (torch.arange(9) < torch.tensor([[4], [0]])).to(device)
    mask = pad if dtype == torch.bool else x.new_zeros(2, 9).masked_fill(pad, -torch.inf)
    for need_weights in (False, True):
        out, weights = ours(x, x, x, mask, need_weights, is_causal=True)
        torch.testing.assert_close(out[0, :4], ours.out_proj.bias.expand(4, -1))
        late = x[:1, 4:]
        torch.testing.assert_close(out[:1, 4:], ours(late, late, late, is_causal=True)[0])
        torch.testing.assert_close(out[1:], ours(x[1:], x[1:], x[1:], is_causal=True)[0])
        out.square().sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in ours.parameters())
    assert torch.all(weights[0, :4] == 0)


@needs_causal
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_no_row_sees_the_future(make, extra, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device, **extra)
    x = tokens(1, 8, device=device)
    before = ours(x, x, x, is_causal=True)[0]
    y = x.clone()
    y[:, 5:] = 100
    after = ours(y, y, y, is_causal=True)[0]
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(
    "mask",
    [
        torch.eye(7, dtype=torch.bool),
        torch.randn(7, 7),
        torch.zeros(7, 7).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -1e9),
        torch.zeros(2 * HEADS, 7, 7),
        torch.zeros(2 * HEADS, 7, 7, dtype=torch.bool),
        torch.zeros(7, 9, dtype=torch.bool),
        torch.zeros(9, 9),
    ],
    ids=["diagonal", "bias", "finite causal", "per head", "bool per head", "longer", "both longer"],
)
def test_a_mask_that_cannot_be_honoured_is_refused_with_the_way_out(make, mask):
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 7)
    shape = re.escape(str(tuple(mask.shape)))
    message = (
        rf"^{type(ours).__name__}: .*{shape} is not .*keep nn\.MultiheadAttention in this layer"
    )
    with pytest.raises(NotImplementedError, match=message):
        ours(x, x, x, attn_mask=mask)


def test_causal_needs_equal_lengths(make):
    ours = make(WIDTH, HEADS, batch_first=True)
    with pytest.raises(ValueError, match="n = 3 and s = 5"):
        ours(tokens(1, 3), tokens(1, 5), tokens(1, 5), is_causal=True)


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(2 * HEADS, 7, 7), torch.zeros(3, 3), torch.zeros(7, 9, dtype=torch.bool)],
    ids=["per head", "too small", "too wide"],
)
def test_the_hint_does_not_hide_a_mask_of_another_shape(make, mask):
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 7)
    with pytest.raises(NotImplementedError, match="only the causal"):
        ours(x, x, x, attn_mask=mask, is_causal=True)
    with pytest.raises(AssertionError, match="bool or float"):
        ours(x, x, x, attn_mask=torch.zeros(7, 7, dtype=torch.int64), is_causal=True)


@needs_causal
def test_a_debugging_mode_reads_the_mask_behind_a_hint(make, monkeypatch):
    x = tokens(2, 7)
    ours = make(WIDTH, HEADS, batch_first=True)
    always = copy.deepcopy(ours)
    always.causal = True
    diagonal, hidden = torch.eye(7).bool(), torch.ones(7, 7, dtype=torch.bool).triu(1)
    nothing = torch.zeros(7, 7)
    want = ours(x, x, x, is_causal=True)[0]
    for mask in (diagonal, nothing):
        assert torch.equal(ours(x, x, x, attn_mask=mask, is_causal=True)[0], want)
    with pytest.raises(NotImplementedError, match=r"\(7, 7\) is not the causal one"):
        always(x, x, x, attn_mask=diagonal)  # causal=True of the constructor is no hint
    monkeypatch.setenv("FASTATTN_CHECK_MASKS", "1")
    for module, hint in ((ours, True), (always, True), (always, False)):
        with pytest.raises(NotImplementedError, match=r"\(7, 7\) is not the causal one"):
            module(x, x, x, attn_mask=diagonal, is_causal=hint)
        assert torch.equal(module(x, x, x, attn_mask=hidden, is_causal=hint)[0], want)
    with pytest.raises(ValueError, match=r"\(7, 7\) hides nothing, but is_causal is True"):
        ours(x, x, x, attn_mask=nothing, is_causal=True)
    assert torch.equal(always(x, x, x, attn_mask=nothing)[0], want)
    one = tokens(2, 1)
    ours(one, one, one, attn_mask=nothing[:1, :1], is_causal=True)


# Decoding, where a mechanism can


@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1, 1), (4, 1, 1), (2, 4), (6,)], ids=str)
@pytest.mark.parametrize("layout", ["batch first", "sequence first", "unbatched"])
@constructions
def test_steps_equal_a_causal_forward(make, name, options, layout, cuts, device):
    if not hasattr(MECHANISMS[name], "step"):
        pytest.skip(f"{name} cannot decode")
    about = {"device": device, "dtype": exact(device)}
    batch_first = layout == "batch first"
    ours = make(WIDTH, HEADS, batch_first=batch_first, causal=True, **about, **options)
    shape = {"batch first": (2, 6), "sequence first": (6, 2), "unbatched": (6,)}[layout]
    axis = 1 if batch_first else 0
    inputs = [torch.randn(*shape, w, **about) for w in (WIDTH, ours.kdim, ours.vdim)]
    state, outs = None, []
    for pieces in zip(*(x.split(cuts, axis) for x in inputs), strict=True):
        out, state = ours.step(*pieces, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, axis), ours(*inputs)[0])


def test_a_module_that_is_not_causal_does_not_decode(make, name):
    if not hasattr(MECHANISMS[name], "step"):
        pytest.skip(f"{name} cannot decode")
    x = tokens(1, 2)
    with pytest.raises(ValueError, match="causal=True in the constructor"):
        make(WIDTH, HEADS, batch_first=True).step(x, x, x)


# Inside torch's own layers


def encoder(make, layers=2, **options):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, **options)
    layer.self_attn = make(WIDTH, HEADS, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize(
    "precision", ["float32", "bfloat16", "float16", "autocast bfloat16", "autocast float16"]
)
def test_an_encoder_in_eval_really_calls_it(
    name, make, counter, device, padded, norm_first, precision
):
    autocast = precision.startswith("autocast")
    named = getattr(torch, precision.split()[-1])
    dtype = torch.float32 if autocast else named
    model = encoder(make, norm_first=norm_first).to(device, dtype)
    x = tokens(3, 8, device=device, dtype=dtype)
    pad = torch.zeros(3, 8, dtype=torch.bool, device=device)
    pad[1, 5:] = True
    pad = pad if padded else None
    context = torch.autocast(device, named) if autocast else nullcontext()
    outputs = []
    for training in (True, False):
        model.train(training)
        counter.calls = 0
        with torch.no_grad(), context:
            outputs.append(model(x, src_key_padding_mask=pad))
        assert counter.calls == 2
    assert torch.equal(*outputs)
    model.requires_grad_(False)
    counter.calls = 0
    with context:
        frozen = model(x, src_key_padding_mask=pad)
    assert counter.calls == 2
    # seen on a GPU: float32 products with frozen weights are others, where they have no bias
    differs = name == "linformer" and device == "cuda" and dtype == torch.float32
    if not (differs and autocast):
        bound = {} if differs else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(frozen, outputs[1], **bound)


def test_hooks_are_called_in_eval_those_of_the_output_layer_too(make):
    model, called = encoder(make, layers=1).eval(), []
    attention = model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: called.append("attention"))
    attention.out_proj.register_forward_hook(lambda *_: called.append("out_proj"))
    with torch.no_grad():
        model(tokens(2, 5))
    assert called == ["out_proj", "attention"]


@needs_causal
def test_an_encoder_with_a_causal_mask_is_causal(make, counter, device):
    model = encoder(make).eval().to(device)
    x = tokens(2, 8, device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(8, device=device)
    with torch.no_grad():
        out = model(x, mask=mask)
        x[:, 5:] = 0
        after = model(x, mask=mask)
    assert counter.calls == 4
    torch.testing.assert_close(out[:, :5], after[:, :5])
    assert not torch.allclose(out[:, 5:], after[:, 5:])


@needs_causal
@needs_cross
def test_a_whole_transformer_really_calls_it(make, counter, name, device):
    from fastattn import convert

    model = nn.Transformer(WIDTH, HEADS, 2, 2, 32, dropout=0.0, batch_first=True, device=device)
    assert len(convert(model, name, **OPTIONS[name])) == 6
    source, target = tokens(2, 9, device=device), tokens(2, 5, device=device)
    pad = torch.zeros(2, 9, dtype=torch.bool, device=device)
    pad[0, 6:] = True
    mask = nn.Transformer.generate_square_subsequent_mask(5, device=device)
    outputs = []
    for training in (True, False):
        model.train(training)
        counter.calls = 0
        with torch.no_grad():
            out = model(
                source,
                target,
                tgt_mask=mask,
                src_key_padding_mask=pad,
                memory_key_padding_mask=pad,
                tgt_is_causal=True,
            )
        assert counter.calls == 6
        outputs.append(out)
    torch.testing.assert_close(*outputs)


# Training machinery


def test_dropout_acts_in_training_only(make, device):
    ours = make(WIDTH, HEADS, 0.5, batch_first=True, device=device)
    x = tokens(2, 6, device=device)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_weights_are_those_before_dropout(make, device):
    ours = make(WIDTH, HEADS, 0.5, batch_first=True, device=device)
    x = tokens(2, 6, device=device)
    first, second = (ours(x, x, x, need_weights=True) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[1], ours.eval()(x, x, x, need_weights=True)[1])


def test_autocast_decides_the_dtype(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    x = tokens(2, 6, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, weights = ours(x, x, x, need_weights=True)
    assert out.dtype == torch.bfloat16
    assert (out.float() - ours(x, x, x)[0]).abs().max() < 0.05 * out.float().abs().max()
    assert weights.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_run_and_a_mismatch_raises(make, dtype):
    ours = make(WIDTH, HEADS, batch_first=True, dtype=dtype)
    x = tokens(2, 6, dtype=dtype)
    assert ours(x, x, x)[0].dtype == dtype
    with pytest.raises(RuntimeError, match="dtype"):
        ours(x.float(), x.float(), x.float())


def test_copies_and_pickles_compute_the_same(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device).eval()
    x = tokens(2, 6, device=device)
    want = ours(x, x, x)[0]
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    loaded = make(WIDTH, HEADS, batch_first=True, device=device)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded):
        assert torch.equal(other(x, x, x)[0], want)


def test_a_state_that_does_not_say_so_leaves_the_fast_path_closed(make):
    ours = make(WIDTH, HEADS)
    state = ours.__getstate__()
    del state["_qkv_same_embed_dim"]  # stock's __setstate__ then sets True
    loaded = type(ours).__new__(type(ours))
    loaded.__setstate__(state)
    assert loaded._qkv_same_embed_dim is False


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_gives_the_same_gradients(make, reentrant, dropout, device):
    ours = make(WIDTH, HEADS, dropout, batch_first=True, device=device)
    x = tokens(2, 6, device=device).requires_grad_()
    call = lambda y: ours(y, y, y)[0]  # noqa: E731
    torch.manual_seed(5)
    (want,) = torch.autograd.grad(call(x).square().sum(), x)
    torch.manual_seed(5)
    checkpoint(call, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_under_autocast_gives_the_same_gradients(make, reentrant, dtype, device):
    ours = make(WIDTH, HEADS, 0.5, batch_first=True, device=device)
    x = tokens(2, 6, device=device).requires_grad_()
    pad = torch.zeros(2, 6, device=device).index_fill(
        1, torch.tensor([5], device=device), -torch.inf
    )
    call = lambda y: ours(y, y, y, pad)[0]  # noqa: E731
    wanted = [x, *ours.parameters()]
    found = []
    for run in (call, lambda y: checkpoint(call, y, use_reentrant=reentrant)):
        for leaf in wanted:
            leaf.grad = None
        torch.manual_seed(5)
        with torch.autocast(device, dtype=dtype):
            out = run(x)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        found.append([leaf.grad for leaf in wanted])
    for a, b in zip(*found, strict=True):
        assert b.abs().sum() > 0
        assert torch.equal(a, b)


forms = pytest.mark.parametrize(
    "form", ["plain", "padded", pytest.param("causal", marks=needs_causal)]
)


@pytest.mark.parametrize(
    ("options", "need_weights"),
    [
        pytest.param({}, False, id="plain"),
        pytest.param({}, True, id="weights"),
        pytest.param({"kdim": 10, "vdim": 14, "bias": False}, True, id="widths, no bias, weights"),
        pytest.param(
            {"add_bias_kv": True, "add_zero_attn": True}, True, id="extra keys, weights",
            marks=needs_extra_keys,
        ),
    ],
)  # fmt: skip
@forms
def test_it_compiles_whole(make, form, options, need_weights, device, compiler):
    torch._dynamo.reset()
    ours = make(WIDTH, HEADS, batch_first=True, device=device, **options)
    inputs = [torch.randn(2, 6, w, device=device) for w in (WIDTH, ours.kdim, ours.vdim)]
    inputs = inputs if options.keys() & {"kdim"} else inputs[:1] * 3
    pad = torch.zeros(2, 6).masked_fill(torch.arange(6) > 3, -torch.inf).to(device)
    call = {"padded": {"key_padding_mask": pad}, "causal": {"is_causal": True}}.get(form, {})
    call["need_weights"] = need_weights
    compiled = torch.compile(ours, fullgraph=True, backend=compiler)
    out, weights = compiled(*inputs, **call)
    want, wanted_weights = ours(*inputs, **call)
    torch.testing.assert_close(out, want)
    assert (weights is None) == (not need_weights)
    if need_weights:
        torch.testing.assert_close(weights, wanted_weights)


@needs_causal
def test_a_compiled_mask_needs_the_hint(make):
    torch._dynamo.reset()
    ours = make(WIDTH, HEADS, batch_first=True)
    x, hidden = tokens(2, 6), torch.ones(6, 6, dtype=torch.bool).triu(1)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="the values of attn_mask cannot be read"):
        compiled(x, x, x, attn_mask=hidden)
    found = compiled(x, x, x, attn_mask=hidden, is_causal=True)[0]
    torch.testing.assert_close(found, ours(x, x, x, is_causal=True)[0])


# What others' attentions have been reported to do


def test_a_call_changes_none_of_its_inputs_and_none_changes_the_next(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device).eval()
    x, short = tokens(4, 16, device=device), tokens(1, 2, device=device)
    pad = (torch.arange(16) >= torch.tensor([[16], [15], [1], [0]])).to(device)
    inputs = (x, x.clone(), x.clone(), pad)
    before = [y.clone() for y in inputs]
    want = ours(*inputs)[0]
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    ours(short, short, short)  # a short batch, after which Hugging Face's BigBird was another
    assert torch.equal(ours(*inputs)[0], want)
    copied = copy.deepcopy(ours)
    assert torch.equal(copied(*inputs)[0], want)


def test_true_is_a_key_to_ignore(make):
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(4, 5)
    for i, length in enumerate((5, 4, 1, 0)):
        pad = torch.arange(5) >= length
        changed = x[i].masked_fill(pad.unsqueeze(-1), 7.0)
        found = ours(changed, changed, changed, pad)[0][:length]
        torch.testing.assert_close(found, ours(x[i], x[i], x[i], pad)[0][:length])
        if length > 1:
            changed[0] = 7.0
            assert not torch.allclose(ours(changed, changed, changed, pad)[0][1:length], found[1:])


def test_slices_and_views_are_taken_as_they_are(make, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    wide = torch.randn(3, 25, 2 * WIDTH + 3, device=device)
    x = wide[1:, 2:22:2, 3 : WIDTH + 3]  # no axis is dense
    pad = (torch.arange(20, device=device) > 12).expand(3, 20)[1:, ::2]
    solid = x.contiguous()
    want = ours(solid, solid, solid, pad.contiguous())[0]
    torch.testing.assert_close(ours(x, x, x, pad)[0], want)
    backwards = solid.flip(1).contiguous().flip(1)
    torch.testing.assert_close(ours(backwards, backwards, backwards, pad)[0], want)


# What is no error, and what is


@pytest.mark.parametrize(
    ("b", "n", "s"),
    [
        (0, 4, 4),
        (2, 0, 0),
        pytest.param(2, 0, 4, marks=needs_cross),
        pytest.param(2, 4, 0, marks=needs_cross),
    ],
)
def test_empty_inputs_are_no_error(make, b, n, s, device):
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    q, kv = tokens(b, n, device=device), tokens(b, s, device=device)
    for need_weights in (False, True):
        out, weights = ours(q, kv, kv, need_weights=need_weights)
        assert out.shape == (b, n, WIDTH)
        assert (weights is None) == (not need_weights)
        assert weights is None or weights.shape == (b, n, s)


@pytest.mark.parametrize("form", ["plain", "bool", "float", "causal", "bool causal"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["out", "weights"])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0,), (0, 0)], ids=str)
def test_empty_inputs_take_masks_and_a_backward_pass(make, name, shape, form, need_weights, device):
    if "causal" in form and not takes(name, "causal"):
        pytest.skip(f"{name} refuses causal")
    ours = make(WIDTH, HEADS, batch_first=True, device=device)
    x = tokens(*shape, device=device).requires_grad_()
    mask = {"bool": torch.bool, "float": torch.float32}.get(form.split()[0])
    mask = None if mask is None else torch.zeros(shape, dtype=mask, device=device)
    out, weights = ours(x, x, x, mask, need_weights, is_causal="causal" in form)
    assert out.shape == x.shape
    assert weights is None or weights.shape == (*shape, shape[-1])
    out.sum().backward()
    assert x.grad.shape == x.shape
    for label, parameter in ours.named_parameters():
        assert parameter.grad is None or torch.all(parameter.grad == 0), label


def test_bad_inputs_say_what_is_wrong(make):
    ours = make(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 5)
    with pytest.raises(AssertionError, match="3-D"):
        ours(x[None], x[None], x[None])
    with pytest.raises(AssertionError, match="query must have width 24"):
        ours(x[..., :5], x, x)
    with pytest.raises(AssertionError, match="key and value must agree"):
        ours(x, x, x[:, :3])
    with pytest.raises(RuntimeError, match="same batch"):
        ours(x, x[:1], x[:1])
    with pytest.raises(AssertionError, match="bool or float"):
        ours(x, x, x, torch.zeros(2, 5, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="bool or float"):
        ours(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.int64))
    with pytest.raises(AssertionError, match=r"the causal \(5, 5\), got shape \(2, 4, 5, 5\)"):
        ours(x, x, x, attn_mask=torch.zeros(2, 4, 5, 5))
    label = f"^{type(ours).__name__}: key_padding_mask must be"
    for dtype in (torch.bool, torch.float32):
        for wrong in ((5, 2), (2, 7), (2, 1, 1, 5)):
            got = re.escape(str(wrong))
            with pytest.raises(AssertionError, match=rf"{label} .* \(2, 5\), got shape {got}"):
                ours(x, x, x, torch.zeros(wrong, dtype=dtype))
        with pytest.raises(AssertionError, match=rf"{label} \(s,\) = \(5,\), got shape \(1, 5\)"):
            ours(x[0], x[0], x[0], torch.zeros(1, 5, dtype=dtype))
        sequence_first = make(WIDTH, HEADS)
        with pytest.raises(AssertionError, match=rf"{label} \(b, s\) = \(5, 2\), got .* \(2, 5\)"):
            sequence_first(x, x, x, torch.zeros(2, 5, dtype=dtype))


def zeros(*shape, dtype=torch.bool):
    return torch.zeros(shape, dtype=dtype)


WRONG = {
    "4-D": lambda f, x: f(x[None], x[None], x[None]),
    "mixed": lambda f, x: f(x, x[0], x[0]),
    "narrow query": lambda f, x: f(x[..., :5], x, x),
    "narrow key": lambda f, x: f(x, x[..., :5], x),
    "short value": lambda f, x: f(x, x, x[:, :3]),
    "other batch": lambda f, x: f(x, x[:1], x[:1]),
    "integer padding": lambda f, x: f(x, x, x, zeros(2, 5, dtype=torch.int64)),
    "uint8 padding": lambda f, x: f(x, x, x, zeros(2, 5, dtype=torch.uint8)),
    "turned padding": lambda f, x: f(x, x, x, zeros(5, 2)),
    "longer padding": lambda f, x: f(x, x, x, zeros(2, 7)),
    "1-D padding": lambda f, x: f(x, x, x, zeros(5)),
    "4-D padding": lambda f, x: f(x, x, x, zeros(2, 1, 1, 5)),
    "4-D float padding": lambda f, x: f(x, x, x, zeros(2, 1, 1, 5, dtype=torch.float32)),
    "unbatched, 2-D padding": lambda f, x: f(x[0], x[0], x[0], zeros(1, 5)),
    "integer mask": lambda f, x: f(x, x, x, attn_mask=zeros(5, 5, dtype=torch.int64)),
    "1-D mask": lambda f, x: f(x, x, x, attn_mask=zeros(5)),
    "4-D mask": lambda f, x: f(x, x, x, attn_mask=zeros(2, 4, 5, 5)),
    "longer mask": lambda f, x: f(x, x, x, attn_mask=zeros(5, 7)),
    "mask per sample": lambda f, x: f(x, x, x, attn_mask=zeros(2, 5, 5)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_type_of_an_error_is_that_of_stock(make, wrong):
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = tokens(2, 5)
    with pytest.raises((AssertionError, RuntimeError)) as of_stock:
        WRONG[wrong](stock, x)
    with pytest.raises(of_stock.type, match=r"^[A-Z][A-Za-z]+Attention: ") as of_ours:
        WRONG[wrong](make(WIDTH, HEADS, batch_first=True), x)
    assert not isinstance(of_ours.value, ValueError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_the_way_out(make):
    ours = make(WIDTH, HEADS, batch_first=True)
    nested = torch.nested.nested_tensor([tokens(3), tokens(5)])
    with pytest.raises(AssertionError, match="enable_nested_tensor=False"):
        ours(nested, nested, nested)


def test_it_has_a_page_in_the_docs(name):
    (page,) = (Path(__file__).parent.parent / "docs").glob(f"*{name}*.md")
    assert f"autoclass:: fastattn.{MECHANISMS[name].__name__}" in page.read_text()
