"""The kernels of convolutions with few taps against the float64 definition, row by row."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_fft_conv import call, compare, make, results, row_error, upstream

from fastattn import _launch, _tuning, ops
from fastattn._backend import refusals
from fastattn.ops import fft_conv_native, fft_conv_triton
from fastattn.ops.fft_conv_torch import Lags

interpreted = pytest.importorskip("interpreted")  # skips without triton
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = [torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", HALF, ids=str)
modes = pytest.mark.parametrize("mode", ["causal", "full", "lag 0", "lag 1"])
kernels = partial(ops.fft_conv, backend="triton")


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch):
    """Not as the interpreter has it, so that it need not be refused."""
    if ON_GPU:
        return
    interpreted.compute_in_sixteen_bits(monkeypatch)
    refusal = fft_conv_triton.refusal

    def accepting(*about):
        reason = refusal(*about)
        return None if reason and "interpreter" in reason else reason

    monkeypatch.setattr(fft_conv_triton, "refusal", accepting)


@pytest.mark.parametrize("mode", ["causal", "full", "lag 1"])
@pytest.mark.parametrize("n", [1, 5, 100, 1000])
def test_value_and_gradients_for_any_length_and_number_of_taps(n, mode):
    for i, taps in enumerate((1, 3, 64, 100, 128, 255, 256)):
        if "lag" in mode:
            taps = (taps + 2) // 2  # and as many less two of the future
        compare(make(1, 2, n, taps, mode, dtype=HALF[i % 2]), mode, "triton")


@pytest.mark.parametrize("mode", ["full", "lag 0"])
@pytest.mark.parametrize("gates", [[], ["post_gate"], ["pre_gate"], ["pre_gate", "post_gate"]])
def test_gates_skip_and_taps_of_several_channels(gates, mode):
    tensors = make(3, 4, 150, 32, mode, 2, gates=True, skip=True, dtype=torch.bfloat16)
    tensors = {k: x for k, x in tensors.items() if "gate" not in k or k in gates}
    compare(tensors, mode, "triton")


@modes
def test_a_skip_and_taps_of_several_channels_in_float16(mode):
    compare(make(3, 4, 150, 70, mode, 2, skip=True, dtype=torch.float16), mode, "triton")


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("names", [("u",), ("k", "skip")])
def test_the_error_does_not_depend_on_the_scale(names, scale):
    tensors = make(2, 4, 200, 100, "causal", skip=True, dtype=torch.bfloat16)
    tensors |= {x: (tensors[x] * scale).to(tensors[x].dtype) for x in names}
    compare(tensors, "causal", "triton")


@pytest.mark.parametrize(("taps", "inputs"), [(1e-6, 1e3), (1e6, 1e-4), (1e-30, 6e4), (1e8, 1e-7)])
def test_taps_out_of_the_range_of_float16_lose_nothing(taps, inputs):
    """Where the outputs are in it."""
    tensors = make(2, 4, 200, 100, "causal", skip=True)
    u, k, skip = tensors["u"].clamp(-1, 1) * inputs, tensors["k"] * taps, tensors["skip"] * taps
    u = u.half()
    want = ops.fft_conv(u.double(), k.double(), skip=skip.double(), backend="reference")
    y = kernels(u, k, skip=skip)
    floor = (want.half() - want).norm(dim=-1)
    assert ((y - want).norm(dim=-1) <= 1.05 * floor).all()


def test_taps_of_channels_differ_by_many_orders_of_magnitude():
    u = torch.randn(2, 3, 300, device=DEVICE).half()
    k = torch.randn(3, 100, device=DEVICE) * torch.tensor([[1e-6], [1.0], [1e3]], device=DEVICE)
    k *= 0.8 ** torch.arange(100, device=DEVICE)
    want = ops.fft_conv(u.double(), k.double(), backend="reference")
    assert row_error(kernels(u, k), want) <= 1.05 * row_error(want.half(), want)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e38, torch.inf, torch.nan])
def test_taps_that_no_power_of_two_brings_into_range(value):
    u = torch.ones(1, 2, 70, device=DEVICE).half()
    k = torch.tensor([[value, 0.0], [1.0, 2.0]], device=DEVICE)
    y = kernels(u, k)
    if value == value and value < 1:
        assert (y[0, 0] == 0).all()
    else:
        assert not y[0, 0].isfinite().any()
    assert (y[0, 1, 1:] == 3).all()


@dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row_and_near(value, dtype):
    tensors = make(3, 2, 500, 20, "causal", dtype=dtype)
    clean = call(tensors, "causal", "triton")
    tensors["u"][1, 1, 300] = value
    y = call(tensors, "causal", "triton")
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert torch.equal(y[1, 0], clean[1, 0])
    assert not y[1, 1, 300:320].isfinite().any()
    near = slice(300 - 64, 320 + 128)
    damaged = y[1, 1] != clean[1, 1]
    damaged[near] = False
    assert not damaged.any()


@dtypes
def test_a_row_is_by_itself_and_two_runs_are_bitwise_equal(dtype, monkeypatch):
    gates = dtype == torch.bfloat16
    tensors = make(5, 3, 130, 60, "causal", gates=gates, skip=True, dtype=dtype)
    y = call(tensors, "causal", "triton")
    alone = {k: x[2:3] if x.dim() == 3 else x for k, x in tensors.items()}
    assert torch.equal(call(alone, "causal", "triton"), y[2:3])
    first, second = (results(tensors, "causal", "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.setattr(_tuning, "fft_conv_splits", lambda *about: 3)
    for name, x in results(tensors, "causal", "triton").items():
        if name in ("k", "skip"):
            torch.testing.assert_close(x, first[name], rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(x, first[name])


@pytest.mark.parametrize("tiles", [(16, 32, 64, 2), (128, 128, 32, 1)])
def test_other_tiles_give_the_same(tiles, monkeypatch):
    tuned = _tuning.fft_conv
    tried = dict(zip(("BLOCK_M", "BLOCK_S", "BLOCK_J", "TOGETHER"), tiles, strict=True))
    monkeypatch.setattr(_tuning, "fft_conv", lambda *about: tuned(*about) | tried)
    monkeypatch.setattr(_launch, "_variants", {})  # compiled with the tiles of other tests
    tensors = make(2, 2, 300, 100, "lag 1", skip=True, dtype=torch.bfloat16)
    compare(tensors, "lag 1", "triton")


@pytest.mark.parametrize("mode", ["full", "lag 1"])
def test_inputs_of_any_layout_give_the_same(mode):
    tensors = make(2, 3, 48, 17, mode, gates=True, skip=True, dtype=torch.bfloat16)
    want = results(tensors, mode, "triton")
    for lay in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 3 else x,
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.stack([x, x], 1)[:, 0],
        lambda x: torch.cat([x, x], 0)[x.shape[0] :],
        lambda x: x.flip(-1).flip(-1),
    ):
        found = results({k: lay(x) for k, x in tensors.items()}, mode, "triton")
        assert all(torch.equal(found[name], want[name]) for name in want)
    one = make(1, 1, 48, 17, mode, dtype=torch.float16)
    expanded = one | {"u": one["u"].expand(3, 4, 48)}
    assert torch.equal(call(expanded, mode, "triton")[1, 2], call(one, mode, "triton")[0, 0])
    z = torch._neg_view(one["u"])
    assert torch.equal(kernels(z, one["k"]), kernels(z.clone(), one["k"]))


def test_gradients_that_nobody_needs_are_not_made():
    tensors = make(2, 3, 30, 20, "lag 1", gates=True, skip=True, dtype=torch.bfloat16)
    want = results(tensors, "lag 1", "triton")
    for name in tensors:
        leaves = {k: x.detach().requires_grad_(k == name) for k, x in tensors.items()}
        y = call(leaves, "lag 1", "triton")
        (got,) = torch.autograd.grad(y, leaves[name], upstream(y, y.dtype))
        torch.testing.assert_close(got, want[name])


def test_a_second_derivative_takes_the_torch_path():
    tensors = make(2, 2, 20, 15, "causal", gates=True, skip=True, dtype=torch.bfloat16)
    found = []
    for way in ("triton", "torch"):
        leaves = {k: x.clone().requires_grad_() for k, x in tensors.items()}
        y = call(leaves, "causal", way)
        grads = torch.autograd.grad(y.sum(), list(leaves.values()), create_graph=True)
        total = sum(x.float().square().sum() for x in grads)
        found.append(torch.autograd.grad(total, list(leaves.values())))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


def test_pieces_of_a_sequence_give_the_whole():
    tensors = make(2, 3, 150, 40, "causal", skip=True, dtype=torch.float16)
    u, k, skip = tensors["u"], tensors["k"], tensors["skip"]
    want = kernels(u, k, skip=skip)
    y, _ = ops.fft_conv_prefill(u, k, skip=skip, backend="triton")
    assert torch.equal(y, want)


def test_the_registered_operators_pass_opcheck():
    tensors = make(2, 4, 30, 20, "causal", 2, gates=True, skip=True, dtype=torch.bfloat16)
    u, k, skip, pre, post = (tensors[x] for x in ("u", "k", "skip", "pre_gate", "post_gate"))
    tests, found = ("test_schema", "test_faketensor"), torch.ops.fastattn
    lie = u.transpose(1, 2).contiguous().transpose(1, 2)
    for x, *rest in ((u, skip, pre, post), (lie, None, None, None)):
        torch.library.opcheck(
            found.fft_conv_few_taps.default, (x, k, *rest, 0, 30), test_utils=tests
        )
        given = [True, True, *(y is not None for y in rest)]
        for wanted in (given, [False] * 5):
            back = (torch.randn_like(x), x, k, *rest, 0, wanted)
            torch.library.opcheck(found.fft_conv_few_taps_backward.default, back, test_utils=tests)


def test_it_compiles_whole_and_once_for_lengths_that_change():
    torch._dynamo.reset()
    mode = "lag 1"
    run = partial(call, mode=mode, backend="triton")
    compiles = []

    def count(graph, inputs):
        compiles.append(len(inputs))
        return graph.forward

    counted = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (33, 50, 70, 111):
        leaves = {
            k: x.requires_grad_() for k, x in make(2, 3, n, 20, mode, dtype=torch.float16).items()
        }
        want, found = run(leaves), compiled(leaves)
        counted(leaves)
        assert torch.equal(found, want)
        inputs = list(leaves.values())
        for a, b in zip(
            *(torch.autograd.grad(y.sum(), inputs) for y in (found, want)), strict=True
        ):
            assert torch.equal(a, b)
    assert len(compiles) <= 3


def test_vmap_and_func_grad_work():
    tensors = make(2, 3, 20, 5, "causal", dtype=torch.float16)
    u, k = tensors["u"], tensors["k"]
    many = torch.stack([k, 2 * k])
    found = torch.vmap(lambda k: kernels(u, k))(many)
    assert torch.equal(found, torch.stack([kernels(u, x) for x in many]))
    loss = lambda k: kernels(u, k).float().square().sum()  # noqa: E731
    (want,) = torch.autograd.grad(loss(k.requires_grad_()), k)
    torch.testing.assert_close(torch.func.grad(loss)(k.detach()), want)


@pytest.mark.parametrize(("b", "c", "n"), [(0, 2, 4), (2, 2, 0)])
def test_empty_inputs_are_no_error(b, c, n):
    leaves = make(b, c, n, 3, "causal", skip=True, dtype=torch.float16)
    leaves = {k: x.requires_grad_() for k, x in leaves.items()}
    y = call(leaves, "causal", "triton")
    assert y.shape == (b, c, n)
    for x in torch.autograd.grad(y.sum(), list(leaves.values())):
        assert (x == 0).all()


WRONG = {
    "it has no torch.float32": {"u": torch.zeros(2, 3, 300)},
    "it has at most 256 taps, not 257": {"k": torch.zeros(3, 257)},
    "it has no mode='circular'": {"mode": "circular"},
    "it has no exact_causal": {"exact_causal": True},
    "it has no gates in float16": {"post_gate": torch.ones(2, 3, 300).half()},
    "it has at most 64 taps with gates, not 65": {
        "u": torch.ones(2, 3, 300).bfloat16(),
        "k": torch.ones(3, 65),
        "pre_gate": torch.ones(2, 3, 300).bfloat16(),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_it_cannot_is_said_and_goes_another_way(message):
    arguments = {"u": torch.ones(2, 3, 300).half(), "k": torch.ones(3, 4)} | WRONG[message]
    arguments = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in arguments.items()
    }
    with pytest.raises(ValueError, match=f"cannot run on backend 'triton': {message}"):
        kernels(**arguments)
    assert ops.fft_conv(**arguments).isfinite().all()


def test_where_shared_memory_is_small_taps_are_fewer(monkeypatch):
    monkeypatch.setattr(_tuning, "fft_conv_most_taps", lambda device: 128)
    u, k = torch.ones(1, 1, 300, device=DEVICE).half(), torch.ones(1, 129, device=DEVICE)
    with pytest.raises(ValueError, match="it has at most 128 taps, not 129"):
        kernels(u, k)
    assert kernels(u, k[:, :128]).max() == 128


def test_on_a_cpu_it_needs_the_interpreter(monkeypatch):
    monkeypatch.undo()
    u, k = torch.zeros(1, 2, 8).half(), torch.zeros(2, 3)
    if not ON_GPU:
        with pytest.raises(ValueError, match=r"interpreter computes torch\.bfloat16"):
            kernels(u.bfloat16(), k)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="the inputs are on the CPU, it needs CUDA"):
        kernels(u, k)


def test_it_is_chosen_on_a_gpu_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(fft_conv_native, "refusal", lambda *about: None)
    monkeypatch.setattr(_tuning, "fft_conv_most_taps", lambda device: 256)
    door = ops.fft_conv.__globals__
    monkeypatch.setitem(
        door, "select", lambda op, backend, **ways: [k for k, x in ways.items() if x is None]
    )

    def first(dtype, taps, gated=False, exact_causal=False):
        u = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(2, 4, 1000))
        return door["_select"](u, Lags(0, 1000, 1000), taps, gated, exact_causal, None)[0]

    assert first(torch.bfloat16, 256) == first(torch.float16, 256) == "triton"
    assert first(torch.bfloat16, 64, gated=True) == "triton"
    assert first(torch.bfloat16, 257) == first(torch.bfloat16, 65, gated=True) == "native"
    assert first(torch.float16, 64, gated=True) == first(torch.float32, 4) == "native"
    assert first(torch.bfloat16, 4, exact_causal=True) == "torch"


def test_on_a_cpu_it_is_never_the_first():
    u, k = torch.zeros(2, 4, 100).half(), torch.zeros(4, 3)
    assert next(iter(refusals(lambda: ops.fft_conv(u, k)))) in ("native", "torch")


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("mode", ["causal", "lag 1"])
def test_long_rows_and_many_samples(mode):
    """Their sums are of many more products: against the torch path in float64."""
    for b, n in ((1, 1 << 20), (64, 16384)):
        tensors = make(b, 2, n, 128, mode, skip=True, dtype=torch.bfloat16)
        exact = results({k: x.double() for k, x in tensors.items()}, mode, "torch", torch.bfloat16)
        for name, got in results(tensors, mode, "triton").items():
            want = exact[name]
            floor = 0.0 if got.dtype == torch.float32 else row_error(want.to(got.dtype), want)
            assert row_error(got, want) <= 1.05 * floor + 1e-6 * b**0.5, (b, n, name)


@gpu
def test_a_cuda_graph_captures_it():
    tensors = make(2, 4, 1000, 30, "lag 1", gates=True, skip=True, dtype=torch.bfloat16)
    leaves = {k: x.requires_grad_() for k, x in tensors.items()}
    dy = torch.randn_like(tensors["u"])

    def run():
        y = call(leaves, "lag 1", "triton")
        return y, *torch.autograd.grad(y, list(leaves.values()), dy)

    want = [x.detach() for x in run()]  # without a graph that would tie the leaves to this stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@gpu
def test_more_than_two_to_the_31_elements():
    u = torch.randn(3, 65536, 11000, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(1, 100, device=DEVICE)
    y = kernels(u, k)
    assert torch.equal(y[-1:, -2:], kernels(u[-1:, -2:], k))
