"""Long convolutions as modules, ``(b, n, c)`` to the same.

Learned taps, squash and initial values: Fu et al. 2023, "Simple Hardware-Efficient Long
Convolutions for Sequence Modeling"; gates: Poli et al. 2023, "Hyena Hierarchy"; spatial gating: Liu
et al. 2021, "Pay Attention to MLPs".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import _check
from fastattn.ops.fft_conv import BACKENDS, ConvState, fft_conv, fft_conv_step


class LongConv(nn.Module):
    """A convolution of every channel with learned taps of its own, in O(n log n).

    Taps start as normal numbers that decay, the faster the higher the channel: 0.02 exp(-j / taps ·
    (c / 2)^(i / c)). An input reaches its own output by ``skip`` as well.

    Args:
        channels: c.
        taps: How far an output sees. Longer sequences are no error: it sees so far.
        bidirectional: Also see as far ahead, with taps of its own; else causal.
        gated: Linear layers make what is convolved and two gates, which multiply it before and
            after, and one more what comes out.
        squash: λ: taps are drawn to zero by it, and those below it are zero.
        dropout: On taps, in training.
        backend: As in :func:`fastattn.ops.fft_conv`.

    Raises:
        ValueError: A number is not positive, or not a probability.
    """

    reverse: Tensor | None

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        bidirectional: bool = False,
        gated: bool = False,
        squash: float = 0.0,
        dropout: float = 0.0,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _at_least_one(channels=channels, taps=taps)
        if squash < 0 or not 0 <= dropout < 1:
            raise ValueError(
                f"squash must be at least 0 and dropout in [0, 1), got {squash} and {dropout}"
            )
        if backend is not None:
            _check.check_option("backend", backend, BACKENDS["fft_conv"])
        made = {"device": device, "dtype": dtype}
        self.channels, self.squash, self.dropout, self.backend = channels, squash, dropout, backend
        # in float32 whatever the dtype, as an op's taps are
        self.taps = nn.Parameter(torch.empty(channels, taps, device=device))
        self.register_parameter(
            "reverse",
            nn.Parameter(torch.empty(channels, taps, device=device)) if bidirectional else None,
        )
        self.skip = nn.Parameter(torch.empty(channels, **made))
        self.in_proj = nn.Linear(channels, 3 * channels, **made) if gated else None
        self.out_proj = nn.Linear(channels, channels, **made) if gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw taps and ``skip`` anew."""
        c, taps = self.taps.shape
        i = torch.arange(c, device=self.taps.device).unsqueeze(1) / c
        rate = max(c / 2, 1.0) ** i
        decay = 0.02 * torch.exp(-torch.arange(taps, device=self.taps.device) / taps * rate)
        with torch.no_grad():
            for x in (self.taps, self.reverse):
                if x is not None:
                    x.normal_().mul_(decay)
            self.skip.normal_()

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mix along the sequence.

        Args:
            x: ``(b, n, c)``.
            key_padding_mask: ``(b, n)`` bool, True = ignore: what x holds there, NaN included,
                changes nothing elsewhere.

        Returns:
            ``(b, n, c)``.

        Raises:
            TypeError: The mask is not bool.
            ValueError: A shape or device does not fit.
        """
        x = _visible(x, key_padding_mask, self.channels)
        u, pre, post = self._gates(x)
        u = _visible(u, key_padding_mask, self.channels)  # a layer has a bias
        options: dict[str, Any] = {}
        if self.reverse is not None:
            options = {"mode": "bidirectional", "reverse": self._squashed(self.reverse)}
            options["reverse_lag"] = 1
        y = fft_conv(
            u.mT, self._squashed(self.taps), skip=self.skip, pre_gate=pre, post_gate=post,
            backend=self.backend, **options,
        ).mT  # fmt: skip
        return y if self.out_proj is None else self.out_proj(y)

    def step(self, x: Tensor, state: ConvState | None = None) -> tuple[Tensor, ConvState]:
        """The next token, in O(taps): ``(b, 1, c)`` to the same, and the state for the next call.

        In eval mode tokens one by one give what ``forward`` gives; a state serves once.

        Raises:
            ValueError: The module is bidirectional, or there is more than one token.
        """
        if self.reverse is not None:
            raise ValueError(
                "LongConv.step needs bidirectional=False: a token would see the future"
            )
        u, pre, post = self._gates(_visible(x, None, self.channels))
        u = u.mT if pre is None else u.mT * pre
        y, state = fft_conv_step(u, state, self._squashed(self.taps), skip=self.skip)
        y = (y if post is None else y * post).mT
        return (y if self.out_proj is None else self.out_proj(y)), state

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What is convolved ``(b, n, c)``, and the gates ``(b, c, n)``."""
        if self.in_proj is None:
            return x, None, None
        u, pre, post = self.in_proj(x).chunk(3, -1)
        return u, pre.mT, post.mT

    def _squashed(self, taps: Tensor) -> Tensor:
        if self.squash:
            taps = F.softshrink(taps, self.squash)
        return F.dropout(taps, self.dropout, self.training)

    def extra_repr(self) -> str:
        ways = "both ways" if self.reverse is not None else "causal"
        return f"{self.channels}, {self.taps.shape[1]} taps, {ways}, squash={self.squash}"


