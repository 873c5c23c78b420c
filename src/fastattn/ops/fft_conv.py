"""Long convolution by FFT in O(n log n), of any length and with any number of taps.

    y[i] = post[i] · (sum_j k[j] · x[i - j] + skip · x[i]),    x = pre · u

along a channel. Arithmetic is in float32 whatever the inputs are, so that an output in 16 bits is
the exact one, rounded. Gates: Poli et al. 2023, "Hyena Hierarchy"; two-sided kernels: Gu et al.
2022, "Efficiently Modeling Long Sequences with Structured State Spaces".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _check
from fastattn._backend import select
from fastattn.ops import fft_conv_native as native_path
from fastattn.ops import fft_conv_torch as torch_path
from fastattn.ops import fft_conv_triton as triton_path
from fastattn.ops.fft_conv_torch import Lags
from fastattn.ops.linear_attention import in_full_precision

MODES = ("causal", "circular", "bidirectional", "full")
BACKENDS = {"fft_conv": ("triton", "native", "torch", "reference")}


class ConvState(NamedTuple):
    """What a causal convolution remembers: the last inputs, in a ring.

    Attributes:
        inputs: ``(b, c, taps)``, float32 or float64.
        position: ``()`` int64, where in the ring the next input goes.
    """

    inputs: Tensor
    position: Tensor


def fft_conv(
    u: Tensor,
    k: Tensor,
    *,
    mode: str = "causal",
    reverse: Tensor | None = None,
    reverse_lag: int = 0,
    skip: Tensor | None = None,
    pre_gate: Tensor | None = None,
    post_gate: Tensor | None = None,
    exact_causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Convolve every channel with taps of its own, in O(n log n) time and O(n) memory.

    A few taps in 16 bits are a matrix product on a GPU: O(n · taps), as exact after rounding.

    Args:
        u: Inputs, ``(b, c, n)``, float64, float32, bfloat16 or float16, of any strides.
        k: Taps, ``(c, taps)``, one row for all channels, or ``(groups, taps)``, where channel i
            reads row i // (c / groups); k[j] is that of lag j. Computed with in float32.
        mode: "causal": y[i] sees u[i - j] for j from 0 on, and there are n outputs. "circular":
            indices are modulo n. "bidirectional": ``reverse`` is added. "full": the causal one,
            and what the last inputs add behind the end: n + taps - 1 outputs.
        reverse: Of "bidirectional", taps of the future ``(groups, any number)``: y[i] gains
            reverse[j] · u[i + j + reverse_lag].
        reverse_lag: 0, where lag 0 has two taps (MEGA, safari), or 1 (S4, SGConv).
        skip: ``(c,)``, see above.
        pre_gate: ``(b, c, n)`` in the dtype of u.
        post_gate: Of the shape of the output, in the dtype of u.
        exact_causal: The sums are cut into blocks in such a way that nothing of a later input,
            be it infinite, reaches an earlier output, not even by rounding; O(n log² n). Without
            it, an FFT's rounding is relative to the largest input of a row, wherever it stands,
            and a NaN is everywhere in its row; on "triton" near where it stands.
        backend: "native" (C++ and CUDA, no float64, no exact_causal; a second derivative takes the
            torch path), "triton" (products on tensor cores: of 16 bits, up to 256 taps, or 64
            with gates, which float16 may not have; not circular, no exact_causal; second
            derivatives likewise), "torch", "reference" (quadratic), or None for the first that can
            run and is fast.

    Returns:
        ``(b, c, n)``, or n + taps - 1 where "full", in the dtype of u. Sums are in float32, or
        float64 for float64 inputs. Rows are transformed one by one: none touches another.

    Raises:
        TypeError: A dtype is not floating, or a gate's is not that of u.
        ValueError: A shape, device or option does not fit.
    """
    _check_inputs(u, k, mode, reverse, reverse_lag, skip, exact_causal)
    n, more = u.shape[2], k.shape[1] - 1 if mode == "full" and u.shape[2] else 0
    for name, gate, length in (("pre_gate", pre_gate, n), ("post_gate", post_gate, n + more)):
        if gate is not None:
            _check.check_same(u=u, **{name: gate})
            if gate.shape != (*u.shape[:2], length):
                raise ValueError(
                    f"{name} must be {(*u.shape[:2], length)}, got {tuple(gate.shape)}"
                )
    wide = torch.promote_types(u.dtype, torch.float32)
    taps, lags = _taps(
        k.to(wide), None if reverse is None else reverse.to(wide), reverse_lag, mode, n
    )
    gates = (None if skip is None else skip.to(wide), pre_gate, post_gate)
    if not u.numel():
        taps = taps[:, :0].sum() + sum(x.sum() for x in (u, *gates) if x is not None)
        return (u.new_zeros(*u.shape[:2], n + more) + taps).to(u.dtype)
    gated = pre_gate is not None or post_gate is not None
    run = _select(u, lags, taps.shape[1], gated, exact_causal, backend)
    with in_full_precision(u.device.type):
        if run == "triton":
            return triton_path.convolve(u, taps, lags, *gates)
        if run == "native":
            return native_path.convolve(u, taps, lags, *gates)
        way: Any = None
        if run == "reference":
            way = _by_definition
        elif exact_causal:
            way = torch_path.exactly_causal
        return torch_path.convolved(u, taps, lags, *gates, convolve=way)


