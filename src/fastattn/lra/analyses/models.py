"""Analyses of a model as it is built: its reach, its memory, its size and its speed."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial

import torch

from fastattn.lra import measure
from fastattn.lra.analyses.common import SHORTEST, Analysis, Notes, Options, Runs
from fastattn.lra.analysis import step_seconds
from fastattn.lra.data import BatchStream
from fastattn.lra.encoder import reach
from fastattn.lra.figures import draw_lines
from fastattn.lra.results import recipe_of
from fastattn.lra.tables import Table, Value


def receptive_field(runs: Runs, options: Options) -> Analysis:
    """Receptive field

    How many tokens before and after a token can change it before the pooling: as the layers add
    up, and as the gradient of the model with initial values shows. What is farther apart than
    that, a document's order says nothing of.
    """
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    for label, run in runs.items():
        with notes.of(label):
            limits = reach(measure.model_of(run))
            seen = measure.measured_reach(run)
            if limits is None or seen is None:
                raise ValueError("the reach of the mixer has no limit")
            longest = run.content["data"].get("max_length")
            rows.append(
                (label, *limits, sum(limits) + 1, -min(seen), max(seen), len(seen), longest)
            )
            if len(seen) != sum(limits) + 1:
                notes.add(label, "rounding hides the gradient of the outermost tokens")
    columns = ["run", "before", "after", "tokens", "measured before", "measured after"]
    columns += ["measured tokens", "longest document"]
    return Analysis(Table(columns, rows).without_empty_columns(), notes)


def memory(runs: Runs, options: Options) -> Analysis:
    """Memory and time against length

    Peak memory and median time of a training step of a model made for n tokens, on full documents
    of n random tokens.
    """
    if not torch.cuda.is_available():
        raise ValueError("memory is not measured on a CPU: it needs a GPU")
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    lines: dict[str, dict[float, float]] = {}
    failed: dict[str, list[float]] = {}
    lengths = measure.powers_of_two(SHORTEST, options.max_length)
    name = torch.cuda.get_device_name()
    for label, run in runs.items():
        with notes.of(label):
            batch_size = options.batch_size or recipe_of(run).phases[-1].batch_size
            step_at = partial(measure.step_at_length, run, batch_size)
            steps = measure.by_length(step_at, lengths)
            for n, step in steps.items():
                if isinstance(step, str):
                    rows.append((label, n, batch_size, None, None, step, name))
                    if step == measure.OUT_OF_MEMORY:
                        failed.setdefault(label, []).append(n)
                else:
                    rows.append(
                        (label, n, batch_size, step.peak_mib, step.milliseconds, None, name)
                    )
                    lines.setdefault(label, {})[n] = step.peak_mib or 0.0
    columns = ("run", "tokens", "batch", "peak memory, MiB", "step, ms", "why not", "device")
    return Analysis(
        Table(columns, rows).without_empty_columns(),
        notes,
        draw=lambda path: draw_lines(
            path,
            lines,
            x="tokens of a document",
            y="peak memory of a training step, MiB",
            powers=True,
            ticks=lengths,
            failed=failed,
        ),
    )


def speed(runs: Runs, options: Options) -> Analysis:
    """Parameters and speed

    Recorded: the median over the stretches between validations of the run's last phase, loading
    included. Measured: the median synchronised step, after a warm-up, on batches of its training
    set, on this machine.
    """
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    for label, run in runs.items():
        with notes.of(label):
            recipe, encoder = recipe_of(run), measure.model_of(run)
            parameters = list(encoder.parameters())
            size = recipe.phases[-1].batch_size
            epoch = -(-run.content["data"]["samples"]["train"] // size)
            recorded = step_seconds(run.history, sum(x.steps for x in recipe.phases[:-1]))
            measured = None
            try:
                split = measure.data_of(run, options.data_dir)["train"]
            except (ValueError, OSError) as error:
                notes.add(label, f"not measured, for its data is not here: {error}")
            else:
                batch_size = options.batch_size or size
                stream = BatchStream(split, batch_size, seed=recipe.seed)
                batches = (stream[i] for i in range(measure.WARM_UP + options.steps))
                step = measure.time_steps(encoder.to(measure.device()), batches, bf16=recipe.bf16)
                here = step.milliseconds / 1000 * stream.steps_per_epoch
                measured = batch_size, step.milliseconds, here, step.peak_mib, _here()
            rows.append(
                (
                    label,
                    sum(p.numel() for p in parameters),
                    sum(p.numel() * p.element_size() for p in parameters),
                    size,
                    None if recorded is None else 1000 * recorded,
                    None if recorded is None else epoch * recorded,
                    run.device,
                    *(measured or (None,) * 5),
                )
            )
    columns = ["run", "parameters", "bytes", "batch", "recorded step, ms", "recorded epoch, s"]
    columns += ["recorded on", "measured batch", "measured step, ms", "measured epoch, s"]
    columns += ["measured peak, MiB", "measured on"]
    return Analysis(Table(columns, rows).without_empty_columns(), notes)


def _here() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return platform.processor() or "cpu"
