"""Schedules: those that torch has too are torch's, step for step."""

import json
from dataclasses import replace

import pytest
import torch

from fastattn.lra.cli import main
from fastattn.lra.recipes import SMOKE, Phase, Recipe
from fastattn.lra.tasks import TASKS


def recipe(*decays, steps=100, warmup=0):
    phases = tuple(Phase(steps=steps, batch_size=1, lr=0.5, decay=decay) for decay in decays)
    return Recipe(name="x", phases=phases, warmup=warmup)


def of_torch(make, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("steps", [4, 10, 100, 101])
def test_onecycle_is_that_of_torch(steps):
    ours = [recipe("onecycle", steps=steps).lr_at(step) for step in range(steps)]
    make = torch.optim.lr_scheduler.OneCycleLR
    want = of_torch(lambda o: make(o, 0.5, total_steps=steps, cycle_momentum=False), steps)
    assert ours == pytest.approx(want, rel=1e-9)


def test_onecycle_takes_the_shortest_phases():
    for steps in (1, 2, 3):
        rates = [recipe("onecycle", steps=steps).lr_at(step) for step in range(steps)]
        assert all(0 < rate <= 0.5 for rate in rates)


def test_linear_is_that_of_torch():
    ours = [recipe("linear").lr_at(step) for step in range(100)]
    make = torch.optim.lr_scheduler.LinearLR
    want = of_torch(lambda o: make(o, 1.0, 0.0, total_iters=100), 100)
    assert ours == pytest.approx(want, rel=1e-9)


def test_rsqrt_rises_to_its_peak_at_the_warm_ups_end_and_falls_as_a_root():
    x = recipe("rsqrt", steps=2000, warmup=50)
    rates = [x.lr_at(step) for step in range(2000)]
    assert max(rates) == rates[49] == 0.5
    assert rates[24] == pytest.approx(0.25)
    assert rates[199] == pytest.approx(0.25)  # four times as far
    assert rates[1799] == pytest.approx(0.5 / 6)


def test_rsqrt_without_a_warm_up_falls_from_the_first_step():
    x = recipe("rsqrt")
    assert [x.lr_at(step) for step in (0, 3, 99)] == pytest.approx([0.5, 0.25, 0.05])


def test_each_phase_begins_its_own_schedule():
    x = recipe("linear", "onecycle")
    assert x.lr_at(99) == pytest.approx(0.005)
    assert x.lr_at(100) == pytest.approx(0.02)
    assert x.lr_at(129) == pytest.approx(0.5)


def test_onecycle_warms_up_by_itself():
    with pytest.raises(ValueError, match="onecycle warms up by itself: warmup must be 0, got 5"):
        recipe("onecycle", warmup=5)
    recipe("constant", "onecycle", warmup=5)


def test_the_command_sets_it_in_every_phase(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "run"
    sizes = {"num_train": 20, "num_val": 9, "num_test": 9, "min_length": 5, "max_length": 20}
    TASKS["listops"].generate(data, **sizes, workers=1)
    words = f"fit --task listops --data-dir {data} --mixer linear --workers 0 --out {out}"
    assert main([*words.split(), "--lr", "0"]) == 2
    assert "lr must be positive" in capsys.readouterr().err
    assert main([*words.split(), "--decay", "onecycle", "--lr", "0.25"]) == 0
    result = json.loads((out / "result.json").read_text())
    assert [phase["decay"] for phase in result["recipe"]["phases"]] == ["onecycle"] * 2
    phases = tuple(replace(phase, decay="onecycle", lr=0.25) for phase in SMOKE.phases)
    want = replace(SMOKE, phases=phases, warmup=0)
    assert [e["lr"] for e in result["fit"]["history"]] == [
        want.lr_at(s - 1) for s in (5, 10, 15, 20)
    ]