class ToeplitzMix(nn.Module):
    """gMLP's spatial gating: gate · (T·norm(x) + bias), T a Toeplitz matrix over the sequence.

    T has 2·seq_len - 1 learned taps, which start near zero, and the bias, one number a position,
    starts at one: so the module starts as the gate itself. O(n log n).

    Args:
        channels: c.
        seq_len: The longest sequence; of shorter ones the nearest taps and first positions serve.
        independent: Rows of taps, which divide c: channel i has row i // (c / independent). None
            means c.
        backend: As in :func:`fastattn.ops.fft_conv`.

    Raises:
        ValueError: A number is not positive, or does not divide.
    """

    def __init__(
        self,
        channels: int,
        seq_len: int,
        *,
        independent: int | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        independent = channels if independent is None else independent
        _at_least_one(channels=channels, seq_len=seq_len, independent=independent)
        if channels % independent:
            raise ValueError(f"independent = {independent} must divide channels = {channels}")
        if backend is not None:
            _check.check_option("backend", backend, BACKENDS["fft_conv"])
        self.channels, self.seq_len, self.backend = channels, seq_len, backend
        self.norm = nn.LayerNorm(channels, device=device, dtype=dtype)
        self.taps = nn.Parameter(torch.empty(independent, seq_len, device=device))
        self.reverse = nn.Parameter(torch.empty(independent, seq_len - 1, device=device))
        self.bias = nn.Parameter(torch.empty(seq_len, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Taps near zero, normal with a deviation of 0.01 / √(2·seq_len), and a bias of one."""
        for x in (self.taps, self.reverse):
            nn.init.normal_(x, std=0.01 / (2 * self.seq_len) ** 0.5)
        nn.init.ones_(self.bias)

    def forward(
        self, x: Tensor, gate: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Mix along the sequence.

        Args:
            x: ``(b, n, c)``.
            gate: ``(b, n, c)``; None means x.
            key_padding_mask: ``(b, n)`` bool, True = ignore: what x holds there, NaN included,
                changes nothing elsewhere.

        Returns:
            ``(b, n, c)``.

        Raises:
            TypeError: The mask is not bool.
            ValueError: A shape or device does not fit, or n is longer than ``seq_len``.
        """
        n = x.shape[1] if x.dim() == 3 else 0
        if n > self.seq_len:
            raise ValueError(f"x has n = {n} tokens, the module is made for {self.seq_len}")
        x = _visible(x, key_padding_mask, self.channels)
        gate = x if gate is None else _visible(gate, key_padding_mask, self.channels)
        mixed = _visible(self.norm(x), key_padding_mask, self.channels)
        y = fft_conv(
            mixed.mT, self.taps, mode="bidirectional", reverse=_some(self.reverse), reverse_lag=1,
            backend=self.backend,
        ).mT  # fmt: skip
        return gate * (y + self.bias[:n].unsqueeze(-1))

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.seq_len} tokens, {len(self.taps)} rows of taps"


def _some(taps: Tensor) -> Tensor:
    """At least one column, which reaches nothing where there was none."""
    return taps if taps.shape[1] else F.pad(taps, (0, 1))


def _visible(x: Tensor, key_padding_mask: Tensor | None, channels: int) -> Tensor:
    """x, of the right width, zero where it is to be ignored."""
    if x.dim() != 3 or x.shape[2] != channels:
        raise ValueError(f"x must be (b, n, {channels}), got shape {tuple(x.shape)}")
    if key_padding_mask is None:
        return x
    b, n = x.shape[:2]
    _check.check_key_padding_mask(key_padding_mask, b, n, x.device)
    return x.masked_fill(key_padding_mask.unsqueeze(-1), 0)


def _at_least_one(**numbers: int) -> None:
    for name, x in numbers.items():
        if x < 1:
            raise ValueError(f"{name} must be at least 1, got {x}")
