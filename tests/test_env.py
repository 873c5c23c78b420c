"""python -m fastattn.env says what can run here, and never fails."""

import json
import subprocess
import sys

import torch

import fastattn
from fastattn import env

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_json_has_versions_devices_and_backends(capsys):
    assert env.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fastattn"] == fastattn.__version__
    assert found["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()
    backends = found["backends, the first runs"]
    first = "triton" if torch.cuda.is_available() else "torch"
    assert backends["linear_attention"].startswith(first)
    assert ("native" in backends["fft_conv"]) == (found["native part"][f"on {DEVICE}"] == "runs")


def test_text_is_one_line_an_entry_and_names_the_variables():
    done = subprocess.run(
        [sys.executable, "-m", "fastattn.env"],
        capture_output=True,
        text=True,
        check=True,
        env={**__import__("os").environ, "FASTATTN_BACKEND": "torch"},
    )
    assert "  FASTATTN_BACKEND: torch" in done.stdout.splitlines()
    assert f"torch: {torch.__version__}" in done.stdout.splitlines()
