"""The Triton path of causal FAVOR+ and of its scan: one operator forward and one backward.

Importing this file imports no triton. Between forward and backward are kept the inputs, the output,
per feature its direction and lifted numbers, and one number a row; states are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import _autograd, _tuning
from fastattn._launch import dense, heads_inside, launch, merged, whole
from fastattn.ops import favor_torch as torch_path
from fastattn.ops.favor_states_triton import (
    carry,
    lift_keys,
    new_sums,
    programs_of,
    reading,
    states_before,
)
from fastattn.ops.favor_step_triton import step
from fastattn.ops.favor_torch import Features
from fastattn.ops.favor_variants import (
    LOG2E,
    add_directions,
    backward_buffers,
    blocks_of,
    constants,
    gradients_of,
    options_of,
    shares_of_directions,
    sizes,
    tiles,
    to_base_2,
)
from fastattn.ops.linear_attention_torch import State

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "favor_causal_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor directions, Tensor? offsets, Tensor? kv, Tensor? z, Tensor? shift, float factor, "
    "float? curvature) -> Tensor[]"
)  # out, table, lifted, kept; and with a state kv, z, shift
_lib.define(
    "favor_causal_backward(Tensor dout, Tensor? dkv, Tensor? dz, Tensor q, Tensor k, Tensor v, "
    "Tensor out, Tensor table, Tensor lifted, Tensor kept, Tensor? new_shift, Tensor? mask, "
    "Tensor? cu_seqlens, Tensor directions, Tensor? kv, Tensor? z, Tensor? shift, float factor, "
    "float? curvature, bool learned) -> Tensor[]"
)  # dq, dk, dv; with a state dkv, dz; and if learned those of directions and offsets
_autograd.one_by_one(_lib, "favor_causal_forward", "favor_causal_backward")


def attend(
    q: Tensor, k: Tensor, v: Tensor, features: Features, mask: Tensor | None, cu: Tensor | None
) -> Tensor:
    """:func:`fastattn.ops.favor_attention` where it is causal, behind its door."""
    about = (mask, cu, features.directions, features.offsets, None, None, None)
    return _run(q, k, v, *about, features.factor, features.curvature)[0]


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    features: Features,
    *,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, State]:
    """:func:`fastattn.ops.favor_attention_scan`, behind its door."""
    if q.shape[1] == 0:  # no programs to carry the state
        return torch_path.scan(q, k, v, state, features, key_padding_mask=key_padding_mask)
    b, h_kv = k.shape[:2]
    if state is None:
        z = k.new_zeros(b, h_kv, features.directions.shape[1], dtype=torch.float32)
        kv = k.new_zeros(*z.shape, v.shape[3], dtype=torch.float32)
        state = kv, z, None if features.curvature is None else torch.full_like(z, -torch.inf)
    numbers = (features.factor, features.curvature)
    projection = (features.directions, features.offsets)
    if q.shape[2] == 1 and not _autograd.needs_gradient(q, k, v, *projection, *state):
        out, kv, z, *shifts = step(q, k, v, key_padding_mask, *projection, *state, *numbers)
    else:
        about = (key_padding_mask, None, *projection)
        out, _, _, _, kv, z, *shifts = _run(q, k, v, *about, *state, *numbers)
    return out, (kv, z, shifts[0] if shifts else None)


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    """The arguments of the operator, and what it returns."""
    if _autograd.needs_gradient(*arguments):
        return _autograd.apply(_Causal, *arguments)
    return _Causal.forward(*arguments)


class _Causal(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        operator = torch.ops.fastattn.favor_causal_forward.default
        return tuple(_autograd.call(operator, _forward, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, cu_seqlens, directions, _, *start, factor, curvature = inputs
        ctx.numbers = factor, curvature
        out, *kept = output[:4]
        shift = output[6] if len(output) > 6 else None
        ctx.save_for_backward(q, k, v, out, *kept, shift, mask, cu_seqlens, directions, *start)
        ctx.mark_non_differentiable(*kept, *output[6:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # the check costs something, and is needed under create_graph only
        return (_backward_once if torch.is_grad_enabled() else _backward_pass)(ctx, *grads)


def _backward_pass(ctx: Any, dout: Tensor | None, *rest: Any) -> Any:
    q, k, v, out, *kept, kv, z, shift = ctx.saved_tensors
    dkv = dz = None
    if kv is not None:
        dkv = torch.zeros_like(kv) if rest[3] is None else rest[3]
        dz = torch.zeros_like(z) if rest[4] is None else rest[4]
    if dout is None:
        dout = torch.zeros_like(out)
    operator = torch.ops.fastattn.favor_causal_backward.default
    learned = ctx.needs_input_grad[5] or ctx.needs_input_grad[6]
    arguments = (dout, dkv, dz, q, k, v, out, *kept, kv, z, shift, *ctx.numbers, learned)
    dq, dk, dv, *rest = _autograd.call_once(operator, _backward, *arguments)
    dkv, dz = rest[:2] if kv is not None else (None, None)
    dw, doffsets = rest[-2:] if learned else (None, None)
    doffsets = doffsets if ctx.needs_input_grad[6] else None
    return dq, dk, dv, None, None, dw, doffsets, dkv, dz, *(None,) * 3


_backward_once = once_differentiable(_backward_pass)


def _forward_buffers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    directions: Tensor,
    kv: Any,
    shift: Any,
) -> list[Tensor]:
    (b, h, n, _), (m, d), e = q.shape, directions.shape[1:], v.shape[3]
    rows = sizes(q, k, cu_seqlens)[1]
    dot = getattr(torch, _tuning.dot_type(q.dtype)[0])
    buffers = [
        heads_inside(q, e),
        q.new_empty(rows * m * d, dtype=dot),
        q.new_empty(rows * m * 16, dtype=dot),
        q.new_empty(b * h * n, dtype=torch.float32),
    ]
    if kv is not None:
        shape = (b, k.shape[1], m)
        state = [(*shape, e), shape] if shift is None else [(*shape, e), shape, shape]
        buffers += [q.new_empty(x, dtype=torch.float32) for x in state]
    return buffers


@torch.library.register_fake("fastattn::favor_causal_forward", lib=_lib)
def _(
    q: Any, k: Any, v: Any, mask: Any, cu: Any, directions: Any, offsets: Any, kv: Any, *rest: Any
) -> list[Tensor]:
    return _forward_buffers(q, k, v, cu, directions, kv, rest[1])


@torch.library.register_fake("fastattn::favor_causal_backward", lib=_lib)
def _(dout: Any, dkv: Any, dz: Any, q: Any, k: Any, v: Any, *rest: Any) -> list[Tensor]:
    return _backward_buffers(q, k, v, dkv, dz) + (gradients_of(rest[7]) if rest[-1] else [])


def _backward_buffers(q: Tensor, k: Tensor, v: Tensor, dkv: Any, dz: Any) -> list[Tensor]:
    buffers = backward_buffers(q, k, v)
    if dkv is not None:
        buffers += [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (dkv, dz)]
    return buffers


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    directions: Tensor,
    offsets: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    shift: Tensor | None,
    factor: float,
    curvature: float | None,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    directions, offsets = whole(directions), whole(offsets)
    buffers = _forward_buffers(q, k, v, cu_seqlens, directions, kv, shift)
    out, table, lifted, kept, *end = buffers
    if table.numel() == 0 or (out.numel() == 0 and not end):
        return buffers
    options = options_of(q, k, v, mask, cu_seqlens, directions, offsets, curvature)
    options = options._replace(state=kv is not None)
    curvature = curvature or 0.0
    rows, kv_rows = sizes(q, k, cu_seqlens)
    (h, n), h_kv = q.shape[1:3], k.shape[1]
    launch(
        "favor_causal.prepare",
        (kv_rows, blocks_of("favor_causal.prepare", options), 1),
        (directions, offsets, table, lifted, end[2] if end[2:] else None,
         h_kv, to_base_2(factor, options.relu), curvature),
        options,
        constants,
    )  # fmt: skip
    start = _start(kv, z, shift, end)
    if out.numel() == 0:  # no token
        for x, given in zip(end, start, strict=False):
            x.copy_(given)
        return buffers
    half = lift_keys(k, table, options, curvature)
    keys = (k, v, mask, cu_seqlens, table, lifted, half)
    states, splits = states_before(*keys, options, (*start, *end[:2]))
    launch(
        "favor_causal.attend",
        (rows, programs_of(q, cu_seqlens, rows), 1),
        (q, *keys, *states, out, kept,
         *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], h, h // h_kv, n, splits),
        reading(options, splits),
        constants,
    )  # fmt: skip
    return buffers


def _start(
    kv: Tensor | None, z: Tensor | None, shift: Tensor | None, end: list[Tensor]
) -> tuple[Tensor, ...]:
    """The sums that a state begins with, for the shifts that the directions decide."""
    if kv is None or z is None:
        return ()
    if shift is not None:
        scale = _scale(shift, end[2])
        kv, z = kv * scale.unsqueeze(-1), z * scale
    return whole(kv), whole(z)


def _scale(shift: Tensor, new_shift: Tensor) -> Tensor:
    """From one shift to another, within LEAST and MOST of the kernels; of nothing, anything."""
    return (shift - new_shift).clamp(-100 / LOG2E, 96 / LOG2E).exp()


def _backward(
    dout: Tensor,
    dkv: Tensor | None,
    dz: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    table: Tensor,
    lifted: Tensor,
    kept: Tensor,
    new_shift: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    directions: Tensor,
    kv: Tensor | None,
    z: Tensor | None,
    shift: Tensor | None,
    factor: float,
    curvature: float | None,
    learned: bool,
) -> list[Tensor]:
    q, k, v, mask, cu_seqlens = dense(q), dense(k), dense(v), whole(mask), whole(cu_seqlens)
    out, dout = merged(out), dense(dout)
    buffers = _backward_buffers(q, k, v, dkv, dz)
    dq, dk, dv, *dstart = buffers
    scale = None
    if shift is not None and new_shift is not None:
        scale = _scale(shift, new_shift)
    if out.numel() == 0:  # no token
        for x in buffers[:3]:
            x.zero_()
        for x, given in zip(dstart, (dkv, dz), strict=False):
            assert given is not None
            x.copy_(given)
        _rescale(dstart, scale)
        return buffers + ([x.zero_() for x in gradients_of(directions)] if learned else [])
    options = options_of(q, k, v, mask, cu_seqlens, directions, None, curvature)
    options = options._replace(state=dkv is not None)
    curvature = curvature or 0.0
    if any(s % 8 for s in dout.stride()[:3]):
        options = options._replace(unit=1)
    rows, _ = sizes(q, k, cu_seqlens)
    (b, h, n), h_kv, e = q.shape[:3], k.shape[1], options.e
    g = h // h_kv
    queries, keys, upstream = q.stride()[:3], (*k.stride()[:3], *v.stride()[:3]), dout.stride()[:3]
    delta = torch.empty_like(kept)
    sums, minus = (table.new_empty(16 * kept.numel()) for _ in range(2))
    launch(
        "favor_causal_backward.lift_queries",
        (b * h * -(-n // tiles("favor_causal_backward.lift_queries", options)["BLOCK_N"]), 1, 1),
        (out, dout, kept, delta, sums, minus, *upstream, h, n),
        options,
        constants,
    )
    half = lift_keys(k, table, options, curvature)
    inputs = (k, v, mask, cu_seqlens, table, lifted, half)
    strides, programs = (*queries, *keys, *upstream), programs_of(q, cu_seqlens, rows)
    start: tuple[Tensor, ...] = ()
    if kv is not None and z is not None:
        if scale is not None:
            kv, z = kv * scale.unsqueeze(-1), z * scale
        start = (whole(kv), whole(z), torch.empty_like(kv), torch.empty_like(z))
    states, splits = states_before(*inputs, options, start)
    shares = []

    def differentiate(kernel: str, arguments: Any, results: Any, numbers: Any, splits: int) -> None:
        """Of the tokens; and if learned, again, what they add to that of the directions."""
        reads, name = reading(options, splits), f"favor_causal_backward.{kernel}"
        grid = (rows, programs, 1)
        launch(name, grid, (*arguments, *results, None, *numbers), reads, constants)
        if learned:
            learns = reads._replace(learned=True)
            share, grid = shares_of_directions(table, rows, name, learns)
            results = (None,) * len(results)
            launch(name, grid, (*arguments, *results, share, *numbers), learns, constants)
            shares.append(share)

    differentiate(
        "grad_queries",
        (q, *inputs, *states, dout, delta, sums, minus),
        (dq,),
        (*strides, h, g, n, splits),
        splits,
    )
    del states
    after = new_sums(q, e, cu_seqlens, table, options)
    launch(
        "favor_causal_backward.dstates",
        (rows, after.splits, blocks_of("favor_causal_backward.dstates", options)),
        (q, cu_seqlens, table, lifted, dout, delta, sums, after.shares, *after.states[:2],
         *queries, *upstream, h, g, n),
        options,
        constants,
    )  # fmt: skip
    ends: tuple[Tensor, ...] = ()
    if dkv is not None and dz is not None:  # of a key head; its first query head takes it
        last = [x.new_zeros(b, h_kv, g, *x.shape[2:]) for x in (dkv, dz)]
        last[0][:, :, 0], last[1][:, :, 0] = dkv, -dz
        ends = (*last, *(torch.empty_like(x) for x in last))
    carry(rows, after, options._replace(backwards=True), ends)
    each = (dk, dv) if g == 1 else (heads_inside(q, q.shape[3]), heads_inside(q, e))
    differentiate(
        "grad_keys",
        (q, *inputs, *after.states, dout, delta, sums),
        each,
        (*strides, h, g, n, after.splits, curvature),
        after.splits,
    )
    if g > 1:
        for x, total in zip(each, (dk, dv), strict=True):
            torch.sum(x.unflatten(1, (h_kv, g)), 2, out=total)
    if dstart:
        torch.sum(ends[2], 2, out=dstart[0])
        torch.sum(-ends[3], 2, out=dstart[1])
        _rescale(dstart, scale)
    if learned:
        buffers += add_directions(shares, rows // h, h_kv, factor, options)
    return buffers


def _rescale(dstart: list[Tensor], scale: Tensor | None) -> None:
    if dstart and scale is not None:
        dstart[0].mul_(scale.unsqueeze(-1))
        dstart[1].mul_(scale)


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("favor_causal_forward", _forward, _key)
    _lib.impl("favor_causal_backward", _backward, _key)
