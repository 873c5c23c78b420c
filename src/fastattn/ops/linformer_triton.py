"""The Triton path of Linformer: two registered operators, each with its backward pass.

Importing this file imports no triton. ``compress`` keeps its inputs; ``attend`` its inputs, output
and the log-sum of every row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd, _tuning
from fastattn._launch import dense, heads_inside, launch, merged, whole

LOG2E = 1.4426950408889634
_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define("linformer_compress(Tensor x, Tensor proj, Tensor? hidden, int heads) -> Tensor")
_lib.define(
    "linformer_compress_backward(Tensor dslots, Tensor x, Tensor proj, Tensor? hidden, "
    "bool of_x, bool of_proj) -> (Tensor, Tensor)"
)
_lib.define(
    "linformer_attend(Tensor q, Tensor keys, Tensor values, Tensor? off, float scale) "
    "-> (Tensor, Tensor)"
)  # out, lse
_lib.define(
    "linformer_attend_backward(Tensor dout, Tensor q, Tensor keys, Tensor values, Tensor? off, "
    "Tensor out, Tensor lse, float scale) -> (Tensor, Tensor, Tensor)"
)
_autograd.one_by_one(
    _lib,
    "linformer_compress",
    "linformer_compress_backward",
    "linformer_attend",
    "linformer_attend_backward",
)


def compress(x: Tensor, proj: Tensor, mask: Tensor | None, h: int) -> Tensor:
    """``(b, h_kv, s, d)`` by ``(slots, L)`` or ``(h, slots, L)``: ``(b, h_kv or h, slots, d)``."""
    heads = h if proj.dim() == 3 else x.shape[1]
    if not _autograd.needs_gradient(x, proj):
        return _call_compress(x, proj, mask, heads)
    out: Tensor = _autograd.apply(_Compress, x, proj, mask, heads)
    return out


def attend(q: Tensor, keys: Tensor, values: Tensor, off: Tensor | None, scale: float) -> Tensor:
    """Softmax attention to slots; ``off`` ``(b, slots)`` bool, of those that nobody sees."""
    if not _autograd.needs_gradient(q, keys, values):
        return _call_attend(q, keys, values, off, scale)[0]
    out: Tensor = _autograd.apply(_Attend, q, keys, values, off, scale)[0]
    return out


def _call_compress(*arguments: Any) -> Any:
    return _autograd.call(torch.ops.fastattn.linformer_compress.default, _compress, *arguments)


def _call_attend(*arguments: Any) -> Any:
    return _autograd.call(torch.ops.fastattn.linformer_attend.default, _attend, *arguments)


class _Compress(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, proj: Tensor, mask: Tensor | None, heads: int) -> Any:
        return _call_compress(x, proj, mask, heads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, dslots: Tensor) -> Any:
        return (_compress_once if torch.is_grad_enabled() else _compress_back)(ctx, dslots)


def _compress_back(ctx: Any, dslots: Tensor) -> Any:
    operator = torch.ops.fastattn.linformer_compress_backward.default
    of_x, of_proj = ctx.needs_input_grad[:2]
    found = _autograd.call(operator, _compress_backward, dslots, *ctx.saved_tensors, of_x, of_proj)
    return found[0] if of_x else None, found[1] if of_proj else None, None, None


_compress_once = once_differentiable(_compress_back)


class _Attend(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, keys: Tensor, values: Tensor, off: Tensor | None, scale: float) -> Any:
        return tuple(_call_attend(q, keys, values, off, scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[4]
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (_attend_once if torch.is_grad_enabled() else _attend_back)(ctx, *grads)


def _attend_back(ctx: Any, dout: Tensor | None, _: None) -> Any:
    if dout is None:
        return (None,) * 5
    operator = torch.ops.fastattn.linformer_attend_backward.default
    found = _autograd.call(operator, _attend_backward, dout, *ctx.saved_tensors, ctx.scale)
    return *found, None, None


_attend_once = once_differentiable(_attend_back)


class _Options(NamedTuple):
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


def _constants(kernel: str, options: _Options) -> dict[str, Any]:
    import triton.language as tl

    dot, precision = _tuning.block_sparse_dot_type(options.dtype)
    return {
        "UNIT": options.unit,
        "D": options.d,
        "E": options.e,
        "WIDTH": options.d,
        "MASKED": options.masked,
        "OWN": options.own,
        "FULL": options.full,
        "PRECISION": precision,
        "DOT": getattr(tl, dot),
        **_tiles(kernel, options),
    }


def _tiles(kernel: str, options: _Options) -> dict[str, int]:
    name = kernel.split(".")[1]
    return _tuning.linformer(name, options.d, options.e, options.slots, options.dtype, options.own)


def _options(
    x: Tensor, of: torch.dtype, e: int, hidden: Tensor | None, own: bool, slots: int, *more: Tensor
) -> _Options:
    strides = [s for y in (x, *more) for s in y.stride()[:3]]
    unit = 1 if any(s % 8 for s in strides) else 8
    size = 1 << (slots - 1).bit_length()
    full = slots == size >= 16
    return _Options(x.dtype, of, x.shape[3], e, hidden is not None, own, unit, size, full, False)


def _add(share: Tensor, total: Tensor, splits: int) -> Tensor:
    """The splits of a share in float32, into what has the shape and dtype of one."""
    options = _Options(total.dtype, total.dtype, 1, 1, False, False, 1, 1, False, False)
    count = total.numel()
    tile = _tiles("linformer.add", options)["BLOCK"]
    launch(
        "linformer.add", (-(-count // tile), 1, 1), (share, total, count, splits), options,
        _constants,
    )  # fmt: skip
    return total


def _heads_of(x: Tensor, proj: Tensor, heads: int) -> int:
    """How many of the heads that come out read one head of x."""
    return heads // x.shape[1] if proj.dim() == 3 else 1


def _columns(x: Tensor, proj: Tensor, heads: int, tile: int) -> int:
    """Tiles of columns in a sample: one of these heads each, or of all heads of x side by side."""
    return heads if proj.dim() == 3 else -(-x.shape[1] * x.shape[3] // tile)


def _readable(proj: Tensor, s: int) -> Tensor:
    """Rows of s columns that begin at multiples of 8, with zeros up to the next one: as it is, or
    copied, which takes less time than to load its elements one by one."""
    strides = proj.stride()
    if (
        strides[-1] == 1
        and proj.data_ptr() % 16 == 0
        and not any(x % 8 for x in (s, *strides[:-1]))
    ):
        return proj
    return F.pad(proj[..., :s], (0, -s % 8))


def _strides_of(proj: Tensor) -> tuple[int, int]:
    return (proj.stride(0) if proj.dim() == 3 else 0), proj.stride(-2)


def _compress(x: Tensor, proj: Tensor, hidden: Tensor | None, heads: int) -> Tensor:
    (b, _, s, d), slots = x.shape, proj.shape[-2]
    slots_of = x.new_empty(b, heads, slots, d)
    if not slots_of.numel():
        return slots_of
    x, proj, hidden = dense(x), _readable(proj, s), whole(hidden)
    options = _options(x, proj.dtype, d, hidden, proj.dim() == 3, slots)
    tiles = _tiles("linformer.compress", options)
    g, columns = _heads_of(x, proj, heads), _columns(x, proj, heads, tiles["BLOCK_C"])
    slot_tiles = -(-slots // tiles["BLOCK_K"])
    splits = _tuning.linformer_splits(b * columns * slot_tiles, s, x.device, 2)
    one = splits == 1
    share = slots_of if one else x.new_empty(splits * slots_of.numel(), dtype=torch.float32)
    launch(
        "linformer.compress",
        (b * columns, splits, slot_tiles),
        (x, proj, hidden, share, *x.stride()[:3], *_strides_of(proj), heads, g, s, slots, b,
         columns),
        options._replace(whole=one),
        _constants,
    )  # fmt: skip
    return share if one else _add(share, slots_of, splits)


def _compress_backward(
    dslots: Tensor, x: Tensor, proj: Tensor, hidden: Tensor | None, of_x: bool, of_proj: bool
) -> tuple[Tensor, Tensor]:
    (b, h_kv, s, d), (_, heads, slots, _) = x.shape, dslots.shape
    dx, dproj = _compress_gradients(x, proj, of_x, of_proj)
    if 0 in (b, h_kv, s):
        return dx.zero_(), dproj.zero_()
    x, hidden, dslots = dense(x), whole(hidden), whole(dslots)
    own = proj.dim() == 3
    options = _options(x, proj.dtype, d, hidden, own, slots)
    g = _heads_of(x, proj, heads)
    if of_x:
        kernel = "linformer_backward.grad_tokens"
        tiles = _tiles(kernel, options)
        columns = _columns(x, proj, h_kv, tiles["BLOCK_C"])
        read = _readable(proj, s)
        launch(
            kernel,
            (b * columns * -(-s // tiles["BLOCK_N"]), 1, 1),
            (dslots, read, hidden, dx, *_strides_of(read), h_kv, g, s, slots, columns),
            options,
            _constants,
        )
    if of_proj:
        if s < proj.shape[-1]:
            dproj.zero_()
        kernel = "linformer_backward.grad_projection"
        tiles = _tiles(kernel, options)
        launch(
            kernel,
            (-(-s // tiles["BLOCK_N"]), -(-slots // tiles["BLOCK_K"]), heads if own else 1),
            (x, dslots, hidden, dproj, *x.stride()[:3], *_strides_of(dproj), heads, g, s, slots, b),
            options,
            _constants,
        )
    return dx, dproj


def _compress_gradients(
    x: Tensor, proj: Tensor, of_x: bool, of_proj: bool
) -> tuple[Tensor, Tensor]:
    dx = heads_inside(x, x.shape[3]) if of_x else x.new_empty(0)
    return dx, proj.new_empty(proj.shape if of_proj else 0)


def _attend_buffers(q: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    b, h, n, _ = q.shape
    return heads_inside(q, values.shape[3]), q.new_empty(b * h * n, dtype=torch.float32)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, off: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = buffers = _attend_buffers(q, values)
    if not out.numel():
        return buffers
    (b, h, n, _), (_, heads, slots, _) = q.shape, keys.shape
    q, keys, values, off = dense(q), whole(keys), whole(values), whole(off)
    options = _options(q, q.dtype, values.shape[3], off, False, slots)
    launch(
        "linformer.attend",
        (b * h, _tuning.linear_attention_splits(b * h, q.device), 1),
        (q, keys, values, off, out, lse, *q.stride()[:3], h, h // heads, n, slots, scale * LOG2E),
        options,
        _constants,
    )
    return buffers


def _attend_backward(
    dout: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    off: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (b, h, n, d), (_, heads, slots, _), e = q.shape, keys.shape, values.shape[3]
    dq = heads_inside(q, d)
    dkeys, dvalues = (x.new_empty(x.shape) for x in (keys, values))
    if 0 in (b, h, n):
        return dq, dkeys.zero_(), dvalues.zero_()
    q, keys, values, off = dense(q), whole(keys), whole(values), whole(off)
    dout, out = dense(dout), merged(out)
    options = _options(q, q.dtype, e, off, False, slots, dout)
    kernel = "linformer_backward.grad_slots"
    tiles = _tiles(kernel, options)
    programs = -(-slots // tiles["BLOCK_K"])
    splits = _tuning.linformer_splits(b * h * programs, n, q.device, 1)
    whole_q, whole_kv = programs == 1, splits == 1 and h == heads
    parts_q = dq if whole_q else q.new_empty(programs * dq.numel(), dtype=torch.float32)
    parts = [dkeys, dvalues] if whole_kv else [
        q.new_empty(splits * b * h * slots * width, dtype=torch.float32) for width in (d, e)
    ]  # fmt: skip
    launch(
        kernel,
        (b * h, splits, programs),
        (q, keys, values, off, out, dout, lse, *parts, parts_q, *q.stride()[:3],
         *dout.stride()[:3], h, h // heads, n, slots, b, scale * LOG2E, scale),
        options._replace(of=parts_q.dtype, whole=whole_kv),
        _constants,
    )  # fmt: skip
    if not whole_q:
        _add(parts_q, dq, programs)
    for share, total in zip(parts, (dkeys, dvalues), strict=True):
        if h != heads:
            of_heads = q.new_empty(b, heads, h // heads, slots, total.shape[3], dtype=torch.float32)
            total.copy_(_add(share, of_heads, splits).sum(2))
        elif not whole_kv:
            _add(share, total, splits)
    return dq, dkeys, dvalues


@torch.library.register_fake("fastattn::linformer_compress", lib=_lib)
def _(x: Any, proj: Any, hidden: Any, heads: int) -> Tensor:
    made: Tensor = x.new_empty(x.shape[0], heads, proj.shape[-2], x.shape[3])
    return made


@torch.library.register_fake("fastattn::linformer_compress_backward", lib=_lib)
def _(dslots: Any, x: Any, proj: Any, hidden: Any, of_x: bool, of_proj: bool) -> Any:
    return _compress_gradients(x, proj, of_x, of_proj)


@torch.library.register_fake("fastattn::linformer_attend", lib=_lib)
def _(q: Any, keys: Any, values: Any, off: Any, scale: float) -> Any:
    return _attend_buffers(q, values)


@torch.library.register_fake("fastattn::linformer_attend_backward", lib=_lib)
def _(dout: Any, q: Any, keys: Any, values: Any, *rest: Any) -> Any:
    return heads_inside(q, q.shape[3]), *(x.new_empty(x.shape) for x in (keys, values))


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("linformer_compress", _compress, _key)
    _lib.impl("linformer_compress_backward", _compress_backward, _key)
    _lib.impl("linformer_attend", _attend, _key)
    _lib.impl("linformer_attend_backward", _attend_backward, _key)
