"""Analyses of what runs have recorded; nothing is measured."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fastattn.lra.analyses.common import Analysis, Notes, Options, Runs
from fastattn.lra.analysis import mean_and_spread, step_seconds
from fastattn.lra.figures import draw_curves, draw_lines
from fastattn.lra.mixers import mixers_of
from fastattn.lra.results import Result, how_trained, recipe_of
from fastattn.lra.tables import Table, Value
from fastattn.nn import MECHANISMS

Lines: TypeAlias = dict[str, dict[float, float]]  # values at places, by label


def curves(runs: Runs, options: Options) -> Analysis:
    """Learning curves

    The table has the best validation, and of several runs the best in as much training as the
    shortest took; the CSV has every point.
    """
    notes = Notes(runs)
    least = min((run.history[-1]["seconds"] for run in runs.values() if run.history), default=0.0)
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
            early = [x["val_accuracy"] for x in run.history if x["seconds"] <= least]
            soon = 100 * max(early) if early and len(runs) > 1 else None
            rows.append((label, run.seed, last["step"], run.seconds, *losses, *accuracies, soon))
            points += [(label, *(entry.get(name) for name in names)) for entry in run.history]
    columns = ["run", "seed", "steps", "training, s", "last training loss, nats"]
    columns += ["last validation loss, nats", "best validation accuracy, %", "at step"]
    within = f"best validation accuracy within {least:.0f} s, %"
    floors = [run.content["floors"] for run in shown.values()]
    alike = all(floor == floors[0] for floor in floors)
    histories = {label: run.history for label, run in shown.items()}
    return Analysis(
        Table((*columns, "test accuracy, %", within), rows).without_empty_columns(),
        notes,
        lambda path: draw_curves(path, histories, floors[0] if alike else {}),
        Table(("run", *names), points),
    )


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
