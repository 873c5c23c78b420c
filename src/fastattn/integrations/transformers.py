"""Attention and mask functions for Hugging Face transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.integrations.cores import About, core_of

# models of other kinds hand these over; what is set must not be lost
UNSUPPORTED = (
    *("softcap", "position_bias", "s_aux", "sinks", "head_mask", "indices", "block_indices"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx"),  # of packed sequences
)
PACKED = (
    "position_ids must rise by one from token to token: packed sequences, whose positions start "
    "anew, would see each other. Give each sequence a row of its own, with attention_mask for "
    "padding, or take another attn_implementation"
)


def register(
    *,
    linear: Mapping[str, Any] | None = None,
    performer: Mapping[str, Any] | None = None,
    bigbird: Mapping[str, Any] | None = None,
    linformer: Mapping[str, Any] | None = None,
) -> list[str]:
    """Make the mechanisms known to transformers, as values of ``attn_implementation``.

    Afterwards ``AutoModel.from_pretrained(name, attn_implementation="fastattn_performer")`` and
    ``model.set_attn_implementation("fastattn_performer")`` work, in every model that goes through
    transformers' registry of attentions. A later call replaces the options of an earlier one, for
    models that exist as well. Nothing is added to a model: no parameter, no buffer.

    ``fastattn_linear`` and ``fastattn_performer`` run in encoders, in decoders, and on a cache of
    keys and values, where they compute what one pass would; the cache still grows with the
    sequence.
    ``fastattn_bigbird`` and ``fastattn_linformer`` are for encoders; causal models are refused.
    Padding may be on either side. Whatever a mechanism cannot honour raises: so do ``position_ids``
    of packed sequences that a causal model hands to its attention; on a GPU, and under
    ``torch.compile``, by an asynchronous assertion. Dropout acts on the output, in BigBird on the
    weights.

    Args:
        linear: Options of ``fastattn_linear``: ``feature_map`` ("elu"), which has no scale.
        performer: Of ``fastattn_performer``: ``num_features`` (256), ``variant`` ("positive",
            "hyperbolic", "relu"), ``kind`` and ``seed`` of the directions; ``module.layer_idx``
            is their layer, 0 in models that do not number their layers.
        bigbird: Of ``fastattn_bigbird``: ``block_size``, ``num_window_blocks``,
            ``num_random_blocks``, ``num_global_blocks``, ``seed``, as in ``BlockLayout.bigbird``.
        linformer: Of ``fastattn_linformer``: ``slots`` (256), the means of as many windows of valid
            tokens, and ``seq_len``, the length that they divide; without it the model's
            ``max_position_embeddings``, or else the length of the input. Up to ``slots`` tokens
            it is softmax attention. ``LinformerAttention`` has learned sums.

    Returns:
        The names.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        TypeError: A mechanism has no such option.
        ValueError: An option's value is not possible.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    given = {"linear": linear, "performer": performer, "bigbird": bigbird, "linformer": linformer}
    cores = {name: core_of(name, options or {}) for name, options in given.items()}
    for name, core in cores.items():
        AttentionInterface.register(f"fastattn_{name}", partial(_forward, f"fastattn_{name}", core))
        AttentionMaskInterface.register(f"fastattn_{name}", partial(_mask, f"fastattn_{name}"))
    return [f"fastattn_{name}" for name in cores]


# The two functions that transformers calls, and what they look at


