"""The encoder: embed, n blocks of (mixer, feed-forward), one vector a document, classify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.lra.data import GREYS, Task
from fastattn.lra.denoise import PREDICTIONS
from fastattn.lra.embeddings import EMBEDDINGS, AsNumbers, Numbers
from fastattn.lra.mixers import BODIES, MIXERS, Sizes, make_body, make_mixer, mixers_of
from fastattn.lra.norms import NORMS
from fastattn.lra.padding import Padding
from fastattn.lra.patterns import options_fit, read_name
from fastattn.lra.pooling import POOLS, Head, make_pool
from fastattn.lra.positions import POSITIONS, sinusoids
from fastattn.lra.recipe import Recipe

__all__ = [
    "ACTIVATIONS",
    "EMBEDDINGS",
    "MIXERS",
    "NORMS",
    "POOLS",
    "POSITIONS",
    "Encoder",
    "encoder_for",
    "mixers_of",
    "reach",
]

LENGTHS_APART = 64  # of batches that are compiled
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class Encoder(nn.Module):
    """A pre-norm classifier of token sequences with any mixer.

    Args:
        vocabulary_size: Number of token ids.
        num_classes: Number of logits.
        mixer: A name in ``MIXERS``, or several, one a block, repeated up to ``depth``: a hybrid
            as "bigbird linear". A name may have options of its mechanism behind it:
            "bigbird:block_size=32,num_random_blocks=4". "rnn", "lstm", "gru" and "tcn" are no
            mixers of blocks but stand in place of all of them: they have layers of their own, no
            norms, and what they embed is ``embedding`` wide: 64, or "gru:embedding=false" for the
            ids as numbers from 0 to 1, as for grey levels.
        embedding: "table", a vector for each id; or "numbers", the id's number from 0 to 1 times
            one vector, plus another: for grey levels, which are neighbours then from the start.
        norm: "layer", of each token before a mixer, before a feed-forward part and of what is
            pooled; or "batch", of each channel over all tokens of a batch, before the pooling
            instead of behind it: for documents of one length.
        positions: "rotary" or "half-rotary" (softmax only), "sinusoidal", "learned" or "none".
        max_length: Longest sequence that learned positions, Linformer and gMLP can take.
        width, depth, heads, ff: Sizes; ff is the hidden width of the feed-forward part, which 0
            leaves out.
        dropout: After the embedding, each mixer and each feed-forward part.
        activation: "relu" or "gelu", in feed-forward parts and convolutions.
        pool: From tokens to one vector: "mean"; "cls", a learned vector in front, so that the
            first token stands at position 1; "last"; or "attention:hops=4", structured
            self-attention. All of them leave out the padding.
        parts: Documents a sample, 1 or 2. Two are encoded alike, and the head sees both.
        head: Hidden width of the head; 0 means that it is linear, or as wide as the vectors where
            it compares two documents.
        denoise: "tokens" or "grey" adds what :meth:`denoised` needs: an embedding of the mask, and
            a norm and a linear layer from tokens to ids, or to one number.

    Raises:
        ValueError: An unknown name or option, positions that the mixer cannot use, or a depth that
            is no multiple of the mixers. From :meth:`forward`: padding, with the norm "batch".
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_classes: int,
        *,
        mixer: str,
        positions: str,
        max_length: int,
        width: int = 256,
        depth: int = 6,
        heads: int = 4,
        ff: int = 512,
        dropout: float = 0.0,
        activation: str = "relu",
        embedding: str = "table",
        norm: str = "layer",
        pool: str = "mean",
        parts: int = 1,
        head: int = 0,
        denoise: str | None = None,
    ) -> None:
        super().__init__()
        mixers = mixers_of(mixer)
        is_body = mixers[0][0] in BODIES
        if not is_body and depth % len(mixers):
            raise ValueError(f"depth {depth} must be a multiple of the mixers, got {mixer!r}")
        _check_positions(positions, mixer)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        for what, given, known in (("embedding", embedding, EMBEDDINGS), ("norm", norm, NORMS)):
            if given not in known:
                raise ValueError(f"{what} must be one of {', '.join(known)}, got {given!r}")
        if parts not in (1, 2):
            raise ValueError(f"parts must be 1 or 2 documents a sample, got {parts}")
        pool_name, pool_options = _pool_of(pool)
        self.max_length = max_length + (pool_name == "cls")
        self.positions = positions
        embedded = mixers[0][1].pop("embedding", 64) if is_body else width
        if embedded is True or not isinstance(embedded, int) or embedded < 0:
            raise ValueError(f"embedding must be a width, or false, got {embedded!r}")
        self.vocabulary_size = vocabulary_size
        self.embedding: nn.Module
        if not embedded:
            self.embedding = AsNumbers(vocabulary_size)
        elif embedding == "numbers":
            self.embedding = Numbers(vocabulary_size, embedded)
        else:
            self.embedding = nn.Embedding(vocabulary_size, embedded)
        learned = positions == "learned"
        self.place = nn.Embedding(self.max_length, width) if learned else None
        self.dropout = nn.Dropout(dropout)
        blocks: list[nn.Module]
        if is_body:
            ((name, options),) = mixers
            with options_fit(name, options):
                blocks = [make_body(name, options, embedded or 1, width, dropout)]
        else:
            act = ACTIVATIONS[activation]
            sizes = Sizes(width, heads, self.max_length, positions, act)
            pattern = mixers * (depth // len(mixers))
            blocks = []
            for layer, (name, options) in enumerate(pattern):
                with options_fit(name, options):
                    made = make_mixer(name, options, sizes, layer)
                blocks.append(Block(made, width, ff, dropout, act, NORMS[norm]))
        self.blocks = nn.ModuleList(blocks)
        self._compiled: Callable[[Tensor, Padding], Tensor] | None = None
        self.cls = nn.Parameter(torch.randn(embedded)) if pool_name == "cls" else None
        with options_fit(pool_name, pool_options):
            self.pool = make_pool(pool_name, pool_options, width)
        pooled = width * getattr(self.pool, "hops", 1)
        self.by_batch = norm == "batch" and not is_body
        self.norm: nn.Module = nn.Identity()
        if not is_body:
            self.norm = NORMS[norm](width if self.by_batch else pooled)
        self.head: nn.Module
        if parts == 1 and not head:
            self.head = nn.Linear(pooled, num_classes)
        else:
            self.head = Head(pooled, head or pooled, num_classes, parts)
        if denoise is not None:  # at last: the initial values of all else are what they are without
            if denoise not in PREDICTIONS:
                raise ValueError(f"denoise must be {' or '.join(PREDICTIONS)}, got {denoise!r}")
            if not embedded:
                raise ValueError("denoise needs an embedding, for its mask: got embedding=false")
            self.mask = nn.Parameter(torch.randn(embedded))
            named = vocabulary_size if denoise == "tokens" else 1
            self.denoiser = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, named))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``(b, classes)`` from ``(b·parts, n)`` ids and ``(b·parts,)`` CPU lengths.

        What stands beyond a document's length changes nothing.
        """
        if self._compiled is None or not self.training:
            return self._classify(tokens, self._padding(tokens, lengths))
        if not self.by_batch:  # whose documents are all of one length
            tokens = F.pad(tokens, (0, self._rounded(tokens.shape[1]) - tokens.shape[1]))
        return self._compiled(tokens, self._padding(tokens, lengths))

    def compile_training(self, *, graphs: bool = True) -> None:
        """From now on :meth:`forward` in training mode is what ``torch.compile`` makes of it.

        One program for all lengths, in a minute or so at the first step. Evaluation stays as it is.

        Args:
            graphs: On a GPU, record it as a CUDA graph for every length: the host issues two calls
                a step. Gradients live until the next forward pass, so they cannot be accumulated.

        Raises:
            ValueError: A network that is one body, or a plan of blocks that depends on how long
                the batch is.
        """
        for block in self.blocks:
            if not isinstance(block, Block):
                raise ValueError(
                    f"{type(block).__name__} is a whole network, and is not compiled: leave "
                    "compile out"
                )
            if getattr(block.mixer, "plan", "uniform") != "uniform":
                raise ValueError(
                    f"bigbird's plan {block.mixer.plan!r} depends on the length of the batch, "
                    "which compiled training rounds up: leave compile out, or take plan=uniform"
                )
        mode = "reduce-overhead" if graphs else None
        self._compiled = torch.compile(self._classify, dynamic=True, mode=mode)

    def _rounded(self, n: int) -> int:
        """Up to a multiple of 64, so that lengths are few, or to the longest there can be."""
        limits = [x for m in self.modules() if isinstance(x := getattr(m, "seq_len", None), int)]
        limits += [self.max_length] if self.place is not None else []
        longest = min(limits, default=n + LENGTHS_APART) - int(self.cls is not None)
        return max(n, min(-(-n // LENGTHS_APART) * LENGTHS_APART, longest))

    def _classify(self, tokens: Tensor, padding: Padding) -> Tensor:
        x = self._read(self.embedding(tokens), padding)
        if self.by_batch:
            return self.head(self.pool(self.norm(x), padding))
        return self.head(self.norm(self.pool(x, padding)))

    def _padding(self, tokens: Tensor, lengths: Tensor) -> Padding:
        first = int(self.cls is not None)
        if self.by_batch and int(lengths.min()) < tokens.shape[1]:
            raise ValueError(
                "norm batch takes documents of one length, as pictures are: got lengths from "
                f"{int(lengths.min())} to {int(lengths.max())} in {tokens.shape[1]} tokens; "
                "take norm layer"
            )
        return Padding.of(lengths + first, tokens.shape[1] + first, tokens.device)

    def denoised(self, tokens: Tensor, lengths: Tensor, selected: Tensor) -> Tensor:
        """What stood at the m selected tokens: ``(m, vocabulary)`` logits, or ``(m, 1)`` greys.

        Args:
            tokens: ``(b·parts, n)`` ids, where the vocabulary's size is the mask.
            lengths: As in :meth:`forward`.
            selected: ``(b·parts, n)``.
        """
        hidden = tokens == self.vocabulary_size
        x = self.embedding(tokens.masked_fill(hidden, 0))
        x = torch.where(hidden.unsqueeze(-1), self.mask.to(x.dtype), x)
        x = self._read(x, self._padding(tokens, lengths))
        return self.denoiser(x[:, x.shape[1] - tokens.shape[1] :][selected])

    def _read(self, x: Tensor, padding: Padding) -> Tensor:
        """The tokens after the last block, from embedded ones ``(b·parts, n, width)``."""
        if self.cls is not None:
            x = torch.cat((self.cls.to(x.dtype).expand(len(x), 1, -1), x), 1)
        n = x.shape[1]
        if self.place is not None:
            if n > self.max_length:
                raise ValueError(f"learned positions end at {self.max_length}, got n = {n}")
            x = x + self.place.weight[:n]
        elif self.positions == "sinusoidal":
            x = x + sinusoids(n, x.shape[2], x.device)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, padding)
        return x

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """For an optimiser: matrices decay, vectors (biases, norms, gains) do not."""
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for p in self.parameters():
            (matrices if p.numel() > max(p.shape, default=1) else vectors).append(p)
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x)), or nothing then where ff is 0."""

    def __init__(
        self,
        mixer: nn.Module,
        width: int,
        ff: int,
        dropout: float,
        activation: type[nn.Module] = nn.ReLU,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.norm_mixer = norm(width)
        self.mixer = mixer
        self.ff: nn.Module | None = None
        if ff:
            self.norm_ff = norm(width)
            self.ff = nn.Sequential(nn.Linear(width, ff), activation(), nn.Linear(ff, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        y = self.norm_mixer(x)
        if isinstance(self.mixer, nn.MultiheadAttention):
            y = self.mixer(y, y, y, key_padding_mask=padding.mask)[0]
        else:
            y = self.mixer(y, padding)
        x = x + self.dropout(y)
        return x if self.ff is None else x + self.dropout(self.ff(self.norm_ff(x)))


def encoder_for(task: Task, recipe: Recipe, mixer: str) -> Encoder:
    """The model of a run.

    Raises:
        ValueError: The recipe is for another task, or has a number that nothing would use.
    """
    if recipe.task not in (None, task.name):
        raise ValueError(f"recipe {recipe.name} is for {recipe.task}, not for {task.name}")
    pool = recipe.pool_for(mixer)
    if recipe.penalty and not pool.startswith("attention"):
        raise ValueError(f"penalty needs the pool attention, got penalty {recipe.penalty}, {pool}")
    if recipe.max_length is None:
        raise ValueError("max_length must be a number here: Recipe.on takes it from the data")
    predict = recipe.denoise.predict if recipe.denoise else None
    if predict == "grey" and task.vocabulary != GREYS:
        raise ValueError(f"denoise grey is for pictures, and {task.name} has none: take tokens")
    if recipe.embedding == "numbers" and task.vocabulary != GREYS:
        raise ValueError(f"embedding numbers is for pictures, and {task.name} has none: take table")
    return Encoder(
        len(task.vocabulary),
        task.num_classes,
        mixer=mixer,
        positions=recipe.positions_for(mixer),
        max_length=recipe.max_length,
        width=recipe.width,
        depth=recipe.depth,
        heads=recipe.heads,
        ff=recipe.ff,
        dropout=recipe.dropout,
        activation=recipe.activation,
        embedding=recipe.embedding,
        norm=recipe.norm,
        pool=pool,
        parts=task.parts,
        head=recipe.head,
        denoise=predict,
    )


def reach(encoder: Encoder) -> tuple[int, int] | None:
    """How many tokens before and after it can change a token, before the pooling.

    None means all of them, as with attention. A convolution's reach is what it can know of the
    order of a document, so it belongs beside its result.
    """
    behind = ahead = 0
    for block in encoder.blocks:
        layer = getattr(block.mixer if isinstance(block, Block) else block, "reach", None)
        if layer is None:
            return None
        behind, ahead = behind + layer[0], ahead + layer[1]
    return behind, ahead


def _check_positions(positions: str, mixer: str) -> None:
    names = {name for name, _ in mixers_of(mixer)}
    if positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    if "rotary" in positions and names != {"softmax"}:
        raise ValueError(f"rotary positions need the mixer softmax, got {mixer!r}")
    if positions != "none" and names & BODIES.keys():
        raise ValueError(f"{mixer} reads in order and takes positions 'none', got {positions!r}")


def _pool_of(pool: str) -> tuple[str, dict[str, int]]:
    try:
        return read_name(pool, POOLS)
    except KeyError:
        raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}") from None
