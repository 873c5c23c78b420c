"""``python -m fastattn.env``: what can run here, and why the rest cannot."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import fastattn
from fastattn import _native, ops
from fastattn._backend import refusals

T = TypeVar("T")


def report() -> dict[str, Any]:
    """Versions, devices and, for every op, what each backend says here; plain data, for JSON.

    Each part that fails says why instead, whatever it is: a report is asked for where something
    is out of order.
    """
    parts: dict[str, Callable[[], Any]] = {
        "fastattn": lambda: fastattn.__version__ + _commit(),
        "python": platform.python_version,
        "platform": platform.platform,
        "torch": lambda: torch.__version__,
        "torch cuda": lambda: torch.version.cuda or "none: built without CUDA",
        "torch c++11 abi": lambda: str(torch.compiled_with_cxx11_abi()),
        "cudnn": lambda: str(torch.backends.cudnn.version() or "none"),
        "nvidia driver": _driver,
        "triton": partial(_version, "triton"),
        "triton driver": _triton_driver,
        "lightning (extra lra)": partial(_version, "lightning"),
        "transformers": partial(_version, "transformers"),
        "timm": partial(_version, "timm"),
        "gpus": _gpus,
        "native part": _native_part,
        "environment": _environment,
        "backends": _all_backends,
    }
    return {name: _or_why(ask) for name, ask in parts.items()}


def _or_why(ask: Callable[[], T], no: str = "none") -> T | str:
    """What it answers, or in a line why there is no answer: whatever a driver says of not being
    there, and what nobody has thought of."""
    try:
        return ask()
    except Exception as error:
        return f"{no}: {' '.join(str(error).split())} ({type(error).__name__})"


def _native_part() -> dict[str, str]:
    runs = {f"on {x}": _or_why(partial(_native.refusal, x)) or "runs" for x in ("cpu", "cuda")}
    built = _or_why(_native.built)
    if isinstance(built, str):
        return {**runs, "built": built}
    return {**runs, **{f"built: {name}": str(x) for name, x in built.items() if x != ""}}


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("FASTATTN_", "TRITON_")) or name == "CUDA_VISIBLE_DEVICES"
    }


def _all_backends() -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = _or_why(partial(_calls, device), "no")
    if isinstance(calls, str):  # a device that is there, and does not work
        return {"every op": {device: calls}}
    found = {op: _or_why(partial(_backends, call), "no") for op, call in calls.items()}
    return {op: {device: x} if isinstance(x, str) else x for op, x in found.items()}


def _calls(device: str) -> dict[str, Callable[[], Any]]:
    """Each op on inputs of an ordinary shape: (1, 1, 128, 64), or 512 rows of 1024."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.zeros(1, 1, 128, 64, device=device, dtype=dtype)
    wide = torch.zeros(16, 64, device=device)
    u, taps = torch.zeros(8, 64, 1024, device=device, dtype=dtype), wide.new_zeros(64, 1024)
    layout = ops.BlockLayout.bigbird(128)
    sums = torch.zeros(16, 128, device=device, dtype=dtype)
    return {
        "linear_attention": lambda: ops.linear_attention(q, q, q),
        "linear_attention_scan": lambda: ops.linear_attention_scan(q, q, q),
        "favor_attention": lambda: ops.favor_attention(q, q, q, wide),
        "favor_attention_scan": lambda: ops.favor_attention_scan(q, q, q, wide),
        "block_sparse_attention": lambda: ops.block_sparse_attention(q, q, q, layout),
        "linformer_attention": lambda: ops.linformer_attention(q, q, q, sums, sums),
        "fft_conv": lambda: ops.fft_conv(u, taps),
    }


def _backends(call: Callable[[], Tensor]) -> dict[str, str]:
    """Of each backend: that it runs, that it would if it were named, or why it cannot."""
    answers = refusals(call)
    named = os.environ.get("FASTATTN_BACKEND")
    first = named or next(name for name, reason in answers.items() if reason is None)
    if first not in answers:
        return dict.fromkeys(answers, f"no: FASTATTN_BACKEND={named} is not one of this op's")
    return {
        name: f"no: {reason}" if reason else "runs" if name == first else "would run if named"
        for name, reason in answers.items()
    }


def _commit() -> str:
    """The commit of a checkout, or nothing."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return f" (commit {_or_why(partial(_said, command))})"


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _version(name: str) -> str:
    if util.find_spec(name) is None:
        return "not installed"
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return getattr(import_module(name), "__version__", "unknown")


def _triton_driver() -> str:
    """What Triton compiles for here."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return f"{target.backend} {target.arch}"


def _driver() -> str:
    """The version of the GPUs' driver."""
    versions = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return ", ".join(sorted(set(versions.split()))) or "none: nvidia-smi lists no GPU"


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [_or_why(partial(_gpu, i)) for i in range(torch.cuda.device_count())]


def _gpu(i: int) -> str:
    about = torch.cuda.get_device_properties(i)
    size = f"{about.total_memory / 2**30:.0f} GiB"
    return f"{about.name}, capability {about.major}.{about.minor}, {size}"


def main(arguments: list[str] | None = None) -> int:
    """Print the report; always exits with 0."""
    parser = argparse.ArgumentParser(prog="python -m fastattn.env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(arguments).json
    if isinstance(sys.stdout, io.TextIOWrapper):  # a variable may hold any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    found = report()
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    for name, part in found.items():
        print("\n".join(_lines(name, part)))
    gpus, backends = found["gpus"], found["backends"]
    runs = backends
    if isinstance(backends, dict):
        runs = "; ".join(
            f"{op} {next((n for n, x in answers.items() if x == 'runs'), 'none')}"
            for op, answers in backends.items()
        )
    print(
        f"for an issue: fastattn {found['fastattn']}, torch {found['torch']}, triton "
        f"{found['triton']}, {gpus if isinstance(gpus, str) else ', '.join(gpus) or 'no GPU'}, "
        f"{found['platform']}: {runs}"
    )
    return 0


def _lines(name: str, part: Any, indent: str = "") -> list[str]:
    """A part of the report as text; a table's entries are indented."""
    if isinstance(part, dict):
        below = [line for key, x in part.items() for line in _lines(key, x, indent + "  ")]
        return [f"{indent}{name}:" + ("" if part else " none"), *below]
    return [f"{indent}{name}: {', '.join(part) or 'none' if isinstance(part, list) else part}"]


if __name__ == "__main__":
    sys.exit(main())
