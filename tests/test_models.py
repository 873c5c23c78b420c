"""convert on models of other libraries that hold nn.MultiheadAttention, at real layer sizes."""

import copy
import io

import pytest
import torch
from torch import nn

from fastattn import MECHANISMS, PerformerAttention, convert, revert

torchvision = pytest.importorskip("torchvision")
# 197 tokens of a ViT at 224 pixels; BigBird's window spans them all, so that it is exact
OPTIONS = {
    "linear": {},
    "performer": {},
    "bigbird": {"block_size": 64, "num_window_blocks": 7, "num_random_blocks": 0},
    "linformer": {"seq_len": 197, "slots": 64, "kind": "mean"},
}


@pytest.fixture
def vit(device):
    """torchvision's ViT-B/16 of two layers."""
    model = torchvision.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=2, num_heads=12, hidden_dim=768, mlp_dim=3072
    )
    nn.init.normal_(model.heads[0].weight, std=0.02)  # zero at first
    return model.to(device).eval()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_vit_of_torchvision(vit, mechanism, device):
    images = torch.randn(2, 3, 224, 224, device=device)
    with torch.no_grad():
        want = vit(images)
        names = convert(vit, mechanism, **OPTIONS[mechanism])
        found = vit(images)
    assert names == [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(2)]
    error = (found - want).norm() / want.norm()
    assert 0 < error < (1e-4 if mechanism == "bigbird" else 1)
    vit.train()(images).square().sum().backward()
    for name in names:
        assert vit.get_submodule(name).in_proj_weight.grad.abs().sum() > 0
    revert(vit)
    with torch.no_grad():
        assert torch.equal(vit.eval()(images), want)


class TextTower(nn.Module):
    """As CLIP's: pre-norm blocks, tokens first, a float causal mask, no hint, no weights."""

    def __init__(self, width=512, heads=8, layers=2, context=77):
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.positions = nn.Parameter(0.01 * torch.randn(context, width))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(width, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        mask = torch.full((context, context), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text):
        x = (self.embedding(text) + self.positions).transpose(0, 1)  # (n, b, width)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, need_weights=False, attn_mask=self.mask.to(y.dtype))[0]
        return x.transpose(0, 1)


@pytest.mark.parametrize("mechanism", ["linear", "performer"])
def test_a_text_tower_with_a_float_causal_mask_stays_causal(mechanism, device):
    model = TextTower().to(device)
    text = torch.randint(1000, (2, 77), device=device)
    with torch.no_grad():
        want = model(text)
        assert len(convert(model, mechanism)) == 2
        found = model(text)
        changed = text.clone()
        changed[:, 40:] = 0
        after = model(changed)
    assert not torch.equal(found, want)
    torch.testing.assert_close(after[:, :40], found[:, :40], rtol=1e-4, atol=1e-5)
    if mechanism == "performer":
        assert (found - want).norm() < 0.2 * want.norm()


@pytest.mark.parametrize("mechanism", ["bigbird", "linformer"])
def test_a_text_tower_is_refused_by_what_cannot_be_causal(mechanism):
    model = TextTower()
    options = {"seq_len": 77} if mechanism == "linformer" else {}
    convert(model, mechanism, **options)
    with pytest.raises((NotImplementedError, ValueError), match="causal"):
        model(torch.zeros(1, 77, dtype=torch.long))


def test_adapters_of_peft_train_alone_and_merge(vit, device):
    """Its wrapper of nn.MultiheadAttention refuses ours, whose fast path is closed; an adapter of
    the parameter does not, and reaches queries, keys and values as well."""
    peft = pytest.importorskip("peft")
    convert(vit, "performer", num_features=16)
    x = torch.randn(2, 3, 224, 224, device=device)
    with torch.no_grad():
        want = vit(x)
    config = peft.LoraConfig(
        r=4, target_modules=["out_proj"], target_parameters=["self_attention.in_proj_weight"]
    )
    adapted = peft.get_peft_model(vit, config)
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    torch.testing.assert_close(adapted(x), want)  # an adapter starts at zero
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(x).square().mean().backward()
        optimizer.step()
    changed = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_" in n}
    assert len(changed) == 2 * 2 * 2  # two layers, two projections, A and B
    with torch.no_grad():
        tuned = adapted(x)
        assert (tuned - want).norm() > 1e-3 * want.norm()
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(x), tuned, rtol=1e-4, atol=1e-5)
    assert sum(type(m) is PerformerAttention for m in merged.modules()) == 2


def test_a_converted_model_is_saved_and_loaded_with_weights_only(vit, device):
    convert(vit, "performer", num_features=16)
    file = io.BytesIO()
    torch.save(vit.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(vit)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    images = torch.randn(1, 3, 224, 224, device=device)
    with torch.no_grad():
        assert torch.equal(other(images), vit(images))
