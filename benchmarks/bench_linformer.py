"""Linformer against what a careful user writes, einsum, softmax attention, and other modules.

How do time, memory and error grow with n at 256 slots, and with the slots at n = 16384? What is
gained by compressing tokens before they are projected?
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from torch import nn

from fastattn import LinformerAttention, ops

LENGTHS = [2**i for i in range(10, 17)] if DEVICE == "cuda" else [1024]
SLOTS = [64, 128, 256, 512] if DEVICE == "cuda" else [64]
B, H, D = (4, 8, 64) if DEVICE == "cuda" else (1, 2, 32)
N, K = (16384, 256) if DEVICE == "cuda" else (1024, 64)
PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])


def careful(q, k, v, e, f):
    """Contiguous products, so that softmax attention takes its fast path."""
    keys, values = (p @ x for p, x in ((e, k), (f, v)))
    return F.scaled_dot_product_attention(q, keys, values)


def einsum(q, k, v, e, f):
    """As most implementations have it."""
    keys = torch.einsum("kn,bhnd->bhkd", e, k)
    values = torch.einsum("kn,bhnd->bhkd", f, v)
    weights = (torch.einsum("bhnd,bhkd->bhnk", q, keys) * D**-0.5).softmax(-1)
    return torch.einsum("bhnk,bhkd->bhnd", weights, values)


def compiled(function):
    torch._dynamo.reset()  # else, after eight lengths, what was compiled quietly runs as eager
    return torch.compile(function, dynamic=False)


RIVALS = {
    "torch": lambda: partial(ops.linformer_attention, backend="torch"),
    "products": lambda: careful,
    "einsum": lambda: einsum,
    "sdpa": lambda: F.scaled_dot_product_attention,
}
if DEVICE == "cuda":
    RIVALS |= {
        "fastattn": lambda: partial(ops.linformer_attention, backend="triton"),
        "products compiled": partial(compiled, careful),
        "einsum compiled": partial(compiled, einsum),
    }
LONGEST = dict.fromkeys(("sdpa", "einsum", "einsum compiled"), 16384)
SIZES = [("n", n, K) for n in LENGTHS] + [("slots", N, slots) for slots in SLOTS if slots != K]


def choose(rival, n):
    if n > LONGEST.get(rival, n):
        pytest.skip(f"{rival} is measured up to n = {LONGEST[rival]}")


@PASSES
@pytest.mark.parametrize(("sweep", "n", "slots"), SIZES, ids=str)
@pytest.mark.parametrize("rival", RIVALS)
def bench_linformer(bench, rival, sweep, n, slots, backward):
    choose(rival, n)
    if rival == "sdpa" and sweep == "slots":
        pytest.skip("softmax attention has no slots")
    shape = (B, H, n, D)
    e, f = (x / n**0.5 for x in bench.inputs((slots, n), (slots, n)))
    inputs = [*bench.inputs(shape, shape, shape), e, f]
    size = inputs[0].nbytes
    if rival == "sdpa":
        inputs = inputs[:3]
    products = 4 + 9 if backward else 4  # a backward pass: five of the attention, four of the sums
    bench(
        RIVALS[rival](),
        inputs,
        backward=backward,
        exact=None if rival == "sdpa" or n > 16384 else ops.linformer_attention_reference,
        floor_bytes=size * (11 if backward else 4),
        flop=None if rival == "sdpa" else products * 2 * B * H * n * slots * D,
        case={
            "op": "linformer_attention",
            "rival": rival,
            "sweep": sweep,
            "shape": [B, H, n, D],
            "n": n,
            "slots": slots,
            "dtype": "bfloat16",
        },
    )


def ours(x, n, compress_first=True):
    layer = LinformerAttention(
        H * D, H, batch_first=True, seq_len=n, slots=K, device=x.device, dtype=x.dtype
    )
    layer._compress_first = compress_first
    return lambda x: layer(x, x, x)[0], [*layer.parameters()]


def stock(x, n):
    layer = nn.MultiheadAttention(H * D, H, batch_first=True, device=x.device, dtype=x.dtype)
    return lambda x: layer(x, x, x, need_weights=False)[0], [*layer.parameters()]


def lucidrains(x, n):
    package = pytest.importorskip("linformer", reason="extra bench: not installed")
    layer = package.LinformerSelfAttention(H * D, n, k=K, heads=H).to(x.device, x.dtype)
    return layer, [*layer.parameters()]


MODULES = {
    "fastattn": ours,
    "projected first": partial(ours, compress_first=False),
    "nn.MultiheadAttention": stock,
    "lucidrains": lucidrains,
}


@PASSES
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("rival", MODULES)
def bench_module(bench, rival, n, backward):
    """From input to output, with the gradients of the parameters."""
    (x,) = bench.inputs((B, n, H * D))
    function, parameters = MODULES[rival](x, n)
    bench(
        function,
        [x],
        backward=backward,
        parameters=parameters,
        case={
            "op": "LinformerAttention",
            "rival": rival,
            "shape": [B, n, H * D],
            "n": n,
            "dtype": "bfloat16",
        },
    )
