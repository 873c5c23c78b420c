"""The launches that compress tokens and their gradients, and what every launch here needs."""

from __future__ import annotations

from collections.abc import Sequence
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


def _heads_of(x: Tensor, proj: Tensor, heads: int) -> int:
    """How many of the heads that come out read one head of x."""
    return heads // x.shape[1] if proj.dim() == 3 else 1


def _columns(x: Tensor, proj: Tensor, heads: int, tile: int) -> int:
    """Tiles of columns in a sample: one of these heads each, or of all heads of x side by side."""
    return heads if proj.dim() == 3 else -(-x.shape[1] * x.shape[3] // tile)


def _strides_of(proj: Tensor) -> tuple[int, int]:
    return (proj.stride(0) if proj.dim() == 3 else 0), proj.stride(-2)


def alike(given: list[Any]) -> list[Any]:
    """One group, or groups of one where the strides of two tensors that kernels read differ."""
    if len(given) == 2 and any(a.stride() != b.stride() for a, b in zip(*given, strict=True)):
        return [[one] for one in given]
    return [given] if given else []


def launch_compress(hidden: Tensor | None, *group: tuple[Tensor, Tensor, Tensor]) -> None:
    x, proj, slots_of = group[0]
    (b, _, s, d), (_, heads, slots, _) = x.shape, slots_of.shape
    options = options_of(x, proj.dtype, d, hidden, proj.dim() == 3, slots)
    tiles = tiles_of("linformer.compress", options)
    g, columns = _heads_of(x, proj, heads), _columns(x, proj, heads, tiles["BLOCK_C"])
    slot_tiles = -(-slots // tiles["BLOCK_K"]) * len(group)
    splits = _tuning.linformer_splits(b * columns * slot_tiles, s, x.device, 2)
    one, size = splits == 1, splits * slots_of.numel()
    shares = [m if one else x.new_empty(size, dtype=torch.float32) for *_, m in group]
    each = [(y, p, share) for (y, p, _), share in zip(group, shares, strict=True)]
    launch(
        "linformer.compress",
        (b * columns, splits, slot_tiles),
        (*_flat(each), hidden, *x.stride()[:3], *_strides_of(proj), heads, g, s, slots, b, columns),
        options._replace(whole=one, pair=len(group) == 2),
        constants,
    )
    if not one:
        add(splits, *((share, m) for share, (*_, m) in zip(shares, group, strict=True)))


def _flat(group: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor | None, ...]:
    """Three tensors of one and of another, or None for those."""
    return (*group[0], *(group[1] if len(group) == 2 else (None,) * 3))


def launch_grad_tokens(
    hidden: Tensor | None,
    shape: Sequence[int],
    same: bool,
    *group: tuple[Tensor, Tensor, Tensor],
) -> None:
    """``same``: both add to one gradient."""
    (b, h_kv, s, d), (dslots, proj, dx) = shape, group[0]
    (_, heads, slots, _), kernel = dslots.shape, "linformer_backward.grad_tokens"
    options = options_of(dx, proj.dtype, d, hidden, proj.dim() == 3, slots)
    tiles = tiles_of(kernel, options)
    columns = _columns(dx, proj, h_kv, tiles["BLOCK_C"])
    launch(
        kernel,
        (b * columns * -(-s // tiles["BLOCK_N"]), 1 if same else len(group), 1),
        (*_flat(group), hidden, *_strides_of(proj), h_kv, _heads_of(dx, proj, heads), s, slots,
         columns),
        options._replace(pair=len(group) == 2, same=same),
        constants,
    )  # fmt: skip


def launch_grad_projection(hidden: Tensor | None, *group: tuple[Tensor, Tensor, Tensor]) -> None:
    x, dslots, dproj = group[0]
    (b, _, s, d), (_, heads, slots, _) = x.shape, dslots.shape
    own, kernel = dproj.dim() == 3, "linformer_backward.grad_projection"
    if s < dproj.shape[-1]:
        for *_, of in group:
            of.zero_()
    options = options_of(x, dproj.dtype, d, hidden, own, slots)
    tiles = tiles_of(kernel, options)
    count = (heads if own else 1) * len(group)
    launch(
        kernel,
        (-(-s // tiles["BLOCK_N"]), -(-slots // tiles["BLOCK_K"]), count),
        (*_flat(group), hidden, *x.stride()[:3], *_strides_of(dproj), heads,
         _heads_of(x, dproj, heads), s, slots, b),
        options._replace(pair=len(group) == 2),
        constants,
    )  # fmt: skip
