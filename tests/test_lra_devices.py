"""Two processes give what one gives: the same losses, and every sample counted once."""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fastattn.lra.devices import _Ending, hardware
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


TOLD = """
import os, signal, sys, threading
from dataclasses import replace
from pathlib import Path

from fastattn.lra import runs, train
from fastattn.lra.recipes import SMOKE

data, out, rank = Path(sys.argv[1]), Path(sys.argv[2]), os.environ["RANK"]
step = train.Classifier.training_step

def told(self, batch, index):
    if self.global_step == 7 and rank in sys.argv[3]:
        os.kill(os.getpid(), signal.SIGTERM)
    print("step", self.global_step, flush=True)
    return step(self, batch, index)

train.Classifier.training_step = told
runs.fit("listops", data, SMOKE, "linear", out, workers=0, nodes=2)
"""


def hosts(tmp_path, program, *words):
    """Starts two hosts of a run."""
    (tmp_path / "program.py").write_text(program)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    about |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), *map(str, words)],
            env=os.environ | about | {"RANK": rank, "GROUP_RANK": rank, "NODE_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]


@pytest.mark.slow
def test_two_hosts_give_the_losses_of_one(data, tmp_path, monkeypatch):
    first, second = tmp_path / "one", tmp_path / "two"
    fit_alone = PROGRAM.replace("runs.evaluate(out, devices=devices)", "")
    program = fit_alone.replace("devices=devices", "nodes=devices")
    for host in hosts(tmp_path, program, data, second, 2):
        said = host.communicate(timeout=180)[1]
        assert host.returncode == 0, said[-3000:]
    monkeypatch.setattr(sys, "argv", ["program.py", str(data), str(first), "1"])
    runpy.run_path(str(tmp_path / "program.py"))
    one, two = (json.loads((run / "result.json").read_text()) for run in (first, second))
    assert two["fit"]["devices"] == 2
    for a, b in zip(one["fit"]["history"], two["fit"]["history"], strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("told", ["1", "01"])
def test_where_one_host_is_told_to_end_all_end_at_the_same_step(told, data, tmp_path):
    both = hosts(tmp_path, TOLD, data, tmp_path / "run", told)
    said = [host.communicate(timeout=120)[0] for host in both]
    assert [host.returncode for host in both] == [143, 143]
    steps = [int(re.findall(r"step (\d+)", x)[-1]) for x in said]
    assert steps[0] == steps[1] in (7, 8, 9)


@pytest.mark.gpu
def test_processes_agree_without_waiting_for_the_gpu(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    before = signal.getsignal(signal.SIGTERM)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0), launcher=None)
    connector = SimpleNamespace(received_sigterm=False)
    ending = _Ending(SimpleNamespace(strategy=strategy, _signal_connector=connector))
    try:
        ending.ask()  # its first exchange sets NCCL up
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        ending.ask()
        ending.tell(signal.SIGTERM, None)
        ending.ask()  # says it
        with pytest.raises(SIGTERMException):
            ending.ask()  # and acts on what was said
    finally:
        torch.cuda.set_sync_debug_mode("default")
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()
    assert connector.received_sigterm


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
