"""The native path of FFT convolution: two registered operators, the op and its backward pass.

Nothing is kept but the inputs. A second derivative takes the torch path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _autograd, _native, _tuning
from fastattn.ops.fft_conv_launch import (
    TYPES,
    address,
    at,
    longest_fused,
    longest_fused_on,
    resolved,
    table_of,
)
from fastattn.ops.fft_conv_torch import Lags, gradients, lap

LONGEST = 1 << 22  # inputs of a row
SHORTEST_LONG = 1 << 15  # of transforms on a GPU of rows longer than a block transforms
MOST_LONG_ROWS = 16383  # of those at a time
_lib = torch.library.Library("fastattn", "FRAGMENT")
_lib.define(
    "fft_conv(Tensor u, Tensor taps, Tensor? skip, Tensor? pre, Tensor? post, SymInt first, "
    "SymInt out) -> Tensor"
)
_lib.define(
    "fft_conv_backward(Tensor dy, Tensor u, Tensor taps, Tensor? skip, Tensor? pre, Tensor? post, "
    "SymInt first, bool[] wanted) -> Tensor[]"
)  # of u, taps, skip, pre and post, empty where not wanted
_autograd.one_by_one(_lib, "fft_conv", "fft_conv_backward")


def refusal(u: Tensor, lags: Lags, taps: int) -> str | None:
    """Why it cannot run, or None."""
    device, longest = u.device.type, max(lags.n, lags.out)
    if u.dtype not in TYPES:
        return f"it has no {u.dtype}"
    reason = _native.refusal(device)
    if reason is None and longest > LONGEST:
        reason = f"it has rows of at most {LONGEST}, not of {longest}"
    if reason is None and device == "cuda":
        fused = longest_fused(u.device)
        if isinstance(fused, str):
            return fused
        too_long = _most(lags, taps) > fused and not _is_cut(lags, taps, device)
        if too_long and u.shape[0] > MOST_LONG_ROWS:
            reason = f"it has at most {MOST_LONG_ROWS} samples of rows longer than {fused}"
    return reason


def is_faster(u: Tensor, lags: Lags, taps: int) -> bool:
    """Than torch.fft: on a CPU its rows fill vectors, and go through the cache side by side."""
    if u.device.type != "cpu":
        return True
    longest, fewest = _tuning.fft_conv_on_cpu()
    fits = max(lags.n, lags.out) <= longest or _is_cut(lags, taps, "cpu")
    return fits and u.shape[0] * u.shape[1] >= fewest


def _most(lags: Lags, taps: int) -> int:
    """What the length of a transform must not be below."""
    return max(lags.n, lags.out, 2, abs(lags.first) + 1, abs(lags.first + taps - 1) + 1)


def _length(lags: Lags, taps: int) -> int:
    """The least power of two that a transform may have."""
    return 1 << (_most(lags, taps) - 1).bit_length()


def _span(lags: Lags, taps: int) -> tuple[int, int]:
    """From the first lag to the last, zero included, and the greatest either way."""
    low, high = lags.first, lags.first + taps - 1
    if lags.circular:  # as ``convolve`` lays them out
        low, high = 1 - lags.n, lags.n - 1
    return max(high, 0) - min(low, 0), max(abs(low), abs(high))


def _window(lags: Lags, taps: int, device: str) -> int:
    """The transform of windows that rows are cut into (overlap-save), or 0: they stay whole."""
    return _tuning.fft_conv_window(lags.out, *_span(lags, taps), _length(lags, taps), device)


def _is_cut(lags: Lags, taps: int, device: str) -> bool:
    """Whether rows too long to stay whole have few enough taps for windows.

    By inequalities, which a compiler can ask of a length that changes; ``_window`` then finds one.
    """
    span, _ = _span(lags, taps)
    return 32 * span <= lags.out and (device == "cpu" or span < 4096)


def convolve(
    u: Tensor,
    taps: Tensor,
    lags: Lags,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
) -> Tensor:
    """The whole op; taps and skip in float32, the others of one dtype."""
    if lags.circular:  # lag 0 to n - 1, and from -n + 1 on the same ones but for 0
        one = lap(taps, lags)
        one = F.pad(one, (0, lags.n - one.shape[1]))
        taps, lags = torch.cat([one[:, 1:], one], 1), Lags(1 - lags.n, lags.n, lags.n)
    given = (u, taps, skip, pre, post)
    about = (lags.first, lags.out)
    if not _autograd.needs_gradient(*given):
        return _call(*given, *about)
    out: Tensor = _autograd.apply(_FFTConv, *given, *about)
    return out


def _call(*arguments: Any) -> Tensor:
    out: Tensor = _autograd.call(torch.ops.fastattn.fft_conv.default, _forward, *arguments)
    return out


class _FFTConv(torch.autograd.Function):
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
        given = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:5])
        if torch.is_grad_enabled() or _autograd.differentiated_twice(dy, *given):
            lags = Lags(ctx.first, given[0].shape[2], ctx.out)
            return *gradients(given, lags, dy, wanted), None, None
        operator = torch.ops.fastattn.fft_conv_backward.default
        grads = _autograd.call(operator, _backward, dy, *given, ctx.first, wanted)
        return *(x if want else None for x, want in zip(grads, wanted, strict=True)), None, None


def _like(x: Tensor, length: int | None = None) -> Tensor:
    """New memory as x lies, contiguous if it is of another length."""
    if length is None or length == x.shape[2]:
        return torch.empty_like(x)
    return x.new_empty(*x.shape[:2], length)


def _gradients(
    u: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    wanted: list[bool],
) -> list[Tensor]:
    """Empty, of the gradients' shapes; those of taps and skip are sums, made elsewhere."""
    given = (u, taps, skip, pre, post)
    return [
        torch.empty_like(x) if want and x is not None else u.new_empty(0)
        for x, want in zip(given, wanted, strict=True)
    ]


