"""convert and revert: the model stays the model."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from test_mechanisms import Counter, takes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from fastattn import (
    MECHANISMS,
    BigBirdAttention,
    LinearAttention,
    LinformerAttention,
    PerformerAttention,
    convert,
    revert,
)
from fastattn.nn import number_layers, redraw_projections

OPTIONS = {
    "bigbird": {"block_size": 16},
    "linformer": {"seq_len": 16, "slots": 4},
}


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
    assert model.encoder.use_nested_tensor is True


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        *((name, OPTIONS.get(name, {})) for name in MECHANISMS),
        ("bigbird", {"num_global_tokens": 3}),
        ("performer", {"learned": True, "qk_norm": True, "variant": "oprf"}),
        ("linformer", {"seq_len": 16, "slots": 4, "kind": "fixed", "sharing": "none"}),
    ],
    ids=str,
)
def test_nothing_of_ours_is_left_in_a_module_that_came_back(mechanism, options):
    model, stock = nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2)
    before = dict(model.named_parameters())
    convert(model, mechanism, **options)
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    revert(model)
    after = dict(model.named_parameters())
    assert [*after] == [*before]
    assert all(after[name] is parameter for name, parameter in before.items())
    assert type(model) is nn.MultiheadAttention
    assert vars(model).keys() == vars(stock).keys()
    for what in ("_parameters", "_buffers", "_modules"):
        assert vars(model)[what].keys() == vars(stock)[what].keys()
    assert model._qkv_same_embed_dim is True


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


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_model_trained_where_it_was_converted_gives_back_its_parameters(mechanism, device):
    model = transformer().to(device)
    parameters = dict(model.named_parameters())
    filter = "encoder.*" if mechanism == "bigbird" else None  # which has no cross-attention
    swapped = convert(model, mechanism, filter=filter, **OPTIONS.get(mechanism, {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source, target = torch.randn(2, 6, 16, device=device), torch.randn(2, 4, 16, device=device)
    pad = torch.tensor([[False] * 6, [False] * 4 + [True] * 2], device=device)
    masks = {"src_key_padding_mask": pad, "memory_key_padding_mask": pad}
    if takes(mechanism, "causal"):
        masks["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(4, device=device)
    model(source, target, **masks).square().sum().backward()
    optimizer.step()
    assert revert(model) == swapped
    after = dict(model.named_parameters())
    assert [*after] == [*parameters]
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert all(parameter.grad.isfinite().all() for parameter in after.values())


@pytest.mark.parametrize("pickled", [False, True], ids=["converted", "pickled"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_padded_converted_encoder_is_called_and_gets_its_mask_in_eval(
    monkeypatch, mechanism, pickled, device
):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(device)
    convert(model, mechanism, **OPTIONS.get(mechanism, {}))
    if pickled:
        model = pickle.loads(pickle.dumps(model))
    counter = Counter(monkeypatch, MECHANISMS[mechanism])
    x = torch.randn(2, 6, 16, device=device)
    pad = torch.tensor([[False] * 6, [False] * 4 + [True] * 2], device=device)
    model.eval()
    with torch.no_grad():
        out = model(x, src_key_padding_mask=pad)
        assert counter.calls == 2
        short = model(x[1:, :4])
    assert counter.calls == 4
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


def outline(model):
    """What must be the same after an error: classes, attributes and the very tensors."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = {n: (type(m), {*vars(m)}) for n, m in model.named_modules()}
    return modules, [(n, id(x)) for n, x in tensors], [*model.state_dict()]


def test_a_projection_elsewhere_is_refused_and_nothing_has_changed():
    model = transformer()
    attention, calls = model.encoder.layers[0].self_attn, []
    handle = attention.register_forward_hook(lambda *_: calls.append(1))
    want, before = run(model), outline(model)
    projection = LinformerAttention.draw_projection(16, 4, device="meta")
    options = {"seq_len": 16, "slots": 4, "sharing": "layerwise", "projection": projection}
    with pytest.raises(ValueError, match=r"must be torch\.float32 on cpu .* is .* on meta"):
        convert(model, "linformer", **options)
    assert outline(model) == before
    assert torch.equal(run(model), want)
    handle.remove()  # which finds its hook where it was
    calls.clear()
    run(model)
    assert not calls
    projection = LinformerAttention.draw_projection(16, 4)
    assert len(convert(model, "linformer", **options | {"projection": projection})) == 6


