"""Recipes of block-sparse patterns: a few numbers that become lists for samples of any length.

BigBird: Zaheer et al. 2020, section 2: global, window and random blocks, here as one set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn import _check
from fastattn.ops.block_sparse_lists import Lists, from_entries, from_mask
from fastattn.ops.block_sparse_plans import PLANS, draw_published, draw_uniform


@dataclass(frozen=True)
class Recipe:
    """A pattern for every length: the ``first`` and ``last`` blocks are global, a row sees ``left``
    blocks before its own and ``right`` behind it, and ``num_random`` others."""

    kind: str
    first: int
    last: int
    left: int
    right: int
    num_random: int = 0
    plan: str = "uniform"
    seed: int = 0
    layer: int = 0


def bigbird_recipe(
    num_window_blocks: int,
    num_random_blocks: int,
    num_global_blocks: int,
    plan: str,
    seed: int,
    layer: int,
) -> Recipe:
    """The recipe of ``BlockLayout.bigbird``.

    Raises:
        ValueError: A number or the plan does not fit.
    """
    check_window(num_window_blocks, causal=False)
    for name, value in (("random", num_random_blocks), ("global", num_global_blocks)):
        if value < 0:
            raise ValueError(f"num_{name}_blocks must not be negative, got {value}")
    _check.check_option("plan", plan, PLANS)
    for name, value in (("seed", seed), ("layer", layer)):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} must fit into 64 bits, got {value}")
    if plan != "uniform" and (num_window_blocks, num_global_blocks) != (3, 2):
        raise ValueError(
            f"plan={plan!r} has 3 window blocks and 2 global ones, got {num_window_blocks} and "
            f"{num_global_blocks}"
        )
    first, last, side = -(-num_global_blocks // 2), num_global_blocks // 2, num_window_blocks // 2
    return Recipe("bigbird", first, last, side, side, num_random_blocks, plan, seed, layer)


def check_window(num_window_blocks: int, causal: bool) -> None:
    if num_window_blocks < 1 or (num_window_blocks % 2 == 0 and not causal):
        what = "at least 1" if causal else "odd and at least 1"
        raise ValueError(f"num_window_blocks must be {what}, got {num_window_blocks}")


def room_for(count: int, n: int) -> int:
    """For ``count`` of n blocks. For a few it may be more than n has: a symbolic n is not asked."""
    return count if count <= 16 else min(count, n)


def evaluate(
    recipe: Recipe, n: int, num_heads: int, causal: bool, lengths: Tensor, columns: bool
) -> Lists:
    """The lists of a recipe for samples of so many blocks, ``(p,)`` int64, up to n."""
    row = torch.arange(n, device=lengths.device)
    length = lengths.clamp(max=n).view(-1, 1)  # (p, 1)
    first = length.clamp(max=recipe.first)
    last = torch.maximum(length - recipe.last, first)  # where the last blocks begin
    start = torch.maximum(row - recipe.left, first)  # the window, without global blocks
    end = torch.minimum(torch.minimum(row + recipe.right + 1, last), row + 1 if causal else last)
    end = torch.maximum(end, start)
    drawn = draw_uniform(
        *(x.expand(-1, n) for x in (first, torch.minimum(start, last), end, last)),
        num_random=recipe.num_random,
        num_heads=num_heads,
        seed=recipe.seed,
        layer=recipe.layer,
    )  # (p, h, n, r)
    drawn = torch.where(drawn < 0, n, drawn)

    def interval(low: Tensor, high: Tensor, most: int) -> Tensor:
        """(p, 1, n, most): low, low + 1, ... below high, and n where there are no more."""
        found = low.unsqueeze(-1) + torch.arange(most, device=low.device)
        return torch.where(found < high.unsqueeze(-1), found, n).unsqueeze(1)

    zero, width = torch.zeros_like(length), recipe.left + recipe.right + 1
    parts = [
        interval(zero.expand(-1, n), first.expand(-1, n), room_for(recipe.first, n)),
        interval(start, end, room_for(width, n)),
        interval(last.expand(-1, n), length.expand(-1, n), room_for(recipe.last, n)),
    ]
    shape = (*drawn.shape[:3], -1)
    seen = torch.cat([drawn, *(x.expand(shape) for x in parts)], -1)  # (p, h, n, entries)
    is_global = (row < first) | (row >= last)
    absent = (is_global | (row >= length))[:, None, :, None] | (seen >= n)
    if causal:
        absent = absent | (seen > row[:, None])
    # global rows see every block: a few rows of n entries, beside many of a few
    count = room_for(recipe.first + recipe.last, n)
    which = torch.arange(count, device=row.device)
    whole = torch.where(which < first, which, last + which - first)  # (p, count) rows
    every = row.expand(length.shape[0], num_heads, count, n)
    limit = torch.where(whole < length, torch.minimum(whole + 1, length) if causal else length, 0)
    beyond = every >= limit[:, None, :, None]
    whole = whole.clamp(max=n - 1)[:, None, :, None].expand(every.shape)
    rows = torch.cat([row[:, None].expand(seen.shape).flatten(2), whole.flatten(2)], -1)
    blocks = torch.cat([seen.flatten(2), every.flatten(2)], -1)
    absent = torch.cat([absent.expand(seen.shape).flatten(2), beyond.flatten(2)], -1)
    if columns:
        rows, blocks = blocks, rows
    return from_entries(rows, blocks, absent, n)


def both_ways(mask: Tensor, log_weight: Tensor | None) -> tuple[Lists, Lists]:
    """Lists of a mask by row and by column, fit for any later call."""
    turned = None if log_weight is None else log_weight.mT
    with torch.inference_mode(False):
        return from_mask(mask, log_weight), from_mask(mask.mT, turned)


def published(recipe: Recipe, seq_len: int, block_size: int, num_heads: int) -> tuple[Lists, Lists]:
    """The lists of a published plan: the set of global and window blocks, and what it draws."""
    n, r = seq_len // block_size, recipe.num_random
    times = torch.zeros(num_heads, n, n, dtype=torch.float64, device="cpu")
    if recipe.plan.startswith("hf") and n <= 5 + 2 * r:
        return both_ways(times == 0, None)
    index = torch.arange(n, device="cpu")
    edges = (index == 0) | (index == n - 1)
    near = (index[:, None] - index).abs() <= 1
    times += near | edges | edges[:, None]
    drawn = draw_published(recipe.plan, seq_len, block_size, r, num_heads, recipe.layer)
    if r and n > 2:
        blocks = torch.tensor(drawn, device="cpu")  # (h, n - 2, r)
        times[:, 1:-1].scatter_add_(2, blocks, torch.ones_like(blocks, dtype=times.dtype))
    return both_ways(times > 0, times.log() if bool((times > 1).any()) else None)
