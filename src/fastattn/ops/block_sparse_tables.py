"""What kernels read of a layout and of padding; of a recipe, made by two small kernels.

Importing this file imports no triton. A recipe costs two launches for samples of any length, where
its lists in torch (``block_sparse_recipes``) are hundreds of operations and two sorts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _autograd, _tuning
from fastattn._launch import launch, whole
from fastattn.ops.block_sparse_layout import BlockLayout
from fastattn.ops.block_sparse_lists import Tables, tables_of
from fastattn.ops.block_sparse_plans import state_of
from fastattn.ops.block_sparse_recipes import room_for

WORDS = 128  # keys that words are whole for: the largest block
_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "block_sparse_tables(Tensor lengths, int heads, SymInt rows, int first, int last, int left, "
    "int right, int drawn, int state, bool causal, bool columns) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)  # of rows: blocks, items, merges; of columns, or nothing
_autograd.one_by_one(_lib, "block_sparse_tables")


def padded(n: int, size: int) -> int:
    """n tokens in whole blocks."""
    return (n + size - 1) // size * size


def bit_words(seen: Tensor) -> Tensor:
    """``(b, s)`` bool as ``(b, words)`` int32, a bit a key, for blocks of any size: 0 behind s."""
    bits = F.pad(seen, (0, padded(seen.shape[1], WORDS) - seen.shape[1])).unflatten(1, (-1, 32))
    places = torch.arange(32, device=seen.device, dtype=torch.int32)
    return (bits.int() << places).sum(2).int()


def tables(
    layout: BlockLayout,
    device: torch.device,
    lengths: Tensor | None = None,
    *,
    columns: bool = True,
) -> tuple[Tables, Tables]:
    """By row and by column, for samples of so many blocks, ``(p,)``, as if each were alone.

    Made once a device where there are no lengths; with them in every call, without a
    synchronisation, and what is by column only if asked for.
    """
    if layout.is_explicit:

        def explicit() -> tuple[Tables, Tables]:
            rows, columns = (tables_of(layout.lists(device, columns=x)) for x in (False, True))
            return rows, columns

        return layout.once(device, "tables", explicit)
    if lengths is not None:
        return _evaluate(layout, lengths.int(), columns)

    def full() -> tuple[Tables, Tables]:
        whole_length = torch.full((1,), layout.shape[0], dtype=torch.int32, device=device)
        return _evaluate(layout, whole_length, True)

    return layout.once(device, "tables", full)


def _evaluate(layout: BlockLayout, lengths: Tensor, columns: bool) -> tuple[Tables, Tables]:
    r, rows = layout.recipe, layout.shape[0]
    assert r is not None
    first, last, left, right, drawn = (
        room_for(x, rows) for x in (r.first, r.last, r.left, r.right, r.num_random)
    )
    numbers = (first, last, left, right, drawn, state_of(r.seed, r.layer), layout.causal, columns)
    made = _autograd.call(
        torch.ops.fastattn.block_sparse_tables.default,
        _tables,
        lengths,
        layout.num_heads,
        rows,
        *numbers,
    )
    cuts, parts = _cuts(rows, first, last)
    by_row, by_column = (
        Tables(blocks, None, items, merges, cuts * parts)
        for blocks, items, merges in (made[:3], made[3:])
    )
    return by_row, by_column


def _cuts(rows: int, first: int, last: int) -> tuple[int, int]:
    """How many rows may be global, and the parts of each."""
    return min(first + last, rows), -(-rows // _tuning.block_sparse_part(rows))


def _buffers(
    lengths: Tensor,
    heads: int,
    rows: int,
    first: int,
    last: int,
    width: int,
    drawn: int,
    columns: bool,
) -> tuple[Tensor, ...]:
    p = lengths.shape[0]
    cuts, parts = _cuts(rows, first, last)
    room, items = first + last + width + drawn, cuts * parts + rows
    each = tuple(
        lengths.new_empty(shape)
        for shape in (
            (p, heads, rows * room + rows),
            (5, p, heads, items),
            (3, p, heads, cuts),
        )
    )
    return *each, *(torch.empty_like(x) if columns else x.new_empty((0,) * x.dim()) for x in each)


@torch.library.register_fake("fastattn::block_sparse_tables", lib=_lib)
def _(
    lengths: Any, heads: int, rows: int, first: int, last: int, left: int, right: int, drawn: int,
    state: int, causal: bool, columns: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _buffers(lengths, heads, rows, first, last, left + right + 1, drawn, columns)


def _constants(kernel: str, causal: bool) -> dict[str, Any]:
    return {"CAUSAL": causal, **_tuning.block_sparse_tables(kernel.split(".")[1])}


def _tables(
    lengths: Tensor, heads: int, rows: int, first: int, last: int, left: int, right: int,
    drawn: int, state: int, causal: bool, columns: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    lengths = whole(lengths)
    made = _buffers(lengths, heads, rows, first, last, left + right + 1, drawn, columns)
    limit, (cuts, parts) = _tuning.block_sparse_part(rows), _cuts(rows, first, last)
    programs = lengths.shape[0] * heads
    if not programs:
        return made
    draws, by_column = (lengths.new_empty(programs * rows * drawn) for _ in range(2))
    room, items = first + last + left + right + 1, cuts * parts + rows
    for kernel, buffers, more, about in (
        ("block_sparse_tables.rows", made[:3], (state,), room + drawn),
        ("block_sparse_tables.columns", made[3:], (by_column,), room),
    )[: 2 if columns else 1]:
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
