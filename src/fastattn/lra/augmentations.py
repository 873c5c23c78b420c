"""Augmentation of training pictures by name, a whole batch at once.

Miralles-González et al. 2025, arXiv:2501.14850, take a finite subset of the eight flips and
rotations, since all of them without limit did harm, and for CIFAR-10 a policy like AutoAugment's
whose numbers are not in the text. Which subset, and the policy, are our choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastattn.lra.data import GREYS, Augment, Indices, Task, Tokens
from fastattn.lra.patterns import options_fit, read_name
from fastattn.lra.recipe import Recipe

Pictures = NDArray[np.uint8]  # (b, rows, columns)

AUGMENTATIONS: dict[str, tuple[str, ...]] = {"d4": ("elements",), "grey": ()}


def augmentation(task: Task, recipe: Recipe) -> Augment | None:
    """What a recipe does to the training samples of a task: its own, or those named; None if off.

    Raises:
        ValueError: An unknown name or option, or one that would change this task's labels.
    """
    if isinstance(recipe.augment, bool):
        return task.augment if recipe.augment else None
    made: list[Augment] = []
    for word in recipe.augment.split():
        try:
            name, options = read_name(word, AUGMENTATIONS)
        except KeyError:
            raise _unknown(recipe.augment) from None
        if task.vocabulary != GREYS:
            raise ValueError(f"augment {name} is for pictures, and {task.name} has none")
        if name == "grey" and task.name != "image":
            raise ValueError(f"augment grey would change what {task.name} asks for: take d4")
        with options_fit(name, options):
            made.append(SomeTurns(seed=recipe.seed, **options) if name == "d4" else GreyPolicy())
    if not made:
        raise _unknown(recipe.augment)
    return Chain(tuple(made))


def _unknown(augment: str) -> ValueError:
    names = ", ".join(AUGMENTATIONS)
    return ValueError(f"augment must be true, false, or names of {names}, got {augment!r}")


@dataclass(frozen=True)
class Chain:
    """One augmentation after another."""

    steps: tuple[Augment, ...]

    def __call__(self, tokens: Tokens, offsets: Indices, rng: np.random.Generator) -> Tokens:
        for step in self.steps:
            tokens = step(tokens, offsets, rng)
        return tokens


@dataclass(frozen=True)
class SomeTurns:
    """Each picture in one of its own few positions: itself, and others of the flips and rotations.

    Which they are follows from the picture and the seed, so that the training set is so many times
    as large, and finite.

    Args:
        elements: Positions of a picture, of the 8 there are.
        seed: With a picture's content, decides its positions.

    Raises:
        ValueError: ``elements`` is not 2 to 8.
    """

    elements: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.elements <= 8:
            raise ValueError(f"elements must be 2 to 8 flips and rotations, got {self.elements}")

    def __call__(self, tokens: Tokens, offsets: Indices, rng: np.random.Generator) -> Tokens:
        pictures = squares(tokens, offsets)
        own = self.of(pictures)
        drawn = rng.integers(self.elements, size=len(own))
        return turned(pictures, own[np.arange(len(own)), drawn]).ravel()

    def of(self, pictures: Pictures) -> Indices:
        """The positions of each picture, as :func:`turned` numbers them, ``(b, elements)``."""
        names = _digests(pictures, self.seed)[:, None]
        others = np.arange(1, 8, dtype=np.uint64)
        order = np.argsort(_mixed(names + others), axis=1)[:, : self.elements - 1] + 1
        return np.concatenate((np.zeros_like(order[:, :1]), order), axis=1)


@dataclass(frozen=True)
class GreyPolicy:
    """Mirror, move by up to 4 pixels, contrast, brightness, and an 8 x 8 patch cut out.

    Each with probability 1/2, but for the move (He et al. 2016: crop with padding 4). Contrast is
    0.6 to 1.4 about the picture's mean, brightness ±51 grey levels, the patch has the mean's grey
    (DeVries and Taylor 2017), and what moves in is black. The numbers are ours.
    """

    reach: int = 4
    contrast: float = 0.4
    brightness: float = 51.0
    patch: int = 8

    def __call__(self, tokens: Tokens, offsets: Indices, rng: np.random.Generator) -> Tokens:
        pictures = squares(tokens, offsets)
        b, side, _ = pictures.shape
        pictures = turned(pictures, rng.choice([0, 2], b))
        padded = np.pad(pictures, ((0, 0), (self.reach, self.reach), (self.reach, self.reach)))
        top, left = rng.integers(2 * self.reach + 1, size=(2, b, 1)) + np.arange(side)
        pictures = padded[np.arange(b)[:, None, None], top[:, :, None], left[:, None, :]]

        mean = pictures.mean((1, 2), keepdims=True)
        chance = rng.random((3, b, 1, 1)) < 0.5
        gain, shift = rng.uniform(-1, 1, (2, b, 1, 1)) * chance[:2]
        greys = (pictures - mean) * (1 + self.contrast * gain) + mean + self.brightness * shift
        first = rng.integers(1 - self.patch, side, size=(2, b, 1))  # may begin outside
        rows, columns = (np.arange(side) >= first) & (np.arange(side) < first + self.patch)
        hidden = rows[:, :, None] & columns[:, None, :] & chance[2]
        greys = np.where(hidden, mean, greys)
        return greys.round().clip(0, 255).astype(np.uint8).ravel()


def squares(tokens: Tokens, offsets: Indices) -> Pictures:
    """The samples of a batch as ``(b, side, side)``.

    Raises:
        ValueError: They are no squares of one size.
    """
    b = len(offsets) - 1
    side = math.isqrt(len(tokens) // max(1, b))
    if not np.array_equal(np.diff(offsets), np.full(b, side**2)):
        raise ValueError("pictures of a batch must be squares of one size to be augmented")
    return tokens.reshape(b, side, side)


def turned(pictures: Pictures, elements: Indices) -> Pictures:
    """Each picture as one of the eight elements of D4 shows it.

    Args:
        pictures: ``(b, side, side)``.
        elements: ``(b,)``, 0 to 7: rows reversed where 1 is set, columns where 2 is set, after
            rows and columns have changed places where 4 is set.
    """
    out = np.empty_like(pictures)
    for element in np.unique(elements):
        chosen = elements == element
        x = pictures[chosen].swapaxes(1, 2) if element & 4 else pictures[chosen]
        out[chosen] = x[:, :: -1 if element & 1 else 1, :: -1 if element & 2 else 1]
    return out


def _digests(pictures: Pictures, seed: int) -> NDArray[np.uint64]:
    """A number a picture that its content and the seed decide, ``(b,)``."""
    rows = pictures.reshape(len(pictures), -1)
    weights = np.random.default_rng([seed, 2]).integers(
        2**64, size=-(-rows.shape[1] // 8), dtype=np.uint64
    )
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    words = np.ascontiguousarray(rows).view("<u8")
    return _mixed((words * (weights | np.uint64(1))).sum(1, dtype=np.uint64))


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finish: every bit of what comes in changes half of those that come out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
