"""What a network needs of the data, found out before a run begins."""

from __future__ import annotations

import numpy as np

from fastattn.lra.data import Data
from fastattn.lra.encoder import mixers_of
from fastattn.lra.recipe import Recipe


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
