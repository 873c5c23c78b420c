"""Recipes: every number of a training run, in Python, frozen; a run stores its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one data set, batch size and learning rate.

    Args:
        steps: Optimiser steps.
        batch_size: Samples a step.
        lr: Learning rate, after warm-up.
        decay: "constant"; "cosine" to zero at the phase's end; "plateau": halved when the
            validation loss has not improved for ``plateau_patience`` validations, and linear to
            zero over the last tenth.
        lengths: None for the run's own training set, or (shortest, longest): an additional set
            of ``num_samples`` samples of these lengths, made from the run's seed.
    """

    steps: int
    batch_size: int
    lr: float
    decay: str = "constant"
    lengths: tuple[int, int] | None = None
    num_samples: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or not self.lr > 0:
            raise ValueError(f"steps, batch_size and lr must be positive, got {self}")
        if self.decay not in ("constant", "cosine", "plateau"):
            raise ValueError(f"decay must be constant, cosine or plateau, got {self.decay!r}")
        if (self.lengths is None) != (self.num_samples == 0):
            raise ValueError(f"lengths and num_samples must be given together, got {self}")

    def factor(self, step: int) -> float:
        """The learning rate at a step of the phase, as a share of ``lr``."""
        if self.decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * step / self.steps))
        if self.decay == "plateau":
            return min(1.0, 10 * (1 - step / self.steps))
        return 1.0


@dataclass(frozen=True)
class Recipe:
    """A run: the model's sizes, the phases, the optimiser (AdamW), and when to look and to stop.

    Args:
        positions: None means rotary for the mixer softmax and sinusoidal for every other.
        warmup: Steps over which the learning rate rises linearly, at the start of the run.
        validate_every: Steps between validations, and checkpoints.
        patience: Stop after so many validations without a better accuracy; None never stops.
        augment: Whether the task's label-preserving augmentation is on.
        bf16: Mixed precision with bfloat16, on a GPU.
        seed: Of initial values, order, augmentation, dropout and additional sets.
        stop_at: Cut the run off at this step; None runs all phases.
    """

    name: str
    phases: tuple[Phase, ...]
    width: int = 256
    depth: int = 6
    heads: int = 4
    ff: int = 512
    dropout: float = 0.0
    positions: str | None = None
    max_length: int = 2000
    warmup: int = 500
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    validate_every: int = 500
    patience: int | None = None
    plateau_patience: int = 5
    augment: bool = True
    bf16: bool = True
    seed: int = 0
    stop_at: int | None = None

    def __post_init__(self) -> None:
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup must be shorter than the run's {self.steps} steps, got {self.warmup}: "
                "the learning rate would never reach its value"
            )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Recipe:
        """A recipe from what ``dataclasses.asdict`` made of it, after a passage through JSON."""
        phases = tuple(
            Phase(**{**phase, "lengths": phase["lengths"] and tuple(phase["lengths"])})
            for phase in fields["phases"]
        )
        return cls(**{**fields, "phases": phases, "betas": tuple(fields["betas"])})

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[int, int]:
        """The phase a global step is in, and the step at which that phase begins."""
        start = 0
        for i, phase in enumerate(self.phases):
            if step < start + phase.steps:
                return i, start
            start += phase.steps
        return len(self.phases) - 1, start - self.phases[-1].steps

    def lr_at(self, step: int) -> float:
        """The learning rate of a global step."""
        i, start = self.phase_at(step)
        phase = self.phases[i]
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return phase.lr * phase.factor(min(step - start, phase.steps)) * warm

    def positions_for(self, mixer: str) -> str:
        return self.positions or ("rotary" if mixer == "softmax" else "sinusoidal")

    def at_most(self, steps: int) -> Recipe:
        """The same run, cut off after so many steps; its schedule is that of the full run."""
        if steps < 1:
            raise ValueError(f"max-steps must be at least 1, got {steps}")
        return replace(self, stop_at=min(steps, self.steps))

    @property
    def last_step(self) -> int:
        return self.stop_at or self.steps


# Document 001's rotary Transformer for ListOps: 120 epochs of 96,000 samples.
LISTOPS_FULL = Recipe(
    name="listops-full",
    phases=(Phase(steps=180_000, batch_size=64, lr=1e-4, decay="plateau"),),
    warmup=1000,
    validate_every=1500,
    plateau_patience=5,
)

# Frozen, so that every mixer can be compared. Short lists first: there the operators are dense
# and are learned in minutes, where full-length lists alone stay at the root-operator floor.
LISTOPS_BUDGET = Recipe(
    name="listops-budget",
    phases=(
        Phase(steps=2500, batch_size=256, lr=1e-3, lengths=(100, 300), num_samples=96_000),
        Phase(steps=7500, batch_size=64, lr=7e-4, decay="cosine"),
    ),
)

# The same, at document 004's sizes (BERT-mini), whose BigBird has four random blocks.
LISTOPS_MINI = replace(LISTOPS_BUDGET, name="listops-mini", depth=4, ff=1024, dropout=0.1)

LISTOPS_DEMO = Recipe(
    name="listops-demo",
    phases=(Phase(steps=3000, batch_size=64, lr=2e-3, decay="cosine"),),
    width=64,
    depth=2,
    heads=4,
    ff=128,
    warmup=100,
    validate_every=250,
)

# Seconds on two CPU cores, for any task: does everything run?
SMOKE = Recipe(
    name="smoke",
    phases=(
        Phase(steps=10, batch_size=8, lr=1e-3),
        Phase(steps=10, batch_size=4, lr=1e-3, decay="cosine"),
    ),
    width=32,
    depth=2,
    heads=2,
    ff=64,
    dropout=0.1,
    warmup=5,
    validate_every=5,
)

RECIPES = {r.name: r for r in (SMOKE, LISTOPS_DEMO, LISTOPS_BUDGET, LISTOPS_MINI, LISTOPS_FULL)}
