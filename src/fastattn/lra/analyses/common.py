"""What analyses have in common: their options, what they find, and what does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fastattn.lra.measure import powers_of_two
from fastattn.lra.results import Result
from fastattn.lra.tables import Table

SHORTEST = 512  # tokens, of the table of memory
Runs: TypeAlias = Mapping[str, Result]  # by label


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to measure.

    Args:
        data_dir: Instead of where the run's data was.
        batch_size: Of the steps that are measured; None means the recipe's.
        max_length: Tokens up to which memory is measured, at powers of two.
        lengths: Instead: the very lengths at which it is measured.
        memory_limit: GiB of the GPU that the measured steps may have; None means all.
        samples: Of the test set, for multiplied lists; None means all.
        steps: Training steps whose time is measured.
    """

    data_dir: Path | None = None
    batch_size: int | None = None
    max_length: int = 16384
    lengths: Sequence[int] | None = None
    memory_limit: float | None = None
    samples: int | None = None
    steps: int = 10

    def __post_init__(self) -> None:
        for name in ("batch_size", "samples", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ValueError(f"memory_limit must be positive, got {self.memory_limit}")
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            raise ValueError(f"lengths must be numbers of at least 1, got {self.lengths}")
        powers_of_two(SHORTEST, self.max_length)

    @property
    def measured_lengths(self) -> list[int]:
        """The lengths at which memory is measured, in order."""
        if self.lengths is not None:
            return sorted(set(self.lengths))
        return powers_of_two(SHORTEST, self.max_length)


class Notes:
    """What does not apply to some of the runs, and why."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.said: dict[str, list[str]] = {}

    def add(self, label: str, why: str) -> None:
        self.said.setdefault(why, []).append(label)

    @contextmanager
    def of(self, label: str) -> Iterator[None]:
        """An error of one run becomes a note, and leaves the other runs alone."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.add(label, str(error))

    def lines(self) -> list[str]:
        """Each once, with the runs that it is of unless it is of all."""
        return [
            why if len(who) == len(self.runs) else f"{why} ({'; '.join(who)})"
            for why, who in self.said.items()
        ]


@dataclass
class Analysis:
    """What an analysis has found; ``points`` go to the CSV where they are more than the table."""

    table: Table
    notes: Notes
    draw: Callable[[Path], None]
    points: Table | None = None
