"""Synthetic texts, from a seed alone, that stand in for IMDB and the ACL anthology.

They are no language: made-up words, drawn by Zipf's law, with planted words that decide. A planted
word can stand anywhere in 1000 to 4000 bytes, and no single one decides, so that a model has to
read the whole of a text, and of two texts what both are about.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

_PLANTED = (
    ("dull", "weak", "clumsy", "tedious", "awful", "bland", "hollow", "poor"),
    ("bright", "strong", "graceful", "gripping", "superb", "vivid", "sincere", "fine"),
)
_ONSETS = (*"bdfgklmnprstvz", "br", "dr", "gr", "kl", "pl", "st", "tr")
_VOWELS = (*"aeiou", "ai", "ou", "é")
_FILLER = 1500  # words that every text draws from
_SHORTEST, _LONGEST = 1000, 4000  # bytes, but for a few full stops
# What a term is about is its ending, in letters that no filler has.
AREAS = tuple(consonant + vowel for consonant in "chjwxy" for vowel in "aeiou")
_TERMS = 24  # of the areas of its topic, in each text
# Shares of the topics, for no split may know another's.
_TOPICS = {"test": (0.0, 0.2), "val": (0.2, 0.3), "train": (0.3, 1.0)}


def review(seed: int, number: int) -> tuple[bytes, int]:
    """A text and its label, which of the two kinds of planted words is in the majority.

    9 to 21 words are planted, an odd number; the majority is anything from all to one more than
    half. Labels alternate.
    """
    rng = np.random.default_rng([seed, 1, number])
    label = number % 2
    planted = 9 + 2 * int(rng.integers(7))
    more = int(rng.integers(planted // 2 + 1, planted + 1))
    kinds = rng.permutation([label] * more + [1 - label] * (planted - more))
    return _text(rng, [_PLANTED[kind][rng.integers(8)] for kind in kinds]), label


def pair(seed: int, split: str, number: int) -> tuple[bytes, bytes, int]:
    """Two texts and their label, whether they are of one topic; labels alternate.

    A topic is three of 30 areas, and each of its texts has 24 terms of these areas; a term says by
    its ending of which. Texts of different topics have no area in common. A topic belongs to one
    split: what an area is can be learnt, while a test's topics are new.
    """
    rng = np.random.default_rng([seed, 2, list(_TOPICS).index(split), number])
    low, high = (round(share * len(_topics())) for share in _TOPICS[split])
    one = other = _topics()[rng.integers(low, high)]
    label = number % 2
    while label == 0 and set(one) & set(other):
        other = _topics()[rng.integers(low, high)]
    texts = []
    for topic in (one, other):
        stems = [_words()[i] for i in rng.integers(_FILLER, size=_TERMS)]
        areas = [AREAS[i] for i in rng.permutation(np.resize(topic, _TERMS))]
        texts.append(_text(rng, [s + area for s, area in zip(stems, areas, strict=True)]))
    return texts[0], texts[1], label


def _text(rng: np.random.Generator, planted: list[str]) -> bytes:
    """Filler with the planted words in it, in this order, at places that are uniform."""
    length = int(rng.integers(_SHORTEST, _LONGEST + 1))
    length -= sum(len(word.encode()) + 1 for word in planted)
    drawn = np.searchsorted(_zipf(), rng.random(length // 2))
    count = int(np.searchsorted(np.cumsum(_sizes()[drawn]), length))
    words = [_words()[i] for i in drawn[:count]]
    places = sorted(rng.integers(count + 1, size=len(planted)).tolist(), reverse=True)
    for at, word in zip(places, reversed(planted), strict=True):
        words.insert(at, word)
    for at in set(rng.integers(len(words), size=len(words) // 12).tolist()):
        words[at] += "."
    return " ".join(words).encode()


@cache
def _topics() -> list[tuple[int, ...]]:
    """Every three areas, in an order that is the same for every seed."""
    every = list(combinations(range(len(AREAS)), 3))
    return [every[i] for i in np.random.default_rng(1).permutation(len(every))]


@cache
def _words() -> list[str]:
    """The filler, made of syllables, its hundred most frequent words of one: the same always."""
    rng = np.random.default_rng(0)
    made: dict[str, None] = {}
    while len(made) < _FILLER:
        syllables = 1 if len(made) < 100 else int(rng.integers(2, 4))
        made["".join(rng.choice(x) for _ in range(syllables) for x in (_ONSETS, _VOWELS))] = None
    return [word for word in made if word not in {*_PLANTED[0], *_PLANTED[1]}]


@cache
def _sizes() -> NDArray[np.int64]:
    """Bytes of each word of the filler, with a space."""
    return np.array([len(word.encode()) + 1 for word in _words()])


@cache
def _zipf() -> NDArray[np.float64]:
    """The cumulative shares of the filler words, each as 1 / (rank + 3)."""
    share = 1 / (np.arange(len(_words())) + 3.0)
    return np.cumsum(share / share.sum())