def test_an_error_half_way_leaves_every_module_as_it_was(monkeypatch):
    """As of a device that is full."""
    model, made = transformer(), []
    model.decoder.layers[0].self_attn.__class__ = Other
    real = PerformerAttention._reset_own

    def fails_at_the_fourth(module, names=None):
        if not module.out_proj.weight.is_meta:
            made.append(module)
            if len(made) == 4:
                raise torch.OutOfMemoryError("full")
        real(module, names)

    monkeypatch.setattr(PerformerAttention, "_reset_own", fails_at_the_fourth)
    before, want = outline(model), run(model)
    options = {"learned": True, "qk_norm": True, "variant": "oprf"}
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        convert(model, "performer", filter="*", **options)
    assert len(made) == 4
    assert outline(model) == before
    assert torch.equal(run(model), want)
    assert len(convert(model, "performer", filter="*", **options)) == 6
    assert len(revert(model)) == 6
    assert outline(model) == before


ENCODER = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
DECODER = "decoder.layers.0.self_attn"
CROSS = [f"decoder.layers.{layer}.multihead_attn" for layer in range(2)]


class Other(nn.MultiheadAttention):
    pass


class Biased(nn.MultiheadAttention):
    """No parameters of its own, but a forward."""

    def forward(self, query, key, value, **options):
        return super().forward(query, key, value + 1, **options)


class FurtherBiased(Biased):
    pass


@pytest.mark.parametrize("kind", [Biased, FurtherBiased])
def test_a_forward_of_its_own_is_lost_only_where_its_type_is_asked_for(kind):
    model = transformer()
    model.decoder.layers[0].self_attn.__class__ = kind
    before = outline(model)
    message = rf"^decoder\.layers\.0\.self_attn is a {kind.__name__} with a forward of its own"
    for filter in ("*", "decoder.*", lambda module, name: True):
        with pytest.raises(ValueError, match=message):
            convert(model, "linear", filter=filter)
        assert outline(model) == before
    with pytest.raises(
        ValueError, match=r"^the model is a .* forward of its own, which would be lost"
    ):
        convert(model.decoder.layers[0].self_attn, "linear", filter=["*"])
    assert len(convert(model, "linear")) == 5  # exactly nn.MultiheadAttention
    assert convert(model, "linear", filter=kind) == ["decoder.layers.0.self_attn"]
    assert len(revert(model)) == 6
    assert outline(model) == before


@pytest.mark.parametrize(
    ("filter", "want"),
    [
        ("encoder.*", ENCODER),
        (["*.multihead_attn", "encoder.layers.1.*"], [ENCODER[1], *CROSS]),
        (("encoder.layers.0.self_attn",), ENCODER[:1]),
        (lambda module, name: "0" in name and module.dropout == 0, [ENCODER[0], DECODER, CROSS[0]]),
        (Other, [DECODER]),
    ],
)
def test_a_filter_swaps_what_it_asks_for_and_nothing_else(filter, want):
    model = transformer()
    model.decoder.layers[0].self_attn.__class__ = Other
    before = {n: type(m) for n, m in model.named_modules()}
    assert convert(model, "linear", filter=filter) == want
    ours = [n for n, m in model.named_modules() if isinstance(m, LinearAttention)]
    assert ours == want
    assert model.encoder.use_nested_tensor is not any(name.startswith("enc") for name in want)
    run(pickle.loads(pickle.dumps(model)))
    assert revert(model) == want
    assert {n: type(m) for n, m in model.named_modules()} == before
    assert "_stock_class" not in vars(model.decoder.layers[0].self_attn)


def test_parts_of_a_model_may_have_different_mechanisms_and_differ_in_their_directions():
    model = transformer()
    convert(model, "performer", filter="encoder.*", num_features=16)
    convert(model, "performer", filter="decoder.*.self_attn", num_features=16, causal=True)
    convert(model, "linear")
    drawn = [m.projection for m in model.modules() if isinstance(m, PerformerAttention)]
    assert len(drawn) == 4
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    whole = transformer()
    convert(whole, "performer", num_features=16)
    for name in ENCODER:  # the numbers do not depend on the filter
        assert torch.equal(
            whole.get_submodule(name).projection, model.get_submodule(name).projection
        )
    run(model)
    assert len(revert(model)) == 6


