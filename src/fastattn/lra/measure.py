"""Measuring a run's model: its predictions, its reach, and the memory and time of its steps."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.lra.checkpoints import read_checkpoint
from fastattn.lra.data import Batch, Data, Indices, Split, Task, collate, evaluation_batches
from fastattn.lra.encoder import Encoder, encoder_for, reach
from fastattn.lra.results import Result, recipe_of
from fastattn.lra.tasks import TASKS
from fastattn.lra.train import check_vocabulary

OUT_OF_MEMORY = "out of memory"
PASSES = 3  # over the same batches


@dataclass(frozen=True)
class Step:
    """What a training step takes; peak memory is not measured on a CPU."""

    milliseconds: float
    peak_mib: float | None


def task_of(result: Result) -> Task:
    return TASKS[result.task]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_of(result: Result, *, max_length: int | None = None) -> Encoder:
    """The encoder of a run with initial values, on the CPU.

    Args:
        result: A run.
        max_length: Make it for documents of this length instead of the run's.

    Raises:
        ValueError: The recipe is not of this version, or cannot have that length.
    """
    recipe = recipe_of(result)
    recipe = replace(recipe, max_length=recipe.max_length if max_length is None else max_length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return encoder_for(task_of(result), recipe, result.mixer)


def trained(result: Result) -> Encoder:
    """The encoder of a run with its best weights, on this machine's device, for evaluation.

    Raises:
        ValueError: The run has no checkpoint, or one of something else.
    """
    path = result.path / "checkpoints" / "best.ckpt"
    if not path.is_file():
        raise ValueError(f"no checkpoints/{path.name}")
    checkpoint = read_checkpoint(path)
    check_vocabulary(task_of(result), checkpoint["fastattn"]["vocabulary"])
    weights = {
        name.removeprefix("encoder."): weight
        for name, weight in checkpoint["state_dict"].items()
        if name.startswith("encoder.")
    }
    encoder = model_of(result)
    try:
        encoder.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the recipe in result.json: {error}") from None
    return encoder.to(device()).eval()


def data_of(result: Result, data_dir: Path | None = None) -> Data:
    """The data of a run, or other data cut and split as the run's.

    Raises:
        ValueError: It is not there.
    """
    data = result.content["data"]
    return task_of(result).load(data_dir or Path(data["directory"]), data.get("protocol"))


def predict(encoder: Encoder, split: Split, batch_size: int, *, bf16: bool) -> Indices:
    """Labels of a split, ``(N,)``, in its order.

    Args:
        encoder: In evaluation mode.
        split: The samples.
        batch_size: Samples at a time, the shortest first.
        bf16: Mixed precision on a GPU, as in training.
    """
    found = np.zeros(len(split), np.int64)
    place = next(encoder.parameters()).device
    with torch.inference_mode(), _precision(place, bf16):
        for index in evaluation_batches(split, batch_size):
            tokens, lengths, _ = collate(split, index)
            found[index] = encoder(tokens.to(place), lengths).argmax(-1).cpu().numpy()
    return found


def measured_reach(result: Result) -> list[int] | None:
    """Which tokens change one, by its gradient: their distances from it; None without a limit.

    Of the run's model with initial values, in float64. Transforms of long convolutions round, so
    that nothing below 1e-13 of the largest gradient counts.
    """
    encoder = model_of(result).double().eval()
    limits = reach(encoder)
    if limits is None:
        return None
    front = int(encoder.cls is not None)  # which is no token
    margin = 2
    n = sum(limits) + 1 + 2 * margin
    at = limits[0] + margin
    seen: dict[str, Tensor] = {}

    def embedded(module: object, arguments: object, out: Tensor) -> Tensor:
        seen["in"] = out.detach().double().requires_grad_()
        return seen["in"]

    def pooled(module: object, arguments: tuple[Tensor, object]) -> None:
        seen["out"] = arguments[0]

    parts = task_of(result).parts
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(task_of(result).vocabulary), (parts, n), generator=draw)
    hooks = (
        encoder.embedding.register_forward_hook(embedded),
        encoder.pool.register_forward_pre_hook(pooled),
    )
    try:
        encoder(tokens, torch.full((parts,), n))
    finally:
        for hook in hooks:
            hook.remove()
    (gradient,) = torch.autograd.grad(seen["out"][0, at + front].sum(), seen["in"])
    size = gradient[0].abs().sum(-1)
    return [i - at for i in (size > 1e-13 * size.max()).nonzero().flatten().tolist()]


def time_steps(encoder: Encoder, batches: Sequence[Batch], *, bf16: bool) -> Step:
    """The median over the batches of the shortest synchronised training step, and the peak memory.

    A batch's shortest is of three passes over all of them, since a host's Python may be slow for
    seconds. A pass before is not counted: compilation, tuning, lengths that are met for the first
    time, the optimiser's state.

    Args:
        encoder: Where it is to be trained.
        batches: At least one.
        bf16: Mixed precision on a GPU.
    """
    if not batches:
        raise ValueError("batches must be at least one")
    place = next(encoder.parameters()).device
    cuda = place.type == "cuda"
    optimizer = torch.optim.AdamW(encoder.parameters(), fused=cuda)
    encoder.train()

    def seconds(batch: Batch) -> float:
        tokens, lengths, labels = batch
        _synchronize(place)
        began = time.perf_counter()
        with _precision(place, bf16):
            loss = F.cross_entropy(encoder(tokens.to(place), lengths), labels.to(place))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(place)
        return time.perf_counter() - began

    for batch in batches:
        seconds(batch)
    if cuda:
        torch.cuda.reset_peak_memory_stats(place)
    found = [[seconds(batch) for batch in batches] for _ in range(PASSES)]
    peak = torch.cuda.max_memory_allocated(place) / 2**20 if cuda else None
    return Step(1000 * statistics.median(map(min, zip(*found, strict=True))), peak)


def step_at_length(result: Result, batch_size: int, n: int, steps: int = 5) -> Step:
    """A training step of the run's model, made for n tokens, on documents of n tokens.

    Raises:
        ValueError: The model cannot have that length.
        torch.OutOfMemoryError: It does not fit.
    """
    encoder = model_of(result, max_length=n).to(device())
    task = task_of(result)
    draw = torch.Generator().manual_seed(0)
    documents = batch_size * task.parts
    tokens = torch.randint(1, len(task.vocabulary), (documents, n), generator=draw)
    labels = torch.randint(task.num_classes, (batch_size,), generator=draw)
    batch = Batch(tokens, torch.full((documents,), n), labels)
    return time_steps(encoder, [batch] * steps, bf16=recipe_of(result).bf16)


def by_length(measure: Callable[[int], Step], lengths: Sequence[int]) -> dict[int, Step | str]:
    """A step at each length, or why there is none: "out of memory", or what the model says."""
    found: dict[int, Step | str] = {}
    for n in lengths:
        try:
            found[n] = measure(n)
        except ValueError as error:
            found[n] = str(error)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found[n] = OUT_OF_MEMORY
        gc.collect()  # the model of this length goes before the next is made
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


@contextmanager
def memory_limited(gib: float | None) -> Iterator[None]:
    """While something is measured: a smaller GPU, whose memory runs out at this many GiB.

    Raises:
        ValueError: The GPU has less.
    """
    if gib is None:
        yield
        return
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    if gib > total:
        raise ValueError(f"memory_limit must be at most the GPU's {total:.1f} GiB, got {gib:g}")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(gib / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the allocator, or one of CUDA's libraries for itself, found no memory."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def powers_of_two(first: int, last: int) -> list[int]:
    """From ``first``, doubled up to ``last``.

    Raises:
        ValueError: There is none.
    """
    if last < first:
        raise ValueError(f"max_length must be at least {first}, got {last}")
    return [first << i for i in range((last // first).bit_length())]


def _precision(place: torch.device, bf16: bool) -> torch.autocast:
    return torch.autocast(place.type, torch.bfloat16, enabled=bf16 and place.type == "cuda")


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
