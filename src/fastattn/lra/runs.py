"""Runs: train and test, and the files that remain.

A run directory holds ``result.json`` (everything that is known of the run), ``checkpoints/``
(``last`` and ``best``), ``curve.png``, and the logs of TensorBoard and CSV.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.callbacks.progress import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

import fastattn
from fastattn.lra.data import Split, Task
from fastattn.lra.encoder import mixers_of
from fastattn.lra.recipes import Recipe
from fastattn.lra.tasks import TASKS
from fastattn.lra.train import Classifier, check_vocabulary, evaluation


class _WholeFiles(TorchCheckpointIO):
    """Checkpoints that replace the old one whole, so that a kill leaves one that loads."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None):  # type: ignore[no-untyped-def]
        part = Path(f"{path}.part")
        super().save_checkpoint(checkpoint, part, storage_options)
        part.replace(path)


def fit(
    task_name: str,
    data_dir: Path,
    recipe: Recipe,
    mixer: str,
    out: Path,
    *,
    workers: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train, and write the run directory.

    Args:
        task_name: A key of ``fastattn.lra.tasks.TASKS``.
        data_dir: The public files of the task.
        recipe: Every number of the run.
        mixer: A name in ``fastattn.lra.encoder.MIXERS``, or several, one a block.
        out: The run directory; must be new, unless ``resume``.
        workers: Loader processes; None means one per core, at most 8, and none on two cores.
        resume: Go on from ``out/checkpoints/last.ckpt``.

    Returns:
        The content of ``out/result.json``.

    Raises:
        ValueError: The run exists already, there is nothing to resume, or the run was started
            with other data, another mixer or another recipe.
    """
    task = TASKS[task_name]
    last = out / "checkpoints" / "last.ckpt"
    if resume and not last.is_file():
        raise ValueError(f"nothing to resume: {last} does not exist")
    if not resume and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: name another directory, or go on with --resume")
    cores = os.cpu_count() or 1
    workers = (min(8, cores) if cores > 2 else 0) if workers is None else workers
    if workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}")
    splits = task.load(data_dir)
    _check_lengths(splits, recipe, mixer)
    result = _describe(task, data_dir, splits, recipe, mixer)
    if resume:
        before = _read_result(out)
        _check_same_run(out, before, result)
        check_vocabulary(task, _read_checkpoint(last)["fastattn"]["vocabulary"])
        result = before | result
        if before.get("fit", {}).get("finished"):
            return before

    lightning.seed_everything(recipe.seed, verbose=False)
    model = Classifier(task, recipe, mixer, splits, workers)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    out.mkdir(parents=True, exist_ok=True)
    _write(out, result)

    best = ModelCheckpoint(
        out / "checkpoints",
        "best",
        monitor="val/accuracy",
        mode="max",
        enable_version_counter=False,
    )
    latest = ModelCheckpoint(
        out / "checkpoints", "last", save_on_train_epoch_end=True, enable_version_counter=False
    )
    callbacks: list[Any] = [best, latest, LearningRateMonitor("step"), TQDMProgressBar(10)]
    patience = recipe.patience if recipe.patience is not None else 10**9
    early = EarlyStopping("val/accuracy", mode="max", patience=patience)
    callbacks.append(early)
    trainer = lightning.Trainer(
        **_hardware(recipe),
        plugins=[_WholeFiles()],
        max_steps=recipe.last_step,
        max_epochs=-1,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        log_every_n_steps=min(50, recipe.validate_every),
        callbacks=callbacks,
        logger=[CSVLogger(out, "csv"), TensorBoardLogger(out, "tensorboard")],
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=last if resume else None, weights_only=True)

    best_entry = max(model.history, key=lambda entry: entry["val_accuracy"])
    result["fit"] = {
        "steps": trainer.global_step,
        "seconds": round(model.seconds, 1),
        "finished": trainer.global_step >= recipe.steps or early.stopped_epoch > 0,
        "additional_sets": model.extra_sets,
        "best": best_entry,
        "history": model.history,
    }
    if result.get("test", {}).get("step") != best_entry["step"]:
        result.pop("test", None)  # of a checkpoint that is no longer the best
    if torch.cuda.is_available():
        result["fit"]["peak_memory_mib"] = torch.cuda.max_memory_allocated() // 2**20
    _write(out, result)
    plot_curve(out)
    return result


def evaluate(run: Path, data_dir: Path | None = None) -> dict[str, Any]:
    """Test a run's best checkpoint on every test sample once; the result goes to result.json.

    Args:
        run: A run directory made by :func:`fit`.
        data_dir: The data; None means where the run's training data was.

    Raises:
        ValueError: The run is incomplete, or its vocabulary is another one.
    """
    result = _read_result(run)
    best = run / "checkpoints" / "best.ckpt"
    if not best.is_file():
        raise ValueError(f"{run} has no checkpoint yet: {best} does not exist")
    task = TASKS[result["task"]]
    checkpoint = _read_checkpoint(best)
    check_vocabulary(task, checkpoint["fastattn"]["vocabulary"])
    splits = task.load(data_dir or Path(result["data"]["directory"]))
    recipe = Recipe.from_dict(result["recipe"])
    model = Classifier(task, recipe, result["mixer"], splits)
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        raise ValueError(
            f"{best} does not fit the recipe in result.json: one of them was changed ({error})"
        ) from None

    trainer = lightning.Trainer(
        **_hardware(recipe),
        logger=False,
        enable_checkpointing=False,
        callbacks=[TQDMProgressBar(10)],
    )
    trainer.test(model, verbose=False)
    split = splits["test"]
    order = np.concatenate(evaluation(split, recipe)[0].batches)
    predictions = np.empty_like(split.labels)
    predictions[order] = torch.cat(model.predictions).numpy()
    result["test"] = {
        "samples": len(split),
        "accuracy": float((predictions == split.labels).mean()),
        "step": checkpoint["global_step"],
        "fingerprint": split.fingerprint(),
        "data_of_the_run": split.fingerprint() == result["data"]["fingerprints"]["test"],
        "floors": task.floors(split),
        **task.breakdown(split, predictions),
    }
    _write(run, result)
    return result


def _hardware(recipe: Recipe) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "accelerator": "gpu" if cuda else "cpu",
        "devices": 1,
        "precision": "bf16-mixed" if cuda and recipe.bf16 else "32-true",
    }


def plot_curve(run: Path) -> Path:
    """Draw ``curve.png`` from a run's result.json: losses and accuracy against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads((run / "result.json").read_text())
    history = result["fit"]["history"]
    steps = [entry["step"] for entry in history]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(steps, [e["train_loss"] for e in history], label="train")
    left.plot(steps, [e["val_loss"] for e in history], label="validation")
    left.set(xlabel="step", ylabel="cross-entropy, nats")
    right.plot(steps, [100 * e["val_accuracy"] for e in history], label="validation")
    for name, floor in result["floors"].items():
        right.axhline(100 * floor, color="grey", linestyle=":", linewidth=1)
        right.annotate(f"floor: {name}", (steps[0], 100 * floor), color="grey", va="bottom")
    right.set(xlabel="step", ylabel="accuracy, %")
    for axes in (left, right):
        axes.legend(loc="lower right" if axes is right else "upper right")
    begin = 0
    for phase in result["recipe"]["phases"][:-1]:
        begin += phase["steps"]
        for axes in (left, right):
            axes.axvline(begin, color="grey", linewidth=0.5)
    figure.suptitle(f"{result['task']}, {result['mixer']}, {result['recipe']['name']}")
    path = run / "curve.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _describe(
    task: Task, data_dir: Path, splits: dict[str, Split], recipe: Recipe, mixer: str
) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "task": task.name,
        "mixer": mixer,
        "positions": recipe.positions_for(mixer),
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "vocabulary": task.vocabulary.hash,
        "data": {
            "directory": str(data_dir.resolve()),
            "samples": {name: len(split) for name, split in splits.items()},
            "fingerprints": {name: split.fingerprint() for name, split in splits.items()},
        },
        "floors": task.floors(splits["val"]),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "versions": {
            "python": platform.python_version(),
            "fastattn": fastattn.__version__,
            "torch": torch.__version__,
            **{name: _version(name) for name in ("triton", "lightning")},
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_lengths(splits: dict[str, Split], recipe: Recipe, mixer: str) -> None:
    longest = max(int(split.lengths.max()) for split in splits.values())
    if recipe.positions_for(mixer) == "learned" and longest > recipe.max_length:
        raise ValueError(
            f"learned positions end at {recipe.max_length}, but the data has a sample of "
            f"{longest} tokens: take sinusoidal positions"
        )
    for name, options in mixers_of(mixer):
        most = options.get("seq_len", recipe.max_length)
        limited = name in ("linformer", "gmlp") and not options.get("interpolate")
        if limited and isinstance(most, int) and longest > most:
            raise ValueError(
                f"{name} is made for {most} tokens, but the data has a sample of {longest}: "
                f"take {name}:seq_len={longest}"
            )


def _read_result(run: Path) -> dict[str, Any]:
    path = run / "result.json"
    if not path.is_file():
        raise ValueError(f"{run} is not a run: it has no result.json")
    try:
        result = json.loads(path.read_text())
        Recipe.from_dict(result["recipe"])
        missing = {"task", "mixer", "positions", "vocabulary", "data"} - result.keys()
        if missing or result["task"] not in TASKS:
            raise ValueError(f"no {', '.join(sorted(missing))}" if missing else "unknown task")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or was edited: {error}") from None
    return result


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not {"fastattn", "state_dict", "global_step"} <= checkpoint.keys():
            raise ValueError("it was not written by fastattn")
    except Exception as error:  # torch.load raises nearly anything on a damaged file
        raise ValueError(f"{path} is damaged or no checkpoint of ours: {error}") from None
    return checkpoint


def _check_same_run(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    same = json.loads(json.dumps(now))
    for key in ("task", "mixer", "positions", "vocabulary"):
        if before[key] != same[key]:
            raise ValueError(f"{out} was started with {key} {before[key]!r}, not {same[key]!r}")
    if before["data"]["fingerprints"] != same["data"]["fingerprints"]:
        raise ValueError(f"{out} was started with other data than {now['data']['directory']}")
    differing = [
        key
        for key, value in same["recipe"].items()
        if key != "stop_at" and before["recipe"].get(key) != value
    ]
    if differing:
        raise ValueError(f"{out} was started with another recipe: {', '.join(differing)} differ")


def _write(out: Path, result: dict[str, Any]) -> None:
    """Replace result.json whole, so that a killed run leaves the old one."""
    part = out / "result.json.part"
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.replace(out / "result.json")
