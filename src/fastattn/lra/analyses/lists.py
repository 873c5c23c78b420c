"""Analyses of what a model has learnt of ListOps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastattn.lra import measure
from fastattn.lra.analyses.common import Analysis, Notes, Options, Runs
from fastattn.lra.analysis import KEEPS_VALUE, accuracy_by_root, listops_floors, repeated
from fastattn.lra.figures import draw_bars, draw_lines
from fastattn.lra.results import Result, recipe_of
from fastattn.lra.tables import Table, Value

COPIES = (1, 2, 3, 4)


def roots(runs: Runs, options: Options) -> Analysis:
    """Accuracy per root operator of ListOps

    Test accuracy of the best checkpoint for each first token, beside the best constant label for
    that token. A model at these floors has learnt to read one token.
    """
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    found: dict[str, dict[str, Any]] = {}
    for label, run in runs.items():
        with notes.of(label):
            _only(run, "listops")
            found[label], floor, accuracy, samples = _by_root(run, options)
            for name, operator in found[label].items():
                ours, least = 100 * operator["accuracy"], 100 * operator["floor"]
                rows.append((label, name, operator["samples"], ours, least, ours - least))
            above = 100 * (accuracy - floor)
            rows.append((label, "all", samples, 100 * accuracy, 100 * floor, above))
    names = list(dict.fromkeys(name for operators in found.values() for name in operators))

    def column(key: str) -> dict[str, list[float | None]]:
        return {
            label: [100 * operators[n][key] if n in operators else None for n in names]
            for label, operators in found.items()
        }

    columns = ("run", "root", "samples", "accuracy, %", "floor, %", "above it, points")
    return Analysis(
        Table(columns, rows),
        notes,
        draw=lambda path: draw_bars(
            path, names, column("accuracy"), y="test accuracy, %", marks=column("floor")
        ),
    )


def multiplication(runs: Runs, options: Options) -> Analysis:
    """Lists repeated one to four times

    Test accuracy on [MAX S ... S ], whose value is that of S: the same question at k·L + 2 tokens
    and one level deeper. MIN and MED keep the value too; a sum would not. No copies is the list as
    it is; one copy is an operator with one argument, which no list of the task has.
    """
    notes = Notes(runs)
    rows: list[Sequence[Value]] = []
    lines: dict[str, dict[float, float]] = {}
    floors: list[float] = []
    for label, run in runs.items():
        with notes.of(label):
            _only(run, "listops")
            encoder, recipe = measure.trained(run), recipe_of(run)
            split = measure.data_of(run, options.data_dir)["test"]
            split = split if options.samples is None else split.take(options.samples)
            floors.append(listops_floors(split)["majority"])
            batch_size = recipe.phases[-1].batch_size
            for operator, k in [(None, 0), *((o, k) for o in KEEPS_VALUE for k in COPIES)]:
                longer = repeated(split, operator, k) if operator else split
                accuracy, why = None, None
                try:
                    predicted = measure.predict(encoder, longer, batch_size, bf16=recipe.bf16)
                    accuracy = 100 * float((predicted == longer.labels).mean())
                except ValueError as error:
                    why = str(error)
                except RuntimeError as error:
                    if not measure.is_out_of_memory(error):
                        raise
                    why = measure.OUT_OF_MEMORY
                tokens = float(longer.lengths.mean()), int(longer.lengths.max())
                rows.append((label, operator or "none", k, *tokens, len(longer), accuracy, why))
                if accuracy is not None:
                    for name in (operator,) if operator else KEEPS_VALUE:
                        lines.setdefault(f"{label}, {name}", {})[k] = accuracy
    columns = ("run", "operator", "copies", "mean tokens", "longest", "samples", "accuracy, %")
    return Analysis(
        Table((*columns, "why not"), rows).without_empty_columns("accuracy, %"),
        notes,
        draw=lambda path: draw_lines(
            path,
            lines,
            x="copies of the list (0: as it is)",
            y="test accuracy, %",
            ticks=(0, *COPIES),
            floors={"majority": floors[0]} if len(set(floors)) == 1 else {},
        ),
    )


def _by_root(run: Result, options: Options) -> tuple[dict[str, Any], float, float, int]:
    """Of each operator, then the floor, accuracy and samples of all; as recorded if it is."""
    test = run.content.get("test", {})
    if options.data_dir is None and "by_root_operator" in test:
        floor = test["floors"]["root_operator"]
        return test["by_root_operator"], floor, test["accuracy"], test["samples"]
    encoder, recipe = measure.trained(run), recipe_of(run)
    split = measure.data_of(run, options.data_dir)["test"]
    predicted = measure.predict(encoder, split, recipe.phases[-1].batch_size, bf16=recipe.bf16)
    floor = listops_floors(split)["root_operator"]
    accuracy = float((predicted == split.labels).mean())
    return accuracy_by_root(split, predicted), floor, accuracy, len(split)


def _only(run: Result, task: str) -> None:
    if run.task != task:
        raise ValueError(f"it is an analysis of {task}, and the run is of {run.task}")
