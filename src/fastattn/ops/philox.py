"""Random bits for dropout: Philox-4x32-10 (Salmon et al. 2011), a function of position alone.

The word of weight (i, j) of a head is number j % 4 of the block with counter (j // 4, i, head,
sample), under the key of the seed: so forward, backward and any other path drop the same weights,
and no counter overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def philox(seed: Tensor, *counter: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 bits, as int64, of a counter of four that broadcast; ``seed`` is int64."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((b >> 32) & LOW) ^ c1 ^ k0, ((a >> 32) & LOW) ^ c3 ^ k1
        c1, c3 = b & LOW, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def kept(seed: Tensor, p: float, sample: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether weights stay, with probability 1 - p; positions broadcast, as int64."""
    words = torch.stack(philox(seed, j // 4, i, head, sample), -1)
    index = (j % 4).expand(words.shape[:-1]).unsqueeze(-1)
    return words.gather(-1, index).squeeze(-1) >= threshold(p)


def threshold(p: float) -> int:
    """A word below it drops its weight."""
    return round(p * 2**32)


def seed_of(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """One int64 on the device; None draws it from PyTorch's generator of that device.

    Raises:
        ValueError: It is a tensor of another shape, dtype or device.
    """
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if not isinstance(seed, Tensor):
        return torch.full((), seed, dtype=torch.int64, device=device)  # without a synchronisation
    if seed.dtype != torch.int64 or seed.dim() or seed.device != device:
        raise ValueError(
            f"seed must be an int, or one int64 on {device} like q, got {seed.dtype} of shape "
            f"{tuple(seed.shape)} on {seed.device}"
        )
    return seed
