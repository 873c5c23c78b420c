"""Swap the attention of a model that is already built, and swap it back."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from fastattn.nn import MECHANISMS, MultiHead


def convert(model: nn.Module, mechanism: str, **options: Any) -> list[str]:
    """Give every ``nn.MultiheadAttention`` in a model another mechanism, in place.

    The modules stay the same objects: parameters, optimizer, hooks, tied and named references all
    keep working, and the state dict keeps its keys. Only modules whose type is exactly
    ``nn.MultiheadAttention`` are swapped. ``use_nested_tensor`` is switched off in every
    ``nn.TransformerEncoder``, which would otherwise hide the padding mask in a nested tensor.
    A mechanism computes another function than softmax attention: weights trained with softmax
    need fine-tuning. The modules of a call are numbered, so that random directions differ by layer;
    give each call another ``seed`` when you convert a model part by part. Options that add
    parameters (``learned``, ``qk_norm``, ``num_global_tokens``, any of Linformer's) need them added
    to an optimizer that exists. Options
    go to every module alike: causal=True would make a decoder's cross-attention causal as well, so
    convert such a model's parts one by one.

    Args:
        model: Any module, an ``nn.MultiheadAttention`` itself included.
        mechanism: A key of ``fastattn.MECHANISMS``.
        options: Keywords of that mechanism's own, such as ``feature_map="relu"``.

    Returns:
        The dotted names of the swapped modules; the model itself has the name "".

    Raises:
        ValueError: The mechanism does not exist, there is nothing to swap, or a module is
            parametrized or sharded. Nothing has been changed then.
        TypeError: The mechanism has no such option.
    """
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}, got {mechanism!r}")
    kind = MECHANISMS[mechanism]
    unknown = options.keys() - set(kind.option_names())
    if unknown:
        raise TypeError(
            f"mechanism {mechanism!r} has no option {', '.join(sorted(unknown))}; it takes "
            f"{', '.join(kind.option_names())}"
        )
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    for name, module in found.items():
        _refuse(name, module)
    swapped = {n: m for n, m in found.items() if type(m) is nn.MultiheadAttention}
    if not swapped:
        raise ValueError(
            f"{type(model).__name__} has no nn.MultiheadAttention to swap"
            + (f"; {', '.join(found)} are of another type already (revert first)" if found else "")
        )
    for module in swapped.values():
        # a wrong value raises here, before anything has changed; meta draws no random number
        kind(
            module.embed_dim,
            module.num_heads,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            device="meta",
            dtype=module.out_proj.weight.dtype,
            **options,
        )
    for layer, module in enumerate(swapped.values()):
        module.__class__ = kind
        assert isinstance(module, MultiHead)
        module._qkv_same_embed_dim = False
        module._layer = layer
        module._configure(**options)
    for encoder in _encoders(model):
        vars(encoder).setdefault("_stock_use_nested_tensor", encoder.use_nested_tensor)
        encoder.use_nested_tensor = False
    return list(swapped)


def revert(model: nn.Module) -> list[str]:
    """Give every fastattn attention in a model back to ``nn.MultiheadAttention``, in place.

    Returns:
        The dotted names of the reverted modules.

    Raises:
        ValueError: There is nothing to revert.
    """
    reverted = {n: m for n, m in model.named_modules() if isinstance(m, MultiHead)}
    if not reverted:
        raise ValueError(f"{type(model).__name__} has no fastattn attention to revert")
    for module in reverted.values():
        module._unconfigure()
        module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
        module._qkv_same_embed_dim = module.in_proj_weight is not None
    for encoder in _encoders(model):
        stock = vars(encoder).pop("_stock_use_nested_tensor", encoder.use_nested_tensor)
        encoder.use_nested_tensor = stock
    return list(reverted)


def _refuse(name: str, module: nn.Module) -> None:
    if "forward" in vars(module):
        raise ValueError(
            f"{name or 'the model'} has a forward of its own, put there by a hook or a wrapper: "
            "convert before wrapping"
        )
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"{name or 'the model'} is parametrized: remove the parametrization, convert, and "
            "register it again"
        )
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        raise ValueError(f"{name or 'the model'} is sharded: convert before sharding")


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    return [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
