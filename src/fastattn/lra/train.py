"""Training and testing: a Lightning module around the encoder, and the files of a run.

A run directory holds ``result.json`` (everything that is known of the run), ``checkpoints/``
(``last`` and ``best``), ``curve.png``, and the logs of TensorBoard and CSV.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.callbacks.progress import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from fastattn.lra.data import Batch, BatchStream, Split, Task, collate, evaluation_batches
from fastattn.lra.encoder import Encoder
from fastattn.lra.recipes import Phase, Recipe
from fastattn.lra.tasks import TASKS


class Classifier(lightning.LightningModule):
    """An encoder, its loss, its optimiser and its data.

    Everything random is a function of (seed, step): the batch, its augmentation and dropout. A
    run that is killed and resumed therefore gives the same losses as one that was not.

    Args:
        task: Where the data comes from.
        recipe: Every number of the run.
        mixer: A name in ``fastattn.lra.encoder.MIXERS``.
        splits: ``{"train": ..., "val": ...}``.
        workers: Loader processes.
    """

    def __init__(
        self, task: Task, recipe: Recipe, mixer: str, splits: dict[str, Split], workers: int = 0
    ) -> None:
        super().__init__()
        self.task, self.recipe, self.mixer = task, recipe, mixer
        self.splits, self.workers = splits, workers
        self.encoder = Encoder(
            len(task.vocabulary),
            task.num_classes,
            mixer=mixer,
            positions=recipe.positions_for(mixer),
            max_length=recipe.max_length,
            width=recipe.width,
            depth=recipe.depth,
            heads=recipe.heads,
            ff=recipe.ff,
            dropout=recipe.dropout,
        )
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0
        self.extra_sets: dict[str, dict[str, Any]] = {}
        self._streams: dict[int, BatchStream] = {}
        self._losses: list[Tensor] = []
        self._plateau = {"best": float("inf"), "waited": 0, "factor": 1.0}

    # Data

    def _stream(self, number: int) -> BatchStream:
        """The training stream of a phase; additional sets are made when their phase begins."""
        if number not in self._streams:
            phase, recipe = self.recipe.phases[number], self.recipe
            self._streams = {number: self._make_stream(phase, recipe.seed + number)}
        return self._streams[number]

    def _make_stream(self, phase: Phase, seed: int) -> BatchStream:
        split = self.splits["train"]
        if phase.lengths is not None:
            split = additional_set(self.task, phase, seed)
            self.extra_sets[f"{phase.lengths[0]} to {phase.lengths[1]} tokens"] = {
                "samples": len(split),
                "fingerprint": split.fingerprint(),
            }
        augment = self.task.augment if self.recipe.augment else None
        return BatchStream(split, phase.batch_size, seed=seed, augment=augment)

    def train_dataloader(self) -> DataLoader[Batch]:
        """The steps up to the next validation; called again after each (an "epoch" here)."""
        number, begin = self.recipe.phase_at(self.global_step)
        end = min(self.recipe.last_step, begin + self.recipe.phases[number].steps)
        stop = min(end, self.global_step + self.recipe.validate_every)
        steps = range(self.global_step - begin, stop - begin)
        return self._loader(self._stream(number), steps)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(*_evaluation(self.splits["val"], self.recipe))

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(*_evaluation(self.splits["test"], self.recipe))

    def _loader(self, data: Any, sampler: range) -> DataLoader[Batch]:
        generator = torch.Generator().manual_seed(0)  # leaves the global random state alone
        return DataLoader(
            data,
            batch_size=None,
            sampler=sampler,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            generator=generator,
        )

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """The lengths stay on the CPU, where the encoder needs them."""
        tokens, labels = (x.to(device, non_blocking=True) for x in (batch.tokens, batch.labels))
        return Batch(tokens, batch.lengths, labels)

    # Steps

    def on_train_epoch_start(self) -> None:
        self._began = time.perf_counter()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.global_step)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.encoder(batch.tokens, batch.lengths), batch.labels)
        self._losses.append(loss.detach())
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch.labels))
        return loss

    def on_validation_epoch_start(self) -> None:
        if self.trainer.sanity_checking:
            return
        self.seconds += time.perf_counter() - self._began

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self._evaluate("test", batch)
        self.predictions.append(logits.argmax(-1).cpu())

    def on_test_epoch_start(self) -> None:
        self.predictions: list[Tensor] = []

    def _evaluate(self, stage: str, batch: Batch) -> Tensor:
        """Means over samples: Lightning weights each batch by its size."""
        logits = self.encoder(batch.tokens, batch.lengths).float()
        correct = (logits.argmax(-1) == batch.labels).float().mean()
        loss = F.cross_entropy(logits, batch.labels)
        for name, value in (("accuracy", correct), ("loss", loss)):
            self.log(f"{stage}/{name}", value, prog_bar=True, batch_size=len(batch.labels))
        return logits

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        metrics = self.trainer.callback_metrics
        train_loss = torch.stack(self._losses).mean().item() if self._losses else float("nan")
        self._losses.clear()
        self.history.append(
            {
                "step": self.global_step,
                "seconds": round(self.seconds, 3),
                "lr": self.recipe.lr_at(self.global_step - 1) * self._plateau["factor"],
                "train_loss": train_loss,
                "val_loss": metrics["val/loss"].item(),
                "val_accuracy": metrics["val/accuracy"].item(),
            }
        )
        self._watch_plateau(metrics["val/loss"].item())
        self._began = time.perf_counter()

    def _watch_plateau(self, loss: float) -> None:
        if self.recipe.phases[self.recipe.phase_at(self.global_step)[0]].decay != "plateau":
            return
        state = self._plateau
        if loss < state["best"]:
            state.update(best=loss, waited=0)
            return
        state["waited"] += 1
        if state["waited"] > self.recipe.plateau_patience:
            state.update(waited=0, factor=state["factor"] / 2)

    def configure_optimizers(self) -> Any:
        """AdamW; weight decay on matrices only. The schedule gives absolute learning rates."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=self.recipe.betas, fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.recipe.lr_at(step) * self._plateau["factor"]
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """By the recipe; Lightning's own refuses a fused optimiser in mixed precision."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.recipe.clip)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["fastattn"] = {
            "vocabulary": self.task.vocabulary.hash,
            "history": self.history,
            "seconds": self.seconds,
            "plateau": self._plateau,
            "extra_sets": self.extra_sets,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint["fastattn"]
        check_vocabulary(self.task, ours["vocabulary"])
        self.history, self.seconds = ours["history"], ours["seconds"]
        self._plateau, self.extra_sets = ours["plateau"], ours["extra_sets"]


class _Evaluation(torch.utils.data.Dataset[Batch]):
    """Batches of a split, each sample exactly once."""

    def __init__(self, split: Split, batch_size: int) -> None:
        self.split = split
        self.batches = evaluation_batches(split, batch_size)

    def __getitem__(self, i: int) -> Batch:
        return collate(self.split, self.batches[i])


def _evaluation(split: Split, recipe: Recipe) -> tuple[_Evaluation, range]:
    data = _Evaluation(split, recipe.phases[-1].batch_size)
    return data, range(len(data.batches))


def additional_set(task: Task, phase: Phase, seed: int) -> Split:
    """The samples of a curriculum phase, made from the seed."""
    if not hasattr(task, "generate_split"):
        raise ValueError(f"a phase with its own lengths needs a generator; {task.name} has none")
    shortest, longest = phase.lengths or (0, 0)
    return task.generate_split(
        phase.num_samples, seed=1_000_000 + seed, min_length=shortest, max_length=longest
    )


def check_vocabulary(task: Task, stored: str) -> None:
    """Refuse a checkpoint whose token ids mean something else."""
    if stored != task.vocabulary.hash:
        raise ValueError(
            f"the checkpoint was trained with vocabulary {stored}, but {task.name} now has "
            f"{task.vocabulary.hash}: its token ids mean something else. Test it with the version "
            "of fastattn that trained it (result.json names it)"
        )


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
        mixer: A name in ``fastattn.lra.encoder.MIXERS``.
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
    splits = task.load(data_dir)
    result = _describe(task, data_dir, splits, recipe, mixer)
    if resume:
        _check_same_run(out, result)

    lightning.seed_everything(recipe.seed, verbose=False)
    cores = os.cpu_count() or 1
    workers = (min(8, cores) if cores > 2 else 0) if workers is None else workers
    model = Classifier(task, recipe, mixer, splits, workers)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    out.mkdir(parents=True, exist_ok=True)
    _write(out, result)

    cuda = torch.cuda.is_available()
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
    if recipe.patience is not None:
        callbacks.append(EarlyStopping("val/accuracy", mode="max", patience=recipe.patience))
    trainer = lightning.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if cuda and recipe.bf16 else "32-true",
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
        "finished": trainer.global_step >= recipe.last_step or trainer.should_stop,
        "additional_sets": model.extra_sets,
        "best": best_entry,
        "history": model.history,
    }
    if cuda:
        result["fit"]["peak_memory_mib"] = torch.cuda.max_memory_allocated() // 2**20
    _write(out, result)
    plot_curve(out)
    return result


def run_test(run: Path, data_dir: Path | None = None) -> dict[str, Any]:
    """Test a run's best checkpoint on every test sample once; the result goes to result.json.

    Args:
        run: A run directory made by :func:`fit`.
        data_dir: The data; None means where the run's training data was.

    Raises:
        ValueError: The run is incomplete, or its vocabulary is another one.
    """
    path = run / "result.json"
    if not path.is_file():
        raise ValueError(f"{run} is not a run: it has no result.json")
    result = json.loads(path.read_text())
    best = run / "checkpoints" / "best.ckpt"
    if not best.is_file():
        raise ValueError(f"{run} has no checkpoint yet: {best} does not exist")
    task = TASKS[result["task"]]
    splits = task.load(data_dir or Path(result["data"]["directory"]))
    recipe = Recipe.from_dict(result["recipe"])
    model = Classifier(task, recipe, result["mixer"], splits)
    checkpoint = torch.load(best, map_location="cpu", weights_only=True)
    check_vocabulary(task, checkpoint["fastattn"]["vocabulary"])
    model.load_state_dict(checkpoint["state_dict"])

    cuda = torch.cuda.is_available()
    trainer = lightning.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if cuda and recipe.bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        callbacks=[TQDMProgressBar(10)],
    )
    trainer.test(model, verbose=False)
    split = splits["test"]
    order = np.concatenate(_evaluation(split, recipe)[0].batches)
    predictions = np.empty_like(split.labels)
    predictions[order] = torch.cat(model.predictions).numpy()
    result["test"] = {
        "samples": len(split),
        "accuracy": float((predictions == split.labels).mean()),
        "step": checkpoint["global_step"],
        "fingerprint": split.fingerprint(),
        "floors": task.floors(split),
        **task.breakdown(split, predictions),
    }
    _write(run, result)
    return result


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
            "directory": str(data_dir),
            "samples": {name: len(split) for name, split in splits.items()},
            "fingerprints": {name: split.fingerprint() for name, split in splits.items()},
        },
        "floors": task.floors(splits["val"]),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("fastattn", "torch", "triton", "lightning")},
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_same_run(out: Path, now: dict[str, Any]) -> None:
    before = json.loads((out / "result.json").read_text())
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
