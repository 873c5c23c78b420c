"""The Triton path of one token of causal FAVOR+: one registered operator, without gradients.

Importing this file imports no triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _autograd
from fastattn._launch import dense, launch, whole
from fastattn.ops.favor_variants import Options, constants, tiles, to_base_2

_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "favor_step(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor directions, Tensor? offsets, "
    "Tensor kv, Tensor z, Tensor? shift, float factor, float? curvature) -> Tensor[]"
)  # out, kv, z; and but for relu shift
_autograd.one_by_one(_lib, "favor_step")


def step(*arguments: Any) -> list[Tensor]:
    """The arguments of the operator, and what it returns."""
    return _autograd.call(torch.ops.fastattn.favor_step.default, _step, *arguments)


def _step_buffers(q: Tensor, v: Tensor, kv: Tensor, z: Tensor, shift: Any) -> list[Tensor]:
    buffers = [q.new_empty((*q.shape[:3], v.shape[3]))]
    state = [x for x in (kv, z, shift) if x is not None]
    return buffers + [torch.empty_like(x, memory_format=torch.contiguous_format) for x in state]


@torch.library.register_fake("fastattn::favor_step", lib=_lib)
def _(
    q: Any, k: Any, v: Any, mask: Any, directions: Any, offsets: Any, kv: Any, z: Any, shift: Any,
    *numbers: Any,
) -> list[Tensor]:  # fmt: skip
    return _step_buffers(q, v, kv, z, shift)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    directions: Tensor,
    offsets: Tensor | None,
    kv: Tensor,
    z: Tensor,
    shift: Tensor | None,
    factor: float,
    curvature: float | None,
) -> list[Tensor]:
    q, k, v, mask = dense(q), dense(k), dense(v), whole(mask)
    directions, offsets = whole(directions), whole(offsets)
    kv, z, shift = whole(kv), whole(z), whole(shift)
    buffers = _step_buffers(q, v, kv, z, shift)
    (b, h_kv, m), (d, e) = z.shape, (q.shape[3], v.shape[3])
    out, new_shift = buffers[0], buffers[3] if shift is not None else None
    if kv.numel() == 0:
        return buffers
    about = (directions.shape[0] > 1, curvature is None, offsets is not None, mask is not None)
    options = Options(q.dtype, d, e, m, *about, packed=False, unit=1)
    launch(
        "favor_step.step",
        (b * h_kv, -(-e // tiles("favor_step.step", options)["BLOCK_E"]), 1),
        (q, k, v, mask, directions, offsets, out, kv, z, shift, *buffers[1:3], new_shift,
         *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], h_kv, q.shape[1] // h_kv,
         to_base_2(factor, curvature is None), curvature or 0.0),
        options,
        constants,
    )  # fmt: skip
    return buffers


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("favor_step", _step, _key)