@torch.library.register_fake("fastattn::fft_conv", lib=_lib)
def _(u: Any, taps: Any, skip: Any, pre: Any, post: Any, first: int, out: int) -> Tensor:
    return _like(u, out)


@torch.library.register_fake("fastattn::fft_conv_backward", lib=_lib)
def _(
    dy: Any, u: Any, taps: Any, skip: Any, pre: Any, post: Any, first: int, wanted: Any
) -> list[Tensor]:
    return _gradients(u, taps, skip, pre, post, wanted)


def _shape(u: Tensor, taps: Tensor, lags: Lags, backward: bool = False) -> Any:
    (b, c, n), (groups, count) = u.shape, taps.shape
    part = _native.part()
    shape = part.ConvShape(
        b, c, c // groups, n, lags.out, lags.first, count, lags.mirrored, TYPES[u.dtype]
    )
    on_cpu = u.device.type == "cpu"
    rows = b
    if window := _window(lags, count, u.device.type):
        shape.length = window
        shape.valid = part.conv_valid(shape)
        rows = b * -(-lags.out // shape.valid)
    else:
        shape.length = _length(lags, count) if on_cpu else part.conv_length(shape)
    if on_cpu:
        shape.slices = part.conv_cpu_slices(shape, torch.get_num_threads())
    elif not shape.valid and shape.length > longest_fused_on(u.device):
        shape.length = max(SHORTEST_LONG, 1 << (max(lags.n, lags.out) - 1).bit_length())
        shape.slices = 1
        most = _tuning.fft_conv_workspace() // part.conv_workspace(shape, backward, u.device.index)
        shape.slices = max(1, min(c, MOST_LONG_ROWS // b, most))
    else:
        shape.slices = _tuning.fft_conv_slices(rows, c, shape.length, backward, u.device)
    return shape


def _is_long(shape: Any, x: Tensor) -> bool:
    """Whether rows have no kernel of their own, but one for some channels at a time."""
    return x.device.type == "cuda" and shape.length >= SHORTEST_LONG


def _reachable(shape: Any, first: Tensor, *others: Tensor | None) -> list[Any]:
    """As they are, or contiguous where only such rows can be read, or written."""
    tensors = (first, *others)
    if first.device.type == "cpu" or (shape.length <= 2048 and not shape.valid):
        return list(tensors)
    return [x if x is None else x.contiguous() for x in tensors]


def _cuda(shape: Any, backward: bool, device: torch.device) -> tuple[Any, ...]:
    """What a launch needs besides inputs and outputs, and what has to live until then."""
    index = device.index
    size = _native.part().conv_workspace(shape, backward, index)
    workspace = torch.empty(size, dtype=torch.float32, device=device)
    table = table_of(shape.length, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return (table.data_ptr(), address(workspace), index, stream), workspace


def _forward(
    u: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    first: int,
    out: int,
) -> Tensor:
    u, taps, skip, pre, post = resolved(u, taps, skip, pre, post)
    y = _like(u, out)
    shape = _shape(u, taps, Lags(first, u.shape[2], out))
    u, pre, post, made = _reachable(shape, u, pre, post, y)
    taps, skip = taps.contiguous(), None if skip is None else skip.contiguous()
    _run(shape, u, pre, post, made, taps, skip)
    return y if made is y else y.copy_(made)


def _run(
    shape: Any,
    u: Tensor,
    pre: Tensor | None,
    post: Tensor | None,
    y: Tensor,
    taps: Tensor,
    skip: Tensor | None,
) -> None:
    about = (shape, at(u), at(pre), at(post), at(y), address(taps), address(skip))
    if u.device.type == "cpu":
        _native.part().conv_cpu(*about, torch.get_num_threads())
    else:
        launch, _ = _cuda(shape, False, u.device)
        _native.part().conv_cuda(*about, *launch)


class _Backward(NamedTuple):
    """What a backward pass has, laid out as it can be read, and what it is to fill: gradients of
    u, pre and post, ``of_rows``, and of ``grads`` those of taps and skip."""

    shape: Any
    lags: Lags
    dy: Tensor
    u: Tensor
    taps: Tensor
    skip: Tensor | None
    pre: Tensor | None
    post: Tensor | None
    of_rows: list[Tensor]
    wanted: list[bool]
    grads: list[Tensor]


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
    dy, u, taps, skip, pre, post = resolved(dy, u, taps, skip, pre, post)
    grads = _gradients(u, taps, skip, pre, post, wanted)
    lags = Lags(first, u.shape[2], dy.shape[2])
    shape = _shape(u, taps, lags, backward=True)
    of_rows = [grads[0], grads[3], grads[4]]
    dy, u, pre, post, *made = _reachable(shape, dy, u, pre, post, *of_rows)
    taps, skip = taps.contiguous(), None if skip is None else skip.contiguous()
    fill = _fill_whole
    if shape.valid:
        fill = _fill_in_windows
    elif _is_long(shape, u):
        fill = _fill_long
    fill(_Backward(shape, lags, dy, u, taps, skip, pre, post, made, wanted, grads))
    for x, found in zip(of_rows, made, strict=True):
        if found is not x:
            x.copy_(found)
    return grads


def _fill_whole(call: _Backward) -> None:
    """All at once."""
    shape, _, dy, u, taps, skip, pre, post, of_rows, wanted, grads = call
    c, groups = u.shape[1], taps.shape[0]
    each_taps, each_skip = (
        taps.new_empty(shape.slices * c * size if want else 0)
        for size, want in ((taps.shape[1], wanted[1]), (1, wanted[2]))
    )
    about = (
        *(shape, at(u), at(pre), at(post), at(dy), *map(at, of_rows)),
        *(address(taps), address(skip), address(each_taps), address(each_skip)),
    )
    if u.device.type == "cpu":
        _native.part().conv_backward_cpu(*about, torch.get_num_threads())
    else:
        launch, _ = _cuda(shape, True, u.device)
        _native.part().conv_backward_cuda(*about, *launch)
    if wanted[1]:
        torch.sum(each_taps.view(shape.slices, groups, c // groups, -1), (0, 2), out=grads[1])
    if wanted[2]:
        torch.sum(each_skip.view(shape.slices, c), 0, out=grads[2])


def _fill_in_windows(call: _Backward) -> None:
    """Gradients of what has gates are convolutions with another gate, mirrored but for post's."""
    shape, lags, dy, u, taps, skip, pre, post, of_rows, wanted, grads = call
    back = _shape(dy, taps, lags.adjoint)
    assert back.valid  # it has no more outputs, and the same lags
    if wanted[0]:
        _run(back, dy, post, pre, of_rows[0], taps, skip)
    if wanted[3]:
        _run(back, dy, post, u, of_rows[1], taps, skip)
    if wanted[4]:
        _run(shape, u, pre, dy, of_rows[2], taps, skip)
    if wanted[1]:
        (groups, count), c = taps.shape, u.shape[1]
        each = taps.new_empty(shape.slices, groups, c // groups, count)
        about = (shape, at(u), at(pre), at(post), at(dy), address(each))
        if u.device.type == "cpu":
            _native.part().correlate_cpu(*about, torch.get_num_threads())
        else:
            launch, _ = _cuda(shape, True, u.device)
            _native.part().correlate_cuda(*about, *launch)
        torch.sum(each, (0, 2), out=grads[1])
    if wanted[2]:
        _gradient_of_skip(u, pre, dy, post, grads[2])


def _fill_long(call: _Backward) -> None:
    """Those of inputs, their gate and taps at once; that of the other gate is a convolution."""
    shape, lags, dy, u, taps, skip, pre, post, of_rows, wanted, grads = call
    (groups, count), c = taps.shape, u.shape[1]
    each = taps.new_zeros(c * count if wanted[1] else 0)  # where nothing reaches they stay
    launch, _ = _cuda(shape, True, u.device)
    _native.part().conv_backward_cuda(
        *(shape, at(u), at(pre), at(post), at(dy), *map(at, of_rows[:2]), None),
        *(address(taps), address(skip), address(each), 0, *launch),
    )
    if wanted[4]:
        _run(_shape(u, taps, lags), u, pre, dy, of_rows[2], taps, skip)
    if wanted[1]:
        torch.sum(each.view(groups, c // groups, count), 1, out=grads[1])
    if wanted[2]:
        _gradient_of_skip(u, pre, dy, post, grads[2])


def _gradient_of_skip(
    u: Tensor, pre: Tensor | None, dy: Tensor, post: Tensor | None, out: Tensor
) -> None:
    shared = min(u.shape[2], dy.shape[2])
    one, other = (
        x[..., :shared].float() if gate is None else x[..., :shared].float() * gate[..., :shared]
        for x, gate in ((u, pre), (dy, post))
    )
    torch.sum(one * other, (0, 2), out=out)


for _key in ("CUDA", "CPU"):
    _lib.impl("fft_conv", _forward, _key)
    _lib.impl("fft_conv_backward", _backward, _key)
