"""The drop-in shell: everything of ``nn.MultiheadAttention`` except the attention itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAY_OUT = (
    "This attention takes the causal mask (pass is_causal=True with it), no mask, and "
    "key_padding_mask; for any other mask keep nn.MultiheadAttention in this layer"
)
NO_BIAS = (
    "a float key_padding_mask must be 0 (attend) or -inf (ignore); a finite bias on the keys is "
    "not supported. Give a bool mask, True = ignore, or keep nn.MultiheadAttention in this layer"
)


class MultiHead(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with another core; the base of every mechanism, abstract.

    ``forward`` is four steps, each of which a mechanism may override: ``_heads`` (inputs to heads,
    by ``_project``), ``_attend`` (the mechanism, required), ``_merge`` (heads to one width),
    ``out_proj``.
    ``_configure`` takes a mechanism's own options, keyword-only with defaults, and stores each as
    the attribute of its name: the constructor and ``fastattn.convert`` both call it.

    ``need_weights`` defaults to False, the one deviation from the stock signature: the weights of
    a linear-cost attention cost O(n·s), so they are computed only when asked for.
    """

    causal: bool
    _layer = 0  # convert numbers the modules of a model
    _stock_class: type[nn.MultiheadAttention] = nn.MultiheadAttention  # what revert gives back
    _own_state: tuple[str, ...] = ()  # in the state dict, not in stock's
    _drops_weights = False  # whether _attend applies dropout, to the weights

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
    ) -> None:
        if embed_dim > 0 and num_heads > 0 and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
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

    def _reset_parameters(self) -> None:
        """Initialise as stock does, then close the door to the softmax fast path.

        In eval mode ``nn.TransformerEncoderLayer`` hands the weights of a module whose
        ``_qkv_same_embed_dim`` is True to a C++ softmax attention and never calls the module.
        """
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep that door closed: stock takes a state that does not say so for one with it open."""
        super().__setstate__(state)
        self._qkv_same_embed_dim = False

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The keywords that are this mechanism's own."""
        return tuple(inspect.signature(cls._configure).parameters)[1:]

    def extra_repr(self) -> str:
        options = (f"{name}={getattr(self, name)!r}" for name in self.option_names())
        return ", ".join((f"{self.embed_dim}, {self.num_heads}", *options))

    def _configure(self) -> None:
        raise NotImplementedError

    def _unconfigure(self) -> None:
        """Forget what ``_configure`` has stored."""
        for option in self.option_names():
            delattr(self, option)
        vars(self).pop("_layer", None)
        vars(self).pop("_stock_class", None)

    def _reset_own(self, names: Sequence[str] | None = None) -> None:
        """Make what ``_own_state`` names, or these of it, as at first."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """A stock state dict has nothing of our own, and loads all the same: what is missing of
        ours is as at first."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        ours = {prefix + name: name for name in self._own_state}
        missing = [ours[key] for key in missing_keys if key in ours]
        if missing:
            self._reset_own(missing)
        missing_keys[:] = [key for key in missing_keys if key not in ours]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding_mask: Tensor | None
    ) -> Tensor:
        """``(b, h, n, d)``, ``(b, h, s, d)``, ``(b, h, s, e)`` to ``(b, h, n, e)``, linear in v."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and shapes of ``nn.MultiheadAttention.forward``.

        Args:
            query: ``(n, b, embed_dim)``, with ``batch_first`` ``(b, n, embed_dim)``, or unbatched
                ``(n, embed_dim)``.
            key: ``(s, b, kdim)`` likewise.
            value: ``(s, b, vdim)`` likewise.
            key_padding_mask: ``(b, s)``, unbatched ``(s,)``: bool, True = ignore, or float, -inf =
                ignore and 0 = attend.
            need_weights: Also return the weights, at a cost of O(n·s); they are those before
                dropout.
            attn_mask: None, or the causal ``(n, n)`` mask. Without the hint ``is_causal`` its
                values are read, which synchronises a GPU once per call.
            average_attn_weights: Average the weights over the heads.
            is_causal: Row i sees keys 0 to i. The hint is trusted: ``attn_mask`` is not read, and
                may be None. The environment's ``FASTATTN_CHECK_MASKS=1`` has it read all the same.

        Returns:
            The output, shaped as the query, and None or the weights ``(b, n, s)``, per head
            ``(b, h, n, s)``. A row that may see no key gives ``out_proj`` of zeros.

        Raises:
            NotImplementedError: A mask that this attention cannot honour.
            ValueError: A shape or a finite float in ``key_padding_mask`` does not fit, or a mask
                that was read is not what the hint says.
        """
        batched = self._check_inputs(query, key, value)
        causal = self._is_causal(attn_mask, is_causal, query, key, batched)
        ignored = self._ignored(key_padding_mask, key, batched)
        inputs = self._batch_first((query, key, value), batched)
        q, k, v, about = self._heads(*inputs, ignored, causal, need_weights)
        q, k, v, about = self._extend(q, k, v, about, causal)

        out = self._attend(q, k, v, causal=causal, key_padding_mask=about)
        skip = self._extra_keys if causal else 0  # the queries that only carry the extra keys
        out = out[:, :, skip:]
        if not self._drops_weights:
            out = F.dropout(out, self.dropout, self.training)
        out = self.out_proj(self._merge(out, batched))
        if not need_weights:
            return out, None
        weights = self._weights(q, k, causal, about)[:, :, skip:]
        weights = weights.roll(-skip, -1)  # extra keys are the last columns, as in stock
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if batched else weights.squeeze(0)

    def _heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ignored: Tensor | None,
        causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Inputs ``(b, n, width)`` to heads ``(b, h, n, d)``, and what ``_attend`` gets of keys."""
        return *self._project(query, key, value), ignored

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(b, n, width)`` each to ``(b, h, n, d)`` each, in as few products as stock."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is None:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            parts = map(linear, (query, key, value), weights, biases)
        elif query is key and key is value:
            parts = iter(linear(query, weight, bias).chunk(3, -1))
        elif key is value:
            sizes = [self.embed_dim, 2 * self.embed_dim]
            for_q, for_kv = weight.split(sizes)
            bias_q, bias_kv = (None, None) if bias is None else bias.split(sizes)
            both = linear(key, for_kv, bias_kv).chunk(2, -1)
            parts = iter((linear(query, for_q, bias_q), *both))
        else:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            parts = map(linear, (query, key, value), weight.chunk(3), biases)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)
        return q, k, v

    def _merge(self, out: Tensor, batched: bool) -> Tensor:
        """``(b, h, n, d)`` to the caller's layout."""
        if not batched:
            return out.squeeze(0).transpose(0, 1).flatten(1)  # (n, h·d)
        order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        return out.permute(order).flatten(2)

    def _batch_first(
        self, inputs: tuple[Tensor, Tensor, Tensor], batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Views ``(b, n, width)``; what was one tensor stays one, so that it is projected once."""
        if batched and self.batch_first:
            return inputs
        query, key, value = inputs

        def view(x: Tensor) -> Tensor:
            return x.transpose(0, 1) if batched else x.unsqueeze(0)

        q = view(query)
        k = q if key is query else view(key)
        v = k if value is key else q if value is query else view(value)
        return q, k, v

    @property
    def _extra_keys(self) -> int:
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    def _extras(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of ``add_bias_kv`` and ``add_zero_attn``, ``(b, h, extra, d)``."""
        keys, values = [], []
        if self.bias_k is not None and self.bias_v is not None:
            shape = (1, self.num_heads, 1, self.head_dim)
            keys.append(self.bias_k.view(shape).expand(k.shape[0], -1, -1, -1).to(k.dtype))
            values.append(self.bias_v.view(shape).expand(v.shape[0], -1, -1, -1).to(v.dtype))
        if self.add_zero_attn:
            keys.append(k.new_zeros(*k.shape[:2], 1, k.shape[3]))
            values.append(v.new_zeros(*v.shape[:2], 1, v.shape[3]))
        return torch.cat(keys, 2), torch.cat(values, 2)

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Add the extra keys: at the end, or, where attention is causal, as a past of all rows."""
        if not self._extra_keys:
            return q, k, v, ignored
        extra_k, extra_v = self._extras(k, v)
        pairs = ((extra_k, k), (extra_v, v)) if causal else ((k, extra_k), (v, extra_v))
        k, v = (torch.cat(pair, 2) for pair in pairs)
        if causal:
            q = F.pad(q, (0, 0, self._extra_keys, 0))
        if ignored is not None:
            ignored = F.pad(ignored, (self._extra_keys, 0) if causal else (0, self._extra_keys))
        return q, k, v, ignored

    def _weights(self, q: Tensor, k: Tensor, causal: bool, ignored: Tensor | None) -> Tensor:
        """``(b, h, n, s)``: the output is linear in v, so the identity as v yields the weights."""
        s = k.shape[2]
        if s == 0:
            return q.new_zeros(*q.shape[:3], 0)
        identity = torch.eye(s, dtype=q.dtype, device=q.device).expand(*k.shape[:2], s, s)
        parts = [
            self._attend(q, k, columns, causal=causal, key_padding_mask=ignored)
            for columns in identity.split(256, -1)
        ]
        return torch.cat(parts, -1)

    # The door

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Check the shapes; return whether there is a batch axis."""
        name = type(self).__name__
        for label, x in (("query", query), ("key", key), ("value", value)):
            if x.is_nested:
                raise ValueError(
                    f"{name}: {label} is a nested tensor, which it cannot take. Build "
                    "nn.TransformerEncoder with enable_nested_tensor=False; in one that is already "
                    "built, set use_nested_tensor = False (fastattn.convert of it does so)"
                )
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                raise AssertionError(  # the type that nn.MultiheadAttention raises
                    f"{name}: query, key and value must all be 3-D, or all 2-D when unbatched; "
                    f"{label} has shape {tuple(x.shape)}, query {tuple(query.shape)}"
                )
        widths = (("query", query, self.embed_dim), ("key", key, self.kdim))
        for label, x, width in (*widths, ("value", value, self.vdim)):
            if x.shape[-1] != width:
                raise ValueError(
                    f"{name}: {label} must have width {width}, got shape {tuple(x.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"{name}: key and value must agree in batch and length, got {tuple(key.shape)} "
                f"and {tuple(value.shape)}"
            )
        batched = query.dim() == 3
        batch = 0 if self.batch_first else 1
        if batched and query.shape[batch] != key.shape[batch]:
            layout = "(b, n, width)" if self.batch_first else "(n, b, width)"
            raise ValueError(
                f"{name}: query and key must have the same batch in {layout}, got "
                f"{tuple(query.shape)} and {tuple(key.shape)}"
            )
        return batched

    def _is_causal(
        self, mask: Tensor | None, hint: bool, query: Tensor, key: Tensor, batched: bool
    ) -> bool:
        axis = 1 if batched and self.batch_first else 0
        n, s = query.shape[axis], key.shape[axis]
        name = type(self).__name__
        causal = self.causal or hint
        if mask is not None:
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(f"{name}: attn_mask must be bool or float, got {mask.dtype}")
            if tuple(mask.shape) != (n, s):
                raise NotImplementedError(
                    f"{name}: attn_mask of shape {tuple(mask.shape)} is not supported, only the "
                    f"causal ({n}, {s}). {WAY_OUT}"
                )
            if not hint and not (self.causal and torch.compiler.is_compiling()):
                causal = _mask_is_causal(mask, name) or causal
            elif _checks_masks() and not _mask_is_causal(mask, name) and hint and n > 1:
                raise ValueError(
                    f"{name}: attn_mask of shape {tuple(mask.shape)} hides nothing, but is_causal "
                    "is True: give the causal mask or none, or leave the hint out"
                )
        if causal and n != s:
            raise ValueError(
                f"{name}: causal attention needs as many keys as queries, got n = {n} and s = {s}"
            )
        return causal

    def _ignored(self, mask: Tensor | None, key: Tensor, batched: bool) -> Tensor | None:
        """The padding mask as ``(b, s)`` bool, True = ignore."""
        if mask is None:
            return None
        name = type(self).__name__
        axes = ((0, 1) if self.batch_first else (1, 0)) if batched else (0,)
        shape = tuple(key.shape[axis] for axis in axes)
        if tuple(mask.shape) != shape:
            letters = "(b, s)" if batched else "(s,)"
            raise ValueError(
                f"{name}: key_padding_mask must be {letters} = {shape}, got shape "
                f"{tuple(mask.shape)}"
            )
        if mask.dtype != torch.bool:
            if not mask.is_floating_point():
                raise AssertionError(
                    f"{name}: key_padding_mask must be bool or float, got {mask.dtype}"
                )
            ignored = mask == -torch.inf
            legal = ignored | (mask == 0)
            if mask.device.type != "cpu" or torch.compiler.is_compiling():
                torch._assert_async(legal.all(), f"{name}: {NO_BIAS}")  # no synchronisation
            elif not legal.all():
                largest = max(mask[~legal].tolist(), key=abs)
                raise ValueError(f"{name}: {NO_BIAS}. The largest is {largest:g}")
            mask = ignored
        return mask if batched else mask.unsqueeze(0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of ``(b, n, width)``; a transposed view is not copied first."""
    if x.stride(0) >= x.stride(1):
        return F.linear(x, weight, bias)
    return F.linear(x.transpose(0, 1), weight, bias).transpose(0, 1)


def _checks_masks() -> bool:
    """Whether to read a mask although the hint is there: for debugging, and not when compiling."""
    return not torch.compiler.is_compiling() and os.environ.get("FASTATTN_CHECK_MASKS") == "1"


def _mask_is_causal(mask: Tensor, name: str) -> bool:
    """Whether the mask is the causal one; False if it hides nothing; anything else raises."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name}: under torch.compile the values of attn_mask cannot be read. {WAY_OUT}"
        )
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    future = torch.ones_like(hidden).triu(1)
    biased = torch.zeros_like(hidden) if mask.dtype == torch.bool else ~hidden & (mask != 0)
    facts = torch.stack((biased.any(), (hidden == future).all(), hidden.any()))
    is_biased, is_causal, hides = facts.tolist()  # the one synchronisation
    if is_biased or (hides and not is_causal):
        shape = tuple(mask.shape)
        raise NotImplementedError(
            f"{name}: the attn_mask of shape {shape} is not the causal one. {WAY_OUT}"
        )
    return hides
