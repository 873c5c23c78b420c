"""The Triton path of block-sparse attention: one registered operator forward and one backward.

Importing this file imports no triton. Between forward and backward are kept the inputs, the output
and the log-sum of every row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd, _tuning
from fastattn._launch import dense, heads_inside, launch, merged, whole
from fastattn.ops.block_sparse_layout import BlockLayout
from fastattn.ops.block_sparse_lists import LOG2E, Tables
from fastattn.ops.block_sparse_tables import WORDS, bit_words, padded, tables
from fastattn.ops.block_sparse_torch import in_blocks, visible_keys
from fastattn.ops.philox import threshold

_lib = torch.library.Library("fastattn", "FRAGMENT")
_ABOUT = "Tensor? words, Tensor? lengths, Tensor? seed"
_ROWS = "Tensor blocks, Tensor? weight, Tensor items, Tensor merges, SymInt parts"
_COLUMNS = _ROWS.replace(" blocks", " by_column").replace("weight", "column_weight")
_COLUMNS = _COLUMNS.replace("items", "column_items").replace("merges", "column_merges")
_COLUMNS = _COLUMNS.replace("parts", "column_parts")
_NUMBERS = "int size, bool causal, float scale, float dropout_p"
_lib.define(
    f"block_sparse_forward(Tensor q, Tensor k, Tensor v, {_ABOUT}, {_ROWS}, {_NUMBERS}) "
    "-> (Tensor, Tensor)"
)  # out, lse
_lib.define(
    "block_sparse_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ABOUT}, {_ROWS}, {_COLUMNS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
)  # dq, dk, dv
_autograd.one_by_one(_lib, "block_sparse_forward", "block_sparse_backward")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    key_padding_mask: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """:func:`fastattn.ops.block_sparse_attention`, behind its door."""
    seen = visible_keys(k.shape[2], key_padding_mask, lengths, q.device)
    words = None if seen is None else bit_words(seen)
    blocks = in_blocks(lengths, layout.block_size)
    needed = _autograd.needs_gradient(q, k, v)
    rows, columns = tables(layout, q.device, blocks, columns=needed)
    numbers = (layout.block_size, layout.causal, scale, dropout_p)
    about = (words, lengths, seed)
    if not needed:
        return _call_forward(q, k, v, *about, *rows, *numbers)[0]
    out: Tensor = _autograd.apply(_BlockSparse, q, k, v, *about, *rows, *columns, *numbers)[0]
    return out


def _call_forward(*arguments: Any) -> Any:
    return _autograd.call(torch.ops.fastattn.block_sparse_forward.default, _forward, *arguments)


class _BlockSparse(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        words: Tensor | None,
        lengths: Tensor | None,
        seed: Tensor | None,
        blocks: Tensor,
        weight: Tensor | None,
        items: Tensor,
        merges: Tensor,
        parts: int,
        by_column: Tensor,
        column_weight: Tensor | None,
        column_items: Tensor,
        column_merges: Tensor,
        column_parts: int,
        *numbers: Any,
    ) -> Any:
        about = (words, lengths, seed, blocks, weight, items, merges, parts)
        return tuple(_call_forward(q, k, v, *about, *numbers))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, *about = inputs
        tensors = [x for x in about if x is None or isinstance(x, Tensor)]
        ctx.numbers = [x for x in about if x is not None and not isinstance(x, Tensor)]
        ctx.save_for_backward(q, k, v, *output, *tensors)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # the check costs something, and is needed under create_graph only
        return (_backward_once if torch.is_grad_enabled() else _backward_pass)(ctx, *grads)


def _backward_pass(ctx: Any, dout: Tensor | None, _: None) -> Any:
    if dout is None:
        return (None,) * 20
    *tensors, by_column, column_weight, column_items, column_merges = ctx.saved_tensors
    parts, column_parts, *numbers = ctx.numbers
    columns = (by_column, column_weight, column_items, column_merges, column_parts)
    operator = torch.ops.fastattn.block_sparse_backward.default
    arguments = (dout, *tensors, parts, *columns, *numbers)
    return *_autograd.call_once(operator, _backward, *arguments), *(None,) * 17


_backward_once = once_differentiable(_backward_pass)


def _forward_buffers(q: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The log-sums are of whole blocks: inf behind the last row."""
    b, h, n, _ = q.shape
    lse = q.new_empty(b * h * padded(n, size), dtype=torch.float32)
    return heads_inside(q, v.shape[3]), lse


