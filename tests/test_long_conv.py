"""LongConv and ToeplitzMix: what they compute, what padding may hold, decoding, initial values."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from fastattn import LongConv, ToeplitzMix

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CONVS = {
    "causal": {},
    "bidirectional": {"bidirectional": True},
    "gated": {"gated": True, "squash": 0.003},
    "gated both ways": {"gated": True, "bidirectional": True},
}
convs = pytest.mark.parametrize("kind", CONVS)


def conv(kind, channels=6, taps=20, **more):
    torch.manual_seed(0)
    return LongConv(channels, taps, device=DEVICE, **CONVS[kind] | more)


def tokens(n=30, channels=6, b=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(b, n, channels, generator=generator).to(DEVICE)


@convs
@pytest.mark.parametrize("n", [1, 15, 30])
def test_it_is_the_sum_over_lags(kind, n):
    layer, x = conv(kind), tokens(n)
    shrunk = lambda k: F.softshrink(k, layer.squash) if layer.squash else k  # noqa: E731
    u, pre, post = x, 1, 1
    if layer.in_proj is not None:
        u, pre, post = layer.in_proj(x).chunk(3, -1)
    u = u * pre
    want = layer.skip * u
    for lag in range(min(n, 20)):
        want = want + F.pad(u, (0, 0, lag, 0))[:, :n] * shrunk(layer.taps)[:, lag]
        if layer.reverse is not None and lag + 1 < n:
            later = F.pad(u, (0, 0, 0, lag + 1))[:, lag + 1 :]
            want = want + later * shrunk(layer.reverse)[:, lag]
    want = want * post
    if layer.out_proj is not None:
        want = layer.out_proj(want)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)


@convs
def test_what_padding_holds_changes_nothing(kind):
    layer, x = conv(kind), tokens()
    mask = torch.zeros(2, 30, dtype=torch.bool, device=DEVICE)
    mask[0, 21:] = mask[1, :4] = True
    dirty = x.masked_fill(mask.unsqueeze(-1), torch.nan).requires_grad_()
    clean = x.masked_fill(mask.unsqueeze(-1), 0)
    out = layer(dirty, mask)
    assert torch.equal(out, layer(clean, mask))
    torch.testing.assert_close(out[0, :21], layer(x[:1, :21])[0], rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(out[~mask].square().sum(), dirty)
    assert grad.isfinite().all()
    assert (grad[mask] == 0).all()


@pytest.mark.parametrize("kind", ["causal", "gated"])
def test_token_by_token_gives_the_same(kind):
    layer, x = conv(kind, dropout=0.5).eval(), tokens()
    state, found = None, []
    with torch.no_grad():
        for token in x.split(1, 1):
            y, state = layer.step(token, state)
            found.append(y)
        torch.testing.assert_close(torch.cat(found, 1), layer(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="needs bidirectional=False"):
        conv("bidirectional").step(x[:, :1])


def test_dropout_acts_on_taps_in_training_only():
    layer, x = conv("causal", dropout=0.5), tokens()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@convs
def test_initial_values_training_and_copies(kind):
    layer, x = conv(kind), tokens()
    assert torch.equal(conv(kind).taps, layer.taps)
    assert layer.taps.abs()[:, -5:].mean() < layer.taps.abs()[:, :5].mean()
    layer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    fresh = conv(kind)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))
    assert "6, 20 taps" in repr(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_autocast(dtype):
    layer, x = conv("gated"), tokens()
    want = layer(x)
    with torch.autocast(DEVICE, dtype):
        found = layer(x)
    assert found.dtype == dtype
    assert (found.float() - want).norm() < 0.02 * want.norm()
    out = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert (out.float() - want).norm() < 0.05 * want.norm()


def test_the_toeplitz_matrix():
    torch.manual_seed(0)
    layer, x, gate = ToeplitzMix(6, 40, independent=2, device=DEVICE), tokens(), tokens(b=2) + 1
    torch.testing.assert_close(layer(x, gate), gate, rtol=0.1, atol=0.1)  # starts as the gate
    with torch.no_grad():
        layer.taps.normal_()
        layer.reverse.normal_()
        layer.bias.normal_()
    lag = torch.arange(30).unsqueeze(1) - torch.arange(30)
    later = layer.reverse[:, (-lag - 1).clamp(min=0)]
    matrix = torch.where(lag.to(DEVICE) >= 0, layer.taps[:, lag.clamp(min=0)], later)  # (2, i, j)
    mixed = torch.einsum("cij,bjc->bic", matrix.repeat_interleave(3, 0), layer.norm(x))
    want = gate * (mixed + layer.bias[:30, None])
    torch.testing.assert_close(layer(x, gate), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer(x), x / gate * want, rtol=1e-3, atol=1e-3)
    mask = torch.zeros(2, 30, dtype=torch.bool, device=DEVICE)
    mask[:, 25:] = True
    dirty = x.masked_fill(mask.unsqueeze(-1), torch.nan)
    short = layer(x[:, :25], gate[:, :25])
    torch.testing.assert_close(layer(dirty, gate, mask)[:, :25], short, rtol=1e-4, atol=1e-4)
    layer(x, gate).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert ToeplitzMix(3, 1, device=DEVICE)(tokens(1, 3)).shape == (2, 1, 3)


def test_what_does_not_fit_is_said():
    for message, make in {
        "channels must be at least 1": lambda: LongConv(0, 3),
        "taps must be at least 1": lambda: LongConv(3, 0),
        "squash must be at least 0": lambda: LongConv(3, 3, squash=-1.0),
        "backend must be one of": lambda: LongConv(3, 3, backend="cufft"),
        "must divide channels = 3": lambda: ToeplitzMix(3, 3, independent=2),
        r"x must be \(b, n, 3\)": lambda: LongConv(3, 3)(torch.zeros(2, 4)),
        "made for 3": lambda: ToeplitzMix(3, 3)(torch.zeros(2, 4, 3)),
        "key_padding_mask must be": lambda: LongConv(3, 3)(
            torch.zeros(2, 4, 3), torch.zeros(2, 5, dtype=torch.bool)
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        LongConv(3, 3)(torch.zeros(2, 4, 3), torch.zeros(2, 4))
