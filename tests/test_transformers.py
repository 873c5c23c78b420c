"""Hugging Face models with our attentions: registered once, chosen by name."""

import copy
import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import masking_utils
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattn.integrations import transformers as integration
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


def inputs_of(make, b=2, n=20, device="cpu"):
    if make is vit:
        return {"pixel_values": torch.randn(b, 3, 32, 32).to(device)}
    ids = tokens(b, n, device)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if make is bart else {})


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


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("make", [llama, gpt2, bart])
def test_beams_have_the_scores_of_one_pass_with_and_without_a_cache(make, name, device):
    more = {"forced_eos_token_id": None} if make is bart else {}
    model = make(pad_token_id=0, eos_token_id=49, bos_token_id=1, **more).to(device)
    model.set_attn_implementation(name)
    ids, mask = tokens(2, 12, device).clamp(max=48), padded(12, "left", device)
    about = {"num_beams": 4, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    about |= {"output_scores": True, "return_dict_in_generate": True, "attention_mask": mask}
    about |= {"num_return_sequences": 2}
    cached = model.generate(ids, use_cache=True, **about)
    plain = model.generate(ids, use_cache=False, **about)
    assert torch.equal(cached.sequences, plain.sequences)
    parents = cached.beam_indices
    assert (parents[:, 1:] != parents[:, :-1]).any()  # the cache was reordered
    mask = mask.repeat_interleave(2, 0)
    if make is bart:
        given = {"input_ids": ids.repeat_interleave(2, 0), "attention_mask": mask}
        given["decoder_input_ids"] = cached.sequences[:, :-1]
    else:
        mask = F.pad(mask, (0, 5), value=1)
        given = {"input_ids": cached.sequences[:, :-1], "attention_mask": mask}
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = output(model, **given)[:, -6:].log_softmax(-1)
    taken = logits.gather(2, cached.sequences[:, -6:, None]).sum((1, 2)) / 6
    torch.testing.assert_close(cached.sequences_scores, taken, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("name", "has_mask"), [*((name, True) for name in NAMES), *((name, False) for name in CAUSAL)]
)
def test_it_compiles_as_a_whole_graph(name, has_mask, device, compiler):
    torch._dynamo.reset()
    model = llama(num_hidden_layers=1).model if name in CAUSAL else bert(add_pooling_layer=False)
    model.to(device).set_attn_implementation(name)
    about = {"input_ids": tokens(2, 20, device)}
    if has_mask:
        about["attention_mask"] = padded(20, "right", device)
    found = []
    for run in (torch.compile(model, fullgraph=True, backend=compiler), model):
        model.zero_grad()
        out = run(**about, use_cache=False).last_hidden_state
        out.square().mean().backward()
        found.append([out, *(parameter.grad for parameter in model.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


EVERYWHERE = [(make, name) for make in (bert, vit) for name in NAMES]
EVERYWHERE += [(make, name) for make in (llama, gpt2) for name in CAUSAL]


@pytest.mark.parametrize(("make", "name"), EVERYWHERE)
@pytest.mark.parametrize("way", ["bfloat16", "float16", "autocast"])
def test_half_precision_costs_what_it_costs_the_models_own_attention(make, name, way, device):
    dtype = torch.float16 if way == "float16" else torch.bfloat16
    model, inputs = make().to(device), inputs_of(make, device=device)
    for key, parameter in model.named_parameters():  # so that attention has a share in it
        if ("attn" in key or "attention" in key) and parameter.dim() == 2:
            parameter.data.mul_(10)
    errors = []
    for implementation in ("sdpa", name):
        model.set_attn_implementation(implementation)
        want, gradients = trained(model, inputs)
        if way == "autocast":
            with torch.autocast(device, dtype):
                found = trained(model, inputs)
            assert found[0].dtype == (dtype if make in (llama, gpt2) else torch.float32)
        else:
            half = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}
            found = trained(copy.deepcopy(model).to(dtype), half)
            assert {x.dtype for x in (found[0], *found[1])} == {dtype}
        wanted = torch.cat([x.flatten() for x in gradients])
        got = torch.cat([x.flatten() for x in found[1]])
        pairs = ((found[0], want), (got, wanted))
        errors.append([((x - y).norm() / y.norm()).item() for x, y in pairs])
    for own, ours in zip(*errors, strict=True):
        assert 0 < ours < 2 * own


def pulled(out):
    """A loss with a gradient behind a LayerNorm, whose outputs have the same squares always."""
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    return (out.float() - target).square().mean()


def trained(model, inputs):
    """What a model gives, and the gradients of its parameters that have one."""
    model.zero_grad()
    out = output(model, **inputs)
    pulled(out).backward()
    return out.detach(), [x.grad for x in model.parameters() if x.grad is not None]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("make", "name", "reentrant"),
    [(*pair, False) for pair in EVERYWHERE] + [(make, NAMES[0], True) for make in (bert, llama)],
)
def test_checkpointing_computes_twice_and_changes_no_gradient(
    make, name, reentrant, monkeypatch, device
):
    model, inputs = make().to(device).train(), inputs_of(make, device=device)
    for module in model.modules():  # the same is dropped both times
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
        for key in ("attention_dropout", "dropout_prob"):
            if hasattr(module, key):
                setattr(module, key, 0.5)
    counted = calls(monkeypatch, name)
    model.set_attn_implementation(name)
    other = trained(model, inputs)
    torch.manual_seed(1)
    want = trained(model, inputs)
    assert not torch.equal(other[0], want[0])
    counted.clear()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(1)
    found = trained(model, inputs)
    assert len(counted) == 4
    for got, stock in zip((found[0], *found[1]), (want[0], *want[1]), strict=True):
        torch.testing.assert_close(got, stock)


@pytest.mark.parametrize(("make", "name"), EVERYWHERE)
def test_the_implementation_is_an_argument_of_what_builds_or_loads(
    make, name, monkeypatch, tmp_path
):
    model, inputs = make(), inputs_of(make)
    counted = calls(monkeypatch, name)
    model.set_attn_implementation(name)
    want = output(model, **inputs)
    model.save_pretrained(tmp_path)
    counted.clear()
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=name).eval()
    assert torch.equal(output(loaded, **inputs), want)
    assert len(counted) == 2
    auto = transformers.AutoModelForCausalLM if make in (llama, gpt2) else transformers.AutoModel
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    built = auto.from_config(config, attn_implementation=name)
    built.load_state_dict(model.state_dict())
    assert torch.equal(output(built.eval(), **inputs), want)
    assert len(counted) == 4
    stock = type(model).from_pretrained(tmp_path).eval()  # a checkpoint does not say it
    assert output(stock, **inputs).isfinite().all()
    assert len(counted) == 4


@pytest.mark.parametrize(
    ("make", "name"), [(bert, name) for name in NAMES] + [(llama, name) for name in CAUSAL]
)
def test_adapters_of_peft_train_alone_and_merge(make, name, monkeypatch, device):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["query", "value"] if make is bert else ["q_proj", "v_proj"]
    model, inputs = make().to(device), inputs_of(make, device=device)
    counted = calls(monkeypatch, name)
    model.set_attn_implementation(name)
    with torch.no_grad():
        before = output(model, **inputs)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=True)
    adapted = peft.get_peft_model(model, config)
    adapters = {k: x for k, x in adapted.named_parameters() if "lora_" in k}
    optimizer = torch.optim.SGD(adapters.values(), lr=1.0)
    for step in range(2):  # the second factor starts at zero
        out = output(adapted, **inputs)
        if step == 0:
            torch.testing.assert_close(out, before)
        optimizer.zero_grad()
        pulled(out).backward()
        optimizer.step()
    assert len(counted) == 3 * 2
    assert len(adapters) == 2 * 2 * 2
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            assert parameter.grad.abs().max() > 0, key
        else:
            assert parameter.grad is None, key
    with torch.no_grad():
        want = output(adapted.eval(), **inputs)
        assert (want - before).abs().max() > 1e-4
        merged = output(adapted.merge_and_unload(), **inputs)
    torch.testing.assert_close(merged, want, rtol=1e-4, atol=1e-5)


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


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def mask_of(*runs):
    """Runs of tokens, by turns seen and hidden."""
    return torch.cat([torch.full((n,), (i + 1) % 2) for i, n in enumerate(runs)])[None]


