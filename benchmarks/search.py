"""Search tiles and splits of the linear attention kernels on the GPU at hand.

    python benchmarks/search.py --n 16384 --out search.json
    python benchmarks/search.py --n 4096 --causal

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
from concurrent.futures import ProcessPoolExecutor

import torch

from fastattn import _launch, _tuning
from fastattn.ops import linear_attention_triton as path

CANDIDATES = [
    {"BLOCK_N": block, "num_warps": warps, "num_stages": stages}
    for block, warps, stages in itertools.product((64, 128), (4, 8), (2, 3, 4))
]
WAVES = (1, 2, 4, 8)  # splits: programs a multiprocessor


def kernels(causal: bool) -> dict[str, tuple[str, ...]]:
    """The kernels of each direction, in the order of their launches."""
    backward = ("grad_queries", "grad_keys")
    return {
        "forward": ("sum_keys", "attend"),
        "backward": ("sum_queries", *backward) if causal else backward,
    }


def call(direction: str, q, k, v, options):
    """A call of one direction, without autograd."""
    torch.manual_seed(1)
    out, kept, *_ = path._forward(q, k, v, *options)
    if direction == "forward":
        return lambda: path._forward(q, k, v, *options)[:1]
    dout = torch.randn_like(out)
    backward = (dout, None, None, q, k, v, out, kept, None, *options)
    return lambda: path._backward(*backward)[:3]


def measure(function) -> float | str:
    from triton.testing import do_bench

    try:
        return do_bench(function, warmup=10, rep=50, return_mode="median")
    except Exception as error:  # too much shared memory, or a tile Triton cannot compile
        return f"{type(error).__name__}: {str(error)[:80]}"


def differs(one, two) -> float:
    return max(
        ((a - b).float().norm() / b.float().norm()).item() for a, b in zip(one, two, strict=True)
    )


def inputs(options: argparse.Namespace, n: int) -> tuple:
    """Queries, keys and values, laid out as a module's, and the call's options."""
    torch.manual_seed(0)
    shape, dtype = (options.b, n, options.h, options.d), getattr(torch, options.dtype)
    q, k, v = (torch.randn(shape, device="cuda").to(dtype).transpose(1, 2) for _ in range(3))
    return q, k, v, (None, None, None, None, None, options.feature_map, options.causal, True)


def compile_one(options: argparse.Namespace, direction: str, kernel: str, candidate: dict) -> None:
    """Run a short call, which compiles what a long one needs; failures show when timed."""
    default = _tuning.linear_attention

    def tiles(name, *about):
        return default(name, *about) | (candidate if name == kernel else {})

    _tuning.linear_attention = tiles
    try:
        call(direction, *inputs(options, 64))()
    except Exception:  # reported by measure()
        pass
    finally:
        _tuning.linear_attention = default


def compile_all(options: argparse.Namespace) -> None:
    jobs = [
        (options, direction, kernel, candidate)
        for direction, names in kernels(options.causal).items()
        for kernel in names
        for candidate in CANDIDATES
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True)))


def search(options: argparse.Namespace) -> dict:
    q, k, v, arguments = inputs(options, options.n)
    chosen: dict[str, dict] = {}
    waves = 2
    default, splits = _tuning.linear_attention, _tuning.linear_attention_splits

    def tiles(kernel, *about):
        return default(kernel, *about) | chosen.get(kernel, {})

    def cut(rows, device):
        return max(1, min(64, waves * _tuning.multiprocessors(device) // max(rows, 1)))

    _tuning.linear_attention, _tuning.linear_attention_splits = tiles, cut
    found = {"device": torch.cuda.get_device_name(), **vars(options), "kernels": {}}
    try:
        for direction, names in kernels(options.causal).items():
            reference = call(direction, q, k, v, arguments)()
            for kernel in names:
                results = {}
                for candidate in CANDIDATES:
                    chosen[kernel] = candidate
                    _launch._variants.clear()
                    ms = measure(call(direction, q, k, v, arguments))
                    if isinstance(ms, float):
                        error = differs(call(direction, q, k, v, arguments)(), reference)
                        ms = ms if error < 2e-2 else f"wrong by {error:.1e}"
                    results[json.dumps(candidate)] = ms
                timed = {c: ms for c, ms in results.items() if isinstance(ms, float)}
                if not timed:
                    raise RuntimeError(f"no candidate of {kernel} runs: {results}")
                best = min(timed, key=timed.get)
                chosen[kernel] = json.loads(best)
                _launch._variants.clear()
                found["kernels"][kernel] = results
                ranked = sorted(timed.items(), key=lambda item: item[1])[:4]
                print(f"{direction} by {kernel}:", *(f"{c} {ms:.4f} ms" for c, ms in ranked))
                for c, ms in results.items():
                    if isinstance(ms, str):
                        print(f"  {c}: {ms}")
            for waves in WAVES:
                found["kernels"].setdefault(f"{direction} waves", {})[waves] = measure(
                    call(direction, q, k, v, arguments)
                )
            waves = 2
            print(f"{direction} by waves:", found["kernels"][f"{direction} waves"])
    finally:
        _tuning.linear_attention, _tuning.linear_attention_splits = default, splits
    found["best"] = chosen
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("b", 4), ("h", 8), ("n", 4096), ("d", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--feature-map", default="elu")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--out", help="write all figures there, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("search.py times kernels: it needs a CUDA device", file=sys.stderr)
        return 2
    compile_all(options)
    found = search(options)
    print(json.dumps(found["best"], indent=2))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
