"""The native part, if it was built and loads; and why not."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


@cache
def load() -> tuple[ModuleType | None, str]:
    """``fastattn._C``, or None and the reason."""
    try:
        return import_module("fastattn._C"), ""
    except ModuleNotFoundError:
        reason = built().get("reason") or "FASTATTN_NATIVE=0, or the package was not built here"
        return None, f"fastattn was installed without its native part: {reason}"
    except ImportError as error:
        return None, f"the native part does not load: {error}"


def built() -> dict[str, Any]:
    """What setup.py wrote down."""
    try:
        found: dict[str, Any] = import_module("fastattn._build_info").NATIVE
    except ModuleNotFoundError:
        return {}
    return found


def part() -> Any:
    """The module, for who has asked for the refusal."""
    return load()[0]


@torch.compiler.assume_constant_result  # to a compiler, which cannot follow an import
def refusal(device: str) -> str | None:
    """Why the native part cannot run on such a device, or None."""
    return _refusal(device)


@cache
def _refusal(device: str) -> str | None:
    module, reason = load()
    if module is None:
        return reason
    if device == "cpu":
        return module.cpu_refusal() or None
    if device != "cuda":
        return f"the inputs are on {device}, it needs the CPU or CUDA"
    if not built().get("cuda"):
        return f"the native part was built without CUDA: {built().get('cuda reason')}"
    return module.cuda_refusal() or _not_built_for(built()["archs"])


def _not_built_for(archs: list[str]) -> str | None:
    """Of GPUs that are here: a generation runs what was built for it, up to its own, and every
    later one what was built for the newest."""
    compiled = [int(x.rstrip("af")) for x in archs]
    for device in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(device)
        here = 10 * major + minor
        if here < max(compiled) and not any(x // 10 == major and x <= here for x in compiled):
            return (
                f"the native part was built for GPUs of {', '.join(archs)}, and GPU {device} is of "
                f"{here}: install it with FASTATTN_CUDA_ARCHS={here}"
            )
    return None
