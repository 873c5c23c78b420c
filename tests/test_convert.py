"""convert and revert: the model stays the model."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fastattn import LinearAttention, convert, revert


def transformer():
    return nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)


def run(model):
    torch.manual_seed(7)
    return model(torch.randn(2, 6, 16), torch.randn(2, 4, 16))


def test_every_attention_is_swapped_and_named():
    model = transformer()
    names = convert(model, "linear", feature_map="relu")
    assert names == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    ]
    for name in names:
        module = model.get_submodule(name)
        assert type(module) is LinearAttention
        assert module.feature_map == "relu"
    assert model.encoder.use_nested_tensor is False


def test_the_output_changes_and_comes_back_exactly():
    model = transformer()
    before = run(model)
    convert(model, "linear")
    assert (run(model) - before).abs().max() > 1e-3
    assert len(revert(model)) == 6
    assert torch.equal(run(model), before)
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert vars(model.encoder).keys() == vars(transformer().encoder).keys()
    assert (
        vars(model.encoder.layers[0].self_attn).keys() == vars(nn.MultiheadAttention(2, 1)).keys()
    )
    assert model.encoder.use_nested_tensor is True


def test_parameters_optimiser_and_state_dict_survive():
    model = transformer()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = copy.deepcopy(model.state_dict())
    convert(model, "linear")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state, strict=True)
    run(model).sum().backward()
    optimizer.step()
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, state[k])]
    assert any("self_attn" in name for name in changed)


def test_hooks_training_mode_and_ties_survive():
    model = transformer().eval()
    shared = model.encoder.layers[0].self_attn
    model.encoder.layers[1].self_attn = shared
    calls = []
    shared.register_forward_hook(lambda *x: calls.append(1))
    assert len(convert(model, "linear")) == 5
    assert model.encoder.layers[1].self_attn is shared
    assert not shared.training
    run(model)
    assert len(calls) == 2


def test_a_converted_model_copies_and_pickles():
    model = transformer()
    convert(model, "linear")
    want = run(model)
    assert torch.equal(run(copy.deepcopy(model)), want)
    assert torch.equal(run(pickle.loads(pickle.dumps(model))), want)


def test_a_padded_converted_encoder_gets_its_mask_in_eval():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    convert(model, "linear")
    x = torch.randn(2, 6, 16)
    pad = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    model.eval()
    with torch.no_grad():
        out = model(x, src_key_padding_mask=pad)
        short = model(x[1:, :4])
    torch.testing.assert_close(out[1:, :4], short)


def test_the_model_itself_may_be_the_attention():
    model = nn.MultiheadAttention(16, 2, kdim=8, vdim=8)
    assert convert(model, "linear") == [""]
    assert isinstance(model, LinearAttention)
    model(torch.randn(3, 1, 16), torch.randn(3, 1, 8), torch.randn(3, 1, 8))
    assert revert(model) == [""]
    assert model._qkv_same_embed_dim is False
    model(torch.randn(3, 1, 16), torch.randn(3, 1, 8), torch.randn(3, 1, 8))


def test_a_module_built_as_ours_reverts_to_stock():
    torch.manual_seed(0)
    ours = nn.Sequential(LinearAttention(16, 2))
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 2)
    revert(ours)
    x = torch.randn(5, 2, 16)
    assert torch.equal(ours[0](x, x, x)[0], stock(x, x, x)[0])


def test_what_cannot_be_converted_says_why_and_changes_nothing():
    model = transformer()
    with pytest.raises(ValueError, match="mechanism must be one of linear"):
        convert(model, "softmax")
    with pytest.raises(TypeError, match="has no option feature; it takes feature_map, causal"):
        convert(model, "linear", feature="relu")
    with pytest.raises(ValueError, match="feature_map must be one of"):
        convert(model, "linear", feature_map="gelu")
    with pytest.raises(ValueError, match=r"Linear has no nn\.MultiheadAttention"):
        convert(nn.Linear(2, 2), "linear")
    with pytest.raises(ValueError, match="no fastattn attention to revert"):
        revert(model)
    model.encoder.layers[0].self_attn.forward = lambda *x, **y: x
    with pytest.raises(ValueError, match="has a forward of its own"):
        convert(model, "linear")
    del model.encoder.layers[0].self_attn.forward
    parametrize.register_parametrization(
        model.decoder.layers[1].self_attn, "in_proj_weight", nn.Identity()
    )
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\.self_attn is parametrized"):
        convert(model, "linear")
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert model.encoder.use_nested_tensor is True


@pytest.mark.parametrize("feature_map", ["elu", "relu", "squared_relu", "exp", "identity"])
def test_an_option_reaches_the_op(feature_map):
    from fastattn.ops import linear_attention

    model = nn.MultiheadAttention(16, 2, batch_first=True)
    convert(model, "linear", feature_map=feature_map)
    x = torch.randn(2, 5, 16)
    q, k, v = model._project(x, x, x)
    out = linear_attention(q, k, v, feature_map=feature_map).transpose(1, 2).flatten(2)
    torch.testing.assert_close(model(x, x, x)[0], model.out_proj(out))


def test_converting_twice_says_that_nothing_is_left():
    model = transformer()
    convert(model, "linear")
    with pytest.raises(ValueError, match="are of another type already"):
        convert(model, "linear")
