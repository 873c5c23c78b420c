"""Begin a run with the weights of another, of the same model or of one with other mixers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert import STOCK_STATE
from fastattn.lra.checkpoints import read_checkpoint
from fastattn.lra.encoder import Block, Encoder, encoder_for
from fastattn.lra.mixers.softmax import SoftmaxAttention
from fastattn.lra.recipe import Recipe
from fastattn.lra.tasks import TASKS
from fastattn.lra.train import Classifier, check_vocabulary


def transfer(target: Encoder, source: Encoder, state: dict[str, Tensor]) -> dict[str, list[str]]:
    """Copy what means the same in both models and has the same shape; the rest stays as it is.

    Projections of queries, keys, values and outputs mean the same in softmax attention and in
    every mechanism, whatever they are called. Anything else of a mixer is of its own kind.

    Args:
        target: Changed in place, unless this raises.
        source: Another encoder; may be on the meta device.
        state: The weights of ``source``.

    Returns:
        Names of parameters and buffers: ``"moved"`` and ``"new"``, as the target calls them, which
        together are all it has, and ``"dropped"``, as the source does.

    Raises:
        ValueError: No matrix fits; a bias alone would be no beginning.
    """
    there = {meaning: name for name, meaning in _meanings(source).items() if name in state}
    ours = target.state_dict()
    moved = {
        name: there[meaning]
        for name, meaning in _meanings(target).items()
        if meaning in there and state[there[meaning]].shape == ours[name].shape
    }
    matrices = {name for name, p in target.named_parameters() if p.ndim > 1}
    if not moved.keys() & matrices:
        raise ValueError("the two have no matrix of the same name and shape in common")
    with torch.no_grad():  # load_state_dict would let modules make anew what is missing
        for name, its in moved.items():
            ours[name].copy_(state[its])
    return {
        "moved": list(moved),
        "new": [name for name in ours if name not in moved],
        "dropped": [name for name in state if name not in moved.values()],
    }


def begin_with(model: Classifier, run: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Take over the best weights of a run.

    Args:
        model: Changed in place.
        run: A run directory.
        result: Its result.json.

    Returns:
        What the new run's result says of it: ``"begin"`` and ``"transfer"``.

    Raises:
        ValueError: The token ids mean something else there, or no matrix fits.
    """
    checkpoint = read_checkpoint(run / "checkpoints" / "best.ckpt")
    check_vocabulary(model.task, checkpoint["fastattn"]["vocabulary"])
    recipe = Recipe.from_dict(result["recipe"])
    with torch.device("meta"):
        source = encoder_for(TASKS[result["task"]], recipe, result["mixer"])
    state = {
        name.removeprefix("encoder."): tensor for name, tensor in checkpoint["state_dict"].items()
    }
    untrained = (
        []
        if recipe.classifies
        else [name for name in state if name.startswith(("pool.", "norm.", "head."))]
    )
    for name in untrained:
        del state[name]
    try:
        report = transfer(model.encoder, source, state)
    except ValueError as error:
        raise ValueError(f"{run} is a run of another model: {error}") from None
    report["dropped"] += untrained
    begin = {
        "run": str(run.resolve()),
        "mixer": result["mixer"],
        "step": checkpoint["global_step"],
        "fingerprints": result["data"]["fingerprints"],
        "begin": result.get("begin"),
    }
    return {"begin": begin, "transfer": report}


def summary(report: dict[str, list[str]]) -> str:
    """A line for each part of :func:`transfer`'s report; blocks are put together."""
    lines = []
    for part, names in report.items():
        alike = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
        lines.append(f"{part}: {len(names)} tensors" + f" ({', '.join(alike)})" * bool(names))
    return "\n".join(lines)


def _meanings(encoder: Encoder) -> dict[str, tuple[str, str]]:
    """From the name of each tensor to (kind of the module, name without spellings of its own)."""
    meanings = {}
    kinds = {}
    for i, block in enumerate(encoder.blocks):
        if isinstance(block, Block):
            kinds[f"blocks.{i}.mixer."] = block.mixer
        else:
            kinds[f"blocks.{i}."] = block  # a whole network
    for name in encoder.state_dict():
        prefix = next((prefix for prefix in kinds if name.startswith(prefix)), "")
        meanings[name] = _meaning(name, prefix, kinds.get(prefix))
    return meanings


def _meaning(name: str, prefix: str, mixer: nn.Module | None) -> tuple[str, str]:
    if mixer is None:
        return "", name
    own = name.removeprefix(prefix)
    if isinstance(mixer, SoftmaxAttention):
        own = own.replace("in_proj.", "in_proj_")
    attends = isinstance(mixer, SoftmaxAttention | nn.MultiheadAttention)
    kind = "attention" if attends and own in STOCK_STATE else type(mixer).__name__
    return kind, prefix + own