def _select(
    u: Tensor, lags: Lags, taps: int, gated: bool, exact_causal: bool, backend: str | None
) -> str:
    triton = triton_path.refusal(u, lags, taps, gated)
    native = native_path.refusal(u, lags, taps)
    if exact_causal:
        triton = native = "it has no exact_causal"
    ways = {"triton": triton, "native": native, "torch": None, "reference": None}
    order = list(ways)
    if not triton_path.is_faster(u, taps, gated):
        order = ["native", "triton", "torch", "reference"]
    if u.device.type == "cpu":  # in the interpreter
        order = ["native", "torch", "triton", "reference"]
    if not native_path.is_faster(u, lags, taps):
        order.remove("native")
        order.append("native")
    return select("fft_conv", backend, **{name: ways[name] for name in order})


def fft_conv_reference(
    u: Tensor,
    k: Tensor,
    *,
    mode: str = "causal",
    reverse: Tensor | None = None,
    reverse_lag: int = 0,
    skip: Tensor | None = None,
    pre_gate: Tensor | None = None,
    post_gate: Tensor | None = None,
) -> Tensor:
    """The definition, every product by itself: test against this."""
    return fft_conv(
        u, k, mode=mode, reverse=reverse, reverse_lag=reverse_lag, skip=skip, pre_gate=pre_gate,
        post_gate=post_gate, backend="reference",
    )  # fmt: skip


def fft_conv_prefill(
    u: Tensor,
    k: Tensor,
    state: ConvState | None = None,
    *,
    skip: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ConvState]:
    """A causal :func:`fft_conv` that continues from a state, of pieces of any length.

    Args:
        u: The new inputs, ``(b, c, n)``.
        k: Taps, as there; the same along a sequence.
        state: What the previous call returned; None starts a sequence.
        skip: As there.

    Returns:
        The outputs ``(b, c, n)`` in the dtype of u, and the state after the last input.

    Raises:
        TypeError: A dtype is not floating.
        ValueError: A shape or device does not fit, or the state is of other inputs or taps.
    """
    first, state = state is None, _start(u, k, state)
    taps, n = k.shape[1], u.shape[2]
    if first:  # nothing to see before the first input
        y = fft_conv(u, k, skip=skip, backend=backend)
        x = F.pad(u, (max(taps - n, 0), 0))[..., max(n - taps, 0) :].to(state.inputs.dtype)
        return y, ConvState(x.clone(), torch.zeros_like(state.position))
    back = torch.arange(-taps, 0, device=u.device)
    past = state.inputs[..., (state.position + back) % taps]  # oldest first
    x = torch.cat([past, u.to(past.dtype)], -1)
    y = fft_conv(x, k, skip=skip, backend=backend)[..., taps:].to(u.dtype)
    return y, ConvState(x[..., n:].clone(), torch.zeros_like(state.position))


