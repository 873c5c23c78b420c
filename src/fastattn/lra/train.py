"""Training: a Lightning module around the encoder, its data and its optimiser."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.lra.augmentations import augmentation
from fastattn.lra.data import Batch, BatchStream, Split, Task
from fastattn.lra.devices import is_first
from fastattn.lra.encoder import encoder_for
from fastattn.lra.loading import EvaluationData, Loader, Share, Shares, Stretch, loader
from fastattn.lra.recipes import Phase, Recipe
from fastattn.nn import redraw_projections

CHANCE = 0.002  # nats from a loss that needs no input
CHANCE_STEPS = 20  # fewer do not tell
WAIT, WAIT_SECONDS = 0.03, 60  # share of the training time; fewer seconds do not tell


class Classifier(lightning.LightningModule):
    """An encoder, its loss, its optimiser and its data.

    Everything random is a function of (seed, step): the batch, its augmentation and dropout. A
    run that is killed and resumed therefore gives the same losses as one that was not, and so
    does a run on several devices, but for dropout, which each of them draws for its own samples.

    Args:
        task: Where the data comes from.
        recipe: Every number of the run.
        mixer: A name in ``fastattn.lra.encoder.MIXERS``, or several, one a block.
        splits: ``{"train": ..., "val": ...}``.
        workers: Loader processes.

    Raises:
        ValueError: The recipe is for another task, or has a number that nothing would use.
    """

    def __init__(
        self, task: Task, recipe: Recipe, mixer: str, splits: dict[str, Split], workers: int = 0
    ) -> None:
        super().__init__()
        self.task, self.recipe, self.mixer = task, recipe, mixer
        self.splits, self.workers = splits, workers
        self._augment = augmentation(task, recipe)
        self.encoder = encoder_for(task, recipe, mixer)
        if not recipe.classifies:  # what is not trained does not decay either
            for part in (self.encoder.pool, self.encoder.norm, self.encoder.head):
                part.requires_grad_(False)
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0
        self.waited = 0.0
        self.warnings: list[str] = []
        self.extra_sets: dict[str, dict[str, Any]] = {}
        self._streams: dict[int, BatchStream] = {}
        self._ahead: tuple[int, Iterator[Share]] | None = None  # from which step on, and what
        self._losses: dict[str, list[Tensor]] = {"loss": [], "denoise_loss": []}
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._plateau = {"phase": 0, "best": float("inf"), "waited": 0, "factor": 1.0}

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
        return BatchStream(split, phase.batch_size, seed=seed, augment=self._augment)

    def train_dataloader(self) -> Stretch:
        """The steps up to the next validation; called again after each (an "epoch" here)."""
        number, begin = self.recipe.phase_at(self.global_step)
        end = min(self.recipe.last_step, begin + self.recipe.phases[number].steps)
        every = self.recipe.validate_every
        stop = min(end, begin + ((self.global_step - begin) // every + 1) * every)
        if self._ahead is None or self._ahead[0] != self.global_step or self.global_step == begin:
            turns, ranks = self.recipe.accumulate, self.trainer.world_size
            shares = Shares(self._stream(number), self.global_rank, ranks, turns)
            items = range((self.global_step - begin) * turns, (end - begin) * turns)
            self._ahead = self.global_step, iter(loader(shares, items, self.workers))
        self._ahead = stop, self._ahead[1]
        turns = max(0, stop - self.global_step) * self.recipe.accumulate
        return Stretch(self._ahead[1], turns, self._wait)

    def on_train_end(self) -> None:
        self._ahead = None  # ends its processes

    def _wait(self, seconds: float) -> None:
        self.waited += seconds

    def val_dataloader(self) -> Loader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> Loader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, name: str) -> Loader:
        data = EvaluationData(self.splits[name], self.recipe.phases[-1].batch_size)
        shares = Shares(data, self.global_rank, self.trainer.world_size)
        return loader(shares, range(len(data.batches)), self.workers)

    def transfer_batch_to_device(
        self, batch: Share, device: torch.device, dataloader_idx: int
    ) -> Share:
        """The lengths stay on the CPU, where the encoder needs them."""
        tokens, lengths, labels = batch.batch
        tokens, labels = (x.to(device, non_blocking=True).long() for x in (tokens, labels))
        return batch._replace(batch=Batch(tokens, lengths, labels))

    # Steps

    def on_train_epoch_start(self) -> None:
        self._began = time.perf_counter()

    def on_train_batch_start(self, batch: Share, batch_idx: int) -> None:
        turn = batch_idx % self.recipe.accumulate
        share = turn * self.trainer.world_size + self.global_rank
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.global_step + (share << 40))

    def on_train_batch_end(self, outputs: Any, batch: Share, batch_idx: int) -> None:
        if (batch_idx + 1) % self.recipe.accumulate == 0:
            redraw_projections(self.encoder, self.global_step)

    def training_step(self, batch: Share, batch_idx: int) -> Tensor:
        (tokens, lengths, labels), _, weight = batch
        loss = torch.zeros((), device=self.device)
        if self.recipe.classifies:
            loss = weight * F.cross_entropy(self.encoder(tokens, lengths), labels)
            self._note("loss", loss, batch)
        if self.recipe.penalty:
            penalty = self.encoder.pool.penalty
            assert isinstance(penalty, Tensor)
            loss = loss + weight * self.recipe.penalty * penalty
        if self.recipe.denoise:
            denoising = weight * self._denoising(batch).mean()
            self._note("denoise_loss", denoising, batch)
            loss = loss + self.recipe.denoise.weight * denoising
        return loss

    def _note(self, name: str, loss: Tensor, batch: Share) -> None:
        self._losses[name].append(loss.detach())
        size = max(1, batch.counted)
        # in Lightning's progress bar it would be waited for at every step
        self.log(f"train/{name}", loss.detach(), batch_size=size)

    def latest_losses(self) -> dict[str, float]:
        """Of the last step; waits for it."""
        return {name: losses[-1].item() for name, losses in self._losses.items() if losses}

    def _denoising(self, share: Share) -> Tensor:
        """The denoising loss of each document of a share."""
        denoise, size = self.recipe.denoise, len(self.task.vocabulary)
        assert denoise is not None
        tokens, lengths, _ = share.batch
        corrupted, selected = denoise.corrupt(tokens, lengths, mask=size)
        predicted = self.encoder.denoised(corrupted, lengths, selected)
        return denoise.losses(predicted, tokens, selected, size)

    def on_validation_epoch_start(self) -> None:
        self.seconds += time.perf_counter() - self._began
        self._sums = torch.zeros(4, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Share, batch_idx: int) -> None:
        if self.recipe.classifies:
            self._evaluate(batch)
        if self.recipe.denoise:
            torch.manual_seed(batch_idx)  # the same tokens every time
            losses = self._denoising(batch)[: batch.counted * self.task.parts].double().sum()
            self._sums[3] += losses / self.task.parts
            if not self.recipe.classifies:
                self._sums[0] += batch.counted

    def on_test_epoch_start(self) -> None:
        split = self.splits["test"]
        self._sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        self._places = EvaluationData(split, self.recipe.phases[-1].batch_size).batches
        self.predictions = torch.zeros(len(split), dtype=torch.int64, device=self.device)

    def test_step(self, batch: Share, batch_idx: int) -> None:
        predicted = self._evaluate(batch).argmax(-1)
        places = self._places[batch_idx][self.global_rank :: self.trainer.world_size]
        self.predictions[torch.from_numpy(places)] = predicted[: batch.counted]

    def on_test_epoch_end(self) -> None:
        """``predictions`` are those of all devices, ``(N,)``, in the order of the split."""
        self._report("test")
        self.predictions = self.trainer.strategy.reduce(self.predictions, reduce_op="sum")

    def _evaluate(self, share: Share) -> Tensor:
        """Logits of a share; adds samples, right answers and losses to the sums."""
        (tokens, lengths, labels), counted, _ = share
        logits = self.encoder(tokens, lengths).float()
        right = (logits.argmax(-1) == labels)[:counted].sum()
        losses = F.cross_entropy(logits, labels, reduction="none")[:counted].double().sum()
        self._sums[:3] += torch.stack((torch.full_like(losses, counted), right.double(), losses))
        return logits

    def _report(self, stage: str) -> dict[str, float]:
        """Means over the samples of all devices, each of which counts once, by name."""
        sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        samples = sums[0]
        if samples != len(self.splits[stage]):
            raise RuntimeError(f"{stage} has {len(self.splits[stage])} samples, counted {samples}")
        means: dict[str, float] = {}
        if self.recipe.classifies:
            means |= {"loss": sums[2] / samples, "accuracy": sums[1] / samples}
        if self.recipe.denoise and stage == "val":
            means["denoise_loss"] = sums[3] / samples
        for name, mean in means.items():
            self.log(f"{stage}/{name}", mean, prog_bar=True)
        return means

    def on_validation_epoch_end(self) -> None:
        means = self._report("val")
        entry = {
            "step": self.global_step,
            "seconds": round(self.seconds, 3),
            "lr": self._lr_at(self.global_step - 1),
        }
        for name in ("loss", "denoise_loss"):
            if name in means:
                entry[f"train_{name}"] = self._mean(self._losses[name])
        entry |= {f"val_{name}": mean for name, mean in means.items()}
        if self.recipe.classifies:
            steps = len(self._losses["loss"]) // self.recipe.accumulate
            self._watch_chance(entry["train_loss"], steps)
        for losses in self._losses.values():
            losses.clear()
        self.history.append(entry)
        if self.diverged:
            self._warn(
                f"diverged: at step {self.global_step} the loss is no number, and training "
                "ends. Take a lower learning rate, a longer warm-up, or clip the gradient"
            )
            self.trainer.should_stop = True
        self._watch_plateau(means["loss" if self.recipe.classifies else "denoise_loss"])
        self._began = time.perf_counter()

    def _mean(self, losses: list[Tensor]) -> float:
        """Over the steps and the devices."""
        if not losses:
            return float("nan")
        mean: Tensor = self.trainer.strategy.reduce(torch.stack(losses).mean(), reduce_op="mean")
        return mean.item()

    @property
    def diverged(self) -> bool:
        """Whether the last validation had a loss that is no number."""
        last = self.history[-1] if self.history else {}
        return not all(map(math.isfinite, (last.get(f"val_{x}", 0.0) for x in self._losses)))

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        if is_first():
            warnings.warn(text, stacklevel=2)

    def _watch_chance(self, loss: float, steps: int) -> None:
        """Say once that nothing has been learnt in the first tenth of the run."""
        told = any(text.startswith("stuck at chance") for text in self.warnings)
        if told or steps < CHANCE_STEPS or self.global_step < 0.1 * self.recipe.steps:
            return
        number, _ = self.recipe.phase_at(self.global_step - 1)  # whose steps the loss is of
        for name, chance in self.task.chance(self._stream(number).split).items():
            if abs(loss - chance) <= CHANCE:
                self._warn(
                    f"stuck at chance: at step {self.global_step} of {self.recipe.steps} the "
                    f"training loss is {loss:.4f} nats, that of guessing from {name} "
                    f"({chance:.4f}). Take a lower learning rate or a longer warm-up, begin with "
                    "easier or shorter samples, or look at the data with fastattn-lra verify"
                )
                return

    def watch_waiting(self) -> None:
        """Say, after the run, that it waited for data for a share of its time that matters."""
        share = self.waited / self.seconds
        if share > WAIT and self.seconds >= WAIT_SECONDS:
            self._warn(
                f"{share:.1%} of the training time was spent waiting for data: take more loader "
                f"processes by --workers, here {self.workers}, up to one a core"
            )

    def _watch_plateau(self, loss: float) -> None:
        phase, _ = self.recipe.phase_at(self.global_step)
        if self.recipe.phases[phase].decay != "plateau":
            return
        state = self._plateau
        if state["phase"] != phase:
            state.update(phase=phase, best=float("inf"), waited=0, factor=1.0)
        if loss < state["best"]:
            state.update(best=loss, waited=0)
            return
        state["waited"] += 1
        if state["waited"] > self.recipe.plateau_patience:
            state.update(waited=0, factor=state["factor"] / 2)

    def _lr_at(self, step: int) -> float:
        """The learning rate of a step, as plateaus of its phase have lowered it."""
        same = self.recipe.phase_at(step)[0] == self._plateau["phase"]
        return self.recipe.lr_at(step) * (self._plateau["factor"] if same else 1.0)

    def configure_optimizers(self) -> Any:
        """AdamW; weight decay on matrices only. The schedule gives absolute learning rates."""
        fused = self.device.type == "cuda"
        groups = self.encoder.parameter_groups(self.recipe.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=self.recipe.betas, fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_at)
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
        if self.recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.recipe.clip)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["fastattn"] = {
            "vocabulary": self.task.vocabulary.hash,
            "history": self.history,
            "seconds": self.seconds,
            "waited": self.waited,
            "warnings": self.warnings,
            "plateau": self._plateau,
            "extra_sets": self.extra_sets,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint["fastattn"]
        check_vocabulary(self.task, ours["vocabulary"])
        self.history, self.seconds = ours["history"], ours["seconds"]
        phase, _ = self.recipe.phase_at(checkpoint["global_step"])
        self._plateau, self.extra_sets = {"phase": phase} | ours["plateau"], ours["extra_sets"]
        self.waited, self.warnings = ours.get("waited", 0.0), ours.get("warnings", [])
        # Checkpoints lie at the end of an epoch: begin a new one, whatever its length, instead of
        # entering the old one again.
        loops = checkpoint["loops"]["fit_loop"]
        for progress in loops["epoch_progress"].values():
            progress["completed"] = progress["ready"]
        batches = loops["epoch_loop.batch_progress"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


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


if __name__ == "__main__":  # the command; fit where it is not said what
    from fastattn.lra.cli import main

    words = sys.argv[1:]
    sys.exit(main(words if words and not words[0].startswith("-") else ["fit", *words]))
