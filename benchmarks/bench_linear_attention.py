"""Linear attention against what a user would write or pick instead, and softmax attention.

How do time, memory and error grow with n, and from which n on is softmax attention slower?
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE

from fastattn import ops

LENGTHS = [2**i for i in range(9, 18)] if DEVICE == "cuda" else [512, 2048]
B, H, D = 4, 8, 64


def eager(q, k, v):
    """The formula as a careful user writes it: features in the input's dtype, products first."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(-2).unsqueeze(-1))


def compiled():
    torch._dynamo.reset()  # else, after eight lengths, what was compiled quietly runs as eager
    return torch.compile(eager, dynamic=False)


def fla(kind):
    """flash-linear-attention, normalised, its feature map included; layout (b, n, h, d)."""
    package = pytest.importorskip("fla.ops.linear_attn", reason="extra bench: not installed")
    function = getattr(package, f"{kind}_linear_attn")

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (F.elu(q) + 1, F.elu(k) + 1, v))
        return function(q, k, v, scale=1.0, normalize=True)[0].transpose(1, 2)

    return call


def sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def rivals(causal):
    ours = partial(ops.linear_attention, causal=causal)
    found = {"torch": lambda: partial(ours, backend="torch")}
    if DEVICE == "cuda":
        found["fastattn"] = lambda: partial(ours, backend="triton")
    found["sdpa"] = lambda: partial(sdpa, causal=causal)
    if causal:
        found |= {
            "fla chunk": partial(fla, "chunk"),
            "fla fused_chunk": partial(fla, "fused_chunk"),
        }
    else:
        found |= {"eager": lambda: eager, "compile": compiled}
    return found


CASES = [(causal, name) for causal in (False, True) for name in rivals(causal)]
# Quadratic, or too slow at the largest sizes to be worth the time.
LONGEST = {"sdpa": 16384, "fla chunk": 16384, "fla fused_chunk": 16384, "torch": 32768}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("n", LENGTHS, ids=lambda n: f"n{n}")
@pytest.mark.parametrize(("causal", "rival"), CASES)
def bench_linear_attention(bench, causal, rival, n, backward):
    if n > LONGEST.get(rival, n):
        pytest.skip(f"{rival} is measured up to n = {LONGEST[rival]}")
    shape = (B, H, n, D) if DEVICE == "cuda" else (1, 2, n, D)
    inputs = bench.inputs(shape, shape, shape)
    size = inputs[0].nbytes
    exact = partial(ops.linear_attention, causal=causal, backend="torch")
    bench(
        rivals(causal)[rival](),
        inputs,
        backward=backward,
        exact=None if rival == "sdpa" or n > 16384 else exact,
        floor_bytes=size * (11 if backward else 4),  # q k v out; dout q k v dq dk dv
        case={
            "op": "linear_attention causal" if causal else "linear_attention",
            "rival": rival,
            "shape": list(shape),
            "n": n,
            "dtype": "bfloat16",
        },
    )
