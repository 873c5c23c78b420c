"""Several seeds of one run: means, spread, and how many failed."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastattn.lra.analysis import mean_and_spread
from fastattn.lra.recipe import Recipe
from fastattn.lra.results import failure
from fastattn.lra.runs import OF_TEST, evaluate, fit, is_new, write

_DENOISING = "val_denoise_loss"
_MEASURES = ("val_accuracy", _DENOISING, "test_accuracy")


def fit_seeds(
    task_name: str,
    data_dir: Path,
    recipe: Recipe,
    mixer: str,
    out: Path,
    seeds: list[int],
    *,
    resume: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train with one seed after another, into ``out/seed-0`` and so on.

    A seed that fails (:func:`fastattn.lra.results.failure`) is stated, and the others go on.

    Args:
        task_name, data_dir, recipe, mixer, options: As in :func:`fastattn.lra.runs.fit`.
        out: A directory that is new, unless ``resume``.
        seeds: Each once; the recipe's own is not used.
        resume: Leave finished seeds as they are, go on with one that was begun, and begin others.

    Returns:
        The content of ``out/summary.json``, which is written after every seed.

    Raises:
        ValueError: No seed, one twice, or a directory that exists; and what ``fit`` raises.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be at least one, each once, got {seeds}")
    found = out.iterdir() if out.exists() else ()
    if not resume and not all(path.is_dir() and is_new(path) for path in found):
        raise ValueError(f"{out} is not empty: name another directory, or go on with --resume")
    for seed in seeds:
        run = out / f"seed-{seed}"
        begun = resume and run.exists()
        seeded = replace(recipe, seed=seed)
        fit(task_name, data_dir, seeded, mixer, run, resume=begun, **options)
        summary = _summarise(out)
    return summary


def evaluate_seeds(out: Path, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Test every seed, as :func:`fastattn.lra.runs.evaluate`; the summary is written again."""
    for run in _runs(out):
        evaluate(run, *arguments, **options)
    return _summarise(out)


def _runs(out: Path) -> list[Path]:
    """The runs of seeds that have an end, in the order of the seeds."""
    found = [run for run in out.glob("seed-*") if "fit" in _read(run)]
    return sorted(found, key=lambda run: int(run.name.removeprefix("seed-")))


def _read(run: Path) -> dict[str, Any]:
    path = run / "result.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return result


def _summarise(out: Path) -> dict[str, Any]:
    rows = []
    for run in _runs(out):
        result = _read(run)
        best = result["fit"]["best"]
        row = {"seed": result["seed"], "run": run.name, "failed": failure(result)}
        row |= {key: x for key, x in best.items() if key in ("step", *_MEASURES)}
        if "test" in result:
            row["test_accuracy"] = result["test"]["accuracy"]
        rows.append(row)
    good = [row for row in rows if row["failed"] is None]
    about = _read(_runs(out)[0]) if rows else {"task": None, "data": {}}
    summary = {
        "task": about["task"],
        "data": {key: x for key, x in about["data"].items() if key in OF_TEST},
        "seeds": len(rows),
        "failed": {str(row["seed"]): row["failed"] for row in rows if row["failed"]},
        **{key: _spread(good, rows, key) for key in _MEASURES if all(key in row for row in rows)},
        "runs": rows,
    }
    write(out / "summary.json", summary)
    return summary


def _spread(good: list[dict[str, Any]], rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Mean, standard deviation (n - 1) and range of the seeds that did not fail; mean of all."""
    values = [row[key] for row in good]
    mean, spread = mean_and_spread(values) if values else (None, None)
    everything = statistics.fmean(row[key] for row in rows)  # which may be no number
    return {
        "mean": mean,
        "spread": spread,
        "range": [min(values), max(values)] if values else None,
        "mean_with_failed": everything if math.isfinite(everything) else None,
    }
