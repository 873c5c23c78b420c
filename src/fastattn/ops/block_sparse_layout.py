"""Which blocks of keys each block of queries sees: a recipe, or an explicit list.

BigBird: Zaheer et al. 2020, section 2: global, window and random blocks, here as one set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastattn import _check
from fastattn.ops.block_sparse_lists import (
    Lists,
    from_entries,
    from_mask,
    to_mask,
)
from fastattn.ops.block_sparse_plans import PLANS, draw_published, draw_uniform

T = TypeVar("T")
BLOCK_SIZES = (16, 32, 64, 128)


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


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """The pattern of a block-sparse attention: immutable, of O(non-zero blocks) memory.

    Made by :meth:`bigbird`, :meth:`sliding_window` or :meth:`from_dense`. The first two are
    recipes, which an attention evaluates for the length of each sample, on its inputs' device.

    Attributes:
        block_size: Tokens in a block, of queries and of keys.
        num_heads: Heads with a pattern of their own; 1 if all share it.
        shape: Blocks of queries and of keys.
        causal: Whether a token sees no later one, in a block that it sees, either.
    """

    block_size: int
    num_heads: int
    shape: tuple[int, int]
    causal: bool
    seq_len: int | None = None  # of a recipe
    recipe: Recipe | None = None
    _explicit: tuple[Lists, Lists] | None = None  # by row and by column, unless of a recipe
    _found: dict[Any, Any] = field(default_factory=dict, init=False)  # lists, by what they are of

    @classmethod
    def bigbird(
        cls,
        seq_len: int,
        *,
        block_size: int = 64,
        num_heads: int = 1,
        num_window_blocks: int = 3,
        num_random_blocks: int = 3,
        num_global_blocks: int = 2,
        plan: str = "uniform",
        seed: int = 0,
        layer: int = 0,
    ) -> BlockLayout:
        """Global, window and random blocks (Zaheer et al. 2020).

        Every row sees the global blocks, the window around its own and ``num_random_blocks``
        distinct others, fewer where there are no more; global rows see all. Legal for every length.

        Args:
            seq_len: Tokens.
            num_heads: Heads; each draws random blocks of its own.
            num_window_blocks: Odd: a row's own block and as many on either side.
            num_global_blocks: g: the first ceil(g/2) and the last floor(g/2) blocks.
            plan: "uniform": from a counter, all others with the same probability. "google",
                "hf-train", "hf-eval": what google-research/bigbird and Hugging Face's port draw,
                block by block, those drawn twice with twice the weight; with the window and global
                blocks of those codes, 3 and 2. "hf-eval" has no random blocks, but block 0 1 +
                ``num_random_blocks`` times; where Hugging Face falls back to dense attention, at
                up to 5 + 2·num_random_blocks blocks, so do its plans.
            seed: Of plan "uniform".
            layer: Layers draw differently; the published plans have no other seed.

        Raises:
            ValueError: A number or the plan does not fit, or a published plan cannot draw so many
                blocks of so few.
        """
        _check_sizes(seq_len, block_size, num_heads)
        numbers = (num_window_blocks, num_random_blocks, num_global_blocks)
        recipe = bigbird_recipe(*numbers, plan, seed, layer)
        if plan != "uniform" and seq_len % block_size:
            raise ValueError(
                f"plan={plan!r} is made for whole blocks: pad seq_len = {seq_len} to a multiple of "
                f"block_size = {block_size} and mask what is added, as those codes do"
            )
        if plan == "uniform":
            own = num_heads if num_random_blocks else 1
            return cls._of(recipe, seq_len, block_size, own, causal=False)
        lists = _published(recipe, seq_len, block_size, num_heads)
        layout = cls._of(recipe, seq_len, block_size, num_heads, causal=False)
        return replace(layout, _explicit=lists)

    @classmethod
    def sliding_window(
        cls,
        seq_len: int,
        *,
        block_size: int = 64,
        num_window_blocks: int = 3,
        num_global_blocks: int = 1,
        causal: bool = False,
    ) -> BlockLayout:
        """A window, and global blocks in front (Beltagy et al. 2020).

        Args:
            seq_len: Tokens.
            num_window_blocks: Odd: a row's own block and as many on either side; if causal any
                number, its own block and those before it.
            num_global_blocks: The first blocks, which see all and are seen by all.
            causal: A token sees no later one.

        Raises:
            ValueError: A number does not fit.
        """
        _check_sizes(seq_len, block_size, 1)
        _check_window(num_window_blocks, causal)
        if num_global_blocks < 0:
            raise ValueError(f"num_global_blocks must not be negative, got {num_global_blocks}")
        left = num_window_blocks - 1 if causal else num_window_blocks // 2
        recipe = Recipe("sliding_window", num_global_blocks, 0, left, 0 if causal else left)
        return cls._of(recipe, seq_len, block_size, 1, causal)

    @classmethod
    def from_dense(
        cls,
        mask: Tensor,
        block_size: int,
        *,
        log_weight: Tensor | None = None,
        causal: bool = False,
    ) -> BlockLayout:
        """Any pattern, read once, from where its lists stay.

        Args:
            mask: ``(blocks, blocks)`` or ``(h, blocks, blocks)`` bool, of queries and of keys, True
                = attend.
            log_weight: Of the mask's shape: what is added to the logits of each block. It is read,
                and has no gradient.
            causal: A token sees no later one; blocks behind the diagonal must not be in the mask.

        Raises:
            TypeError: The mask is not bool.
            ValueError: A shape, the block size or a weight does not fit.
        """
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, True = attend, got {mask.dtype}")
        if mask.dim() not in (2, 3):
            raise ValueError(f"mask must be (blocks, blocks) or (h, blocks, blocks), got shape "
                             f"{tuple(mask.shape)}")  # fmt: skip
        _check_sizes(block_size, block_size, mask.shape[0] if mask.dim() == 3 else 1)
        if log_weight is not None:
            if log_weight.shape != mask.shape or log_weight.device != mask.device:
                raise ValueError(
                    f"log_weight must be {tuple(mask.shape)} on {mask.device} like mask, it is "
                    f"{tuple(log_weight.shape)} on {log_weight.device}"
                )
            if not bool(log_weight[mask].isfinite().all()):
                raise ValueError("log_weight must be finite where the mask is True")
        if causal and bool(mask.triu(1).any()):
            raise ValueError("causal=True, but mask has blocks behind the diagonal: clear them")
        heads = mask if mask.dim() == 3 else mask.unsqueeze(0)
        weights = None if log_weight is None else log_weight.detach().view(heads.shape)
        lists = _both(heads, weights)
        shape = heads.shape[1], heads.shape[2]
        return cls(block_size, len(heads), shape, causal, _explicit=lists)

    @classmethod
    def _of(
        cls, recipe: Recipe, seq_len: int, block_size: int, num_heads: int, causal: bool
    ) -> BlockLayout:
        n = -(-seq_len // block_size)
        return cls(block_size, num_heads, (n, n), causal, seq_len, recipe)

    # What it is

    def lists(
        self, device: torch.device, lengths: Tensor | None = None, *, columns: bool = False
    ) -> Lists:
        """Per row the blocks that it sees, or per column the rows that see it.

        Made once a device; for ``lengths`` ``(b,)``, in blocks, made anew, without a
        synchronisation, each sample as if it were alone.
        """
        if lengths is not None and self._explicit is None:
            return _evaluate(self, lengths.to(torch.int64), columns)

        def make() -> Lists:
            if self._explicit is not None:
                return self._explicit[columns].to(device)
            whole = torch.full((1,), self.shape[0], dtype=torch.int64, device=device)
            return _evaluate(self, whole, columns)

        return self.once((device, columns), make)

    @property
    def is_explicit(self) -> bool:
        """Whether it is a list, and not evaluated for each length."""
        return self._explicit is not None

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What was made for this key before, or is now; kept if it is what any later call can use.

        A compiler's or a transform's tensors stand for others; one that is made while a CUDA graph
        is captured has no values until it is replayed; one of inference mode cannot be saved for a
        backward pass.
        """
        if key in self._found:
            return self._found[key]
        with torch.inference_mode(False):
            found = make()
        passing = (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch._C._len_torch_dispatch_stack()
            or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        )
        if not passing:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # once: the next call may be on another stream
            self._found[key] = found
        return found

    def to_dense(self) -> Tensor:
        """``(num_heads, blocks, blocks)`` bool, True = attend."""
        return to_mask(self._rows(), self.shape[1])[0] > -torch.inf

    def to_log_weight(self) -> Tensor:
        """``(num_heads, blocks, blocks)``: what is added to the logits; -inf where none attends."""
        return to_mask(self._rows(), self.shape[1])[0]

    def _rows(self) -> Lists:
        device = torch.device("cpu") if self._explicit is None else self._explicit[0].starts.device
        return self.lists(device)

    @property
    def nnz(self) -> int:
        """How many blocks are seen, over all heads that have a pattern of their own."""
        return int(self._rows().starts[..., -1].sum())

    @property
    def density(self) -> float:
        """The share of blocks that are seen."""
        every = self.num_heads * self.shape[0] * self.shape[1]
        return self.nnz / every if every else 0.0

    def plot(self, head: int = 0) -> Any:
        """A picture of one head's pattern, as a matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
        axes.imshow(self.to_dense()[head].cpu().numpy(), cmap="Blues", vmin=0, vmax=1.3)
        axes.set(xlabel="block of keys", ylabel="block of queries", title=repr(self))
        axes.title.set_fontsize(7)
        return figure

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if self._outline() != other._outline():
            return False
        if self.recipe is not None:
            return True
        return torch.equal(self.to_log_weight().cpu(), other.to_log_weight().cpu())

    def __hash__(self) -> int:
        return hash(self._outline())

    def _outline(self) -> tuple[Any, ...]:
        return self.block_size, self.num_heads, self.shape, self.causal, self.seq_len, self.recipe

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": {}}

    def __repr__(self) -> str:
        about = [f"block_size={self.block_size}"]
        if self.recipe is None or self.recipe.kind == "bigbird":
            about.append(f"num_heads={self.num_heads}")
        if self.causal:
            about.append("causal=True")
        if self.recipe is None:
            return f"BlockLayout.from_dense(blocks={self.shape}, {', '.join(about)})"
        r = self.recipe
        numbers = [f"num_window_blocks={r.left + r.right + 1}"]
        if r.kind == "bigbird":
            numbers.append(f"num_random_blocks={r.num_random}")
        numbers.append(f"num_global_blocks={r.first + r.last}")
        if r.kind == "bigbird":
            numbers.append(f"plan={r.plan!r}, seed={r.seed}, layer={r.layer}")
        return f"BlockLayout.{r.kind}({self.seq_len}, {', '.join(about + numbers)})"


def bigbird_recipe(
    num_window_blocks: int,
    num_random_blocks: int,
    num_global_blocks: int,
    plan: str,
    seed: int,
    layer: int,
) -> Recipe:
    """The recipe of :meth:`BlockLayout.bigbird`.

    Raises:
        ValueError: A number or the plan does not fit.
    """
    _check_window(num_window_blocks, causal=False)
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


def check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be 16, 32, 64 or 128, got {block_size}")


def _check_sizes(seq_len: int, block_size: int, num_heads: int) -> None:
    check_block_size(block_size)
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")


def _check_window(num_window_blocks: int, causal: bool) -> None:
    if num_window_blocks < 1 or (num_window_blocks % 2 == 0 and not causal):
        what = "at least 1" if causal else "odd and at least 1"
        raise ValueError(f"num_window_blocks must be {what}, got {num_window_blocks}")


def _evaluate(layout: BlockLayout, lengths: Tensor, columns: bool) -> Lists:
    """The lists of a recipe for samples of so many blocks, ``(p,)`` int64, up to the layout's."""
    recipe, n, causal = layout.recipe, layout.shape[0], layout.causal
    assert recipe is not None
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
        num_heads=layout.num_heads,
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
        interval(zero.expand(-1, n), first.expand(-1, n), min(recipe.first, n)),
        interval(start, end, min(width, n)),
        interval(last.expand(-1, n), length.expand(-1, n), min(recipe.last, n)),
    ]
    shape = (*drawn.shape[:3], -1)
    seen = torch.cat([drawn, *(x.expand(shape) for x in parts)], -1)  # (p, h, n, entries)
    is_global = (row < first) | (row >= last)
    absent = (is_global | (row >= length))[:, None, :, None] | (seen >= n)
    if causal:
        absent = absent | (seen > row[:, None])
    # global rows see every block: a few rows of n entries, beside many of a few
    count = min(recipe.first + recipe.last, n)
    which = torch.arange(count, device=row.device)
    whole = torch.where(which < first, which, last + which - first)  # (p, count) rows
    every = row.expand(len(length), layout.num_heads, count, n)
    limit = torch.where(whole < length, torch.minimum(whole + 1, length) if causal else length, 0)
    beyond = every >= limit[:, None, :, None]
    whole = whole.clamp(max=n - 1)[:, None, :, None].expand(every.shape)
    rows = torch.cat([row[:, None].expand(seen.shape).flatten(2), whole.flatten(2)], -1)
    blocks = torch.cat([seen.flatten(2), every.flatten(2)], -1)
    absent = torch.cat([absent.expand(seen.shape).flatten(2), beyond.flatten(2)], -1)
    if columns:
        rows, blocks = blocks, rows
    return from_entries(rows, blocks, absent, n)


