"""What a call launches compiles for three generations of GPUs, within their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent
# Bytes of registers in memory on sm_90. attend: of the walk that cleans values, after damage only.
SPILLS = {("causal", "attend_kernel"): 288, ("causal", "grad_keys_kernel"): 80}
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.slow
def test_linear_attention_compiles_for_every_generation():
    """In a process of its own: Triton must not be in interpreter mode."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    calls = [
        "bfloat16 d64",
        "float32 d64",
        "bfloat16 exp",
        "packed causal",
        "state",
        "float16",
        "step",
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "ahead_of_time.py", "linear_attention", *calls],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {f["kernel"] for f in found} == {
        "sum_keys_kernel",
        "attend_kernel",
        "sum_queries_kernel",
        "grad_queries_kernel",
        "grad_keys_kernel",
        "step_kernel",
    }
    for f in found:
        assert f["shared"] <= SHARED[f["capability"]], f
        if f["capability"] == 90 and f["call"].startswith("bfloat16 d64"):
            assert f["stack"] <= SPILLS.get((f["call"].split()[-1], f["kernel"]), 0), f
