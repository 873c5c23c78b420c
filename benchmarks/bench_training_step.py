"""A step of training, optimiser included: what do the kernels save of it, beside their torch path
and softmax attention? Two Long Range Arena recipes, batches of documents of full length."""

import dataclasses

import pytest
import torch
from conftest import DEVICE

pytest.importorskip("lightning", reason="extra lra: not installed")
from fastattn.lra.data import Batch
from fastattn.lra.encoder import encoder_for
from fastattn.lra.measure import time_steps
from fastattn.lra.recipes import RECIPES
from fastattn.lra.tasks import TASKS

# recipe: task and tokens
SIZES = {"listops-budget": ("listops", 2000), "text-transformer": ("text", 4096)}
MIXERS = ("performer", "linear", "bigbird", "linformer", "long_conv")
RIVALS = [("softmax", ""), *((mixer, path) for mixer in MIXERS for path in ("", "torch"))]


@pytest.mark.parametrize("recipe", SIZES)
@pytest.mark.parametrize(("mixer", "path"), RIVALS)
def bench_training_step(benchmark, monkeypatch, recipe, mixer, path):
    task_name, n = SIZES[recipe]
    task, plan = TASKS[task_name], RECIPES[recipe]
    size = plan.phases[-1].batch_size
    if DEVICE == "cpu":
        size, n = 2, 128
    if path:
        monkeypatch.setenv("FASTATTN_BACKEND", path)
    torch.manual_seed(0)
    positions = "rotary" if mixer == "softmax" else "sinusoidal"
    plan = dataclasses.replace(plan, max_length=n, positions=positions)
    encoder = encoder_for(task, plan, mixer).to(DEVICE)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, len(task.vocabulary), (size, n), generator=draw)
    labels = torch.randint(task.num_classes, (size,), generator=draw)
    batches = [Batch(tokens, torch.full((size,), n), labels)] * 10
    step = benchmark.pedantic(time_steps, (encoder, batches), {"bf16": plan.bf16}, rounds=1)
    benchmark.extra_info.update(
        {
            "op": f"{recipe}, width {plan.width}, {plan.depth} layers",
            "rival": f"{mixer}, {path} path" if path else mixer,
            "base": "softmax",
            "pass": "training step",
            "shape": [size, plan.width, n],
            "n": n,
            "dtype": "bfloat16, mixed",
            "ms": step.milliseconds,
            "graph_ms": None,
            "peak_mib": step.peak_mib,
            "error": None,
        }
    )
