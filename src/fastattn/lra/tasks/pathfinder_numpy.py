"""Pathfinder images by NumPy, one after another: what csrc/cpu/pathfinder.cpp does, step by step.

The same integers from the same tables in the same order, so the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastattn.lra.tasks.pathfinder_sprites import (
    UNIT,
    Bytes,
    Ints,
    Tables,
    contrasts,
    marker,
    ring,
    tables,
)

if TYPE_CHECKING:
    from fastattn.lra.tasks.pathfinder_images import Drawn, Settings

TRIES = 3  # of a first segment, and of a further one
CONTOUR_TRIES = 5  # of a distractor
ATTEMPTS = 1 << 22  # at two contours, before the settings are given up
TAKEN = 77  # of 255: what is kept free from here on is no place for a first segment
CLASH = 459  # 1.8 · 255: two segments' margins may overlap where they are grey
LEAST = 255 * UNIT // 10_000  # sum of the places' weights; below, there is no way on

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


class Stream:
    """SplitMix64 (Steele et al. 2014), begun at word ``index`` of the stream of ``key``."""

    def __init__(self, key: int, index: int) -> None:
        self.state = _mix(key + _GAMMA * index & _WORD)

    def below(self, n: int) -> int:
        """0 to n - 1, for n up to 2^32."""
        self.state = self.state + _GAMMA & _WORD
        return (_mix(self.state) >> 32) * n >> 32


class _Placed(NamedTuple):
    y: int
    x: int
    sprite: int


class _Contour:
    """A chain of segments; the last of them is not yet in the mask."""

    def __init__(self, y: int, x: int, degree: int, tables: Tables) -> None:
        self.pivot = tables.pivots[degree] + (y, x)
        self.direction = degree
        self.segments = [_Placed(y, x, int(tables.sprite_of[degree]))]


def draw(settings: Settings, key: int, first: int, drawn: Drawn) -> None:
    """Fill ``drawn`` with the images from ``first`` on; attempts are 0 where there is none."""
    for i in range(len(drawn.labels)):
        stream = Stream(key, first + i)
        label = stream.below(2)
        margin = settings.margins[stream.below(len(settings.margins))]
        scene = _Scene(settings, tables(settings, margin), stream)
        image, attempts, distractors = scene.draw(label)
        drawn.images[i] = image
        drawn.labels[i] = label
        drawn.margins[i] = margin
        drawn.attempts[i] = attempts
        drawn.distractors[i] = distractors


class _Scene:
    """One image in the making: the mask of what is kept free, and the same, a margin wider."""

    def __init__(self, settings: Settings, tables: Tables, stream: Stream) -> None:
        self.settings = settings
        self.tables = tables
        self.below = stream.below
        self.size = settings.size
        self.mask = self._bordered(settings.padding)  # (size, size)
        self.wide = self._bordered(settings.padding + tables.margin)

    def _bordered(self, width: int) -> Bytes:
        image = np.full((self.size, self.size), 255, np.uint8)
        image[width : self.size - width, width : self.size - width] = 0
        return image

    def draw(self, label: int) -> tuple[Bytes, int, int]:
        """The image, the attempts at its contours, and the distractors that found a place."""
        end = self.below(2)  # which contour the disc at a start marks
        pair, attempts = self._pair()
        ink = np.zeros((self.size, self.size), np.int64)
        if pair is None:
            return ink.astype(np.uint8), 0, 0
        target, distractor = contrasts(self.settings)
        for one in pair:
            self._ink(one, target, ink)
        disc = marker(self.settings)
        starts = pair[end].segments[0], pair[end if label else 1 - end].segments[-1]
        for y, x, _ in starts:
            to, of = self._cut(y, x, len(disc))
            np.maximum(ink[to], disc[of] * np.int64(UNIT), out=ink[to])
        found = [self._distractor() for _ in range(self.settings.distractors)]
        for contour in found:
            if contour is not None:
                self._ink(contour, distractor, ink)
        top = int(ink.max())
        image = (ink * 510 + top) // (2 * top)
        return image.astype(np.uint8), attempts, sum(x is not None for x in found)

    def _pair(self) -> tuple[tuple[_Contour, _Contour] | None, int]:
        blank = self.mask.copy(), self.wide.copy()
        for attempt in range(1, ATTEMPTS + 1):
            self.mask[:], self.wide[:] = blank
            one = self._first()
            two = one and self._second(one)
            if one and two and self._grown(one, two):
                self._keep_free(two.segments[-1])
                return (one, two), attempt
        return None, 0

    def _grown(self, one: _Contour, two: _Contour) -> bool:
        return all(
            self._grow(contour)
            for _ in range(self.settings.contour_length - 1)
            for contour in (one, two)
        )

    def _first(self) -> _Contour | None:
        for _ in range(TRIES):
            degree = self.below(360)
            y, x, height, width = map(int, self.tables.starts[degree])
            if height * width == 0:
                return None
            down, across = divmod(self.below(height * width), width)
            if self._fits(y + down, x + across, degree):
                return _Contour(y + down, x + across, degree, self.tables)
        return None

    def _second(self, one: _Contour) -> _Contour | None:
        for _ in range(TRIES):
            degree, around = self.below(360), self.below(360)
            dy, dx = ring(self.settings)[around].tolist()
            y, x = one.segments[0].y + dy, one.segments[0].x + dx
            if self._fits(y, x, degree):
                return _Contour(y, x, degree, self.tables)
        return None

    def _fits(self, y: int, x: int, degree: int) -> bool:
        ends = np.add([self.tables.heads[degree], self.tables.pivots[degree]], (y, x))
        return bool((ends >= 0).all() and (ends < self.size).all())

    def _distractor(self) -> _Contour | None:
        for _ in range(CONTOUR_TRIES):
            contour = self._seed()
            if contour is None:
                continue
            before = self.mask.copy(), self.wide.copy()
            if all(self._grow(contour) for _ in range(self.settings.distractor_length - 1)):
                self._keep_free(contour.segments[-1])
                return contour
            self.mask, self.wide = before
        return None

    def _seed(self) -> _Contour | None:
        taken = self.mask >= TAKEN
        if np.count_nonzero(~taken) * 100 < self.size**2:
            return None
        taken[[0, -1]] = taken[:, [0, -1]] = True
        for _ in range(TRIES):
            degree = self.below(360)
            start, stop = self.tables.footprint_at[degree : degree + 2]
            if start == stop:
                return None
            free = np.argwhere(~self._covered(taken, self.tables.footprint[start:stop]))
            if len(free) == 0:
                return None
            y, x = free[self.below(len(free))].tolist()
            if self._fits(y, x, degree):
                return _Contour(y, x, degree, self.tables)
        return None

    def _covered(self, taken: np.ndarray, footprint: Ints) -> np.ndarray:
        """Where a footprint would lie on a pixel that is taken; outside there are none."""
        reach = int(np.abs(footprint).max())
        padded = np.pad(taken, reach)
        covered = np.zeros_like(taken)
        for y, x in (footprint + reach).tolist():
            covered |= padded[y : y + self.size, x : x + self.size]
        return covered

    def _grow(self, contour: _Contour) -> bool:
        """Add a segment; only then the one before it is kept free."""
        table = self.tables
        pivot = contour.pivot + table.steps[contour.direction]
        places = pivot + table.around  # (k, 2)
        inside = ((places >= 0) & (places < self.size)).all(axis=1)
        y, x = np.where(inside[:, None], places, 0).T
        weights = table.weights[contour.direction] * (255 - self.wide[y, x].astype(np.int64))
        sums = np.cumsum(weights * inside)
        if sums[-1] < LEAST:
            return False
        for _ in range(TRIES):
            k = int(np.searchsorted(sums, self.below(int(sums[-1])), side="right"))
            direction = 360 + k
            segment = _Placed(int(places[k, 0]), int(places[k, 1]), int(table.sprite_of[direction]))
            if self._clear(segment):
                self._keep_free(contour.segments[-1])
                contour.segments.append(segment)
                contour.pivot, contour.direction = pivot, direction
                return True
        return False

    def _cut(self, y: int, x: int, width: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """The part of the image under a sprite at (y, x), and the part of the sprite in it."""
        low = (y - width // 2, x - width // 2)
        spans = [(max(at, 0), max(min(at + width, self.size), 0), at) for at in low]
        to_y, to_x = (slice(a, b) for a, b, _ in spans)
        of_y, of_x = (slice(a - at, b - at) for a, b, at in spans)
        return (to_y, to_x), (of_y, of_x)

    def _clear(self, segment: _Placed) -> bool:
        to, of = self._cut(segment.y, segment.x, self.tables.sprites.shape[-1])
        both = self.mask[to].astype(np.int64) + self.tables.sprites[segment.sprite, 1][of]
        return bool(both.max() < CLASH)

    def _keep_free(self, segment: _Placed) -> None:
        to, of = self._cut(segment.y, segment.x, self.tables.sprites.shape[-1])
        _, near, far = self.tables.sprites[segment.sprite]
        np.maximum(self.mask[to], near[of], out=self.mask[to])
        np.maximum(self.wide[to], far[of], out=self.wide[to])

    def _ink(self, contour: _Contour, contrast: int, ink: np.ndarray) -> None:
        for y, x, sprite in contour.segments:
            to, of = self._cut(y, x, self.tables.sprites.shape[-1])
            grey = self.tables.sprites[sprite, 0][of] * np.int64(contrast)
            np.maximum(ink[to], grey, out=ink[to])
