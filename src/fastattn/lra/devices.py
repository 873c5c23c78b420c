"""Where a run trains: one device or several, on one host or several."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from fastattn.lra.recipe import Recipe

ASKED_EVERY = 50  # steps


class DataParallel(DDPStrategy):
    """Leaves a batch where it is: told of its device, torch would move the lengths there too.

    Lightning asks the first process at every step whether it was told to end, and waits for the
    answer, and so for the GPU: here it asks at every 50th.
    """

    def determine_ddp_device_ids(self) -> None:
        return None

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        loop = trainer.fit_loop.epoch_loop
        ask = getattr(loop, "_broadcast_sigterm_tensor", None)
        if ask is not None:  # of Lightning 2.6

            def ask_seldom() -> None:
                if loop.global_step % ASKED_EVERY == 0:
                    ask()

            loop._broadcast_sigterm_tensor = ask_seldom


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
    # buffers are functions of the seed: alike everywhere already
    several = DataParallel(broadcast_buffers=False) if devices * nodes > 1 else "auto"
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
