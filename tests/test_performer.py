"""What PerformerAttention has of its own; the contract of all mechanisms is in test_mechanisms."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import PerformerAttention
from fastattn.nn import redraw_projections
from fastattn.ops import draw_projection, oprf_constant

OPTIONS = [
    {},
    {"variant": "hyperbolic"},
    {"variant": "oprf"},
    {"variant": "relu"},
    {"learned": True},
    {"qk_norm": True},
    {"variant": "oprf", "qk_norm": True, "learned": True},
    {"kind": "iid", "seed": 5},
]


def make(**options):
    torch.manual_seed(0)
    return PerformerAttention(24, 4, batch_first=True, num_features=16, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_trains_decodes_and_is_saved(options):
    module = make(causal=True, **options)
    x = torch.randn(2, 9, 24)
    out, weights = module(x, x, x, need_weights=True)
    out.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    if module.variant == "relu":  # some head of a row may see no active feature
        assert ((weights.sum(-1) - 1).abs() < 1e-5).float().mean() > 0.5
    else:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9))
    outs, state = [], None
    for i in range(9):
        y, state = module.step(*(x[:, i : i + 1],) * 3, state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), out)
    other = make(causal=True, **options | {"seed": 9})
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x, x, x)[0], out)
    assert torch.equal(copy.deepcopy(module)(x, x, x)[0], out)


def test_it_is_close_to_stock_softmax_attention_where_queries_are_short():
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 100, 64)
    with torch.no_grad():
        stock.in_proj_weight[:128] *= 0.5
        want = stock(x, x, x)[0]
        errors = []
        for m in (32, 512):
            ours = PerformerAttention(64, 4, batch_first=True, num_features=m)
            ours.load_state_dict(stock.state_dict())
            errors.append((ours(x, x, x)[0] - want).norm() / want.norm())
    assert errors[1] < errors[0] / 2
    assert errors[1] < 0.1


# The directions


def test_a_stock_state_dict_leaves_the_projection_as_drawn_and_a_full_one_brings_its_own():
    module, stock = make(seed=1), nn.MultiheadAttention(24, 4)
    before = module.projection.clone()
    module.load_state_dict(stock.state_dict(), strict=True)
    assert torch.equal(module.projection, before)
    other = make(seed=2)
    module.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(module.projection, other.projection)
    with pytest.raises(RuntimeError, match="size mismatch for projection"):
        module.load_state_dict(PerformerAttention(24, 4, num_features=8).state_dict())


def test_convert_draws_each_layer_anew_and_revert_leaves_nothing():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, batch_first=True), 3)
    keys, random = list(model.state_dict()), torch.get_rng_state()
    fastattn.convert(model, "performer", num_features=16, learned=True, qk_norm=True)
    assert torch.equal(torch.get_rng_state(), random)
    drawn = [layer.self_attn.projection for layer in model.layers]
    for layer, projection in enumerate(drawn):
        assert torch.equal(projection, draw_projection(16, 6, layer=layer))
    assert isinstance(drawn[0], nn.Parameter)
    fastattn.revert(model)
    assert list(model.state_dict()) == keys
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    model(torch.randn(2, 5, 24))
    fastattn.convert(model, "performer", num_features=8)
    assert model.layers[0].self_attn.projection.shape == (8, 6)


def test_redrawing_is_due_by_the_training_step_alone():
    model = nn.ModuleList([make(redraw=10), make(redraw="manual"), make(), make(redraw=4)])
    start = [m.projection.clone() for m in model]
    assert redraw_projections(model, 0) == []
    assert redraw_projections(model, 7) == []
    assert redraw_projections(model, 20) == ["0", "3"]
    assert torch.equal(model[0].projection, draw_projection(16, 6, epoch=2))
    assert torch.equal(model[3].projection, draw_projection(16, 6, epoch=5))
    assert torch.equal(model[1].projection, start[1])
    with pytest.raises(ValueError, match="needs redraw='manual'"):
        model[2].redraw_projection(1)
    model.eval()
    assert redraw_projections(model, 40) == []
    model[1].redraw_projection(3)
    assert torch.equal(model[1].projection, draw_projection(16, 6, epoch=3))


def test_forward_draws_nothing_so_a_checkpointed_block_computes_the_same_again():
    module = make(redraw=1)
    x = torch.randn(2, 9, 24, requires_grad=True)
    grads = []
    for run in (module, lambda *a: checkpoint(module, *a, use_reentrant=False)):
        out = run(x, x, x)[0]
        grads.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(*grads)
    assert torch.equal(module.projection, draw_projection(16, 6))


@pytest.mark.parametrize("how", ["reset", "load", "assign"])
def test_a_module_made_on_meta_gets_its_own_state_with_its_parameters(how):
    for learned in (False, True):
        options = {"num_features": 16, "qk_norm": True, "variant": "oprf", "learned": learned}
        module = PerformerAttention(24, 4, device="meta", **options)
        assert module.projection.is_meta
        stock = nn.MultiheadAttention(24, 4).state_dict()
        if how != "assign":
            module.to_empty(device="cpu")
        if how == "reset":
            module._reset_parameters()
            module.out_proj.reset_parameters()  # its weight is left to it, as in the stock module
        else:
            module.load_state_dict(stock, strict=True, assign=how == "assign")
        fresh = PerformerAttention(24, 4, **options)
        for name in ("projection", "qk_gain", "oprf_constant"):
            assert torch.equal(getattr(module, name), getattr(fresh, name)), name
        x = torch.randn(5, 2, 24)
        assert module(x, x, x)[0].isfinite().all()


def test_the_constant_of_oprf_is_a_buffer_that_no_batch_changes():
    module = make(variant="oprf")
    assert torch.equal(module.oprf_constant, torch.full((4,), oprf_constant(2 * 6**0.5, 6)))
    x = torch.randn(2, 9, 24)
    alone = module(x[:1], x[:1], x[:1])[0]
    torch.testing.assert_close(module(x, x, x)[0][:1], alone)
    module.oprf_constant[1] = -0.3
    assert not torch.equal(module(x, x, x)[0][:1], alone)


def test_a_zero_token_has_a_moderate_gradient_under_qk_norm():
    module = make(qk_norm=True)
    x = torch.randn(2, 9, 24)
    x[:, 4] = 0
    module(x, x, x)[0].square().sum().backward()
    assert module.in_proj_bias.grad.abs().max() < 1e3


def test_redrawing_between_forward_and_backward_raises():
    module = make(redraw="manual")
    x = torch.randn(2, 9, 24)
    out = module(x, x, x)[0].sum()
    module.redraw_projection(1)
    with pytest.raises(RuntimeError, match="projection was modified by an inplace operation"):
        out.backward()


def test_qk_norm_gives_queries_and_keys_the_length_of_the_gain():
    module = make(qk_norm=True)
    q, _ = module._normed(*(100 * torch.randn(2, 4, 9, 6) for _ in range(2)))
    scaled = q * 6**-0.25
    torch.testing.assert_close(scaled.norm(dim=-1), torch.ones(2, 4, 9), rtol=1e-4, atol=0)
    x = torch.randn(2, 9, 24)
    with torch.no_grad():
        module.in_proj_bias.zero_()
        out = module(x, x, x)[0]
        module.in_proj_weight[:48] *= 50
        torch.testing.assert_close(module(x, x, x)[0], out, rtol=1e-2, atol=1e-3)


# Parity with upstream


def upstream(q, k, v, w, causal):
    """google-research's nonnegative_softmax_kernel_feature_creator and favor attention, by hand."""
    ratio, eps = w.shape[0] ** -0.5, 1e-4

    def features(x, is_query):
        x = x * x.shape[-1] ** -0.25
        dash = torch.einsum("bhnd,md->bhnm", x, w)
        diagonal = (x**2).sum(-1, keepdim=True) / 2
        axes = (-1,) if is_query else (-1, -2)
        return ratio * ((dash - diagonal - dash.amax(axes, keepdim=True)).exp() + eps)

    weights = features(q, True) @ features(k, False).mT
    weights = weights.tril() if causal else weights
    return (weights / weights.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_compat_is_the_upstream_formula_and_shows_why_it_is_not_the_default(causal):
    module = make(compat="jax", causal=causal).double()
    q, k, v = (torch.randn(2, 4, 20, 6, dtype=torch.float64) for _ in range(3))
    got = module._attend(q, k, v, causal=causal, key_padding_mask=None)
    want = upstream(q, k, v, module.projection, causal)
    torch.testing.assert_close(got, want)
    far = module._attend(4 * q, 4 * k, v, causal=False, key_padding_mask=None)
    collapse = (far - v.mean(2, keepdim=True)).norm() / v.norm()
    ours = make().double()._attend(4 * q, 4 * k, v, causal=False, key_padding_mask=None)
    assert collapse < 0.02
    assert (ours - v.mean(2, keepdim=True)).norm() / v.norm() > 0.5
    x = torch.randn(2, 1, 24)
    decoder = make(compat="jax", causal=True)
    with pytest.raises(ValueError, match='compat="jax" cannot decode'):
        decoder.step(x, x, x)


def test_padding_decides_no_maximum_in_the_upstream_formula():
    module = make(compat="jax").double()
    q, k, v = (torch.randn(1, 4, 9, 6, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[:, 6:] = True
    got = module._attend(q, k, v, causal=False, key_padding_mask=mask)
    torch.testing.assert_close(got, upstream(q, k[:, :, :6], v[:, :, :6], module.projection, False))


def test_a_head_that_is_too_wide_is_refused_before_anything_changes():
    model = nn.ModuleList([nn.MultiheadAttention(24, 4), nn.MultiheadAttention(600, 1)])
    with pytest.raises(ValueError, match="up to 256 wide, got embed_dim 600 / 1"):
        fastattn.convert(model, "performer")
    assert all(type(m) is nn.MultiheadAttention for m in model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 0}, "num_features must be from 1 to 512, got 0"),
        ({"num_features": 513}, "got 513"),
        ({"variant": "trig"}, "variant must be one of"),
        ({"kind": "givens"}, "kind must be one of"),
        ({"redraw": "always"}, "redraw must be one of 'never', 'manual'"),
        ({"redraw": 0}, "a positive integer, got 0"),
        ({"redraw": True}, "a positive integer, got True"),
        ({"redraw": 10.0}, "a positive integer, got 10.0"),
        ({"redraw": None}, "a positive integer, got None"),
        ({"redraw": 10, "learned": True}, "must be 'never' for learned directions, got 10"),
        ({"compat": "tf"}, "compat must be one of 'jax'"),
        ({"compat": "jax", "variant": "relu"}, 'compat="jax" takes variant "positive"'),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_a_bad_option_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        PerformerAttention(24, 4, **options)
