"""Analyses of what runs have recorded; nothing is measured."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from fastattn.lra.analyses.common import Analysis, Notes, Options, Runs
from fastattn.lra.analysis import mean_and_spread, step_seconds
from fastattn.lra.figures import draw_curves, draw_lines
from fastattn.lra.mixers import mixers_of
from fastattn.lra.results import Result
from fastattn.lra.tables import Table, Value
from fastattn.nn import MECHANISMS


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
        Table(("run", *names), points),
        lambda path: draw_curves(path, histories, floors[0] if alike else {}),
    )


def features(runs: Runs, options: Options) -> Analysis:
    """Random features of the Performer

    Accuracy and the recorded time of a step, by number of features and variant.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(MECHANISMS["performer"]).parameters.items()
    }
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    values: dict[str, dict[float, list[float]]] = {}
    for label, run in runs.items():
        with notes.of(label):
            performers = [own for name, own in mixers_of(run.mixer) if name == "performer"]
            if not performers:
                raise ValueError("the mixer has no performer")
            if run.accuracy is None:
                raise ValueError("the run has no accuracy yet")
            own = defaults | performers[0]
            seconds = step_seconds(
                run.history, sum(x["steps"] for x in run.content["recipe"]["phases"][:-1])
            )
            of = "validation" if run.test is None else "test"
            accuracy = 100 * run.accuracy
            time = None if seconds is None else 1000 * seconds
            made = own["num_features"], own["variant"], own["kind"]
            rows.append((label, *made, run.seed, accuracy, of, time, run.device))
            line = values.setdefault(f"{own['variant']}, {own['kind']}, {of}", {})
            line.setdefault(own["num_features"], []).append(accuracy)
    rows.sort(key=lambda row: (str(row[2]), row[1]))
    lines = {
        name: {m: mean_and_spread(line[m])[0] for m in sorted(line)}
        for name, line in values.items()
    }
    columns = ("run", "features", "variant", "kind", "seed", "accuracy, %", "of", "step, ms")
    return Analysis(
        Table((*columns, "device"), rows),
        notes,
        draw=lambda path: draw_lines(
            path,
            lines,
            x="random features",
            y="accuracy, %, mean over seeds",
            ticks=sorted({m for line in lines.values() for m in line}),
        ),
    )
