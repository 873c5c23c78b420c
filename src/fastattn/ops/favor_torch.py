"""The torch path of FAVOR+: any device, differentiable any number of times.

A feature is kept as its logarithm: FAVOR+ is linear attention whose map exp acts on projections,
with a maximum per feature, so that nothing overflows, nothing underflows and no eps is needed.
Features exist for one part of a sequence at a time, and are computed again in the backward pass;
those of packed sequences, and all under a compiler, which recomputes by itself, for all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastattn import _tuning
from fastattn.ops import linear_attention_torch as linear
from fastattn.ops.linear_attention_torch import Scaled, State


class Features(NamedTuple):
    """From tokens to logarithms of features: factor·x·directions + offset - curvature·|x|²/2.

    directions ``(h_kv or 1, m, d)``; offsets ``(h_kv or 1, m)``, of the queries' features; the
    curvature is of the keys' only: whatever is constant along a query's features cancels. With
    curvature None the features are themselves, before their relu.
    """

    directions: Tensor
    factor: float
    offsets: Tensor | None
    curvature: float | None

    @property
    def feature_map(self) -> str:
        return "relu" if self.curvature is None else "exp"

    def of_queries(self, q: Tensor) -> Tensor:
        """``(b, h, n, d)`` to ``(b, h, n, m)``."""
        found = self._project(q)
        if self.offsets is not None:
            found = found + self.offsets[:, None, None, :]
        return found.flatten(1, 2)

    def of_keys(self, k: Tensor) -> Tensor:
        """``(b, h_kv, s, d)`` to ``(b, h_kv, s, m)``."""
        found = self._project(k).flatten(1, 2)
        if self.curvature is not None:
            wide = k.to(found.dtype)
            found = found - self.curvature / 2 * wide.square().sum(-1, keepdim=True)
        return found

    def _project(self, x: Tensor) -> Tensor:
        heads = self.directions.shape[0]
        x = x.to(self.directions.dtype)
        x = x.unflatten(1, (heads, x.shape[1] // heads))  # (b, h_kv or 1, g, n, d)
        return x @ (self.factor * self.directions).unsqueeze(1).mT


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """:func:`fastattn.ops.favor_attention`, behind its door."""
    if cu_seqlens is not None:

        def packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return linear.attend(
                features.of_queries(q),
                features.of_keys(k),
                v.to(features.directions.dtype),
                feature_map=features.feature_map,
                causal=causal,
                key_padding_mask=mask,
                normalize=True,
                cu_seqlens=cu_seqlens,
            )

        inputs = (q, _clean(k, key_padding_mask), v, key_padding_mask)
        return _recomputed(features, packed, *inputs).to(v.dtype)
    if causal:
        return scan(q, k, v, None, features, key_padding_mask=key_padding_mask)[0]
    return _everything(q, k, v, features, key_padding_mask)


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

    def part(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None
    ) -> tuple[Tensor, State]:
        return linear.scan(
            features.of_queries(q),
            features.of_keys(k),
            v.to(features.directions.dtype),
            state,
            feature_map=features.feature_map,
            key_padding_mask=mask,
            normalize=True,
        )

    outs = []
    for pieces in _parts(q, _clean(k, key_padding_mask), v, mask=key_padding_mask):
        out, state = _recomputed(features, part, *pieces, state)
        outs.append(out)
    assert state is not None  # there is a part, be it empty
    return torch.cat(outs, 2).to(v.dtype), state


def _everything(q: Tensor, k: Tensor, v: Tensor, features: Features, mask: Tensor | None) -> Tensor:
    """Every query meets every key: sum over the keys first, a part at a time."""
    wide, group = features.directions.dtype, q.shape[1] // k.shape[1]
    exp = features.feature_map == "exp"

    def add_up(k: Tensor, v: Tensor, mask: Tensor | None) -> Scaled:
        hidden = None if mask is None else mask[:, None, :, None]
        keys = features.of_keys(k)
        keys = keys if exp else keys.relu()
        values = torch.cat((v.to(wide), v.new_ones(*v.shape[:-1], 1, dtype=wide)), -1)
        if hidden is not None:
            keys = keys.masked_fill(hidden, -torch.inf if exp else 0)
            values = values.masked_fill(hidden, 0)
        return linear.sum_keys(keys, values, exp)

    def meet(q: Tensor, kv: Tensor, shift: Tensor | None) -> Tensor:
        queries = features.of_queries(q)
        queries = (queries if exp else queries.relu()).unflatten(1, (k.shape[1], group))
        found = linear.read(queries, kv.unsqueeze(2), None if shift is None else shift.unsqueeze(2))
        return linear.finish(found, True, q, v)

    total: Scaled | None = None
    for pieces in _parts(_clean(k, mask), v, mask=mask):
        kv, shift = _recomputed(features, add_up, *pieces)
        one = kv, None if shift is None else shift.mT  # a shift scales the rows of kv
        total = one if total is None else linear.merge(total, one)
    assert total is not None
    kv, top = total
    shift = None if top is None else top.mT
    outs = [_recomputed(features, meet, x, kv, shift) for (x, _) in _parts(q)]
    return torch.cat(outs, 2)


def _clean(k: Tensor, mask: Tensor | None) -> Tensor:
    """Padding may hold NaN."""
    return k if mask is None else k.masked_fill(mask[:, None, :, None], 0)


def _parts(*tensors: Tensor, mask: Tensor | None = None) -> list[tuple[Any, ...]]:
    """Pieces of the sequence, each with its piece of the mask; all of it where one is compiled."""
    if torch.compiler.is_compiling():
        return [(*tensors, mask)]
    size = min(tensors[0].shape[2], _tuning.favor_part())
    columns: list[Any] = [x.split(max(size, 1), 2) for x in tensors]
    columns.append([None] * len(columns[0]) if mask is None else mask.split(max(size, 1), 1))
    return list(zip(*columns, strict=True))


def _recomputed(features: Features, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call, and keep nothing of the inside for the backward pass but the arguments."""
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()  # it has its own way to recompute
        or torch._C._are_functorch_transforms_active()  # which know no checkpoints
    ):
        return function(*arguments)
    version = features.directions._version

    def again(*arguments: Any) -> Any:
        if features.directions._version != version:  # a checkpoint does not look
            raise RuntimeError(
                "the projection was modified by an inplace operation between forward and "
                "backward: redraw after the optimizer's step"
            )
        return function(*arguments)

    return checkpoint(again, *arguments, use_reentrant=False, preserve_rng_state=False)
