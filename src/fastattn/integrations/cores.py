"""The mechanisms on heads of other libraries' models: functions without parameters or buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._autograd import call
from fastattn.nn.bigbird import layout_of, lengths_of
from fastattn.nn.linformer_sums import counts, of_windows
from fastattn.ops import (
    block_sparse_attention,
    draw_projection,
    favor_attention,
    linear_attention,
)
from fastattn.ops.linformer import attend


class About(NamedTuple):
    """What a core is told beside heads."""

    module: nn.Module
    decoder: bool = False
    causal: bool = False  # of a decoder, where there is more than one query
    ignored: Tensor | None = None  # (b, s)
    scale: float = 1.0
    dropout: float = 0.0

    @property
    def layer(self) -> int:
        return getattr(self.module, "layer_idx", None) or 0


def core_of(name: str, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """A mechanism with its options, tried once, so that a wrong value raises here."""
    chosen = CORES[name]
    parameters = inspect.signature(chosen).parameters.values()
    possible = [p.name for p in parameters if p.default is not p.empty]
    unknown = sorted(options.keys() - set(possible))
    if unknown:
        raise TypeError(
            f"{name} has no option {', '.join(unknown)}; it takes {', '.join(possible)}"
        )
    chosen = partial(chosen, **options)
    q = torch.zeros(1, 1, 16, 8)
    chosen(q, q, q, About(nn.Identity()))
    return chosen


def _linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    about: About,
    *,
    feature_map: str = "elu",
) -> Tensor:
    out = linear_attention(
        q, k, v, feature_map=feature_map, causal=about.causal, key_padding_mask=about.ignored
    )
    return F.dropout(out, about.dropout)


def _performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    about: About,
    *,
    num_features: int = 256,
    variant: str = "positive",
    kind: str = "orthogonal",
    seed: int = 0,
) -> Tensor:
    projection = _directions(num_features, q.shape[3], kind, seed, about.layer, q.device)
    out = favor_attention(
        q,
        k,
        v,
        projection,
        variant=variant,
        causal=about.causal,
        key_padding_mask=about.ignored,
        scale=about.scale,
    )
    return F.dropout(out, about.dropout)


def _directions(m: int, d: int, kind: str, seed: int, layer: int, device: torch.device) -> Tensor:
    """Drawn once. A compiler or a mode that looks on gets an operator: it must not trace a draw,
    nor leave a tensor of its own among those that are kept."""
    directions: Tensor = call(
        torch.ops.fastattn.directions, _drawn, m, d, kind, seed, layer, device
    )
    return directions


@lru_cache(maxsize=1024)
def _drawn(m: int, d: int, kind: str, seed: int, layer: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return draw_projection(m, d, kind=kind, seed=seed, layer=layer).to(device)


_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define("directions(int m, int d, str kind, int seed, int layer, Device device) -> Tensor")
_lib.impl("directions", lambda *about: _drawn(*about).clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("fastattn::directions", lib=_lib)
def _(m: int, d: int, kind: str, seed: int, layer: int, device: torch.device) -> Tensor:
    return torch.empty(m, d, device=device)


def _bigbird(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    about: About,
    *,
    block_size: int = 64,
    num_window_blocks: int = 3,
    num_random_blocks: int = 3,
    num_global_blocks: int = 2,
    seed: int = 0,
) -> Tensor:
    n = q.shape[2]
    if about.decoder or n != k.shape[2]:
        raise NotImplementedError(
            "bigbird is self-attention in both directions: its global blocks see what "
            "comes later. linear and performer are for decoders and "
            "cross-attention"
        )
    numbers = (num_window_blocks, num_random_blocks, num_global_blocks)
    return block_sparse_attention(
        q * (about.scale * q.shape[3] ** 0.5),
        k,
        v,
        layout_of(n, 0, block_size, q.shape[1], *numbers, "uniform", seed, about.layer),
        key_padding_mask=about.ignored,
        lengths=None if about.ignored is None else lengths_of(about.ignored),
        dropout_p=about.dropout,
    )


def _linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    about: About,
    *,
    slots: int = 256,
    seq_len: int | None = None,
) -> Tensor:
    if about.decoder:
        raise NotImplementedError(
            "linformer has no causal form: a slot is a sum over all tokens. "
            "linear and performer are for decoders"
        )
    s, ignored = k.shape[2], about.ignored
    if slots < 1 or (seq_len is not None and seq_len < 1):
        raise ValueError(f"slots and seq_len must be positive, got {slots} and {seq_len}")
    length = seq_len or getattr(
        getattr(about.module, "config", None), "max_position_embeddings", None
    )
    window = -(-(length or s) // slots)
    if s > slots * window:
        raise ValueError(
            f"linformer divides seq_len = {length} tokens into {slots} windows, got {s}: "
            "give it a longer seq_len"
        )
    if s <= slots:  # every token has a slot of its own
        window = 1
    if ignored is not None:
        k, v = (x.masked_fill(ignored[:, None, :, None], 0) for x in (k, v))
    slots = -(-s // window)
    valid = counts(slots, window, s, ignored, k.device)
    means = of_windows(valid, window, s, None, k.dtype)
    k, v = means.of_heads(k, None), means.of_heads(v, None)
    off = None if ignored is None else (valid == 0).expand(q.shape[0], -1)
    return F.dropout(attend(q, k, v, off, about.scale, None), about.dropout)


CORES: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "performer": _performer,
    "bigbird": _bigbird,
    "linformer": _linformer,
}