def _both(mask: Tensor, log_weight: Tensor | None) -> tuple[Lists, Lists]:
    """By row and by column, fit for any later call."""
    turned = None if log_weight is None else log_weight.mT
    with torch.inference_mode(False):
        return from_mask(mask, log_weight), from_mask(mask.mT, turned)


def _published(
    recipe: Recipe, seq_len: int, block_size: int, num_heads: int
) -> tuple[Lists, Lists]:
    """The lists of a published plan: the set of global and window blocks, and what it draws."""
    n, r = seq_len // block_size, recipe.num_random
    times = torch.zeros(num_heads, n, n, dtype=torch.float64, device="cpu")
    if recipe.plan.startswith("hf") and n <= 5 + 2 * r:
        return _both(times == 0, None)
    index = torch.arange(n, device="cpu")
    edges = (index == 0) | (index == n - 1)
    near = (index[:, None] - index).abs() <= 1
    times += near | edges | edges[:, None]
    drawn = draw_published(recipe.plan, seq_len, block_size, r, num_heads, recipe.layer)
    if r and n > 2:
        blocks = torch.tensor(drawn, device="cpu")  # (h, n - 2, r)
        times[:, 1:-1].scatter_add_(2, blocks, torch.ones_like(blocks, dtype=times.dtype))
    return _both(times > 0, times.log() if bool((times > 1).any()) else None)
