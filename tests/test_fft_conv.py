"""FFT convolution: every path against the definition in float64, row by row."""

import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn import _native, ops
from fastattn.ops import fft_conv_native, fft_conv_torch
from fastattn.ops.fft_conv_torch import Lags

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NATIVE = _native.refusal(DEVICE)
PATHS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(NATIVE is not None, reason=str(NATIVE))),
]
paths = pytest.mark.parametrize("backend", PATHS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
MODES = {
    "causal": {},
    "circular": {"mode": "circular"},
    "full": {"mode": "full"},
    "lag 0": {"mode": "bidirectional", "reverse_lag": 0},
    "lag 1": {"mode": "bidirectional", "reverse_lag": 1},
}
modes = pytest.mark.parametrize("mode", MODES)
ROWS = ("u", "pre_gate", "post_gate")


def make(b, c, n, taps, mode, groups=None, gates=False, skip=False, dtype=torch.float32, seed=0):
    """u, k and keyword tensors: normal, on the device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    out = n + taps - 1 if mode == "full" else n
    tensors = {"u": normal(b, c, n, dtype=dtype), "k": normal(groups or c, taps)}
    if "lag" in mode:
        tensors["reverse"] = normal(groups or c, max(1, taps - 2))
    if skip:
        tensors["skip"] = normal(c)
    if gates:
        tensors |= {
            "pre_gate": normal(b, c, n, dtype=dtype),
            "post_gate": normal(b, c, out, dtype=dtype),
        }
    return tensors


def call(tensors, mode, backend=None, **more):
    return ops.fft_conv(**tensors, **MODES[mode], backend=backend, **more)


def upstream(y, dtype):
    """A fixed gradient of y, rounded to a dtype."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(y.shape, generator=generator).to(y.device, dtype).to(y.dtype)


def even(x):
    """Rows of their means."""
    return x.mean(-1, keepdim=True).expand_as(x)


def results(tensors, mode, backend, dtype=None, change=lambda dy: dy):
    """Output and gradients by name, of one fixed upstream gradient, rounded to a dtype."""
    leaves = {k: x.detach().requires_grad_() for k, x in tensors.items()}
    y = call(leaves, mode, backend)
    dy = change(upstream(y, dtype or y.dtype))
    return {"y": y.detach()} | dict(
        zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True)
    )


def exact_results(tensors, mode):
    """In float64, and for every row how large it is, or would be on the average of all signs.

    Gated: or of all orders, since a transform errs by a part of the whole row that a gate
    multiplies. Of taps' gradients: or as large as the part of a correlation at all lags that it is.
    """
    wide, dtype = {k: x.double() for k, x in tensors.items()}, tensors["u"].dtype
    exact = results(wide, mode, "reference", dtype)
    squares = {k: x.square() for k, x in wide.items()}
    sizes = {}
    for name, square in results(squares, mode, "reference", dtype, torch.square).items():
        sizes[name] = torch.maximum(square.sum(-1).sqrt(), exact[name].norm(dim=-1))
    if "pre_gate" in tensors:
        evened = {k: even(x) if k in ROWS else x for k, x in squares.items()}
        changed = results(evened, mode, "reference", dtype, lambda dy: even(dy.square()))
        for name, square in changed.items():
            if name in ("y", *ROWS):
                sizes[name] = torch.maximum(sizes[name], square.sum(-1).sqrt())
    x = squares["u"] * squares.get("pre_gate", 1)
    g = upstream(exact["y"], dtype).square() * squares.get("post_gate", 1)
    all_lags = (x.sum(-1) * g.sum(-1)).sum(0).view(len(tensors["k"]), -1).sum(1)  # (groups,)
    for name in sizes.keys() & {"k", "reverse"}:
        part = (all_lags * tensors[name].shape[1] / (2 * x.shape[2])).sqrt()
        sizes[name] = torch.where(sizes[name] > 0, torch.maximum(sizes[name], part), 0)
    return exact, sizes


