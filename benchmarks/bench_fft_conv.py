"""Long convolution against torch.fft, eager and compiled, direct convolution, and cuDNN's.

How do time, memory and error grow with n, where is the crossover with direct convolution at few
taps, and what does a module cost in the layout (b, n, c)? The taps' transform is inside.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE

from fastattn import LongConv, ops

ON_GPU = DEVICE == "cuda"
SHAPES = [(16, 768, 2**i) for i in range(8, 15)] if ON_GPU else [(2, 64, 1024)]
LONG = [(8, 384, 65536), (8, 96, 262144), (4, 24, 1048576)] if ON_GPU else [(1, 8, 65536)]
# of Long Range Arena: images, ListOps, text, retrieval, Pathfinder, Path-X
ARENA = [
    *((50, 512, 1024), (32, 256, 2048), (16, 256, 4096), (64, 256, 4000), (64, 256, 1024)),
    (16, 256, 16384),
] if ON_GPU else [(2, 32, 1024)]  # fmt: skip
FEW = [4, 16, 64, 256, 1024]
PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])


def torch_fft(u, k):
    """As a careful user writes it: real transforms in float32, padded to twice the length."""
    n = u.shape[-1]
    spectrum = torch.fft.rfft(u.float(), n=2 * n) * torch.fft.rfft(k, n=2 * n)
    return torch.fft.irfft(spectrum, n=2 * n)[..., :n].to(u.dtype)


def direct(u, k):
    taps = k.shape[1]
    return F.conv1d(F.pad(u, (taps - 1, 0)), k.flip(1).unsqueeze(1).to(u.dtype), groups=u.shape[1])


def compiled(function):
    torch._dynamo.reset()  # else, after eight lengths, what was compiled quietly runs as eager
    return torch.compile(function, dynamic=False)


def flash():
    """FlashFFTConv, which has an object for every length."""
    package = pytest.importorskip("flashfftconv", reason="not installed")
    made = {}

    def call(u, k):
        n = u.shape[-1]
        if n not in made:
            made[n] = package.FlashFFTConv(2 * n, dtype=u.dtype).to(u.device)
        return made[n](u, k)

    return call


def cudnn():
    package = pytest.importorskip("cudnn", reason="cuDNN's front end is not installed")
    if not hasattr(package.ops, "fft_causal_conv1d"):
        pytest.skip("this cuDNN has no fft_causal_conv1d")
    return lambda u, k: package.ops.fft_causal_conv1d(u, k.to(u.dtype))


RIVALS = {
    "fastattn": lambda: ops.fft_conv,
    "torch.fft": lambda: torch_fft,
}
if ON_GPU:
    RIVALS |= {"torch.fft compiled": partial(compiled, torch_fft), "flash": flash, "cudnn": cudnn}


def measure(bench, rival, function, shape, taps, backward, case, **options):
    b, c, n = shape
    (u,) = bench.inputs(shape)
    (k,) = bench.inputs((c, taps), dtype=torch.float32)
    exact = lambda u, k: ops.fft_conv(u, k, backend="torch", **options)  # noqa: E731
    bench(
        function,
        [u, k],
        backward=backward,
        exact=exact if b * c * n < 2**26 else None,
        floor_bytes=u.nbytes * (5 if backward else 2),  # u y; dy u du
        case={"rival": rival, "shape": list(shape), "n": n, "dtype": "bfloat16"} | case,
    )


@PASSES
@pytest.mark.parametrize("shape", SHAPES + LONG, ids=str)
@pytest.mark.parametrize("rival", RIVALS)
def bench_fft_conv(bench, rival, shape, backward):
    case = {"op": "fft_conv"}
    if shape in LONG:
        case = {"op": "fft_conv of long rows", "shape": ["b", "c", shape[2]]}
    measure(bench, rival, RIVALS[rival](), shape, shape[2], backward, case)


@PASSES
@pytest.mark.parametrize("shape", ARENA, ids=str)
@pytest.mark.parametrize("rival", ["fastattn", "torch.fft"])
def bench_both_ways(bench, rival, shape, backward):
    """Two-sided, at the shapes of Long Range Arena."""
    _, c, n = shape
    backend = None if rival == "fastattn" else "torch"
    (reverse,) = bench.inputs((c, n), dtype=torch.float32)
    options = {"mode": "bidirectional", "reverse": reverse, "reverse_lag": 1}
    function = lambda u, k: ops.fft_conv(u, k, backend=backend, **options)  # noqa: E731
    case = {"op": "fft_conv both ways", "sweep": "shape"}
    exact = options | {"reverse": reverse.double()}
    measure(bench, rival, function, shape, n, backward, case, **exact)


@PASSES
@pytest.mark.parametrize("taps", FEW)
@pytest.mark.parametrize("rival", ["fastattn", "triton", "native", "direct"])
def bench_few_taps(bench, rival, taps, backward):
    """The default, and the two that it chooses from: products on tensor cores, windows by FFT."""
    if rival == "triton" and (taps > 256 or not ON_GPU):
        pytest.skip("it has at most 256 taps, and no CPU")
    shape = (16, 768, 4096) if ON_GPU else (2, 64, 1024)
    ways = {"fastattn": ops.fft_conv, "direct": direct}
    function = ways.get(rival) or partial(ops.fft_conv, backend=rival)
    case = {"op": "fft_conv by taps", "sweep": "taps", "taps": taps}
    measure(bench, rival, function, shape, taps, backward, case)


@PASSES
@pytest.mark.parametrize("n", [1024, 2048, 4096] if ON_GPU else [1024])
@pytest.mark.parametrize("rival", ["fastattn", "torch.fft"])
def bench_module(bench, rival, n, backward):
    """LongConv in (b, n, c), with the gradients of its parameters."""
    b, c = (16, 768) if ON_GPU else (2, 64)
    (x,) = bench.inputs((b, n, c))
    backend = None if rival == "fastattn" else "torch"
    layer = LongConv(c, n, backend=backend, device=DEVICE)
    bench(
        layer,
        [x],
        backward=backward,
        parameters=[*layer.parameters()],
        case={"op": "LongConv", "rival": rival, "shape": [b, n, c], "n": n, "dtype": "bfloat16"},
    )
