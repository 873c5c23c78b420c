"""Where a run trains: one device or several, on one host or several."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fastattn.lra.recipe import Recipe


class DataParallel(DDPStrategy):
    """Leaves a batch where it is: told of its device, torch would move the lengths there too.

    Where one process is told to end, all end together; Lightning asks the first one at every step,
    and waits for the answer, and so for the GPU.
    """

    def determine_ddp_device_ids(self) -> None:
        return None

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # of Lightning 2.6
            loop._broadcast_sigterm_tensor = _Ending(trainer).ask


class _Ending:
    """Processes say to each other at every step whether they were told to end (SIGTERM), and act on
    what was said at the last one: so they agree, and nobody waits for the step that has just
    been issued."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.told = trainer, False
        self.said: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def tell(self, signum: int, frame: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self.told:
            launcher.kill(signum)  # hands it on
        self.told = True

    def ask(self) -> None:
        if self.said is None:  # the first step, behind which Lightning has put its own handler
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self.tell)  # it puts back what was there at last
        elif self.answer(*self.said):
            self.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
        # filled there: a copy of it from here would wait for all that the GPU has to do
        told = torch.full((1,), float(self.told), device=self.trainer.strategy.root_device)
        torch.distributed.all_reduce(told)
        if told.device.type != "cuda":
            self.said = told, None
            return
        arrived = torch.cuda.Event()
        told = torch.empty(1, pin_memory=True).copy_(told, non_blocking=True)
        arrived.record()
        self.said = told, arrived

    @staticmethod
    def answer(told: torch.Tensor, arrived: torch.cuda.Event | None) -> bool:
        if arrived is not None:
            arrived.synchronize()
        return told.item() > 0


def hardware(recipe: Recipe, devices: int = 1, nodes: int = 1) -> dict[str, Any]:
    """Options of Lightning's trainer for so many devices on each of so many hosts.

    Raises:
        ValueError: A number is not positive, or the host has fewer GPUs.
    """
    cuda = torch.cuda.is_available()
    if devices < 1 or nodes < 1:
        raise ValueError(f"devices and nodes must be at least 1, got {devices} and {nodes}")
    if cuda and devices > torch.cuda.device_count():
        raise ValueError(f"devices is {devices}, but there are {torch.cuda.device_count()} GPUs")
    # buffers are functions of the seed: alike everywhere already. Gradients travel in pieces: of
    # torch's size, 25 MB, one would hold those of a whole model here, until the last
    alone = devices * nodes == 1
    several = "auto" if alone else DataParallel(broadcast_buffers=False, bucket_cap_mb=2)
    return {
        "accelerator": "gpu" if cuda else "cpu",
        "devices": devices,
        "num_nodes": nodes,
        "strategy": several,
        "use_distributed_sampler": False,
        "precision": "bf16-mixed" if cuda and recipe.bf16 else "32-true",
        "accumulate_grad_batches": recipe.accumulate,
    }


def is_first() -> bool:
    """Whether this is the process that writes and speaks, of all that train together."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in ranks)


def peak_of_process() -> int:
    """Bytes of memory of this process, at most so far; 0 where nobody counts them."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peaks(before: dict[str, Any], found: dict[str, int]) -> dict[str, int]:
    """The most memory in all sittings of a run: ``before`` is its record, ``found`` of this one."""
    names = ("peak_memory_mib", "peak_process_mib")
    either = [name for name in names if name in before or name in found]
    return {name: max(before.get(name, 0), found.get(name, 0)) for name in either}


def sittings(before: dict[str, Any], now: dict[str, Any], *, further: bool) -> dict[str, Any]:
    """Where a run that goes on trains: the devices of all its sittings, the versions of the last.

    Args:
        before: The result so far.
        now: The one that begins.
        further: Whether there are steps left to make; else all is as it was.
    """
    if not further:
        return {key: before.get(key, now[key]) for key in ("device", "versions")}
    devices = [*before.get("device", now["device"]).split(", then "), now["device"]]
    return {"device": ", then ".join(dict.fromkeys(devices))}
