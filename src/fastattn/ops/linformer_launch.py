"""The launches that compress tokens and their gradients, and what every launch here needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import _tuning
from fastattn._launch import Plan, launch, planned

LOG2E = 1.4426950408889634


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
    strides: Sequence[int], slots: int, dtype: torch.dtype, of: torch.dtype, d: int, e: int,
    masked: bool, own: bool = False, pair: bool = False,
) -> Options:  # fmt: skip
    """Strides count as aligned if all are multiples of 8 elements."""
    unit = 1 if any(s % 8 for s in strides) else 8
    size = 1 << (slots - 1).bit_length()
    return Options(dtype, of, d, e, masked, own, unit, size, slots == size >= 16, False, pair)


def add(splits: int, *sums: tuple[Tensor, Tensor]) -> None:
    """The splits of a share in float32, into what has the shape and dtype of one; of one or two."""
    (share, total), other = sums[0], sums[1] if len(sums) == 2 else (None, None)
    grid, numbers, options, _ = _plan_of_add(total.numel(), splits, total.dtype, len(sums))
    launch("linformer.add", grid, (share, total, *other, *numbers), options, constants)


@planned
def _plan_of_add(count: int, splits: int, dtype: torch.dtype, sums: int) -> Plan:
    options = Options(dtype, dtype, 1, 1, False, False, 1, 1, False, False, sums == 2)
    tile = tiles_of("linformer.add", options)["BLOCK"]
    return Plan((-(-count // tile), sums, 1), (count, splits), options)


def alike(given: list[Any]) -> list[Any]:
    """One group, or groups of one where the strides of two tensors that kernels read differ."""
    if len(given) == 2 and any(a.stride() != b.stride() for a, b in zip(*given, strict=True)):
        return [[one] for one in given]
    return [given] if given else []


def launch_compress(hidden: Tensor | None, *group: tuple[Tensor, Tensor, Tensor]) -> None:
    x, proj, made = group[0]
    grid, numbers, options, splits = _plan_of_compress(
        x.shape, x.stride(), proj.stride(), made.shape, x.dtype, proj.dtype, hidden is not None,
        len(group), x.device,
    )  # fmt: skip
    each, size = group, splits * made.numel()
    if splits > 1:
        each = tuple((y, p, y.new_empty(size, dtype=torch.float32)) for y, p, _ in group)
    launch("linformer.compress", grid, (*_flat(each), hidden, *numbers), options, constants)
    if splits > 1:
        add(splits, *((share, of) for (*_, share), (*_, of) in zip(each, group, strict=True)))


@planned
def _plan_of_compress(
    shape: Sequence[int], strides: Sequence[int], proj_strides: Sequence[int],
    made: Sequence[int], dtype: torch.dtype, of: torch.dtype, masked: bool, count: int,
    device: torch.device,
) -> Plan:  # fmt: skip
    (b, h_kv, s, d), (_, heads, slots, _) = shape, made
    strides, own = strides[:3], len(proj_strides) == 3
    options = options_of(strides, slots, dtype, of, d, d, masked, own=own, pair=count == 2)
    tiles = tiles_of("linformer.compress", options)
    columns = _columns(heads if own else h_kv, d, own, tiles["BLOCK_C"])
    slot_tiles = -(-slots // tiles["BLOCK_K"]) * count
    splits = _tuning.linformer_splits(b * columns * slot_tiles, s, device, 2)
    numbers = (*strides, *_rows_of(proj_strides), heads, _readers(heads, h_kv, own), s, slots, b)
    return Plan(
        (b * columns, splits, slot_tiles),
        (*numbers, columns),
        options._replace(whole=splits == 1),
        splits,
    )


def _readers(heads: int, h_kv: int, own: bool) -> int:
    """How many of the heads that come out read one head of tokens."""
    return heads // h_kv if own else 1


def _columns(heads: int, d: int, own: bool, tile: int) -> int:
    """Tiles of columns in a sample: one of these heads each, or of all heads side by side."""
    return heads if own else -(-heads * d // tile)


def _rows_of(strides: Sequence[int]) -> tuple[int, int]:
    """Strides of a projection's heads and rows."""
    return (strides[0] if len(strides) == 3 else 0), strides[-2]


def _flat(group: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor | None, ...]:
    """Three tensors of one and of another, or None for those."""
    return (*group[0], *(group[1] if len(group) == 2 else (None,) * 3))