# positions of 20 tokens, and which are seen
PACKED = {
    "two sequences": (positions_of(12, 8), None),
    "a mask of ones": (positions_of(12, 8), mask_of(20)),
    "tokens of their own": (positions_of(*[1] * 20), None),
    "one row of two": (torch.cat([positions_of(20), positions_of(12, 8)]), None),
    "the end of one": (positions_of(12, 12)[:, 4:], mask_of(20)),
    "padding behind": (positions_of(9, 8, 3), mask_of(17, 3)),
    "padding in front": (positions_of(3, 9, 8), mask_of(0, 3, 17)),
    "padding between": (positions_of(9, 3, 8), mask_of(9, 3, 8)),
}
IN_ORDER = {
    "from zero": (positions_of(20), None),
    "from two": (positions_of(22)[:, 2:], mask_of(20)),
    "counted from the first seen": (positions_of(5, 15), mask_of(0, 5, 15)),
    "counted through padding": (positions_of(20), padded(20, "left")),
    "ones in padding": (F.pad(positions_of(15), (5, 0), value=1), mask_of(0, 5, 15)),
    "zeros behind": (F.pad(positions_of(15), (0, 5)), mask_of(15, 5)),
    "padding between": (positions_of(20), mask_of(9, 4, 7)),
    "padding between, not counted": (
        torch.cat([positions_of(9, 4), positions_of(16)[:, 9:]], 1),
        mask_of(9, 4, 7),
    ),
    "nothing seen": (positions_of(12, 8), mask_of(0, 20)),
}


