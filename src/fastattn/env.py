"""``python -m fastattn.env``: what can run here, and why the rest cannot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import _native, ops
from fastattn._backend import refusals


def report() -> dict[str, Any]:
    """Versions, devices and, for every op, what each backend says here; plain data, for JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "fastattn": fastattn.__version__ + _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch cuda": torch.version.cuda or "none: built without CUDA",
        "torch c++11 abi": str(torch.compiled_with_cxx11_abi()),
        "cudnn": _or_why(lambda: str(torch.backends.cudnn.version() or "none")),
        "nvidia driver": _or_why(_driver),
        "triton": _version("triton"),
        "triton driver": _or_why(_triton_driver),
        "lightning (extra lra)": _version("lightning"),
        "transformers": _version("transformers"),
        "timm": _version("timm"),
        "gpus": _gpus(),
        "native part": {
            **{f"on {x}": _native.refusal(x) or "runs" for x in ("cpu", "cuda")},
            **{f"built: {name}": str(x) for name, x in _native.built().items() if x != ""},
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("FASTATTN_", "TRITON_")) or name == "CUDA_VISIBLE_DEVICES"
        },
        "backends": _all_backends(device),
    }


def _all_backends(device: str) -> dict[str, dict[str, str]]:
    try:
        return {op: _backends(call) for op, call in _calls(device).items()}
    except Exception as error:  # a device that is there, and does not work
        return {"every op": {device: f"no: {error}"}}


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
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" (commit {done.stdout.strip()})"


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
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return ", ".join(sorted(set(done.stdout.split()))) or "none: nvidia-smi lists no GPU"


def _or_why(ask: Callable[[], str]) -> str:
    """What it answers, or why there is no answer: whatever a driver says of not being there."""
    try:
        return ask()
    except Exception as error:
        return f"none: {error}"


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
    found = report()
    if parser.parse_args(arguments).json:
        print(json.dumps(found, indent=2))
        return 0
    backends = found.pop("backends")
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{key}:" + ("" if value else " none"))
            for name, entry in value.items():
                print(f"  {name}: {entry}")
        else:
            print(f"{key}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
    print("backends:")
    for op, answers in backends.items():
        print(f"  {op}:")
        for name, answer in answers.items():
            print(f"    {name}: {answer}")
    runs = "; ".join(
        f"{op} {next((n for n, x in answers.items() if x == 'runs'), 'none')}"
        for op, answers in backends.items()
    )
    print(
        f"for an issue: fastattn {found['fastattn']}, torch {found['torch']}, triton "
        f"{found['triton']}, {', '.join(found['gpus']) or 'no GPU'}, {found['platform']}: {runs}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
