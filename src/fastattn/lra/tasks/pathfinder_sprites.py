"""What Pathfinder images are drawn with: tables of small integers, made once for a setting.

A contour is a chain of segments. A segment points one of finitely many ways, so every move, weight
and picture of one is looked up. Both backends read the same tables, and what they compute from
them is integers: the same images, whatever the machine.

Directions are numbered: 0 to 359 are the degrees -180 to 179 of a first segment, 360 + k is from
a pivot to the k-th place around it. Coordinates and offsets are (y, x), angles in radians from x
towards y.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fastattn.lra.tasks.pathfinder_images import Settings

Ints: TypeAlias = NDArray[np.int32]
Bytes: TypeAlias = NDArray[np.uint8]
Angles: TypeAlias = NDArray[np.float64]

UNIT = 1 << 16  # of weights and of contrasts
_DEGREES = 360
_BITS = 22  # behind the point of a filter's weights, as in Pillow's filter for bytes


class Tables(NamedTuple):
    """Everything about segments with one margin between them; d directions, k places, s sprites.

    A sprite is three pictures, (w, w) with the segment's start in the middle: its grey levels,
    those of what it keeps free, its margin included, and the same, wider by a margin again.
    """

    margin: int
    around: Ints  # (k, 2): from a pivot to the places of the next head, in the order of (y, x)
    weights: NDArray[np.uint32]  # (d, k): of each place after each direction, at most UNIT
    steps: Ints  # (d, 2): from the pivot of a segment to the next one's
    heads: Ints  # (360, 2): from the start of a first segment to its end
    pivots: Ints  # (360, 2): from there to its pivot
    starts: Ints  # (360, 4): the rectangle y, x, height, width where the first contour may start
    footprint: Ints  # (f, 2): what a first segment covers, from its start, by direction
    footprint_at: Ints  # (361,): where in it a direction begins
    sprite_of: Ints  # (d,)
    sprites: Bytes  # (s, 3, w, w)


@lru_cache(maxsize=64)
def tables(settings: Settings, margin: int) -> Tables:
    """The tables of a setting for one of its margins, in 10 to 50 ms."""
    length, radius = settings.segment, settings.segment + margin
    turn = np.arange(int(np.ceil(2 * np.pi * radius))) / radius  # a pixel of arc apart
    around = np.unique(_floor(radius * _unit(turn)), axis=0)
    seeds = np.deg2rad(np.arange(-180, 180))
    towards = np.arctan2(around[:, 0], around[:, 1])
    directions = np.concatenate([seeds, towards])

    bend = np.abs(towards - directions[:, None])  # (d, k)
    bend = np.minimum(bend, 2 * np.pi - bend) * settings.continuity
    weights = np.cos(np.minimum(bend, np.pi / 2)) ** 2

    heads = _ceil(length * _unit(seeds))
    drawn = np.concatenate([seeds, towards + np.pi])  # a later one from its head back
    ends = _ceil(length * settings.oversampling * _unit(drawn))
    ends, sprite_of = np.unique(ends, axis=0, return_inverse=True)
    sprites = np.stack([_sprite(settings, margin, end) for end in ends])

    covers = [_footprint(sprites[i, 1], radius) for i in sprite_of.ravel()[:_DEGREES]]
    return Tables(
        margin,
        around,
        np.rint(weights * UNIT).astype(np.uint32),
        _ceil((length + 2 * margin) * _unit(directions)),
        heads,
        heads + _ceil(radius * _unit(seeds + np.pi)),
        np.array([_rectangle(settings, cover) for cover in covers], np.int32),
        np.concatenate(covers),
        np.cumsum([0, *map(len, covers)], dtype=np.int32),
        sprite_of.ravel().astype(np.int32),
        sprites,
    )


def contrasts(settings: Settings) -> tuple[int, int]:
    """Of the two contours and of distractors, in UNITs; a disc has one UNIT."""
    distractor = settings.snake_contrast
    return round(distractor * settings.paddle_contrast * UNIT), round(distractor * UNIT)


@lru_cache(maxsize=64)
def ring(settings: Settings) -> Ints:
    """From the start of the first contour to that of the second, for each degree, ``(360, 2)``."""
    return np.rint(settings.seed_distance * _unit(np.deg2rad(np.arange(_DEGREES)))).astype(np.int32)


@lru_cache(maxsize=64)
def marker(settings: Settings) -> Bytes:
    """The grey levels of a disc, ``(v, v)`` with its centre in the middle."""
    scale = settings.oversampling
    reach = int(np.ceil(settings.marker_radius)) + 4  # the filter reaches 3 pixels
    at = np.arange((2 * reach + 1) * scale) - reach * scale
    return reduced(
        at * at + at[:, None] ** 2 <= (settings.marker_radius * scale) ** 2, 2 * reach + 1
    )


def _unit(angle: Angles) -> NDArray[np.float64]:
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1)


def _ceil(x: NDArray[np.float64]) -> Ints:
    """Rounded up; what a sine's last bits lift over an integer is that integer."""
    return np.ceil(x - 1e-9).astype(np.int32)


def _floor(x: NDArray[np.float64]) -> Ints:
    return np.floor(x + 1e-9).astype(np.int32)


