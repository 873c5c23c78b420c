"""Attention kernels in bfloat16 and float16 without a GPU: their tiles are not those of float32."""

from functools import partial

import pytest
import torch

from fastattn import ops, testing
from fastattn.ops import BlockLayout

interpreted = pytest.importorskip("interpreted")  # skips without triton
ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels' own tests run in all dtypes")
both = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
forms = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


@pytest.fixture(autouse=True)
def sixteen_bits(monkeypatch):
    interpreted.compute_in_sixteen_bits(monkeypatch)
    monkeypatch.setattr(ops.linear_attention_triton, "refusal", lambda *about: None)


def compare(function, reference, inputs, **options):
    testing.assert_as_accurate_as(
        partial(function, backend="triton", **options), partial(reference, **options), inputs
    )


def masks(case):
    """Of two samples, both with holes, since a tile's words are those of its own keys."""
    return testing.padding_masks(case.b, case.s)["interior"]


@both
@pytest.mark.parametrize(
    ("size", "n", "d"),
    [(16, 40, 16), (32, 70, 16), (64, 161, 16), (64, 130, 128), (128, 161, 16), (128, 161, 64),
     (128, 140, 128)],
)  # fmt: skip
def test_block_sparse(size, n, d, dtype):
    case = testing.AttentionCase("", "", 2, 1, 1, n, n, d, d)
    options = {"layout": BlockLayout.bigbird(n, block_size=size, num_random_blocks=1)}
    for more in ({}, {"key_padding_mask": masks(case)}):
        compare(
            ops.block_sparse_attention,
            ops.block_sparse_attention_reference,
            case.inputs(dtype),
            **options,
            **more,
        )


@both
@forms
@pytest.mark.parametrize("d", [16, 64, 256])
def test_linear(d, causal, dtype):
    case = testing.AttentionCase("", "", 2, 1, 1, 150, 150, d, min(d, 64))
    options = {"causal": causal, "key_padding_mask": masks(case)}
    compare(ops.linear_attention, ops.linear_attention_reference, case.inputs(dtype), **options)


@both
@forms
@pytest.mark.parametrize(("d", "m"), [(16, 16), (64, 128), (128, 32)])
def test_favor(d, m, causal, dtype):
    case = testing.AttentionCase("", "", 2, 1, 1, 90, 90, d, d)
    w = ops.draw_projection(m, d)
    factor = d**-0.25 * 1.4426950408889634  # what is rounded is the scaled projection
    w = (w * factor).to(dtype).double() / factor
    inputs = case.inputs(dtype)
    options = {"causal": causal, "key_padding_mask": masks(case), "scale": d**-0.5}
    testing.assert_as_accurate_as(
        lambda q, k, v: ops.favor_attention(q, k, v, w.float(), backend="triton", **options),
        lambda q, k, v: ops.favor_attention_reference(
            q, k, v, w.to(torch.promote_types(q.dtype, torch.float32)), **options
        ),
        inputs,
    )


@both
@pytest.mark.parametrize(("d", "slots"), [(16, 16), (64, 100), (64, 256), (128, 64)])
def test_linformer(d, slots, dtype):
    case = testing.AttentionCase("", "", 2, 2, 1, 140, 140, d, d)
    generator = torch.Generator().manual_seed(5)
    projections = [
        (torch.randn(slots, case.s, generator=generator) / case.s**0.5).to(dtype) for _ in range(2)
    ]
    compare(
        ops.linformer_attention,
        ops.linformer_attention_reference,
        [*case.inputs(dtype), *projections],
        key_padding_mask=masks(case),
    )
