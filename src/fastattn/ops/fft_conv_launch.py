"""What a launch of native convolutions needs: addresses, tables, and what a device can."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastattn import _native

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@torch.compiler.assume_constant_result
def longest_fused(device: torch.device) -> int | str:
    """Up to how many numbers a row is one transform on a GPU, or why nothing runs there."""
    return longest_fused_on(device)


@cache
def longest_fused_on(device: torch.device) -> int | str:
    try:
        longest: int = _native.part().conv_longest(device.index)
    except RuntimeError as error:
        return f"on {torch.cuda.get_device_name(device)}: {error}"
    return longest


def at(x: Tensor | None) -> tuple[int, ...] | None:
    if x is None or x.numel() == 0:
        return None
    b, c, n = x.stride()
    return x.data_ptr(), b, c, 1 if x.shape[2] == 1 else n


def address(x: Tensor | None) -> int:
    return 0 if x is None or x.numel() == 0 else x.data_ptr()


@cache
def table_of(length: int, device: torch.device) -> Tensor:
    """The roots of a transform, on a device; the first time synchronises.

    Made on a thread of its own: while torch warms up for a CUDA graph, what this one allocates is
    the graph's, which overwrites it.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_make_table, length, device).result()


def _make_table(length: int, device: torch.device) -> Tensor:
    part = _native.part()
    table = torch.empty(part.conv_table_size(length), dtype=torch.float32, device="cpu")
    part.conv_table(length, table.data_ptr())
    return table.to(device)


def resolved(*tensors: Tensor | None) -> list[Any]:
    """Not views of what they are the negatives of."""
    return [x if x is None else x.resolve_neg() for x in tensors]