def _backward_buffers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (heads_inside(x, x.shape[3]) for x in (q, k, v))
    return dq, dk, dv


@torch.library.register_fake("fastattn::block_sparse_forward", lib=_lib)
def _(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    return _forward_buffers(q, v, rest[-4])


@torch.library.register_fake("fastattn::block_sparse_backward", lib=_lib)
def _(dout: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_buffers(q, k, v)


class _Options(NamedTuple):
    """Everything that decides which variant of a kernel runs."""

    dtype: torch.dtype
    d: int
    e: int
    size: int
    masked: bool
    lengths: bool
    weighted: bool
    causal: bool
    drops: bool
    full: bool
    unit: int
    both: bool = False  # of the kernel that adds: dk and dv, not dq

    def of_sums(self) -> _Options:
        """For kernels that see sums of parts alone."""
        return self._replace(
            masked=False, weighted=False, causal=False, drops=False, full=False, unit=8
        )


def _constants(kernel: str, options: _Options) -> dict[str, Any]:
    """All constants, by the names that the kernels have for them, and the tiles."""
    import triton.language as tl

    dot, precision = _tuning.block_sparse_dot_type(options.dtype)
    return {
        "UNIT": options.unit,
        "BOTH": options.both,
        "D": options.d,
        "E": options.e,
        "SIZE": options.size,
        "MASKED": options.masked,
        "LENGTHS": options.lengths,
        "WEIGHTED": options.weighted,
        "CAUSAL": options.causal,
        "DROPS": options.drops,
        "FULL": options.full,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **_tiles(kernel, options),
    }


def _tiles(kernel: str, options: _Options) -> dict[str, int]:
    name = kernel.split(".")[1]
    about = options.d, options.e, options.size, options.dtype, options.masked
    return _tuning.block_sparse(name, *about)


class _Sizes(NamedTuple):
    """By the names that the kernels have for them."""

    H: int
    G: int
    N: int
    S: int
    PADDED: int
    WORDS: int
    ITEMS: int
    PLANE: int
    ROOM: int
    TABLE_B: int
    TABLE_H: int
    SHARES: int
    THRESHOLD: int


class _Call(NamedTuple):
    """What the launches of one pass share."""

    q: Tensor
    k: Tensor
    v: Tensor
    words: Tensor | None
    lengths: Tensor | None
    seed: Tensor | None
    strides: tuple[int, ...]
    options: _Options
    scale: float
    dropout_p: float

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.words, self.lengths, self.seed

    @property
    def heads(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    def sizes(self, of: Tables) -> _Sizes:
        _, p, h, items = of.items.shape
        _, heads, n, _ = self.q.shape
        _, heads_kv, s, _ = self.k.shape
        return _Sizes(
            heads,
            heads // heads_kv,
            n,
            s,
            padded(n, self.options.size),
            padded(s, WORDS) // 32,
            items,
            p * h * items,
            of.blocks.shape[2],
            h if p > 1 else 0,
            1 if h > 1 else 0,
            of.parts,
            threshold(self.dropout_p),
        )

    def grid(self, kernel: str, items: int, tile: str = "BLOCK_Q") -> tuple[int, int, int]:
        """As many programs as tiles, of which a block of the layout has several."""
        tiles = self.options.size // _tiles(kernel, self.options)[tile]
        return items * tiles * self.heads, 1, 1

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.scale * LOG2E, self.scale, 1 / (1 - self.dropout_p)

    def shares(self, of: Tables, each: int) -> Tensor:
        count = self.heads * of.slots * self.options.size * each
        return self.q.new_empty(count, dtype=torch.float32)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    weight: Tensor | None,
    size: int,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> _Call:
    """Strides count as aligned if all are multiples of 8 elements."""
    q, k, v = dense(q), dense(k), dense(v)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    unit = 1 if any(s % 8 for s in strides) else 8
    given = (words is not None, lengths is not None, weight is not None)
    whole_blocks = q.shape[2] % size == 0 and k.shape[2] % size == 0
    full = whole_blocks and words is None and weight is None
    options = _Options(
        q.dtype, q.shape[3], v.shape[3], size, *given, causal, seed is not None, full, unit
    )
    return _Call(q, k, v, whole(words), whole(lengths), seed, strides, options, scale, dropout_p)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    blocks: Tensor,
    weight: Tensor | None,
    items: Tensor,
    merges: Tensor,
    parts: int,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:
    out, lse = buffers = _forward_buffers(q, v, numbers[0])
    if out.numel() == 0:
        return buffers
    call = _prepare(q, k, v, words, lengths, seed, weight, *numbers)
    if k.shape[2] == 0:
        out.zero_()
        lse.fill_(torch.inf)
        return buffers
    rows = Tables(blocks, weight, items, merges, parts)
    shares = call.shares(rows, call.options.e + 2)
    scale, _, keep_scale = call.numbers
    sizes = call.sizes(rows)
    launch(
        "block_sparse.attend",
        call.grid("block_sparse.attend", items.shape[3]),
        (*call.inputs, blocks, weight, items, out, lse, shares,
         *call.strides, *sizes, scale, keep_scale),
        call.options,
        _constants,
    )  # fmt: skip
    cuts = rows.cuts
    if cuts:
        plane = merges.numel() // 3
        launch(
            "block_sparse.merge",
            call.grid("block_sparse.merge", cuts),
            (shares, call.lengths, merges, out, lse,
             sizes.H, sizes.N, sizes.PADDED, cuts, plane, sizes.TABLE_B, sizes.TABLE_H, parts,
             keep_scale),
            call.options.of_sums(),
            _constants,
        )  # fmt: skip
    return buffers


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    blocks: Tensor,
    weight: Tensor | None,
    items: Tensor,
    merges: Tensor,
    parts: int,
    by_column: Tensor,
    column_weight: Tensor | None,
    column_items: Tensor,
    column_merges: Tensor,
    column_parts: int,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = buffers = _backward_buffers(q, k, v)
    if 0 in (*q.shape[:3], k.shape[2]):
        for x in buffers:
            x.zero_()
        return buffers
    call = _prepare(q, k, v, words, lengths, seed, weight, *numbers)
    out, dout = merged(out), dense(dout)
    options = call.options
    if any(s % 8 for s in dout.stride()[:3]):
        options = options._replace(unit=1)
        call = call._replace(options=options)
    (b, h, _, d), h_kv, s, e = q.shape, k.shape[1], k.shape[2], v.shape[3]
    strides = (*call.strides, *dout.stride()[:3])
    delta = torch.empty_like(lse)
    rows = Tables(blocks, weight, items, merges, parts)
    shares, sizes = call.shares(rows, d), call.sizes(rows)
    launch(
        "block_sparse_backward.grad_queries",
        call.grid("block_sparse_backward.grad_queries", items.shape[3]),
        (*call.inputs, blocks, weight, items, out, dout, lse, delta, dq, shares,
         *strides, *sizes, *call.numbers),
        options,
        _constants,
    )  # fmt: skip
    _add(call, rows, shares, sizes, dq)
    g = h // h_kv
    each = (dk, dv) if g == 1 else tuple(x.new_empty(b, s, h, w).transpose(1, 2)
                                         for x, w in ((k, d), (v, e)))  # fmt: skip
    columns = Tables(by_column, column_weight, column_items, column_merges, column_parts)
    shares, sizes = call.shares(columns, d + e), call.sizes(columns)
    launch(
        "block_sparse_backward.grad_keys",
        call.grid("block_sparse_backward.grad_keys", column_items.shape[3], "BLOCK_K"),
        (*call.inputs, by_column, column_weight, column_items, dout, lse, delta, *each, shares,
         *strides, *sizes, *call.numbers),
        options,
        _constants,
    )  # fmt: skip
    _add(call, columns, shares, sizes, *each)
    if g > 1:
        for x, total in zip(each, (dk, dv), strict=True):
            torch.sum(x.unflatten(1, (h_kv, g)), 2, out=total)
    return buffers


def _add(
    call: _Call,
    of: Tables,
    shares: Tensor,
    sizes: _Sizes,
    one: Tensor,
    two: Tensor | None = None,
) -> None:
    """Where rows were cut, the sums of their parts: dq, or dk and dv."""
    cuts = of.cuts
    if not cuts:
        return
    launch(
        "block_sparse_backward.add",
        call.grid("block_sparse_backward.add", cuts),
        (shares, of.merges, one, one if two is None else two, sizes.H, one.shape[2], cuts,
         of.merges.numel() // 3, sizes.TABLE_B, sizes.TABLE_H, of.parts, call.scale),
        call.options.of_sums()._replace(lengths=False, both=two is not None),
        _constants,
    )  # fmt: skip


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("block_sparse_forward", _forward, _key)
    _lib.impl("block_sparse_backward", _backward, _key)
