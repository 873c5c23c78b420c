"""Cases and the comparison that the tests, the benchmarks and users' own tests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCase:
    """Sizes of one attention call, and why they are worth a test."""

    name: str
    why: str
    b: int
    h: int
    h_kv: int
    n: int
    s: int
    d: int
    e: int

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> list[Tensor]:
        """q ``(b, h, n, d)``, k ``(b, h_kv, s, d)`` and v ``(b, h_kv, s, e)``, normal."""
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (self.b, self.h, self.n, self.d),
            (self.b, self.h_kv, self.s, self.d),
            (self.b, self.h_kv, self.s, self.e),
        )
        return [torch.randn(x, generator=generator).to(device, dtype) for x in shapes]


def _square(name: str, why: str, n: int, d: int = 16, e: int = 16) -> AttentionCase:
    return AttentionCase(name, why, 2, 2, 2, n, n, d, e)


LINEAR_ATTENTION = (
    _square("one-token", "no past, a state never read", 1),
    _square("two-tokens", "the smallest that can leak the future", 2),
    _square("n63", "one short of a chunk", 63),
    _square("n64", "one chunk exactly", 64),
    _square("n65", "the state crosses a chunk, the last chunk has one token", 65),
    _square("n1000", "many chunks and a ragged end", 1000, 8, 8),
    AttentionCase("grouped", "four query heads share one key head", 2, 8, 2, 70, 70, 16, 16),
    AttentionCase("one-kv-head", "every query head shares it", 1, 3, 1, 65, 65, 16, 24),
    _square("wide-value", "e larger than d", 65, 8, 40),
    _square("narrow", "the smallest widths", 65, 1, 1),
    _square("odd-width", "no power of two", 66, 60, 20),
    _square("widest", "the largest widths", 17, 256, 256),
)
CROSS_ATTENTION = (
    AttentionCase("longer-keys", "s > n", 2, 4, 2, 5, 70, 16, 24),
    AttentionCase("shorter-keys", "s < n", 2, 4, 4, 70, 5, 16, 8),
    AttentionCase("one-key", "every output is that value", 1, 2, 2, 9, 1, 8, 8),
)


def padding_masks(b: int, s: int) -> dict[str, Tensor | None]:
    """Where padding may stand; "all" hides every key of the first sample."""
    position = torch.arange(s).expand(b, s)
    sample = torch.arange(b).unsqueeze(1)
    fewer = (s // 3 + sample).clamp(max=s - 1)
    return {
        "none": None,
        "right": position >= s - fewer,
        "left": position < fewer,
        "interior": (position > 0) & (position <= fewer),
        "all": (position >= s - fewer) | (sample == 0),
    }


def value_and_grads(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], seed: int = 1
) -> list[Tensor]:
    """The output, and the gradients of all inputs for one fixed random upstream gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_as_accurate_as(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    """Allow ``function`` three times the error that ``reference`` itself makes in the same dtype.

    Value and gradients; both are measured against ``reference`` in float64, so no tolerance is
    chosen by hand (and float64 inputs make no sense). Added to it is the rounding of a blocked
    sum over tokens or a width, eps·log2 of its length, of the largest element. A gradient that is
    exactly zero is a difference of larger sums: element and error are then the largest among all.
    Where the reference overflows its dtype, the rounding alone is allowed.
    """
    exact = value_and_grads(reference, [x.double() for x in inputs])
    plain = value_and_grads(reference, inputs)
    tried = value_and_grads(function, inputs)
    labels = ["out", *(f"grad {i}" for i in range(len(inputs)))]
    length = max(2, *(size for x in inputs for size in x.shape[-2:]))
    largest = max(x.abs().amax().item() for x in exact if x.numel())
    its_errors = [
        torch.where(own.isfinite(), own - want, 0).abs().amax().item() if want.numel() else 0.0
        for own, want in zip(plain, exact, strict=True)
    ]
    rows = zip(labels, exact, plain, its_errors, tried, strict=True)
    for label, want, same_dtype, its_error, got in rows:
        assert got.shape == want.shape, f"{label}: shape {got.shape}, not {want.shape}"
        assert got.dtype == same_dtype.dtype, f"{label}: {got.dtype}, not {same_dtype.dtype}"
        if not want.numel():
            continue
        scale = want.abs().amax().item()
        if scale <= 1e-9 * largest:
            scale, its_error = largest, max(its_errors)
        rounding = torch.finfo(got.dtype).eps * (1 + math.log2(length)) * scale
        allowed = 3 * its_error + rounding
        error = (got - want).abs().amax().item()
        assert error <= allowed, f"{label}: error {error:.2e}, allowed {allowed:.2e}"
