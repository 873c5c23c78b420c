"""What causal FAVOR+ keeps between chunks while a pass runs: sums of features, and their launches.

Importing this file imports no triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import _tuning
from fastattn._launch import launch
from fastattn.ops.favor_variants import Options, blocks_of, constants, sizes, tiles


def programs_of(q: Tensor, cu_seqlens: Tensor | None, rows: int) -> int:
    """Into how many splits a sequence is cut, where its states are known."""
    if cu_seqlens is None:
        return _tuning.favor_causal_programs(q.shape[2])
    return _tuning.linear_attention_splits(rows, q.device)


def reading(options: Options, splits: int) -> Options:
    """Of kernels that read states: those of a split begin at zero."""
    return options._replace(before=splits > 1 or options.state)


def lift_keys(k: Tensor, table: Tensor, options: Options, curvature: float) -> Tensor:
    b, h_kv, n, _ = k.shape
    half = table.new_empty(b * h_kv * n * 16)
    if not options.relu:
        launch(
            "favor_causal.lift_keys",
            (b * h_kv * -(-n // tiles("favor_causal.lift_keys", options)["BLOCK_N"]), 1, 1),
            (k, half, *k.stride()[:3], h_kv, n, curvature),
            options,
            constants,
        )
    return half


class Sums(NamedTuple):
    """S and z at every chunk, and at every split; the splits' shares; and how many splits."""

    states: tuple[Tensor, ...]
    shares: Tensor
    splits: int


def new_sums(x: Tensor, e: int, cu_seqlens: Tensor | None, table: Tensor, options: Options) -> Sums:
    m, chunk = options.m, _tuning.favor_chunk(options.d, e, options.dtype)
    (b, heads, n), rows = x.shape[:3], sizes(x, x, cu_seqlens)[0]
    if cu_seqlens is None:
        chunks = b * -(-n // chunk) * heads
    else:
        chunks = (n // chunk + cu_seqlens.shape[0]) * heads
    programs = rows * blocks_of("favor_causal.states", options)
    splits = _tuning.favor_causal_splits(programs, x.device)
    shares = table.new_empty(rows * splits * m * (e + 1), dtype=torch.float32)
    before = rows * splits * m if splits > 1 or options.state else 0
    numbers = (chunks * m * e, chunks * 3 * m, before * e, before * 3)
    return Sums(tuple(table.new_empty(count) for count in numbers), shares, splits)


def carry(rows: int, sums: Sums, options: Options, ends: tuple[Tensor, ...]) -> None:
    """``ends``: with a state, the sums to start with, and where those to end with go."""
    if sums.splits > 1 or options.state:
        launch(
            "favor_causal.carry",
            (rows, blocks_of("favor_causal.carry", options), 1),
            (sums.shares, *sums.states[2:], *(ends or (None,) * 4), sums.splits),
            options,
            constants,
        )


def states_before(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    table: Tensor,
    lifted: Tensor,
    half: Tensor,
    options: Options,
    ends: tuple[Tensor, ...],
) -> tuple[tuple[Tensor, ...], int]:
    """S and z before every chunk, of its split; and before every split; and how many splits."""
    sums = new_sums(k, options.e, cu_seqlens, table, options)
    rows = sizes(k, k, cu_seqlens)[0]
    launch(
        "favor_causal.states",
        (rows, sums.splits, blocks_of("favor_causal.states", options)),
        (k, v, mask, cu_seqlens, table, lifted, half, sums.shares, *sums.states[:2],
         *k.stride()[:3], *v.stride()[:3], k.shape[1], k.shape[2]),
        options,
        constants,
    )  # fmt: skip
    carry(rows, sums, options, ends)
    return sums.states, sums.splits
