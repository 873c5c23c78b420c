"""Hugging Face models with our attentions: registered once, chosen by name."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattn.integrations.transformers import register
from fastattn.ops import draw_projection, favor_attention_reference, linear_attention_reference

NAMES = ["fastattn_linear", "fastattn_performer", "fastattn_bigbird", "fastattn_linformer"]
CAUSAL = NAMES[:2]
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# transformers renamed the argument in 5.2x
CACHE = "cache"
if CACHE not in inspect.signature(transformers.LlamaModel.forward).parameters:
    CACHE = "past_key_values"
LLAMA = {"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 128}


@pytest.fixture(autouse=True)
def registered():
    assert register(bigbird={"block_size": 16}) == NAMES
    torch.manual_seed(0)


def bert(**more):
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=256, **SMALL)
    return transformers.BertModel(config, **more).eval()


def vit():
    config = transformers.ViTConfig(image_size=32, patch_size=4, **SMALL)
    return transformers.ViTModel(config).eval()


def llama(**more):
    config = transformers.LlamaConfig(**{**SMALL, **LLAMA, **more})
    return transformers.LlamaForCausalLM(config).eval()


def gpt2(**more):
    about = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "vocab_size": 50}
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, **about, **more)
    return transformers.GPT2LMHeadModel(config).eval()


def bart(**more):
    sizes = {f"{side}_{x}": n for side in ("encoder", "decoder")
             for x, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    about = {"vocab_size": 50, "max_position_embeddings": 128, "d_model": 32, "dropout": 0.0}
    config = transformers.BartConfig(**about, **sizes, **more)
    return transformers.BartForConditionalGeneration(config).eval()


def tokens(b, n, device="cpu"):
    return torch.randint(1, 50, (b, n)).to(device)


def padded(n, side, device="cpu"):
    mask = torch.ones(2, n, dtype=torch.long, device=device)
    mask[1, slice(n - 5, None) if side == "right" else slice(5)] = 0
    return mask


def heads(*shape, device="cpu"):
    return torch.randn(*shape, 8).to(device)


def output(model, **inputs):
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def calls(monkeypatch, name):
    """Count how often a model runs our function."""
    counted = []
    ours = ALL_ATTENTION_FUNCTIONS[name]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        name,
        lambda *args, **kwargs: counted.append(1) or ours(*args, **kwargs),
    )
    return counted


# The same numbers as the model's own attention, where that is possible


@pytest.mark.parametrize(
    ("make", "side"),  # images have no padding
    [(bert, None), (bert, "left"), (bert, "right"), (vit, None)],
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bigbird", {"block_size": 16, "num_window_blocks": 7, "num_random_blocks": 0}),
        ("linformer", {"slots": 64}),
    ],
)
def test_a_dense_layout_and_a_slot_for_every_token_are_the_models_own(
    make, name, options, side, device
):
    model = make().to(device)
    register(**{name: options})
    if make is vit:
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32, device=device)}  # 65 tokens
        register(linformer={"slots": 65}, bigbird={**options, "num_window_blocks": 11}
                 if name == "bigbird" else None)  # fmt: skip
        valid = torch.ones(2, 65, dtype=torch.bool)
    else:
        inputs = {"input_ids": tokens(2, 50, device)}
        if side is not None:
            inputs["attention_mask"] = padded(50, side, device)
        valid = inputs.get("attention_mask", torch.ones(2, 50)).bool()
    with torch.no_grad():
        want = output(model, **inputs)
        model.set_attn_implementation(f"fastattn_{name}")
        got = output(model, **inputs)
    torch.testing.assert_close(got[valid], want[valid], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("make", [bert, llama, gpt2])
def test_performers_error_is_that_of_its_estimate_and_falls_with_more_features(make, device):
    model, inputs = make().to(device), {"input_ids": tokens(4, 40, device)}
    with torch.no_grad():
        want = output(model, **inputs)
        model.set_attn_implementation("fastattn_performer")
        errors = []
        for m in (16, 512):
            found = []
            for seed in range(4):
                register(performer={"num_features": m, "seed": seed})
                found.append((output(model, **inputs) - want).square().mean())
            errors.append(float(torch.stack(found).mean().sqrt() / want.std()))
    assert 0 < errors[1] < 0.03
    # of independent draws it is sqrt(16 / 512) = 0.18; orthogonal blocks of 8 do no worse
    assert errors[1] < 1.5 * math.sqrt(16 / 512) * errors[0]


# What is computed is the definition, on the mask that was given


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_masks_and_scales_arrive(name, causal, side, device):
    module = torch.nn.Module()
    module.layer_idx, module.is_causal = 3, causal
    q, k, v = (heads(2, h, 12, device=device) for h in (4, 2, 2))
    mask = padded(12, side, device).bool()
    got, weights = ALL_ATTENTION_FUNCTIONS[name](module, q, k, v, mask, scaling=0.5)
    assert weights is None
    about = {"causal": causal, "key_padding_mask": ~mask}
    if name == "fastattn_linear":
        want = linear_attention_reference(q, k, v, **about)
    else:
        directions = draw_projection(256, 8, layer=3).to(device)
        want = favor_attention_reference(q, k, v, directions, scale=0.5, **about)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_either_side_changes_nothing(name, device):
    model = bert().to(device)
    model.set_attn_implementation(name)
    ids = tokens(1, 40, device)
    alone = output(model, input_ids=ids)
    register(bigbird={"block_size": 16}, linformer={"slots": 64})
    alone = output(model, input_ids=ids)
    right = output(
        model,
        input_ids=torch.cat([ids, tokens(1, 9, device)], 1),
        attention_mask=torch.tensor([[1] * 40 + [0] * 9], device=device),
    )
    torch.testing.assert_close(right[:, :40], alone, rtol=1e-4, atol=1e-5)
    if name == "fastattn_bigbird":
        return  # its blocks lie elsewhere behind padding
    left = output(
        model,
        input_ids=torch.cat([tokens(1, 9, device), ids], 1),
        attention_mask=torch.tensor([[0] * 9 + [1] * 40], device=device),
        position_ids=torch.cat([torch.zeros(1, 9).long(), torch.arange(40)[None]], 1).to(device),
    )
    torch.testing.assert_close(left[:, 9:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_decoder_sees_no_future_and_its_cache_computes_what_one_pass_does(make, name, device):
    model = make().to(device)
    model.set_attn_implementation(name)
    ids = tokens(2, 30, device)
    with torch.no_grad():
        whole = output(model, input_ids=ids)
        changed = output(model, input_ids=torch.cat([ids[:, :20], tokens(2, 10, device)], 1))
        torch.testing.assert_close(changed[:, :20], whole[:, :20])
        cache, parts = transformers.DynamicCache(config=model.config), []
        for part in ids.split([11, 1, 7, 1, 10], 1):  # prefill, steps, chunks
            parts.append(output(model, input_ids=part, **{CACHE: cache}, use_cache=True))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_generation_with_and_without_a_cache_and_with_padding_agree(make, name, device):
    model = make(pad_token_id=0, eos_token_id=49, bos_token_id=1).to(device)
    model.set_attn_implementation(name)
    ids = tokens(2, 12, device).clamp(max=48)
    mask = padded(12, "left", device)
    about = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, attention_mask=mask, use_cache=True, **about)
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **about)
    assert torch.equal(cached, plain)
    alone = model.generate(ids[1:, 5:], attention_mask=mask[1:, 5:], **about)
    assert torch.equal(alone[0, -6:], cached[1, -6:])


@pytest.mark.parametrize("name", CAUSAL)
def test_an_encoder_and_a_decoder_generate_with_and_without_a_cache(name, monkeypatch, device):
    model = bart().to(device)
    counted = calls(monkeypatch, name)
    model.set_attn_implementation(name)
    ids, mask = tokens(2, 20, device), padded(20, "right", device)
    about = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": 1}
    about |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask}
    cached = model.generate(ids, use_cache=True, **about)
    assert len(counted) == 2 + 8 * 4  # the encoder once, a step itself and across
    plain = model.generate(ids, use_cache=False, **about)
    assert torch.equal(cached.sequences, plain.sequences)
    found, want = (torch.stack(x.logits) for x in (cached, plain))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert (found[:, 0] - found[:, 1]).abs().max() > 1e-3  # which differ by what they read
    other = ids.masked_fill(mask == 0, 7)
    assert torch.equal(torch.stack(model.generate(other, **about).logits), found)


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_decoder_is_refused_by_what_has_no_causal_form(name):
    model = bart()
    model.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match="linear and performer are for decoders"):
        model(input_ids=tokens(2, 20), decoder_input_ids=tokens(2, 20))


def test_linformer_across_with_a_slot_for_every_key_is_softmax_attention(device):
    module = torch.nn.Module()
    module.is_causal = False
    q, k, v = (heads(2, 4, n, device=device) for n in (5, 20, 20))
    mask = padded(20, "right", device).bool()
    register(linformer={"slots": 20})
    got, _ = ALL_ATTENTION_FUNCTIONS["fastattn_linformer"](module, q, k, v, mask, scaling=0.5)
    want = F.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=0.5)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-4, atol=1e-5)


# The rest of a model's life


@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_and_each_layer_calls_us(name, monkeypatch, device):
    counted = calls(monkeypatch, name)
    model = bert().train().to(device)
    model.set_attn_implementation(name)
    output(model, input_ids=tokens(2, 40, device)).square().mean().backward()
    assert len(counted) == 2
    for parameter in (p for n, p in model.named_parameters() if "pooler" not in n):
        assert parameter.grad.isfinite().all()
    query = model.encoder.layer[0].attention.self.query.weight
    assert query.grad.abs().max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_as_a_whole_graph(name, device, compiler):
    model = llama(num_hidden_layers=1).model if name in CAUSAL else bert(add_pooling_layer=False)
    model.to(device).set_attn_implementation(name)
    about = {"input_ids": tokens(2, 20, device), "attention_mask": padded(20, "right", device)}
    found = []
    for run in (torch.compile(model, fullgraph=True, backend=compiler), model):
        model.zero_grad()
        out = run(**about, use_cache=False).last_hidden_state
        out.square().mean().backward()
        found.append([out, *(parameter.grad for parameter in model.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_dropout_acts_in_training_alone(device):
    model = bert().to(device)
    model.config.attention_probs_dropout_prob = 0.5
    for layer in model.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    ids = tokens(2, 40, device)
    for name in NAMES:
        model.set_attn_implementation(name)
        assert torch.equal(model.eval()(ids)[0], model(ids)[0])
        assert not torch.equal(model.train()(ids)[0], model(ids)[0])


def test_layers_have_directions_of_their_own():
    seen = []
    for layer in (0, 1):
        module = torch.nn.Module()
        module.layer_idx, module.is_causal = layer, False
        torch.manual_seed(1)
        q = torch.randn(1, 2, 6, 8)
        seen.append(ALL_ATTENTION_FUNCTIONS["fastattn_performer"](module, q, q, q, None)[0])
    assert (seen[0] - seen[1]).abs().max() > 1e-4


def test_a_mode_of_fake_tensors_leaves_nothing_behind():
    register(performer={"seed": 11})
    module = torch.nn.Module()
    q = torch.randn(1, 2, 6, 8)
    ours = ALL_ATTENTION_FUNCTIONS["fastattn_performer"]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert isinstance(ours(module, fake, fake, fake, None)[0], FakeTensor)
    out, _ = ours(module, q, q, q, None)
    assert type(out) is torch.Tensor
    assert out.isfinite().all()


def test_a_later_call_changes_the_options():
    model = bert()
    model.set_attn_implementation("fastattn_linear")
    ids = tokens(1, 20)
    elu = output(model, input_ids=ids)
    register(linear={"feature_map": "relu"})
    assert (output(model, input_ids=ids) - elu).abs().max() > 1e-4
    register()
    assert torch.equal(output(model, input_ids=ids), elu)


# What cannot be honoured is refused


def test_a_wrong_option_raises_at_once():
    with pytest.raises(TypeError, match="performer has no option features; it takes num_features"):
        register(performer={"features": 3})
    with pytest.raises(ValueError, match="feature_map must be one of"):
        register(linear={"feature_map": "gelu"})
    with pytest.raises(ValueError, match="num_features"):
        register(performer={"num_features": 0})
    with pytest.raises(ValueError, match="block_size"):
        register(bigbird={"block_size": 17})
    with pytest.raises(ValueError, match="slots and seq_len must be positive"):
        register(linformer={"slots": 0})


@pytest.mark.parametrize("name", NAMES[2:])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_causal_models_are_refused_by_what_has_no_causal_form(make, name):
    model = make()
    model.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match="are for decoders"):
        model(tokens(1, 20))


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_another_kind_are_refused(name):
    model = bert()
    model.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match=r"that of the tokens, \(b, s\) = \(1, 20\), got"):
        model(tokens(1, 20), attention_mask=torch.ones(1, 1, 20, 20))
    ours = ALL_ATTENTION_FUNCTIONS[name]
    q = torch.randn(1, 2, 20, 8)
    for argument in ("softcap", "position_bias", "s_aux"):
        with pytest.raises(NotImplementedError, match=f"cannot honour {argument}"):
            ours(torch.nn.Module(), q, q, q, None, **{argument: 1.0})
    with pytest.raises(NotImplementedError, match="a sliding window of 8 over 20 keys"):
        ours(torch.nn.Module(), q, q, q, None, sliding_window=8)
    with pytest.raises(NotImplementedError, match="gives no weights"):
        ours(torch.nn.Module(), q, q, q, None, output_attentions=True)


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_sequences_windows_and_static_caches_are_refused(name):
    model = llama()
    model.set_attn_implementation(name)
    packed = torch.cat([torch.arange(12), torch.arange(8)])[None]
    with pytest.raises(NotImplementedError, match="packed sequences, a sliding window"):
        model(tokens(1, 20), position_ids=packed, use_cache=False)
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(NotImplementedError, match="a cache of fixed size"):
        model(tokens(1, 20), **{CACHE: cache})
    config = transformers.MistralConfig(**{**SMALL, **LLAMA, "sliding_window": 8})
    mistral = transformers.MistralForCausalLM(config).eval()
    mistral.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match="a sliding window"):
        mistral(tokens(1, 20))


def test_linformers_windows_divide_the_models_length_and_not_the_batchs():
    model = bert()
    model.set_attn_implementation("fastattn_linformer")
    register(linformer={"slots": 16})
    ids = tokens(1, 48)
    short = output(model, input_ids=ids)
    long = output(
        model,
        input_ids=torch.cat([ids, tokens(1, 32)], 1),
        attention_mask=torch.tensor([[1] * 48 + [0] * 32]),
    )
    torch.testing.assert_close(long[:, :48], short, rtol=1e-4, atol=1e-5)
    register(linformer={"slots": 16, "seq_len": 40})
    with pytest.raises(ValueError, match="divides seq_len = 40 tokens into 16 windows, got 80"):
        model(tokens(1, 80))
