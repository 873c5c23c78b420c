"""What a recipe is: every number of a training run, frozen; a run stores its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from fastattn.lra.denoise import Denoise
from fastattn.lra.mixers import BODIES, default_pool, mixers_of, needs_positions

DECAYS = ("constant", "cosine", "linear", "rsqrt", "onecycle", "plateau")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training with one data set, batch size and learning rate.

    Args:
        steps: Optimiser steps.
        epochs: Instead of steps: passes through the training set, whatever its size.
        batch_size: Samples a step, over all devices.
        lr: Learning rate, after warm-up.
        decay: "constant"; "cosine" or "linear" to zero at the phase's end; "rsqrt": falling as one
            over the root of the step, from the warm-up's length on (Vaswani et al. 2017);
            "onecycle": from a 25th up to ``lr`` over three tenths of the phase, and down to a
            ten-thousandth of that 25th, by half cosines, as torch's (Smith and Topin 2017) with
            betas that do not cycle; or "plateau": halved when the validation loss has not improved
            for ``plateau_patience`` validations, and linear to zero over the last tenth.
        lengths: None for the run's own training set, or (shortest, longest): an additional set
            of ``num_samples`` samples of these lengths, made from the run's seed.
    """

    steps: int = 0
    epochs: float = 0
    batch_size: int
    lr: float
    decay: str = "constant"
    lengths: tuple[int, int] | None = None
    num_samples: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not self.lr > 0:
            raise ValueError(f"batch_size and lr must be positive, got {self}")
        if min(self.steps, self.epochs) < 0 or (self.steps > 0) == (self.epochs > 0):
            raise ValueError(f"one of steps and epochs must be given, and positive, got {self}")
        if self.decay not in DECAYS:
            raise ValueError(f"decay must be one of {', '.join(DECAYS)}, got {self.decay!r}")
        if (self.lengths is None) != (self.num_samples == 0):
            raise ValueError(f"lengths and num_samples must be given together, got {self}")

    def factor(self, step: int, warmup: float = 0) -> float:
        """The learning rate at a step of the phase, as a share of ``lr``, without the warm-up."""
        if self.decay == "cosine":
            return _cosine(1, 0, step / self.steps)
        if self.decay == "linear":
            return 1 - step / self.steps
        if self.decay == "rsqrt":
            flat = max(1, warmup)
            return math.sqrt(flat / max(flat, step + 1))
        if self.decay == "onecycle":
            top, end = 0.3 * self.steps - 1, max(1, self.steps - 1)
            if step < top:
                return _cosine(0.04, 1, step / top)
            return _cosine(1, 4e-6, (step - max(0, top)) / (end - max(0, top)))
        if self.decay == "plateau":
            return min(1.0, 10 * (1 - step / self.steps))
        return 1.0

    def steps_an_epoch(self, samples: int) -> int:
        """Of the run's training set, or of the phase's own."""
        return -(-(self.num_samples or samples) // self.batch_size)

    def on(self, samples: int) -> Phase:
        """The phase in steps, for a training set of this size."""
        if self.steps:
            return self
        steps = max(1, round(self.epochs * self.steps_an_epoch(samples)))
        return replace(self, steps=steps, epochs=0)


@dataclass(frozen=True)
class Recipe:
    """A run: the model's sizes, the phases, the optimiser (AdamW), and when to look and to stop.

    Some fields depend on the data: phases in epochs, shares of the run, ``max_length`` None and
    ``validate_every`` 0. :meth:`on` replaces them by numbers, and a run stores those.

    Args:
        task, protocol: The only ones it is for; None means any.
        mixer: What is taken when none is named; None means that one must be.
        positions: None means rotary for the mixer softmax, none for mixers that see the order of
            the tokens themselves (conv and the networks that read in order), and else sinusoidal.
        pool: None means "last" for networks that read forwards, and else "mean".
        width, depth, heads, ff, dropout, activation, embedding, norm, head: As in
            :class:`fastattn.lra.encoder.Encoder`.
        max_length: None means that of the data's longest document.
        penalty: Weight of structured self-attention's penalty in the loss.
        warmup: Steps over which the learning rate rises linearly, at the start of the run; below 1
            a share of the run.
        weight_decay: On matrices; not on biases, norms and other vectors.
        clip: Largest norm of the gradient; None leaves it alone.
        accumulate: Shares in which a batch is computed, one after another, where it does not fit
            in memory at once; the gradient is that of the whole batch.
        validate_every: Steps between validations, and checkpoints; 0 means an epoch of the first
            phase.
        patience: Stop after so many validations without an accuracy better by more than
            ``min_delta``; None never stops.
        augment: Whether the task's own augmentation is on (ListOps: operands are shuffled), or
            names of ``fastattn.lra.augmentations``: "d4", "d4:elements=3", "grey", "d4 grey".
        denoise: Denoising as a second task, or alone; None is none.
        bf16: Mixed precision with bfloat16, on a GPU.
        seed: Of initial values, order, augmentation, dropout and additional sets.
        stop_at: Cut the run off at this step; None runs all phases.
    """

    name: str
    phases: tuple[Phase, ...]
    task: str | None = None
    protocol: str | None = None
    mixer: str | None = None
    width: int = 256
    depth: int = 6
    heads: int = 4
    ff: int = 512
    dropout: float = 0.0
    activation: str = "relu"
    embedding: str = "table"
    norm: str = "layer"
    positions: str | None = None
    pool: str | None = None
    head: int = 0
    max_length: int | None = 2000
    penalty: float = 0.0
    warmup: float = 500
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float | None = 1.0
    accumulate: int = 1
    validate_every: int = 500
    patience: int | None = None
    min_delta: float = 0.0
    plateau_patience: int = 5
    augment: bool | str = True
    denoise: Denoise | None = None
    bf16: bool = True
    seed: int = 0
    stop_at: int | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}")
        if self.penalty and not self.classifies:
            raise ValueError(
                f"penalty needs a classification, got {self.penalty} and {self.denoise}"
            )
        if self.warmup < 0 or self.validate_every < 0:
            raise ValueError(
                f"warmup and validate_every must be at least 0, got {self.warmup} and "
                f"{self.validate_every}"
            )
        if self.warmup and self.phases[0].decay == "onecycle":
            raise ValueError(f"onecycle warms up by itself: warmup must be 0, got {self.warmup}")
        if all(phase.steps for phase in self.phases) and self.warmup >= max(1, self.steps):
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
        denoise = fields.get("denoise") and Denoise(**fields["denoise"])
        betas = tuple(fields["betas"])
        return cls(**{**fields, "phases": phases, "betas": betas, "denoise": denoise})

    def on(self, samples: int, longest: int) -> Recipe:
        """The recipe in steps and tokens, for a training set of so many samples.

        Args:
            samples: Of the training set.
            longest: Tokens of the longest document of all splits.

        Raises:
            ValueError: The warm-up is not shorter than the run.
        """
        phases = tuple(phase.on(samples) for phase in self.phases)
        steps = sum(phase.steps for phase in phases)
        return replace(
            self,
            phases=phases,
            max_length=longest if self.max_length is None else self.max_length,
            warmup=round(self.warmup * steps) if 0 < self.warmup < 1 else self.warmup,
            validate_every=self.validate_every or phases[0].steps_an_epoch(samples),
        )

    @property
    def steps(self) -> int:
        if not all(phase.steps for phase in self.phases):
            raise ValueError(f"{self.name} is given in epochs: Recipe.on makes steps of them")
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
        return phase.lr * phase.factor(min(step - start, phase.steps), self.warmup) * warm

    @property
    def classifies(self) -> bool:
        """False where the run only denoises."""
        return self.denoise is None or not self.denoise.alone

    def positions_for(self, mixer: str) -> str:
        if self.positions is not None:
            return self.positions
        if not needs_positions(mixer):
            return "none"
        return "rotary" if mixer == "softmax" else "sinusoidal"

    def pool_for(self, mixer: str) -> str:
        return self.pool or default_pool(mixer)

    def unused_for(self, mixer: str) -> list[str]:
        """Fields that say nothing of this network, or of how it is trained."""
        mixers = dict(mixers_of(mixer))
        body = bool(mixers.keys() & BODIES.keys())  # which has no blocks
        unused = {
            "depth": body,
            "heads": body or mixers.keys() <= {"long_conv", "gmlp", "conv"},
            "ff": body,
            "activation": body or (self.ff == 0 and "conv" not in mixers),
            "embedding": any(options.get("embedding") is False for options in mixers.values()),
            "norm": body,
            "min_delta": self.patience is None,
            "plateau_patience": all(phase.decay != "plateau" for phase in self.phases),
        }
        return [field for field, nothing in unused.items() if nothing]

    def at_most(self, steps: int) -> Recipe:
        """The same run, cut off after so many steps; its schedule is that of the full run."""
        if steps < 1:
            raise ValueError(f"max-steps must be at least 1, got {steps}")
        return replace(self, stop_at=steps)

    @property
    def last_step(self) -> int:
        return min(self.stop_at or self.steps, self.steps)


def _cosine(first: float, last: float, share: float) -> float:
    """From ``first`` to ``last`` along half a cosine, as share goes from 0 to 1."""
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * share))


def with_defaults(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as a result has it; fields that are newer than the result had their defaults."""
    newer = {field.name: field.default for field in fields(Recipe) if field.default is not MISSING}
    plain: dict[str, Any] = json.loads(json.dumps(newer))
    return plain | dict(recorded)
