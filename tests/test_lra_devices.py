"""Two processes give what one gives: the same losses, and every sample counted once."""

import json
import os
import runpy
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fastattn.lra.devices import hardware
from fastattn.lra.recipes import SMOKE
from fastattn.lra.tasks import TASKS

# 49 samples in batches of 4: the last batch of an epoch has one, fewer than there are processes
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

from fastattn.lra import runs
from fastattn.lra.recipes import SMOKE

data, out, devices = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
phases = (replace(SMOKE.phases[0], steps=13, batch_size=4), SMOKE.phases[1])
recipe = replace(SMOKE, phases=phases, dropout=0.0)
for steps in (8, 18):
    runs.fit("listops", data, recipe.at_most(steps), "performer", out, workers=0,
             resume=steps > 8, devices=devices)
runs.evaluate(out, devices=devices)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("listops")
    TASKS["listops"].generate(
        out, num_train=49, num_val=13, num_test=11, min_length=5, max_length=40, workers=1
    )
    return out


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_a_gpu_trains_in_16_bits_unless_a_recipe_says_no(bf16, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = hardware(replace(SMOKE, bf16=bf16))
    assert (options["accelerator"], options["precision"]) == ("gpu", precision)
    with pytest.raises(ValueError, match="devices is 2, but there are 1 GPUs"):
        hardware(SMOKE, 2)


@pytest.mark.slow
def test_two_hosts_give_the_losses_of_one(data, tmp_path, monkeypatch):
    program, first, second = (tmp_path / name for name in ("program.py", "one", "two"))
    fit_alone = PROGRAM.replace("runs.evaluate(out, devices=devices)", "")
    program.write_text(fit_alone.replace("devices=devices", "nodes=devices"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    about |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    hosts = [
        subprocess.Popen(
            [sys.executable, str(program), str(data), str(second), "2"],
            env=os.environ | about | {"RANK": rank, "GROUP_RANK": rank, "NODE_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    for host in hosts:
        said = host.communicate(timeout=180)[1]
        assert host.returncode == 0, said[-3000:]
    monkeypatch.setattr(sys, "argv", ["program.py", str(data), str(first), "1"])
    runpy.run_path(str(program))
    one, two = (json.loads((run / "result.json").read_text()) for run in (first, second))
    assert two["fit"]["devices"] == 2
    for a, b in zip(one["fit"]["history"], two["fit"]["history"], strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(data, tmp_path, monkeypatch):
    program, first, second = (tmp_path / name for name in ("program.py", "one", "two"))
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(data), str(second), "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(sys, "argv", ["program.py", str(data), str(first), "1"])
    runpy.run_path(str(program))
    one, two = (json.loads((run / "result.json").read_text()) for run in (first, second))
    assert two["fit"]["devices"] == 2
    assert len(one["fit"]["history"]) == 5
    for a, b in zip(one["fit"]["history"], two["fit"]["history"], strict=True):
        assert a["step"] == b["step"]
        for name in ("train_loss", "val_loss", "val_accuracy"):
            assert b[name] == pytest.approx(a[name], rel=1e-5), (a["step"], name)
    assert one["test"]["samples"] == two["test"]["samples"] == 11
    assert one["test"]["accuracy"] == two["test"]["accuracy"]
    assert one["test"]["by_root_operator"] == two["test"]["by_root_operator"]
