"""One fixture that measures a call the same way for everybody: time, memory, error.

Time is the median of ``triton.testing.do_bench``, as called from Python, launches included; beside
it the replay of a CUDA graph, which has none. Memory is the peak above inputs and upstream
gradient. The error is relative, ‖out - exact‖ / ‖exact‖, against a float64 computation of the same
function; the largest of output and gradients. On a CPU the time is a median of wall times.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata

import pytest
import torch
from torch import Tensor

import fastattn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS = 7


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "cpu"


def slug() -> str:
    """The device's name as a folder."""
    return device_name().lower().replace(" ", "-")


def pytest_configure():
    """Stay on one core, before any thread starts.

    A backward pass runs on another thread than its caller; on a virtual machine waking a second
    core for it takes longer than a short kernel, and varies.
    """
    if DEVICE == "cuda" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        torch.set_num_threads(1)  # more would take turns on that core, long after their work


def pytest_benchmark_generate_machine_info():
    """What a figure needs beside it."""

    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "device": device_name(),
        "cpu": platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in ("triton", "flash-linear-attention")},
        "fastattn": fastattn.__version__,
        "seed": 0,
    }


class Bench:
    """Measures one rival in one case; the numbers go to pytest-benchmark's JSON."""

    def __init__(self, benchmark):
        self._benchmark = benchmark
        torch.manual_seed(0)

    def inputs(self, *shapes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Normal tensors on the device, from seed 0."""
        return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]

    def __call__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        *,
        backward: bool = False,
        exact: Callable[..., Tensor] | None = None,
        floor_bytes: int | None = None,
        flop: int | None = None,
        parameters: Sequence[Tensor] = (),
        beside: tuple[Callable[..., Tensor], Sequence[Tensor]] | None = None,
        case: dict[str, object],
    ) -> None:
        """Measure ``function(*inputs)``, with its backward pass if asked for.

        Args:
            exact: The same function for float64 inputs; None where the rival computes another.
            floor_bytes: One read and one write of everything, for the ratio to the memory's speed.
            flop: Of the products that count, for the rate of them.
            parameters: What else gets a gradient.
            beside: Another function and its parameters, measured as called in turn with this one:
                the median ratio of ``ROUNDS`` pairs. For what Python limits: a virtual machine's
                core is shared, and may be slow by half for seconds.
            case: What names this measurement in the report.
        """
        leaves = [x.detach().requires_grad_(backward) for x in inputs]
        call = one_pass(function, leaves, parameters, backward)
        info = {**case, "pass": "forward+backward" if backward else "forward"}
        info["error"] = None if exact is None else error(function, exact, inputs, backward)
        for _ in range(3):
            call()
        info["peak_mib"] = peak_memory(call)
        info["graph_ms"] = graph_ms(call)
        if beside is None:
            info["ms"] = called_ms(call)
        else:
            base = one_pass(beside[0], leaves, beside[1], backward)
            info["base_ms_rounds"], info["ms_rounds"] = in_turn(base, call)
            pairs = zip(info["ms_rounds"], info["base_ms_rounds"], strict=True)
            info["ms"] = statistics.median(info["ms_rounds"])
            info["ratio"] = statistics.median(mine / other for mine, other in pairs)
        if floor_bytes is not None:
            info["floor_ms"] = floor_bytes / 3e12 * 1e3  # at 3 TB/s
        if flop is not None:
            info["tflops"] = flop / (info["graph_ms"] or info["ms"]) / 1e9
        self._benchmark.extra_info.update(info)
        self._benchmark.pedantic(synchronised(call), rounds=5, warmup_rounds=1)


def one_pass(function, leaves, parameters, backward):
    """The call that is timed: the function, and the gradients of leaves and parameters."""
    wanted = [*leaves, *parameters]
    upstream = torch.randn_like(function(*leaves)) if backward else None

    def call():
        out = function(*leaves)
        return torch.autograd.grad(out, wanted, upstream) if backward else out

    return call


def error(function, exact, inputs, backward) -> float:
    """The largest relative error of output and gradients against float64."""
    upstream = torch.randn_like(function(*inputs))

    def everything(f, xs):
        leaves = [x.detach().requires_grad_() for x in xs]
        out = f(*leaves)
        grads = torch.autograd.grad(out, leaves, upstream.to(out.dtype)) if backward else ()
        return [x.detach().double() for x in (out, *grads)]

    pairs = zip(
        everything(function, inputs), everything(exact, [x.double() for x in inputs]), strict=True
    )
    return max(((got - want).norm() / want.norm()).item() for got, want in pairs)


def peak_memory(call) -> float | None:
    """MiB above what is there before the call; None on a CPU."""
    if DEVICE == "cpu":
        return None
    gc.collect()  # what an earlier measurement left in cycles may not be freed in the middle,
    torch.cuda.synchronize()
    time.sleep(0.05)  # nor the last gradients, which autograd's thread holds until it has run on
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def called_ms(call) -> float:
    """The median, as called from Python."""
    if DEVICE == "cpu":
        times = []
        for _ in range(7):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)
    from triton.testing import do_bench

    return do_bench(call, warmup=50, rep=200, return_mode="median")


def in_turn(*calls) -> list[list[float]]:
    """Medians of each, as called: one of each, then the next of each."""
    for call in calls:
        call()
    rounds = [[called_ms(call) for call in calls] for _ in range(ROUNDS)]
    return [list(medians) for medians in zip(*rounds, strict=True)]


def graph_ms(call) -> float | None:
    """The median, as replayed from a CUDA graph; None where it cannot be, and on a CPU."""
    if DEVICE == "cpu":
        return None
    from triton.testing import do_bench_cudagraph

    try:
        return do_bench_cudagraph(call, rep=50, return_mode="median")
    except RuntimeError:  # something in the call cannot be captured
        torch.cuda.synchronize()
        return None


def synchronised(call):
    def run():
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return run


@pytest.fixture
def bench(benchmark):
    return Bench(benchmark)
