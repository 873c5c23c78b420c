"""Search tiles of an op's kernels on the GPU at hand.

    python benchmarks/search.py linear_attention --n 16384 --causal
    python benchmarks/search.py block_sparse --n 16384 --block 128 --kernel attend \\
        --try BLOCK_Q=64,128 BLOCK_K=64,128 num_warps=4,8 num_stages=2,3,4 maxnreg=0,128

Nothing is searched when the library runs: what wins here is written into ``_tuning.py`` by hand, in
a commit that names the device. One kernel is varied at a time, the others keep their best so far;
a candidate whose result differs from the first one's by more than rounding is reported and dropped.
Candidates are first compiled side by side, one process a core, into Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from fastattn import _launch, _tuning, ops
from fastattn.ops import (
    block_sparse_triton,
    fft_conv_triton,
    linear_attention_triton,
    linformer_triton,
)
from fastattn.ops.block_sparse_tables import tables

Calls = dict[str, Callable[[], list[torch.Tensor]]]
TRY = ("num_warps=4,8", "num_stages=2,3,4")
SHORT = 256  # tokens, a multiple of every block: enough to compile a kernel


@dataclass(frozen=True)
class Op:
    """An op: ``tuning`` is the function in ``_tuning`` that has the tiles of its ``kernels``."""

    tuning: str
    kernels: dict[str, tuple[str, ...]]
    calls: Callable[[argparse.Namespace, int], Calls]


def normal(options: argparse.Namespace, n: int, count: int) -> list[torch.Tensor]:
    """Tensors ``(b, h, n, d)``, laid out as a module's."""
    torch.manual_seed(0)
    shape, dtype = (options.b, n, options.h, options.d), getattr(torch, options.dtype)
    return [torch.randn(shape, device="cuda").to(dtype).transpose(1, 2) for _ in range(count)]


def linear_attention(options: argparse.Namespace, n: int) -> Calls:
    path, (q, k, v, dout) = linear_attention_triton, normal(options, n, 4)
    about = (None, None, None, None, None, options.feature_map, options.causal, True)
    out, kept, *_ = path._forward(q, k, v, *about)
    backward = (dout, None, None, q, k, v, out, kept, None, *about)
    return {
        "forward": lambda: path._forward(q, k, v, *about)[:1],
        "backward": lambda: path._backward(*backward)[:3],
    }


def block_sparse(options: argparse.Namespace, n: int) -> Calls:
    path, (q, k, v, dout) = block_sparse_triton, normal(options, n, 4)
    layout = ops.BlockLayout.bigbird(n, block_size=options.block, num_heads=options.h)
    rows, columns = tables(layout, q.device)
    given, numbers = (None,) * 3, (options.block, False, options.d**-0.5, 0.0)
    out, lse = path._forward(q, k, v, *given, *rows, *numbers)
    backward = (dout, q, k, v, out, lse, *given, *rows, *columns, *numbers)
    return {
        "forward": lambda: [path._forward(q, k, v, *given, *rows, *numbers)[0]],
        "backward": lambda: list(path._backward(*backward)),
    }


def linformer(options: argparse.Namespace, n: int) -> Calls:
    path, (q, k, _, dout) = linformer_triton, normal(options, n, 4)
    proj = torch.randn(options.slots, n, device="cuda").to(q.dtype) / n**0.5
    pair = k, proj, k, proj, None
    slots, _ = path._compress(*pair, options.h)
    scale = options.d**-0.5
    out, lse = path._attend(q, slots, slots, None, scale)
    return {
        "forward": lambda: [
            *path._compress(*pair, options.h),
            path._attend(q, slots, slots, None, scale)[0],
        ],
        "backward": lambda: [
            *path._compress_backward(slots, slots, *pair, *(True,) * 4),
            *path._attend_backward(dout, q, slots, slots, None, out, lse, scale),
        ],
    }


def fft_conv(options: argparse.Namespace, n: int) -> Calls:
    """Of b samples and h · d channels."""
    torch.manual_seed(0)
    c, dtype = options.h * options.d, getattr(torch, options.dtype)
    u, dy = (torch.randn(options.b, c, n, device="cuda").to(dtype) for _ in range(2))
    given = (u, torch.randn(c, options.taps, device="cuda"), None, None, None)
    wanted = [True, True, False, False, False]
    return {
        "forward": lambda: [fft_conv_triton._forward(*given, 0, n)],
        "backward": lambda: fft_conv_triton._backward(dy, *given, 0, wanted)[:2],
    }


