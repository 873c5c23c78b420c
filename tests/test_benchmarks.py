"""The harness measures, and the report says what was measured and nothing else."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import report  # noqa: E402

from fastattn import _tuning  # noqa: E402


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "linear.json"
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir=.", "-k"]
    command += ["n512 and (eager or torch or sdpa) and False", f"--benchmark-json={out}"]
    # a child of a worker of xdist would take itself for one, and measure nothing
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(BENCHMARKS.parent / "src")
    subprocess.run(command, cwd=BENCHMARKS, env=environment, check=True, capture_output=True)
    return out


def test_every_measurement_has_time_error_and_device(measured):
    content = json.loads(measured.read_text())
    assert content["machine_info"]["torch"] == torch.__version__
    assert content["machine_info"]["device"]
    entries = [entry["extra_info"] for entry in content["benchmarks"]]
    assert {(e["rival"], e["pass"]) for e in entries} == {
        (rival, direction)
        for rival in ("eager", "torch", "sdpa")
        for direction in ("forward", "forward+backward")
    }
    for e in entries:
        assert e["ms"] > 0
        # bf16 outputs cannot be better than their rounding, and the formula is not much worse
        assert e["error"] is None if e["rival"] == "sdpa" else 1e-4 < e["error"] < 5e-2


def test_the_report_shows_each_measurement_with_its_error(measured, tmp_path):
    found = report.load([measured])
    (entries,) = found.values()
    text = report.page(found, tmp_path)
    for e in entries:
        begins = f"| 512 | {e['rival']} | {report.milliseconds(e['ms'])} |"
        row = next(x for x in text.splitlines() if x.startswith(begins))
        error = "-" if e["error"] is None else f"{e['error']:.1e}"
        assert f"| {error} |" in row
    assert f"torch {torch.__version__}" in text
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_what_is_measured_beside_another_takes_turns_with_it(measured, tmp_path):
    found = importlib.util.spec_from_file_location("harness", BENCHMARKS / "conftest.py")
    harness = importlib.util.module_from_spec(found)
    found.loader.exec_module(harness)

    class Recorder:
        def __init__(self):
            self.extra_info = {}

        def pedantic(self, call, **options):
            call()

    # on a host that is twice as slow for three of these measurements
    recorder, times = Recorder(), iter((4.0, 3.0, 8.0, 6.0, 8.0, 3.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "called_ms", lambda call: next(times))
        patch.setattr(harness, "DEVICE", "cpu")
        patch.setattr(harness, "ROUNDS", 3)
        beside = (torch.sigmoid, [])
        harness.Bench(recorder)(torch.relu, [torch.ones(2)], beside=beside, case={})
    info = recorder.extra_info
    assert info["base_ms_rounds"] == [4.0, 8.0, 8.0]
    assert info["ms_rounds"] == [3.0, 6.0, 3.0]
    assert (info["ms"], info["ratio"]) == (3.0, 0.75)
    content = json.loads(measured.read_text())
    content["benchmarks"][0]["extra_info"] |= info | {"base": "stock", "rival": "x", "n": 512}
    (tmp_path / "x.json").write_text(json.dumps(content))
    text = report.page(report.load([tmp_path / "x.json"]), tmp_path)
    assert "× at n = 512: the median of 3 ratios, each of two measurements" in text
    entries = [
        {"n": 8, "rival": r, "base": "stock", "graph_ms": None, "peak_mib": None, "error": None} | t
        for r, t in (("stock", {"ms": 4.0}), ("x", {"ms": 5.0, "ratio": 0.8}))
    ]
    assert report.table(entries).splitlines()[3].startswith("| 8 | x | 5.00 | 0.80 |")
    assert report.crossover(entries) == "x: from n = 8 on faster than stock, 1.2 times at n = 8.\n"


def test_ratios_are_to_ours():
    entries = [
        {"n": 8, "rival": r, "ms": ms, "graph_ms": None, "peak_mib": None, "error": 0.1}
        for r, ms in (("eager", 3.0), ("fastattn", 1.5))
    ]
    rows = report.table(entries).splitlines()[2:]
    assert rows[0].startswith("| 8 | fastattn | 1.50 | 1.0 |")
    assert rows[1].startswith("| 8 | eager | 3.00 | 2.0 |")


def test_a_file_that_is_no_benchmark_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="it has no benchmarks"):
        report.load([tmp_path / "x.json"])


def test_the_crossover_is_the_first_length_from_which_on_ours_stays_faster():
    def entries(ours, softmax):
        return [
            {"n": n, "rival": rival, "ms": ms, "graph_ms": None}
            for rival, times in (("fastattn", ours), ("sdpa", softmax))
            for n, ms in zip((1, 2, 4), times, strict=True)
        ]

    assert "From n = 4 on" in report.crossover(entries([1, 9, 1], [2, 2, 8]))
    assert "8.0 times at n = 4" in report.crossover(entries([1, 9, 1], [2, 2, 8]))
    assert "No faster than softmax attention (sdpa) up to n = 4.\n" in report.crossover(
        entries([9, 9, 9], [2, 2, 8])
    )
    assert report.crossover(entries([1, 1, 1], [2, 2, 8])[:3]) == ""


def test_what_takes_the_place_of_stock_has_a_crossover_each():
    entries = [
        {
            "n": n,
            "rival": rival,
            "base": "stock",
            "ms": ms,
            "graph_ms": 1 if rival == "linear" else 2,
        }
        for rival, times in (("stock", [2, 2, 8]), ("linear", [3, 1, 2]), ("bigbird", [9, 9, 9]))
        for n, ms in zip((1, 2, 4), times, strict=True)
    ]
    assert report.crossover(entries) == (
        "linear: from n = 2 on faster than stock, 4.0 times at n = 4; as graphs from n = 1 on.\n"
        "bigbird: no faster than stock up to n = 4; as graphs from n = 1 on.\n"
    )


def test_the_published_page_is_what_the_results_say(tmp_path):
    found = report.load(list(report.RESULTS.glob("*/*.json")))
    assert (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text() == report.page(
        found, tmp_path
    )


@pytest.mark.parametrize("name", ["linear_attention", "block_sparse", "linformer", "fft_conv"])
def test_the_search_puts_candidates_in_place_of_what_tuning_says(name):
    search = pytest.importorskip("search")
    tried = search.candidates(["num_warps=2,16", "maxnreg=0,96"])
    assert len(tried) == 4
    about = {"linear_attention": (64, 64, torch.bfloat16, False)}
    about |= {"block_sparse": (64, 64, 128, torch.bfloat16)}
    about |= {"linformer": (64, 64, 256, torch.bfloat16, False), "fft_conv": (128, False, True)}
    op = search.OPS[name]
    kernel = op.kernels["forward"][-1]
    default = getattr(_tuning, op.tuning)
    with search.Tiles(op) as tiles:
        for candidate in tried:
            tiles.chosen[kernel] = candidate
            found = getattr(_tuning, op.tuning)(kernel, *about[name])
            assert found["num_warps"] == candidate["num_warps"]
            assert found.get("maxnreg", 0) == candidate["maxnreg"]
    assert getattr(_tuning, op.tuning) is default