def test_options_by_layer_take_precedence_and_a_later_pattern_over_an_earlier_one():
    model = transformer()
    convert(
        model,
        "performer",
        num_features=16,
        layer_options={
            "decoder.*.self_attn": {"causal": True},
            "encoder.*": {"num_features": 8, "seed": 3},
            "encoder.layers.1.*": {"num_features": 4},
        },
    )
    got = {n: model.get_submodule(n) for n in [*ENCODER, DECODER, *CROSS]}
    assert [m.num_features for m in got.values()] == [8, 4, 16, 16, 16]
    assert [m.causal for m in got.values()] == [False, False, True, False, False]
    assert [m.seed for m in got.values()] == [3, 3, 0, 0, 0]
    run(model)  # source and target have different lengths: cross-attention is not causal


def test_a_filter_or_an_option_by_layer_that_fits_nothing_is_an_error_and_changes_nothing():
    model = transformer()
    with pytest.raises(ValueError, match=r"filter: 'encodr\.\*' fits none of 'encoder\.layers"):
        convert(model, "linear", filter=["encoder.*", "encodr.*"])
    with pytest.raises(ValueError, match="selects none of 'encoder"):
        convert(model, "linear", filter=lambda module, name: False)
    with pytest.raises(ValueError, match="selects none of 'encoder"):
        convert(model, "linear", filter=Other)
    with pytest.raises(TypeError, match=r"a subclass, got Linear"):
        convert(model, "linear", filter=nn.Linear)
    with pytest.raises(TypeError, match=r"a function of \(module, name\), got int"):
        convert(model, "linear", filter=3)
    with pytest.raises(ValueError, match="layer_options: 'decoder"):
        convert(model, "linear", filter="encoder.*", layer_options={"decoder.*": {"causal": True}})
    with pytest.raises(TypeError, match="has no option cusal"):
        convert(model, "linear", layer_options={"decoder.*": {"cusal": True}})
    with pytest.raises(ValueError, match="feature_map must be one of"):
        convert(model, "linear", layer_options={"*.1.self_attn": {"feature_map": "gelu"}})
    assert not any(isinstance(m, LinearAttention) for m in model.modules())
    convert(model, "linear", filter=ENCODER)
    with pytest.raises(ValueError, match=r"encoder\.layers\.0\.self_attn is a LinearAttention"):
        convert(model, "linear", filter="*")
    model.decoder.layers[0].self_attn.__class__ = Other
    model.decoder.layers[0].self_attn.temperature = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="is a Other with temperature, which"):
        convert(model, "linear", filter=Other)


@pytest.mark.parametrize("filter", [None, "encoder.*"])
def test_what_is_parametrized_is_refused_where_it_is_asked_for(filter):
    model = transformer()
    parametrize.register_parametrization(
        model.decoder.layers[1].self_attn, "in_proj_weight", nn.Identity()
    )
    if filter is None:
        with pytest.raises(ValueError, match=r"decoder\.layers\.1\.self_attn is parametrized"):
            convert(model, "linear")
    else:
        assert convert(model, "linear", filter=filter) == ENCODER


def test_a_parametrized_output_layer_is_refused_as_what_it_is():
    model = transformer()
    layer = model.decoder.layers[1].self_attn.out_proj
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(
        ValueError, match=r"decoder\.layers\.1\.self_attn\.out_proj is parametrized"
    ):
        convert(model, "linear")
    with pytest.raises(ValueError, match=r"^out_proj is parametrized"):
        convert(model.decoder.layers[1].self_attn, "linear")
    assert not any(isinstance(m, LinearAttention) for m in model.modules())


