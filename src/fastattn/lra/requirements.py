"""What a run needs of its data, and of the run it resumes, found out before it begins."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fastattn.lra.data import Data
from fastattn.lra.encoder import mixers_of
from fastattn.lra.protocols import DEFAULT
from fastattn.lra.recipe import Recipe


def check_protocol(recipe: Recipe, protocol: str | None) -> None:
    """A recipe's number of epochs may be that of a protocol's training set."""
    given = protocol or DEFAULT.name
    if recipe.protocol not in (None, given):
        raise ValueError(
            f"protocol must be {recipe.protocol} with recipe {recipe.name}, whose epochs are for "
            f"its training set, got {given}: add --protocol {recipe.protocol}, or take another "
            "recipe"
        )


def check_lengths(longest: int, recipe: Recipe, mixer: str) -> None:
    """Learned positions, Linformer and gMLP are made for so many tokens."""
    assert recipe.max_length is not None
    if recipe.positions_for(mixer) == "learned" and longest > recipe.max_length:
        raise ValueError(
            f"learned positions end at {recipe.max_length}, but the data has a sample of "
            f"{longest} tokens: take sinusoidal positions"
        )
    in_front = int(recipe.pool_for(mixer) == "cls")
    for name, options in mixers_of(mixer):
        most = options.get("seq_len", recipe.max_length + in_front)
        limited = name in ("linformer", "gmlp") and not options.get("interpolate")
        if limited and isinstance(most, int) and longest + in_front > most:
            raise ValueError(
                f"{name} is made for {most} tokens, but the data has a sample of {longest}: "
                f"take {name}:seq_len={longest + in_front}"
            )


def check_whole_batches(splits: Data, recipe: Recipe, devices: int) -> None:
    """What batch normalisation needs: everything that counts, and nothing else, in one batch."""
    if recipe.accumulate > 1 or devices > 1:
        raise ValueError(
            "norm batch needs whole batches on one device: accumulate and devices must be 1, got "
            f"{recipe.accumulate} and {devices}; or take norm layer"
        )
    if recipe.denoise and recipe.classifies:
        raise ValueError(
            "norm batch would mix the statistics of whole and of corrupted documents: denoise "
            "alone, before, or take norm layer"
        )
    lengths = np.concatenate([split.document_lengths for split in splits.values()])
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < longest:
        raise ValueError(
            "norm batch takes documents of one length, as pictures are: the data has them from "
            f"{shortest} to {longest} tokens; take norm layer"
        )


def protocol_in(result: dict[str, Any]) -> str:
    """The protocol of a run; those from before there were any have the default."""
    name: str = result["data"].get("protocol", DEFAULT.name)
    return name


def check_same_run(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """A run is resumed as it was started; both are what result.json says of it."""
    same = json.loads(json.dumps(now))
    for key in ("task", "mixer", "positions", "vocabulary"):
        if before[key] != same[key]:
            raise ValueError(f"{out} was started with {key} {before[key]!r}, not {same[key]!r}")
    if before.get("compiled", False) != same["compiled"]:
        how = ("without", "with") if same["compiled"] else ("with", "without")
        raise ValueError(f"{out} was started {how[0]} compile, not {how[1]} it")
    if protocol_in(before) != protocol_in(same):
        raise ValueError(
            f"{out} was started with protocol {protocol_in(before)!r}, not {protocol_in(same)!r}"
        )
    if before["data"]["fingerprints"] != same["data"]["fingerprints"]:
        raise ValueError(f"{out} was started with other data than {now['data']['directory']}")
    recipe = json.loads(json.dumps(asdict(Recipe.from_dict(before["recipe"]))))
    differing = [key for key, x in same["recipe"].items() if key != "stop_at" and recipe[key] != x]
    if differing:
        raise ValueError(f"{out} was started with another recipe: {', '.join(differing)} differ")
