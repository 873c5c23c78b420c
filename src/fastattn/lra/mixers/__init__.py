"""Mixers by name: the mechanisms of fastattn, and what else is compared with them.

Each takes ``(x, padding)``. A body is a network of its own rather than the mixer of a block: it
stands between the embedding and the pooling, and stands alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from fastattn.lra.patterns import Named, read_name
from fastattn.nn import MECHANISMS

# names that are no mechanism, and their options
OTHERS: dict[str, tuple[str, ...]] = {
    "softmax": (),
    "long_conv": ("taps", "squash"),
    "gmlp": ("seq_len", "independent", "hidden"),
    "conv": ("kernel", "groups", "hidden"),
}
BODIES: dict[str, tuple[str, ...]] = {
    "rnn": ("layers", "embedding"),
    "lstm": ("layers", "chrono", "embedding"),
    "gru": ("layers", "chrono", "embedding"),
    "tcn": ("kind", "kernel", "blocks", "project", "embedding"),
}
MIXERS = (*OTHERS, *MECHANISMS, *BODIES)


def mixers_of(mixer: str) -> list[Named]:
    """The names in a pattern of mixers, and their options: "bigbird:num_random_blocks=4 linear".

    Raises:
        ValueError: A name or an option is unknown, there is none, or a body is not alone.
    """
    mechanisms = {name: kind.option_names() for name, kind in MECHANISMS.items()}
    try:
        found = [read_name(word, OTHERS | mechanisms | BODIES) for word in mixer.split()]
    except KeyError:
        found = []
    if not found:
        raise ValueError(
            f"mixer must be one of {', '.join(MIXERS)}, or several, one a block, got {mixer!r}"
        )
    bodies = [name for name, _ in found if name in BODIES]
    if bodies and len(found) > 1:
        raise ValueError(f"{bodies[0]} is a whole network and stands alone, got {mixer!r}")
    return found


def needs_positions(mixer: str) -> bool:
    """Whether it would not see the order of the tokens by itself."""
    return not all(name == "conv" or name in BODIES for name, _ in mixers_of(mixer))


def default_pool(mixer: str) -> str:
    """ "last" where only the last token has seen the others, else "mean"."""
    name, options = mixers_of(mixer)[0]
    forwards = name in ("rnn", "lstm", "gru") or options.get("kind", "causal") == "causal"
    return "last" if name in BODIES and forwards else "mean"


class Sizes(NamedTuple):
    """What an encoder's mixers have in common; the arguments of the encoder."""

    width: int
    heads: int
    max_length: int
    positions: str
    activation: type[nn.Module]


def make_mixer(name: str, options: dict[str, Any], sizes: Sizes, layer: int) -> nn.Module:
    """The mixer of a block, ``(b, n, width)`` to the same.

    Raises:
        ValueError: An option does not fit.
    """
    width, heads, max_length, positions, activation = sizes
    if name == "softmax":
        from fastattn.lra.mixers.softmax import SoftmaxAttention

        half = positions == "half-rotary"
        return SoftmaxAttention(width, heads, rotary=half or positions == "rotary", half=half)
    if name == "conv":
        from fastattn.lra.mixers.conv import ConvMixer

        return ConvMixer(width, activation=activation, **options)
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


def make_body(
    name: str, options: dict[str, Any], embedding: int, width: int, dropout: float
) -> nn.Module:
    """A whole network, ``(b, n, embedding)`` to ``(b, n, width)``.

    Raises:
        ValueError: An option does not fit.
    """
    if name == "tcn":
        from fastattn.lra.mixers.tcn import TCN

        return TCN(embedding, width, dropout=dropout, **options)
    from fastattn.lra.mixers.recurrent import RecurrentBody

    return RecurrentBody(name, embedding, width, dropout=dropout, **options)
