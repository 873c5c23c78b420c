"""Argument checks for the door of an op, and nowhere behind it."""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(**named: tuple[Tensor, str]) -> dict[str, int]:
    """Bind dimension letters to sizes and return them: ``check_shapes(q=(q, "b h n d"))["n"]``.

    Raises:
        ValueError: A tensor has the wrong rank, or a letter stands for two different sizes.
    """
    size: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (tensor, spec) in named.items():
        letters = spec.split()
        shape = tuple(tensor.shape)
        if len(shape) != len(letters):
            raise ValueError(f"{name} must be ({', '.join(letters)}), got shape {shape}")
        for letter, n in zip(letters, shape, strict=True):
            if size.setdefault(letter, n) != n:
                raise ValueError(
                    f"{name} must be ({', '.join(letters)}), got shape {shape}: "
                    f"{letter} is {n} here but {size[letter]} in {owner[letter]}"
                )
            owner.setdefault(letter, name)
    return size


def check_same(**named: Tensor) -> None:
    """Require one floating dtype and one device.

    Raises:
        TypeError: A dtype is not floating, or differs from the first one's.
        ValueError: A tensor is on another device than the first.
    """
    (first, reference), *_ = named.items()
    for name, tensor in named.items():
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
        if tensor.dtype != reference.dtype:
            raise TypeError(f"{name} must be {reference.dtype} like {first}, got {tensor.dtype}")
        if tensor.device != reference.device:
            raise ValueError(
                f"{name} must be on {reference.device} like {first}, it is on {tensor.device}"
            )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Require ``(b, h, n, d)``, ``(b, h_kv, s, d)`` and ``(b, h_kv, s, e)``, alike, with grouped
    heads and widths from 1 to 256.

    What fits is seen in one expression, since this is in the way of every call; what does not is
    explained by the checks of its parts, which raise.
    """
    if (
        q.dim() == k.dim() == v.dim() == 4
        and q.dtype == k.dtype == v.dtype
        and q.dtype.is_floating_point
        and q.device == k.device == v.device
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and k.shape[2] == v.shape[2]
        and 1 <= q.shape[3] == k.shape[3] <= 256
        and 1 <= v.shape[3] <= 256
    ):
        return
    size = check_shapes(q=(q, "b h n d"), k=(k, "b h_kv s d"), v=(v, "b h_kv s e"))
    check_same(q=q, k=k, v=v)
    check_grouped_heads(size["h"], size["h_kv"])
    check_width("q", size["d"])
    check_width("v", size["e"])


def check_option(name: str, value: object, options: tuple[str, ...]) -> None:
    """Require one of the listed words.

    Raises:
        ValueError: ``value`` is not among ``options``.
    """
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")


def check_width(name: str, width: int, most: int = 256) -> None:
    """Require a head width between 1 and ``most``.

    Raises:
        ValueError: The width is outside.
    """
    if not 1 <= width <= most:
        raise ValueError(f"{name} must have a last dimension from 1 to {most}, got {width}")


def check_grouped_heads(h: int, h_kv: int) -> None:
    """Require that the query heads share the key-value heads evenly.

    Raises:
        ValueError: ``h`` is not a multiple of ``h_kv``.
    """
    if h_kv < 1 or h % h_kv:
        raise ValueError(
            f"k and v have {h_kv} heads, which must divide the {h} heads of q (grouped heads)"
        )


def check_key_padding_mask(mask: Tensor, b: int, s: int, device: torch.device) -> None:
    """Require a ``(b, s)`` bool mask, True = ignore, on the device of the inputs.

    Raises:
        TypeError: The mask is not bool.
        ValueError: Its shape or device is another one.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool, True = ignore, got {mask.dtype}")
    if tuple(mask.shape) != (b, s):
        raise ValueError(f"key_padding_mask must be (b, s) = ({b}, {s}), got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"key_padding_mask must be on {device} like q, it is on {mask.device}")


def check_cu_seqlens(cu_seqlens: Tensor, b: int, n: int, device: torch.device) -> None:
    """Require the boundaries of packed sequences: int32, ``(segments + 1,)``, from 0 up to n.

    The values are read on a CPU only: elsewhere that would synchronise.

    Raises:
        TypeError: The boundaries are not int32.
        ValueError: b is not 1, or shape, device or values are not those of boundaries.
    """
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be (segments + 1,), got {tuple(cu_seqlens.shape)}")
    if b != 1:
        raise ValueError(f"cu_seqlens packs all sequences into b = 1, but q has b = {b}")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on {device} like q, it is on {cu_seqlens.device}")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != n or ends != sorted(ends):
            raise ValueError(
                f"cu_seqlens must rise from 0 to n = {n}, got {ends if len(ends) < 9 else '...'}"
            )
