"""timm's vision transformers with our attentions."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

timm = pytest.importorskip("timm")
from timm.layers import RmsNorm  # noqa: E402
from timm.models.vision_transformer import Attention as Stock  # noqa: E402

from fastattn.integrations.timm import Attention, convert, revert  # noqa: E402

# so that every mechanism equals, or comes close to, softmax attention
EXACT = {
    "bigbird": {"block_size": 16, "num_window_blocks": 5, "num_random_blocks": 0},
    "linformer": {"slots": 64},
}


def vit(device="cpu", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 48, "depth": 3, "num_heads": 3, "img_size": 48, "patch_size": 8}
    model = timm.models.VisionTransformer(**sizes | {"num_classes": 10} | options)
    return model.to(device).eval()


def images(b=2, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(b, 3, 48, 48, generator=generator).to(device)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": False, "qk_norm": True, "scale_attn_norm": True},
        {"block_fn": timm.models.vision_transformer.ParallelThingsBlock},
        {"class_token": False, "reg_tokens": 4, "global_pool": "avg"},
    ],
    ids=str,
)
@pytest.mark.parametrize("mechanism", EXACT)
def test_with_room_for_everything_it_is_the_models_own_attention(mechanism, options, device):
    model, x = vit(device, **options), images(device=device)
    with torch.no_grad():
        want = model(x)
        names = convert(model, mechanism, **EXACT[mechanism])
        found = model(x)
    assert len(names) == 3 * (2 if "block_fn" in options else 1)
    assert found.isfinite().all()
    assert want.std() > 0.1
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4 * want.std().item())


def test_performer_comes_closer_with_more_features(device):
    x = images(8, device)
    with torch.no_grad():
        want = vit(device)(x)
        errors = []
        for m in (16, 64, 512):
            model = vit(device)
            convert(model, "performer", num_features=m)
            errors.append((model(x) - want).norm() / want.norm())
    assert errors[2] < 0.5 * errors[0]
    assert errors[2] < 0.1


@pytest.mark.parametrize("mechanism", ["linear", "performer", "bigbird", "linformer"])
def test_parameters_state_dict_and_optimiser_stay_and_everything_trains(mechanism, device):
    model = vit(device).train()
    state, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    options = {"bigbird": {"block_size": 16}, "linformer": {"slots": 8}}.get(mechanism, {})
    assert convert(model, mechanism, **options) == [f"blocks.{i}.attn" for i in range(3)]
    assert model.state_dict().keys() == state.keys()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    model.load_state_dict(state, strict=True)
    model(images(device=device)).square().sum().backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.bias"):
            assert parameter.grad.abs().sum() > 0, name


def test_copies_pickles_and_what_comes_back_are_the_same():
    model = vit()
    stock = pickle.dumps(model)
    with torch.no_grad():
        before = model(images())
        convert(model, "performer", num_features=16, seed=3)
        want = model(images())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(images()), want)
        assert "performer, num_features=16, seed=3" in repr(model)
        assert len(revert(model)) == 3
        assert torch.equal(model(images()), before)
    assert type(model.blocks[0].attn) is Stock
    assert vars(model.blocks[0].attn).keys() == vars(pickle.loads(stock).blocks[0].attn).keys()


def test_layers_draw_directions_of_their_own(device):
    model = vit(device)
    convert(model, "performer", num_features=8)
    assert [block.attn.layer_idx for block in model.blocks] == [0, 1, 2]
    x = torch.randn(2, 20, 48, device=device)
    first, second = (block.attn for block in model.blocks[:2])
    second.load_state_dict(first.state_dict())
    assert not torch.allclose(first(x), second(x))


def test_dropout_acts_in_training_only(device):
    model, x = vit(device, attn_drop_rate=0.5), images(device=device)
    convert(model, "linear")
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("mechanism", ["linear", "performer", "bigbird", "linformer"])
def test_keys_that_are_not_there_change_nothing(mechanism, device):
    options = {"bigbird": {"block_size": 16}, "linformer": {"slots": 8, "seq_len": 24}}
    layer = Stock(48, 3, qkv_bias=True).to(device)
    convert(layer, mechanism, **options.get(mechanism, {}))
    x = torch.randn(2, 24, 48, device=device)
    there = torch.arange(24, device=device).expand(2, 1, 1, 24) < 17
    least = torch.zeros(2, 1, 1, 24, device=device)
    want = layer(x[:, :17])
    for value in (-math.inf, torch.finfo(torch.float32).min):
        for mask in (there, least.masked_fill(~there, value)):
            torch.testing.assert_close(layer(x, attn_mask=mask)[:, :17], want)
    other = x.clone()
    other[:, 17:] = torch.nan
    torch.testing.assert_close(layer(other, attn_mask=there)[:, :17], want)


def test_causal_is_causal_or_refused(device):
    x = torch.randn(2, 12, 48, device=device)
    for mechanism in ("linear", "performer"):
        layer = Stock(48, 3).to(device)
        convert(layer, mechanism)
        out = layer(x, is_causal=True)
        torch.testing.assert_close(layer(x[:, :5], is_causal=True), out[:, :5])
        assert not torch.allclose(layer(x), out)
    for mechanism in ("bigbird", "linformer"):
        layer = Stock(48, 3).to(device)
        convert(layer, mechanism)
        with pytest.raises(NotImplementedError, match="are for decoders"):
            layer(x, is_causal=True)


def test_what_cannot_be_honoured_says_so():
    layer = Stock(48, 3)
    convert(layer, "linear")
    x = torch.randn(2, 12, 48)
    for shape in ((12, 12), (2, 1, 12, 12), (2, 1, 1, 11), (3, 1, 1, 12)):
        with pytest.raises(NotImplementedError, match=r"\(b, 1, 1, n\) = \(2, 1, 1, 12\)"):
            layer(x, attn_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="a finite bias on the keys is not supported"):
        layer(x, attn_mask=torch.full((2, 1, 1, 12), -5.0))


class Other(Stock):
    pass


def test_what_cannot_be_converted_says_why_and_changes_nothing():
    model = vit()
    with pytest.raises(ValueError, match="mechanism must be one of 'linear'"):
        convert(model, "softmax")
    with pytest.raises(TypeError, match="performer has no option features"):
        convert(model, "performer", features=3)
    with pytest.raises(ValueError, match="feature_map must be one of"):
        convert(model, "linear", feature_map="gelu")
    with pytest.raises(ValueError, match="fits none of 'blocks"):
        convert(model, "linear", filter="layers.*")
    with pytest.raises(ValueError, match="Linear has no timm Attention to swap"):
        convert(nn.Linear(2, 2), "linear")
    with pytest.raises(ValueError, match="no fastattn attention to revert"):
        revert(model)
    model.blocks[2].attn.__class__ = Other
    with pytest.raises(ValueError, match=r"blocks\.2\.attn is a Other, whose forward"):
        convert(model, "linear", filter="*")
    assert convert(model, "linear", filter=["blocks.0.*"]) == ["blocks.0.attn"]
    with pytest.raises(ValueError, match=r"blocks\.0\.attn is a Attention already"):
        convert(model, "linear", filter="blocks.0.*")
    assert [type(b.attn) for b in model.blocks] == [Attention, Stock, Other]
    assert convert(model, "linear") == ["blocks.1.attn"]


def test_what_cannot_be_reverted_says_why_and_changes_nothing():
    model = vit()
    convert(model, "linear")
    last = model.blocks[2].attn
    last.gain = nn.Parameter(torch.ones(1))
    with torch.no_grad():
        want = model(images())
        parametrize.register_parametrization(last, "gain", nn.Identity())
        with pytest.raises(ValueError, match=r"blocks\.2\.attn is parametrized: .* revert"):
            revert(model)
        assert torch.equal(model(images()), want)
        parametrize.remove_parametrizations(last, "gain")
        last.forward = last.forward
        with pytest.raises(ValueError, match=r"has a forward of its own.*: revert before wrapping"):
            revert(model)
        assert torch.equal(model(images()), want)
    assert all(isinstance(block.attn, Attention) for block in model.blocks)
    del last.forward
    assert len(revert(model)) == 3


def test_norms_of_queries_and_keys_are_applied():
    layer = Stock(48, 3, qk_norm=True, norm_layer=RmsNorm)
    x = torch.randn(2, 12, 48)
    convert(layer, "linformer", slots=12)
    with torch.no_grad():
        before = layer(x)
        layer.q_norm.weight.mul_(3)
        assert not torch.allclose(layer(x), before)


@pytest.mark.parametrize("mechanism", ["linear", "performer", "bigbird", "linformer"])
def test_a_model_of_timms_own_list_at_its_real_width(mechanism, device):
    model = timm.create_model("vit_base_patch16_224", depth=2).to(device).eval()
    x = torch.randn(1, 3, 224, 224, device=device)
    want = model(x)
    assert convert(model, mechanism) == ["blocks.0.attn", "blocks.1.attn"]
    out = model(x)
    assert out.shape == (1, 1000)
    if mechanism in EXACT:  # 197 tokens are so few that their defaults see all
        assert_near = torch.testing.assert_close
        assert_near(out, want, rtol=1e-4, atol=1e-4 * want.std().item())
    else:
        assert (out - want).norm() > 0.05 * want.norm()
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


COMPILED = {
    "performer": {"num_features": 16},
    "bigbird": {"block_size": 16},
    "linformer": {"slots": 8},
}


@pytest.mark.parametrize("mechanism", ["linear", "performer", "bigbird", "linformer"])
def test_it_compiles_whole_forward_and_backward(mechanism, device, compiler):
    torch._dynamo.reset()
    model, x = vit(device, depth=2), images(device=device)
    assert len(convert(model, mechanism, **COMPILED.get(mechanism, {}))) == 2
    found = []
    for run in (torch.compile(model, fullgraph=True, backend=compiler), model):
        model.zero_grad()
        out = run(x)
        out.square().sum().backward()
        found.append([out, *(parameter.grad for parameter in model.parameters())])
    assert found[1][0].abs().max() > 0.1
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
