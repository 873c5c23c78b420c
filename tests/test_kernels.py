"""What every op's kernels owe to PyTorch, interpreted where there is no GPU."""

from functools import partial

import pytest
import torch

from fastattn import ops, testing

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def of_every_op():
    """By name, a call with the kernels of q, k and v."""
    w = ops.draw_projection(16, 8).to(DEVICE)
    for causal in (False, True):
        suffix = " causal" if causal else ""
        yield f"linear{suffix}", partial(ops.linear_attention, causal=causal)
        yield f"favor{suffix}", partial(ops.favor_attention, projection=w, causal=causal)
    layout = ops.BlockLayout.bigbird(20, block_size=16)
    yield "block sparse", partial(ops.block_sparse_attention, layout=layout)
    e = torch.randn(5, 20).to(DEVICE)
    yield "linformer", partial(ops.linformer_attention, proj_k=e)


CALLS = dict(of_every_op())


every_op = pytest.mark.parametrize("name", CALLS)


@every_op
def test_it_compiles_whole_where_nothing_needs_a_gradient(name):
    """In grad mode, but of a frozen model: the compiler has another way for such a Function."""
    torch._dynamo.reset()
    run = partial(CALLS[name], backend="triton")
    q, k, v = (torch.randn(1, 2, 20, 8, device=DEVICE) for _ in range(3))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


@every_op
def test_a_hook_may_change_how_saved_tensors_lie_in_memory(name):
    """As ``save_on_cpu(pin_memory=True)`` does."""
    run = partial(CALLS[name], backend="triton")
    inputs = [torch.randn(1, 20, 2, 8, device=DEVICE).transpose(1, 2) for _ in range(3)]
    want = testing.value_and_grads(run, inputs)
    contiguous = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(contiguous, lambda x: x):
        got = testing.value_and_grads(run, inputs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@every_op
def test_views_of_negatives_are_seen_as_what_they_are(name):
    run = partial(CALLS[name], backend="triton")
    q, k, v = (torch.fft.fft(torch.randn(1, 2, 20, 8, device=DEVICE)).conj().imag for _ in range(3))
    assert q.is_neg()
    torch.testing.assert_close(run(q, k, v), run(q.clone(), k.clone(), v.clone()))
