"""The drop-in shell: everything of ``nn.MultiheadAttention`` except the attention itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.nn.masks import ignored_keys, says_causal


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
    _layer = 0  # convert and number_layers number the modules of a model
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
            raise AssertionError(  # the type that nn.MultiheadAttention raises
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

    def _number(self, layer: int) -> None:
        """Become this layer of a model; a mechanism draws anew what is random and no weight."""
        self._layer = layer

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
            key_padding_mask: ``(b, s)``, unbatched ``(s,)``: bool, True = ignore, or float: 0 =
                attend, -inf or the dtype's least number = ignore.
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
            AssertionError, RuntimeError: A shape or a mask's dtype does not fit; the types are
                those of ``nn.MultiheadAttention``.
            NotImplementedError: A mask that this attention cannot honour.
            ValueError: A float in ``key_padding_mask`` is neither 0 nor an ignored key's (a
                RuntimeError where that is found without reading it: on a GPU, compiled), lengths
                are not those of causal attention, or a mask that was read is not what the hint
                says.
        """
        batched, name = self._check_inputs(query, key, value), type(self).__name__
        tokens = 1 if batched and self.batch_first else 0  # their axis
        n, s = query.shape[tokens], key.shape[tokens]
        shape = (key.shape[1 - tokens], s) if batched else (s,)
        causal = says_causal(attn_mask, (n, s), hint=is_causal, always=self.causal, name=name)
        ignored = ignored_keys(key_padding_mask, shape, batched=batched, name=name)
        inputs = self._batch_first((query, key, value), batched)
        q, k, v, about = self._heads(*inputs, ignored, causal, need_weights)
        q, k, v, about = self._extend(q, k, v, about, causal)

        out = self._attend(q, k, v, causal=causal, key_padding_mask=about)
        skip = self._extra_keys if causal else 0  # the queries that only carry the extra keys
        out = out[:, :, skip:]
        if self.training and self.dropout and not self._drops_weights:
            out = F.dropout(out, self.dropout)
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
        if query is key and key is value and weight is not None:  # the usual: in fewest views
            all_three = linear(query, weight, bias).unflatten(-1, (3, self.num_heads, -1))
            q, k, v = all_three.unbind(2)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if weight is None:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            parts = map(linear, (query, key, value), weights, biases)
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
        """Check the shapes; return whether there is a batch axis.

        What does not fit raises what ``nn.MultiheadAttention`` raises for it.
        """
        name = type(self).__name__
        for label, x in (("query", query), ("key", key), ("value", value)):
            if x.is_nested:
                raise AssertionError(
                    f"{name}: {label} is a nested tensor, which it cannot take. Build "
                    "nn.TransformerEncoder with enable_nested_tensor=False; in one that is already "
                    "built, set use_nested_tensor = False (fastattn.convert of it does so)"
                )
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                raise AssertionError(
                    f"{name}: query, key and value must all be 3-D, or all 2-D when unbatched; "
                    f"{label} has shape {tuple(x.shape)}, query {tuple(query.shape)}"
                )
        widths = (("query", query, self.embed_dim), ("key", key, self.kdim))
        for label, x, width in (*widths, ("value", value, self.vdim)):
            if x.shape[-1] != width:
                raise AssertionError(
                    f"{name}: {label} must have width {width}, got shape {tuple(x.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise AssertionError(
                f"{name}: key and value must agree in batch and length, got {tuple(key.shape)} "
                f"and {tuple(value.shape)}"
            )
        batched = query.dim() == 3
        batch = 0 if self.batch_first else 1
        if batched and query.shape[batch] != key.shape[batch]:
            layout = "(b, n, width)" if self.batch_first else "(n, b, width)"
            raise RuntimeError(
                f"{name}: query and key must have the same batch in {layout}, got "
                f"{tuple(query.shape)} and {tuple(key.shape)}"
            )
        return batched


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of ``(b, n, width)``; a transposed view is not copied first."""
    if x.stride(0) >= x.stride(1):
        return F.linear(x, weight, bias)
    return F.linear(x.transpose(0, 1), weight, bias).transpose(0, 1)


def number_layers(model: nn.Module) -> list[str]:
    """Give each fastattn attention in a model random directions or blocks of its own.

    For a model that is built of copies: ``nn.TransformerEncoder(layer, 6)`` copies the layer, and a
    faithful copy has the directions of FAVOR+ (the random blocks of BigBird, the fixed projections
    of Linformer) of what it is a copy of. The attentions get the numbers that ``fastattn.convert``
    gives, by their order in the model, and draw by seed and number; fixed projections are drawn by
    PyTorch's generator. Weights stay as they are, but learned directions start anew.

    Call it once, when the model is built: before it is trained, wrapped or loaded into. A number
    is part of copies and pickles, and of no state dict, as the blocks that it decides; a model
    that is built again is numbered again.

    Args:
        model: Any module.

    Returns:
        The dotted names of the attentions, in the order of their numbers.

    Raises:
        ValueError: There is no fastattn attention.
    """
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    numbered = []
    for layer, (name, module) in enumerate(layers):
        if isinstance(module, MultiHead):
            module._number(layer)
            numbered.append(name)
    if not numbered:
        raise ValueError(f"{type(model).__name__} has no fastattn attention to number")
    return numbered
