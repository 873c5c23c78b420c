"""Training: a Lightning module around the encoder, its data and its optimiser."""

from __future__ import annotations

import time
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from fastattn.lra.data import Batch, BatchStream, Split, Task, collate, evaluation_batches
from fastattn.lra.encoder import Encoder
from fastattn.lra.recipes import Phase, Recipe


class Classifier(lightning.LightningModule):
    """An encoder, its loss, its optimiser and its data.

    Everything random is a function of (seed, step): the batch, its augmentation and dropout. A
    run that is killed and resumed therefore gives the same losses as one that was not.

    Args:
        task: Where the data comes from.
        recipe: Every number of the run.
        mixer: A name in ``fastattn.lra.encoder.MIXERS``, or several, one a block.
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
            self._streams = {number: self._make_stream(phase, 1000 * recipe.seed + number)}
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
        every = self.recipe.validate_every
        stop = min(end, begin + ((self.global_step - begin) // every + 1) * every)
        steps = range(self.global_step - begin, stop - begin)
        return self._loader(self._stream(number), steps)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(*evaluation(self.splits["val"], self.recipe))

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(*evaluation(self.splits["test"], self.recipe))

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
        # Checkpoints lie at the end of an epoch: begin a new one, whatever its length, instead of
        # entering the old one again.
        loops = checkpoint["loops"]["fit_loop"]
        for progress in loops["epoch_progress"].values():
            progress["completed"] = progress["ready"]
        batches = loops["epoch_loop.batch_progress"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


class EvaluationData(torch.utils.data.Dataset[Batch]):
    """Batches of a split, each sample exactly once."""

    def __init__(self, split: Split, batch_size: int) -> None:
        self.split = split
        self.batches = evaluation_batches(split, batch_size)

    def __getitem__(self, i: int) -> Batch:
        return collate(self.split, self.batches[i])


def evaluation(split: Split, recipe: Recipe) -> tuple[EvaluationData, range]:
    data = EvaluationData(split, recipe.phases[-1].batch_size)
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
