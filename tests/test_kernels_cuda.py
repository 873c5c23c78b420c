"""What every op's kernels owe on a real device: graphs, autocast, huge inputs, any device."""

from functools import partial

import pytest
import torch

from fastattn import ops, testing

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def linear(causal, backend="triton"):
    return partial(ops.linear_attention, causal=causal, backend=backend)


def favor(causal, backend="triton"):
    """With a projection for the width that it is called with."""

    def call(q, k, v):
        w = ops.draw_projection(32, q.shape[3]).to(q.device)
        return ops.favor_attention(q, k, v, w, causal=causal, backend=backend)

    return call


def layout_of(n, causal):
    if causal:
        return ops.BlockLayout.sliding_window(n, causal=True)
    return ops.BlockLayout.bigbird(n)


def block_sparse(causal, backend="triton"):
    """With a layout for the length that it is called with."""

    def call(q, k, v):
        layout = layout_of(q.shape[2], causal)
        return ops.block_sparse_attention(q, k, v, layout, backend=backend)

    return call


def linformer(causal, backend="triton"):
    """With a projection for the length that it is called with; there is no causal form."""

    def call(q, k, v):
        generator = torch.Generator(q.device).manual_seed(0)
        e = torch.randn(33, q.shape[2], generator=generator, device=q.device) / q.shape[2] ** 0.5
        return ops.linformer_attention(q, k, v, e, backend=backend)

    return pytest.skip("has no causal form") if causal else call


every_op = pytest.mark.parametrize(
    "op",
    [linear, favor, block_sparse, linformer],
    ids=["linear_attention", "favor", "block_sparse", "linformer"],
)
forms = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


@every_op
@forms
def test_a_new_length_compiles_nothing(op, causal):
    from fastattn import _launch

    def run(n):
        leaves = [torch.randn(1, 2, n, 24, device=DEVICE).requires_grad_() for _ in range(3)]
        torch.autograd.grad(op(causal)(*leaves).sum(), leaves)

    for n in (5000, 64):  # long lists are cut; blocks that are whole have kernels of their own
        run(n)
    known = dict(_launch._variants)
    for n in (1, 2, 15, 16, 17, 64, 1000, 1024, 5000):
        run(n)
    assert _launch._variants == known


@every_op
@forms
def test_a_cuda_graph_replays_forward_and_backward(op, causal):
    leaves = [torch.randn(2, 2, 300, 64, device=DEVICE).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 2, 300, 64, device=DEVICE)
    w = ops.draw_projection(32, 64).to(DEVICE)  # a copy to the device is no part of a graph
    run = op(causal)
    if op is favor:
        run = partial(ops.favor_attention, projection=w, causal=causal, backend="triton")
    elif op is block_sparse:  # its lists are made once
        layout = layout_of(300, causal)
        run = partial(ops.block_sparse_attention, layout=layout, backend="triton")
    elif op is linformer:
        run = partial(ops.linformer_attention, proj_k=torch.randn(33, 300, device=DEVICE) / 17)

    def step():
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for x in (*leaves, upstream):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert torch.equal(got, want)


@every_op
@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_on_the_way_in_and_gradients_on_the_way_out(op, causal, dtype):
    leaves = [torch.randn(1, 2, 70, 16, device=DEVICE).requires_grad_() for _ in range(3)]
    with torch.autocast("cuda", dtype):
        out = op(causal)(*leaves)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    cast = [x.detach().to(dtype).requires_grad_() for x in leaves]
    want = op(causal)(*cast)
    assert torch.equal(out, want)
    for got, expected in zip(
        grads, torch.autograd.grad(want.float().square().sum(), cast), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected.float())


@every_op
@forms
@pytest.mark.parametrize("size", [(33, 16, 65536), (1, 32, 2**20 + 64)], ids=["samples", "tokens"])
def test_the_last_of_more_than_two_to_the_31_elements_is_as_right_as_alone(op, causal, size):
    """A wrapped offset reads other rows: an error of order 1. Two roundings are under 2^-6."""
    (b, h, n), d = size, 64
    assert b * h * n * d > 2**31
    shape = (b, n, h, d)
    q, k, v, upstream = (
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    results = []
    alone = [x[-1:, -1:] for x in (q, k, v)]
    for xs, up in (((q, k, v), upstream), (alone, upstream[-1:, -1:])):
        xs = [x.detach().requires_grad_() for x in xs]
        out = op(causal)(*xs)
        results.append([x[-1:, -1:].clone() for x in (out, *torch.autograd.grad(out, xs, up))])
        del out
    for got, want in zip(*results, strict=True):
        assert (got.double() - want.double()).norm() < 2**-6 * want.double().norm()


@every_op
@forms
def test_more_sequences_than_a_grid_axis_holds(op, causal):
    q, k, v = (torch.randn(70_000, 1, 3, 8, device=DEVICE) for _ in range(3))
    torch.testing.assert_close(op(causal)(q, k, v), op(causal, "reference")(q, k, v))


@every_op
@forms
def test_it_runs_on_the_device_of_its_inputs(op, causal):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    leaves = [torch.randn(2, 2, 70, 16) for _ in range(3)]
    first, second = (
        testing.value_and_grads(op(causal), [x.to(i) for x in leaves]) for i in ("cuda:0", "cuda:1")
    )
    for want, got in zip(first, second, strict=True):
        assert got.device.index == 1
        assert torch.equal(want.cpu(), got.cpu())
    assert torch.cuda.current_device() == 0


def test_a_sequence_longer_than_a_grid_axis_has_blocks():
    """Of causal FAVOR+, which has programs for parts of a sequence."""
    n = 65536 * 128 + 77
    q, k = (torch.randn(1, 1, n, 16, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v = torch.ones_like(q)
    v[:, :, -5:] = 2  # five of eight million
    torch.testing.assert_close(favor(True)(q, k, v), torch.ones_like(v), rtol=0, atol=2**-7)