def row_error(got, want, size=None):
    """The largest error of a row, relative to its size."""
    assert got.isfinite().all()
    size = want.double().norm(dim=-1) if size is None else size
    error = (got.double() - want).norm(dim=-1)
    assert (error[size == 0] == 0).all()
    return (error / size.where(size > 0, 1)).max().item()


def compare(tensors, mode, backend, slack=1):
    """float32: 5e-7, taps' gradient 1e-6·√b; 16 bits: 1.05 times the rounding of what is exact.

    With slack, where rows may be of so few elements that their errors do not average.
    """
    exact, sizes = exact_results(tensors, mode)
    found = results(tensors, mode, backend)
    b = tensors["u"].shape[0]
    assert sizes["y"].min() > 0
    for name, got in found.items():
        want, size = exact[name], sizes[name]
        assert got.dtype == tensors["u" if name == "y" else name].dtype
        assert got.shape == want.shape
        floor = row_error(want.to(got.dtype), want, size) if got.dtype != torch.float32 else 0.0
        allowed = 1.05 * floor + (1e-6 * b**0.5 if name in ("k", "reverse", "skip") else 5e-7)
        error = row_error(got, want, size)
        assert error <= slack * allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"


LENGTHS = [1, 2, 3, 31, 128, 750, 1000, 2047]


@paths
@modes
@pytest.mark.parametrize("n", LENGTHS)
def test_value_and_gradients_for_any_length_and_number_of_taps(n, mode, backend):
    for taps in sorted({1, 2, 64, max(1, n - 1), n, n + 1, 2 * n, 3 * n + 5}):
        if n * taps < 3e6:
            compare(make(1, 2, n, taps, mode), mode, backend)


needs_windows = pytest.mark.skipif(NATIVE is not None, reason=str(NATIVE))


@needs_windows
@dtypes
@pytest.mark.parametrize("mode", ["causal", "full", "lag 0", "lag 1"])
@pytest.mark.parametrize(
    ("n", "taps"), [(600, 3), (1000, 64), (4100, 130), (900, 1), (5000, 700), (9000, 33)]
)
def test_rows_much_longer_than_their_taps_are_cut_into_windows(n, taps, mode, dtype):
    tensors = make(2, 3, n, taps, mode, gates=True, skip=True, dtype=dtype)
    ahead = taps - 2 if "lag" in mode else 0
    lags = Lags(-ahead, n, n + taps - 1 if mode == "full" else n)
    window = fft_conv_native._window(lags, taps + ahead, DEVICE)
    assert window > 0 or (ON_GPU and n < 2049)
    if n * taps < 1e6 or dtype == torch.float32:
        compare(tensors, mode, "native")


@needs_windows
@pytest.mark.parametrize(("b", "c", "groups"), [(1, 1, 1), (1, 40, 4), (17, 2, 1), (5, 9, 9)])
def test_windows_are_shared_by_threads_and_rows_of_any_number(b, c, groups):
    tensors = make(b, c, 5000 if ON_GPU else 700, 9, "causal", groups, gates=True, skip=True)
    compare(tensors, "causal", "native")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        compare(tensors, "causal", "native")
    finally:
        torch.set_num_threads(threads)


@needs_windows
def test_a_window_without_gates_of_strides_and_for_some_gradients_only():
    wide = torch.randn(3, 4500, 8, device=DEVICE)
    k = torch.randn(4, 5, device=DEVICE)
    u = wide.transpose(1, 2)[:, 1:5]
    want = ops.fft_conv(u.double(), k.double(), backend="reference")
    assert row_error(ops.fft_conv(u, k, backend="native"), want) < 5e-7
    for name in "uk":
        leaves = {"u": u.contiguous(), "k": k.clone()}
        x = leaves[name].requires_grad_()
        y = ops.fft_conv(**leaves, backend="native")
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
        z = ops.fft_conv(**{k: t.double() for k, t in leaves.items()}, backend="reference")
        exact = torch.autograd.grad(z, x, torch.ones_like(z))[0]
        assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize(("device", "longest"), [("cpu", 32768), ("cuda", 16384)])
