"""Linformer as a drop-in for ``nn.MultiheadAttention``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import _check, _tuning
from fastattn.nn.linformer_sums import (
    Sum,
    counts,
    of_both,
    of_both_heads,
    of_softmax,
    of_windows,
    resampled,
)
from fastattn.nn.multihead import MultiHead, linear
from fastattn.ops.linformer import BACKENDS, attend, linformer_attention
from fastattn.ops.linformer_torch import attend_to_segments

SHARINGS = ("none", "headwise", "key-value", "layerwise")
KINDS = ("learned", "fixed", "mean", "max", "conv", "dynamic")
POOLS = ("mean", "max", "conv")
SLOTS_OF_SEGMENT = 16


class _Keys(NamedTuple):
    """What ``_attend`` needs beside heads."""

    ignored: Tensor | None  # (b, s) tokens
    of_key: Sum | None
    of_value: Sum | None
    off: Tensor | None  # (b, slots) that nobody sees
    compressed: bool  # keys and values are slots already
    extra: int = 0  # of keys, the last so many are slots of their own

    @property
    def matrices(self) -> tuple[Tensor, Tensor] | None:
        """Of keys and of values, where slots are their products with tokens alone."""
        key, value = self.of_key, self.of_value
        if key is None or value is None or self.off is not None or self.extra:
            return None
        if any(x.rows is not None or x.of_samples for x in (key, value)):
            return None
        return key.matrix, value.matrix


class LinformerAttention(MultiHead):
    """Multi-head attention to slots, each a sum over all tokens, in O(n·slots) (Wang et al. 2020).

    Takes the place of ``nn.MultiheadAttention``: same arguments, same parameters, with
    ``compress_key`` and ``compress_value`` beside them, same initial values from the same seed, and
    a stock state dict loads strictly. It computes another function than softmax attention, so
    weights trained with softmax need fine-tuning. Dropout acts on the output.

    Padding is left out of the sums, so that it changes nothing. With a projection that all heads
    share, tokens are compressed before they are projected, Eᵀ(X W + b) = (EᵀX) W + (Eᵀ1) b: the
    layers of keys and values run on the slots alone.

    Args:
        embed_dim ... dtype: As in ``nn.MultiheadAttention``, in the same order. The keys of
            ``add_bias_kv`` and ``add_zero_attn`` are slots of their own.
        seq_len: L, the most keys that there can be; fewer take the first columns.
        slots: How many sums; queries attend to them.
        sharing: Who has the same projection: "none" (each head its own, of keys and of values),
            "headwise" (all heads, one of keys and one of values), "key-value" (one), "layerwise"
            (one, given as ``projection``).
        kind: "learned" (from N(0, 1/L), which keeps the variance of full-length input); "fixed"
            (the same, not learned, in the state dict); "mean", "max" or "conv" of windows of
            ceil(L / slots) tokens, by their valid tokens (conv: one tap for each place of a
            window); "dynamic" (a softmax over tokens of x W, Zhu et al. 2021). Windows without a
            valid token are not seen.
        projection: For "layerwise": ``LinformerAttention.draw_projection(L, slots)``, handed to
            every layer, which ties them.
        interpolate: Resample the columns of a learned or fixed projection for the length of each
            sample, where its last valid token ends, also beyond L, instead of taking the first.
        causal: False; or "segment": a token sees its own segment up to itself, and the slots of
            segments before it, at O(n·(slots + tokens in a segment)). A segment has 16 slots, or
            the root of all if that is less; for learned and fixed projections.
        backend: As in ``ops.linformer_attention``; None picks the fastest that can run.
    """

    _own_state = ("compress_key", "compress_value")
    _compress_first = True  # where it is less work; a benchmark asks for the other order

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        seq_len: int,
        slots: int = 256,
        sharing: str = "headwise",
        kind: str = "learned",
        projection: nn.Parameter | None = None,
        interpolate: bool = False,
        causal: bool | str = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self._configure(
            seq_len=seq_len,
            slots=slots,
            sharing=sharing,
            kind=kind,
            projection=projection,
            interpolate=interpolate,
            causal=causal,
            backend=backend,
        )

    def _configure(  # type: ignore[override]
        self,
        *,
        seq_len: int,
        slots: int = 256,
        sharing: str = "headwise",
        kind: str = "learned",
        projection: nn.Parameter | None = None,
        interpolate: bool = False,
        causal: bool | str = False,
        backend: str | None = None,
    ) -> None:
        if backend is not None:
            _check.check_option("backend", backend, BACKENDS)
        for name, value in (("seq_len", seq_len), ("slots", slots)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        if not isinstance(interpolate, bool):
            raise ValueError(f"interpolate must be True or False, got {interpolate!r}")
        _check.check_option("sharing", sharing, SHARINGS)
        _check.check_option("kind", kind, KINDS)
        if causal not in (False, "segment"):
            raise ValueError(f"causal must be False or 'segment', got {causal!r}: {WAY_OUT}")
        if (sharing == "layerwise") != (projection is not None):
            raise ValueError(
                "projection belongs to sharing='layerwise': give every layer the same "
                "LinformerAttention.draw_projection(seq_len, slots)"
            )
        if projection is not None:
            self._check_projection(projection, seq_len, slots, kind, causal)
        if interpolate and (kind not in ("learned", "fixed") or causal):
            raise ValueError("interpolate needs a learned or fixed projection that is not causal")
        if causal and (kind not in ("learned", "fixed") or self._extra_keys):
            raise ValueError(
                "causal='segment' needs a learned or fixed projection, and no add_bias_kv or "
                "add_zero_attn"
            )
        self.seq_len = seq_len
        self.slots = slots
        self.sharing = sharing
        self.kind = kind
        self.projection = projection is not None
        self.interpolate = interpolate
        self.causal = causal  # type: ignore[assignment]
        self.backend = backend
        if projection is not None:
            self.compress_key = projection
        self._reset_own()

    def _check_projection(
        self, projection: nn.Parameter, seq_len: int, slots: int, kind: str, causal: bool | str
    ) -> None:
        if not isinstance(projection, nn.Parameter):
            raise ValueError(
                "projection must be an nn.Parameter, as LinformerAttention.draw_projection makes "
                f"it, got {type(projection).__name__}"
            )
        if kind != "learned" or causal or tuple(projection.shape) != (slots, seq_len):
            raise ValueError(
                "projection needs kind='learned', no causal, and shape (slots, seq_len) = "
                f"({slots}, {seq_len}), got {kind!r}, {causal!r}, {tuple(projection.shape)}"
            )
        weight = self.out_proj.weight
        if projection.dtype != weight.dtype or (
            projection.device != weight.device and not weight.is_meta
        ):
            raise ValueError(
                f"projection must be {weight.dtype} on {weight.device} as the module, it is "
                f"{projection.dtype} on {projection.device}"
            )

    def _unconfigure(self) -> None:
        super()._unconfigure()
        for name in self._own_state:
            if name in self._buffers or name in self._parameters:
                delattr(self, name)

    @staticmethod
    def draw_projection(
        seq_len: int,
        slots: int = 256,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """A projection ``(slots, seq_len)`` from N(0, 1 / seq_len), to hand to every layer."""
        drawn = torch.empty(slots, seq_len, device=device, dtype=dtype)
        return nn.Parameter(nn.init.normal_(drawn, std=seq_len**-0.5))

    # What is learned, or drawn

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        if "seq_len" in vars(self):  # not while stock's constructor runs
            self._reset_own()

    def _reset_own(self, names: Sequence[str] | None = None) -> None:
        """Draw what is in the state dict and not in stock's; what was given stays as it is."""
        if self.kind in ("mean", "max") or self.projection:
            return
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        own = self._own_state[: 1 if self.sharing == "key-value" else 2]
        for name, width in zip(own, (self.kdim, self.vdim), strict=False):
            if names is not None and name not in names:
                continue
            shape, std = self._shape_of_own(width)
            present = getattr(self, name, None)
            if present is None or present.shape != shape or present.device != weight.device:
                present = torch.empty(shape, device=weight.device, dtype=weight.dtype)
                if self.kind == "fixed":
                    self.register_buffer(name, present)
                else:
                    setattr(self, name, nn.Parameter(present))
            with torch.no_grad():
                if self.kind == "conv":
                    getattr(self, name).fill_(1 / shape[-1])  # as the mean
                else:
                    getattr(self, name).normal_(std=std)

    def _number(self, layer: int) -> None:
        super()._number(layer)
        if self.kind == "fixed":
            self._reset_own()

    def _shape_of_own(self, width: int) -> tuple[tuple[int, ...], float]:
        heads = (self.num_heads,) if self.sharing == "none" else ()
        if self.kind == "conv":
            return (*heads, self._window), 0.0
        if self.kind == "dynamic":
            return (*heads, self.slots, width), width**-0.5
        if self.causal:
            segments, each, tokens = self._segments
            return (*heads, segments * each, tokens), tokens**-0.5
        return (*heads, self.slots, self.seq_len), self.seq_len**-0.5

    @property
    def _window(self) -> int:
        """Tokens in a window of a pool."""
        return -(-self.seq_len // self.slots)

    @property
    def _segments(self) -> tuple[int, int, int]:
        """How many segments, slots of each, and tokens of each."""
        each = min(math.isqrt(self.slots), SLOTS_OF_SEGMENT)
        tokens = -(-self.seq_len // (self.slots // each))
        return -(-self.seq_len // tokens), each, tokens

    # From inputs to slots

    def _heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ignored: Tensor | None,
        causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        s = key.shape[1]
        if causal and not self.causal:
            raise NotImplementedError(f"LinformerAttention: {WAY_OUT}")
        if need_weights and self.kind == "max":
            raise NotImplementedError(
                "LinformerAttention with kind='max' has no weights: a maximum is no sum over tokens"
            )
        if s > self.seq_len and not self.interpolate:
            raise ValueError(
                f"LinformerAttention was made for seq_len = {self.seq_len} keys, got s = {s}: make "
                "it longer" + ("" if self.causal else ", or with interpolate=True")
            )
        if ignored is not None:
            _check.check_key_padding_mask(ignored, key.shape[0], s, key.device)
            hidden = ignored.unsqueeze(-1)
            same = value is key
            key = key.masked_fill(hidden, 0)
            value = key if same else value.masked_fill(hidden, 0)
        of_key = of_value = off = None
        if self.kind != "max" and not self.causal:
            of_key = self._sum("compress_key", key, ignored)
            own = getattr(self, "compress_value", None) is not None
            of_value = of_key if not own else self._sum("compress_value", value, ignored)
        if self.kind in POOLS:
            off = counts(self.slots, self._window, s, ignored, key.device) == 0
        about = _Keys(ignored, of_key, of_value, off, False)
        shared = of_key is not None and self.sharing != "none"
        few = s < _tuning.linformer_compress_first(self.slots, key.device.type)
        if not shared or need_weights or few or not self._compress_first:
            return *self._project(query, key, value), about
        q, k, v = self._project_slots(query, key, value, about)
        return q, k, v, about._replace(compressed=True)

    def _project_slots(
        self, query: Tensor, key: Tensor, value: Tensor, about: _Keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compress, then project: the layers of keys and values run on slots alone."""
        of_key, of_value = about.of_key, about.of_value
        assert of_key is not None
        assert of_value is not None
        if key is value and of_key is of_value:
            keys = values = of_key.of(key, self.backend)
        else:
            keys, values = of_both(key, value, of_key, of_value, self.backend)
        weights, biases = self._in_projections()
        parts = [linear(query, weights[0], biases[0])]
        for x, weight, bias, of in zip(
            (keys, values), weights[1:], biases[1:], (of_key, of_value), strict=True
        ):
            part = F.linear(x, weight)
            if bias is not None:
                mass = of.mass(about.ignored).unsqueeze(-1)
                part = torch.addcmul(part, mass.to(part.dtype), bias.to(part.dtype))
            parts.append(part)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)
        return q, k, v

    def _in_projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Weights and biases of the layers of queries, keys and values."""
        bias = self.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        if self.in_proj_weight is None:
            return (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight), biases
        return self.in_proj_weight.chunk(3), biases

    def _sum(self, name: str, x: Tensor, ignored: Tensor | None) -> Sum:
        """How slots come from tokens ``(b, s, width)``."""
        s = x.shape[1]
        if self.kind in POOLS:
            taps = None if self.kind == "mean" else getattr(self, name)
            valid = counts(self.slots, self._window, s, ignored, x.device)
            return of_windows(valid, self._window, s, taps, x.dtype)
        matrix = getattr(self, name)
        if self.kind == "dynamic":
            return of_softmax(matrix, x, ignored)
        if self.interpolate:
            return Sum(resampled(matrix, s, ignored), None, ignored is not None)
        # a narrow of everything would cost a copy in the backward pass
        return Sum(matrix if s == matrix.shape[-1] else matrix.narrow(-1, 0, s), None)

    # From heads to outputs

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, ignored: Any, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        if not self._extra_keys:
            return q, k, v, ignored
        extra_k, extra_v = self._extras(k, v)
        k, v = torch.cat([k, extra_k], 2), torch.cat([v, extra_v], 2)
        return q, k, v, ignored._replace(extra=self._extra_keys)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding_mask: Any
    ) -> Tensor:
        about: _Keys = key_padding_mask
        if causal:
            _, each, tokens = self._segments
            own = getattr(self, "compress_value", self.compress_key)
            projections = self.compress_key.to(k.dtype), own.to(k.dtype)
            scale = self.head_dim**-0.5
            return attend_to_segments(q, k, v, *projections, about.ignored, each, tokens, scale)
        off, scale = about.off, self.head_dim**-0.5
        if not about.compressed:
            if (matrices := about.matrices) is not None:
                mask, backend = about.ignored, self.backend
                return linformer_attention(
                    q, k, v, *matrices, key_padding_mask=mask, scale=scale, backend=backend
                )
            k, v = self._compress_heads(k, v, about)
        if off is not None:
            off = F.pad(off, (0, about.extra)).expand(q.shape[0], -1)
        k, v = k.to(q.dtype), v.to(q.dtype)  # sums of autocast may be wider
        return attend(q, k, v, off, scale, self.backend)

    def _compress_heads(self, k: Tensor, v: Tensor, about: _Keys) -> tuple[Tensor, Tensor]:
        """Heads of tokens to heads of slots; what ``_extend`` has added stays behind them."""
        of_key, of_value, ignored = about.of_key, about.of_value, None
        extra: tuple[Tensor, ...] = ()
        tokens: tuple[Tensor, ...] = (k, v)
        if about.extra:
            s = k.shape[2] - about.extra
            tokens, extra = (k[:, :, :s], v[:, :, :s]), (k[:, :, s:], v[:, :, s:])
        if about.ignored is not None:
            ignored = about.ignored[:, None, :, None]
        if of_key is None or of_value is None:
            slots = tuple(self._largest(x, ignored) for x in tokens)
        else:
            if ignored is not None:
                tokens = tuple(x.masked_fill(ignored, 0) for x in tokens)
            slots = of_both_heads(tokens[0], tokens[1], of_key, of_value, self.backend)
        if extra:
            slots = tuple(torch.cat(parts, 2) for parts in zip(slots, extra, strict=True))
        return slots[0], slots[1]

    def _largest(self, x: Tensor, ignored: Tensor | None) -> Tensor:
        """``(b, h, s, d)`` to ``(b, h, slots, d)``: the maximum of every window."""
        if ignored is not None:
            x = x.masked_fill(ignored, -torch.inf)
        x = F.pad(x, (0, 0, 0, self.slots * self._window - x.shape[2]), value=-torch.inf)
        best = x.unflatten(2, (self.slots, self._window)).amax(3)
        return best.masked_fill(best == -torch.inf, 0)


WAY_OUT = (
    "a slot is a sum over all tokens, so no mask between queries and slots is causal. "
    "causal='segment' in the constructor lets a token see its own segment up to itself and the "
    "slots of segments before it"
)
