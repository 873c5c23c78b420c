"""Training as a run does it: does the GPU wait, for the host or for data? do two train as one?

python benchmarks/training.py --task listops --data-dir data/listops --recipe listops-budget \\
    --mixers softmax linear --devices 1 2 --out training_listops.json

Each run is the last phase of a recipe without dropout. Of some steps after a warm-up: milliseconds,
samples a second, the share of time spent waiting for data, the losses of all devices together. With
the first of these batches once more, under a profiler: the time in which a kernel runs on the first
GPU, as a share of the time that they took without the profiler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from conftest import pytest_benchmark_generate_machine_info as machine_info
from torch.profiler import ProfilerActivity, profile

from fastattn.lra.devices import hardware
from fastattn.lra.recipe import Recipe
from fastattn.lra.recipes import RECIPES
from fastattn.lra.tasks import TASKS
from fastattn.lra.train import Classifier

TIMED, PROFILED, COMPARED = 100, 20, 100
CUDA = torch.cuda.is_available()
ACTIVITY = ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU


class Watch(lightning.Callback):
    """Losses of all steps, times of those after the warm-up."""

    def __init__(self, warm: int) -> None:
        self.warm = warm
        self.losses: list[torch.Tensor] = []
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer, model, batch, index):
        if index == self.warm:
            self.began, self.waited = now(), model.waited
        elif index == self.warm + PROFILED:
            self.found["first_ms"] = 1000 * (now() - self.began) / PROFILED
        elif index == self.warm + TIMED:
            seconds = now() - self.began
            self.found["ms"] = 1000 * seconds / TIMED
            self.found["data_wait"] = (model.waited - self.waited) / seconds
            self.profile = profile(activities=[ACTIVITY])
            self.profile.start()

    def on_train_batch_end(self, trainer, model, outputs, batch, index):
        self.losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer, model):
        now()
        self.profile.stop()
        kernels = [
            event
            for event in self.profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        exchanges = [event for event in kernels if event.name.startswith("nccl")]
        self.found["busy_ms"] = covered(kernels) / PROFILED / 1000
        self.found["exchange_ms"] = covered(exchanges) / PROFILED / 1000
        self.found["kernels"] = len(kernels) / PROFILED
        losses = torch.stack(self.losses).double()
        self.found["losses"] = trainer.strategy.reduce(losses, reduce_op="mean").tolist()


class Watched(Classifier):
    """Batches that were timed come again."""

    def _stream(self, number: int) -> Any:
        again = self.recipe.steps - PROFILED
        return Again(super()._stream(number), again)


class Again:
    def __init__(self, stream: Any, step: int) -> None:
        self.stream, self.step = stream, step

    def __getitem__(self, step: int) -> Any:
        return self.stream[step - TIMED if step >= self.step else step]


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def covered(events: list[Any]) -> float:
    """Microseconds in which one of them runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((x.time_range.start, x.time_range.end) for x in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def watched(recipe: Recipe, options: argparse.Namespace, mixer: str, warm: int) -> Recipe:
    """The recipe's last phase, for as long as it is watched; its positions are its mixer's."""
    steps = warm + TIMED + PROFILED
    size = options.batch_size or recipe.phases[-1].batch_size
    phase = replace(recipe.phases[-1], steps=steps, epochs=0, decay="constant", batch_size=size)
    if mixer != recipe.mixer:
        recipe = replace(recipe, mixer=mixer, positions=None)
    recipe = replace(recipe, bf16=recipe.bf16 and not options.float32)
    return replace(recipe, phases=(phase,), dropout=0.0, warmup=warm, validate_every=steps)


def measure(options: argparse.Namespace, mixer: str, devices: int) -> dict[str, Any] | None:
    """One run; None on all but the first of its processes."""
    task = TASKS[options.task]
    splits = task.load(options.data_dir)
    longest = max(int(split.lengths.max()) for split in splits.values())
    # every shape is warmed up and recorded at its first two visits, where steps are compiled
    warm = 500 if options.compile else 50
    recipe = watched(RECIPES[options.recipe], options, mixer, warm)
    recipe = recipe.on(len(splits["train"]), longest)
    lightning.seed_everything(recipe.seed, verbose=False)
    watch = Watch(warm)
    trainer = lightning.Trainer(
        **hardware(recipe, devices),
        max_steps=recipe.steps,
        limit_val_batches=0,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Watched(task, recipe, mixer, splits, options.workers)
    if options.compile:
        model.encoder.compile_training()
    trainer.fit(model)
    batch_size = recipe.phases[0].batch_size
    case = {"task": task.name, "recipe": options.recipe, "mixer": mixer, "devices": devices}
    case |= {"compiled": options.compile, "batch_size": batch_size, "bf16": recipe.bf16}
    return case | watch.found if trainer.is_global_zero else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--data-dir", required=True, type=Path)
    parser.add_argument("--recipe", required=True, choices=RECIPES)
    parser.add_argument("--mixers", required=True, nargs="+")
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    parser.add_argument("--workers", type=int, default=4, help="loader processes a device")
    parser.add_argument("--batch-size", type=int, help="over all devices; else the recipe's")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--float32", action="store_true", help="else the recipe's precision")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--one", action="store_true", help="here, the first mixer and devices")
    options = parser.parse_args()
    if options.one:
        found = measure(options, options.mixers[0], options.devices[0])
        if found is not None:
            options.out.write_text(json.dumps(found))
        return
    runs = []
    # each in a process of its own, in which Lightning starts the others
    for mixer, devices in itertools.product(options.mixers, options.devices):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run.json"
            words = ["--task", options.task, "--data-dir", options.data_dir]
            words += ["--recipe", options.recipe, "--mixers", mixer, "--devices", devices]
            words += ["--workers", options.workers, "--out", out, "--one"]
            words += ["--compile"] * options.compile + ["--float32"] * options.float32
            if options.batch_size is not None:
                words += ["--batch-size", options.batch_size]
            subprocess.run([sys.executable, __file__, *map(str, words)], check=True)
            run = json.loads(out.read_text())
        runs.append(run)
        print(row(run, runs), flush=True)
    date = time.strftime("%Y-%m-%d")
    options.out.write_text(json.dumps({"machine": machine_info(), "date": date, "runs": runs}))


def row(run: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    alone = next(r for r in runs if r["mixer"] == run["mixer"])
    apart = max(abs(a - b) for a, b in zip(run["losses"][:COMPARED], alone["losses"], strict=False))
    return (
        f"{run['task']} {run['mixer']}{', compiled' * run['compiled']}"
        f"{', float32' * (not run['bf16'])}, batch {run['batch_size']}, "
        f"devices {run['devices']}: {run['ms']:.2f} ms a step, "
        f"{1000 * run['batch_size'] / run['ms']:.0f} samples/s "
        f"(x {alone['ms'] / run['ms']:.2f}), busy {run['busy_ms'] / run['first_ms']:.1%} "
        f"with {run['kernels']:.0f} kernels, {run['exchange_ms']:.2f} ms in exchange, "
        f"waiting for data {run['data_wait']:.1%}, "
        f"losses {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}, at most {apart:.1e} apart"
    )


if __name__ == "__main__":
    main()