def fft_conv_step(
    u_t: Tensor, state: ConvState | None, k: Tensor, *, skip: Tensor | None = None
) -> tuple[Tensor, ConvState]:
    """The next output of a causal convolution, in O(taps).

    Args:
        u_t: The next input, ``(b, c, 1)``.
        state: What the previous call returned, or :func:`fft_conv_prefill`; None starts. Without
            gradients its ring is written to, so that a state serves once.
        k: Taps, as in :func:`fft_conv`.
        skip: As there.

    Returns:
        ``(b, c, 1)`` in the dtype of u_t, and the new state.

    Raises:
        ValueError: There is more than one input, or the state is of other inputs or taps.
    """
    if u_t.dim() != 3 or u_t.shape[2] != 1:
        raise ValueError(f"u_t must be (b, c, 1), got shape {tuple(u_t.shape)}")
    ring, position = _start(u_t, k, state)
    taps, x = k.shape[1], u_t.to(ring.dtype)
    if torch.is_grad_enabled() and any(y.requires_grad for y in (ring, x, k)):
        ring = ring.clone()
    ring.index_copy_(2, position.view(1), x)
    age = (position - torch.arange(taps, device=ring.device)) % taps  # of the place of the ring
    each = k.to(ring.dtype)[:, age].repeat_interleave(u_t.shape[1] // k.shape[0], 0)
    with in_full_precision(u_t.device.type):
        y = torch.einsum("bct,ct->bc", ring, each).unsqueeze(-1)
        if skip is not None:
            y = y + skip.to(y.dtype).unsqueeze(-1) * x
    return y.to(u_t.dtype), ConvState(ring, (position + 1) % taps)


def _start(u: Tensor, k: Tensor, state: ConvState | None) -> ConvState:
    """The state given, or that of a sequence's start."""
    _check_inputs(u, k, "causal", None, 0, None, False)
    shape = (*u.shape[:2], k.shape[1])
    if state is None:
        wide = torch.promote_types(u.dtype, torch.float32)
        zero = torch.zeros((), dtype=torch.int64, device=u.device)
        return ConvState(u.new_zeros(shape, dtype=wide), zero)
    if state.inputs.shape != shape:
        raise ValueError(
            f"state must be of (b, c, taps) = {shape}, its inputs are {tuple(state.inputs.shape)}"
        )
    return state


def _taps(
    k: Tensor, reverse: Tensor | None, reverse_lag: int, mode: str, n: int
) -> tuple[Tensor, Lags]:
    """The taps of all lags that meet an input, and which lags those are."""
    if mode == "circular":
        return k, Lags(0, n, n, circular=True)
    if mode == "full":
        return k, Lags(0, n, n + k.shape[1] - 1)
    k = k[:, : max(n, 1)]
    if reverse is None:
        return k, Lags(0, n, n)
    reverse = reverse[:, : max(n - reverse_lag, 0)]
    if not reverse.shape[1]:  # a sum of nothing has a gradient
        return k + reverse.sum(1, keepdim=True), Lags(0, n, n)
    before = reverse.shape[1] - 1 + reverse_lag
    taps = F.pad(reverse.flip(1), (0, k.shape[1] - 1 + reverse_lag)) + F.pad(k, (before, 0))
    return taps, Lags(-before, n, n)


def _by_definition(x: Tensor, taps: Tensor, lags: Lags) -> Tensor:
    """``y[i] = sum over t of taps[t] · x[i - first - t]``."""
    i = torch.arange(lags.out, device=x.device).unsqueeze(1)
    at = i - lags.first - torch.arange(taps.shape[1], device=x.device)  # (out, t)
    at = at % lags.n if lags.circular else at
    there = (at >= 0) & (at < lags.n)
    seen = torch.where(there, x[..., at.clamp(0, lags.n - 1)], 0)  # (b, c, out, t)
    each = taps.repeat_interleave(x.shape[1] // taps.shape[0], 0)
    return torch.einsum("bcit,ct->bci", seen, each)


def _check_inputs(
    u: Tensor,
    k: Tensor,
    mode: str,
    reverse: Tensor | None,
    reverse_lag: int,
    skip: Tensor | None,
    exact_causal: bool,
) -> None:
    _check.check_option("mode", mode, MODES)
    _check.check_shapes(u=(u, "b c n"), k=(k, "groups taps"))
    c = u.shape[1]
    if (reverse is None) == (mode == "bidirectional"):
        raise ValueError(
            f"mode='bidirectional' and reverse go together, got mode={mode!r} and reverse="
            + ("None" if reverse is None else "taps")
        )
    if reverse_lag not in (0, 1):
        raise ValueError(f"reverse_lag must be 0 or 1, got {reverse_lag!r}")
    if exact_causal and mode != "causal":
        raise ValueError(f"exact_causal needs mode='causal', got {mode!r}")
    for name, taps in (("u", u), ("k", k), ("reverse", reverse), ("skip", skip)):
        if taps is None:
            continue
        if not taps.dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating-point tensor, got {taps.dtype}")
        if taps.device != u.device:
            raise ValueError(f"{name} must be on {u.device} like u, it is on {taps.device}")
    groups, count = k.shape
    if not count or not groups or c % groups:
        raise ValueError(
            f"k must be (groups, taps), at least one tap, with groups that divide the {c} channels "
            f"of u, got {tuple(k.shape)}"
        )
    if reverse is not None and (reverse.dim() != 2 or reverse.shape[0] != groups):
        raise ValueError(f"reverse must be ({groups}, taps) like k, got {tuple(reverse.shape)}")
    if skip is not None and skip.shape != (c,):
        raise ValueError(f"skip must be (c,) = ({c},), got {tuple(skip.shape)}")