def launch_grad_tokens(
    hidden: Tensor | None, same: bool, *group: tuple[Tensor, Tensor, Tensor]
) -> None:
    """``same``: both add to one gradient."""
    dslots, proj, dx = group[0]
    grid, numbers, options, _ = _plan_of_grad_tokens(
        dx.shape, dx.stride(), proj.stride(), dslots.shape, dx.dtype, proj.dtype,
        hidden is not None, len(group), same,
    )  # fmt: skip
    kernel = "linformer_backward.grad_tokens"
    launch(kernel, grid, (*_flat(group), hidden, *numbers), options, constants)


@planned
def _plan_of_grad_tokens(
    shape: Sequence[int], strides: Sequence[int], proj_strides: Sequence[int],
    dslots: Sequence[int], dtype: torch.dtype, of: torch.dtype, masked: bool, count: int,
    same: bool,
) -> Plan:  # fmt: skip
    (b, h_kv, s, d), (_, heads, slots, _) = shape, dslots
    own = len(proj_strides) == 3
    options = options_of(strides[:3], slots, dtype, of, d, d, masked, own=own, pair=count == 2)
    tiles = tiles_of("linformer_backward.grad_tokens", options)
    columns = _columns(h_kv, d, own, tiles["BLOCK_C"])
    return Plan(
        (b * columns * -(-s // tiles["BLOCK_N"]), 1 if same else count, 1),
        (*_rows_of(proj_strides), h_kv, _readers(heads, h_kv, own), s, slots, columns),
        options._replace(same=same),
    )


def launch_grad_projection(hidden: Tensor | None, *group: tuple[Tensor, Tensor, Tensor]) -> None:
    x, dslots, dproj = group[0]
    if x.shape[2] < dproj.shape[-1]:
        for *_, of in group:
            of.zero_()
    grid, numbers, options, _ = _plan_of_grad_projection(
        x.shape, x.stride(), dslots.shape, dproj.stride(), x.dtype, dproj.dtype,
        hidden is not None, len(group),
    )  # fmt: skip
    kernel = "linformer_backward.grad_projection"
    launch(kernel, grid, (*_flat(group), hidden, *numbers), options, constants)


@planned
def _plan_of_grad_projection(
    shape: Sequence[int], strides: Sequence[int], dslots: Sequence[int],
    proj_strides: Sequence[int], dtype: torch.dtype, of: torch.dtype, masked: bool, count: int,
) -> Plan:  # fmt: skip
    (b, h_kv, s, d), (_, heads, slots, _) = shape, dslots
    strides, own = strides[:3], len(proj_strides) == 3
    options = options_of(strides, slots, dtype, of, d, d, masked, own=own, pair=count == 2)
    tiles = tiles_of("linformer_backward.grad_projection", options)
    return Plan(
        (
            -(-s // tiles["BLOCK_N"]),
            -(-slots // tiles["BLOCK_K"]),
            (heads if own else 1) * count,
        ),
        (*strides, *_rows_of(proj_strides), heads, _readers(heads, h_kv, own), s, slots, b),
        options,
    )


@planned
def plan_of_attend(
    shape: Sequence[int], strides: Sequence[int], keys: Sequence[int], e: int, dtype: torch.dtype,
    masked: bool, scale: float, device: torch.device,
) -> Plan:  # fmt: skip
    (b, h, n, d), (_, heads, slots, _) = shape, keys
    return Plan(
        (b * h, _tuning.linear_attention_splits(b * h, device), 1),
        (*strides[:3], h, h // heads, n, slots, scale * LOG2E),
        options_of(strides[:3], slots, dtype, dtype, d, e, masked),
    )


@planned
def plan_of_grad_slots(
    shape: Sequence[int], strides: Sequence[int], keys: Sequence[int], e: int,
    dout_strides: Sequence[int], dtype: torch.dtype, masked: bool, scale: float,
    device: torch.device,
) -> Plan:  # fmt: skip
    """Sums are not split where one program has all keys of all heads that read them."""
    (b, h, n, d), (_, heads, slots, _) = shape, keys
    steps = (*strides[:3], *dout_strides[:3])
    options = options_of(steps, slots, dtype, dtype, d, e, masked)
    programs = -(-slots // tiles_of("linformer_backward.grad_slots", options)["BLOCK_K"])
    splits = _tuning.linformer_splits(b * h * programs, n, device, 1)
    written = dtype if programs == 1 else torch.float32  # the gradients of queries
    return Plan(
        (b * h, splits, programs),
        (*steps, h, h // heads, n, slots, b, scale * LOG2E, scale),
        options._replace(of=written, whole=splits == 1 and h == heads),
        splits,
    )
