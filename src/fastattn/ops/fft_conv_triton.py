"""The Triton path of FFT convolution, for few taps: products with their Toeplitz matrix.

Importing this file imports no triton. Nothing is kept but the inputs. A second derivative takes the
torch path.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import _autograd, _tuning
from fastattn._launch import dense, launch, whole
from fastattn.ops.fft_conv_torch import Lags, gradients
from fastattn.ops.linear_attention_triton import HAS_TRITON

MOST_GATED = 64  # taps
CHAIN = 1024  # chunks that tensor cores sum, which cut off what does not fit: 64 times 2^-23
_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "fft_conv_few_taps(Tensor u, Tensor taps, Tensor? skip, Tensor? pre, Tensor? post, "
    "SymInt first, SymInt out) -> Tensor"
)
_lib.define(
    "fft_conv_few_taps_backward(Tensor dy, Tensor u, Tensor taps, Tensor? skip, Tensor? pre, "
    "Tensor? post, SymInt first, bool[] wanted) -> Tensor[]"
)  # of u, taps, skip, pre and post, empty where not wanted
_autograd.one_by_one(_lib, "fft_conv_few_taps", "fft_conv_few_taps_backward")


def refusal(u: Tensor, lags: Lags, taps: int, gated: bool) -> str | None:
    """Why it cannot run, or None."""
    device = u.device.type
    if not HAS_TRITON:
        return "triton is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the inputs are on the CPU, it needs CUDA"
    if device not in ("cpu", "cuda"):
        return f"the inputs are on {device}, it needs CUDA"
    if u.dtype not in (torch.bfloat16, torch.float16):
        return f"it has no {u.dtype}, its products are of 16 bits"
    if lags.circular:
        return "it has no mode='circular'"
    if taps > (most := most_taps(u.device)):
        return f"it has at most {most} taps, not {taps}"
    if gated and u.dtype == torch.float16:
        return "it has no gates in float16, whose range their products leave"
    if gated and taps > MOST_GATED:
        return f"it has at most {MOST_GATED} taps with gates, not {taps}"
    if device == "cpu" and u.dtype == torch.bfloat16:
        return f"Triton's interpreter computes {u.dtype} products wrongly, it needs float16"
    return None


@torch.compiler.assume_constant_result
def most_taps(device: torch.device) -> int:
    return _tuning.fft_conv_most_taps(device)


def is_faster(u: Tensor, taps: int, gated: bool) -> bool:
    """Than the native path."""
    return u.device.type == "cuda" and taps <= _tuning.fft_conv_few_taps(gated)


def convolve(
    u: Tensor,
    taps: Tensor,
    lags: Lags,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
) -> Tensor:
    """The whole op; taps and skip in float32, the others of one dtype. Lag 0 has a tap."""
    given, about = (u, taps, skip, pre, post), (lags.first, lags.out)
    if not _autograd.needs_gradient(*given):
        return _call(*given, *about)
    out: Tensor = _autograd.apply(_FewTaps, *given, *about)
    return out


def _call(*arguments: Any) -> Tensor:
    operator = torch.ops.fastattn.fft_conv_few_taps.default
    out: Tensor = _autograd.call(operator, _forward, *arguments)
    return out


class _FewTaps(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        u: Tensor, taps: Tensor, skip: Any, pre: Any, post: Any, first: int, out: int
    ) -> Tensor:
        return _call(u, taps, skip, pre, post, first, out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *given, ctx.first, ctx.out = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        given, wanted = ctx.saved_tensors, list(ctx.needs_input_grad[:5])
        if torch.is_grad_enabled() or _autograd.differentiated_twice(dy, *given):
            lags = Lags(ctx.first, given[0].shape[2], ctx.out)
            return *gradients(given, lags, dy, wanted), None, None
        operator = torch.ops.fastattn.fft_conv_few_taps_backward.default
        grads = _autograd.call(operator, _backward, dy, *given, ctx.first, wanted)
        return *(x if want else None for x, want in zip(grads, wanted, strict=True)), None, None


@torch.library.register_fake("fastattn::fft_conv_few_taps", lib=_lib)
def _(u: Any, taps: Any, skip: Any, pre: Any, post: Any, first: int, out: int) -> Tensor:
    made: Tensor = u.new_empty(*u.shape[:2], out)
    return made


@torch.library.register_fake("fastattn::fft_conv_few_taps_backward", lib=_lib)
def _(
    dy: Any, u: Any, taps: Any, skip: Any, pre: Any, post: Any, first: int, wanted: Any
) -> list[Tensor]:
    given = zip((u, taps, skip, pre, post), wanted, strict=True)
    return [x.new_empty(x.shape) if want else u.new_empty(0) for x, want in given]


class _Options(NamedTuple):
    """Everything that decides which variant of a kernel runs."""

    dtype: torch.dtype
    most: int  # taps, as the power of two that holds them
    skip: bool
    pre: bool
    post: bool
    unit: int
    mirrored: bool
    tiles: int


def _constants(kernel: str, options: _Options) -> dict[str, Any]:
    import triton.language as tl

    return {
        "UNIT": options.unit,
        "MIRRORED": options.mirrored,
        "SCALED": options.dtype == torch.float16,
        "MOST": options.most,
        "HALF": tl.float16 if options.dtype == torch.float16 else tl.bfloat16,
        "TILES_J": options.tiles,
        **_tiles(kernel, options),
    }


def _tiles(kernel: str, options: _Options) -> dict[str, int]:
    gated = options.pre or options.post
    return _tuning.fft_conv(kernel.split(".")[1], options.most, gated, options.unit > 1)


def _options(
    taps: int, n: int, out: int, mirrored: bool, skip: Tensor | None, x: Tensor, *gates: Any
) -> _Options:
    pre, post = (gate is not None for gate in gates)
    strides = [s for y in (x, *gates) if y is not None for s in y.stride()[:2]]
    unit = 1 if any(s % 8 for s in (n, out, *strides)) else 8
    most = 1 << (taps - 1).bit_length()
    return _Options(x.dtype, most, skip is not None, pre, post, unit, mirrored, 0)


def _span(low: int, count: int, width: int) -> tuple[int, int]:
    """Which inputs a chunk of outputs sees: from where on, a multiple of 8, and how many."""
    start = -(low + count - 1) // 8 * 8
    return start, width - low - start


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else x.stride()[:2]  # type: ignore[return-value]


def _readable(x: Tensor | None) -> Tensor | None:
    return None if x is None else dense(x)


def _forward(
    u: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    first: int,
    out: int,
    mirrored: bool = False,
) -> Tensor:
    (b, c, n), (groups, count) = u.shape, taps.shape
    y = u.new_empty(b, c, out)
    if not y.numel():
        return y
    low = 1 - count - first if mirrored else first
    assert low <= 0 < low + count  # the skip is a tap more at lag 0
    u, taps, skip = dense(u), whole(taps), whole(skip)
    pre, post = _readable(pre), _readable(post)
    options = _options(count, n, out, mirrored, skip, u, pre, post)
    kernel = "fft_conv.convolve"
    tiles = _tiles(kernel, options)
    width = tiles["BLOCK_S"]
    start, seen = _span(low, count, width)
    blocks = -(-b * -(-out // width) // tiles["BLOCK_M"])
    launch(
        kernel,
        (c, _tuning.fft_conv_splits(blocks, c, u.device), 1),
        (u, taps, skip, pre, post, y, *_strides(u), *_strides(pre), *_strides(post),
         c // groups, c, n, out, count, low, start, b),
        options._replace(tiles=-(-seen // tiles["BLOCK_J"])),
        _constants,
    )  # fmt: skip
    return y


def _correlate(
    dy: Tensor, post: Tensor | None, u: Tensor, pre: Tensor | None, count: int, first: int
) -> Tensor:
    """``(splits, c, places, taps)``: the taps' gradient, but for sums."""
    (b, c, n), out = u.shape, dy.shape[2]
    u, dy, pre, post = dense(u), dense(dy), _readable(pre), _readable(post)
    options = _options(count, n, out, False, None, u, pre, post)
    if any(s % 8 for s in dy.stride()[:2]):
        options = options._replace(unit=1)
    kernel = "fft_conv.correlate"
    tiles = _tiles(kernel, options)
    width = tiles["BLOCK_S"]
    start, seen = _span(first, count, width)
    programs = c * -(-seen // tiles["BLOCK_J"])
    blocks = -(-b * -(-out // width) // tiles["BLOCK_M"])
    splits = _tuning.fft_conv_splits(blocks, programs, u.device)
    splits = max(splits, -(-blocks * tiles["BLOCK_M"] // CHAIN))
    share = u.new_empty(splits, c, width, count, dtype=torch.float32)
    launch(
        kernel,
        (programs, splits, 1),
        (dy, post, u, pre, share, *_strides(dy), *_strides(post), *_strides(u), *_strides(pre),
         c, n, out, count, first, start, b, programs // c),
        options,
        _constants,
    )  # fmt: skip
    return share


def _backward(
    dy: Tensor,
    u: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    first: int,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of inputs and gates are convolutions with another gate, mirrored but for post's."""
    (groups, count), n, out = taps.shape, u.shape[2], dy.shape[2]
    grads = [u.new_empty(0) for _ in wanted]
    if wanted[0]:
        grads[0] = _forward(dy, taps, skip, post, pre, first, n, True)
    if wanted[3]:
        grads[3] = _forward(dy, taps, skip, post, u, first, n, True)
    if wanted[4]:
        grads[4] = _forward(u, taps, skip, pre, dy, first, out)
    if wanted[1]:
        share = _correlate(dy, post, u, pre, count, first)
        grads[1] = share.unflatten(1, (groups, -1)).sum((0, 2, 3))
        if wanted[2]:
            grads[2] = share[..., -first].sum((0, 2))
    elif wanted[2]:
        grads[2] = _correlate(dy, post, u, pre, 1, 0)[..., 0].sum((0, 2))
    return grads


for _key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter only
    _lib.impl("fft_conv_few_taps", _forward, _key)
    _lib.impl("fft_conv_few_taps_backward", _backward, _key)
