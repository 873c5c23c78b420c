"""The attention of timm's vision transformers, swapped in a model that is built."""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.models.vision_transformer import Attention as Stock
from torch import Tensor, nn

from fastattn._check import check_option
from fastattn.convert import Filter, refuse, refuse_changed, selected
from fastattn.integrations.cores import CORES, About, core_of


class Attention(Stock):
    """What ``convert`` makes of timm's ``Attention``: its layers and state dict, another core."""

    mechanism: str
    options: dict[str, Any]
    layer_idx: int

    def extra_repr(self) -> str:
        return ", ".join((self.mechanism, *(f"{k}={v!r}" for k, v in self.options.items())))

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend; arguments of timm's.

        Args:
            x: ``(b, n, width)``.
            attn_mask: None, or which keys there are, ``(b, 1, 1, n)``: bool, True = attend, or
                float, 0 = attend, -inf or the dtype's least number = ignore.
            is_causal: Row i sees keys 0 to i.

        Returns:
            ``(b, n, width)``.

        Raises:
            NotImplementedError: A mask that this attention cannot honour.
        """
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        about = About(
            self,
            decoder=is_causal,
            causal=is_causal and n > 1,
            ignored=None if attn_mask is None else self._ignored(attn_mask, b, n),
            scale=self.scale,
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        core = CORES[self.mechanism]
        out = core(self.q_norm(q), self.k_norm(k), v, about, **self.options)
        out = self.norm(out.transpose(1, 2).flatten(2))
        gate = getattr(self, "gate", None)  # which older versions do not have
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _ignored(self, mask: Tensor, b: int, n: int) -> Tensor:
        """The mask as ``(b, n)`` bool, True = ignore."""
        if tuple(mask.shape) not in ((b, 1, 1, n), (1, 1, 1, n)):
            raise NotImplementedError(
                f"{self.mechanism}: attn_mask must say which keys there are, (b, 1, 1, n) = "
                f"({b}, 1, 1, {n}), got shape {tuple(mask.shape)}. A NaFlexViT makes such masks "
                "with use_key_only_attn_mask=True; for any other mask leave the layer unconverted"
            )
        mask = mask.expand(b, 1, 1, n)[:, 0, 0]
        if mask.dtype == torch.bool:
            return ~mask
        ignored = mask <= torch.finfo(mask.dtype).min
        torch._assert_async(
            (ignored | (mask == 0)).all(),
            f"{self.mechanism}: a float attn_mask must be 0 (attend), or -inf or the dtype's least "
            "number (ignore); a finite bias on the keys is not supported",
        )
        return ignored


def convert(
    model: nn.Module, mechanism: str, *, filter: Filter | None = None, **options: Any
) -> list[str]:
    """Give timm's ``Attention`` modules in a model another mechanism, in place.

    As :func:`fastattn.convert`, for models as ``timm.create_model("vit_base_patch16_224",
    pretrained=True)``: parameters, optimizer, hooks and the keys of the state dict stay, and
    nothing is added. Dropout of the weights acts on the output, in BigBird on the weights. Weights
    trained with softmax need fine-tuning.

    Args:
        model: Any module that holds ``timm.layers.Attention`` (ViT, DeiT and their kin; attention
            with rotary positions or in windows is of other types).
        mechanism: "linear", "performer", "bigbird" or "linformer".
        filter: As in :func:`fastattn.convert`.
        options: As in :func:`fastattn.integrations.transformers.register`; without ``seq_len``
            the windows of "linformer" divide the input's own length.

    Returns:
        The dotted names of the swapped modules.

    Raises:
        ValueError: The mechanism or a value does not exist, there is nothing to swap, a pattern
            fits no module, or a module is parametrized, sharded or swapped already. Nothing has
            been changed then.
        TypeError: The mechanism has no such option, or the filter is of no such kind.
    """
    check_option("mechanism", mechanism, tuple(CORES))
    core_of(mechanism, options)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Stock)}
    swapped = selected(layers, filter, Stock)
    if not swapped:
        raise ValueError(
            f"{type(model).__name__} has no timm Attention to swap"
            + (f"; filter {filter!r} selects none of {', '.join(layers)}" if layers else "")
        )
    for name, module in swapped.items():
        refuse(name, module, Attention)
        if type(module) is not Stock:
            raise ValueError(f"{name} is a {type(module).__name__}, whose forward would be lost")
    for layer, (name, module) in enumerate(layers.items()):
        if name in swapped:
            module.__class__ = Attention
            about = {"mechanism": mechanism, "options": dict(options), "layer_idx": layer}
            vars(module).update(about)
    return list(swapped)


def revert(model: nn.Module) -> list[str]:
    """Give every attention that ``convert`` has swapped its own class again, in place.

    Returns:
        The dotted names of the reverted modules.

    Raises:
        ValueError: There is nothing to revert, or a module is parametrized, sharded or wrapped.
            Nothing has been changed then.
    """
    reverted = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    if not reverted:
        raise ValueError(f"{type(model).__name__} has no fastattn attention to revert")
    for name, module in reverted.items():
        refuse_changed(name, module, "revert")
    for module in reverted.values():
        del module.mechanism, module.options, module.layer_idx
        module.__class__ = cast(Any, Stock)
    return list(reverted)