def test_what_cannot_be_reverted_says_why_and_changes_nothing():
    model = transformer()
    convert(model, "linear")
    want = run(model)
    last = model.decoder.layers[1].self_attn
    parametrize.register_parametrization(last, "in_proj_weight", nn.Identity())
    with pytest.raises(
        ValueError, match=r"decoder\.layers\.1\.self_attn is parametrized: .* revert"
    ):
        revert(model)
    assert torch.equal(run(model), want)
    parametrize.remove_parametrizations(last, "in_proj_weight")
    last.forward = last.forward
    with pytest.raises(ValueError, match=r"has a forward of its own.*: revert before wrapping"):
        revert(model)
    assert torch.equal(run(model), want)
    del last.forward
    parametrize.register_parametrization(last.out_proj, "weight", nn.Identity())
    assert len(revert(model)) == 6  # of the output layer only the weight is read
    run(model)


def test_what_is_sharded_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = transformer()
        for module in (model.encoder.layers[0], model.encoder.layers[1].self_attn):
            sharded = copy.deepcopy(model)
            name = next(n for n, m in model.named_modules() if m is module)
            fully_shard(sharded.get_submodule(name), mesh=init_device_mesh("cpu", (1,)))
            with pytest.raises(ValueError, match=r"self_attn is sharded: convert before sharding"):
                convert(sharded, "linear")
            sharded = copy.deepcopy(model)
            convert(sharded, "linear")
            fully_shard(sharded.get_submodule(name), mesh=init_device_mesh("cpu", (1,)))
            with pytest.raises(ValueError, match=r"self_attn is sharded: revert before sharding"):
                revert(sharded)
            with torch.no_grad():
                run(sharded)
    finally:
        dist.destroy_process_group()


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


# Layers that are built by hand


BY_HAND = {
    "performer": lambda: PerformerAttention(16, 2, batch_first=True, num_features=8),
    "learned": lambda: PerformerAttention(16, 2, batch_first=True, num_features=8, learned=True),
    "bigbird": lambda: BigBirdAttention(16, 2, batch_first=True, block_size=16, layer=3),
    "fixed": lambda: LinformerAttention(16, 2, batch_first=True, seq_len=400, kind="fixed"),
}


def drawn(attention):
    """What layers of one model should not share."""
    if isinstance(attention, PerformerAttention):
        return attention.projection.detach().clone()
    if isinstance(attention, LinformerAttention):
        return attention.compress_key.clone()
    return attention._layout(400).to_dense().float()


@pytest.mark.parametrize("kind", BY_HAND)
def test_copies_of_a_layer_share_what_is_random_until_they_are_numbered(kind):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.self_attn = BY_HAND[kind]()
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    attentions = [block.self_attn for block in model.layers]
    weights = {n: (x, x.clone()) for n, x in model.named_parameters()}
    before = [drawn(x) for x in attentions]
    assert all(torch.equal(x, before[0]) for x in before)
    assert number_layers(model) == [f"layers.{i}.self_attn" for i in range(3)]
    after = [drawn(x) for x in attentions]
    assert not any(torch.equal(after[i], after[j]) for i in range(3) for j in range(i))
    for name, parameter in model.named_parameters():
        same, value = weights[name]
        assert parameter is same, name  # an optimizer may know it
        assert torch.equal(parameter, value) or name.endswith(".projection"), name
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = [drawn(block.self_attn) for block in copied.layers]
        assert all(torch.equal(x, y) for x, y in zip(again, after, strict=True))
    x = torch.randn(1, 400, 16)
    assert model(x).isfinite().all()


def test_numbers_are_those_of_convert_and_redrawing_keeps_to_them():
    options = {"num_features": 8, "redraw": 2}
    converted, by_hand = transformer(), transformer()
    convert(converted, "performer", filter="*.self_attn", **options)
    wanted = [*ENCODER, DECODER, "decoder.layers.1.self_attn"]
    for name in wanted:
        ours = PerformerAttention(16, 2, batch_first=True, **options)
        by_hand.set_submodule(name, ours)
    names = number_layers(by_hand)
    assert names == wanted

    def same():
        pairs = [(converted.get_submodule(n), by_hand.get_submodule(n)) for n in names]
        return all(torch.equal(a.projection, b.projection) for a, b in pairs)

    assert same()
    for model in (converted, by_hand):
        assert redraw_projections(model, 2) == names
    assert same()
    assert len({by_hand.get_submodule(n).projection.sum().item() for n in names}) == 4


def test_numbering_a_model_without_our_attention_is_an_error():
    with pytest.raises(ValueError, match="Transformer has no fastattn attention to number"):
        number_layers(transformer())
