"""What decides which variant of a FAVOR+ kernel runs, and its constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import _tuning
from fastattn._launch import heads_inside

LOG2E = 1.4426950408889634


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
    state: bool = False  # a scan
    before: bool = False  # states of splits: what is before each counts, too
    backwards: bool = False  # of sums over splits
    learned: bool = False  # the gradient of directions, instead of that of tokens


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
        "STATE": options.state,
        "BEFORE": options.before,
        "BACKWARDS": options.backwards,
        "LEARNED": options.learned,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **tiles(kernel, options),
    }


def tiles(kernel: str, options: Options) -> dict[str, int]:
    module, name = kernel.split(".")
    if name == "step":
        return _tuning.favor_step(options.d, options.e, options.m)
    shape = (name, options.d, options.e, options.m, options.dtype)
    if module.startswith("favor_causal"):
        return _tuning.favor_causal(*shape, options.before)
    return _tuning.favor(*shape)


def to_base_2(factor: float, relu: bool) -> float:
    """What directions are multiplied by, so that their products are logarithms to base 2."""
    return factor if relu else factor * LOG2E


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


def backward_buffers(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [heads_inside(x, x.shape[3]) for x in (q, k, v)]


def gradients_of(directions: Tensor) -> list[Tensor]:
    """New memory for the gradients of directions and offsets."""
    return [directions.new_empty(directions.shape), directions.new_empty(directions.shape[:2])]


def shares_of_directions(
    table: Tensor, rows: int, kernel: str, options: Options
) -> tuple[Tensor, tuple[int, int, int]]:
    """Room for what every program adds to the gradients of directions and offsets; the grid."""
    blocks = blocks_of(kernel, options)
    splits = _tuning.linear_attention_splits(rows * blocks, table.device)
    shape = (rows, splits, options.m * (options.d + 1))
    return table.new_empty(shape, dtype=torch.float32), (rows, splits, blocks)


def add_directions(
    shares: list[Tensor], sequences: int, h_kv: int, factor: float, options: Options
) -> list[Tensor]:
    """The gradients of directions (h_kv or 1, m, d) and of offsets (h_kv or 1, m)."""
    over = (0, 2, 3) if options.own else (0, 1, 2, 3)  # sequences, key heads, their heads, splits
    total: Any = 0
    for x in shares:
        heads = x.view(sequences, h_kv, -1, *x.shape[1:])
        total = total + heads.sum(over)
    total = total.view(h_kv if options.own else 1, -1)
    m, d = options.m, options.d
    return [total[:, : m * d].reshape(-1, m, d) * factor, total[:, m * d :].contiguous()]
