"""Pictures of 32 x 32 that stand in for CIFAR-10: drawn from a seed alone, or Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastattn.lra.pictures import read_pictures

KINDS = ("disc", "ring", "square", "frame", "triangle",
         "cross", "bars", "rings", "checks", "waves")  # fmt: skip
FASHION = ("top", "trouser", "pullover", "dress", "coat",
           "sandal", "shirt", "sneaker", "bag", "boot")  # fmt: skip
_SIDE = 32
_BLOCK = 256  # pictures drawn together: part of what a seed means

Pictures = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def draw(first: int, count: int, *, seed: int) -> Pictures:
    """Pictures ``first`` to ``first + count - 1`` of a seed, ``(count, 32, 32)``, and their labels.

    Five shapes, a cross and four textures, at any place and angle, in two sizes' range, dark on
    light or light on dark, under noise: no single pixel and no mean grey tells the kind.
    """
    blocks = range(first // _BLOCK, -(-(first + count) // _BLOCK))
    drawn = [_block(seed, number) for number in blocks]
    start = first - blocks.start * _BLOCK
    pictures, labels = (np.concatenate(x)[start : start + count] for x in zip(*drawn, strict=True))
    return pictures, labels


def _block(seed: int, number: int) -> Pictures:
    rng = np.random.default_rng([seed, 3, number])

    def uniform(low: float, high: float) -> NDArray[np.float64]:
        return rng.uniform(low, high, (_BLOCK, 1, 1))

    labels = (np.arange(_BLOCK) + number * _BLOCK) % len(KINDS)
    y, x = np.mgrid[:_SIDE, :_SIDE] - (_SIDE - 1) / 2
    x, y = x - uniform(-6, 6), y - uniform(-6, 6)
    angle = uniform(0, 2 * np.pi)
    x, y = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    size, period = uniform(6, 10), uniform(4, 8)
    radius, square = np.hypot(x, y), np.maximum(abs(x), abs(y))
    corner = np.maximum(-y, abs(x) * np.sqrt(3) / 2 + y / 2)  # of a triangle that stands on a side
    wave_x, wave_y = np.sin(2 * np.pi * x / period), np.sin(2 * np.pi * y / period)
    inside = np.select(
        [labels[:, None, None] == kind for kind in range(len(KINDS))],
        [
            radius < size,
            (radius < size) & (radius > size - 3),
            square < size * 0.9,
            (square < size * 0.9) & (square > size * 0.9 - 3),
            corner < size * 0.6,
            (np.minimum(abs(x), abs(y)) < 2) & (square < size),
            wave_x > 0,
            np.sin(2 * np.pi * radius / period) > 0,
            (wave_x > 0) ^ (wave_y > 0),
            np.sin(2 * np.pi * (x + 2 * wave_y) / period) > 0,
        ],
    )
    dark, contrast = uniform(20, 120), uniform(60, 110)
    inside = inside ^ (uniform(0, 1) < 0.5)
    noise = rng.normal(0, 12, inside.shape)
    pictures = np.clip(dark + contrast * inside + noise, 0, 255).astype(np.uint8)
    return pictures, labels.astype(np.uint8)


def fashion(source: Path) -> dict[str, Pictures]:
    """Fashion-MNIST's "train" and "test", padded to ``(N, 32, 32)``, and the labels.

    Raises:
        ValueError: ``source`` holds no such files, damaged ones, or another set.
    """
    found = {}
    for name, (pixels, labels) in read_pictures(source).items():
        if pixels.shape[1:] != (28, 28, 1) or labels.max(initial=0) >= len(FASHION):
            raise ValueError(f"source {source} holds another picture set than Fashion-MNIST")
        padded = np.pad(pixels[..., 0], ((0, 0), (2, 2), (2, 2)))
        found[name] = padded, labels.astype(np.uint8)
    return found
