"""What decides which variant of a FAVOR+ kernel runs, and its constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import _tuning


class Options(NamedTuple):
    """Everything that decides which variant of a kernel runs."""

    dtype: torch.dtype
    d: int
    e: int
    m: int
    own: bool
    relu: bool
    offset: bool
    masked: bool
    packed: bool
    unit: int
    backwards: bool = False  # of sums over splits


def constants(kernel: str, options: Options) -> dict[str, Any]:
    """All constants, by the names that the kernels have for them, and the tiles."""
    import triton.language as tl

    dot, precision = _tuning.dot_type(options.dtype)
    return {
        "UNIT": options.unit,
        "D": options.d,
        "E": options.e,
        "M": options.m,
        "OWN": int(options.own),
        "RELU": options.relu,
        "OFFSET": options.offset,
        "MASKED": options.masked,
        "PACKED": options.packed,
        "BACKWARDS": options.backwards,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **tiles(kernel, options),
    }


def tiles(kernel: str, options: Options) -> dict[str, int]:
    module, name = kernel.split(".")
    choose = _tuning.favor_causal if module.startswith("favor_causal") else _tuning.favor
    return choose(name, options.d, options.e, options.m, options.dtype)


def sizes(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """How many heads and key heads of how many sequences."""
    b = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return b * q.shape[1], b * k.shape[1]


def options_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    cu_seqlens: Any,
    directions: Tensor,
    offsets: Any,
    curvature: float | None,
) -> Options:
    """Strides count as aligned if all are multiples of 8 elements."""
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    unit = 1 if any(s % 8 for s in strides) else 8
    heads, m, d = directions.shape
    given = (offsets is not None, mask is not None, cu_seqlens is not None)
    return Options(q.dtype, d, v.shape[3], m, heads > 1, curvature is None, *given, unit)


def blocks_of(kernel: str, options: Options) -> int:
    """Into how many blocks the features are cut."""
    return -(-options.m // tiles(kernel, options)["BLOCK_M"])
