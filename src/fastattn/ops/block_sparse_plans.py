"""Which blocks a row of BigBird draws at random: plans, each a function of its arguments alone.

"uniform" is ours: from a counter, on any device, for any length. The others draw what published
checkpoints were trained with, number for number: google-research/bigbird and Hugging Face's port
take the seed of NumPy's legacy generator from the layer; here that generator is a private one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLANS = ("uniform", "google", "hf-train", "hf-eval")
# token counts for which the published codes use the plan of their paper, made for LONGEST tokens
PAPER_LENGTHS = {"google": (1024, 2048, 3072, 4096), "hf-train": (1024, 3072, 4096)}
LONGEST = 4096


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), in int64 that wraps."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def state_of(*counters: int) -> int:
    """The hash behind counters that are Python numbers, as an int64."""
    x, every = 0, 2**64 - 1
    for counter in counters:
        x = ((x ^ (counter & every)) + 0x9E3779B97F4A7C15) & every
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & every
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & every
        x = x ^ (x >> 31)
    return x - 2**64 if x >> 63 else x


def below(limit: Tensor, *counters: Tensor | int) -> Tensor:
    """Numbers from 0 to ``limit`` - 1, a function of the counters; zero where the limit is below 1.

    Counters and limit broadcast; limits up to 2^31.
    """
    x = torch.zeros_like(limit)
    for counter in counters:
        x = mix((x ^ counter) + -0x61C8864680B583EB)  # the golden ratio, as SplitMix64 steps
    high = (x >> 32) & 0xFFFFFFFF
    return (high * limit.clamp(min=0)) >> 32


def draw_uniform(
    low: Tensor,
    middle: Tensor,
    high: Tensor,
    end: Tensor,
    *,
    num_random: int,
    num_heads: int,
    seed: int,
    layer: int,
) -> Tensor:
    """Of every row ``num_random`` distinct blocks from [low, middle) and [high, end), or all.

    Without replacement, every set of them as likely as any other (Floyd's algorithm, Bentley and
    Floyd 1987), from counters: seed, layer, head, row and number of the draw.

    Args:
        low, middle, high, end: Blocks that a row may draw, ``(p, n)`` int64.

    Returns:
        ``(p, num_heads, n, num_random)`` int64, -1 where there was nothing left to draw.
    """
    heads = torch.arange(num_heads, device=low.device).view(-1, 1)
    row = torch.arange(low.shape[1], device=low.device)
    first = (middle - low).clamp(min=0).unsqueeze(1)  # (p, 1, n)
    count = first + (end - high).clamp(min=0).unsqueeze(1)
    chosen = low.new_full((low.shape[0], num_heads, low.shape[1], num_random), -1)
    for i in range(num_random):
        last = (count - num_random + i).expand(chosen.shape[:3])
        drawn = below(last + 1, seed, layer, heads, row, i)
        taken = (chosen == drawn.unsqueeze(-1)).any(-1)
        chosen[..., i] = torch.where(last < 0, -1, torch.where(taken, last, drawn))
    behind = chosen - first.unsqueeze(-1)
    from_low = low[:, None, :, None] + chosen
    blocks = torch.where(behind < 0, from_low, high[:, None, :, None] + behind)
    return torch.where(chosen < 0, -1, blocks)


def draw_published(
    plan: str, seq_len: int, block_size: int, num_random: int, num_heads: int, layer: int
) -> list[list[list[int]]]:
    """The random blocks of rows 1 to n - 2 of every head, repetitions included.

    Raises:
        ValueError: The published code has no plan for this length.
    """
    numpy = _numpy(plan)
    n = seq_len // block_size
    if plan == "hf-eval":
        return [[[0] * num_random for _ in range(1, n - 1)] for _ in range(num_heads)]
    stream = numpy.random.RandomState(layer)
    if seq_len in PAPER_LENGTHS[plan]:
        each = LONGEST // block_size
        heads = [
            [_paper_row(stream, i, each, block_size, num_random) for i in range(1, each - 1)]
            for _ in range(num_heads)
        ]
        if any(len(row) < num_random for rows in heads for row in rows[: n - 2]):
            raise _too_few(plan, num_random, n)
        return [rows[: n - 2] for rows in heads]
    return _segment_rows(stream, plan, n, num_random, num_heads)


def _too_few(plan: str, num_random: int, n: int) -> ValueError:
    return ValueError(
        f"plan={plan!r} cannot draw {num_random} random blocks of {n}: the code that it follows "
        "fails there, too. Take plan='uniform'"
    )


def _numpy(plan: str) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ValueError(f"plan={plan!r} needs numpy, whose generator it draws from") from error
    return numpy


def _paper_row(stream: Any, i: int, n: int, block_size: int, num_random: int) -> list[int]:
    """Row i of the plan in the paper: only the first 1024 tokens are ever drawn."""
    last = 1024 // block_size - 1
    before, behind = range(1, i - 1), range(i + 2, last + 1)
    if i <= 2:
        before = range(0)
    elif i in (n - 3, n - 2) or i - 2 > last:
        before, behind = range(1, last + 1), range(0)
    elif i + 1 == last:
        behind = range(0)
    drawn: list[int] = stream.permutation([*before, *behind])[:num_random].tolist()
    return drawn


def _segment_rows(
    stream: Any, plan: str, n: int, num_random: int, num_heads: int
) -> list[list[list[int]]]:
    """All other lengths: two segments of blocks, from each of which a part is drawn."""
    first = num_random + 5
    if n > num_random + first:
        segments = [(0, num_random + first, num_random)]
    elif n > first:
        segments = [(0, first, num_random // 2), (first, n, num_random - num_random // 2)]
    else:
        segments = [(0, n, num_random)]
    heads: list[list[list[int]]] = [[[] for _ in range(n)] for _ in range(num_heads)]

    def draw(segment: tuple[int, int, int], rows: range) -> None:
        start, end, count = segment
        for i in rows if count else ():
            window = {0, i - 1, i, i + 1, end - 1}
            window |= {end - 2} if i == 1 else set()
            window |= {1} if i == end - 2 else set()
            for head in heads:
                drawn = stream.permutation(range(start, end)).tolist()
                legal = [j for j in drawn if j not in window][:count]
                if len(legal) < count:
                    raise _too_few(plan, num_random, n)
                head[i] += legal

    whole = segments[0]
    if len(segments) == 1:
        draw(whole, range(1, whole[1]))
        draw(whole, range(whole[1], n))
    else:
        draw(whole, range(1, first))
        draw(segments[1], range(1, first))
        draw(whole, range(first, n))
        draw(segments[1], range(first, n))
    return [rows[1 : n - 1] for rows in heads]
