"""FFT convolution in torch, on any device, as two maps that are each other's derivatives.

A convolution sums taps times inputs; its derivative with respect to the inputs is a convolution,
with respect to the taps the second map, a correlation of inputs and outputs; and so on for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fastattn import _autograd

BLOCK = 64  # of inputs that are multiplied out, where nothing may come from later ones


class Lags(NamedTuple):
    """Which inputs an output sees: tap t is that of the lag first + t, if mirrored of its negative.

    Attributes:
        n: Inputs; before the first and behind the last are zeros.
        out: Outputs.
        circular: Indices are taken modulo n, which is out.
    """

    first: int
    n: int
    out: int
    mirrored: bool = False
    circular: bool = False

    @property
    def adjoint(self) -> Lags:
        return self._replace(n=self.out, out=self.n, mirrored=not self.mirrored)


_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "fft_conv_convolve(Tensor u, Tensor taps, SymInt first, SymInt out, bool mirrored, "
    "bool circular) -> Tensor"
)
_lib.define(
    "fft_conv_correlate(Tensor u, Tensor y, SymInt groups, SymInt t, SymInt first, bool mirrored, "
    "bool circular) -> Tensor"
)
_autograd.one_by_one(_lib, "fft_conv_convolve", "fft_conv_correlate")


class Convolve(Function):
    """Inputs ``(b, c, n)``, taps ``(groups, t)``: outputs ``(b, c, out)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, taps: Tensor, lags: Lags) -> Tensor:
        about = (lags.first, lags.out, lags.mirrored, lags.circular)
        operator = torch.ops.fastattn.fft_conv_convolve.default
        out: Tensor = _autograd.call(operator, _convolve, u, taps, *about)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        u, taps, ctx.lags = inputs
        ctx.save_for_backward(u, taps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        u, taps = ctx.saved_tensors
        of_u, of_taps = ctx.needs_input_grad[:2]
        du = Convolve.apply(dy, taps, ctx.lags.adjoint) if of_u else None
        dtaps = Correlate.apply(u, dy, *taps.shape, ctx.lags) if of_taps else None
        return du, dtaps, None


class Correlate(Function):
    """Inputs ``(b, c, n)`` and outputs ``(b, c, out)``: taps ``(groups, t)``, summed over b."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, y: Tensor, groups: int, t: int, lags: Lags) -> Tensor:
        about = (groups, t, lags.first, lags.mirrored, lags.circular)
        operator = torch.ops.fastattn.fft_conv_correlate.default
        out: Tensor = _autograd.call(operator, _correlate, u, y, *about)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        u, y, _, _, ctx.lags = inputs
        ctx.save_for_backward(u, y)

    @staticmethod
    def backward(ctx: Any, dtaps: Tensor) -> Any:
        u, y = ctx.saved_tensors
        of_u, of_y = ctx.needs_input_grad[:2]
        du = Convolve.apply(y, dtaps, ctx.lags.adjoint) if of_u else None
        dy = Convolve.apply(u, dtaps, ctx.lags) if of_y else None
        return du, dy, None, None, None


def convolved(
    u: Tensor,
    taps: Tensor,
    lags: Lags,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    *,
    convolve: Callable[[Tensor, Tensor, Lags], Tensor] | None = None,
) -> Tensor:
    """The whole op in the dtype of the taps, cast to that of u; its sum is ``convolve``'s, or by
    torch's transforms."""
    wide = taps.dtype
    x = u.to(wide) if pre is None else u.to(wide) * pre.to(wide)
    y = convolve(x, taps, lags) if convolve else Convolve.apply(x, taps, lags)
    if skip is not None:
        y = y + skip.to(wide).unsqueeze(-1) * F.pad(x, (0, lags.out - lags.n))
    return (y if post is None else y * post.to(wide)).to(u.dtype)


def gradients(
    given: Sequence[Tensor | None], lags: Lags, dy: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Of u, taps, skip and gates, where wanted; they have derivatives in their turn."""
    with torch.enable_grad():  # views, since one input may be a function of another
        views = [None if x is None else x.view_as(x) for x in given]
        u, taps, *others = views
        assert u is not None
        assert taps is not None
        y = convolved(u, taps, lags, *others)
        leaves = [x for x, want in zip(views, wanted, strict=True) if want and x is not None]
        found = iter(torch.autograd.grad(y, leaves, dy, create_graph=True))
    return [next(found) if want else None for want in wanted]


def convolve(u: Tensor, taps: Tensor, lags: Lags) -> Tensor:
    """``(b, c, out)``, by one transform of every row, each for itself."""
    size = _size(lags, taps.shape[1])
    spectrum = torch.fft.rfft(lap(taps, lags), n=size).unsqueeze(1)
    spectrum = spectrum.conj() if lags.mirrored else spectrum
    found = torch.fft.irfft(torch.fft.rfft(_grouped(u, taps), n=size) * spectrum, n=size)
    if lags.circular:
        found = _laps_added(found, lags.n, lags.mirrored)
    start = lags.first if lags.mirrored else -lags.first
    return _from(found, start, lags.out).flatten(1, 2).contiguous()


def correlate(u: Tensor, y: Tensor, groups: int, t: int, lags: Lags) -> Tensor:
    """``(groups, t)``; sums over samples and channels of a group are of spectra."""
    size = _size(lags, t)
    a, b = (torch.fft.rfft(x.unflatten(1, (groups, -1)), n=size) for x in (u, y))
    a, b = (b, a) if lags.mirrored else (a, b)
    found = torch.fft.irfft((a.conj() * b).sum((0, 2)), n=size)
    if lags.circular:
        found = _laps_added(found, lags.n, backwards=True)
        return found[:, torch.arange(lags.first, lags.first + t, device=u.device) % lags.n]
    return _from(found, lags.first, t).contiguous()


def _convolve(
    u: Tensor, taps: Tensor, first: int, out: int, mirrored: bool, circular: bool
) -> Tensor:
    return convolve(u, taps, Lags(first, u.shape[2], out, mirrored, circular))


def _correlate(
    u: Tensor,
    y: Tensor,
    groups: int,
    t: int,
    first: int,
    mirrored: bool,
    circular: bool,
) -> Tensor:
    lags = Lags(first, u.shape[2], y.shape[2], mirrored, circular)
    return correlate(u, y, groups, t, lags)


@torch.library.register_fake("fastattn::fft_conv_convolve", lib=_lib)
def _(u: Any, taps: Any, first: Any, out: Any, *about: Any) -> Tensor:
    made: Tensor = u.new_empty(u.shape[0], u.shape[1], out)
    return made


@torch.library.register_fake("fastattn::fft_conv_correlate", lib=_lib)
def _(u: Any, y: Any, groups: Any, t: Any, *about: Any) -> Tensor:
    made: Tensor = u.new_empty(groups, t, dtype=torch.promote_types(u.dtype, torch.float32))
    return made


_lib.impl("fft_conv_convolve", _convolve, "CompositeExplicitAutograd")
_lib.impl("fft_conv_correlate", _correlate, "CompositeExplicitAutograd")


def _grouped(u: Tensor, taps: Tensor) -> Tensor:
    return u.unflatten(1, (taps.shape[0], -1))  # (b, groups, channels, n)


def _size(lags: Lags, t: int) -> int:
    """Of a transform in which nothing that is read wraps around, unless it should."""
    if lags.circular:
        return lags.n if fast_size(lags.n) == lags.n else fast_size(2 * lags.n)
    return fast_size(max(lags.n, lags.out) + t)


def fast_size(least: int) -> int:
    """The least number from ``least`` on, and from 1, without a prime factor above 5."""
    size = max(least, 1)
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1


def lap(taps: Tensor, lags: Lags) -> Tensor:
    """The taps; of a circular convolution those that meet the same inputs added."""
    if not lags.circular or taps.shape[1] <= lags.n:
        return taps
    return F.pad(taps, (0, -taps.shape[1] % lags.n)).unflatten(1, (-1, lags.n)).sum(1)


def _laps_added(x: Tensor, n: int, backwards: bool) -> Tensor:
    """Indices modulo n, of a transform of that size, or of twice that with indices from 0 to 2n, or
    ``backwards`` from -n to n."""
    size = x.shape[-1]
    if size == n:
        return x
    other = x[..., size - n :] if backwards else x[..., n : 2 * n]
    return x[..., :n] + other


def _from(x: Tensor, start: int, count: int) -> Tensor:
    """``count`` elements from ``start`` on, modulo the size."""
    start %= x.shape[-1]
    if start + count <= x.shape[-1]:
        return x[..., start : start + count]
    return x.roll(-start, -1)[..., :count]


def exactly_causal(u: Tensor, taps: Tensor, lags: Lags) -> Tensor:
    """The causal convolution, in which no transform that makes an output has a later input.

    Halves of blocks of every size: the first half adds to the second, by FFT; blocks of the
    smallest size are multiplied out. What is not finite makes NaN of the outputs that see it.
    """
    (c, n), count = u.shape[1:], taps.shape[1]
    size = BLOCK
    while size < n:
        size *= 2
    finite = u.isfinite()
    x = F.pad(torch.where(finite, u, 0), (0, size - n))  # (b, c, size)
    taps = F.pad(taps, (0, max(size - taps.shape[1], 0)))[:, :size]
    each = taps.repeat_interleave(c // taps.shape[0], 0)  # (c, size)
    y = _multiplied_out(x.unflatten(-1, (-1, BLOCK)), each[:, :BLOCK]).flatten(-2)
    half = BLOCK
    while half < size:
        first = x.unflatten(-1, (-1, 2, half))[..., 0, :]  # (b, c, blocks, half)
        spectrum = torch.fft.rfft(each[:, : 2 * half]).unsqueeze(1)
        second = torch.fft.irfft(torch.fft.rfft(first, n=2 * half) * spectrum, n=2 * half)
        y = y + F.pad(second[..., half:], (half, 0)).flatten(-2)
        half *= 2
    seen = F.pad((~finite).cumsum(-1), (count, 0))  # so many up to here
    clean = seen[..., count:] == seen[..., :n]
    return torch.where(clean, y[..., :n], torch.nan)


def _multiplied_out(x: Tensor, taps: Tensor) -> Tensor:
    """Blocks ``(b, c, blocks, size)``, each for itself."""
    size = x.shape[-1]
    lag = torch.arange(size, device=x.device)
    lag = lag.unsqueeze(1) - lag  # (i, j)
    matrix = torch.where(lag >= 0, taps[:, lag.clamp(min=0)], 0)  # (c, i, j)
    return torch.einsum("bckj,cij->bcki", x, matrix)
