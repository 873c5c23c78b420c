"""Two processes give what one gives: the same losses, and every sample counted once."""

import json
import runpy
import subprocess
import sys

import pytest

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
