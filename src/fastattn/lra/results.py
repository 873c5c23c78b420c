"""Reading what runs have left: result.json of this version and of older ones, which have less."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastattn.lra.analysis import at_floor, configuration
from fastattn.lra.mixers import mixers_of
from fastattn.lra.protocols import DEFAULT, PROTOCOLS
from fastattn.lra.recipe import Recipe, with_defaults
from fastattn.lra.recipes import RECIPES
from fastattn.lra.tasks import TASKS

# what a validation says, unless the run classifies nothing
CURVES = {"train_loss", "val_loss", "val_accuracy"}
_LOSSES = ("val_loss", "val_denoise_loss")
# what a run takes from its data, or what is told elsewhere
_OF_THE_RUN = {"name", "task", "mixer", "phases", "max_length", "warmup", "validate_every"}
_OF_THE_RUN |= {"seed", "stop_at", "protocol"}
_UNKNOWN = "not recorded"


@dataclass(frozen=True, eq=False)
class Result:
    """A run as a reader of results sees it; accuracies are shares, and None where unknown.

    Args:
        path: The run directory.
        content: The whole of its result.json.
        task, mixer, seed, device: As it says.
        recipe: The recipe's name, and what was changed in it.
        protocol, origin: Of the data that the accuracy is of.
        floors: Of the test set, or of the validation set where it was not tested.
        test, validation: Accuracies; the validation's is the best.
        samples: Of the set that ``floors`` is of.
        state: "finished", "stopped early at step N", "diverged at step N", "cut at step N", or
            "unfinished"; and whether it classifies nothing, or was tested with another checkpoint
            than its best.
        finished: Whether it has made all its steps, or stopped early; no run that was cut, or
            diverged.
        steps: Those made.
        checkpoint: SHA-256 of the best one.
        begun: What it began with where it had another run's weights: that one's mixer, and its data
            if that is other; what that one began with follows.
        compiled: Whether it was trained compiled.
        reach: Tokens before and after that can change one; None where all can, or it is not known.
    """

    path: Path
    content: dict[str, Any]
    task: str
    mixer: str
    recipe: str
    seed: int
    protocol: str
    origin: str
    floors: dict[str, float]
    test: float | None
    validation: float | None
    samples: int
    state: str
    finished: bool
    steps: int | None
    checkpoint: str | None
    device: str
    parameters: int | None
    seconds: float | None
    peak_memory: int | None
    history: list[dict[str, float]]
    begun: str | None
    compiled: bool
    reach: tuple[int, int] | None

    @property
    def accuracy(self) -> float | None:
        """Of the test, or else of the validation."""
        return self.validation if self.test is None else self.test

    @property
    def failure(self) -> str | None:
        """As :func:`failure` says."""
        return failure(self.content)

    @property
    def key(self) -> str:
        """Equal for runs that differ by their seed alone."""
        data, test = self.content["data"], self.content.get("test", {})
        other = None if test.get("data_of_the_run", True) else test.get("fingerprint")
        shown = (self.protocol, self.origin, self.device, data["fingerprints"], other)
        begun = _beginning(self.content.get("begin")), self.content.get("transfer")
        protocol = PROTOCOLS.get(self.protocol, DEFAULT)
        last = self.content["task"] in protocol.last_checkpoint
        untested = {"checkpoint": "last" if last else "best"}
        how = self.compiled, (test or untested).get("checkpoint", "best")
        return configuration(self.content, *shown, *begun, *how)


def failure(content: dict[str, Any]) -> str | None:
    """Why a run counts as failed: "no result", "diverged", "at chance", or None.

    Args:
        content: Of its result.json. It diverged if a validation loss is no number, and is at chance
            if its accuracy, of the test or else of the best checkpoint's validation, is not more
            than two standard errors above the best constant label (the floor "majority"). One that
            classifies nothing has no chance to be at.
    """
    fit, test = content.get("fit", {}), content.get("test")
    history = fit.get("history", [])
    measured = (x for entry in history for key, x in entry.items() if key in _LOSSES)
    if not all(map(math.isfinite, measured)):
        return "diverged"
    seen = content["data"] if test is None else test
    accuracy = fit.get("best", {}).get("val_accuracy") if test is None else test["accuracy"]
    if accuracy is None:
        return None if history else "no result"
    samples = content["data"]["samples"]["val"] if test is None else test["samples"]
    floors = seen.get("floors", content["floors"])
    return "at chance" if at_floor(accuracy, floors["majority"], int(samples)) else None


def read_result(path: Path) -> Result:
    """A run's result.json.

    Args:
        path: The file, or the run directory with it.

    Raises:
        ValueError: There is none, or it is damaged, or from something else.
    """
    path = path if path.name == "result.json" and path.is_file() else path / "result.json"
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a run: it has no result.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _result(path.parent, content)
    except KeyError as error:
        raise ValueError(f"{path} is damaged, or not of fastattn-lra: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or not of fastattn-lra: {error}") from None


def _result(path: Path, content: dict[str, Any]) -> Result:
    data, fit, test = content["data"], content.get("fit", {}), content.get("test")
    if content["task"] not in TASKS:
        raise ValueError(f"unknown task {content['task']!r}")
    if missing := {"fingerprints", "samples"} - data.keys():
        raise ValueError(f"its data has no {', '.join(sorted(missing))}")
    sets = data["fingerprints"]
    if not isinstance(sets, dict) or not all(isinstance(x, str) for x in sets.values()):
        raise ValueError(f"fingerprints must be texts by set, got {sets!r}")
    mixers_of(content["mixer"])
    seen = test or data
    history = fit.get("history", [])
    for entry in (*history, *([fit["best"]] if fit else [])):
        _check_numbers(entry, "step", "seconds", *(CURVES & entry.keys()))
    for phase in content["recipe"]["phases"]:
        _check_numbers(phase, "steps", "batch_size")
    for operator in (test or {}).get("by_root_operator", {}).values():
        _check_numbers(operator, "samples", "accuracy", "floor")
    samples = int(data["samples"]["val"] if test is None else test["samples"])
    if samples < 1:
        raise ValueError("it has no samples")
    checkpoint = fit.get("checkpoint")
    if not isinstance(checkpoint, str | None):
        raise ValueError(f"checkpoint must be a text, got {checkpoint!r}")
    diverged = failure(content) == "diverged"
    floors = {name: float(x) for name, x in seen.get("floors", content["floors"]).items()}
    if "majority" not in floors:
        raise ValueError("its floors have no majority")
    return Result(
        path=path,
        content=content,
        task=content["task"],
        mixer=content["mixer"],
        recipe=_recipe(content["recipe"]),
        seed=int(content["seed"]),
        protocol=str(seen.get("protocol") or data.get("protocol") or DEFAULT.name),
        origin=_origin({**data, **(test or {})}),
        floors=floors,
        test=None if test is None else float(test["accuracy"]),
        validation=fit["best"].get("val_accuracy") if fit else None,
        samples=samples,
        state=_state(content, diverged=diverged),
        finished=bool(fit.get("finished")) and not diverged,
        steps=int(fit["steps"]) if "steps" in fit else None,
        checkpoint=checkpoint,
        device=_device(str(content["device"]), int(fit.get("devices", 1))),
        parameters=int(content["parameters"]) if "parameters" in content else None,
        seconds=float(fit["seconds"]) if fit else None,
        peak_memory=int(fit["peak_memory_mib"]) if "peak_memory_mib" in fit else None,
        history=history,
        begun=_begun(content, {}),
        compiled=bool(content.get("compiled", fit.get("compiled", False))),
        reach=_reach(content.get("reach")),
    )


def _check_numbers(entry: dict[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(entry[name], int | float):
            raise ValueError(f"{name} must be a number, got {entry[name]!r}")


def _recipe(used: dict[str, Any]) -> str:
    """A recipe's name, and the fields that are not as in the recipe of that name today.

    A field that a run of an older version has not recorded had its default.
    """
    name = str(used["name"])
    if name not in RECIPES:
        return name
    ours = json.loads(json.dumps(asdict(RECIPES[name])))
    used = with_defaults(used)
    changed = [
        f"{field}={used[field]}"
        for field in ours
        if field not in _OF_THE_RUN and used[field] != ours[field]
    ]
    for field in ("steps", "batch_size", "lr", "decay"):
        values = [phase.get(field) for phase in used["phases"]]
        theirs = [phase[field] for phase in ours["phases"]]
        if values != theirs and all(theirs):  # steps of a recipe in epochs are the data's
            changed.append(f"{field}={'/'.join(map(str, values))}")
    return f"{name} ({', '.join(changed)})" if changed else name


def _origin(data: dict[str, Any]) -> str:
    """Where the samples are from, in words that keep stand-ins apart from the real thing."""
    if data.get("stand_in"):
        return "stand-in, not LRA"
    if "generated" not in data:
        return _UNKNOWN
    if not data["generated"]:
        return "the public files"
    told = {k: v for k, v in (data.get("generator") or {}).items() if v is not None}
    told = {k: told[k] for k in ("seed", "difficulty", "size", "ease") if k in told}
    return ", ".join(["generated", *(f"{name} {value}" for name, value in told.items())])


def with_origins(results: Sequence[Result]) -> list[Result]:
    """The results, with origins that others of them tell of the same data.

    An older run has not recorded where its data is from. Where the fingerprints of its training and
    test set are those of a run that has, it is told, with "by its fingerprint"; the data that a run
    began with gets its name likewise.
    """
    told: dict[tuple[str, str], set[str]] = {}
    for run in results:
        sets = _sets(run.content["data"]["fingerprints"])
        if sets and run.origin != _UNKNOWN and _tested_on_its_own(run):
            told.setdefault(sets, set()).add(run.origin)
    origins = {sets: names.pop() for sets, names in told.items() if len(names) == 1}
    return [_with_origin(run, origins) for run in results]


def _with_origin(run: Result, origins: dict[tuple[str, str], str]) -> Result:
    run = replace(run, begun=_begun(run.content, origins))
    sets = _sets(run.content["data"]["fingerprints"])
    if run.origin != _UNKNOWN or sets not in origins or not _tested_on_its_own(run):
        return run
    return replace(run, origin=f"{origins[sets]}, by its fingerprint")


def _sets(fingerprints: dict[str, str]) -> tuple[str, str] | None:
    """The fingerprints of the training and the test set."""
    if not {"train", "test"} <= fingerprints.keys():
        return None
    return fingerprints["train"], fingerprints["test"]


def _tested_on_its_own(run: Result) -> bool:
    own = run.content["data"]["fingerprints"].get("test")
    return bool(run.content.get("test", {}).get("fingerprint", own) == own)


def _begun(content: dict[str, Any], origins: dict[tuple[str, str], str]) -> str | None:
    """What a run began with, in words; the latest comes first."""
    begin = content.get("begin")
    stages: list[str] = []
    headless = any(name.startswith("head.") for name in content.get("transfer", {}).get("new", ()))
    while begin:
        details = []
        if begin["fingerprints"] != content["data"]["fingerprints"]:
            unnamed = f"data {begin['fingerprints']['train'][:8]}"
            sets = _sets(begin["fingerprints"])
            details.append(origins.get(sets, unnamed) if sets else unnamed)
        if headless and not stages:
            details.append("new head")
        stages.append(begin["mixer"] + (f" ({', '.join(details)})" if details else ""))
        begin = begin.get("begin")
    return " after ".join(stages) or None


def _beginning(begin: dict[str, Any] | None) -> list[Any] | None:
    """The runs before a run, without their places and steps."""
    if not begin:
        return None
    return [begin["mixer"], begin["fingerprints"], _beginning(begin.get("begin"))]


def _reach(limits: Sequence[int] | None) -> tuple[int, int] | None:
    if limits is None:
        return None
    before, after = limits
    return int(before), int(after)


def _device(name: str, devices: int) -> str:
    name = f"({name})" if devices > 1 and ", then " in name else name
    return name if devices == 1 else f"{devices} × {name}"


def _state(content: dict[str, Any], *, diverged: bool) -> str:
    fit, test = content.get("fit", {}), content.get("test")
    state = "finished" if fit.get("finished") else "unfinished"
    if diverged:
        state = f"diverged at step {fit['history'][-1]['step']}"
    elif fit.get("stopped_early"):
        state = f"stopped early at step {fit['steps']}"
    elif fit and content["recipe"].get("stop_at") and state == "unfinished":
        state = f"cut at step {fit['steps']}"
    if fit and "val_accuracy" not in fit["best"]:
        state += ", classifies nothing"
    tested = _tested(fit, test) if test else None
    return f"{state} (tested: {tested})" if tested else state


def _tested(fit: dict[str, Any], test: dict[str, Any]) -> str | None:
    """Which checkpoint, unless it is the best as far as is recorded."""
    if test.get("checkpoint") == "last":
        return "last checkpoint"
    digests = {fit.get("checkpoint"), test.get("sha256")} - {None}
    return "another checkpoint" if len(digests) > 1 else None


def recipe_of(result: Result) -> Recipe:
    """The recipe of a run, to build its model.

    Raises:
        ValueError: It has fields that this version does not know.
    """
    try:
        return Recipe.from_dict(result.content["recipe"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"its recipe is none of this version: {error}") from None


def how_trained(run: Result) -> tuple[str, str]:
    """What a run began with, and whether it is compiled, in words that tell runs apart."""
    begun = f"begun with {run.begun}" if run.begun else "from scratch"
    return begun, "compiled" if run.compiled else "not compiled"


def labels(results: Sequence[Result]) -> list[str]:
    """A short name for each run: its mixer, and what runs of the same mixer differ in."""
    facts: list[Callable[[Result], str]] = [
        lambda run: run.task,
        lambda run: run.recipe,
        lambda run: run.protocol,
        lambda run: f"seed {run.seed}",
        lambda run: run.device,
        lambda run: how_trained(run)[0],
        lambda run: how_trained(run)[1],
    ]
    found = []
    for run in results:
        alike = [other for other in results if other.mixer == run.mixer]
        differing = [fact(run) for fact in facts if len({fact(other) for other in alike}) > 1]
        found.append(", ".join([run.mixer, *differing]))
    if len(set(found)) < len(found):
        top = os.path.commonpath([run.path.resolve() for run in results])
        ends = [os.path.relpath(run.path.resolve(), top) for run in results]
        return [
            name if found.count(name) == 1 else f"{name}, {end}"
            for name, end in zip(found, ends, strict=True)
        ]
    return found
