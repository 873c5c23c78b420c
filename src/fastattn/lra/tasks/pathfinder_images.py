"""Pathfinder images: two dashed contours among distractors; do the two discs end one contour?

Task and generator: Linsley et al., arXiv:1805.08315, and their public program of 2019
(drewlinsley/pathfinder); its settings for the Long Range Arena: Tay et al., arXiv:2011.04006, and
google-research/long-range-arena. The dial: Sapkota and Bhattarai, arXiv:2311.18735.

Image i of a seed is drawn from a stream of random numbers of its own, in integers throughout, so
it is the same bytes for any number of threads, order of calls, backend and machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from fastattn import _native
from fastattn.lra.tasks import pathfinder_numpy
from fastattn.lra.tasks.pathfinder_sprites import (
    Bytes,
    Ints,
    contrasts,
    marker,
    ring,
    tables,
)

CONTOURS = {"easy": 6, "intermediate": 9, "hard": 14}
BACKENDS = ("native", "numpy")


@dataclass(frozen=True)
class Settings:
    """Every number that decides what an image looks like; lengths are in pixels.

    Args:
        size: Of a side.
        contour_length, distractor_length: Segments of a contour with markers, and of another.
        distractors: How many are tried; one that finds no place in five tries is left out.
        margins: What a segment keeps free around it, half a gap; an image draws one of them.
        padding: A border that no segment but a first one may touch.
        segment, thickness: Of a segment.
        marker_radius: Of a disc.
        seed_distance: Between the starts of the two contours.
        continuity: The higher, the straighter: a bend of pi / (2 · continuity) never occurs.
        snake_contrast: Brightness of distractors; a disc's is 1.
        paddle_contrast: Times ``snake_contrast``, of the two contours.
        oversampling: Canvas pixels a pixel, a side; a segment's thickness is a whole number of
            them.
    """

    size: int
    contour_length: int
    distractor_length: int
    distractors: int
    margins: tuple[int, ...]
    padding: int
    segment: int
    thickness: float
    marker_radius: float
    seed_distance: int
    continuity: float
    snake_contrast: float
    paddle_contrast: float = 1.0
    oversampling: int = 2

    def __post_init__(self) -> None:
        least = {"contour_length": 2, "distractor_length": 1, "distractors": 0, "padding": 1}
        least |= {"segment": 1, "seed_distance": 1, "oversampling": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.segment > 16:
            raise ValueError(f"segment must be at most 16, got {self.segment}")
        frames = 4 * self.seed_distance
        if not frames < self.size <= 1024:
            raise ValueError(
                f"size must be above {frames}, 4 · seed_distance, to 1024, got {self.size}"
            )
        if not self.margins or not all(1 <= margin <= 16 for margin in self.margins):
            raise ValueError(f"margins must be one or more of 1 to 16, got {self.margins}")
        width = self.thickness * self.oversampling
        if width < 1 or width != round(width):
            raise ValueError(
                f"thickness · oversampling must be a whole number from 1 on, got "
                f"{self.thickness} · {self.oversampling}"
            )
        for name in ("marker_radius", "continuity", "snake_contrast", "paddle_contrast"):
            if not 1 / 16 <= getattr(self, name) <= 16:
                raise ValueError(f"{name} must be 1/16 to 16, got {getattr(self, name)}")

    @classmethod
    def of(cls, size: int, difficulty: str, ease: float | None = None) -> Settings:
        """The settings of a set of the Long Range Arena.

        Args:
            size: 32, 64, 128 or 256.
            difficulty: ``"easy"``, ``"intermediate"`` or ``"hard"``: contours of 6, 9, 14
                segments. Pathfinder is 32 hard, Path-X is 128 hard.
            ease: None for the documented set. Of 128 pixels only, the dial of Path-X's curricula,
                0 to 3: 0 is like 64 pixels (margin 2, contrast .9, 22 div distractor_length
                distractors), 1 is harder (margins 2 and 3, .767, 70 div), and 1.5 has the
                contrast of the released files, .7.

        Raises:
            ValueError: An unknown size or difficulty, or an ease out of range or of another size.
        """
        if difficulty not in CONTOURS:
            raise ValueError(f"difficulty must be one of {', '.join(CONTOURS)}, got {difficulty!r}")
        contour = CONTOURS[difficulty]
        short = contour // 3

        def sized(distractors: int, **numbers: Any) -> Settings:
            return cls(size, contour, short, distractors // short, **numbers)

        if size == 32:
            settings = sized(
                20, margins=(1,), padding=1, segment=2, thickness=0.5, marker_radius=1.5,
                seed_distance=7, continuity=1.0, snake_contrast=2.0, paddle_contrast=0.75,
            )  # fmt: skip
        elif size == 64:
            settings = sized(
                22, margins=(1,), padding=1, segment=5, thickness=1.0, marker_radius=2.5,
                seed_distance=12, continuity=1.8, snake_contrast=0.8,
            )  # fmt: skip
        elif size == 128:
            settings = sized(
                35, margins=(2, 3), padding=1, segment=5, thickness=1.5, marker_radius=3.0,
                seed_distance=20, continuity=1.8, snake_contrast=0.9,
            )  # fmt: skip
        elif size == 256:
            settings = sized(
                30, margins=(3,), padding=22, segment=5, thickness=2.0, marker_radius=5.0,
                seed_distance=27, continuity=1.8, snake_contrast=1.0,
            )  # fmt: skip
        else:
            raise ValueError(f"size must be 32, 64, 128 or 256, got {size!r}")
        return settings if ease is None else settings._dialled(ease)

    def _dialled(self, ease: float) -> Settings:
        if self.size != 128:
            raise ValueError(
                f"ease is a dial of 128 pixels, got {ease} for {self.size}; leave it None"
            )
        if not 0 <= ease <= 3:
            raise ValueError(f"ease must be 0 to 3, got {ease}")
        few, many = 22 // self.distractor_length, 70 // self.distractor_length
        return replace(
            self,
            margins=tuple(range(2, round(2 + ease) + 1)),  # to even, as in its source
            snake_contrast=0.9 - ease * 0.4 / 3,
            distractors=ceil(few + ease * (many - few) - 1e-9),
        )

    def row(self, folder: str, name: str, index: int, label: int, margin: int) -> tuple[str, ...]:
        """The 11 columns of the public metadata for one image; the last counts contrasts."""
        shape = (self.continuity, self.contour_length, self.distractor_length)
        drawn = (self.segment, self.thickness, margin, 1)
        return tuple(map(str, (folder, name, index, label, *shape, *drawn)))


class Drawn(NamedTuple):
    """Images, and what is known of each of the N."""

    images: Bytes  # (N, size, size) grey levels; the brightest is 255
    labels: Bytes  # (N,): 1 if the discs are the two ends of one contour
    margins: Ints  # (N,)
    attempts: Ints  # (N,): pairs of contours begun until one was complete
    distractors: Ints  # (N,): that found a place


def draw_images(
    settings: Settings,
    first: int,
    count: int,
    *,
    seed: int,
    threads: int | None = None,
    backend: str | None = None,
) -> tuple[Bytes, Bytes]:
    """Images ``first`` to ``first + count - 1`` of a seed, and their labels.

    Args:
        settings: As from ``Settings.of``; ``dataclasses.replace(settings, distractors=0)`` draws
            the same contours and discs, alone.
        first: Not negative.
        count: N.
        seed: Any integer that is not negative.
        threads: Of the native backend; None means one a core. It cannot be interrupted: ask for
            seconds at a time, thousands of images of 32 pixels or hundreds of 128.
        backend: ``"native"`` or ``"numpy"``, about 100 times slower for the same images; None
            means the first that can run.

    Returns:
        ``(N, size, size)`` uint8 and ``(N,)`` uint8, 0 or 1, either with probability 1/2.

    Raises:
        ValueError: A number out of range, a backend that cannot run, or settings that leave no
            room for two contours.
    """
    drawn = draw(settings, first, count, seed=seed, threads=threads, backend=backend)
    return drawn.images, drawn.labels


def draw(
    settings: Settings,
    first: int,
    count: int,
    *,
    seed: int,
    threads: int | None = None,
    backend: str | None = None,
) -> Drawn:
    """``draw_images``, with what the metadata and the statistics need beside the labels."""
    for name, value, low in (("first", first, 0), ("count", count, 0), ("seed", seed, 0)):
        if value < low:
            raise ValueError(f"{name} must not be negative, got {value}")
    if first + count > 1 << 62:
        raise ValueError(f"first + count must be at most 2^62, got {first + count}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, or None for one a core, got {threads}")
    native, refusal = _native.load()
    if backend is None:
        backend = "numpy" if native is None else "native"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "native" and native is None:
        raise ValueError(f"backend 'native' cannot run: {refusal}")

    side = settings.size
    drawn = Drawn(
        np.empty((count, side, side), np.uint8),
        np.empty(count, np.uint8),
        *(np.empty(count, np.int32) for _ in range(3)),
    )
    kind = (side, settings.contour_length)  # else every set had the same labels
    key = int(np.random.SeedSequence(seed, spawn_key=kind).generate_state(1, np.uint64)[0])
    if backend == "native":
        _draw_native(native, settings, key, first, threads or os.cpu_count() or 1, drawn)
    else:
        pathfinder_numpy.draw(settings, key, first, drawn)
    if count and drawn.attempts.min() == 0:
        raise ValueError(
            f"settings leave no room for two contours of {settings.contour_length} segments: image "
            f"{first + int(drawn.attempts.argmin())} has none after many attempts"
        )
    return drawn


def _draw_native(
    native: Any, settings: Settings, key: int, first: int, threads: int, drawn: Drawn
) -> None:
    def address(array: Any) -> int:
        assert array.flags.c_contiguous
        return int(array.ctypes.data)

    sets = [tables(settings, margin) for margin in settings.margins]
    disc, around = marker(settings), ring(settings)
    native.pathfinder_draw(
        settings.size,
        settings.padding,
        settings.contour_length,
        settings.distractor_length,
        settings.distractors,
        *contrasts(settings),
        len(disc),
        address(disc),
        address(around),
        [
            native.PathfinderTables(x.margin, len(x.around), x.sprites.shape[-1],
                                    len(x.sprites), *map(address, x[1:]))
            for x in sets
        ],
        key, first, len(drawn.labels), threads, *map(address, drawn),
    )  # fmt: skip
