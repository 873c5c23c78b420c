"""What a launch of a Linformer kernel needs besides its arguments, and sums of splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import _tuning
from fastattn._launch import launch


class Options(NamedTuple):
    """Everything that decides which variant of a kernel runs."""

    dtype: torch.dtype
    of: torch.dtype  # of the projection, or of what is written
    d: int
    e: int
    masked: bool
    own: bool
    unit: int
    slots: int  # how many, as the power of two that holds them
    full: bool  # they are that many
    whole: bool  # sums are not split: they are stored as what they are
    pair: bool = False
    same: bool = False  # the gradients of a pair are one


def constants(kernel: str, options: Options) -> dict[str, Any]:
    import triton.language as tl

    dot, precision = _tuning.block_sparse_dot_type(options.dtype)
    return {
        "PAIR": options.pair,
        "SAME": options.same,
        "UNIT": options.unit,
        "D": options.d,
        "E": options.e,
        "WIDTH": options.d,
        "MASKED": options.masked,
        "OWN": options.own,
        "FULL": options.full,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **tiles_of(kernel, options),
    }


def tiles_of(kernel: str, options: Options) -> dict[str, int]:
    name = kernel.split(".")[1]
    return _tuning.linformer(name, options.d, options.e, options.slots, options.dtype, options.own)


def options_of(
    x: Tensor, of: torch.dtype, e: int, hidden: Tensor | None, own: bool, slots: int, *more: Tensor
) -> Options:
    strides = [s for y in (x, *more) for s in y.stride()[:3]]
    unit = 1 if any(s % 8 for s in strides) else 8
    size = 1 << (slots - 1).bit_length()
    full = slots == size >= 16
    return Options(x.dtype, of, x.shape[3], e, hidden is not None, own, unit, size, full, False)


def add(splits: int, *sums: tuple[Tensor, Tensor]) -> None:
    """The splits of a share in float32, into what has the shape and dtype of one; of one or two."""
    (share, total), other = sums[0], sums[1] if len(sums) == 2 else (None, None)
    pair, count = len(sums) == 2, total.numel()
    options = Options(total.dtype, total.dtype, 1, 1, False, False, 1, 1, False, False, pair)
    tile = tiles_of("linformer.add", options)["BLOCK"]
    launch(
        "linformer.add", (-(-count // tile), len(sums), 1), (share, total, *other, count, splits),
        options, constants,
    )  # fmt: skip
