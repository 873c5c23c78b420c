"""Runs: train and test, and the files that remain.

A run directory holds ``result.json`` (everything that is known of the run), ``checkpoints/``
(``last`` and ``best``), ``curve.png``, and the logs of TensorBoard and CSV.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.callbacks.progress import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

import fastattn
from fastattn.lra.checkpoints import CheckpointFiles, digest, read_checkpoint
from fastattn.lra.data import Data, Task
from fastattn.lra.devices import hardware, is_first, peak_of_process, peaks, sittings
from fastattn.lra.encoder import reach
from fastattn.lra.protocols import protocol_of
from fastattn.lra.recipes import SOURCES, Recipe
from fastattn.lra.requirements import (
    check_lengths,
    check_protocol,
    check_same_run,
    check_whole_batches,
    protocol_in,
)
from fastattn.lra.tasks import TASKS
from fastattn.lra.train import Classifier, check_vocabulary
from fastattn.lra.transfer import begin_with, summary

OF_TEST = ("protocol", "generated", "generator", "stand_in", "max_length", "difficulty", "size")


def fit(
    task_name: str,
    data_dir: Path | str,
    recipe: Recipe,
    mixer: str,
    out: Path | str,
    *,
    workers: int | None = None,
    resume: bool = False,
    protocol: str | None = None,
    devices: int = 1,
    nodes: int = 1,
    pieces: bool = False,
    begin: Path | str | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Train, and write the run directory.

    Args:
        task_name: A key of ``fastattn.lra.tasks.TASKS``.
        data_dir: The public files of the task.
        recipe: Every number of the run.
        mixer: A name in ``fastattn.lra.encoder.MIXERS``, or several, one a block.
        out: The run directory; must be new, unless ``resume``.
        workers: Loader processes; None means one per core, at most 8, and none on two cores.
        resume: Go on from ``out/checkpoints/last.ckpt``, or from the start where there is none yet.
        protocol: How the data is cut and split, a name in ``fastattn.lra.protocols.PROTOCOLS``;
            None means the default.
        devices: GPUs of a host, or processes where there is no GPU; each takes its share of a
            batch.
        nodes: Hosts; start the command on each, by torchrun or SLURM.
        pieces: Write checkpoints in files of at most 16 MB.
        begin: A run whose best weights this one begins with, as when an easy data set comes first,
            or another mixer: see :func:`fastattn.lra.transfer.transfer`.
        compiled: Train what ``torch.compile`` makes of the encoder: for runs of minutes on a GPU
            that waits for Python.

    Returns:
        The content of ``out/result.json``.

    Raises:
        ValueError: There is no such task, the run exists already, there is nothing to resume, the
            run was started with other data, another mixer or another recipe, or the recipe is for
            another protocol.
    """
    if task_name not in TASKS:
        raise ValueError(f"task_name must be one of {', '.join(TASKS)}, got {task_name!r}")
    task, data_dir, out = TASKS[task_name], Path(data_dir), Path(out)
    begin = None if begin is None else Path(begin)
    last = out / "checkpoints" / "last.ckpt"
    if resume and out.is_dir() and is_new(out):
        resume = False  # it was killed before it had written anything
    elif resume and not (out / "result.json").is_file():
        raise ValueError(f"nothing to resume: {out / 'result.json'} does not exist")
    begun, done = resume and last.is_file(), 0
    # where several processes train, the others find what the first has written
    if not resume and is_first() and not is_new(out):
        raise ValueError(f"{out} is not empty: name another directory, or go on with --resume")
    cores = (os.cpu_count() or 1) // max(1, devices)
    workers = (min(8, cores) if cores > 2 else 0) if workers is None else workers
    if workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}")
    if resume and protocol is None:
        protocol = protocol_in(_read_result(out))
    check_protocol(recipe, protocol)
    splits = task.load(data_dir, protocol)
    longest = max(int(split.lengths.max()) for split in splits.values())
    recipe = recipe.on(len(splits["train"]), longest)
    trainer_options = hardware(recipe, devices, nodes)
    check_lengths(longest, recipe, mixer)
    if recipe.norm == "batch" and "norm" not in recipe.unused_for(mixer):
        check_whole_batches(splits, recipe, devices * nodes)
    result = _describe(task, data_dir, splits, recipe, mixer) | {"compiled": compiled}
    if resume:
        before = _read_result(out)
        check_same_run(out, before, result)
        began = before.get("begin")
        if begin is not None and (began is None or began["run"] != str(begin.resolve())):
            raise ValueError(f"{out} was not begun with {begin}: leave --from out to go on")
        if begun:
            done = _steps_of(last, task)
            result |= sittings(before, result, further=done < recipe.last_step)
        elif "fit" in before:
            raise ValueError(f"nothing to resume: {last} does not exist")
        elif began is not None:
            begin = Path(began["run"])
        result = before | result
        if before.get("fit", {}).get("finished"):
            return before

    lightning.seed_everything(recipe.seed, verbose=False)
    model = Classifier(task, recipe, mixer, splits, workers)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    result["groups"] = _groups(model)
    result["unused"] = recipe.unused_for(mixer)
    result["reach"] = reach(model.encoder)
    if compiled and not recipe.classifies:
        raise ValueError("a run that only denoises is not compiled: leave compile out")
    if compiled:
        model.encoder.compile_training(graphs=recipe.accumulate == 1)
    if begin is not None and not begun:
        result |= begin_with(model, begin, _read_result(begin))
        if is_first():
            print(summary(result["transfer"]))
    if is_first():
        print(f"{'parameters':10} {'decay':>8} {'tensors':>8} {'numbers':>12}")
        for group in result["groups"]:
            print("{group:10} {decay:8g} {tensors:8} {numbers:12}".format(**group))
    out.mkdir(parents=True, exist_ok=True)
    write(out / "result.json", result)

    # of a run that only denoises the best is another
    measure, mode = ("accuracy", "max") if recipe.classifies else ("denoise_loss", "min")
    best = ModelCheckpoint(
        out / "checkpoints",
        "best",
        monitor=f"val/{measure}",
        mode=mode,
        enable_version_counter=False,
    )
    latest = ModelCheckpoint(
        out / "checkpoints", "last", save_on_train_epoch_end=True, enable_version_counter=False
    )
    callbacks: list[Any] = [best, latest, LearningRateMonitor("step"), ProgressBar(20)]
    patience = recipe.patience if recipe.patience is not None else 10**9
    early = EarlyStopping(f"val/{measure}", recipe.min_delta, patience, mode=mode)
    callbacks.append(early)
    cut = []  # of this sitting, not of the run
    if recipe.last_step < recipe.warmup:
        cut.append(
            f"the run ends at step {recipe.last_step}, and its learning rate rises until step "
            f"{recipe.warmup:g}: it never reaches its value"
        )
        if is_first():
            warnings.warn(cut[0], stacklevel=2)
    trainer = lightning.Trainer(
        **trainer_options,
        plugins=[CheckpointFiles(pieces=pieces)],
        max_steps=recipe.last_step,
        max_epochs=-1,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        log_every_n_steps=min(50, recipe.validate_every),
        callbacks=callbacks,
        logger=[CSVLogger(out, "csv"), TensorBoardLogger(out, "tensorboard")],
        enable_model_summary=False,
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer.fit(model, ckpt_path=last if begun else None, weights_only=True)
    except SIGTERMException as end:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # Lightning kills it where another fails
            end.code = 128 + signal.SIGTERM
        raise
    model.watch_waiting()

    chosen = out / "checkpoints" / "best.ckpt"
    choose = max if mode == "max" else min
    best_entry = choose(model.history, key=lambda entry: entry[f"val_{measure}"])
    earlier = result.get("fit", {})
    result["fit"] = {
        "steps": trainer.global_step,
        "seconds": round(model.seconds, 1),
        "data_wait": round(model.waited / model.seconds, 4),
        "devices": devices * nodes,
        "warnings": model.warnings + cut,
        "finished": trainer.global_step >= recipe.steps
        or early.stopped_epoch > 0
        or model.diverged,
        "stopped_early": early.stopped_epoch > 0 and not model.diverged,
        "additional_sets": model.extra_sets,
        "best": best_entry,
        "checkpoint": digest(chosen) if chosen.is_file() else None,
        "history": model.history,
    }
    tested = result.get("test", {})
    whose = trainer.global_step if tested.get("checkpoint") == "last" else best_entry["step"]
    if tested.get("step") != whose:
        result.pop("test", None)  # of a checkpoint that is no longer the one
    found = {"peak_process_mib": peak_of_process() // 2**20}
    if torch.cuda.is_available():
        found["peak_memory_mib"] = torch.cuda.max_memory_allocated() // 2**20
    result["fit"] |= peaks(earlier, found if trainer.global_step > done else {})
    write(out / "result.json", result)
    if is_first():
        plot_curve(out)
    return result


class ProgressBar(TQDMProgressBar):
    """Shows the losses when it is drawn."""

    def get_metrics(self, trainer: Any, model: Any) -> dict[str, Any]:
        shown = {f"train/{name}": f"{x:.3f}" for name, x in model.latest_losses().items()}
        return {**super().get_metrics(trainer, model), **shown}


def evaluate(
    run: Path | str,
    data_dir: Path | str | None = None,
    *,
    protocol: str | None = None,
    devices: int = 1,
) -> dict[str, Any]:
    """Test a run's best checkpoint on every test sample once; the result goes to result.json.

    Where the protocol reports the last checkpoint, as that of 2020 does of ListOps and Text, it is
    the last.

    Args:
        run: A run directory made by :func:`fit`.
        data_dir: The data; None means where the run's training data was.
        protocol: How it is cut and split; None means as in the run.
        devices: As in :func:`fit`.

    Raises:
        ValueError: The run is incomplete, or its vocabulary is another one.
    """
    run = Path(run)
    result = _read_result(run)
    task, protocol = TASKS[result["task"]], protocol or protocol_in(result)
    which = "last" if task.name in protocol_of(protocol).last_checkpoint else "best"
    path = run / "checkpoints" / f"{which}.ckpt"
    if not path.is_file():
        raise ValueError(f"{run} has no checkpoint yet: {path} does not exist")
    recipe = Recipe.from_dict(result["recipe"])
    if not recipe.classifies:
        raise ValueError(f"{run} has only denoised: begin another run with it, by --from {run}")
    checkpoint = read_checkpoint(path)
    check_vocabulary(task, checkpoint["fastattn"]["vocabulary"])
    splits = task.load(Path(data_dir or result["data"]["directory"]), protocol)
    model = Classifier(task, recipe, result["mixer"], splits)
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not fit the recipe in result.json: one of them was changed ({error})"
        ) from None

    trainer = lightning.Trainer(
        **hardware(recipe, devices),
        logger=False,
        enable_checkpointing=False,
        callbacks=[TQDMProgressBar(10)],
    )
    trainer.test(model, verbose=False)
    split = splits["test"]
    predictions = model.predictions.cpu().numpy()
    result["test"] = {
        "samples": len(split),
        "accuracy": float((predictions == split.labels).mean()),
        "checkpoint": which,
        "sha256": digest(path),
        "step": checkpoint["global_step"],
        "fingerprint": split.fingerprint(),
        "data_of_the_run": split.fingerprint() == result["data"]["fingerprints"]["test"],
        **{key: x for key, x in splits.record.items() if key in OF_TEST},
        "floors": task.floors(split),
        **task.breakdown(split, predictions),
    }
    write(run / "result.json", result)
    return result


def plot_curve(run: Path) -> Path:
    """Draw ``curve.png`` from a run's result.json: losses and accuracy against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads((run / "result.json").read_text())
    history = result["fit"]["history"]
    steps = [entry["step"] for entry in history]
    denoise = result["recipe"].get("denoise") or {}
    unit = "grey, 0 to 1" if denoise.get("predict") == "grey" else "cross-entropy, nats"
    panels = 2 if "val_accuracy" in history[0] else 1
    figure, (axes,) = plt.subplots(
        1, panels, figsize=(5 * panels, 3.6), layout="constrained", squeeze=False
    )
    for key, label, line in (
        ("train_loss", "train", "-"),
        ("val_loss", "validation", "-"),
        ("train_denoise_loss", "train, denoising", "--"),
        ("val_denoise_loss", "validation, denoising", "--"),
    ):
        if key in history[0]:
            axes[0].plot(steps, [e[key] for e in history], line, label=label)
    axes[0].set(xlabel="step", ylabel=unit)
    axes[0].legend(loc="upper right")
    if panels == 2:
        accuracy = [100 * e["val_accuracy"] for e in history]
        axes[1].plot(steps, accuracy, label="validation")
        for name, floor in result["floors"].items():
            axes[1].axhline(100 * floor, color="grey", linestyle=":", linewidth=1)
            place = (steps[0], 100 * floor)
            axes[1].annotate(f"floor: {name}", place, color="grey", va="bottom")
        axes[1].set(xlabel="step", ylabel="accuracy, %")
        axes[1].legend(loc="lower right")
    begin = 0
    for phase in result["recipe"]["phases"][:-1]:
        begin += phase["steps"]
        for each in axes:
            each.axvline(begin, color="grey", linewidth=0.5)
    kind = " (stand-in, not LRA)" if result["data"].get("stand_in") else ""
    figure.suptitle(f"{result['task']}{kind}, {result['mixer']}, {result['recipe']['name']}")
    path = run / "curve.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def is_new(out: Path) -> bool:
    """Whether nothing is there, or only what a kill before the first result leaves."""
    return not out.exists() or {path.name for path in out.iterdir()} <= {"result.json.part"}


def _steps_of(path: Path, task: Task) -> int:
    """How many a checkpoint has made, of a run whose vocabulary must be the task's."""
    checkpoint = read_checkpoint(path)
    check_vocabulary(task, checkpoint["fastattn"]["vocabulary"])
    return int(checkpoint["global_step"])


def _groups(model: Classifier) -> list[dict[str, Any]]:
    """What the optimiser is given: each parameter is in one group."""
    groups = model.encoder.parameter_groups(model.recipe.weight_decay)
    return [
        {
            "group": name,
            "decay": group["weight_decay"],
            "tensors": len(group["params"]),
            "numbers": sum(p.numel() for p in group["params"]),
        }
        for name, group in zip(("matrices", "vectors"), groups, strict=True)
    ]


def _describe(
    task: Task, data_dir: Path, splits: Data, recipe: Recipe, mixer: str
) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "task": task.name,
        "mixer": mixer,
        "positions": recipe.positions_for(mixer),
        "pool": recipe.pool_for(mixer),
        "recipe": asdict(recipe),
        "source": SOURCES.get(recipe.name),
        "seed": recipe.seed,
        "vocabulary": task.vocabulary.hash,
        "data": {
            "directory": str(data_dir.resolve()),
            **splits.record,
            "samples": {name: len(split) for name, split in splits.items()},
            "fingerprints": {name: split.fingerprint() for name, split in splits.items()},
        },
        "floors": task.floors(splits["val"]),
        "chance": task.chance(splits["val"]),
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


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file whole, so that a killed run leaves the old one."""
    if not is_first():
        return
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)
