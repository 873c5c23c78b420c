"""A page of the results of many runs, with the published figures beside them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastattn.lra import published
from fastattn.lra.analysis import mean_and_spread
from fastattn.lra.figures import draw_curves
from fastattn.lra.recipe import Recipe
from fastattn.lra.results import Result, labels, read_result, with_origins
from fastattn.lra.tables import Table, Value, escape, shown, write_text
from fastattn.lra.tasks import TASKS

_OURS = """\
One row is one configuration: mixer, recipe, data, device, and what the run began with. Accuracies \
are in percent, of the best checkpoint unless the row says of the last; with several seeds they \
are the mean ± the sample standard deviation over those that have one. A seed has failed when it \
has no result, diverged, or is at chance: not more than two standard errors above the best \
constant label (the floor "majority"). Steps are those made, and a checkpoint is the beginning of \
the best one's SHA-256: of several seeds each, in their order, unless they are the same. \
Data "by its fingerprint" is that of a run which has recorded its origin. The reach of \
convolutions, where recorded, is how many tokens before and after can change one.
"""
_THEIRS = """\
Figures of others, from the source in each row, in percent. They differ from ours, and from each \
other, in tokens, lengths, validation, budget and pooling: they are no row of the table above. \
Data and training are as far as papers and code are known to say; where the two differ, as LRA's \
do, they are the code's.
"""
_THEIR_SPEED = """\
Of LRA's paper, at 4K tokens on TPUv3: no row is comparable with a time or a memory above.
"""

_STUCK = re.compile(r"stuck at chance: (.* from nothing \([\d.]+\))\..*", re.DOTALL)


class Found(NamedTuple):
    """Results under a directory, and why other files named result.json are none."""

    results: list[Result]
    skipped: dict[Path, str]


def find_results(directory: Path) -> Found:
    """Every result.json under a directory, at any depth.

    Raises:
        ValueError: It is no directory, or has no result at all.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    found = Found([], {})
    for path in sorted(directory.rglob("result.json")):
        try:
            found.results.append(read_result(path))
        except (ValueError, OSError) as error:
            found.skipped[path] = str(error).removeprefix(f"{path} is ")
    if not found.results:
        damaged = "".join(f"\n{path}: {why}" for path, why in found.skipped.items())
        raise ValueError(f"no result.json of a run under {directory}{damaged}")
    return Found(with_origins(found.results), found.skipped)


def write_report(directory: Path, page: Path) -> Found:
    """Write the page, beside it a CSV with a row a run, and the curves of each task.

    Args:
        directory: Where the runs are.
        page: The Markdown file; ``PAGE.csv`` and ``PAGE-TASK.png`` get its name.

    Raises:
        ValueError: There are no results, or the page's name does not end in ``.md``.
    """
    if page.suffix != ".md":
        raise ValueError(f"the page must be a file that ends in .md, got {page}")
    found = find_results(directory)
    page.parent.mkdir(parents=True, exist_ok=True)
    parts = ["# Long Range Arena: results\n", _OURS]
    for task in TASKS:
        results = [result for result in found.results if result.task == task]
        if results:
            parts += _section(task, results, page)
    parts += [
        "## Published speed and memory\n",
        _THEIR_SPEED,
        published.published_speed().markdown(),
    ]
    if found.skipped:
        lines = [
            f"- {escape(str(path.relative_to(directory)))}: {escape(why)}\n"
            for path, why in found.skipped.items()
        ]
        parts += ["## Skipped\n", "".join(lines)]
    write_text(page.with_suffix(".csv"), every_run(found.results, directory).csv())
    write_text(page, "\n".join(parts))
    return found


def _section(task: str, results: Sequence[Result], page: Path) -> list[str]:
    title = escape(task)
    parts = [f"## {title}\n", summary(results).markdown()]
    said: dict[str, list[str]] = {}
    for label, result in zip(labels(results), results, strict=True):
        for remark in _remarks(result):
            said.setdefault(remark, []).append(label)
    if said:
        lines = [escape(f"{remark} ({'; '.join(who)})") for remark, who in said.items()]
        parts.append("".join(f"- {line}\n" for line in lines))
    trained = [result for result in results if result.validation is not None]
    if trained:
        picture = page.with_name(f"{page.stem}-{task}.png")
        histories = {
            label: result.history for label, result in zip(labels(trained), trained, strict=True)
        }
        floors = trained[0].content["floors"]
        alike = all(result.content["floors"] == floors for result in trained)
        draw_curves(picture, histories, floors if alike else {})
        parts.append(f"![Learning curves of {title}](<{picture.name}>)\n")
    if task in published.TASKS:
        theirs = published.published(task).markdown()
        parts += [f"### Published figures of {title}\n", _THEIRS, theirs]
    return parts


def _unusual(result: Result, field: str) -> str | None:
    """What stands in a field of the recipe, if it is not what recipes have there by themselves."""
    value = result.content["recipe"].get(field)
    return None if value == getattr(Recipe, field) else value


