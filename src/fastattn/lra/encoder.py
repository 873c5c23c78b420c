"""The encoder: embed, n blocks of (mixer, feed-forward), mean over the tokens, classify."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.nn import MECHANISMS

# names that are no mechanism, and their options
OTHERS: dict[str, tuple[str, ...]] = {
    "softmax": (),
    "long_conv": ("taps", "squash"),
    "gmlp": ("seq_len", "independent"),
}
MIXERS = (*OTHERS, *MECHANISMS)
POSITIONS = ("rotary", "sinusoidal", "learned")


@dataclass(frozen=True)
class Padding:
    """Which tokens of a batch are real, in the forms that mixers need; made without a sync.

    Args:
        mask: ``(b, n)`` bool, True = padding.
        packed: Places of the real tokens in the flattened batch, ``(tokens,)`` int64.
        cu_seqlens: Boundaries of the packed sequences, ``(b + 1,)`` int32.
        longest: The largest length.
    """

    mask: Tensor
    packed: Tensor
    cu_seqlens: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Tensor, n: int, device: torch.device) -> Padding:
        """From lengths ``(b,)`` on the CPU, as for ``pack_padded_sequence``."""
        if lengths.device.type != "cpu":
            raise ValueError(f"lengths must be on the CPU, they are on {lengths.device}")
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= n:
            raise ValueError(f"lengths must be from 1 to n = {n}, got {lengths.tolist()}")
        mask = torch.arange(n) >= lengths[:, None]
        packed = (~mask).flatten().nonzero().squeeze(1)
        cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
        longest = int(lengths.max()) if len(lengths) else 0
        there = [x.to(device, non_blocking=True) for x in (mask, packed, cu_seqlens)]
        return cls(there[0], there[1], there[2], longest)


class Encoder(nn.Module):
    """A pre-norm classifier of token sequences with any mixer.

    Args:
        vocabulary_size: Number of token ids.
        num_classes: Number of logits.
        mixer: A name in ``MIXERS``, or several, one a block, repeated up to ``depth``: a hybrid
            as "bigbird linear". A name may have options of its mechanism behind it:
            "bigbird:block_size=32,num_random_blocks=4".
        positions: "rotary" (softmax only), "sinusoidal" or "learned".
        max_length: Longest sequence that learned positions, Linformer and gMLP can take.
        width, depth, heads, ff: Sizes; ff is the hidden width of the feed-forward part.
        dropout: After the embedding, each mixer and each feed-forward part.

    Raises:
        ValueError: An unknown mixer, option or positions, rotary without softmax, or a depth that
            is no multiple of the mixers.
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
    ) -> None:
        super().__init__()
        mixers = mixers_of(mixer)
        if depth % len(mixers):
            raise ValueError(f"depth {depth} must be a multiple of the mixers, got {mixer!r}")
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
        if positions == "rotary" and {name for name, _ in mixers} != {"softmax"}:
            raise ValueError(f"rotary positions need the mixer softmax, got {mixer!r}")
        self.max_length = max_length
        self.positions = positions
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.place = nn.Embedding(max_length, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(_mixer(*of, width, heads, positions, max_length, layer), width, ff, dropout)
            for layer, of in enumerate(mixers * (depth // len(mixers)))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``(b, classes)`` from ``(b, n)`` ids and ``(b,)`` lengths on the CPU.

        What stands beyond a sample's length changes nothing.
        """
        n = tokens.shape[1]
        padding = Padding.of(lengths, n, tokens.device)
        x = self.embedding(tokens)  # (b, n, width)
        if self.place is not None:
            if n > self.max_length:
                raise ValueError(f"learned positions end at {self.max_length}, got n = {n}")
            x = x + self.place.weight[:n]
        elif self.positions == "sinusoidal":
            x = x + sinusoids(n, x.shape[2], x.device)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, padding)
        x = x.masked_fill(padding.mask.unsqueeze(-1), 0).sum(1)
        mean = x / padding.cu_seqlens.diff().unsqueeze(-1)
        return self.head(self.norm(mean))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, mixer: nn.Module, width: int, ff: int, dropout: float) -> None:
        super().__init__()
        self.norm_mixer = nn.LayerNorm(width)
        self.mixer = mixer
        self.norm_ff = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, ff), nn.ReLU(), nn.Linear(ff, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        y = self.norm_mixer(x)
        if isinstance(self.mixer, nn.MultiheadAttention):
            y = self.mixer(y, y, y, key_padding_mask=padding.mask)[0]
        else:
            y = self.mixer(y, padding)
        x = x + self.dropout(y)
        return x + self.dropout(self.ff(self.norm_ff(x)))


def sinusoids(n: int, width: int, device: torch.device) -> Tensor:
    """Positions as sines and cosines, ``(n, width)`` (Vaswani et al. 2017, section 3.5)."""
    position = torch.arange(n, device=device, dtype=torch.float32).unsqueeze(1)
    pairs = torch.arange((width + 1) // 2, device=device, dtype=torch.float32)
    angle = position * torch.exp(pairs * (-2 * math.log(10000.0) / width))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :width]


def mixers_of(mixer: str) -> list[tuple[str, dict[str, Any]]]:
    """The names in a pattern of mixers, and their options: "bigbird:num_random_blocks=4 linear".

    Raises:
        ValueError: A name or an option is unknown, or there is none.
    """
    found = []
    for word in mixer.split():
        name, _, rest = word.partition(":")
        if name not in MIXERS:
            break
        known = OTHERS[name] if name in OTHERS else MECHANISMS[name].option_names()
        options = {}
        for pair in filter(None, rest.split(",")):
            option, _, value = pair.partition("=")
            if option not in known:
                raise ValueError(
                    f"options of {name} are {', '.join(known) or 'none'}, got {option!r}"
                )
            options[option] = _value(value)
        found.append((name, options))
    if not found or len(found) < len(mixer.split()):
        raise ValueError(
            f"mixer must be one of {', '.join(MIXERS)}, or several, one a block, got {mixer!r}"
        )
    return found


def _value(text: str) -> Any:
    """A Python literal, true or false in any case, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


def _mixer(
    name: str,
    options: dict[str, Any],
    width: int,
    heads: int,
    positions: str,
    max_length: int,
    layer: int,
) -> nn.Module:
    if name == "softmax":
        from fastattn.lra.mixers.softmax import SoftmaxAttention

        return SoftmaxAttention(width, heads, rotary=positions == "rotary")
    if name in OTHERS:
        from fastattn.lra.mixers.long_conv import GMLPMixer, LongConvMixer

        if name == "gmlp":
            return GMLPMixer(width, **{"seq_len": max_length} | options)
        return LongConvMixer(width, **{"taps": max_length} | options)
    kind = MECHANISMS[name]
    # what is drawn at random differs by layer
    ours = {"seed": layer, "seq_len": max_length}
    ours = {name: x for name, x in ours.items() if name in kind.option_names()}
    return kind(width, heads, batch_first=True, **ours | options)