OPS = {
    "linear_attention": Op(
        "linear_attention",
        {
            "forward": ("sum_keys", "attend"),
            "backward": ("sum_queries", "grad_queries", "grad_keys"),
        },
        linear_attention,
    ),
    "block_sparse": Op(
        "block_sparse",
        {"forward": ("attend",), "backward": ("grad_queries", "grad_keys")},
        block_sparse,
    ),
    "linformer": Op(
        "linformer",
        {
            "forward": ("compress", "attend"),
            "backward": ("grad_slots", "grad_tokens", "grad_projection"),
        },
        linformer,
    ),
    "fft_conv": Op("fft_conv", {"forward": ("convolve",), "backward": ("correlate",)}, fft_conv),
}


def candidates(words: list[str]) -> list[dict[str, int]]:
    """Every combination of "NAME=value,value"; a zero takes the name away."""
    names = [word.split("=")[0] for word in words]
    values = [[int(x) for x in word.split("=")[1].split(",")] for word in words]
    return [dict(zip(names, x, strict=True)) for x in itertools.product(*values)]


class Tiles:
    """``_tuning``'s function for an op, with candidates in place of what it says."""

    def __init__(self, op: Op) -> None:
        self.name, self.default = op.tuning, getattr(_tuning, op.tuning)
        self.chosen: dict[str, dict[str, int]] = {}

    def __call__(self, kernel: str, *about: object) -> dict[str, int]:
        tiles = self.default(kernel, *about) | self.chosen.get(kernel, {})
        return {name: x for name, x in tiles.items() if x or not name.startswith("maxnreg")}

    def __enter__(self) -> Tiles:
        setattr(_tuning, self.name, self)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(_tuning, self.name, self.default)


def measure(function: Callable[[], object]) -> float | str:
    from triton.testing import do_bench_cudagraph

    try:
        return do_bench_cudagraph(function, rep=50, return_mode="median")
    except Exception as error:  # too much shared memory, or a tile Triton cannot compile
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error)[:80]}"


def differs(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    return max(
        ((a - b).float().norm() / b.float().norm()).item() for a, b in zip(one, two, strict=True)
    )


def wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Direction and kernel, in the order of their launches."""
    kernels = OPS[options.op].kernels.items()
    every = [(direction, name) for direction, names in kernels for name in names]
    return [x for x in every if options.kernel in (None, x[1])]


def compile_one(options: argparse.Namespace, direction: str, kernel: str, candidate: dict) -> None:
    """Run a short call, which compiles what a long one needs; failures show when timed."""
    op = OPS[options.op]
    calls = op.calls(options, SHORT)
    with Tiles(op) as tiles:
        tiles.chosen[kernel] = candidate
        _launch.forget()
        with suppress(Exception):  # reported by measure()
            calls[direction]()


def search(options: argparse.Namespace) -> dict:
    tried = candidates(getattr(options, "try"))
    jobs = [(options, *which, candidate) for which in wanted(options) for candidate in tried]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True)))

    op = OPS[options.op]
    calls = op.calls(options, options.n)
    found: dict = {"device": torch.cuda.get_device_name(), **vars(options), "kernels": {}}
    with Tiles(op) as tiles:
        for direction, kernel in wanted(options):
            call = calls[direction]
            reference = [x.clone() for x in call()]
            results = {"as it is": measure(call)}
            for candidate in tried:
                before = tiles.chosen.get(kernel, {})
                tiles.chosen[kernel] = candidate
                _launch.forget()
                ms = measure(call)
                if isinstance(ms, float) and (error := differs(call(), reference)) > 2e-2:
                    ms = f"wrong by {error:.1e}"
                results[json.dumps(candidate)] = ms
                tiles.chosen[kernel] = before
            timed = sorted((ms, c) for c, ms in results.items() if isinstance(ms, float))
            best = timed[0][1]
            if best != "as it is":
                tiles.chosen[kernel] = json.loads(best)
            _launch.forget()
            found["kernels"][kernel] = results
            print(f"{direction} by {kernel}, as it is {results['as it is']:.4f} ms:")
            for ms, c in timed[:6]:
                print(f"  {ms:.4f} {c}")
            for c, ms in results.items():
                if isinstance(ms, str):
                    print(f"  {c}: {ms}")
        found["best"] = tiles.chosen
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=OPS)
    for name, value in (
        ("b", 4),
        ("h", 8),
        ("n", 4096),
        ("d", 64),
        ("block", 64),
        ("slots", 256),
        ("taps", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kernel", help="only this one")
    parser.add_argument("--try", nargs="+", default=TRY, metavar="NAME=VALUE,VALUE")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--feature-map", default="elu")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--out", help="write all figures there, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("search.py times kernels: it needs a CUDA device", file=sys.stderr)
        return 2
    found = search(options)
    print(json.dumps(found["best"], indent=2))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
