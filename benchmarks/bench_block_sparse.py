"""Block-sparse attention in BigBird's pattern against FlexAttention, Hugging Face's BigBird, and
dense attention.

How do time and memory grow with n at blocks of 64 and of 128, from which n on is dense attention
slower, and what does it cost to make the pattern?
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from torch import nn

from fastattn import BigBirdAttention, ops
from fastattn.ops.block_sparse_tables import tables

LENGTHS = [2**i for i in range(10, 17)] if DEVICE == "cuda" else [1024]
SPARSELY = [1024, 4096, 16384, 65536]
B, H, D = (4, 8, 64) if DEVICE == "cuda" else (1, 2, 32)
PATTERN = {"num_window_blocks": 3, "num_random_blocks": 3, "num_global_blocks": 2}
PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])


def layout_of(n, size):
    return ops.BlockLayout.bigbird(n, block_size=size, num_heads=H, **PATTERN)


def block_mask(dense, size):
    """FlexAttention's, from the blocks that are seen ``(h, rows, columns)``; none is partial."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    count = dense.sum(-1).int().unsqueeze(0)
    blocks = dense.int().argsort(dim=-1, descending=True, stable=True).int().unsqueeze(0)
    n = dense.shape[1] * size
    return flex.BlockMask.from_kv_blocks(
        torch.zeros_like(count),
        torch.zeros_like(blocks),
        count,
        blocks,
        BLOCK_SIZE=size,
        seq_lengths=(n, n),
    )


def flex(layout, autotuned):
    """Compiled; for blocks of 64 tiles have to be searched, since its own are too large."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # else, after eight lengths, what was compiled quietly runs as eager
    mode = {"mode": "max-autotune-no-cudagraphs"} if autotuned else {}
    mask = block_mask(layout.to_dense().to(DEVICE), layout.block_size)
    attention = torch.compile(flex_attention, dynamic=False, **mode)
    return lambda q, k, v: attention(q, k, v, block_mask=mask)


def ours(layout, backend=None):
    return lambda q, k, v: ops.block_sparse_attention(q, k, v, layout, backend=backend)


RIVALS = {
    "torch": partial(ours, backend="torch"),
    "sdpa": lambda layout: F.scaled_dot_product_attention,
}
if DEVICE == "cuda":
    RIVALS |= {
        "fastattn": ours,
        "flex": partial(flex, autotuned=False),
        "flex autotuned": partial(flex, autotuned=True),
    }
LONGEST = {"torch": 16384, "hugging face": 16384}


def choose(rival, n, size=64):
    """What would take long to compile, or to run, is measured at fewer lengths."""
    if n > LONGEST.get(rival, n):
        pytest.skip(f"{rival} is measured up to n = {LONGEST[rival]}")
    everywhere = rival == "fastattn" or (rival, size) == ("sdpa", 64) or DEVICE == "cpu"
    if not everywhere and n not in SPARSELY[rival == "flex autotuned" :]:
        pytest.skip(f"{rival} is measured at fewer lengths")
    if rival == "flex" and size == 64:
        pytest.skip("FlexAttention's own tiles are larger than blocks of 64")
    if rival == "torch" and size == 128:
        pytest.skip("the torch path is measured at blocks of 64")


def case(op, rival, n):
    return {"op": op, "rival": rival, "shape": [B, H, n, D], "n": n, "dtype": "bfloat16"}


@PASSES
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("size", [64, 128], ids=["b64", "b128"])
def bench_block_sparse(bench, size, rival, n, backward):
    choose(rival, n, size)
    layout = layout_of(n, size)
    shape = (B, H, n, D)
    inputs = bench.inputs(shape, shape, shape)
    try:
        function = RIVALS[rival](layout)
        if "flex" in rival:  # may find no tiles
            leaves = [x.detach().requires_grad_(backward) for x in inputs]
            out = function(*leaves)
            if backward:
                torch.autograd.grad(out, leaves, out.detach())
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"{rival}, block {size}: {str(error)[:200]}")
    longest = {"fastattn": 16384, "sdpa": 0}.get(rival, 4096)  # whose error is computed
    exact = ours(layout, "torch") if n <= longest else None
    products = 7 if backward else 2  # a backward pass needs five
    bench(
        function,
        inputs,
        backward=backward,
        exact=exact,
        floor_bytes=inputs[0].nbytes * (11 if backward else 4),  # q k v out; dout q k v dq dk dv
        flop=None if rival == "sdpa" else products * 2 * B * int(layout.nnz) * size**2 * D,
        case=case(f"block_sparse_attention block {size}", rival, n),
    )


def hugging_face(x):
    """Its attention layer up to the LayerNorm, projections included, and the parameters."""
    hf = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    config = hf.BigBirdConfig(
        hidden_size=H * D, num_attention_heads=H, block_size=64, attention_probs_dropout_prob=0.0
    )
    layer = hf.BigBirdAttention(config, seed=0).to(x.device, x.dtype)
    there = torch.ones(x.shape[:2], device=x.device)
    blocked, *masks = hf.BigBirdModel.create_masks_for_block_sparse_attn(there, 64)
    blocked, masks = blocked.to(x.dtype), [mask.to(x.dtype) for mask in masks]
    parameters = [*layer.self.parameters(), *layer.output.dense.parameters()]
    return (
        lambda x: layer.output.dense(layer.self(x, *masks, blocked, blocked)[0]),
        parameters,
    )


def module(kind, x, **options):
    layer = kind(H * D, H, batch_first=True, device=x.device, dtype=x.dtype, **options)
    return lambda x: layer(x, x, x, need_weights=False)[0], [*layer.parameters()]


MODULES = {
    "fastattn": partial(module, BigBirdAttention),
    "nn.MultiheadAttention": partial(module, nn.MultiheadAttention),
    "hugging face": hugging_face,
}


@PASSES
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("rival", MODULES)
def bench_module(bench, rival, n, backward):
    """From input to output, with the gradients of the parameters; blocks of 64."""
    choose(rival, n)
    (x,) = bench.inputs((B, n, H * D))
    function, parameters = MODULES[rival](x)
    bench(
        function,
        [x],
        backward=backward,
        parameters=parameters,
        case=case("BigBirdAttention", rival, n) | {"shape": [B, n, H * D]},
    )


def made(n):
    """A layout's tables, by row and by column, for a batch of samples of their own lengths."""
    lengths = torch.full((B,), n, device=DEVICE)

    return lambda: tables(layout_of(n, 64), lengths.device, lengths // 64)


def from_table(n):
    """FlexAttention's mask from a table of blocks that is there already."""
    dense = layout_of(n, 64).to_dense().to(DEVICE)
    return lambda: block_mask(dense, 64)


def from_function(n):
    """FlexAttention's mask from a function of the positions, compiled."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch._dynamo.reset()
    dense = layout_of(n, 64).to_dense().to(DEVICE)
    make = torch.compile(flex.create_block_mask, dynamic=False)

    def seen(b, h, i, j):
        return dense[h, i // 64, j // 64]

    return lambda: make(seen, None, H, n, n, device=DEVICE, BLOCK_SIZE=64)


MASKS = {}
if DEVICE == "cuda":
    MASKS = {
        "fastattn": made,
        "flex from a table": from_table,
        "flex create_block_mask": from_function,
    }


@pytest.mark.parametrize("n", SPARSELY if DEVICE == "cuda" else LENGTHS)
@pytest.mark.parametrize("rival", MASKS)
def bench_pattern(bench, rival, n):
    """What the pattern itself costs, which the other times leave out."""
    bench(MASKS[rival](n), [], case=case("the pattern alone", rival, n))
