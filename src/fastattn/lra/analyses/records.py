"""Analyses of what runs have recorded; nothing is measured."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fastattn.lra.analyses.common import Analysis, Notes, Options, Runs
from fastattn.lra.analysis import mean_and_spread, step_seconds
from fastattn.lra.figures import draw_curves, draw_lines, draw_rows
from fastattn.lra.mixers import mixers_of
from fastattn.lra.results import Result, how_trained, recipe_of
from fastattn.lra.tables import Table, Value
from fastattn.nn import MECHANISMS

Lines: TypeAlias = dict[str, dict[float, float]]  # values at places, by label


def curves(runs: Runs, options: Options) -> Analysis:
    """Learning curves

    The table has the best validation; the CSV every point.
    """
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    points: list[Sequence[Value]] = []
    names = ("step", "seconds", "lr", "train_loss", "val_loss", "val_accuracy")
    shown: dict[str, Result] = {}
    for label, run in runs.items():
        with notes.of(label):
            if not run.history:
                raise ValueError("the run has no validation yet")
            if run.validation is None:
                raise ValueError("the run classifies nothing")
            shown[label] = run
            best, last = run.content["fit"]["best"], run.history[-1]
            test = None if run.test is None else 100 * run.test
            losses = float(last["train_loss"]), float(last["val_loss"])
            accuracies = 100 * best["val_accuracy"], best["step"], test
            rows.append((label, run.seed, last["step"], run.seconds, *losses, *accuracies))
            points += [(label, *(entry.get(name) for name in names)) for entry in run.history]
    columns = ["run", "seed", "steps", "training, s", "last training loss, nats"]
    columns += ["last validation loss, nats", "best validation accuracy, %", "at step"]
    floors = [run.content["floors"] for run in shown.values()]
    alike = all(floor == floors[0] for floor in floors)
    histories = {label: run.history for label, run in shown.items()}
    return Analysis(
        Table((*columns, "test accuracy, %"), rows).without_empty_columns(),
        notes,
        lambda path: draw_curves(path, histories, floors[0] if alike else {}),
        Table(("run", *names), points),
    )


def curriculum(runs: Runs, options: Options) -> Analysis:
    """Curriculum by length, on and off

    Each two runs that differ in their recipe alone, of which one begins with documents of some
    lengths: the best validation in as many seconds of training as the shorter of the two took, and
    of all of each.
    """
    notes = Notes(runs)
    on: dict[str, Result] = {}
    off: dict[tuple[Any, ...], Result] = {}
    for label, run in runs.items():
        with notes.of(label):
            if run.validation is None or not run.history:
                raise ValueError("the run has no validation yet")
            if any(phase.lengths for phase in recipe_of(run).phases):
                on[label] = run
            else:
                off.setdefault(_but_for_the_recipe(run), run)
    if not on:
        raise ValueError(
            "; ".join(["no run begins with documents of some lengths", *notes.lines()])
        )
    rows: list[Sequence[Value]] = []
    shown: dict[str, list[float | None]] = {"with short documents first": [], "without": []}
    for label, run in on.items():
        with notes.of(label):
            if (other := off.get(_but_for_the_recipe(run))) is None:
                raise ValueError("no run without a curriculum is like it otherwise")
            both = run, other
            seconds = min(x.history[-1]["seconds"] for x in both)
            best = [_best(x, seconds) for x in both] + [_best(x, math.inf) for x in both]
            tests = [None if x.test is None else 100 * x.test for x in both]
            rows.append((label, run.recipe, other.recipe, seconds, *best, *tests))
            for bars, value in zip(shown.values(), best[:2], strict=True):
                bars.append(value)
    columns = ["run", "on", "off", "time, s", "validation in that time, on, %", "off, %"]
    columns += ["of the whole run, on, %", "off, whole, %", "test, on, %", "test, off, %"]
    named = {f"validation accuracy, %\n{name}": values for name, values in shown.items()}
    return Analysis(
        Table(columns, rows).without_empty_columns(),
        notes,
        draw=lambda path: draw_rows(path, [str(row[0]) for row in rows], named),
    )


def _but_for_the_recipe(run: Result) -> tuple[Any, ...]:
    content = run.content
    about = run.task, run.mixer, content.get("positions"), content.get("pool"), run.protocol
    return *about, run.origin, run.device, run.seed, *how_trained(run)


def _best(run: Result, seconds: float) -> float | None:
    """Validation accuracy in percent, of what was trained for no longer."""
    found = [entry["val_accuracy"] for entry in run.history if entry["seconds"] <= seconds]
    return 100 * max(found) if found else None


def features(runs: Runs, options: Options) -> Analysis:
    """Features of linear attention

    Accuracy and the recorded time of a step, by number of features and variant: random ones of the
    Performer, and the maps of linear attention, which have as many as a head is wide.
    """
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    values: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for label, run in runs.items():
        with notes.of(label):
            if run.accuracy is None:
                raise ValueError("the run has no accuracy yet")
            m, variant, kind, rest = _features_of(run)
            seconds = step_seconds(
                run.history, sum(x["steps"] for x in run.content["recipe"]["phases"][:-1])
            )
            of = "validation" if run.test is None else "test"
            accuracy = 100 * run.accuracy
            time = None if seconds is None else 1000 * seconds
            rows.append((label, m, variant, kind, run.seed, accuracy, of, time, run.device))
            data = run.task, run.protocol, run.origin
            made = f"{variant}, {kind}, {of}", rest, *data
            facts = *made, run.recipe, run.device, *how_trained(run)
            values.setdefault(facts, {}).setdefault(m, []).append(accuracy)
    rows.sort(key=lambda row: (str(row[2]), row[1]))
    columns = ("run", "features", "variant", "kind", "seed", "accuracy, %", "of", "step, ms")
    lines = _means(values)
    return Analysis(
        Table((*columns, "device"), rows),
        notes,
        draw=lambda path: draw_lines(
            path,
            lines,
            x="features",
            y="accuracy, %, mean over seeds",
            ticks=sorted({m for line in lines.values() for m in line}),
        ),
    )


def _features_of(run: Result) -> tuple[int, str, str, str]:
    """Number of features, variant and kind; and the mixer's other options and other mixers.

    Raises:
        ValueError: It has none, or several that differ.
    """
    mixers = mixers_of(run.mixer)
    if {name for name, _ in mixers} == {"linear"}:
        maps = {own.get("feature_map", "elu") for _, own in mixers}
        recipe = recipe_of(run)
        found = {(recipe.width // recipe.heads, "linear", name) for name in maps}
    else:
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(MECHANISMS["performer"]).parameters.items()
        }
        performers = [defaults | own for name, own in mixers if name == "performer"]
        found = {(own["num_features"], own["variant"], own["kind"]) for own in performers}
    if not found:
        raise ValueError("the mixer has no performer, and is not linear attention alone")
    if len(found) > 1:
        raise ValueError("the features differ from block to block")
    (made,) = found
    rest = " ".join(_without_features(name, own) for name, own in mixers)
    return *made, "" if rest in ("performer", "linear") else rest


def _without_features(name: str, options: dict[str, Any]) -> str:
    told = {"num_features", "variant", "kind", "feature_map"}
    others = ",".join(f"{key}={x}" for key, x in options.items() if key not in told)
    return f"{name}:{others}" if others else name


def _means(values: Mapping[tuple[str, ...], Mapping[int, list[float]]]) -> Lines:
    """A line for each group of runs, by its first fact and those in which the groups differ."""
    differing = [i for i, facts in enumerate(zip(*values, strict=True)) if len(set(facts)) > 1]
    return {
        ", ".join([facts[0], *(facts[i] for i in differing if i and facts[i])]): {
            m: mean_and_spread(line[m])[0] for m in sorted(line)
        }
        for facts, line in values.items()
    }
