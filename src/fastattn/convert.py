"""Swap the attention of a model that is already built, and swap it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from fastattn.nn import MECHANISMS, MultiHead

STOCK_STATE = {
    *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"),
    *("bias_k", "bias_v", "out_proj.weight", "out_proj.bias"),
}
Filter = str | Iterable[str] | type[nn.Module] | Callable[[nn.Module, str], bool]


def convert(
    model: nn.Module,
    mechanism: str,
    *,
    filter: Filter | None = None,
    layer_options: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[str]:
    """Give the ``nn.MultiheadAttention`` modules in a model another mechanism, in place.

    The modules stay the same objects: parameters, optimizer, hooks, tied and named references all
    keep working, and the state dict keeps its keys. Without a filter the modules whose type is
    exactly ``nn.MultiheadAttention`` are swapped. ``use_nested_tensor`` is switched off in every
    ``nn.TransformerEncoder`` that holds a swapped module: it would hide the padding mask in a
    nested tensor.
    A mechanism computes another function than softmax attention: weights trained with softmax
    need fine-tuning. The attentions of ``model`` are numbered, so that random directions differ by
    layer, and calls with different filters of one model agree on the numbers; give each call
    another ``seed`` when you convert submodules one by one, or number the whole model afterwards
    (:func:`fastattn.nn.number_layers`). Options that add parameters (``learned``, ``qk_norm``,
    ``num_global_tokens``, any of Linformer's) need them added to an optimizer that exists.

    Args:
        model: Any module, an ``nn.MultiheadAttention`` itself included.
        mechanism: A key of ``fastattn.MECHANISMS``.
        filter: Which attentions to swap, by their dotted names, with the wildcards of ``fnmatch``
            (``"encoder.*"``, or several such patterns), by exact type (a subclass of
            ``nn.MultiheadAttention`` with its parameters, whose own ``forward`` then gives way), or
            by ``filter(module, name) -> bool``. A module with several names goes by its first.
        layer_options: Options for some of them: a pattern of names to keywords, which take
            precedence over ``options``, a later pattern over an earlier one.
            ``{"decoder.*.self_attn": {"causal": True}}`` leaves cross-attention as it is, which
            ``causal=True`` would not.
        options: Keywords of that mechanism's own, such as ``feature_map="relu"``, for all.

    Returns:
        The dotted names of the swapped modules; the model itself has the name "".

    Raises:
        ValueError: The mechanism does not exist, there is nothing to swap, a pattern fits no
            module, or a module is parametrized, sharded or no plain multi-head attention. Nothing
            has been changed then, nor after any other error.
        TypeError: The mechanism has no such option, or the filter is of no such kind.
    """
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}, got {mechanism!r}")
    kind = MECHANISMS[mechanism]
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    swapped = selected(layers, filter, nn.MultiheadAttention)
    if not swapped:
        message = f"{type(model).__name__} has no nn.MultiheadAttention to swap"
        if any(type(module) is nn.MultiheadAttention for module in layers.values()):
            message = f"filter {filter!r} selects none of {_names(layers)}"
        elif layers:
            message += f"; {_names(layers)} are of another type already (revert first)"
        raise ValueError(message)
    wanted = _options(kind, mechanism, swapped, layer_options or {}, options)
    for name, module in swapped.items():
        refuse(name, module, MultiHead)
        _refuse_foreign(name, module, filter)
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
            **wanted[name],
        )
    undo = [_way_back(module) for module in swapped.values()]
    try:
        for layer, (name, module) in enumerate(layers.items()):
            if name in swapped:
                _swap(module, kind, layer, wanted[name])
    except BaseException:  # a device is full, or another than that of an option
        for back in undo:
            back()
        raise
    for encoder in _encoders(model):
        if any(isinstance(module, MultiHead) for module in encoder.modules()):
            vars(encoder).setdefault("_stock_use_nested_tensor", encoder.use_nested_tensor)
            encoder.use_nested_tensor = False
    return list(swapped)


def revert(model: nn.Module) -> list[str]:
    """Give every fastattn attention in a model its stock class again, in place.

    That is ``nn.MultiheadAttention``, or the subclass of it that ``convert`` had found.

    Returns:
        The dotted names of the reverted modules.

    Raises:
        ValueError: There is nothing to revert, or a module is parametrized, sharded or wrapped.
            Nothing has been changed then.
    """
    reverted = {n: m for n, m in model.named_modules() if isinstance(m, MultiHead)}
    if not reverted:
        raise ValueError(f"{type(model).__name__} has no fastattn attention to revert")
    for name, module in reverted.items():
        refuse_changed(name, module, "revert")
    for module in reverted.values():
        stock = module._stock_class
        module._unconfigure()
        module.__class__ = stock  # type: ignore[assignment]
        module._qkv_same_embed_dim = module.in_proj_weight is not None
    for encoder in _encoders(model):
        nested = vars(encoder).pop("_stock_use_nested_tensor", encoder.use_nested_tensor)
        encoder.use_nested_tensor = nested
    return list(reverted)


def _swap(
    module: nn.MultiheadAttention, kind: type[MultiHead], layer: int, options: Mapping[str, Any]
) -> None:
    stock = type(module)
    module.__class__ = kind
    assert isinstance(module, MultiHead)
    if stock is not nn.MultiheadAttention:
        module._stock_class = stock
    module._qkv_same_embed_dim = False
    module._layer = layer
    module._configure(**options)


def _way_back(module: nn.Module) -> Callable[[], None]:
    """What makes a module again as it is now: its class, attributes, parameters and buffers."""
    kind, attributes = type(module), dict(vars(module))
    own: list[Any] = [module._parameters, module._buffers, module._non_persistent_buffers_set]
    kept = [table.copy() for table in own]

    def back() -> None:
        module.__class__ = kind
        vars(module).clear()
        vars(module).update(attributes)
        for table, content in zip(own, kept, strict=True):  # others may hold the tables themselves
            table.clear()
            table.update(content)

    return back


Layers = dict[str, nn.MultiheadAttention]
M = TypeVar("M", bound=nn.Module)


def selected(layers: dict[str, M], filter: Filter | None, stock: type[M]) -> dict[str, M]:
    """The attentions that a filter asks for; without one those whose type is exactly ``stock``."""
    if filter is None:
        filter = stock
    if isinstance(filter, type):
        if not issubclass(filter, stock):
            raise TypeError(
                f"filter by type must be {stock.__name__} or a subclass, got {filter.__name__}"
            )
        return {n: m for n, m in layers.items() if type(m) is filter or _hidden(m, filter)}
    if callable(filter):
        return {n: m for n, m in layers.items() if filter(m, n)}
    patterns = [filter] if isinstance(filter, str) else filter
    if not isinstance(patterns, Iterable):
        raise TypeError(
            "filter must be a pattern of names, several of them, a type or a function of (module, "
            f"name), got {type(filter).__name__}"
        )
    chosen: set[str] = set()
    for pattern in patterns:
        chosen.update(_matching(pattern, layers, "filter"))
    return {n: m for n, m in layers.items() if n in chosen}


def _options(
    kind: type[MultiHead],
    mechanism: str,
    swapped: Layers,
    layer_options: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Each module's own options."""
    wanted = {name: dict(options) for name in swapped}
    for pattern, special in layer_options.items():
        for name in _matching(pattern, swapped, "layer_options"):
            wanted[name].update(special)
    unknown = {*options, *(k for special in layer_options.values() for k in special)}
    unknown -= set(kind.option_names())
    if unknown:
        raise TypeError(
            f"mechanism {mechanism!r} has no option {', '.join(sorted(unknown))}; it takes "
            f"{', '.join(kind.option_names())}"
        )
    return wanted


def _matching(pattern: str, layers: Mapping[str, nn.Module], argument: str) -> list[str]:
    names = [name for name in layers if fnmatchcase(name, pattern)]
    if not names:
        raise ValueError(f"{argument}: {pattern!r} fits none of {_names(layers)}")
    return names


def _names(layers: Mapping[str, nn.Module]) -> str:
    names = [repr(name) for name in layers]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _hidden(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a parametrization or sharding has put a class of its own over this one."""
    return (
        isinstance(module, kind)
        and not isinstance(module, MultiHead)
        and (parametrize.is_parametrized(module) or _is_sharded(module))
    )


def _is_sharded(module: nn.Module) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


def refuse(name: str, module: nn.Module, ours: type[nn.Module]) -> None:
    """Raise if a module cannot be made one of ``ours`` in place."""
    if isinstance(module, ours):
        raise ValueError(
            f"{name or 'the model'} is a {type(module).__name__} already: revert first"
        )
    refuse_changed(name, module, "convert")


def refuse_changed(name: str, module: nn.Module, verb: str) -> None:
    """Raise if something has put a class or a forward of its own over a module's."""
    name = name or "the model"
    if "forward" in vars(module):
        raise ValueError(
            f"{name} has a forward of its own, put there by a hook or a wrapper: "
            f"{verb} before wrapping"
        )
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"{name} is parametrized: remove the parametrization, {verb}, and register it again"
        )
    if _is_sharded(module):
        raise ValueError(f"{name} is sharded: {verb} before sharding")


def _refuse_foreign(name: str, module: nn.MultiheadAttention, filter: Filter | None) -> None:
    refuse_changed(f"{name}.out_proj".removeprefix("."), module.out_proj, "convert")
    name, kind = name or "the model", type(module)
    foreign = sorted(module.state_dict(keep_vars=True).keys() - STOCK_STATE)
    if foreign:
        raise ValueError(
            f"{name} is a {kind.__name__} with {', '.join(foreign)}, which no attention of ours "
            "would use: only nn.MultiheadAttention's parameters can be taken over"
        )
    if kind.forward is not nn.MultiheadAttention.forward and filter is not kind:
        raise ValueError(
            f"{name} is a {kind.__name__} with a forward of its own, which would be lost. If "
            f"nothing of it is needed, say so by its type: filter={kind.__name__}"
        )


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    return [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