def summary(results: Sequence[Result]) -> Table:
    """A row a configuration: its seeds, their mean and spread, and everything needed to judge it.

    Args:
        results: Of one task.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.key, []).append(result)
    columns = (
        "mixer",
        "positions",
        "reach",
        "begun with",
        "recipe",
        "norm",
        "embedding",
        "protocol",
        "data",
        "seeds",
        "failed seeds",
        "steps",
        "test accuracy, %",
        "validation accuracy, %",
        "floors, %",
        "parameters",
        "training, s",
        "peak memory, MiB",
        "device",
        "compiled",
        "checkpoint",
        "state",
    )
    rows: list[Sequence[Value]] = []
    for unordered in groups.values():
        group = sorted(unordered, key=lambda result: result.seed)
        first = next((result for result in group if result.test is not None), group[0])
        states = Counter(result.state for result in group)
        failed = [str(result.seed) for result in group if result.failure]
        rows.append(
            (
                first.mixer,
                first.content.get("positions"),
                "{} + {}".format(*first.reach) if first.reach else None,
                first.begun,
                first.recipe,
                *(_unusual(first, field) for field in ("norm", "embedding")),
                first.protocol,
                first.origin,
                ", ".join(str(result.seed) for result in group),
                f"{len(failed)} of {len(group)}" + (f" ({', '.join(failed)})" if failed else ""),
                _each([result.steps for result in group]),
                _percent([result.test for result in group]),
                _percent([result.validation for result in group]),
                _floors(first.floors, tested=first.test is not None),
                first.parameters,
                _mean([result.seconds for result in group]),
                _most([result.peak_memory for result in group]),
                first.device,
                "yes" if first.compiled else None,
                _each([_digits(result) for result in group]),
                ", ".join(f"{n} {state}" for state, n in states.items()),
            )
        )
    kept = ["mixer", "recipe", "protocol", "data", "seeds", "failed seeds", "steps"]
    kept += ["test accuracy, %", "checkpoint"]
    return Table(columns, rows).without_empty_columns(*kept)


def every_run(results: Sequence[Result], directory: Path) -> Table:
    """A row a run, with its place under the directory, for programs; accuracies are shares."""
    columns = ["run", "task", "mixer", "recipe", "protocol", "data", "seed", "failed", "state"]
    columns += ["steps", "checkpoint"]
    columns += ["test", "validation", "majority", "parameters", "seconds", "peak_mib", "device"]
    columns += ["begun_with", "compiled", "reach_before", "reach_after"]
    rows = [
        (
            result.path.relative_to(directory).as_posix(),
            result.task,
            result.mixer,
            result.recipe,
            result.protocol,
            result.origin,
            result.seed,
            result.failure or "no",
            result.state,
            result.steps,
            _digits(result),
            result.test,
            result.validation,
            result.floors["majority"],
            result.parameters,
            result.seconds,
            result.peak_memory,
            result.device,
            result.begun,
            "yes" if result.compiled else "no",
            *(result.reach or (None, None)),
        )
        for result in results
    ]
    return Table(columns, rows)


def _remarks(result: Result) -> list[str]:
    found: list[str] = list(result.content.get("fit", {}).get("warnings", []))
    if result.failure is None:
        found = [_STUCK.sub(r"at chance for a time: \1; later it was not", x) for x in found]
    if result.content.get("test", {}).get("data_of_the_run") is False:
        found.append("the test set is not that of the run's training data")
    if result.content.get("test", {}).get("checkpoint") == "last":
        found.append("the test is of the last checkpoint, as in the protocol, not of the best")
    if result.content["data"].get("protocol_differs"):
        data = result.content["data"]
        found.append(f"protocol {data['protocol']}: {data['protocol_differs']}")
    if result.content["data"].get("stand_in"):
        found.append(f"stand-in, not LRA: {result.content['data']['stand_in']}")
    return found


def _digits(result: Result) -> str | None:
    return None if result.checkpoint is None else result.checkpoint[:12]


def _each(values: Sequence[Value]) -> Value:
    """Of each seed, or once if it is the same of all."""
    return values[0] if len(set(values)) == 1 else ", ".join(map(shown, values))


def _percent(values: Sequence[float | None]) -> Value:
    known = [100 * value for value in values if value is not None]
    if not known:
        return None
    mean, spread = mean_and_spread(known)
    some = "" if len(known) == len(values) else f" ({len(known)} of {len(values)})"
    return mean if spread is None and not some else f"{_plus_minus(mean, spread)}{some}"


def _plus_minus(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def _floors(floors: dict[str, float], *, tested: bool) -> str:
    shown = ", ".join(f"{name} {100 * floor:.2f}" for name, floor in floors.items())
    return shown if tested else f"{shown} (validation)"


def _mean(values: Sequence[float | None]) -> Value:
    known = [value for value in values if value is not None]
    return round(mean_and_spread(known)[0]) if known else None


def _most(values: Sequence[int | None]) -> Value:
    return max((value for value in values if value is not None), default=None)
