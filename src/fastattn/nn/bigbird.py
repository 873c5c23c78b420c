"""BigBird as a drop-in for ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import _check
from fastattn.nn.multihead import MultiHead
from fastattn.ops.block_sparse import BACKENDS, block_sparse_attention
from fastattn.ops.block_sparse_layout import BlockLayout, check_block_size
from fastattn.ops.block_sparse_recipes import bigbird_recipe


class BigBirdAttention(MultiHead):
    """Multi-head attention to global, window and random blocks in O(n) (Zaheer et al. 2020).

    Takes the place of ``nn.MultiheadAttention`` in self-attention: same arguments, same parameters,
    same initial values from the same seed, and a stock state dict loads strictly. In eval it
    computes what it does in training, less the dropout, which acts on the weights. Up to
    num_global_blocks + num_random_blocks + (num_window_blocks + 1) / 2 blocks of tokens it is exact
    softmax attention.

    The length of a sample is where its last token that is no padding ends: the pattern is that of
    the sample alone, whatever stands beside it in the batch. Padding before it is only masked.

    Args:
        embed_dim ... dtype: As in ``nn.MultiheadAttention``, in the same order; ``add_bias_kv`` and
            ``add_zero_attn`` are refused, since a pattern has no place for such keys.
        block_size: Tokens in a block: 16, 32, 64 or 128.
        num_window_blocks, num_random_blocks, num_global_blocks, plan, seed: As in
            ``BlockLayout.bigbird``. The published plans are for their checkpoints: the pattern is
            that of the padded batch, and outputs at padding are ``out_proj`` of zeros. They break
            the graph of ``torch.compile``, and are refused with ``fullgraph=True``.
        num_global_tokens: Learned tokens that all see and that see all (the paper's ETC), in front
            of the sequence, padded to whole blocks; they are in no output.
        layer: Layers draw differently; ``fastattn.convert`` and :func:`fastattn.nn.number_layers`
            count on from it.
        backend: Passed to the op; None picks the fastest that can run.
    """

    _drops_weights = True
    _own_state = ("global_tokens",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        block_size: int = 64,
        num_window_blocks: int = 3,
        num_random_blocks: int = 3,
        num_global_blocks: int = 2,
        num_global_tokens: int = 0,
        plan: str = "uniform",
        seed: int = 0,
        layer: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self._configure(
            block_size=block_size,
            num_window_blocks=num_window_blocks,
            num_random_blocks=num_random_blocks,
            num_global_blocks=num_global_blocks,
            num_global_tokens=num_global_tokens,
            plan=plan,
            seed=seed,
            layer=layer,
            backend=backend,
        )

    def _configure(
        self,
        *,
        block_size: int = 64,
        num_window_blocks: int = 3,
        num_random_blocks: int = 3,
        num_global_blocks: int = 2,
        num_global_tokens: int = 0,
        plan: str = "uniform",
        seed: int = 0,
        layer: int = 0,
        backend: str | None = None,
    ) -> None:
        if backend is not None:
            _check.check_option("backend", backend, BACKENDS)
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "BigBirdAttention has no place for the keys of add_bias_kv and add_zero_attn: its "
                "pattern is one of blocks of the sequence. num_global_tokens adds learned tokens"
            )
        if num_global_tokens < 0:
            raise ValueError(f"num_global_tokens must not be negative, got {num_global_tokens}")
        if num_global_tokens and (plan != "uniform" or {self.kdim, self.vdim} != {self.embed_dim}):
            raise ValueError(
                "num_global_tokens needs plan='uniform', and keys and values as wide as queries"
            )
        check_block_size(block_size)
        bigbird_recipe(num_window_blocks, num_random_blocks, num_global_blocks, plan, seed, layer)
        self.causal = False
        self.block_size = block_size
        self.num_window_blocks = num_window_blocks
        self.num_random_blocks = num_random_blocks
        self.num_global_blocks = num_global_blocks
        self.num_global_tokens = num_global_tokens
        self.plan = plan
        self.seed = seed
        self.layer = layer
        self.backend = backend
        self._reset_own()

    def _unconfigure(self) -> None:
        super()._unconfigure()
        del self.causal  # which is no option
        self._parameters.pop("global_tokens", None)

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        if "num_global_tokens" in vars(self):  # not while stock's constructor runs
            self._reset_own()

    def _reset_own(self, names: Sequence[str] | None = None) -> None:
        if not self.num_global_tokens:
            return
        weight, shape = self.out_proj.weight, (self.num_global_tokens, self.embed_dim)
        present = getattr(self, "global_tokens", None)
        if present is None or present.shape != shape or present.device != weight.device:
            present = nn.Parameter(torch.empty(shape, device=weight.device, dtype=weight.dtype))
            self.global_tokens = present
        nn.init.normal_(present, std=0.02)

    def load_hf_bigbird(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of a Hugging Face ``BigBirdAttention``, whatever its names begin with.

        ``self.query``, ``self.key`` and ``self.value`` become ``in_proj``, ``output.dense`` becomes
        ``out_proj``; its LayerNorm and the sum with its input stay outside. With plan "hf-train" or
        "hf-eval", and its index as ``layer``, the module computes what that layer does.

        Raises:
            ValueError: A weight is not there, or there twice, or of another shape.
        """
        sizes = {"weight": (self.embed_dim, self.embed_dim), "bias": (self.embed_dim,)}
        found: dict[str, list[Tensor]] = {}
        for kind, shape in sizes.items():
            names = [f"self.{part}.{kind}" for part in ("query", "key", "value")]
            for name in (*names, f"output.dense.{kind}"):
                matches = [x for x in state_dict if x == name or x.endswith(f".{name}")]
                if not matches and kind == "bias" and "output" not in name:
                    found.setdefault(kind, []).append(torch.zeros(shape))  # use_bias=False
                    continue
                if len(matches) != 1:
                    there = ", ".join(matches) or "not there"
                    raise ValueError(f"state_dict must have one {name}, it is {there}")
                tensor = state_dict[matches[0]]
                if tuple(tensor.shape) != shape:
                    raise ValueError(
                        f"{matches[0]} must have shape {shape}, got {tuple(tensor.shape)}"
                    )
                found.setdefault(kind, []).append(tensor)
        if self.in_proj_weight is None or self.in_proj_bias is None:
            raise ValueError("load_hf_bigbird needs a module with biases and without kdim and vdim")
        with torch.no_grad():
            self.in_proj_weight.copy_(torch.cat(found["weight"][:3]))
            self.in_proj_bias.copy_(torch.cat(found["bias"][:3]))
            self.out_proj.weight.copy_(found["weight"][3])
            self.out_proj.bias.copy_(found["bias"][3])

    # The attention

    @property
    def _front(self) -> int:
        """Places that the global tokens take, in whole blocks."""
        return -(-self.num_global_tokens // self.block_size) * self.block_size

    def _layout(self, n: int) -> BlockLayout:
        """For n tokens, those of the global tokens included."""
        layer = self.layer + self._layer
        numbers = (self.num_window_blocks, self.num_random_blocks, self.num_global_blocks)
        about = (self.block_size, self.num_heads, *numbers, self.plan, self.seed, layer)
        return layout_of(n, self._front // self.block_size, *about)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.num_global_tokens:
            return super()._project(query, key, value)
        tokens = F.pad(self.global_tokens, (0, 0, 0, self._front - self.num_global_tokens))

        def with_tokens(x: Tensor) -> Tensor:
            return torch.cat([tokens.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)

        q = with_tokens(query)
        k = q if key is query else with_tokens(key)
        v = k if value is key else q if value is query else with_tokens(value)
        return super()._project(q, k, v)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding_mask: Tensor | None
    ) -> Tensor:
        if causal:
            raise NotImplementedError(
                "BigBirdAttention has no causal form: its global blocks see what comes later. "
                "ops.block_sparse_attention takes causal layouts, as BlockLayout.sliding_window"
            )
        out = self._run(q, k, v, key_padding_mask, self.dropout if self.training else 0.0)
        return out[:, :, self._front :]

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, dropout_p: float
    ) -> Tensor:
        n, s = q.shape[2], k.shape[2]
        if n != s:
            raise ValueError(
                f"BigBirdAttention needs as many keys as queries, got n = {n} and s = {s}: its "
                "pattern is one of self-attention. ops.block_sparse_attention takes explicit "
                "layouts for both"
            )
        if n == 0:
            return v + (q.sum() + k.sum())  # nothing, but of all three
        if ignored is not None:
            _check.check_key_padding_mask(ignored, q.shape[0], n - self._front, q.device)
        if self.plan != "uniform":
            return self._run_published(q, k, v, ignored, dropout_p)
        lengths = None
        if ignored is not None and n > self._front:
            lengths = lengths_of(ignored) + self._front
        if self._front:
            places = torch.arange(self._front, device=q.device) >= self.num_global_tokens
            places = places.expand(q.shape[0], -1)
            behind = places.new_zeros(q.shape[0], n - self._front) if ignored is None else ignored
            ignored = torch.cat([places, behind], 1)
        return block_sparse_attention(
            q,
            k,
            v,
            self._layout(n),
            key_padding_mask=ignored,
            lengths=lengths,
            dropout_p=dropout_p,
            backend=self.backend,
        )

    def _run_published(
        self, q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, dropout_p: float
    ) -> Tensor:
        """As the published codes: padded to whole blocks, a pattern for the batch."""
        n = q.shape[2]
        more = -n % self.block_size
        if more:
            q, k, v = (F.pad(x, (0, 0, 0, more)) for x in (q, k, v))
            ignored = q.new_zeros(q.shape[0], n, dtype=torch.bool) if ignored is None else ignored
            ignored = F.pad(ignored, (0, more), value=True)
        out = block_sparse_attention(
            q,
            k,
            v,
            self._layout(n + more),
            key_padding_mask=ignored,
            dropout_p=dropout_p,
            backend=self.backend,
        )
        if ignored is not None:
            out = out.masked_fill(ignored[:, None, :, None], 0)
        return out[:, :, :n]

    def _weights(self, q: Tensor, k: Tensor, causal: bool, ignored: Tensor | None) -> Tensor:
        """``(b, h, n, s)``, and behind it the columns of the global tokens."""
        s = k.shape[2]
        identity = torch.eye(s, dtype=q.dtype, device=q.device).expand(*k.shape[:2], s, s)
        parts = [self._run(q, k, x, ignored, 0.0) for x in identity.split(256, -1)]
        weights = torch.cat(parts, -1)[:, :, self._front :] if parts else identity
        if not self._front:
            return weights
        return torch.cat([weights[..., self._front :], weights[..., : self.num_global_tokens]], -1)


def lengths_of(ignored: Tensor) -> Tensor:
    """``(b,)``: a sample ends where its last token does."""
    return (
        torch.arange(1, ignored.shape[1] + 1, device=ignored.device)
        .masked_fill(ignored, 0)
        .amax(1)
        .int()
    )


def layout_of(n: int, front: int, size: int, heads: int, *about: Any) -> BlockLayout:
    """For n tokens, of which whole blocks in front are more global ones.

    Args:
        about: How many window, random and global blocks, the plan, its seed and its layer.
    """
    make: Callable[..., BlockLayout] = _layout
    if (plan := about[3]) != "uniform":
        if torch.compiler.is_dynamo_compiling():
            raise NotImplementedError(  # an error where the graph must be whole; else it breaks
                f"plan={plan!r} is drawn by NumPy, which cannot be part of a graph: compile with "
                "fullgraph=False, export with strict=False, or take plan='uniform'"
            )
        make = _drawn_layout
    elif torch.compiler.is_compiling():
        make = _layout.__wrapped__
    return make(n, front, size, heads, *about)


@lru_cache(maxsize=64)
def _layout(n: int, front: int, size: int, heads: int, *about: Any) -> BlockLayout:
    """One for all modules with this pattern, so that its lists are made once."""
    window, num_random, num_global, plan, seed, layer = about
    layout = BlockLayout.bigbird(
        n,
        block_size=size,
        num_heads=heads,
        num_window_blocks=window,
        num_random_blocks=num_random,
        num_global_blocks=num_global,
        plan=plan,
        seed=seed,
        layer=layer,
    )
    if not front:
        return layout
    assert layout.recipe is not None
    return replace(layout, recipe=replace(layout.recipe, first=layout.recipe.first + front))


@torch.compiler.disable
def _drawn_layout(*about: Any) -> BlockLayout:
    """A published plan is drawn by NumPy, which a compiler must not trace."""
    return _layout(*about)