def _mask(
    name: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """``(b, kv_length)``, True = attend, as everywhere in transformers; None: all of them."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        # what is traced has no values to read, and its positions pass for packed ones
        unread = _traced() and attention_mask is None
        plain = not others.get("use_vmap", True)  # not a function of the model's own
        if "local_size" in others or "allow_is_bidirectional_skip" in others:
            plain = False  # windows, chunks
        if mask_function is None or not unread or not plain:
            raise NotImplementedError(
                f"{name}: this model asks for a mask that is neither causal nor bidirectional "
                "(packed sequences, a sliding window, chunks or one of its own), which it cannot "
                "honour. Pass attention_mask for padding, without packed position_ids, and one of "
                "ones where a decoder is traced without padding; a model with such layers needs "
                "another attn_implementation"
            )
        _assert_causal(name, mask_function, batch_size, q_length, device)
        return None
    if mask_function is causal_mask_function and (
        isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length
    ):
        raise NotImplementedError(
            f"{name}: a cache of fixed size holds places that no token has taken yet, which it "
            "cannot leave out. Use the dynamic cache (cache_implementation=None)"
        )
    if attention_mask is None:
        return None
    return attention_mask[:, kv_offset : kv_offset + kv_length].bool()


def _forward(
    name: str,
    core: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Heads ``(b, h, n, d)`` and ``(b, h_kv, s, d)`` to ``(b, n, h, e)``."""
    n, s = query.shape[2], key.shape[2]
    for argument in UNSUPPORTED:
        if others.get(argument) is not None:
            raise NotImplementedError(f"{name} cannot honour {argument}, which this model sets")
    if sliding_window is not None and sliding_window < s:
        raise NotImplementedError(
            f"{name} cannot honour a sliding window of {sliding_window} over {s} keys"
        )
    if others.get("output_attentions") or _weights_are_collected():
        raise NotImplementedError(f"{name} gives no weights: set output_attentions=False")
    ignored = None
    if attention_mask is not None:
        if tuple(attention_mask.shape) != (query.shape[0], s):
            raise NotImplementedError(
                f"{name}: attention_mask must be that of the tokens, (b, s) = "
                f"({query.shape[0]}, {s}), got shape {tuple(attention_mask.shape)}"
            )
        ignored = ~attention_mask
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = is_causal and not getattr(module, "is_cross_attention", False)
    if causal and n > 1 and position_ids is not None:
        _refuse_packed(name, position_ids, attention_mask, n)
    about = About(
        module,
        decoder=causal,
        causal=causal and n > 1,
        ignored=ignored,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        dropout=dropout if module.training else 0.0,
    )
    # a continuation's queries are the last ones: a single one sees all keys
    q = F.pad(query, (0, 0, s - n, 0)) if about.causal and n < s else query
    out = core(q, key, value, about)
    return out[:, :, -n:].transpose(1, 2).contiguous(), None


def _traced() -> bool:
    """Whether a compiler or a CUDA graph records this call, so that no value can be read."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def _assert_causal(
    name: str, mask_function: Callable[..., Any], b: int, n: int, device: torch.device | str
) -> None:
    """Assert, in O(n), that a mask of packed sequences, or of blocks that see both ways, has
    one sequence and no block: each token sees the one before it and not the one behind."""
    row = torch.arange(b, device=device)[:, None]
    i = torch.arange(n - 1, device=device)[None]
    before, behind = mask_function(row, 0, i + 1, i), mask_function(row, 0, i, i + 1)  # (b, n - 1)
    torch._assert_async((before & ~behind).all(), f"{name}: {PACKED}")


_checked: tuple[tuple[weakref.ref[Tensor], int], ...] = ()  # by the layer before


def _refuse_packed(name: str, positions: Tensor, attends: Tensor | None, n: int) -> None:
    """Require that positions of the tokens, ``(1 or b, n)``, are those of one sequence a row.

    Layers of a model share their tensors, which are looked at once.
    """
    global _checked
    if positions.dim() != 2 or positions.shape[1] != n:  # coordinates of images, or of keys
        return
    traced = _traced()
    tensors = (positions,) if attends is None else (positions, attends)
    remembers = not traced and not any(x.is_inference() for x in tensors)
    if remembers and len(_checked) == len(tensors):
        pairs = zip(_checked, tensors, strict=True)
        if all(ref() is x and version == x._version for (ref, version), x in pairs):
            return
    rises = _rises(positions, None if attends is None else ~attends[:, -n:]).all()
    if rises.device.type != "cpu" or traced or type(rises) is not Tensor:
        torch._assert_async(rises, f"{name}: {PACKED}")  # no synchronisation
    elif not rises:
        raise NotImplementedError(f"{name}: {PACKED}")
    if remembers:
        _checked = tuple((weakref.ref(x), x._version) for x in tensors)


def _rises(positions: Tensor, ignored: Tensor | None) -> Tensor:
    """Whether a token's position is one more than its neighbour's; behind ignored tokens, whose
    positions are anything, more than that of any token before. ``(b, n - 1)``"""
    if ignored is None:
        return positions.diff() == 1
    seen = torch.where(ignored, -1, positions)
    rise = seen[:, 1:] - seen.cummax(1).values[:, :-1]
    return ignored[:, 1:] | (rise == 1) | (ignored[:, :-1] & (rise > 1))


def _weights_are_collected() -> bool:
    """Whether ``output_attentions`` was set on a model that does not tell its attention."""
    if torch.compiler.is_compiling():
        return False
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # transformers before 5.0 tells it
        return False
    return any(name.endswith("attentions") for name in _active_collector.get() or ())