def test_rows_that_are_said_to_be_cut_have_a_window(device, longest):
    cut = 0
    for n in (longest + 1, 2 * longest - 1, 2 * longest, 2 * longest + 1, 10**6, 1 << 22):
        for taps in (1, 2, 63, 64, 65, 500, 511, 1023, 1025, 2048, 4095, 4096, 31250, 40000):
            for first in (0, 1 - taps, -(taps // 2)):
                lags = Lags(first, n, n)
                if fft_conv_native._is_cut(lags, taps, device):
                    assert fft_conv_native._window(lags, taps, device) > 0
                    cut += 1
    assert cut > 100


@needs_windows
def test_one_graph_serves_all_lengths_of_rows_in_windows():
    torch._dynamo.reset()
    k = torch.randn(4, 8, device=DEVICE)
    convolve = torch.compile(
        lambda u: ops.fft_conv(u, k), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (40000, 41000, 70001):
            u = torch.randn(2, 4, n, device=DEVICE)
            torch.testing.assert_close(convolve(u), ops.fft_conv(u, k))


@needs_windows
def test_a_nan_stays_in_its_row_and_its_windows():
    u, k = torch.randn(2, 3, 9000, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    clean = ops.fft_conv(u, k, backend="native")
    u[1, 2, 6500] = torch.nan
    y = ops.fft_conv(u, k, backend="native")
    same = torch.isclose(y, clean, rtol=0, atol=0)
    assert same[0].all()
    assert same[1, :2].all()
    assert same[1, 2, :1000].all()
    assert y[1, 2, 6500:6508].isnan().all()


@paths
@dtypes
@modes
def test_every_dtype_gated_with_a_skip(dtype, mode, backend):
    compare(make(3, 4, 200, 150, mode, gates=True, skip=True, dtype=dtype), mode, backend)


@paths
@pytest.mark.parametrize(
    ("b", "c", "groups"), [(1, 111, 111), (8, 1, 1), (3, 6, 2), (2, 5, 1), (20, 3, 3)]
)
def test_any_number_of_samples_channels_and_groups(b, c, groups, backend):
    compare(make(b, c, 50, 50, "causal", groups, gates=True, skip=True), "causal", backend)


@paths
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_does_not_depend_on_the_scale(dtype, scale, backend):
    tensors = make(2, 2, 300, 300, "causal", dtype=dtype)
    tensors["u"] = (tensors["u"] * scale).to(dtype)
    compare(tensors, "causal", backend)


@paths
@pytest.mark.parametrize("n", [4002, 8760, 14113, 16384, 16385, 65537, 1 << 20])
def test_long_rows(n, backend):
    """Against the torch path in float64, which shorter rows compare with the definition."""
    if backend == "native" and n > fft_conv_native.LONGEST:
        pytest.skip("longer than it transforms")
    tensors = make(1, 1, n, n, "causal")
    exact = results({k: x.double() for k, x in tensors.items()}, "causal", "torch")
    allowed = 5e-7 if backend == "native" or DEVICE == "cpu" else 1e-6  # cuFFT at 2^20: 6.4e-7
    for name, got in results(tensors, "causal", backend).items():
        assert row_error(got, exact[name]) <= (1e-6 if name == "k" else allowed), name


@pytest.mark.parametrize("damage", ["zeros", "neighbour", "shift"])
def test_what_compares_finds_what_is_wrong(damage, monkeypatch):
    ways = {
        "zeros": torch.zeros_like,
        "neighbour": lambda y: y.roll(1, 1),
        "shift": lambda y: y.roll(1, 2),
    }
    right = fft_conv_torch.convolve
    monkeypatch.setattr(fft_conv_torch, "convolve", lambda *x: ways[damage](right(*x)))
    with pytest.raises(AssertionError):
        compare(make(2, 3, 40, 40, "causal"), "causal", "torch")


@paths
def test_an_impulse_gives_the_taps_and_zeros_give_zeros(backend):
    tensors = make(2, 3, 100, 60, "causal")
    tensors["u"] = torch.zeros_like(tensors["u"])
    tensors["u"][0, :, 7] = 1
    y = call(tensors, "causal", backend)
    torch.testing.assert_close(y[0, :, 7:67], tensors["k"], rtol=0, atol=2e-6)
    assert (y[1] == 0).all()


@paths
def test_a_row_is_by_itself_and_two_runs_are_bitwise_equal(backend):
    tensors = make(5, 3, 100, 100, "causal", gates=True, skip=True)
    y = call(tensors, "causal", backend)
    assert torch.equal(call(tensors, "causal", backend), y)
    alone = {k: x[2:3] if k in ("u", "pre_gate", "post_gate") else x for k, x in tensors.items()}
    if backend == "native":
        assert torch.equal(call(alone, "causal", backend), y[2:3])
    tensors["u"][1, 1, 40] = torch.nan
    tensors["u"][3, 0] *= 1e30
    damaged = call(tensors, "causal", backend)
    for i, j in itertools.product(range(5), range(3)):
        if (i, j) not in ((1, 1), (3, 0)):
            assert torch.equal(damaged[i, j], y[i, j]), (i, j)
    first, second = (results(make(5, 3, 100, 100, "causal"), "causal", backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@paths
@modes
def test_inputs_of_any_layout_give_the_same(mode, backend):
    tensors = make(2, 3, 40, 30, mode, gates=True, skip=True)
    want = results(tensors, mode, backend)
    for lay in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 3 else x,
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x, x], 0)[x.shape[0] :],
        lambda x: x.flip(-1).flip(-1),
    ):
        found = results({k: lay(x) for k, x in tensors.items()}, mode, backend)
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-6, atol=1e-5)
    one = make(1, 1, 40, 30, mode)
    expanded = one | {"u": one["u"].expand(3, 4, 40), "k": one["k"]}
    torch.testing.assert_close(call(expanded, mode, backend)[1, 2], call(one, mode, backend)[0, 0])


@paths
def test_channels_side_by_side_stay_so(backend):
    u = torch.randn(2, 40, 6, device=DEVICE).transpose(1, 2)
    y = ops.fft_conv(u, torch.randn(6, 40, device=DEVICE), backend=backend)
    if backend == "native":
        assert y.stride() == u.stride()
    dy = torch.randn(2, 40, 6, device=DEVICE).transpose(1, 2)
    tensors = {"u": u, "k": torch.randn(6, 40, device=DEVICE)}
    leaves = [x.requires_grad_() for x in tensors.values()]
    grads = torch.autograd.grad(ops.fft_conv(*leaves, backend=backend), leaves, dy)
    want = torch.autograd.grad(ops.fft_conv(*leaves, backend="reference"), leaves, dy)
    for a, b in zip(grads, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@modes
def test_gradcheck_and_gradgradcheck(mode):
    tensors = {k: x.double() for k, x in make(2, 2, 5, 4, mode, gates=True, skip=True).items()}
    names = list(tensors)
    inputs = [x.requires_grad_() for x in tensors.values()]
    function = lambda *x: call(dict(zip(names, x, strict=True)), mode, "torch")  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@paths
def test_a_second_derivative_on_every_path(backend):
    tensors = make(2, 2, 20, 15, "causal", gates=True, skip=True)
    found = []
    for way, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        leaves = {k: x.to(dtype).requires_grad_() for k, x in tensors.items()}
        y = call(leaves, "causal", way)
        grads = torch.autograd.grad(y.square().sum(), list(leaves.values()), create_graph=True)
        total = sum(x.square().sum() for x in grads)
        found.append(torch.autograd.grad(total, list(leaves.values())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


DEPENDENT = {
    "pre_gate": lambda u: {"pre_gate": u.sigmoid()},
    "the same": lambda u: {"pre_gate": u, "post_gate": u},
    "taps": lambda u: {"k": u.mean(0)},
    "skip": lambda u: {"skip": u.mean((0, 2))},
}


@paths
@pytest.mark.parametrize("which", DEPENDENT)
def test_derivatives_where_one_input_is_a_function_of_another(which, backend):
    """A second derivative, and the first on the way to it."""
    tensors = make(2, 3, 20, 20, "causal")
    found = []
    for way, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        u = tensors["u"].to(dtype).requires_grad_()
        y = call({"u": u, "k": tensors["k"].to(dtype)} | DEPENDENT[which](u), "causal", way)
        (first,) = torch.autograd.grad(y.square().sum(), u, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), u)
        found.append((first, second))
    for a, b in zip(*found, strict=True):
        assert (a.double() - b).norm() < 1e-5 * b.norm()


@paths
def test_views_of_negatives_are_seen_as_what_they_are(backend):
    x = torch.randn(2, 3, 16, device=DEVICE)
    z = torch.fft.fft(x).conj().imag
    assert z.is_neg()
    k = torch.randn(3, 16, device=DEVICE)
    want = ops.fft_conv(z.clone(), k, pre_gate=z.clone(), backend=backend)
    torch.testing.assert_close(ops.fft_conv(z, k, pre_gate=z, backend=backend), want)


def test_a_forward_derivative_is_refused_not_lost():
    tensors = make(1, 2, 8, 4, "causal")
    with torch.autograd.forward_ad.dual_level():
        u = torch.autograd.forward_ad.make_dual(tensors["u"], torch.ones_like(tensors["u"]))
        with pytest.raises(NotImplementedError, match="jvp"):
            ops.fft_conv(u, tensors["k"])


@paths
def test_shifting_the_inputs_shifts_the_outputs(backend):
    tensors = make(2, 768, 192, 192, "causal")
    y = call(tensors, "causal", backend)
    tensors["u"] = torch.nn.functional.pad(tensors["u"], (5, 0))[..., :192]
    shifted = call(tensors, "causal", backend)[..., 5:]
    torch.testing.assert_close(shifted, y[..., :-5], rtol=1e-4, atol=1e-4)


def test_exact_causal_lets_nothing_of_a_later_input_through():
    tensors = make(2, 2, 500, 300, "causal")
    exact = partial(call, tensors, "causal", exact_causal=True)
    y = exact()
    want = call({k: x.double() for k, x in tensors.items()}, "causal", "reference")
    assert row_error(y, want) < 1e-6
    for value in (torch.inf, torch.nan, 1e30):
        for place in (1, 63, 64, 333, 499):
            before = tensors["u"][0, 0, place].clone()
            tensors["u"][0, 0, place] = value
            found = exact()
            assert torch.equal(found[0, 0, :place], y[0, 0, :place]), (value, place)
            assert torch.equal(found[1], y[1])
            if value != 1e30:
                assert found[0, 0, place : place + 300].isnan().all()
                tensors["u"][0, 0, place] = 0
                assert torch.equal(found[0, 0, place + 300 :], exact()[0, 0, place + 300 :])
            tensors["u"][0, 0, place] = before


def test_a_gradient_of_exact_causal():
    tensors = {k: x.double() for k, x in make(1, 2, 70, 20, "causal").items()}
    inputs = [x.requires_grad_() for x in tensors.values()]
    function = lambda u, k: ops.fft_conv(u, k, exact_causal=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@paths
@pytest.mark.parametrize("sizes", [[1, 7, 92, 50], [150], [1] * 10])
def test_pieces_of_any_length_and_single_steps_give_the_whole(sizes, backend):
    tensors = make(2, 3, sum(sizes), 40, "causal", groups=3, skip=True)
    u, k, skip = tensors["u"], tensors["k"], tensors["skip"]
    want = call(tensors, "causal", backend)
    state, found = None, []
    for piece in u.split(sizes, -1):
        y, state = ops.fft_conv_prefill(piece, k, state, skip=skip, backend=backend)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, -1), want, rtol=1e-5, atol=1e-5)
    for _ in range(50):  # further than the ring is long
        token = torch.randn(2, 3, 1, device=DEVICE)
        u = torch.cat([u, token], -1)
        y, state = ops.fft_conv_step(token, state, k, skip=skip)
    last = ops.fft_conv(u, k, skip=skip, backend=backend)[..., -1:]
    torch.testing.assert_close(y, last, rtol=1e-5, atol=1e-5)
    again, _ = ops.fft_conv_prefill(token, k, state, skip=skip, backend=backend)
    whole = ops.fft_conv(torch.cat([u, token], -1), k, skip=skip, backend=backend)[..., -1:]
    torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)


def test_a_step_has_gradients_and_then_leaves_its_state_alone():
    u, k = torch.randn(1, 2, 6, device=DEVICE), torch.randn(2, 5, device=DEVICE)
    for wanted in ("uk", "u", "k"):
        leaves = {"u": u.clone(), "k": k.clone()}
        inputs = [leaves[name].requires_grad_() for name in wanted]
        state, total = None, 0
        for token in leaves["u"].split(1, -1):
            y, state = ops.fft_conv_step(token, state, leaves["k"])
            total = total + y.square().sum()
        found = torch.autograd.grad(total, inputs)
        want = torch.autograd.grad(ops.fft_conv(leaves["u"], leaves["k"]).square().sum(), inputs)
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)


def test_a_state_keeps_its_inputs_and_no_more():
    u, k = torch.randn(1, 3, 1000, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    _, state = ops.fft_conv_prefill(u, k)
    assert state.inputs.untyped_storage().nbytes() == 4 * 3 * 4
    _, state = ops.fft_conv_prefill(u, k, state)
    assert state.inputs.untyped_storage().nbytes() == 4 * 3 * 4


@paths
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_case(backend, data):
    mode = data.draw(st.sampled_from(list(MODES)))
    groups, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    tensors = make(
        data.draw(st.integers(1, 4)),
        groups * each,
        data.draw(st.integers(1, 90)),
        data.draw(st.integers(1, 120)),
        mode,
        groups,
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    compare(tensors, mode, backend, slack=1.5)


@paths
def test_gradients_that_nobody_needs_are_not_made(backend):
    tensors = make(2, 3, 30, 20, "causal", gates=True, skip=True)
    want = results(tensors, "causal", backend)
    for name in tensors:
        leaves = {k: x.detach().requires_grad_(k == name) for k, x in tensors.items()}
        y = call(leaves, "causal", backend)
        (got,) = torch.autograd.grad(y, leaves[name], upstream(y, y.dtype))
        torch.testing.assert_close(got, want[name])


@paths
def test_autocast_leaves_inputs_as_they_are(backend):
    tensors = make(2, 3, 192, 192, "causal", gates=True, skip=True)
    want = call(tensors, "causal", backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(call(tensors, "causal", backend), want)
    grads = results(tensors, "causal", backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        for name, got in results(tensors, "causal", backend).items():
            torch.testing.assert_close(got, grads[name])


@pytest.mark.skipif(NATIVE is not None, reason=str(NATIVE))
def test_the_registered_operators_pass_opcheck():
    tensors = make(2, 4, 30, 20, "causal", groups=2, gates=True, skip=True)
    u, k, skip, pre, post = (tensors[x] for x in ("u", "k", "skip", "pre_gate", "post_gate"))
    tests, found = ("test_schema", "test_faketensor"), torch.ops.fastattn
    lie = u.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(
        found.fft_conv.default, (lie, k, None, None, None, 0, 30), test_utils=tests
    )
    for rest in ((skip, pre, post), (None, None, None)):
        torch.library.opcheck(found.fft_conv.default, (u, k, *rest, 0, 30), test_utils=tests)
        wanted = [True, True, *(x is not None for x in rest)]
        back = (torch.randn_like(u), u, k, *rest, 0, wanted)
        torch.library.opcheck(found.fft_conv_backward.default, back, test_utils=tests)


@paths
@modes
def test_it_compiles_whole_and_once_for_lengths_that_change(mode, backend):
    torch._dynamo.reset()
    compiles = []

    def count(graph, inputs):
        compiles.append(len(inputs))
        return graph.forward

    run = partial(call, mode=mode, backend=backend)
    counted = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (20, 33, 50, 70, 110, 111):
        tensors = make(2, 3, n, 20, mode)
        leaves = {k: x.requires_grad_() for k, x in tensors.items()}
        want = run(leaves)
        counted(leaves)
        found = compiled(leaves)
        torch.testing.assert_close(found, want)
        inputs = list(leaves.values())
        for a, b in zip(
            *(torch.autograd.grad(y.square().sum(), inputs) for y in (found, want)), strict=True
        ):
            torch.testing.assert_close(a, b)
    assert len(compiles) <= 3


@paths
def test_func_grad_works(backend):
    tensors = make(2, 3, 20, 20, "causal")
    loss = lambda u: ops.fft_conv(u, tensors["k"], backend=backend).square().sum()  # noqa: E731
    u = tensors["u"].requires_grad_()
    (want,) = torch.autograd.grad(loss(u), u)
    torch.testing.assert_close(torch.func.grad(loss)(u.detach()), want, rtol=1e-4, atol=1e-4)


@paths
@modes
@pytest.mark.parametrize(("b", "c", "n"), [(0, 2, 4), (2, 0, 4), (2, 2, 0)])
def test_empty_inputs_are_no_error(b, c, n, mode, backend):
    tensors = make(b, c, n, 3, mode, groups=max(c, 1), skip=True)
    if c == 0:
        tensors |= {k: x[:0] for k, x in tensors.items() if k in ("k", "reverse", "skip")}
        with pytest.raises(ValueError, match="groups"):
            call(tensors, mode, backend)
        return
    leaves = {k: x.requires_grad_() for k, x in tensors.items()}
    y = call(leaves, mode, backend)
    assert y.shape == (b, c, n + 2 if mode == "full" and n else n)
    for x in torch.autograd.grad(y.sum(), list(leaves.values())):
        assert (x == 0).all()


WRONG = {
    "mode must be one of": {"mode": "linear"},
    "must be .* got shape": {"u": torch.zeros(2, 3)},
    "groups that divide": {"k": torch.zeros(2, 4)},
    "at least one tap": {"k": torch.zeros(3, 0)},
    "reverse go together": {"mode": "bidirectional"},
    "together, got mode='causal'": {"reverse": torch.zeros(3, 4)},
    "reverse must be": {"mode": "bidirectional", "reverse": torch.zeros(1, 4)},
    "reverse_lag must be 0 or 1": {"reverse_lag": 2},
    "skip must be": {"skip": torch.zeros(2)},
    "pre_gate must be": {"pre_gate": torch.zeros(2, 3, 9)},
    "post_gate must be": {"mode": "full", "post_gate": torch.zeros(2, 3, 10)},
    "exact_causal needs": {"mode": "full", "exact_causal": True},
    "it has no exact_causal": {"exact_causal": True, "backend": "native"},
    "no backend 'cuda'": {"backend": "cuda"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_said(message):
    arguments = {"u": torch.zeros(2, 3, 10), "k": torch.zeros(3, 4)} | WRONG[message]
    with pytest.raises(ValueError, match=message):
        ops.fft_conv(**arguments)


def test_wrong_dtypes_are_said():
    u, k = torch.zeros(2, 3, 10), torch.zeros(3, 4)
    with pytest.raises(TypeError, match="k must be a floating"):
        ops.fft_conv(u, k.int())
    with pytest.raises(TypeError, match=r"pre_gate must be torch\.float32"):
        ops.fft_conv(u, k, pre_gate=u.double())
    with pytest.raises(ValueError, match=r"u_t must be \(b, c, 1\)"):
        ops.fft_conv_step(u, None, k)
    _, state = ops.fft_conv_step(u[..., :1], None, k)
    with pytest.raises(ValueError, match="state must be of"):
        ops.fft_conv_step(u[..., :1], state, torch.zeros(3, 5))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_lengths_leave_no_memory_behind():
    """Nothing is kept by length but the roots of a transform, by powers of two; 24 KB a length
    would be 12 MB."""
    code = """
import torch
from fastattn import ops
torch.set_num_threads(1)
def run(lengths):
    for n in lengths:
        ops.fft_conv(torch.randn(2, 8, n), torch.randn(8, n))
    return int(open("/proc/self/statm").read().split()[1]) * 4
before = run(range(1000, 1100))
grown = run(range(500, 1000)) - before
assert grown < 4_000, f"{grown} KiB"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lags_and_their_adjoint():
    lags = Lags(-2, 5, 7)
    assert lags.adjoint == Lags(-2, 7, 5, mirrored=True)
    assert lags.adjoint.adjoint == lags
    for size in (1, 2, 7, 11, 4001):
        found = fft_conv_torch.fast_size(size)
        assert found >= size
        for prime in (2, 3, 5):
            while found % prime == 0:
                found //= prime
        assert found == 1


gpu = pytest.mark.gpu
native = pytest.mark.skipif(NATIVE is not None, reason=str(NATIVE))


@gpu
@native
def test_more_than_two_to_the_31_elements():
    u = torch.randn(3, 65536, 11000, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(1, 100, device=DEVICE)
    y = ops.fft_conv(u, k, backend="native")
    last = ops.fft_conv(u[-1:, -2:], k, backend="native")
    assert torch.equal(y[-1:, -2:], last)


@gpu
@native
@pytest.mark.parametrize("n", [300, 5000, 20000])
def test_a_cuda_graph_and_a_side_stream(n):
    tensors = make(2, 8, n, n, "causal", gates=True, skip=True)
    leaves = {k: x.requires_grad_() for k, x in tensors.items()}
    dy = upstream(tensors["u"], torch.float32)

    def step():
        y = call(leaves, "causal", "native")
        return [y, *torch.autograd.grad(y, list(leaves.values()), dy)]

    # makes the table of roots, which a graph cannot; an output that has its graph would tie what is
    # captured to this stream
    want = [x.detach() for x in step()]
    aside = torch.cuda.Stream()
    slow = torch.randn(4096, 4096, device=DEVICE)
    with torch.cuda.stream(aside):
        aside.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            for _ in range(20):
                slow @ slow
            delayed = tensors["u"] * 2  # made on this stream, behind the products
        y = ops.fft_conv(delayed, tensors["k"], backend="native")
    aside.synchronize()
    torch.testing.assert_close(y, ops.fft_conv(tensors["u"] * 2, tensors["k"], backend="native"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


@gpu
@native
@pytest.mark.parametrize("n", [300, 20000])
def test_it_runs_on_the_device_of_its_inputs(n):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensors = make(2, 3, n, n, "causal")
    want = results(tensors, "causal", "native")
    found = results({k: x.to("cuda:1") for k, x in tensors.items()}, "causal", "native")
    for name, got in found.items():
        assert got.device.index == 1
        assert torch.equal(got.cpu(), want[name].cpu())
    assert torch.cuda.current_device() == 0


@gpu
@native
@pytest.mark.parametrize("n", [256, 512, 1024, 2048, 4096, 8192, 16384, 65536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_plan_on_a_gpu(n, dtype):
    """Twice, bitwise equal; against torch's path in float64."""
    tensors = make(3, 5, n, n, "causal", gates=True, skip=True, dtype=dtype)
    exact = results({k: x.double() for k, x in tensors.items()}, "causal", "torch", dtype)
    first, second = (results(tensors, "causal", "native") for _ in range(2))
    for name, got in first.items():
        assert torch.equal(got, second[name]), name
        want = exact[name]
        floor = row_error(want.to(got.dtype), want) if got.dtype != torch.float32 else 0.0
        allowed = 1.05 * floor + (2e-6 if name in ("k", "skip") else 5e-7)
        if name == "skip":  # of one number a row
            allowed *= 20
        assert row_error(got, want) <= allowed, name
