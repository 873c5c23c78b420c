"""The native path of FFT convolution for rows longer than one block of a GPU transforms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _native, _tuning
from fastattn.ops.fft_conv_launch import TYPES, address, at, resolved, table_of
from fastattn.ops.fft_conv_torch import MAPS, Convolve, Lags, convolved

SHORTEST = 1 << 15  # of their transforms
MOST_ROWS = 32767  # at a time


def convolve_long(
    u: Tensor,
    taps: Tensor,
    lags: Lags,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
) -> Tensor:
    """Their convolution; gates are torch's, in float32."""
    if skip is not None:
        taps = with_skip(taps, skip, lags.first)
    way = lambda u, taps, lags: Convolve.apply(u, taps, lags, "native")  # noqa: E731
    if pre is None and post is None:
        found: Tensor = way(u, taps, lags)
        return found
    return convolved(u, taps, lags, None, pre, post, convolve=way)


def with_skip(taps: Tensor, skip: Tensor, first: int) -> Tensor:
    """Taps ``(c, t)`` of every channel that do what ``skip`` would do besides: lag 0 has more."""
    groups, t = taps.shape
    each = taps.repeat_interleave(len(skip) // groups, 0)
    return each + F.pad(skip.unsqueeze(1), (-first, t - 1 + first))


def _long_shape(u: Tensor, groups: int, count: int, lags: Lags) -> Any:
    b, c, n = u.shape
    shape = _native.part().ConvShape(
        b, c, c // groups, n, lags.out, lags.first, count, lags.mirrored, TYPES[u.dtype]
    )
    shape.length = max(SHORTEST, 1 << (max(n, lags.out) - 1).bit_length())
    return shape


def _chunks(shape: Any, u: Tensor, gradient: bool) -> tuple[int, Tensor]:
    """How many channels at a time, and their workspace."""
    part, (b, c, _) = _native.part(), u.shape
    one = part.conv_long_workspace(shape, 1, gradient)
    channels = max(1, min(c, MOST_ROWS // b, _tuning.fft_conv_workspace() // one))
    size = part.conv_long_workspace(shape, channels, gradient)
    return channels, torch.empty(size, dtype=torch.float32, device=u.device)


def _long(u: Tensor, taps: Tensor, lags: Lags) -> Tensor:
    u, taps = resolved(u, taps)
    groups, count = taps.shape
    shape = _long_shape(u, groups, count, lags)
    u, taps, y = u.contiguous(), taps.contiguous(), u.new_empty(*u.shape[:2], lags.out)
    channels, workspace = _chunks(shape, u, False)
    stream = torch.cuda.current_stream(u.device).cuda_stream
    table = table_of(shape.length, u.device)
    _native.part().conv_long_cuda(
        *(shape, at(u), at(y), address(taps), address(table), address(workspace)),
        *(channels, u.device.index, stream),
    )
    return y


def _long_correlate(u: Tensor, y: Tensor, groups: int, count: int, lags: Lags) -> Tensor:
    u, y = resolved(u, y)
    c = y.shape[1]
    shape = _long_shape(u, groups, count, lags)
    u, y = u.contiguous(), y.contiguous()
    dtaps = u.new_zeros(c, count, dtype=torch.float32)
    channels, workspace = _chunks(shape, u, True)
    stream = torch.cuda.current_stream(u.device).cuda_stream
    table = table_of(shape.length, u.device)
    _native.part().correlate_long_cuda(
        *(shape, at(u), at(y), address(dtaps), address(table), address(workspace)),
        *(channels, u.device.index, stream),
    )
    return dtaps.view(groups, c // groups, count).sum(1)


MAPS["native"] = (_long, _long_correlate)
