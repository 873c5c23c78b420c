"""The native path of FFT convolution: two registered operators, the op and its backward pass.

Nothing is kept but the inputs. A second derivative takes the torch path.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _autograd, _native, _tuning
from fastattn.ops.fft_conv_torch import MAPS, Convolve, Lags, convolved, lap

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LONGEST = 1 << 22  # inputs of a row
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
        fused = _fused(u.device)
        if isinstance(fused, str):
            return fused
        if longest > fused and u.shape[0] > 65535 and not _window(lags, taps, device):
            reason = f"it has at most 65535 samples of rows longer than {fused}"
    return reason


@torch.compiler.assume_constant_result
def _fused(device: torch.device) -> int | str:
    """Up to how many numbers a row is one transform on a GPU, or why nothing runs there."""
    return _fused_on(device)


@cache
def _fused_on(device: torch.device) -> int | str:
    try:
        longest: int = _native.part().conv_longest(device.index)
    except RuntimeError as error:
        return f"on {torch.cuda.get_device_name(device)}: {error}"
    return longest


def is_faster(u: Tensor, lags: Lags, taps: int) -> bool:
    """Than torch.fft: on a CPU its rows fill vectors, and go through the cache side by side."""
    if u.device.type != "cpu":
        return True
    longest, fewest = _tuning.fft_conv_on_cpu()
    fits = max(lags.n, lags.out) <= longest or _window(lags, taps, "cpu") > 0
    return fits and u.shape[0] * u.shape[1] >= fewest


def _most(lags: Lags, taps: int) -> int:
    """What the length of a transform must not be below."""
    return max(lags.n, lags.out, 2, abs(lags.first) + 1, abs(lags.first + taps - 1) + 1)


def _length(lags: Lags, taps: int) -> int:
    """The least power of two that a transform may have."""
    return 1 << (_most(lags, taps) - 1).bit_length()


def _window(lags: Lags, taps: int, device: str) -> int:
    """The transform of windows that rows are cut into (overlap-save), or 0: they stay whole."""
    low, high = lags.first, lags.first + taps - 1
    if lags.circular:  # as ``convolve`` lays them out
        low, high = 1 - lags.n, lags.n - 1
    span, furthest = max(high, 0) - min(low, 0), max(abs(low), abs(high))
    return _tuning.fft_conv_window(lags.out, span, furthest, _length(lags, taps), device)


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
    count, device = taps.shape[1], u.device.type
    too_long = device == "cuda" and _most(lags, count) > _fused(u.device)
    if too_long and not _window(lags, count, device):
        return _convolve_long(u, taps, lags, skip, pre, post)
    given = (u, taps, skip, pre, post)
    about = (lags.first, lags.out)
    if not _autograd.needs_gradient(*(x for x in given if x is not None)):
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
        if torch.is_grad_enabled():  # a derivative of this one is wanted
            with torch.enable_grad():  # views, since one input may be a function of another
                views = [None if x is None else x.view_as(x) for x in given]
                u, taps, *others = views
                assert u is not None
                assert taps is not None
                y = convolved(u, taps, Lags(ctx.first, u.shape[2], ctx.out), *others)
                leaves = [
                    x for x, want in zip(views, wanted, strict=True) if want and x is not None
                ]
                found = iter(torch.autograd.grad(y, leaves, dy, create_graph=True))
            return *(next(found) if want else None for want in wanted), None, None
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


def _shape(u: Tensor, taps: Tensor, lags: Lags) -> Any:
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
    else:
        shape.slices = _tuning.fft_conv_slices(rows, c, u.device)
    return shape


def _at(x: Tensor | None) -> tuple[int, ...] | None:
    if x is None or x.numel() == 0:
        return None
    b, c, n = x.stride()
    return x.data_ptr(), b, c, 1 if x.shape[2] == 1 else n


def _address(x: Tensor | None) -> int:
    return 0 if x is None or x.numel() == 0 else x.data_ptr()


@cache
def _table(length: int, device: torch.device) -> Tensor:
    """The roots of a transform, on a device; the first time synchronises."""
    part = _native.part()
    table = torch.empty(part.conv_table_size(length), dtype=torch.float32, device="cpu")
    part.conv_table(length, table.data_ptr())
    return table.to(device)


def _resolved(*tensors: Tensor | None) -> list[Any]:
    """Not views of what they are the negatives of."""
    return [x if x is None else x.resolve_neg() for x in tensors]


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
    table = _table(shape.length, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return (table.data_ptr(), _address(workspace), index, stream), workspace


def _forward(
    u: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    first: int,
    out: int,
) -> Tensor:
    u, taps, skip, pre, post = _resolved(u, taps, skip, pre, post)
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
    about = (shape, _at(u), _at(pre), _at(post), _at(y), _address(taps), _address(skip))
    if u.device.type == "cpu":
        _native.part().conv_cpu(*about, torch.get_num_threads())
    else:
        launch, _ = _cuda(shape, False, u.device)
        _native.part().conv_cuda(*about, *launch)


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
    dy, u, taps, skip, pre, post = _resolved(dy, u, taps, skip, pre, post)
    grads = _gradients(u, taps, skip, pre, post, wanted)
    lags = Lags(first, u.shape[2], dy.shape[2])
    shape = _shape(u, taps, lags)
    if shape.valid:
        return _backward_in_windows(dy, u, taps, skip, pre, post, lags, shape, wanted, grads)
    c, groups = u.shape[1], taps.shape[0]
    of_rows = [grads[0], grads[3], grads[4]]
    dy, u, pre, post, du, dpre, dpost = _reachable(shape, dy, u, pre, post, *of_rows)
    taps, skip = taps.contiguous(), None if skip is None else skip.contiguous()
    each_taps, each_skip = (
        taps.new_empty(shape.slices * c * size if want else 0)
        for size, want in ((taps.shape[1], wanted[1]), (1, wanted[2]))
    )
    about = (
        *(shape, _at(u), _at(pre), _at(post), _at(dy), _at(du), _at(dpre), _at(dpost)),
        *(_address(taps), _address(skip), _address(each_taps), _address(each_skip)),
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
    for x, made in zip(of_rows, (du, dpre, dpost), strict=True):
        if made is not x:
            x.copy_(made)
    return grads


def _backward_in_windows(
    dy: Tensor,
    u: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    lags: Lags,
    shape: Any,
    wanted: list[bool],
    grads: list[Tensor],
) -> list[Tensor]:
    """Gradients of what has gates are convolutions with another gate, mirrored but for post's."""
    of_rows = [grads[0], grads[3], grads[4]]
    dy, u, pre, post, du, dpre, dpost = _reachable(shape, dy, u, pre, post, *of_rows)
    taps, skip = taps.contiguous(), None if skip is None else skip.contiguous()
    back = _shape(dy, taps, lags.adjoint)
    assert back.valid  # it has no more outputs, and the same lags
    if wanted[0]:
        _run(back, dy, post, pre, du, taps, skip)
    if wanted[3]:
        _run(back, dy, post, u, dpre, taps, skip)
    if wanted[4]:
        _run(shape, u, pre, dy, dpost, taps, skip)
    if wanted[1]:
        (groups, count), c = taps.shape, u.shape[1]
        each = taps.new_empty(shape.slices, groups, c // groups, count)
        about = (shape, _at(u), _at(pre), _at(post), _at(dy), _address(each))
        if u.device.type == "cpu":
            _native.part().correlate_cpu(*about, torch.get_num_threads())
        else:
            launch, _ = _cuda(shape, True, u.device)
            _native.part().correlate_cuda(*about, *launch)
        torch.sum(each, (0, 2), out=grads[1])
    if wanted[2]:
        shared = min(lags.n, lags.out)
        one, other = (
            x[..., :shared].float()
            if gate is None
            else x[..., :shared].float() * gate[..., :shared]
            for x, gate in ((u, pre), (dy, post))
        )
        torch.sum(one * other, (0, 2), out=grads[2])
    for x, made in zip(of_rows, (du, dpre, dpost), strict=True):
        if made is not x:
            x.copy_(made)
    return grads


def _convolve_long(
    u: Tensor,
    taps: Tensor,
    lags: Lags,
    skip: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
) -> Tensor:
    """Of rows that are cut into blocks; gates are torch's, in float32."""
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
    fused = _fused_on(u.device)
    assert isinstance(fused, int)
    shape.length = min(_tuning.fft_conv_block(max(n, lags.out)), fused)
    return shape


def _chunks(shape: Any, u: Tensor, gradient: bool) -> tuple[int, Tensor]:
    """How many channels at a time, and their workspace."""
    part, (b, c, _) = _native.part(), u.shape
    one = part.conv_long_workspace(shape, 1, gradient)
    channels = max(1, min(c, 65535 // b, _tuning.fft_conv_workspace() // one))
    size = part.conv_long_workspace(shape, channels, gradient)
    return channels, torch.empty(size, dtype=torch.float32, device=u.device)


def _long(u: Tensor, taps: Tensor, lags: Lags) -> Tensor:
    u, taps = _resolved(u, taps)
    groups, count = taps.shape
    shape = _long_shape(u, groups, count, lags)
    u, taps, y = u.contiguous(), taps.contiguous(), u.new_empty(*u.shape[:2], lags.out)
    channels, workspace = _chunks(shape, u, False)
    stream = torch.cuda.current_stream(u.device).cuda_stream
    table = _table(shape.length, u.device)
    _native.part().conv_long_cuda(
        *(shape, _at(u), _at(y), _address(taps), _address(table), _address(workspace)),
        *(channels, u.device.index, stream),
    )
    return y


def _long_correlate(u: Tensor, y: Tensor, groups: int, count: int, lags: Lags) -> Tensor:
    u, y = _resolved(u, y)
    c = y.shape[1]
    shape = _long_shape(u, groups, count, lags)
    u, y = u.contiguous(), y.contiguous()
    dtaps = u.new_zeros(c, count, dtype=torch.float32)
    channels, workspace = _chunks(shape, u, True)
    stream = torch.cuda.current_stream(u.device).cuda_stream
    table = _table(shape.length, u.device)
    _native.part().correlate_long_cuda(
        *(shape, _at(u), _at(y), _address(dtaps), _address(table), _address(workspace)),
        *(channels, u.device.index, stream),
    )
    return dtaps.view(groups, c // groups, count).sum(1)


MAPS["native"] = (_long, _long_correlate)
for _key in ("CUDA", "CPU"):
    _lib.impl("fft_conv", _forward, _key)
    _lib.impl("fft_conv_backward", _backward, _key)