def example(cases, case, device="cpu"):
    """Arguments of a model: a batch of two where the case has one row."""
    positions, mask = cases[case]
    mask = {} if mask is None else {"attention_mask": mask.expand(2, -1).to(device)}
    return {"input_ids": tokens(2, 20, device), "position_ids": positions.to(device), **mask}


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_packed_sequences_are_refused_with_default_arguments(make, case, training):
    model, about = make().train(training), example(PACKED, case)
    if training:
        about["labels"] = about["input_ids"]
    for name in CAUSAL:
        model.set_attn_implementation(name)
        with pytest.raises(NotImplementedError, match="packed sequences, whose positions start"):
            model(**about)
        with pytest.raises(NotImplementedError, match="packed sequences"):
            model(**about, use_cache=False)


@pytest.mark.parametrize("case", IN_ORDER)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_positions_of_one_sequence_a_row_pass_whatever_padding_has(make, case, device):
    model, about = make().to(device), example(IN_ORDER, case, device)
    seen = about.get("attention_mask", torch.ones(2, 20, device=device)).bool()
    model.set_attn_implementation("fastattn_linear")
    out = output(model, **about)
    other = about | {"input_ids": about["input_ids"].masked_fill(~seen, 7)}
    torch.testing.assert_close(output(model, **other)[seen], out[seen])
    model(**about, labels=about["input_ids"], use_cache=False).loss.backward()


