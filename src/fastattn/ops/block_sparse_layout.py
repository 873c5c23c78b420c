"""Which blocks of keys each block of queries sees: a recipe, or an explicit list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastattn.ops.block_sparse_lists import Lists, to_mask
from fastattn.ops.block_sparse_recipes import (
    Recipe,
    bigbird_recipe,
    both_ways,
    check_window,
    evaluate,
    published,
)

T = TypeVar("T")
BLOCK_SIZES = (16, 32, 64, 128)


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
        lists = published(recipe, seq_len, block_size, num_heads)
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
        check_window(num_window_blocks, causal)
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
        lists = both_ways(heads, weights)
        shape = heads.shape[1], heads.shape[2]
        return cls(block_size, len(heads), shape, causal, _explicit=lists)

    @classmethod
    def _of(
        cls, recipe: Recipe, seq_len: int, block_size: int, num_heads: int, causal: bool
    ) -> BlockLayout:
        n = (seq_len + block_size - 1) // block_size
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
            return self._evaluate(lengths.to(torch.int64), columns)

        def make() -> Lists:
            if self._explicit is not None:
                return self._explicit[columns].to(device)
            whole = torch.full((1,), self.shape[0], dtype=torch.int64, device=device)
            return self._evaluate(whole, columns)

        return self.once(device, columns, make)

    def _evaluate(self, lengths: Tensor, columns: bool) -> Lists:
        assert self.recipe is not None
        return evaluate(self.recipe, self.shape[0], self.num_heads, self.causal, lengths, columns)

    @property
    def is_explicit(self) -> bool:
        """Whether it is a list, and not evaluated for each length."""
        return self._explicit is not None

    def once(self, device: torch.device, what: Any, make: Callable[[], T]) -> T:
        """What was made for a device before, or is now; kept if any later call can use it.

        A compiler's or a transform's tensors stand for others; one that is made while a CUDA graph
        is captured has no values until it is replayed; one of inference mode cannot be saved for a
        backward pass.
        """
        key = device, what
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
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # once: the next call may be on another stream
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


def check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be 16, 32, 64 or 128, got {block_size}")


def _check_sizes(seq_len: int, block_size: int, num_heads: int) -> None:
    check_block_size(block_size)
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
