"""The Triton path of Linformer: two registered operators, each with its backward pass.

Importing this file imports no triton. ``compress`` keeps its inputs; ``attend`` its inputs, output
and the log-sum of every row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd
from fastattn._launch import dense, heads_inside, launch, merged, whole
from fastattn.ops.linformer_launch import (
    add,
    alike,
    constants,
    launch_compress,
    launch_grad_projection,
    launch_grad_tokens,
    plan_of_attend,
    plan_of_grad_slots,
)

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "linformer_compress(Tensor x, Tensor proj, Tensor? other_x, Tensor? other_proj, "
    "Tensor? hidden, int heads) -> Tensor[]"
)  # slots of x, and of the other x, or of x again, if there is another projection
_lib.define(
    "linformer_compress_backward(Tensor dslots, Tensor? other_dslots, Tensor x, Tensor proj, "
    "Tensor? other_x, Tensor? other_proj, Tensor? hidden, bool of_x, bool of_proj, "
    "bool of_other_x, bool of_other_proj) -> Tensor[]"
)  # of x and proj, then of the others; empty where not wanted
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
    return _compress_all((x, proj, None, None), mask, h)[0]


def compress_both(
    k: Tensor, v: Tensor, proj_k: Tensor, proj_v: Tensor, mask: Tensor | None, h: int
) -> tuple[Tensor, Tensor]:
    """The same of two, in one launch where they are alike. Where v is k, its gradient is one."""
    if _are_alike(k, v, proj_k, proj_v):
        keys, values = _compress_all((k, proj_k, None if v is k else v, proj_v), mask, h)
        return keys, values
    return compress(k, proj_k, mask, h), compress(v, proj_v, mask, h)


def whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    proj_k: Tensor,
    proj_v: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Both halves, for autograd one step: each of its steps costs more than a short kernel runs."""
    pair = k, proj_k, None if v is k else v, proj_v
    if _are_alike(k, v, proj_k, proj_v) and _autograd.needs_gradient(q, *pair):
        heads = _heads_of_slots(k, proj_k, q.shape[1])
        out: Tensor = _autograd.apply(_Whole, q, *pair, mask, heads, scale)[0]
        return out
    keys, values = compress_both(k, v, proj_k, proj_v, mask, q.shape[1])
    if keys.shape[1] != values.shape[1]:  # one projection is of heads, and heads are grouped
        h = q.shape[1]
        keys, values = (x.repeat_interleave(h // x.shape[1], 1) for x in (keys, values))
    return attend(q, keys, values, None, scale)


def _are_alike(k: Tensor, v: Tensor, proj_k: Tensor, proj_v: Tensor) -> bool:
    """Whether one launch compresses both."""
    return (
        k.shape == v.shape
        and proj_k.shape == proj_v.shape
        and k.dtype == v.dtype
        and proj_k.dtype == proj_v.dtype
    )


def _heads_of_slots(x: Tensor, proj: Tensor, h: int) -> int:
    return h if proj.dim() == 3 else x.shape[1]


def _compress_all(
    pair: tuple[Tensor, Tensor, Tensor | None, Tensor | None], mask: Tensor | None, h: int
) -> Any:
    heads = _heads_of_slots(*pair[:2], h)
    if not _autograd.needs_gradient(*pair):
        return _call_compress(*pair, mask, heads)
    return _autograd.apply(_Compress, *pair, mask, heads)


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
    def forward(
        x: Tensor, proj: Tensor, other_x: Any, other_proj: Any, mask: Tensor | None, heads: int
    ) -> Any:
        return tuple(_call_compress(x, proj, other_x, other_proj, mask, heads))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *dslots: Tensor) -> Any:
        return (_compress_once if torch.is_grad_enabled() else _compress_back)(ctx, *dslots)


def _compress_back(ctx: Any, dslots: Tensor, other_dslots: Tensor | None = None) -> Any:
    wanted = ctx.needs_input_grad[:4]
    return *_call_compress_backward(dslots, other_dslots, *ctx.saved_tensors, *wanted), None, None


def _call_compress_backward(dslots: Tensor, other_dslots: Tensor | None, *given: Any) -> list[Any]:
    """Gradients of x and projection, and of the others; None where not wanted."""
    operator, wanted = torch.ops.fastattn.linformer_compress_backward.default, given[5:]
    found = _autograd.call_once(operator, _compress_backward, dslots, other_dslots, *given)
    found = *found, *(None,) * (4 - len(found))
    return [x if want else None for x, want in zip(found, wanted, strict=True)]


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
    found = _autograd.call_once(operator, _attend_backward, dout, *ctx.saved_tensors, ctx.scale)
    return *found, None, None


_attend_once = once_differentiable(_attend_back)


class _Whole(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, x: Tensor, proj: Tensor, other_x: Any, other_proj: Tensor, mask: Tensor | None,
        heads: int, scale: float,
    ) -> Any:  # fmt: skip
        slots = _call_compress(x, proj, other_x, other_proj, mask, heads)
        return *_call_attend(q, *slots, None, scale), *slots

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[7]
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (_whole_once if torch.is_grad_enabled() else _whole_back)(ctx, *grads)


def _whole_back(ctx: Any, dout: Tensor | None, *_: None) -> Any:
    if dout is None:
        return (None,) * 8
    q, *tokens, out, lse, keys, values = ctx.saved_tensors
    given = dout, q, keys, values, None, out, lse, ctx.scale
    operator = torch.ops.fastattn.linformer_attend_backward.default
    dq, *dslots = _autograd.call_once(operator, _attend_backward, *given)
    wanted = ctx.needs_input_grad[1:5]
    found = [None] * 4
    if any(wanted):
        found = _call_compress_backward(*dslots, *tokens, *wanted)
    return dq, *found, None, None, None


_whole_once = once_differentiable(_whole_back)


def _readable(s: int, *projections: Tensor) -> tuple[Tensor, ...]:
    """Rows of s columns that begin at multiples of 8, with zeros up to the next one: as they are,
    or copied, which takes less time than to load elements one by one; all with the same strides."""
    strides = projections[0].stride()
    if all(
        p.stride() == strides and strides[-1] == 1 and p.data_ptr() % 16 == 0 for p in projections
    ) and not any(x % 8 for x in (s, *strides[:-1])):
        return projections
    # no padding would keep other strides
    return tuple(F.pad(p[..., :s], (0, -s % 8)).contiguous() for p in projections)


def _compress(
    x: Tensor,
    proj: Tensor,
    other_x: Tensor | None,
    other_proj: Tensor | None,
    hidden: Tensor | None,
    heads: int,
) -> list[Tensor]:
    hidden = whole(hidden)
    pairs = _pairs(x, proj, other_x, other_proj)
    made = [y.new_empty(y.shape[0], heads, p.shape[-2], y.shape[3]) for y, p in pairs]
    if made[0].numel():
        tokens = _dense(pairs)
        projections = _readable(x.shape[2], *(p for _, p in pairs))
        for group in alike([*zip(tokens, projections, made, strict=True)]):
            launch_compress(hidden, *group)
    return made


def _pairs(
    x: Tensor, proj: Tensor, other_x: Tensor | None, other_proj: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Tokens and their projection, one or two; without other tokens x has both projections."""
    pairs = [(x, proj)]
    if other_proj is not None:
        pairs.append((x if other_x is None else other_x, other_proj))
    return pairs


def _dense(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    x = dense(pairs[0][0])
    return [x, *(x if y is pairs[0][0] else dense(y) for y, _ in pairs[1:])]


def _compress_backward(
    dslots: Tensor,
    other_dslots: Tensor | None,
    x: Tensor,
    proj: Tensor,
    other_x: Tensor | None,
    other_proj: Tensor | None,
    hidden: Tensor | None,
    *wanted: bool,
) -> list[Tensor]:
    grads = _compress_gradients(x, proj, other_x, other_proj, *wanted)
    if 0 in x.shape[:3] or not dslots.numel():
        return [grad.zero_() for grad in grads]
    hidden = whole(hidden)
    pairs = _pairs(x, proj, other_x, other_proj)
    dz = [whole(y) for y in (dslots, other_dslots) if y is not None]
    same = len(pairs) == 2 and other_x is None
    if wanted[0] or wanted[2]:
        projections = _readable(x.shape[2], *(p for _, p in pairs))
        into = [grads[0]] * 2 if same else grads[::2]
        of_x = [*zip(dz, projections, into, strict=False)]
        if not same:
            of_x = [one for one, want in zip(of_x, wanted[::2], strict=False) if want]
        for group in [of_x] if same else alike(of_x):
            launch_grad_tokens(hidden, same, *group)
    if wanted[1] or wanted[3]:
        of_proj = [*zip(_dense(pairs), dz, grads[1::2], strict=True)]
        of_proj = [one for one, want in zip(of_proj, wanted[1::2], strict=False) if want]
        for group in alike(of_proj):
            launch_grad_projection(hidden, *group)
    return grads


def _compress_gradients(
    x: Tensor, proj: Tensor, other_x: Tensor | None, other_proj: Tensor | None, *wanted: bool
) -> list[Tensor]:
    grads = []
    for i, (y, p) in enumerate(_pairs(x, proj, other_x, other_proj)):
        grads.append(heads_inside(y, y.shape[3]) if wanted[2 * i] else y.new_empty(0))
        grads.append(p.new_empty(p.shape if wanted[2 * i + 1] else 0))
    return grads


def _attend_buffers(q: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    b, h, n, _ = q.shape
    return heads_inside(q, values.shape[3]), q.new_empty(b * h * n, dtype=torch.float32)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, off: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = buffers = _attend_buffers(q, values)
    if not out.numel():
        return buffers
    q, keys, values, off = dense(q), whole(keys), whole(values), whole(off)
    grid, numbers, options, _ = plan_of_attend(
        q.shape, q.stride(), keys.shape, values.shape[3], q.dtype, off is not None, scale, q.device
    )
    launch("linformer.attend", grid, (q, keys, values, off, out, lse, *numbers), options, constants)
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
    grid, numbers, options, splits = plan_of_grad_slots(
        q.shape, q.stride(), keys.shape, e, dout.stride(), q.dtype, off is not None, scale, q.device
    )
    programs, whole_kv = grid[2], options.whole
    whole_q = programs == 1
    parts_q = dq if whole_q else q.new_empty(programs * dq.numel(), dtype=torch.float32)
    parts = [dkeys, dvalues] if whole_kv else [
        q.new_empty(splits * b * h * slots * width, dtype=torch.float32) for width in (d, e)
    ]  # fmt: skip
    launch(
        "linformer_backward.grad_slots",
        grid,
        (q, keys, values, off, out, dout, lse, *parts, parts_q, *numbers),
        options,
        constants,
    )
    if not whole_q:
        add(programs, (parts_q, dq))
    if whole_kv:
        return dq, dkeys, dvalues
    totals = [dkeys, dvalues] if h == heads else [
        q.new_empty(b, heads, h // heads, slots, width, dtype=torch.float32) for width in (d, e)
    ]  # fmt: skip
    sums = [*zip(parts, totals, strict=True)]
    for group in [sums] if d == e else [sums[:1], sums[1:]]:
        add(splits, *group)
    if h != heads:
        dkeys.copy_(totals[0].sum(2))
        dvalues.copy_(totals[1].sum(2))
    return dq, dkeys, dvalues


@torch.library.register_fake("fastattn::linformer_compress", lib=_lib)
def _(x: Any, proj: Any, other_x: Any, other_proj: Any, hidden: Any, heads: int) -> list[Tensor]:
    pairs = _pairs(x, proj, other_x, other_proj)
    return [y.new_empty(y.shape[0], heads, p.shape[-2], y.shape[3]) for y, p in pairs]


@torch.library.register_fake("fastattn::linformer_compress_backward", lib=_lib)
def _(
    dslots: Any, other_dslots: Any, x: Any, proj: Any, other_x: Any, other_proj: Any, *rest: Any
) -> list[Tensor]:
    return _compress_gradients(x, proj, other_x, other_proj, *rest[1:])


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
