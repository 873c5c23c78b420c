"""FAVOR+ against features in torch, eager and compiled, flash-linear-attention on such features,
and softmax attention itself.

How do time, memory and error grow with n at m = 256, and with m at n = 16384? And what does each
variant's error, against softmax attention, cost?
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE

from fastattn import ops

LENGTHS = [2**i for i in range(9, 18)] if DEVICE == "cuda" else [512]
FEATURES = [16, 64, 256, 512] if DEVICE == "cuda" else [16, 64]
ABLATED = [16, 32, 64, 128, 256] if DEVICE == "cuda" else [16, 64]
B, H, D, M = 4, 8, 64, 256
N, LONG = (4096, 16384) if DEVICE == "cuda" else (512, 512)
DEVIATION = 0.4  # of queries and keys, in the comparison of variants


def features(q, k, w):
    """Stable and without eps: logarithms in float32, shifted by what cancels."""
    scale = D**-0.25
    w = w * scale
    u, t = q.float() @ w.mT, k.float() @ w.mT
    t = t - scale**2 / 2 * k.float().square().sum(-1, keepdim=True)
    u = (u - u.amax(-1, keepdim=True)).exp()
    t = (t - t.amax((-2, -1), keepdim=True)).exp()
    return u.to(q.dtype), t.to(k.dtype)


def eager(q, k, v, *, w):
    """As a careful user writes it: the maximum of the keys is over all tokens."""
    q, k = features(q, k, w)
    return (q @ (k.mT @ v)) / (q @ k.sum(-2).unsqueeze(-1))


def compiled(w):
    torch._dynamo.reset()  # else, after eight lengths, what was compiled quietly runs as eager
    return torch.compile(partial(eager, w=w), dynamic=False)


def fla(w):
    """flash-linear-attention's chunk, normalised, on features from torch; layout (b, n, h, d)."""
    package = pytest.importorskip("fla.ops.linear_attn", reason="extra bench: not installed")

    def call(q, k, v):
        q, k = features(q, k, w)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return package.chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0].transpose(1, 2)

    return call


def rivals(causal):
    """By name, what makes the call from the projection."""
    found = {}
    for name, backend in (("fastattn", None), ("torch", "torch")):
        options = {"causal": causal, "backend": backend}
        if name == "torch" or DEVICE == "cuda":
            found[name] = lambda w, options=options: (
                lambda q, k, v: ops.favor_attention(q, k, v, w, **options)
            )
    found["sdpa"] = lambda w: partial(F.scaled_dot_product_attention, is_causal=causal)
    if causal:
        found["fla chunk"] = fla
    else:
        found |= {"eager": lambda w: partial(eager, w=w), "compile": compiled}
    return found


LONGEST = dict.fromkeys(("sdpa", "fla chunk", "torch", "eager", "compile"), 16384)
# up to which length the error is computed, in float64; softmax attention is another function
EXACT = {"fastattn": 16384, "torch": 16384, "sdpa": 0}
CASES = [(causal, name) for causal in (False, True) for name in rivals(causal)]
SIZES = [("n", n, M) for n in LENGTHS] + [("m", LONG, m) for m in FEATURES]
PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])


def case(op, causal, rival, sweep, n, m):
    """What names a measurement; ``sweep`` is what its table and its plot are against."""
    return {
        "op": f"{op} causal" if causal else op,
        "rival": rival,
        "sweep": sweep,
        "shape": [B, H, n, D] if DEVICE == "cuda" else [1, 2, n, D],
        "n": n,
        "m": m,
        "dtype": "bfloat16",
    }


@PASSES
@pytest.mark.parametrize(("sweep", "n", "m"), SIZES, ids=lambda x: str(x))
@pytest.mark.parametrize(("causal", "rival"), CASES)
def bench_favor(bench, causal, rival, sweep, n, m, backward):
    if n > LONGEST.get(rival, n):
        pytest.skip(f"{rival} is measured up to n = {LONGEST[rival]}")
    if rival == "sdpa" and sweep == "m":
        pytest.skip("softmax attention has no features")
    about = case("favor_attention", causal, rival, sweep, n, m)
    inputs = bench.inputs(*(about["shape"],) * 3)
    w = ops.draw_projection(m, D).to(DEVICE)
    exact = partial(ops.favor_attention, projection=w, causal=causal, backend="torch")
    bench(
        rivals(causal)[rival](w),
        inputs,
        backward=backward,
        exact=exact if n <= EXACT.get(rival, 4096) else None,
        floor_bytes=inputs[0].nbytes * (11 if backward else 4),  # q k v out; dout q k v dq dk dv
        case=about,
    )


@PASSES
@pytest.mark.parametrize("m", ABLATED)
@pytest.mark.parametrize("variant", ["positive", "hyperbolic", "oprf", "relu"])
def bench_variants(bench, variant, m, backward):
    """What a feature buys: the error is that of the estimate."""
    about = case("favor_attention by variant", False, variant, "m", N, m)
    inputs = [*(DEVIATION * x for x in bench.inputs(about["shape"], about["shape"]))]
    inputs += bench.inputs(about["shape"])
    w = ops.draw_projection(m, D).to(DEVICE)
    constant = ops.oprf_constant(2 * DEVIATION**2 * D**0.5, D) if variant == "oprf" else None
    bench(
        partial(ops.favor_attention, projection=w, variant=variant, oprf_constant=constant),
        inputs,
        backward=backward,
        exact=None if variant == "relu" or backward else F.scaled_dot_product_attention,
        floor_bytes=inputs[0].nbytes * (11 if backward else 4),
        case=about,
    )
