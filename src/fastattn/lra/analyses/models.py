"""Analyses of a model as it is built: its reach, its memory, its size and its speed."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fastattn.lra import measure
from fastattn.lra.analyses.common import Analysis, Notes, Options, Runs
from fastattn.lra.analysis import step_seconds
from fastattn.lra.data import BatchStream
from fastattn.lra.encoder import reach
from fastattn.lra.figures import draw_intervals, draw_panels, draw_rows
from fastattn.lra.results import Result, recipe_of
from fastattn.lra.tables import Table, Value


def receptive_field(runs: Runs, options: Options) -> Analysis:
    """Receptive field

    How many tokens before and after a token can change it before the pooling: as the layers add
    up, and as the gradient of the model with initial values shows. What is farther apart than
    that, a document's order says nothing of.
    """
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    added: dict[str, tuple[int, int]] = {}
    measured: dict[str, tuple[int, int]] = {}
    for label, run in runs.items():
        with notes.of(label):
            limits = reach(measure.model_of(run))
            seen = measure.measured_reach(run)
            if limits is None or seen is None:
                raise ValueError("the reach of the mixer has no limit")
            longest = run.content["data"].get("max_length")
            added[label], measured[label] = limits, (-min(seen), max(seen))
            rows.append((label, *limits, sum(limits) + 1, *measured[label], len(seen), longest))
            if len(seen) != sum(limits) + 1:
                notes.add(label, "rounding hides the gradient of the outermost tokens")
    columns = ["run", "before", "after", "tokens", "measured before", "measured after"]
    columns += ["measured tokens", "longest document"]
    return Analysis(
        Table(columns, rows).without_empty_columns(),
        notes,
        draw=lambda path: draw_intervals(
            path, added, measured, x="tokens before and after that can change one"
        ),
    )


def memory(runs: Runs, options: Options) -> Analysis:
    """Memory and time against length

    Peak memory and time (the median of the shortest of three) of a training step of a model made
    for n tokens, on full documents of n random tokens.
    """
    limit = options.memory_limit
    if not torch.cuda.is_available():
        also = "" if limit is None else ", and so does a limit of it"
        raise ValueError(f"memory is not measured on a CPU: it needs a GPU{also}")
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    peaks: dict[str, dict[float, float]] = {}
    times: dict[str, dict[float, float]] = {}
    failed: dict[str, list[float]] = {}
    lengths = options.measured_lengths
    where = limit, torch.cuda.get_device_name()
    for label, run in runs.items():
        with notes.of(label):
            batch_size = options.batch_size or recipe_of(run).phases[-1].batch_size
            step_at = partial(measure.step_at_length, run, batch_size)
            with measure.memory_limited(limit):
                steps = measure.by_length(step_at, lengths)
            for n, step in steps.items():
                if isinstance(step, str):
                    rows.append((label, n, batch_size, None, None, step, *where))
                    if step == measure.OUT_OF_MEMORY:
                        failed.setdefault(label, []).append(n)
                    continue
                rows.append((label, n, batch_size, step.peak_mib, step.milliseconds, None, *where))
                peaks.setdefault(label, {})[n] = step.peak_mib or 0.0
                times.setdefault(label, {})[n] = step.milliseconds
            if limit is not None:
                notes.add(label, f"memory runs out at a limit of {limit:g} GiB, not at the GPU's")
    columns = ["run", "tokens", "batch", "peak memory, MiB", "step, ms", "why not"]
    columns += ["memory limit, GiB", "device"]
    panels = {"peak memory of a training step, MiB": peaks, "training step, ms": times}
    return Analysis(
        Table(columns, rows).without_empty_columns(),
        notes,
        draw=lambda path: draw_panels(
            path,
            panels,
            x="tokens of a document",
            powers=True,
            ticks=lengths,
            failed=failed,
        ),
    )


def speed(runs: Runs, options: Options) -> Analysis:
    """Parameters and speed

    Recorded: the median over the stretches between validations of the run's last phase, loading
    included; of a finished run the training until it stopped, without the validations. Measured:
    the median synchronised step over batches of its training set, each the shortest of three, after
    one that is not counted, on this machine.
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
            end = (run.seconds, run.steps) if run.finished else (None, None)
            if not run.finished and run.steps is not None:
                why = f"{run.state}: its time of training and last step are no finished run's"
                notes.add(label, why)
            measured = None
            try:
                split = measure.data_of(run, options.data_dir)["train"]
            except (ValueError, OSError) as error:
                notes.add(label, f"not measured, for its data is not here: {error}")
            else:
                batch_size = options.batch_size or size
                stream = BatchStream(split, batch_size, seed=recipe.seed)
                batches = [stream[i] for i in range(options.steps)]
                step = measure.time_steps(encoder.to(measure.device()), batches, bf16=recipe.bf16)
                here = step.milliseconds / 1000 * stream.steps_per_epoch
                measured = batch_size, step.milliseconds, here, step.peak_mib, _here()
                for why in _not_timed(run):
                    notes.add(label, f"the measured step is not that of the run, {why}")
            rows.append(
                (
                    label,
                    sum(p.numel() for p in parameters),
                    sum(p.numel() * p.element_size() for p in parameters),
                    size,
                    None if recorded is None else 1000 * recorded,
                    None if recorded is None else epoch * recorded,
                    run.device,
                    None if run.test is None else 100 * run.test,
                    *end,
                    *(measured or (None,) * 5),
                )
            )
    columns = ["run", "parameters", "bytes", "batch", "recorded step, ms", "recorded epoch, s"]
    columns += ["recorded on", "test accuracy, %", "training, s", "stopped at step"]
    columns += ["measured batch", "measured step, ms", "measured epoch, s"]
    columns += ["measured peak, MiB", "measured on"]
    table = Table(columns, rows).without_empty_columns()
    names = [str(row[0]) for row in rows]
    return Analysis(table, notes, draw=lambda path: draw_rows(path, names, _bars(table)))


def _bars(table: Table) -> dict[str, list[Any]]:
    """Of the table of speeds: the step, as measured or else as recorded, and the parameters."""
    found = {name: [row[i] for row in table.rows] for i, name in enumerate(table.columns)}
    bars: dict[str, list[Any]] = {}
    for kind, batches in (("measured", "measured batch"), ("recorded", "batch")):
        steps = found.get(f"{kind} step, ms")
        if steps and not bars:
            where = {x for x, step in zip(found[f"{kind} on"], steps, strict=True) if step}
            of = {x for x, step in zip(found[batches], steps, strict=True) if step}
            batch = f"batch {of.pop()}" if len(of) == 1 else "of different batches"
            place = where.pop() if len(where) == 1 else "different devices"
            bars[f"{kind} step, ms\n{batch}, {place}"] = steps
    return bars | {"parameters": found["parameters"]}


def _not_timed(run: Result) -> list[str]:
    """What a step of the run had, and one that is measured has not."""
    recipe = recipe_of(run)
    alone = recipe.denoise is not None and recipe.denoise.alone
    devices = run.content.get("fit", {}).get("devices", 1)
    had = {
        "which only denoises" if alone else "which also denoises": recipe.denoise is not None,
        "which has a penalty": recipe.penalty > 0,
        "which is compiled": run.compiled,
        f"which takes a batch in {recipe.accumulate} shares": recipe.accumulate > 1,
        f"which is on {devices} devices": devices > 1,
    }
    return [why for why, so in had.items() if so]


def _here() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return platform.processor() or "cpu"
