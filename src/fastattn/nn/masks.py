"""What the masks of ``nn.MultiheadAttention.forward`` say: whether attention is causal, and which
keys are ignored. A value is read where that is possible, and where it is needed."""

from __future__ import annotations

import os

import torch
from torch import Tensor

WAY_OUT = (
    "This attention takes the causal mask (pass is_causal=True with it), no mask, and "
    "key_padding_mask; for any other mask keep nn.MultiheadAttention in this layer"
)
NO_BIAS = (
    "a float key_padding_mask must be 0 (attend), or -inf or the dtype's least number (ignore); a "
    "finite bias on the keys is not supported. Give a bool mask, True = ignore, or keep "
    "nn.MultiheadAttention in this layer"
)


def says_causal(
    mask: Tensor | None, shape: tuple[int, int], *, hint: bool, always: bool, name: str
) -> bool:
    """Whether a call is causal.

    Args:
        mask: The call's ``attn_mask``, or None.
        shape: n and s.
        hint: The call's ``is_causal``, which is trusted: the mask is then read for debugging only.
        always: Whether the module is causal in every call, trusted where nothing can be read.
        name: Of the module, for what is raised.
    """
    (n, s), causal = shape, always or hint
    if mask is not None:
        _check_attn_mask(mask, shape, name)
        if not hint or _checks_masks():
            where = _unreadable(mask)
            if where is None:
                hides = _hides_the_future(mask, name)
                if hint and not hides and n > 1:
                    raise ValueError(
                        f"{name}: attn_mask of shape {shape} hides nothing, but is_causal is True: "
                        "give the causal mask or none, or leave the hint out"
                    )
                causal = causal or hides
            elif not causal:
                raise NotImplementedError(
                    f"{name}: {where} the values of attn_mask cannot be read. {WAY_OUT}"
                )
    if causal and n != s:
        raise ValueError(
            f"{name}: causal attention needs as many keys as queries, got n = {n} and s = {s}"
        )
    return causal


def ignored_keys(
    mask: Tensor | None, shape: tuple[int, ...], *, batched: bool, name: str
) -> Tensor | None:
    """The ``key_padding_mask`` as ``(b, s)`` bool, True = ignore.

    Args:
        mask: ``(b, s)``, or ``(s,)`` if not batched: bool, or float.
        shape: What it must have.
        name: Of the module, for what is raised.
    """
    if mask is None:
        return None
    if tuple(mask.shape) != shape:
        letters = "(b, s)" if batched else "(s,)"
        raise AssertionError(  # the type that nn.MultiheadAttention raises
            f"{name}: key_padding_mask must be {letters} = {shape}, got shape {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise AssertionError(
                f"{name}: key_padding_mask must be bool or float, got {mask.dtype}"
            )
        hidden = _hidden(mask)
        _check_bias(mask, hidden, name)
        mask = hidden
    return mask if batched else mask.unsqueeze(0)


def _hidden(mask: Tensor) -> Tensor:
    """What a mask hides: True, -inf, or the least number, which others write for it."""
    return mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


def _check_bias(mask: Tensor, hidden: Tensor, name: str) -> None:
    """Raise if a float mask holds a finite bias; on a GPU, and compiled, without synchronising."""
    legal = hidden | (mask == 0)
    if torch.compiler.is_compiling():
        if torch._C._functorch.is_batchedtensor(mask):
            raise NotImplementedError(
                f"{name}: under torch.compile a float key_padding_mask inside torch.func.vmap "
                "cannot be checked. Give a bool mask, True = ignore"
            )
    else:
        legal, _ = _behind_transforms(legal)
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(legal.all(), f"{name}: {NO_BIAS}")
    elif not legal.all():
        biases, _ = _behind_transforms(mask.masked_fill(hidden, 0))
        largest = max(biases.flatten().tolist(), key=abs)
        raise ValueError(f"{name}: {NO_BIAS}. The largest is {largest:g}")


def _check_attn_mask(mask: Tensor, shape: tuple[int, int], name: str) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertionError(f"{name}: attn_mask must be bool or float, got {mask.dtype}")
    if mask.dim() not in (2, 3):
        raise AssertionError(  # the type that nn.MultiheadAttention raises
            f"{name}: attn_mask must be the causal {shape}, got shape {tuple(mask.shape)}"
        )
    if tuple(mask.shape) != shape:
        raise NotImplementedError(
            f"{name}: attn_mask of shape {tuple(mask.shape)} is not supported, only the causal "
            f"{shape}. {WAY_OUT}"
        )


def _checks_masks() -> bool:
    """Whether to read a mask although the hint is there: for debugging, and not when compiling."""
    return not torch.compiler.is_compiling() and os.environ.get("FASTATTN_CHECK_MASKS") == "1"


def _unreadable(mask: Tensor) -> str | None:
    """Where the call is, if the values of a mask are not at hand there."""
    if torch.compiler.is_compiling():
        return "under torch.compile"
    return "inside torch.func.vmap" if _behind_transforms(mask)[1] else None


def _behind_transforms(x: Tensor) -> tuple[Tensor, bool]:
    """The tensor that transforms of torch.func have wrapped, and whether vmap is one of them."""
    batched = False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        batched = batched or torch._C._functorch.is_batchedtensor(x)
        x = torch._C._functorch.get_unwrapped(x)
    return x, batched


def _hides_the_future(mask: Tensor, name: str) -> bool:
    """Whether the mask is the causal one; False if it hides nothing; anything else raises."""
    mask, _ = _behind_transforms(mask)
    hidden = _hidden(mask)
    future = torch.ones_like(hidden).triu(1)
    biased = torch.zeros_like(hidden) if mask.dtype == torch.bool else ~hidden & (mask != 0)
    facts = torch.stack((biased.any(), (hidden == future).all(), hidden.any()))
    is_biased, is_causal, hides = facts.tolist()  # the one synchronisation
    if is_biased or (hides and not is_causal):
        raise NotImplementedError(
            f"{name}: the attn_mask of shape {tuple(mask.shape)} is not the causal one. {WAY_OUT}"
        )
    return hides
