"""Analyses of runs, each a table in Markdown and CSV, and a picture.

Some need only what a run has recorded; others its data, its best weights, or a GPU. What does not
apply to a run is said in a line and leaves the other runs alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from fastattn.lra.analyses.common import Analysis, Options, Runs
from fastattn.lra.analyses.lists import multiplication, roots
from fastattn.lra.analyses.models import memory, receptive_field, speed
from fastattn.lra.analyses.records import curriculum, curves, features
from fastattn.lra.results import Result, labels, read_result, with_origins
from fastattn.lra.tables import escape, write_text

__all__ = ["ANALYSES", "Analysis", "Options", "analyze"]

ANALYSES: dict[str, Callable[[Runs, Options], Analysis]] = {
    "roots": roots,
    "multiplication": multiplication,
    "reach": receptive_field,
    "memory": memory,
    "speed": speed,
    "curves": curves,
    "curriculum": curriculum,
    "features": features,
}


def analyze(
    paths: Sequence[Path], out: Path, what: Sequence[str] | None, options: Options
) -> list[str]:
    """Run analyses and write ``NAME.md``, ``NAME.csv`` and ``NAME.png``.

    Args:
        paths: Run directories.
        out: The directory to write to; files of the same names are replaced.
        what: Names in ``ANALYSES``; None means all that apply.
        options: How to measure.

    Returns:
        Lines for the user: what was written, and what does not apply and why.

    Raises:
        ValueError: An unknown name, a path that is no run, or no analysis applies.
    """
    unknown = [name for name in what or () if name not in ANALYSES]
    if unknown:
        raise ValueError(f"what must be of {', '.join(ANALYSES)}, got {', '.join(unknown)}")
    results = with_origins([read_result(path) for path in dict.fromkeys(paths)])
    runs = dict(zip(labels(results), results, strict=True))
    lines, written = [], False
    for name in dict.fromkeys(what or ANALYSES):
        try:
            analysis = ANALYSES[name](runs, options)
        except ValueError as error:
            lines.append(f"{name}: does not apply: {error}")
            continue
        notes = analysis.notes.lines()
        if not analysis.table.rows:
            lines.append(f"{name}: does not apply: {'; '.join(notes)}")
        else:
            lines += [f"{name}: {note}" for note in notes]
            files = _write(name, analysis, runs, out)
            lines.append(f"{name}: written to {out}: {', '.join(files)}")
            written = True
    if not written:
        raise ValueError("\n".join(["no analysis applies", *lines]))
    return lines


def _write(name: str, analysis: Analysis, runs: Runs, out: Path) -> list[str]:
    out.mkdir(parents=True, exist_ok=True)
    title, _, text = inspect.cleandoc(ANALYSES[name].__doc__ or "").partition("\n")
    about = [
        f"- {escape(label)}: {escape(_about(run))}\n"
        for label, run in runs.items()
        if any(row[0] == label for row in analysis.table.rows)
    ]
    parts = [f"# {title}\n", escape(text) + "\n", "".join(about), analysis.table.markdown()]
    parts.append("".join(f"- {escape(note)}\n" for note in analysis.notes.lines()))
    analysis.draw(out / f"{name}.png")
    parts.append(f"![{title}]({name}.png)\n")
    write_text(out / f"{name}.md", "\n".join(filter(None, parts)))
    write_text(out / f"{name}.csv", (analysis.points or analysis.table).csv())
    return [f"{name}.md", f"{name}.csv", f"{name}.png"]


def _about(run: Result) -> str:
    begun = f"begun with {run.begun}, " if run.begun else ""
    compiled = ", compiled" if run.compiled else ""
    return (
        f"{run.task}, {run.mixer}, recipe {run.recipe}, seed {run.seed}, protocol {run.protocol}, "
        f"{begun}data: {run.origin}, trained on {run.device}{compiled}, {run.state}"
    )