@pytest.mark.parametrize("name", CAUSAL)
def test_boundaries_of_packed_sequences_are_refused(name):
    model, collator = llama(), transformers.DataCollatorWithFlattening
    model.set_attn_implementation(name)
    rows = [{"input_ids": list(range(1, n))} for n in (12, 8)]
    packed = collator(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    with pytest.raises(NotImplementedError, match="cannot honour cu_seq_lens_q"):
        model(**packed)
    with pytest.raises(NotImplementedError, match="cannot honour seq_idx"):
        model(packed["input_ids"], seq_idx=packed["seq_idx"])
    with pytest.raises(NotImplementedError, match="packed sequences"):
        model(**collator()(rows))


def test_layers_look_at_positions_once_and_again_when_these_change(monkeypatch):
    model = llama(num_hidden_layers=3)
    model.set_attn_implementation("fastattn_linear")
    looked, real = [], integration._rises
    monkeypatch.setattr(integration, "_rises", lambda *args: looked.append(1) or real(*args))
    ids, positions = tokens(2, 20), positions_of(20)
    for mask in (None, padded(20, "left")):
        looked.clear()
        model(ids, position_ids=positions, attention_mask=mask)
        assert len(looked) == 1
    model(ids, position_ids=positions)
    positions[:, 12:] -= 12
    for _ in range(2):  # what was refused is not remembered
        with pytest.raises(NotImplementedError, match="packed sequences"):
            model(ids, position_ids=positions)
    with torch.inference_mode():  # tensors without a version
        model(ids)
        with pytest.raises(NotImplementedError, match="packed sequences"):
            model(ids, position_ids=positions_of(12, 8))


def test_positions_of_another_kind_are_left_to_the_model():
    module = torch.nn.Module()
    module.is_causal = True
    q = torch.randn(1, 2, 20, 8)
    ours = ALL_ATTENTION_FUNCTIONS["fastattn_linear"]
    axes = torch.zeros(3, 1, 20, dtype=torch.long)  # of images: time, height, width
    for positions in (axes, positions_of(12, 9)):
        ours(module, q, q, q, None, position_ids=positions)
    with pytest.raises(NotImplementedError, match="packed sequences"):
        ours(module, q, q, q, None, position_ids=positions_of(12, 8))
    q = torch.randn(1, 2, 8, 8)  # the last of 20, on a cache
    ours(module, q, k := torch.randn(1, 2, 20, 8), k, None, position_ids=positions_of(20)[:, 12:])
    with pytest.raises(NotImplementedError, match="packed sequences"):
        ours(module, q, k, k, None, position_ids=positions_of(5, 3))
    module.is_causal = False  # every token sees every other, as in the model's own attention
    ours(module, k, k, k, None, position_ids=positions_of(12, 8))


def test_a_compiled_model_refuses_packed_sequences_by_their_values():
    torch._dynamo.reset()
    model = llama(num_hidden_layers=1)
    model.set_attn_implementation("fastattn_linear")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def run(model, cases, case):
        about = example(cases, case)
        about["position_ids"] = about["position_ids"].expand(2, -1)  # a program for all cases
        with torch.no_grad():
            return output(model, **about, use_cache=False)

    for case in ("from zero", "from two", "padding between", "padding between, not counted"):
        torch.manual_seed(0)
        want = run(model, IN_ORDER, case)
        torch.manual_seed(0)
        torch.testing.assert_close(run(compiled, IN_ORDER, case), want)
    for case in PACKED:
        with pytest.raises(RuntimeError, match="packed sequences, whose positions start"):
            run(compiled, PACKED, case)


def test_traced_masks_are_the_causal_one_or_refused():
    config = llama().config
    config._attn_implementation = "fastattn_linear"

    def mask(x, block=None, **more):
        positions = torch.arange(20)[None]
        about = {"position_ids": positions, "block_sequence_ids": block, **more}
        return create_causal_mask(config, x, None, None, **about)

    compiled = torch.compile(mask, fullgraph=True, backend="eager")
    x, blocks = torch.randn(2, 20, 32), torch.full((2, 20), -1)
    assert compiled(x) is None
    assert compiled(x, blocks) is None
    blocks[1, 4:6] = 0  # two tokens that see each other
    with pytest.raises(RuntimeError, match="position_ids must rise"):
        compiled(x, blocks)
    with pytest.raises(Exception, match="a mask that is neither causal nor bidirectional"):
        compiled(x, or_mask_function=lambda b, h, q, k: q >= k - 1)
    config.sliding_window = 8
    windows = torch.compile(
        lambda x: create_sliding_window_causal_mask(config, x, None, None, torch.arange(20)[None]),
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(Exception, match="a mask that is neither causal nor bidirectional"):
        windows(x)


def test_what_a_cuda_graph_records_is_told_by_the_values_too(monkeypatch):
    model = llama()
    model.set_attn_implementation("fastattn_linear")
    want = output(model, **example(IN_ORDER, "from zero"))
    for module, name in ((masking_utils, "is_tracing"), (integration, "_traced")):
        monkeypatch.setattr(module, name, lambda *x: True)
    torch.manual_seed(0)
    model = llama()
    model.set_attn_implementation("fastattn_linear")
    found = output(model, **example(IN_ORDER, "from zero"), use_cache=False)
    assert torch.equal(found, want)
    with pytest.raises(RuntimeError, match="packed sequences, whose positions start"):
        model(**example(PACKED, "two sequences"), use_cache=False)


@pytest.mark.gpu
def test_looking_at_positions_waits_for_no_gpu():
    module = torch.nn.Module()
    module.is_causal = True
    q = heads(2, 2, 20, device="cuda")
    ours = ALL_ATTENTION_FUNCTIONS["fastattn_linear"]
    cases = [example(IN_ORDER, case, "cuda") for case in ("from zero", "padding between")]
    calls = [(x.get("attention_mask"), x["position_ids"]) for x in cases]
    calls = [(None if mask is None else mask.bool(), at) for mask, at in calls]
    for synchronises in ("default", "error"):  # the first compiles kernels
        torch.cuda.set_sync_debug_mode(synchronises)
        try:
            for mask, at in calls:
                ours(module, q, q, q, mask, position_ids=at)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_decoder_is_captured_in_a_cuda_graph():
    model, ids = llama().cuda(), tokens(2, 20, "cuda")
    model.set_attn_implementation("fastattn_linear")
    with torch.no_grad():
        want = output(model, input_ids=ids, use_cache=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = output(model, input_ids=ids, use_cache=False)
        graph.replay()
    torch.testing.assert_close(found, want)


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_transformers import PACKED, example, llama, register
register()
model = llama().cuda()
model.set_attn_implementation("fastattn_linear")
if sys.argv[2] == "compiled":
    model = torch.compile(model, fullgraph=True)
model(**example(PACKED, sys.argv[3], "cuda"))
torch.cuda.synchronize()
print("was computed")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("case", ["two sequences", "padding between"])
def test_on_a_gpu_packed_sequences_end_the_program(case, way):
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", PROGRAM, folder, way, case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "was computed" not in done.stdout
    assert "device-side assert" in done.stderr


@pytest.mark.parametrize("make", [bert, vit, llama, gpt2, bart])
def test_weights_are_refused_by_a_whole_model(make):
    model, inputs = make(), inputs_of(make)
    model.set_attn_implementation("fastattn_linear")
    with pytest.raises(NotImplementedError, match="gives no weights: set output_attentions=False"):
        model(**inputs, output_attentions=True)
    assert len(model(**inputs, output_hidden_states=True)) > 0  # nothing is left switched on


@pytest.mark.parametrize("name", CAUSAL)
def test_windows_and_static_caches_are_refused(name):
    model = llama()
    model.set_attn_implementation(name)
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
