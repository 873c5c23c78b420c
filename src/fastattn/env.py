"""``python -m fastattn.env``: what can run here, and why the rest cannot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import import_module, metadata, util
from typing import Any

import torch

import fastattn
from fastattn import _native
from fastattn.ops.block_sparse import BACKENDS as BLOCK_SPARSE
from fastattn.ops.favor import BACKENDS as FAVOR
from fastattn.ops.fft_conv import BACKENDS as FFT_CONV
from fastattn.ops.linear_attention import BACKENDS as LINEAR
from fastattn.ops.linformer import BACKENDS as LINFORMER

BACKENDS = LINEAR | FAVOR | FFT_CONV
BACKENDS |= {"block_sparse_attention": BLOCK_SPARSE, "linformer_attention": LINFORMER}


def report() -> dict[str, Any]:
    """Versions, devices and, for every op, the backends it has here; plain data, for JSON."""
    gpu = torch.cuda.is_available()
    native = _native.refusal("cuda" if gpu else "cpu") is None
    return {
        "fastattn": fastattn.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch cuda": torch.version.cuda or "none: built without CUDA",
        "triton": _version("triton"),
        "lightning (extra lra)": _version("lightning"),
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
        "backends, the first runs": {
            op: ", ".join(
                sorted((x for x in names if x != "native" or native), key=lambda x: _last(x, gpu))
            )
            for op, names in BACKENDS.items()
        },
    }


def _last(backend: str, gpu: bool) -> bool:
    """Without a GPU Triton is interpreted, and must be named."""
    return backend == "triton" and not gpu


def _version(name: str) -> str:
    if util.find_spec(name) is None:
        return "not installed"
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return getattr(import_module(name), "__version__", "unknown")


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [
        f"{torch.cuda.get_device_name(i)}, capability {'.'.join(map(str, capability))}"
        for i in range(torch.cuda.device_count())
        for capability in [torch.cuda.get_device_capability(i)]
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the report; always exits with 0."""
    parser = argparse.ArgumentParser(prog="python -m fastattn.env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    found = report()
    if parser.parse_args(arguments).json:
        print(json.dumps(found, indent=2))
        return 0
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{key}:" + ("" if value else " none"))
            for name, entry in value.items():
                print(f"  {name}: {entry}")
        else:
            print(f"{key}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