def _sprite(settings: Settings, margin: int, end: Ints) -> Bytes:
    """The three pictures of a segment from the middle to ``end``, on the fine canvas."""
    scale = settings.oversampling
    reach = settings.segment + int(np.ceil(settings.thickness)) + margin
    line = stroke(reach * scale, end, round(settings.thickness * scale))
    kept_free = dilated(line, disc(margin * scale))
    pictures = [reduced(x, 2 * reach + 1) for x in (line, kept_free)]
    pictures = [np.pad(x, margin) for x in pictures]
    return np.stack([*pictures, dilated(pictures[1], disc(margin))])


def _footprint(kept_free: Bytes, radius: int) -> Ints:
    """What a first segment covers wholly; nothing for a direction in which none begins.

    As in the original it is cut to a window, and lies one pixel off. Where it would lie outside
    the image wholly, in a corner, the original takes the whole image for occupied. On 32 pixels
    11 of 12 directions are lost that way: few distractors find a place, and pairs take long.
    """
    covered = np.argwhere(kept_free == 255) - len(kept_free) // 2
    inside = (covered >= -radius - 1) & (covered <= radius - 1)
    covered = covered[inside.all(axis=1)] + 1
    signs = np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)])
    in_every_corner = (covered * signs[:, None] >= 0).all(axis=2).any(axis=1).all()
    return (covered if in_every_corner else covered[:0]).astype(np.int32)


def _rectangle(settings: Settings, cover: Ints) -> list[int]:
    """Where a footprint stays clear of a frame of 2 · seed_distance: y, x, height, width."""
    if len(cover) == 0:
        return [0, 0, 0, 0]
    frame = 2 * settings.seed_distance
    low = frame - cover.min(axis=0)
    size = settings.size - frame - cover.max(axis=0) - low
    return [*low.tolist(), *np.maximum(size, 0).tolist()]


def disc(radius: int) -> NDArray[np.bool_]:
    """The pixels no further than ``radius`` from the middle one, ``(2 · radius + 1,) · 2``."""
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return x * x + y * y <= radius * radius


def dilated(image: NDArray, shape: NDArray[np.bool_]) -> NDArray:
    """At each pixel the maximum of those that ``shape``, put there, covers."""
    radius = len(shape) // 2
    padded = np.pad(image, radius)
    height, width = image.shape
    out = np.zeros_like(image)
    for y, x in np.argwhere(shape):
        np.maximum(out, padded[y : y + height, x : x + width], out=out)
    return out


def stroke(reach: int, end: Ints, width: int) -> NDArray[np.bool_]:
    """A line from the middle of ``(2 · reach + 1,) · 2`` to ``end``, filled as Pillow fills it.

    A thin line takes one pixel a step along its longer side; a wide one is the quadrilateral whose
    corners are moved aside by half the width, in whole pixels.
    """
    canvas = np.zeros((2 * reach + 1,) * 2, bool)
    if width == 1:
        steps = int(np.abs(end).max())
        at = np.arange(steps + 1)[:, None] * 2 * np.abs(end) + steps
        y, x = (reach + np.sign(end) * (at // (2 * steps))).T
        canvas[y, x] = True
        return canvas
    aside = end / np.hypot(*end)  # turned by a right angle, it is across the line
    near, far = ((width - 1) // 2, width // 2)
    low, high = (np.copysign(np.ceil(np.abs(n * aside) - 0.5), aside) for n in (near, far))
    corners = np.array([(high[1], -low[0]), (-low[1], high[0])])  # (y, x) on either side
    corners = np.concatenate([corners, corners[::-1] + end]) + reach
    for row in range(2 * reach + 1):
        crossed = [
            x for a, b in zip(corners, np.roll(corners, 1, axis=0), strict=True)
            for x in _crossings(a, b, row)
        ]  # fmt: skip
        if crossed:
            first, last = np.floor(min(crossed) + 0.5), np.ceil(max(crossed) - 0.5)
            canvas[row, int(first) : int(last) + 1] = True
    return canvas


def _crossings(a: NDArray[np.float64], b: NDArray[np.float64], row: int) -> list[float]:
    """Where the edge from ``a`` to ``b`` meets a row: nowhere, once, or in both of its ends."""
    if a[0] == b[0]:
        return [a[1], b[1]] if a[0] == row else []
    share = (row - a[0]) / (b[0] - a[0])
    return [a[1] + share * (b[1] - a[1])] if 0 <= share <= 1 else []


def reduced(canvas: NDArray[np.bool_], size: int) -> Bytes:
    """A white picture on black, reduced to ``(size, size)`` by Lanczos' filter of three lobes.

    Rounded to bytes after the rows and again after the columns, as Pillow does.
    """
    taps = _filter(len(canvas), size)  # (size, pixels)
    image = canvas.astype(np.int64) * 255
    for _ in range(2):
        image = (((image @ taps.T) + (1 << (_BITS - 1))) >> _BITS).clip(0, 255).T
    return image.astype(np.uint8, order="C")


def _filter(pixels: int, size: int) -> NDArray[np.int64]:
    scale = pixels / size
    centre = (np.arange(size)[:, None] + 0.5) * scale
    at = np.arange(pixels) + 0.5
    low, high = np.floor(centre - 3 * scale + 0.5), np.floor(centre + 3 * scale + 0.5)
    x = (at - centre) / scale
    taps = np.sinc(x) * np.sinc(x / 3) * (np.abs(x) < 3) * (at > low) * (at < high)
    taps /= taps.sum(axis=1, keepdims=True)
    return (np.copysign(np.floor(np.abs(taps) * (1 << _BITS) + 0.5), taps)).astype(np.int64)
