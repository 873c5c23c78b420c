"""What kernels read of a layout, by row and by column; of a recipe, made by two small kernels.

Importing this file imports no triton. A recipe costs two launches for samples of any length, where
its lists in torch (``block_sparse_layout``) are hundreds of operations and two sorts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _autograd, _tuning
from fastattn._launch import launch, whole
from fastattn.ops.block_sparse_layout import BlockLayout
from fastattn.ops.block_sparse_lists import Tables, tables_of
from fastattn.ops.block_sparse_plans import state_of

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "block_sparse_tables(Tensor lengths, int heads, SymInt rows, int first, int last, int left, "
    "int right, int drawn, int state, bool causal) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)  # of rows: blocks, items, merges; of columns


def tables(
    layout: BlockLayout, device: torch.device, lengths: Tensor | None = None
) -> tuple[Tables, Tables]:
    """By row and by column, for samples of so many blocks, ``(p,)``, as if each were alone.

    Made once a device where there are no lengths; never with a synchronisation.
    """
    if layout.recipe is None or layout.is_explicit:

        def explicit() -> tuple[Tables, Tables]:
            rows, columns = (tables_of(layout.lists(device, columns=x)) for x in (False, True))
            return rows, columns

        return layout.once((device, "tables"), explicit)
    if lengths is not None:
        return _evaluate(layout, whole(lengths.int()))

    def full() -> tuple[Tables, Tables]:
        return _evaluate(layout, torch.full((1,), layout.shape[0], device=device).int())

    return layout.once((device, "tables"), full)


def _evaluate(layout: BlockLayout, lengths: Tensor) -> tuple[Tables, Tables]:
    r, rows = layout.recipe, layout.shape[0]
    assert r is not None
    state = state_of(r.seed, r.layer)
    numbers = (r.first, r.last, r.left, r.right, r.num_random, state, layout.causal)
    made = _autograd.call(
        torch.ops.fastattn.block_sparse_tables.default,
        _tables,
        lengths,
        layout.num_heads,
        rows,
        *numbers,
    )
    _, cuts, parts = _cuts(rows, r.first, r.last)
    by_row, by_column = (
        Tables(blocks, None, items, merges, cuts * parts)
        for blocks, items, merges in (made[:3], made[3:])
    )
    return by_row, by_column


def _cuts(rows: int, first: int, last: int) -> tuple[int, int, int]:
    """How many entries a part has at most, how many rows are global, and their parts."""
    limit = _tuning.block_sparse_part(rows)
    return limit, min(first + last, rows), -(-rows // limit)


def _buffers(
    lengths: Tensor, heads: int, rows: int, first: int, last: int, width: int, drawn: int
) -> tuple[Tensor, ...]:
    p = lengths.shape[0]
    _, cuts, parts = _cuts(rows, first, last)
    room, items = first + last + width + drawn, cuts * parts + rows
    each = tuple(
        lengths.new_empty(shape)
        for shape in ((p, heads, rows * room + rows), (5, p, heads, items), (3, p, heads, cuts))
    )
    return *each, *(torch.empty_like(x) for x in each)


@torch.library.register_fake("fastattn::block_sparse_tables", lib=_lib)
def _(
    lengths: Any, heads: int, rows: int, first: int, last: int, left: int, right: int, drawn: int,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _buffers(lengths, heads, rows, first, last, left + right + 1, drawn)


def _constants(kernel: str, causal: bool) -> dict[str, Any]:
    return {"CAUSAL": causal, **_tuning.block_sparse_tables(kernel.split(".")[1])}


def _tables(
    lengths: Tensor, heads: int, rows: int, first: int, last: int, left: int, right: int,
    drawn: int, state: int, causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = _buffers(lengths, heads, rows, first, last, left + right + 1, drawn)
    limit, cuts, parts = _cuts(rows, first, last)
    programs = lengths.shape[0] * heads
    if not programs:
        return made
    draws, by_column = lengths.new_empty(2, programs * rows * drawn).unbind()
    room, items = first + last + left + right + 1, cuts * parts + rows
    for kernel, buffers, more, about in (
        ("block_sparse_tables.rows", made[:3], (state,), room + drawn),
        ("block_sparse_tables.columns", made[3:], (by_column,), room),
    ):
        tile = _tuning.block_sparse_tables(kernel.split(".")[1])["BLOCK"]
        launch(
            kernel,
            (programs, -(-rows // tile), 1),
            (lengths, draws, *buffers, *more, heads, rows, first, last, left, right, drawn, about,
             items, limit, cuts, parts),
            causal,
            _constants,
        )  # fmt: skip
    return made


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("block_sparse_tables", _tables, _key)
